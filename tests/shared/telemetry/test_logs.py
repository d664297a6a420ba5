"""Lines of the log: one object each for machines, one line each for people, whatever a message holds."""

import json
import logging
from datetime import datetime

from shared.telemetry.logs import JsonFormatter, TextFormatter, request_id

NASTY = 'two\nlines "quoted" \u2028 {"level": "forged"}'


def record(message: str = "done", **extra: object) -> logging.LogRecord:
    return logging.Logger("gateway.x").makeRecord(
        "gateway.x", logging.INFO, __file__, 1, message, (), None, extra=extra
    )


def failure() -> logging.LogRecord:
    try:
        raise ValueError(NASTY)
    except ValueError as error:
        made = record("broke")
        made.exc_info = (ValueError, error, error.__traceback__)
        return made


def test_a_json_line_is_one_object_with_the_extra_fields():
    line = JsonFormatter("gateway").format(record(NASTY, tokens=3, e2e_s=0.25))
    assert len(line.splitlines()) == 1
    fields = json.loads(line)
    assert datetime.fromisoformat(fields.pop("time")).utcoffset() is not None
    assert fields == {
        "level": "info", "process": "gateway", "logger": "gateway.x", "message": NASTY,
        "tokens": 3, "e2e_s": 0.25,
    }  # fmt: skip


def test_an_exception_stays_inside_its_json_line():
    line = JsonFormatter("worker").format(failure())
    assert len(line.splitlines()) == 1
    assert "Traceback" in json.loads(line)["exception"]


def test_a_line_of_a_request_names_it():
    token = request_id.set("abc")
    try:
        assert json.loads(JsonFormatter("gateway").format(record()))["request_id"] == "abc"
        assert TextFormatter("gateway").format(record()).endswith("done request_id=abc")
    finally:
        request_id.reset(token)


def test_a_message_cannot_forge_a_text_line():
    line = TextFormatter("gateway").format(record("one\ntwo\rthree", tokens=3))
    assert line.endswith(r"one\ntwo\rthree tokens=3")
    assert "\n" not in line
