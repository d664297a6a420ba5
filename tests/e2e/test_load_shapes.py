"""A load of images on the built-in model: every answer about its samples is right while many are asked at once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.albums import PAIR_FACTS, SAMPLE_FACTS
from tests.integration.fleet_process import Served, run_vlm, start_fleet
from tests.loadtest.factories import load_result
from tests.long import long

pytestmark = long("accuracy")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory) -> Iterator[Served]:
    served = start_fleet(tmp_path_factory.mktemp("shapes"), engine="torch")
    yield served
    served.end()


@pytest.mark.parametrize(
    ("profile", "facts"),
    [("image", SAMPLE_FACTS), ("several", PAIR_FACTS), ("conversation", SAMPLE_FACTS)],
)
def test_every_answer_about_the_samples_is_right(fleet, tmp_path: Path, profile, facts):
    path = tmp_path / "run.json"
    options = ["--profile", profile, "--duration", "8", "--json", str(path)]
    done = run_vlm("loadtest", "--host", fleet.url, *options)
    assert done.returncode == 0, done.stderr
    assert len(load_result(path).records) > sum(map(len, facts.values()))
