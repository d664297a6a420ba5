"""Functions that a model may call, in all text APIs.

Source: OpenAI API reference, "Function calling".
"""

import re
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from gateway.api.fields import EchoedStruct, check_most, invalid, missing
from gateway.api.structured import schema_grammar
from gateway.http.body import is_deeper
from shared.protocol import Function, ModelCard, ToolCall, Tools
from shared.settings.limits import MAX_TOOL_NAME_CHARS, LimitSettings

_NAME = re.compile(rf"[A-Za-z0-9_.:/-]{{1,{MAX_TOOL_NAME_CHARS}}}", re.ASCII)
_NO_PARAMETERS = '{"type":"object","properties":{}}'
_NULL = b"null"


class FunctionField(EchoedStruct, frozen=True):
    """A function. Unknown fields are ignored."""

    name: str = ""
    description: str | None = None
    parameters: Raw | UnsetType = UNSET
    strict: bool | None = None


class ToolField(FunctionField, frozen=True):
    """A tool. Types other than `function` are ignored. Some clients send the function's fields at this level."""

    type: str = "function"
    function: FunctionField | None = None


class NamedFunction(EchoedStruct, frozen=True):
    name: str


class NamedTool(EchoedStruct, frozen=True):
    """A tool by its function's name."""

    function: NamedFunction | None = None
    type: str = "function"


class AllowedTools(EchoedStruct, frozen=True):
    """A subset of the tools."""

    tools: list[NamedTool]
    mode: Literal["auto", "required"] = "auto"


class ChoiceField(EchoedStruct, frozen=True):
    """`tool_choice` as an object."""

    type: Literal["function", "allowed_tools"]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


ToolChoice = Literal["none", "auto", "required"] | ChoiceField


Arguments = str | dict[str, Raw]  #: JSON as a string, or an object


class CalledFunction(EchoedStruct, frozen=True):
    name: Annotated[str, Meta(max_length=MAX_TOOL_NAME_CHARS)]
    arguments: Arguments = "{}"


class CallField(EchoedStruct, frozen=True):
    """One call in the history."""

    function: CalledFunction
    id: Annotated[str, Meta(max_length=256)] | None = None
    type: str = "function"


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of a request, independent of the API.

    `functions`: with their field names in the request. `names`: functions that the model may call; None: all.
    """

    functions: Sequence[tuple[str, FunctionField]]
    names: frozenset[str] | None = None
    may_call: bool = True
    must_call: bool = False
    is_parallel: bool = True
    schema_field: str = "parameters"  #: name of the schema's field in the API


def find_tools(offer: Offer, card: ModelCard, limits: LimitSettings) -> Tools | None:
    """The functions that the model may or must call. None: no functions. Raises: InvalidRequest."""
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
    if not functions:
        if offer.must_call:
            raise invalid("tool_choice", "there are no functions to call; send tools")
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
    """Names of functions that may be called, None for all; and whether a call is required."""
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
    for param, field in offer.functions:
        function = _read_function(field, param, offer.schema_field, limits)
        if function.name in functions:
            raise invalid(f"{param}.name", "an earlier function has this name")
        functions[function.name] = function
        num_bytes += len(function.parameters)
    if num_bytes > limits.max_schema_bytes:
        most = limits.max_schema_bytes
        raise invalid(
            "tools", f"send at most {most} bytes of {offer.schema_field} in all functions"
        )
    return list(functions.values())


def _read_function(
    field: FunctionField, param: str, schema_field: str, limits: LimitSettings
) -> Function:
    if not _NAME.fullmatch(field.name):
        problem = f"send 1 to {MAX_TOOL_NAME_CHARS} letters, digits, _, -, ., : and /"
        raise invalid(f"{param}.name", problem)
    schema = b"" if field.parameters is UNSET else bytes(field.parameters)
    parameters = _NO_PARAMETERS
    if schema not in (b"", _NULL, b"{}"):
        strict = bool(field.strict)  # false ignores unsupported keywords
        parameters = schema_grammar(schema, f"{param}.{schema_field}", limits, strict=strict).source
    return Function(field.name, parameters, field.description or "", bool(field.strict))


def read_call(call: CallField, place: int, param: str) -> ToolCall:
    """A call in the history. `place` becomes its id if it has none. Raises: InvalidRequest."""
    arguments = check_arguments(call.function.arguments, f"{param}.function.arguments")
    return ToolCall(call.id or f"call_{place}", call.function.name, arguments)


def check_arguments(arguments: Arguments, param: str) -> str:
    """The arguments of a call as text. Raises: InvalidRequest for JSON that nests too deeply."""
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    if is_deeper(arguments.encode(), most := LimitSettings.max_json_depth):
        raise invalid(param, f"send JSON of at most {most} levels of arrays and objects")
    return arguments
