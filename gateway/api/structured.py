"""Structured outputs of all text APIs: JSON, schemas, choices, patterns.

The gateway checks schemas against `LimitSettings`. Workers compile schemas, and refuse those that they cannot enforce.
Source: OpenAI API reference, "Structured Outputs"; vLLM, "Structured Outputs"; JSON Schema, draft 2020-12.
"""

import math
import re
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from gateway.api.fields import (
    OpenAiSampling,
    RequestStruct,
    check_most,
    doc,
    invalid,
)
from gateway.http.errors import InvalidRequest
from shared.protocol import UNSUPPORTED_KEYWORDS, Grammar, ModelCard, SamplingParams
from shared.settings.limits import (
    MAX_FORMAT_DESCRIPTION_CHARS,
    MAX_FORMAT_NAME_CHARS,
    LimitSettings,
)

_ANY_OBJECT = '{"type":"object"}'
#: Keywords whose value is a schema or a list of schemas; those of `_NAMED_SCHEMAS` have an object of schemas by name.
_SCHEMAS = frozenset(
    ["items", "additionalProperties", "additionalItems", "anyOf", "oneOf", "allOf", "prefixItems"]
)
_NAMED_SCHEMAS = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_LEASTS = ("minLength", "minItems", "minProperties")
#: Repetition counts, such as {3}. Escapes are skipped, such as the character `\\u{20000}`.
_REPEATED = re.compile(r"\\[uUx]\{[0-9A-Fa-f]+\}|\\.|\{(\d{1,9})", re.DOTALL)


