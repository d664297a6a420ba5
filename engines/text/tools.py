"""Functions that a model may call: how families write calls, how others are told, how calls are read.

Called by the engine. What a model may write is a grammar made of the functions, so that what it writes has
one shape for each family, and is read without guessing. It must not know tensors.
"""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from shared.protocol import CallPiece, ChatMessage, Function, ImagePart, TextPart, ToolCall, Tools

_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family writes calls: `trigger begin open NAME middle ARGUMENTS close`, between calls `separator`, last `end`."""

    name: str
    #: Tells a call from text, wherever it comes; empty: an answer is text unless it begins with `opening`.
    trigger: str
    begin: str
    middle: str
    separator: str
    end: str
    opening: str = '{"name": "'
    close: str = "}"
    #: Of a string whose schema has no bounds; none: as long as the answer may be.
    max_text_chars: int | None = None


HERMES = ToolFormat(
    "hermes",
    "<tool_call>",
    "\n",
    '", "arguments": ',
    "\n</tool_call>\n<tool_call>\n",
    "\n</tool_call>",
)
#: For models that no template teaches to call: nothing told them when to end a string, or a list of members.
TOLD = dataclasses.replace(HERMES, name="told", max_text_chars=64)
_MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", " [", '", "arguments": ', ", ", "]")
_LLAMA3 = ToolFormat("llama3", "", "", '", "parameters": ', "; ", "")


def find_tool_format(template: str) -> ToolFormat | None:
    """The format that a chat template with a place for tools spells; None: one that nobody here reads.

    Source: the chat templates of the families, as they are published.
    """
    if "<tool_call>" in template:
        is_xml = "<arg_key>" in template or "<function=" in template
        return None if is_xml else HERMES
    if "[TOOL_CALLS]" in template:
        return None if "[ARGS]" in template else _MISTRAL
    if '"parameters": ' in template and "ipython" in template:
        return _LLAMA3
    return None


def to_openai(function: Function) -> dict[str, Any]:
    """A function as chat templates know it."""
    described = {"description": function.description} if function.description else {}
    parameters = json.loads(function.parameters)
    shown = {"name": function.name, **described, "parameters": parameters}
    return {"type": "function", "function": shown}


def to_shown(call: ToolCall) -> dict[str, Any]:
    """A call as chat templates know it; they want its arguments as an object."""
    arguments: Any = call.arguments
    with suppress(ValueError, RecursionError):
        arguments = json.loads(call.arguments)
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def to_rules(tools: Tools, form: ToolFormat, *, is_loose: bool = False) -> str:
    """Rules in Lark's language: `calls`, and `said` for text that may end in calls.

    `is_loose`: whatever the functions want, arguments are any object.
    """
    rules = [f"begun: {_text(form.begin)} one" if form.begin else "begun: one"]
    names = []
    for place, function in enumerate(tools.functions):
        schema = _ANY_OBJECT if is_loose else _schema_of(function, form.max_text_chars)
        names.append(f"call{place}")
        rules += [
            f"call{place}: {_text(form.opening + function.name + form.middle)} of{place} {_text(form.close)}",
            f"of{place}: %json {json.dumps(schema)}",
        ]
    rules.append(f"one: {' | '.join(names)}")
    more = f" ({_text(form.separator)} one)*" if tools.is_parallel else ""
    end = f" {_text(form.end)}" if form.end else ""
    trigger = f"{_text(form.trigger)} " if form.trigger else ""
    rules.append(f"calls: {trigger}begun{more}{end}")
    if form.trigger:
        rules += [
            f"lead[suffix={_text(form.trigger)}]: /(?s:.*)/",
            "words: /(?s:.*)/",
            f"said: lead begun{more}{end} | words",
        ]
    else:
        rules += [r"words: /([^{](?s:.*))?/", "said: calls | words"]
    return "\n".join(rules)


def _text(text: str) -> str:
    return json.dumps(text)


def _schema_of(function: Function, max_text_chars: int | None) -> dict[str, Any]:
    schema = json.loads(function.parameters)
    if max_text_chars is not None:
        _bound(schema, max_text_chars)
    if not any(key in schema for key in ("type", "$ref", "anyOf", "oneOf", "allOf")):
        schema = _ANY_OBJECT | schema
    options = {"whitespace_pattern": " ?", "lenient": not function.is_strict}
    return schema | {"x-guidance": options}


#: Keywords that say how long a string is.
_TEXT_BOUNDS = frozenset(("enum", "const", "pattern", "format", "maxLength"))
#: Keywords beside which members that are not named have a meaning.
_MEMBER_BOUNDS = frozenset(
    ("additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref")
)


def _bound(schema: Any, max_text_chars: int) -> None:
    """Write bounds into a schema where it has none: what conforms to it still conforms to the original."""
    if isinstance(schema, list):
        for each in schema:
            _bound(each, max_text_chars)
    if not isinstance(schema, dict):
        return
    for key in ("properties", "$defs", "definitions"):
        if isinstance(schema.get(key), dict):
            _bound(list(schema[key].values()), max_text_chars)
    for key in ("items", "prefixItems", "anyOf", "oneOf", "allOf", "additionalProperties"):
        _bound(schema.get(key), max_text_chars)
    if schema.get("type") == "string" and _TEXT_BOUNDS.isdisjoint(schema):
        schema["maxLength"] = max(max_text_chars, schema.get("minLength", 0))
    named = schema.get("properties") or {}
    if (
        named
        and _MEMBER_BOUNDS.isdisjoint(schema)
        and set(schema.get("required", ())) <= set(named)
    ):
        schema["additionalProperties"] = False


_INTRODUCTION = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{signatures}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def tell_in_text(messages: Sequence[ChatMessage], tools: Tools | None) -> list[ChatMessage]:
    """A conversation for a model whose template knows no tools: what it may call, has called and got, as text."""
    told: list[ChatMessage] = []
    for message in messages:
        if message.role == "tool":
            parts = (TextPart("<tool_response>\n"), *message.parts, TextPart("\n</tool_response>"))
            message = ChatMessage("user", parts)
        elif message.tool_calls:
            called = "\n".join(map(_spell, message.tool_calls))
            said = any(isinstance(part, TextPart) and part.text for part in message.parts)
            parts = (*message.parts, TextPart("\n" + called if said else called))
            message = replace(message, parts=parts, tool_calls=())
        if told and message.role == told[-1].role == "user" and _is_response(told[-1]):
            parts = (*told[-1].parts, TextPart("\n"), *message.parts)
            told[-1] = replace(told[-1], parts=parts)
        else:
            told.append(message)
    if tools is None:
        return told
    signatures = "\n".join(
        json.dumps(to_openai(each), ensure_ascii=False) for each in tools.functions
    )
    text = _INTRODUCTION.format(signatures=signatures)
    if told and told[0].role == "system":
        parts = (*told[0].parts, TextPart("\n\n" + text))
        return [replace(told[0], parts=parts), *told[1:]]
    return [ChatMessage("system", (TextPart(text),)), *told]


def _spell(call: ToolCall) -> str:
    return f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n</tool_call>'


def _is_response(message: ChatMessage) -> bool:
    first = message.parts[0]
    return isinstance(first, TextPart) and first.text == "<tool_response>\n"


def move_images(messages: Iterable[ChatMessage]) -> list[ChatMessage]:
    """The same with images of tools' results in a user turn behind them: templates have no place for them there."""
    moved: list[ChatMessage] = []
    for message in messages:
        images = tuple(part for part in message.parts if isinstance(part, ImagePart))
        if message.role != "tool" or not images:
            moved.append(message)
            continue
        texts = tuple(part for part in message.parts if isinstance(part, TextPart))
        moved += [replace(message, parts=texts), ChatMessage("user", images)]
    return moved


