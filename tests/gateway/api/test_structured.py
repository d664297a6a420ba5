"""Structured outputs: the fields that request them, their limits, and the grammar sent to the worker."""

import json
from typing import Any

import msgspec
import pytest

from gateway.api.generation import StructuredFields, find_grammar, schema_grammar
from gateway.http.errors import InvalidRequest
from shared.protocol import Grammar
from shared.settings.limits import LimitSettings
from tests.factories_gateway import CARD, CHAT, MODEL, TEXT_BODIES
from tests.factories_settings import make_group

LIMITS = LimitSettings()
ABLE = msgspec.structs.replace(CARD, supports_grammars=True)
CANARY = "canary"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"not": {"type": "string"}}}
WHERE = "response_format.json_schema.schema"


def grammar_of(fields: dict[str, Any], limits: LimitSettings = LIMITS) -> Grammar | None:
    asked = msgspec.json.decode(msgspec.json.encode(fields), type=StructuredFields)
    return find_grammar(asked, ABLE, limits)


def schema_format(schema: Any, **fields: Any) -> dict[str, Any]:
    form = {"name": "answer", "schema": schema, **fields}
    return {"response_format": {"type": "json_schema", "json_schema": form}}


ANY_OBJECT = '{"type":"object"}'
COMPACT = json.dumps(SCHEMA, separators=(",", ":"))


OUTPUTS = "structured_outputs"
MEANT = [
    ({}, None),
    ({"response_format": None, OUTPUTS: {"json": None}}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, ("json", ANY_OBJECT, "response_format")),
    (schema_format(SCHEMA), ("json", COMPACT, WHERE)),
    (schema_format(SCHEMA, strict=True, description="x"), ("json", COMPACT, WHERE)),
    (schema_format({"not": {}}, strict=False), ("json", '{"not":{}}', WHERE, True)),  # lenient
    *[({OUTPUTS: {"json": value}}, ("json", COMPACT, f"{OUTPUTS}.json")) for value in (SCHEMA, COMPACT)],
    ({OUTPUTS: {"json_object": True}}, ("json", ANY_OBJECT, f"{OUTPUTS}.json_object")),
    ({OUTPUTS: {"regex": "a+"}}, ("regex", "a+", f"{OUTPUTS}.regex")),
    ({OUTPUTS: {"choice": ["a", "b"]}}, ("choice", '["a","b"]', f"{OUTPUTS}.choice")),
]  # fmt: skip


def test_each_field_becomes_a_grammar():
    for fields, expected in MEANT:
        assert grammar_of(fields) == (expected and Grammar(*expected))


def test_grammars_are_refused_unless_the_operator_allows_them():
    with pytest.raises(InvalidRequest) as caught:
        grammar_of({"structured_outputs": {"grammar": "start: /a/"}})
    assert (caught.value.param, caught.value.code) == (
        "structured_outputs.grammar",
        "unsupported_parameter",
    )
    limits = make_group(LimitSettings, max_grammar_bytes=10)
    expected = Grammar("lark", "start: /a/", "structured_outputs.grammar")
    assert grammar_of({"structured_outputs": {"grammar": "start: /a/"}}, limits) == expected
    with pytest.raises(InvalidRequest, match="at most 10 bytes"):
        grammar_of({"structured_outputs": {"grammar": "start: /ab/"}}, limits)


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("right", "wrong", "place"),
    [
        (deep(32), deep(33), "/items" * 32),
        ({"enum": ["x" * 4096]}, {"enum": ["x" * 4097]}, "/enum"),
        ({"minLength": 4096}, {"minLength": 4097}, "/minLength"),
        ({"pattern": "x" * 1024}, {"pattern": "x" * 1025}, "/pattern"),
        ({"pattern": "(a{64}){64}"}, {"pattern": "(a{64}){65,}"}, "/pattern"),
        ({"pattern": r"\u{20000}\x{41}{9}\{9999"}, {"pattern": r"\\u{20000}"}, "/pattern"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {}}}, {"$ref": "http://canary/a"}, "/$ref"),
        ({"properties": {str(i): {} for i in range(1000)}},
         {"properties": {str(i): {} for i in range(1001)}}, "/properties"),
        ({"enum": list(range(9998))}, {"enum": list(range(9999))}, ""),
        ({"properties": {"not": {}}}, {"properties": {"a": {"not": {}}}}, "/properties/a/not"),
        ({"properties": {CANARY: True}}, {"properties": {"canary ": {"not": {}}}}, "/properties/?/not"),
        ({"x": "y" * (64 * 1024 - 8)}, {"x": "y" * (64 * 1024 - 7)}, ""),
    ],
)  # fmt: skip
def test_schemas_are_bounded_and_errors_name_the_place(right, wrong, place):
    encoded = [msgspec.json.encode(schema) for schema in (right, wrong)]
    schema_grammar(encoded[0], "schema", LIMITS)
    with pytest.raises(InvalidRequest) as caught:
        schema_grammar(encoded[1], "schema", LIMITS)
    assert caught.value.param == f"schema{place}"
    assert caught.value.code in ("invalid_grammar", "invalid_value")
    assert CANARY not in caught.value.message


