"""Functions that a model may call, as all APIs that write text offer them.

Pure. Source: OpenAI API reference, "Function calling".
"""

import re
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from gateway.api.fields import invalid, missing
from gateway.api.structured import schema_grammar
from shared.protocol import CallPiece, Function, ModelCard, ToolCall, Tools
from shared.settings.limits import MAX_TOOL_NAME_CHARS, LimitSettings

_NAME = re.compile(rf"[A-Za-z0-9_.:/-]{{1,{MAX_TOOL_NAME_CHARS}}}", re.ASCII)
_NO_PARAMETERS = '{"type":"object","properties":{}}'
_NULL = b"null"


class FunctionField(msgspec.Struct, frozen=True):
    """A function. Fields that are not known are skipped: clients keep some of their own here."""

    name: str = ""
    description: str | None = None
    parameters: Raw | UnsetType = UNSET
    strict: bool | None = None


class ToolField(msgspec.Struct, frozen=True):
    """A tool; those that are no functions are somebody else's."""

    type: str = "function"
    function: FunctionField | None = None


class NamedFunction(msgspec.Struct, frozen=True):
    """A function by its name."""

    name: str


class NamedTool(msgspec.Struct, frozen=True):
    """A tool by its function's name."""

    function: NamedFunction | None = None
    type: str = "function"


class AllowedTools(msgspec.Struct, frozen=True):
    """Some of the tools."""

    tools: list[NamedTool]
    mode: Literal["auto", "required"] = "auto"


class ChoiceField(msgspec.Struct, frozen=True):
    """`tool_choice` as an object."""

    type: Literal["function", "allowed_tools"]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


ToolChoice = Literal["none", "auto", "required"] | ChoiceField


class CalledFunction(msgspec.Struct, frozen=True):
    """What the assistant has called."""

    name: Annotated[str, Meta(max_length=MAX_TOOL_NAME_CHARS)]
    arguments: str = "{}"


class CallField(msgspec.Struct, frozen=True):
    """One call in the history."""

    function: CalledFunction
    id: Annotated[str, Meta(max_length=256)] | None = None
    type: str = "function"


def find_tools(
    tools: list[ToolField] | None,
    choice: ToolChoice | None,
    is_parallel: bool | None,
    card: ModelCard,
    limits: LimitSettings,
) -> Tools | None:
    """What the model may call, or has to; None: nothing. Raises: InvalidRequest."""
    names, must_call = _read_choice(choice)
    if choice == "none" or not (tools or must_call):
        return None
    if not card.supports_grammars:
        if must_call:
            problem = "this model's engine cannot make it call functions; send auto or none, or leave it out"
            raise invalid("tool_choice", problem, code="unsupported_parameter")
        return None
    functions = _read_functions(tools or [], limits)
    if names is not None:
        known = {function.name for function in functions}
        if not names <= known:
            raise invalid("tool_choice", "it names a function that is not among tools")
        functions = [function for function in functions if function.name in names]
    if not functions:
        if must_call:
            raise invalid("tool_choice", "there are no functions to call; send tools")
        return None
    return Tools(tuple(functions), must_call, is_parallel is not False)


def _read_choice(choice: ToolChoice | None) -> tuple[set[str] | None, bool]:
    """Names of functions that may be called, None for all; and whether one must be."""
    if choice is None or isinstance(choice, str):
        return None, choice == "required"
    if choice.type == "function":
        if choice.function is None:
            raise missing("tool_choice.function")
        return {choice.function.name}, True
    if choice.allowed_tools is None:
        raise missing("tool_choice.allowed_tools")
    named = [tool.function for tool in choice.allowed_tools.tools if tool.function is not None]
    return {function.name for function in named}, choice.allowed_tools.mode == "required"


def _read_functions(tools: list[ToolField], limits: LimitSettings) -> list[Function]:
    if len(tools) > limits.max_tools:
        raise invalid("tools", f"send at most {limits.max_tools}")
    functions: dict[str, Function] = {}
    num_bytes = 0
    for index, tool in enumerate(tools):
        if tool.type != "function":
            continue
        param = f"tools.[{index}].function"
        if tool.function is None:
            raise missing(param)
        function = _read_function(tool.function, param, limits)
        if function.name in functions:
            raise invalid(f"{param}.name", "it is the name of an earlier one")
        functions[function.name] = function
        num_bytes += len(function.parameters)
    if num_bytes > limits.max_schema_bytes:
        most = limits.max_schema_bytes
        raise invalid("tools", f"send at most {most} bytes of parameters in all functions")
    return list(functions.values())


def _read_function(field: FunctionField, param: str, limits: LimitSettings) -> Function:
    if not _NAME.fullmatch(field.name):
        problem = f"send 1 to {MAX_TOOL_NAME_CHARS} letters, digits, _, -, ., : and /"
        raise invalid(f"{param}.name", problem)
    schema = b"" if field.parameters is UNSET else bytes(field.parameters)
    parameters = _NO_PARAMETERS
    if schema not in (b"", _NULL, b"{}"):
        strict = bool(field.strict)  # what others ask for is kept where it can be
        parameters = schema_grammar(schema, f"{param}.parameters", limits, strict=strict).source
    return Function(field.name, parameters, field.description or "", bool(field.strict))


def read_call(call: CallField, place: int) -> ToolCall:
    """A call of the history; `place` stands for an id that it lacks."""
    return ToolCall(call.id or f"call_{place}", call.function.name, call.function.arguments)


def call_id(answer_id: str, choice: int, index: int) -> str:
    """The id of a call in an answer: the same for every reader of a stream."""
    return f"call_{answer_id[-20:]}{choice:02x}{index:02x}"


class CallAnswer(msgspec.Struct):
    """A call in an answer."""

    id: str
    name: str
    arguments: str


class GatheredCalls:
    """The calls of one choice so far, for answers that are whole."""

    def __init__(self, answer_id: str, choice: int) -> None:
        self._answer_id = answer_id
        self._choice = choice
        self.calls: list[CallAnswer] = []

    def add(self, pieces: tuple[CallPiece, ...]) -> None:
        """Take what comes next."""
        for piece in pieces:
            if piece.index == len(self.calls):
                made = call_id(self._answer_id, self._choice, piece.index)
                self.calls.append(CallAnswer(made, piece.name, ""))
            self.calls[piece.index].arguments += piece.arguments