class CallReader:
    """Tells the calls of one answer from its text while it comes; whatever the pieces are, their sums are the same."""

    def __init__(self, form: ToolFormat) -> None:
        self.num_calls = 0
        self._form = form
        self._mark = form.trigger or form.opening  # that the first call begins with
        self._held = ""
        self._is_calling = False
        self._arguments: _JsonEnd | None = None  # of the call that is being written
        self._is_text = False  # nothing else follows

    def feed(self, text: str) -> tuple[str, list[CallPiece]]:
        """What of the text so far is text, and what is calls."""
        said, pieces = "", []
        self._held += text
        if not self._is_calling:
            said = self._find_calls()
        while self._is_calling and self._read(pieces):
            pass
        return said, pieces

    def finish(self) -> str:
        """Text that was held back, as it might have begun a call."""
        held, self._held = self._held, ""
        return "" if self._is_calling else held

    def _find_calls(self) -> str:
        """Text before the first call; what may begin one is held back."""
        mark, held = self._mark, self._held
        if self._is_text:
            self._held = ""
            return held
        if not self._form.trigger:
            if mark.startswith(held):
                return ""  # too little is known
            self._is_calling, self._is_text = held.startswith(mark), not held.startswith(mark)
            return "" if self._is_calling else self._find_calls()
        before, found, behind = held.partition(mark)
        if found:
            self._is_calling, self._held = True, behind
            return before
        num_held = next(n for n in range(len(mark) - 1, -1, -1) if held.endswith(mark[:n]))
        self._held = held[len(held) - num_held :]
        return held[: len(held) - num_held]

    def _read(self, pieces: list[CallPiece]) -> bool:
        """One step within calls; False where more text is needed."""
        form = self._form
        if self._arguments is None:
            _, opened, behind = self._held.partition(form.opening)
            name, is_named, rest = behind.partition(form.middle)
            if not (opened and is_named):
                return False
            pieces.append(CallPiece(self.num_calls, name))
            self.num_calls += 1
            self._held, self._arguments = rest, _JsonEnd()
            return True
        end = self._arguments.find(self._held)
        arguments, self._held = self._held[:end], self._held[end:]
        if arguments:
            pieces.append(CallPiece(self.num_calls - 1, "", arguments))
        if not self._arguments.is_found:
            return False
        self._arguments = None
        return True


class _JsonEnd:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self.is_found = False
        self._depth = 0
        self._is_string = self._is_escaped = False

    def find(self, text: str) -> int:
        """How much of the text belongs to it."""
        for place, character in enumerate(text):
            if self._is_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                else:
                    self._is_string = character != '"'
            elif character == '"':
                self._is_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.is_found = True
                    return place + 1
        return len(text)
