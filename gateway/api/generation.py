"""Parts of requests that the text APIs share: conversations, structured outputs, and functions to call.

The gateway checks schemas against `LimitSettings`. Workers compile schemas, and refuse those that they cannot enforce.
Source: OpenAI API reference, "Structured Outputs" and "Function calling"; vLLM, "Structured Outputs"; JSON Schema,
draft 2020-12.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field
from msgspec.structs import replace

from gateway.api.fields import (
    EchoedStruct,
    OpenAiSampling,
    RequestStruct,
    check_chars,
    check_most,
    doc,
    invalid,
    missing,
)
from gateway.calls.surface import NoOptions, Plan
from gateway.http.exchange import RequestContext
from gateway.media.loader import ImageSource
from shared.media import MEDIA
from shared.protocol import (
    THINKING_SWITCHES,
    UNSUPPORTED_KEYWORDS,
    ChatMessage,
    Ending,
    Function,
    Generate,
    Grammar,
    ImagePart,
    ModelCard,
    SamplingParams,
    TemplateOption,
    TextPart,
    Tokenize,
    ToolCall,
    Tools,
    VideoOptions,
    is_deeper,
)
from shared.settings.limits import (
    MAX_FORMAT_DESCRIPTION_CHARS,
    MAX_FORMAT_NAME_CHARS,
    MAX_TOOL_NAME_CHARS,
    LimitSettings,
)

Role = Literal["system", "user", "assistant", "tool"]
Part = TextPart | ImagePart
_MAX_TEMPLATE_OPTIONS = 16
_MAX_OPTION_CHARS = 256
_ANY_OBJECT = '{"type":"object"}'
#: Keywords whose value is a schema or a list of schemas. Keywords in `_NAMED_SCHEMAS` map names to schemas.
_SCHEMAS = frozenset(
    ["items", "additionalProperties", "additionalItems", "anyOf", "oneOf", "allOf", "prefixItems"]
)
_NAMED_SCHEMAS = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_LEASTS = ("minLength", "minItems", "minProperties")
#: Repetition counts, such as {3}. Escapes are skipped, such as the character `\\u{20000}`.
_REPEATED = re.compile(r"\\[uUx]\{[0-9A-Fa-f]+\}|\\.|\{(\d{1,9})", re.DOTALL)
_NAME = re.compile(rf"[A-Za-z0-9_.:/-]{{1,{MAX_TOOL_NAME_CHARS}}}", re.ASCII)
_NO_PARAMETERS = '{"type":"object","properties":{}}'
_invalid_schema = partial(invalid, code="invalid_grammar")


class Conversation(Struct):
    """Messages in the worker's format, the same for all APIs, and the media that they refer to by index."""

    messages: list[ChatMessage] = field(default_factory=list)
    sources: list[ImageSource] = field(default_factory=list)
    num_chars: int = 0
    ending: Ending = "answer"

    def text(self, text: str) -> TextPart:
        self.num_chars += len(text)
        return TextPart(text)

    def medium(self, source: ImageSource, role: Role) -> ImagePart:
        """Add an image, video or audio. Returns the message part that refers to it. Raises: InvalidRequest."""
        if role not in ("user", "tool"):
            plural = MEDIA[source.kind].plural
            raise invalid(source.param, f"{plural} are only allowed in user and tool messages")
        self.sources.append(source)
        return ImagePart(len(self.sources) - 1)

    def file(self, source: ImageSource, role: Role) -> Part:
        """The message part for a `data:` URL of text, an image, a video or audio. Raises: InvalidRequest."""
        media_type, _, encoded = source.url.partition(";base64,")
        form, _, kind = media_type.partition("/")[0].partition(":")
        param = source.param
        if form == "data" and "/" in media_type and kind in MEDIA:
            video = source.if_video or VideoOptions() if kind == "video" else None
            return self.medium(replace(source, video=video, is_audio=kind == "audio"), role)
        if not media_type.startswith(("data:text/", "data:application/json")):
            raise invalid(param, "send a data: URL of text, an image, a video or audio, in base64")
        try:
            return self.text(msgspec.convert(encoded, bytes).decode())
        except (msgspec.ValidationError, UnicodeDecodeError):
            raise invalid(param, "send text in UTF-8, in base64") from None

    def add(
        self,
        role: Role,
        parts: Sequence[Part],
        reasoning: str = "",
        calls: Sequence[ToolCall] = (),
        call_id: str = "",
    ) -> None:
        """Add a message. `reasoning` and `calls`: of the assistant; `call_id`: the call that a tool message answers."""
        self.num_chars += len(reasoning) + sum(len(call.arguments) for call in calls)
        self.messages.append(ChatMessage(role, tuple(parts), reasoning, tuple(calls), call_id))

    def check(self, param: str, limits: LimitSettings, last: str) -> None:
        """Check the length and the last message, which is continued if it is the assistant's. Raises: InvalidRequest.

        `last`: name of the last message's field in errors.
        """
        check_chars(self.num_chars, limits.max_text_chars, param, "context_length_exceeded")
        final = self.messages[-1]
        if final.role != "assistant":
            return
        if final.tool_calls:
            raise invalid(last, "the last message calls tools; send their results after it")
        if any(isinstance(part, TextPart) and part.text.strip() for part in final.parts):
            self.ending = "message"
        elif len(self.messages) > 1:
            self.messages.pop()

    def count(self, options: dict[str, TemplateOption], tools: Tools | None) -> Plan:
        """A plan to count the conversation's tokens. `options`: variables of the chat template."""
        messages, ending = tuple(self.messages), self.ending
        of = Generate(
            messages, SamplingParams(), template_options=options, ending=ending, tools=tools
        )
        return Plan([Tokenize(of, with_ids=False)], NoOptions(), self.sources)