class TextFormat(RequestStruct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """Any text."""


class JsonObjectFormat(
    RequestStruct, frozen=True, kw_only=True, tag_field="type", tag="json_object"
):
    """Any JSON object."""


class JsonSchema(RequestStruct, frozen=True, kw_only=True):
    """A schema that an answer conforms to."""

    schema: Raw
    name: Annotated[str, Meta(max_length=MAX_FORMAT_NAME_CHARS)] | None = None
    description: Annotated[str, Meta(max_length=MAX_FORMAT_DESCRIPTION_CHARS)] | None = None
    strict: Annotated[
        bool | None, doc("false ignores keywords of the schema that are not supported.")
    ] = None


class JsonSchemaFormat(
    RequestStruct, frozen=True, kw_only=True, tag_field="type", tag="json_schema"
):
    json_schema: JsonSchema


class StructuredOutputs(RequestStruct, frozen=True, kw_only=True):
    """vLLM's object: send one of its fields."""

    json: Raw | UnsetType = UNSET
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class StructuredFields(OpenAiSampling, frozen=True, kw_only=True):
    """Fields that constrain an answer; a request has at most one."""

    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    structured_outputs: Annotated[StructuredOutputs | None, doc("vLLM's constraints.")] = None


def find_grammar(
    fields: StructuredFields, card: ModelCard, limits: LimitSettings
) -> Grammar | None:
    """The grammar of the answer. None: free text. Raises: InvalidRequest."""
    if fields.response_format is None and fields.structured_outputs is None:
        return None
    if not (found := list(_grammars(fields, limits))):
        return None
    if len(found) > 1:
        raise invalid(found[1].param, f"send it or {found[0].param}, not both")
    check_grammar(found[0], card)
    return found[0]


def check_grammar(grammar: Grammar, card: ModelCard) -> None:
    """Raises: InvalidRequest if the model's engine supports no grammars."""
    if not card.supports_grammars:
        raise invalid(
            grammar.param,
            "this model's engine cannot constrain answers; leave it out",
            code="unsupported_parameter",
        )


def check_with_grammar(sampling: SamplingParams) -> None:
    """Raises: InvalidRequest for parameters that may prevent a constrained answer from ending."""
    for name in ("ignore_eos", "min_tokens"):
        if getattr(sampling, name):
            raise invalid(name, "a constrained answer ends when complete; leave it out")
    if sampling.allowed_token_ids:
        raise invalid("allowed_token_ids", "unsupported for constrained answers; leave it out")


def _grammars(fields: StructuredFields, limits: LimitSettings) -> Iterator[Grammar]:
    form = fields.response_format
    if isinstance(form, JsonObjectFormat):
        yield any_object("response_format")
    elif isinstance(form, JsonSchemaFormat):
        asked = form.json_schema
        param = "response_format.json_schema.schema"
        yield schema_grammar(bytes(asked.schema), param, limits, strict=asked.strict)
    asked = fields.structured_outputs or StructuredOutputs()
    if asked.json_object:
        yield any_object("structured_outputs.json_object")
    prefix = "structured_outputs."
    if asked.json is not UNSET and bytes(asked.json) != b"null":
        yield schema_grammar(unquoted(bytes(asked.json)), prefix + "json", limits)
    if asked.regex is not None:
        _check_pattern(asked.regex, prefix + "regex", limits)
        yield Grammar("regex", asked.regex, prefix + "regex")
    if asked.choice is not None:
        yield _choice_grammar(asked.choice, prefix + "choice", limits)
    if asked.grammar is not None:
        yield _lark_grammar(asked.grammar, prefix + "grammar", limits)


def unquoted(data: bytes) -> bytes:
    """The JSON of `data`, which some clients send in a string."""
    return msgspec.json.decode(data, type=str).encode() if data[:1] == b'"' else data


def _choice_grammar(texts: list[str], param: str, limits: LimitSettings) -> Grammar:
    if not 1 <= len(texts) <= limits.max_choice_texts:
        raise invalid(param, f"send 1 to {limits.max_choice_texts} texts")
    source = msgspec.json.encode(texts)
    check_most(param, len(source), limits.max_schema_bytes, "bytes")
    return Grammar("choice", source.decode(), param)


def _lark_grammar(source: str, param: str, limits: LimitSettings) -> Grammar:
    if not limits.max_grammar_bytes:
        problem = "grammars are disabled here; send a schema, a regex or choices"
        raise invalid(param, problem, code="unsupported_parameter")
    check_most(param, len(source.encode()), limits.max_grammar_bytes, "bytes")
    return Grammar("lark", source, param)


def any_object(param: str) -> Grammar:
    return Grammar("json", _ANY_OBJECT, param)


def schema_grammar(
    schema: bytes, param: str, limits: LimitSettings, *, strict: bool | None = None
) -> Grammar:
    """A grammar for a JSON schema. Raises: InvalidRequest whose `param` is a path in the schema."""
    check_most(param, len(schema), limits.max_schema_bytes, "bytes")
    try:
        content = msgspec.json.decode(schema)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise _invalid_schema(param, "send JSON") from None
    except RecursionError:  # nesting was not checked if it came as a string
        raise _invalid_schema(param, f"send at most {limits.max_schema_depth} levels") from None
    if not isinstance(content, dict):
        raise _invalid_schema(param, "send an object")
    is_lenient = strict is False
    _SchemaCheck(param, limits, is_lenient=is_lenient).check(content)
    return Grammar("json", schema.decode(), param, is_lenient)


class _SchemaCheck:
    """Checks the limits of a schema, and refuses unsupported keywords. Raises: InvalidRequest."""

    def __init__(self, param: str, limits: LimitSettings, *, is_lenient: bool) -> None:
        self._param = param
        self._limits = limits
        self._is_lenient = is_lenient
        self._num_values = 0

    def check(self, schema: dict[str, Any]) -> None:
        self._look(schema, self._param, 1)
        waiting: list[tuple[Any, str]] = [(schema, self._param)]
        while waiting:
            found, param = waiting.pop()
            if isinstance(found, dict):
                waiting += self._check_keywords(found, param)

    def _look(self, value: Any, param: str, depth: int) -> None:
        """Check sizes and nesting, independent of keywords."""
        limits = self._limits
        self._num_values += 1
        if depth > limits.max_schema_depth:
            raise _invalid_schema(param, f"send at most {limits.max_schema_depth} levels")
        if self._num_values > limits.max_schema_values:
            raise _invalid_schema(self._param, f"send at most {limits.max_schema_values} values")
        if isinstance(value, dict):
            if len(value) > limits.max_schema_properties:
                most = limits.max_schema_properties
                raise _invalid_schema(param, f"send at most {most} properties of an object")
            for key, each in value.items():
                self._look(each, _join(param, key), depth + 1)
        elif isinstance(value, list):
            for index, each in enumerate(value):
                self._look(each, f"{param}/{index}", depth + 1)

    def _check_keywords(self, schema: dict[str, Any], param: str) -> Iterator[tuple[Any, str]]:
        """Check the keywords of one schema; yields the schemas inside it."""
        limits = self._limits
        for key, value in schema.items():
            place = _join(param, key)
            if key in UNSUPPORTED_KEYWORDS and not self._is_lenient:
                raise _invalid_schema(place, "this keyword is not supported; leave it out")
            if key == "pattern" and isinstance(value, str):
                _check_pattern(value, place, limits)
            elif key == "$ref" and not (isinstance(value, str) and value.startswith("#")):
                raise _invalid_schema(place, "send a reference into the schema itself (#/...)")
            elif key in _LEASTS and isinstance(value, int | float):
                if value > limits.max_schema_text:
                    raise _invalid_schema(place, f"send at most {limits.max_schema_text}")
            elif key in ("const", "enum"):
                self._check_texts(value, place)
            else:
                yield from self._schemas_of(key, value, place)

    def _schemas_of(self, key: str, value: Any, place: str) -> Iterator[tuple[Any, str]]:
        """The schemas in a keyword's value."""
        if key in _SCHEMAS:
            if isinstance(value, list):
                yield from ((part, f"{place}/{i}") for i, part in enumerate(value))
            else:
                yield value, place
        elif key in _NAMED_SCHEMAS and isinstance(value, dict):
            for name, part in value.items():
                if key == "patternProperties":
                    _check_pattern(name, place, self._limits)
                yield part, _join(place, name)

    def _check_texts(self, value: Any, param: str) -> None:
        most = self._limits.max_schema_text
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and len(text) > most:
                raise _invalid_schema(param, f"send values of at most {most} characters")


def _check_pattern(pattern: str, param: str, limits: LimitSettings) -> None:
    """Raises: InvalidRequest for a pattern that is too long, or repeats too often."""
    if len(pattern) > limits.max_pattern_chars:
        raise _invalid_schema(param, f"send at most {limits.max_pattern_chars} characters")
    repeated = math.prod(max(1, int(count or 1)) for count in _REPEATED.findall(pattern))
    if repeated > limits.max_schema_text:
        most = limits.max_schema_text
        raise _invalid_schema(param, f"send repetitions whose product is at most {most}")


def _invalid_schema(param: str, problem: str) -> InvalidRequest:
    return invalid(param, problem, code="invalid_grammar")


_SANE_NAME = re.compile(r"[\w$.-]{1,64}", re.ASCII)


def _join(param: str, name: str) -> str:
    return (
        f"{param}/{name if _SANE_NAME.fullmatch(name) else '?'}"  # the client's text is not echoed
    )
