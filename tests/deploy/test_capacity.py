"""`vlm plan`: the arithmetic, the figures that benchmarks write, and the output of the command."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner, Result

import vlm
from deploy.capacity import (
    BUILT_IN,
    EngineFigures,
    FleetFigures,
    Load,
    NoFigures,
    make_plan,
    read_figures,
)

FLEET = FleetFigures(
    "two cores",
    {"gateway": 1e-3, "worker": 1e-3, "redis-server": 0.5e-3},
    {"gateway": 20e-6, "worker": 20e-6, "redis-server": 10e-6},
    {"gateway": 1e-3, "worker": 1e-3, "redis-server": 1e-3},
    100_000,
)
ENGINE = EngineFigures("a GPU", "some-model", 32, 1e-3, 1e-4, 0.1)
LOAD = Load(rate=10, prompt_tokens=1000, output_tokens=100, images=1, image_bytes=200_000)


def test_a_plan_multiplies_the_load_by_the_costs():
    plan = make_plan(LOAD, FLEET, ENGINE)
    # 100 ms each for output, prompt and image; an image of twice the measured size counts twice.
    assert plan.busy["engine"] == pytest.approx(10 * 0.3)
    assert plan.busy["gateway"] == pytest.approx(10 * (1e-3 + 2e-3 + 2e-3))
    assert plan.busy["redis-server"] == pytest.approx(10 * (0.5e-3 + 1e-3 + 2e-3))
    assert (plan.workers, plan.gateways, plan.shards) == (5, 1, 1)  # 3 / 70 %
    answer_s = 32 * 0.3
    expected = 10 * (200_000 * (answer_s + 30) + 100 * 150 * (answer_s + 60))
    assert plan.redis_bytes == pytest.approx(expected)


def test_a_model_without_images_has_no_plan_for_images():
    text_only = EngineFigures("a GPU", "some-model", 32, 1e-3, 1e-4)
    with pytest.raises(NoFigures, match="some-model was measured without images"):
        make_plan(LOAD, FLEET, text_only)
    assert make_plan(replace(LOAD, images=0), FLEET, text_only).workers == 3


def test_figures_without_the_times_of_a_role_are_refused(tmp_path):
    path = tmp_path / "figures.json"
    path.write_text(BUILT_IN.read_text().replace("redis-server", "redis"))
    done = plan("--rate", 1, "--figures", path)
    assert (done.exit_code, "redis-server are needed" in done.stderr) == (1, True)


def plan(*arguments: object) -> Result:
    return CliRunner().invoke(vlm.app, ["plan", *map(str, arguments)], env={"COLUMNS": "200"})


def test_the_command_plans_with_the_figures_of_the_built_in_model():
    done = plan("--rate", 1000, "--tokens", 50)
    assert done.exit_code == 0, done.output
    rows = {line.split("  ")[0]: line.split() for line in done.stdout.splitlines() if line}
    found = read_figures(BUILT_IN)
    assert found.fleet is not None
    assert found.engine is not None
    load = Load(1000, 200, 50, 1.0, 200_000)
    expected = make_plan(load, found.fleet, found.engine)
    assert int(rows["workers"][1]) == expected.workers > 1
    assert int(rows["gateways"][1]) == expected.gateways
    assert int(rows["Redis servers"][2]) == expected.shards
    assert found.engine.model in done.stdout