def find_template_options(
    card: ModelCard, given: Mapping[str, TemplateOption] | None, context: RequestContext
) -> dict[str, TemplateOption]:
    """Variables of the chat template that a client sends by name; unknown names are ignored. Raises: InvalidRequest."""
    if not given:
        return {}
    param = "chat_template_kwargs"
    check_most(param, len(given), _MAX_TEMPLATE_OPTIONS, "entries")
    if any(isinstance(v, str) and len(v) > _MAX_OPTION_CHARS for v in given.values()):
        raise invalid(param, f"send strings of at most {_MAX_OPTION_CHARS} characters")
    options = {name: value for name, value in given.items() if name in card.template_options}
    for name in given.keys() - options.keys():
        if name in THINKING_SWITCHES:
            options |= switch_thinking(card, bool(given[name]), f"{param}.{name}", context)
        else:
            context.ignore(f"{param}.{name}")
    return options


def find_effort(
    card: ModelCard, effort: str | None, param: str, context: RequestContext
) -> dict[str, TemplateOption]:
    """The template variable for the reasoning effort. `param` is the client's field."""
    if effort is None:
        return {}
    if "reasoning_effort" in card.template_options:
        return {"reasoning_effort": effort}
    if card.always_thinks and effort != "none":
        return {}
    return switch_thinking(card, effort != "none", param, context)


def switch_thinking(
    card: ModelCard, wanted: bool, param: str, context: RequestContext
) -> dict[str, TemplateOption]:
    """The template variable that switches thinking. If the model has none, the field `param` is ignored."""
    for name in sorted(THINKING_SWITCHES):
        if name in card.template_options:
            return {name: wanted}
    if wanted is not card.always_thinks:
        context.ignore(param)
    return {}


# Structured outputs: JSON, schemas, choices, patterns.


class TextFormat(RequestStruct, frozen=True, tag_field="type", tag="text"):
    """Any text."""


class JsonObjectFormat(RequestStruct, frozen=True, tag_field="type", tag="json_object"):
    """Any JSON object."""


FormatName = Annotated[str, Meta(max_length=MAX_FORMAT_NAME_CHARS)]


class JsonSchema(RequestStruct, frozen=True, kw_only=True):
    schema: Raw
    name: FormatName | None = None
    description: Annotated[str, Meta(max_length=MAX_FORMAT_DESCRIPTION_CHARS)] | None = None
    strict: Annotated[
        bool | None, doc("false ignores keywords of the schema that are not supported.")
    ] = None


class JsonSchemaFormat(RequestStruct, frozen=True, tag_field="type", tag="json_schema"):
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
    if not (found := list(_grammars(fields, limits))):
        return None
    if len(found) > 1:
        raise invalid(found[1].param, f"send it or {found[0].param}, not both")
    return check_grammar(found[0], card)


