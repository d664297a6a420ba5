"""The example applications return the documented output."""

import base64
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from deploy.pack import pack
from engines.application.engine import ApplicationEngine
from engines.application.settings import ApplicationSettings
from shared.protocol import ErrorCode
from tests.engines.application.test_engine import Driver, lines_of
from tests.long import long

ROOT = Path(__file__).parents[3]
SAMPLE = ROOT / "engines" / "packages" / "shapes" / "samples" / "shapes.png"


def start(name: str) -> Driver:
    folder = ROOT / "examples" / name
    config = pack(str(folder)).manifest.config
    settings = ApplicationSettings.model_validate(
        {"model": str(folder), "entry": config.entry, "command": _json(config.command)}
    )
    return Driver(ApplicationEngine(settings))


def _json(words: tuple[str, ...]) -> str:
    return "[" + ",".join(f'"{word}"' for word in words) + "]"


@pytest.fixture
def words() -> Iterator[Driver]:
    driver = start("words")
    yield driver
    driver.engine.close()


def test_a_script_counts_words(words):
    assert words.ask("one two\nthree") == {"words": 3}
    assert words.refused({"a": 1}) == (ErrorCode.TASK_FAILED, "send a text")


@long("applications")
def test_the_caption_example_runs_the_built_in_model():
    driver = start("captioner")
    with closing(driver.engine):
        driver.add({"image": base64.b64encode(SAMPLE.read_bytes()).decode()}, is_streamed=True)
        *pieces, _ = lines_of(driver.finish())
        caption = "".join(piece["item"] for piece in pieces)
        assert "a red star" in caption
        assert len(pieces) > 5
        code, message = driver.refused({"image": "no"})
        assert code is ErrorCode.TASK_FAILED
        assert message.startswith('send {"image": BASE64')