BAD = [
    *[(schema_format(value), WHERE) for value in ([1], "x")],
    *[({"structured_outputs": {"json": value}}, "structured_outputs.json")
      for value in ("{", '"{}"', '{"a":' * 5000 + "1" + "}" * 5000)],
    *[({"structured_outputs": {"choice": value}}, "structured_outputs.choice")
      for value in ([], ["x"] * 1001, ["x" * 70_000])],
    ({"structured_outputs": {"regex": "x{5000}"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "x", "choice": ["x"]}}, "structured_outputs.choice"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "x"}}, "structured_outputs.regex"),
]  # fmt: skip


def test_invalid_structured_outputs_are_refused():
    for fields, param in BAD:
        with pytest.raises(InvalidRequest) as caught:
            grammar_of(fields)
        # Python 3.13 decodes deeper JSON; the error then names the place within the schema
        assert caught.value.param.partition("/")[0] == param


KINDS = {"type": "object", "properties": {"kind": {"type": "string"}}, "required": ["kind"]}
FORMAT = {"type": "json_schema", "schema": KINDS}


@pytest.mark.parametrize("card", [ABLE])
async def test_every_text_api_accepts_a_schema_in_its_own_field(gateway, worker):
    for path, fields, param in (
        (CHAT, schema_format(KINDS), WHERE),
        ("/v1/completions", {"structured_outputs": {"json": KINDS}}, "structured_outputs.json"),
        ("/v1/responses", {"text": {"format": {**FORMAT, "name": "x"}}}, "text.format.schema"),
        ("/v1/messages", {"output_config": {"format": FORMAT}}, "output_config.format.schema"),
        ("/api/chat", {"format": KINDS}, "format"),
        ("/api/generate", {"format": KINDS}, "format"),
    ):
        choices = {"n": 2} if path == CHAT else {}
        body = {"model": MODEL, **TEXT_BODIES[path], **fields, **choices}
        response = await gateway.client.post(path, json=body)
        assert response.status_code == 200, response.text
        grammars = [request.task.grammar for request in worker.requests]
        found = [(each.kind, each.param, json.loads(each.source)) for each in grammars]
        assert found == [("json", param, KINDS)] * choices.get("n", 1)
        for name, value in {"ignore_eos": True, "min_tokens": 1, "allowed_token_ids": [1]}.items():
            prefix = "options." if path.startswith("/api/") else ""  # EOS cannot be forbidden
            changes = {"options": {name: value}} if prefix else {name: value}
            response = await gateway.client.post(path, json={**body, **changes})
            assert response.status_code == 400, response.text
            assert f"Invalid value for {prefix}{name}: unsupported" in response.text
        worker.answers.clear()