def check_grammar(grammar: Grammar, card: ModelCard) -> Grammar:
    """Return the grammar. Raises: InvalidRequest if the model's engine cannot constrain answers."""
    if not card.supports_grammars:
        raise invalid(
            grammar.param,
            "this model's engine cannot constrain answers; leave it out",
            code="unsupported_parameter",
        )
    return grammar


def check_constraints(task: Generate, prefix: str = "") -> Generate:
    """Return the task. `prefix`: prefix of sampling fields in errors.

    Raises: InvalidRequest for parameters that may prevent a constrained answer from ending.
    """
    if task.grammar is not None or task.tools is not None:
        for name in ("ignore_eos", "min_tokens", "allowed_token_ids"):
            if getattr(task.sampling, name):
                raise invalid(prefix + name, "unsupported for constrained answers; leave it out")
    return task


def _grammars(fields: StructuredFields, limits: LimitSettings) -> Iterator[Grammar]:
    form = fields.response_format
    if isinstance(form, JsonObjectFormat):
        yield any_object("response_format")
    elif isinstance(form, JsonSchemaFormat):
        asked = form.json_schema
        param = "response_format.json_schema.schema"
        yield schema_grammar(bytes(asked.schema), param, limits, strict=asked.strict)
    asked = fields.structured_outputs
    if asked is None:
        return
    if asked.json_object:
        yield any_object("structured_outputs.json_object")
    prefix = "structured_outputs."
    if asked.json is not UNSET and bytes(asked.json) != b"null":
        yield schema_grammar(unquoted(bytes(asked.json)), prefix + "json", limits)
    if asked.regex is not None:
        _check_pattern(asked.regex, prefix + "regex", limits)
        yield Grammar("regex", asked.regex, prefix + "regex")
    if asked.choice is not None:
        param, source = prefix + "choice", msgspec.json.encode(asked.choice)
        if not 1 <= len(asked.choice) <= limits.max_choice_texts:
            raise invalid(param, f"send 1 to {limits.max_choice_texts} texts")
        check_most(param, len(source), limits.max_schema_bytes, "bytes")
        yield Grammar("choice", source.decode(), param)
    if asked.grammar is not None:
        param = prefix + "grammar"
        if not limits.max_grammar_bytes:
            problem = "grammars are disabled here; send a schema, a regex or choices"
            raise invalid(param, problem, code="unsupported_parameter")
        check_most(param, len(asked.grammar.encode()), limits.max_grammar_bytes, "bytes")
        yield Grammar("lark", asked.grammar, param)


def unquoted(data: bytes) -> bytes:
    """The JSON in `data`, which some clients encode as a JSON string."""
    return msgspec.json.decode(data, type=str).encode() if data[:1] == b'"' else data


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
        raise _invalid_schema(param, "send a JSON Schema") from None
    except RecursionError:  # the schema is in a string, which the check of the body's depth skips
        raise _invalid_schema(param, f"send at most {limits.max_schema_depth} levels") from None
    if not isinstance(content, dict):
        raise _invalid_schema(param, "send a JSON object")
    is_lenient = strict is False
    _SchemaCheck(param, limits, is_lenient).check(content)
    return Grammar("json", schema.decode(), param, is_lenient)


