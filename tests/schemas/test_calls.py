"""Calls are written in fewer steps than they have tokens, in each format, and come out the same."""

import json
import math

import pytest

from engines.core import constraint
from engines.text.tokenizer import HfTokenizer
from shared.protocol import Function
from tests.schemas.calls import FORMATS, CallCase, CallWriter
from tests.schemas.checking import CHECKPOINT

WEATHER = {
    "type": "object",
    "properties": {
        "location": {"type": "string", "description": "City and country."},
        "num_days": {"type": "integer"},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        "include_wind": {"type": "boolean"},
    },
    "required": ["location", "num_days", "unit"],
}
TRIP = {
    "type": "object",
    "properties": {
        "stations": {"type": "array", "items": {"type": "string"}},
        "price_limit": {"type": "number"},
        "passenger": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
            "required": ["name"],
        },
    },
    "required": ["stations", "passenger"],
}
FORECAST = ("get_forecast", {"location": "Oslo", "num_days": 3, "unit": "celsius"})
BOOKED = {
    "stations": ["Bergen", "Voss's halt"],
    "price_limit": 79.5,
    "passenger": {"name": "Kari", "age": 41},
}
ANSWERS = [
    (FORECAST,),
    (("get_forecast", {**FORECAST[1], "include_wind": True}),),
    (("book_train", BOOKED),),
    (("book_train", BOOKED), FORECAST),
]
FUNCTIONS = (
    Function("get_forecast", json.dumps(WEATHER), "The weather of the next days."),
    Function("book_train", json.dumps(TRIP), "Book seats."),
)
CASES = [CallCase("r", "Is there a train?", FUNCTIONS, calls) for calls in ANSWERS]


@pytest.fixture(autouse=True)
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer takes too long: its drafts depend on its tokens alone."""
    for name in ("DRAFT_S", "BURST_S"):
        monkeypatch.setattr(constraint, name, math.inf)


@pytest.fixture(scope="module")
def writer():
    made = CallWriter(HfTokenizer(CHECKPOINT, None))
    yield made
    made.engine.close()


@pytest.mark.parametrize("name", FORMATS)
def test_calls_take_fewer_steps(writer, name):
    for case in CASES:
        outcome = writer.write(case, FORMATS[name])
        assert outcome.refusal == ""
        assert outcome.num_plain_steps >= 1.5 * outcome.num_steps


def test_passing_over_texts_takes_no_steps_more(monkeypatch):
    steps = []
    for num_idle in (constraint.IDLE, math.inf):
        monkeypatch.setattr(constraint, "IDLE", num_idle)
        fresh = CallWriter(HfTokenizer(CHECKPOINT, None))
        steps.append([fresh.write(case, FORMATS["hermes"]).num_steps for case in CASES])
        fresh.engine.close()
    assert steps[0] == steps[1]