@dataclass
class _SchemaCheck:
    """Checks the limits of a schema, and refuses unsupported keywords. Raises: InvalidRequest."""

    _param: str
    _limits: LimitSettings
    _is_lenient: bool
    _num_values: int = 0

    def check(self, schema: dict[str, Any]) -> None:
        self._check_sizes(schema, self._param, 1)
        self._check_keywords(schema, self._param)

    def _check_sizes(self, value: Any, param: str, depth: int) -> None:
        """Check sizes and nesting, independent of keywords."""
        limits, inner = self._limits, enumerate(value) if isinstance(value, list) else ()
        self._num_values += 1
        if depth > limits.max_schema_depth:
            raise _invalid_schema(param, f"send at most {limits.max_schema_depth} levels")
        if self._num_values > limits.max_schema_values:
            raise _invalid_schema(self._param, f"send at most {limits.max_schema_values} values")
        if isinstance(value, dict):
            inner = value.items()
            if len(value) > (most := limits.max_schema_properties):
                raise _invalid_schema(param, f"send at most {most} properties per object")
        for key, each in inner:
            self._check_sizes(each, _join(param, str(key)), depth + 1)

    def _check_keywords(self, schema: Any, param: str) -> None:
        """Check the keywords of a schema and of the schemas inside it. `_check_sizes` has bounded their depth."""
        limits = self._limits
        for key, value in schema.items() if isinstance(schema, dict) else ():
            place = _join(param, key)
            if key in UNSUPPORTED_KEYWORDS and not self._is_lenient:
                raise _invalid_schema(place, "this keyword is not supported; leave it out")
            if key == "pattern" and isinstance(value, str):
                _check_pattern(value, place, limits)
            elif key == "$ref" and not (isinstance(value, str) and value.startswith("#")):
                raise _invalid_schema(place, "send a reference within the schema (#/...)")
            elif key in _LEASTS and isinstance(value, int | float):
                if value > limits.max_schema_text:
                    raise _invalid_schema(place, f"send at most {limits.max_schema_text}")
            elif key in ("const", "enum"):
                texts, most = value if isinstance(value, list) else [value], limits.max_schema_text
                if any(isinstance(text, str) and len(text) > most for text in texts):
                    raise _invalid_schema(place, f"send values of at most {most} characters")
            else:
                self._check_inner(key, value, place)

    def _check_inner(self, key: str, value: Any, place: str) -> None:
        """Check the schemas in a keyword's value."""
        if key in _SCHEMAS and not isinstance(value, list):
            self._check_keywords(value, place)
        elif key in _SCHEMAS:
            for index, part in enumerate(value):
                self._check_keywords(part, f"{place}/{index}")
        elif key in _NAMED_SCHEMAS and isinstance(value, dict):
            for name, part in value.items():
                if key == "patternProperties":
                    _check_pattern(name, place, self._limits)
                self._check_keywords(part, _join(place, name))


def _check_pattern(pattern: str, param: str, limits: LimitSettings) -> None:
    """Raises: InvalidRequest for a pattern that is too long or has too many repetitions."""
    if len(pattern) > limits.max_pattern_chars:
        raise _invalid_schema(param, f"send at most {limits.max_pattern_chars} characters")
    repeated = math.prod(max(1, int(count or 1)) for count in _REPEATED.findall(pattern))
    if repeated > (most := limits.max_schema_text):
        raise _invalid_schema(param, f"send repetition counts with a product of at most {most}")


_SANE_NAME = re.compile(r"[\w$.-]{1,64}", re.ASCII)


def _join(param: str, name: str) -> str:
    """The path of `name` in a schema. An unusual name becomes `?`, so that errors do not echo it."""
    return f"{param}/{name if _SANE_NAME.fullmatch(name) else '?'}"


# Functions.


class FunctionField(EchoedStruct, frozen=True):
    """A function. Unknown fields are ignored."""

    name: str = ""
    description: str | None = None
    parameters: Raw | UnsetType = UNSET
    strict: bool | None = None


class ToolField(FunctionField, frozen=True):
    """A tool. Types other than `function` are ignored. Some clients omit `function` and send its fields here."""

    type: str = "function"
    function: FunctionField | None = None


class NamedFunction(EchoedStruct, frozen=True):
    name: str


class NamedTool(EchoedStruct, frozen=True):
    function: NamedFunction | None = None
    type: str = "function"


class AllowedTools(EchoedStruct, frozen=True):
    tools: list[NamedTool]
    mode: Literal["auto", "required"] = "auto"


class ChoiceField(EchoedStruct, frozen=True):
    type: Literal["function", "allowed_tools"]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


ToolChoice = Literal["none", "auto", "required"] | ChoiceField


Arguments = str | dict[str, Raw]  #: JSON as a string, or an object


class CalledFunction(EchoedStruct, frozen=True):
    name: Annotated[str, Meta(max_length=MAX_TOOL_NAME_CHARS)]
    arguments: Arguments = "{}"


class CallField(EchoedStruct, frozen=True):
    function: CalledFunction
    id: Annotated[str, Meta(max_length=256)] | None = None
    type: str = "function"


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of a request, independent of the API.

    `functions`: each with the name of its field in the request. `names`: functions that the model may call; None: all.
    """

    functions: Sequence[tuple[str, FunctionField]]
    names: frozenset[str] | None = None
    may_call: bool = True
    must_call: bool = False
    is_parallel: bool = True
    schema_field: str = "parameters"  #: name of the schema's field in the API


def find_tools(offer: Offer, card: ModelCard, limits: LimitSettings) -> Tools | None:
    """The functions that the model may or must call. None: no functions. Raises: InvalidRequest."""
    for param, function in offer.functions:
        if not function.name:
            raise missing(f"{param}.name")
    if not offer.may_call or not (offer.functions or offer.must_call):
        return None
    if not card.supports_grammars:
        if offer.must_call:
            problem = "this model's engine cannot require function calls; send auto or none, or leave it out"
            raise invalid("tool_choice", problem, code="unsupported_parameter")
        return None
    functions = _read_functions(offer, limits)
    if offer.names is not None:
        known = {function.name for function in functions}
        if not offer.names <= known:
            raise invalid("tool_choice", "send only names of functions in tools")
        functions = [function for function in functions if function.name in offer.names]
    if offer.must_call and not functions:
        raise invalid("tool_choice", "there are no functions to call; send tools")
    if not functions:
        return None
    return Tools(tuple(functions), offer.must_call, offer.is_parallel)


def read_offer(
    tools: list[ToolField] | None, choice: ToolChoice | None, is_parallel: bool | None
) -> Offer:
    """The tools of a chat request. Raises: InvalidRequest."""
    functions: list[tuple[str, FunctionField]] = []
    for index, tool in enumerate(tools or ()):
        if tool.type != "function":
            continue
        if tool.function is not None:
            functions.append((f"tools.[{index}].function", tool.function))
        elif tool.name:
            functions.append((f"tools.[{index}]", tool))
        else:
            raise missing(f"tools.[{index}].function")
    names, must_call = _read_choice(choice)
    return Offer(
        functions=functions,
        names=names,
        may_call=choice != "none",
        must_call=must_call,
        is_parallel=is_parallel is not False,
    )


def _read_choice(choice: ToolChoice | None) -> tuple[frozenset[str] | None, bool]:
    """Names of the functions that the model may call (None: all), and whether it must call one."""
    if choice is None or isinstance(choice, str):
        return None, choice == "required"
    if choice.type == "function":
        if choice.function is None:
            raise missing("tool_choice.function")
        return frozenset((choice.function.name,)), True
    if choice.allowed_tools is None:
        raise missing("tool_choice.allowed_tools")
    named = [tool.function for tool in choice.allowed_tools.tools if tool.function is not None]
    names = frozenset(function.name for function in named)
    return names, choice.allowed_tools.mode == "required"


def _read_functions(offer: Offer, limits: LimitSettings) -> list[Function]:
    check_most("tools", len(offer.functions), limits.max_tools)
    functions: dict[str, Function] = {}
    num_bytes = 0
    for param, given in offer.functions:
        function = _read_function(given, param, offer.schema_field, limits)
        if function.name in functions:
            raise invalid(f"{param}.name", "an earlier function has this name; send another")
        functions[function.name] = function
        num_bytes += len(function.parameters)
    unit = f"bytes of {offer.schema_field} in all functions"
    check_most("tools", num_bytes, limits.max_schema_bytes, unit)
    return list(functions.values())


def _read_function(
    given: FunctionField, param: str, schema_field: str, limits: LimitSettings
) -> Function:
    if not _NAME.fullmatch(given.name):
        problem = f"send 1 to {MAX_TOOL_NAME_CHARS} letters, digits, _, -, ., : and /"
        raise invalid(f"{param}.name", problem)
    schema = b"{}" if given.parameters is UNSET else bytes(given.parameters)
    parameters = _NO_PARAMETERS
    if schema not in (b"null", b"{}"):
        strict = bool(given.strict)  # false ignores unsupported keywords
        parameters = schema_grammar(schema, f"{param}.{schema_field}", limits, strict=strict).source
    return Function(given.name, parameters, given.description or "", bool(given.strict))


def read_calls(calls: Sequence[CallField] | None, param: str) -> list[ToolCall]:
    """The calls of a message. A call without an id gets an id from its index. Raises: InvalidRequest."""
    found = []
    for place, call in enumerate(calls or ()):
        name = f"{param}.tool_calls.[{place}].function.arguments"
        arguments = check_arguments(call.function.arguments, name)
        found.append(ToolCall(call.id or f"call_{place}", call.function.name, arguments))
    return found


def check_arguments(arguments: Arguments, param: str) -> str:
    """The arguments of a call as text. Raises: InvalidRequest for JSON that nests too deeply."""
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    if is_deeper(arguments.encode(), most := LimitSettings.max_json_depth):
        raise invalid(param, f"send JSON of at most {most} levels of arrays and objects")
    return arguments
