"""Function calls: the formats of model families, grammars for them, and their parser.

The output is constrained by a grammar built from the functions, so each family has exactly one format to parse.
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from engines.text.pythonic import SHARED_RULES, KeywordArguments, MalformedCall, to_argument_rules
from engines.text.schemas import prepare
from shared.protocol import CallPiece, ChatMessage, Function, TextPart, ToolCall, Tools

_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Call format: `trigger begin opening NAME middle ARGUMENTS close`, `separator` between calls, `end`."""

    name: str
    #: Marks the start of calls anywhere in an answer; empty: calls only at the start of an answer.
    trigger: str
    begin: str
    middle: str
    separator: str
    end: str
    opening: str = '{"name": "'
    close: str = "}"
    #: Length limit of strings that have no limit in the schema; None: no limit.
    max_text_chars: int | None = None
    is_pythonic: bool = False  #: arguments are Python keyword arguments, not JSON

    @property
    def mark(self) -> str:
        return self.trigger or self.begin + self.opening


HERMES = ToolFormat(
    "hermes",
    "<tool_call>",
    "\n",
    '", "arguments": ',
    "\n</tool_call>\n<tool_call>\n",
    "\n</tool_call>",
)
#: For chat templates without a supported tool format. Strings are limited, because models may never end them.
TOLD = dataclasses.replace(HERMES, name="told", max_text_chars=64)
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", " [", '", "arguments": ', ", ", "]")
LLAMA3 = ToolFormat("llama3", "", "", '", "parameters": ', "; ", "")
PYTHONIC = ToolFormat("pythonic", "", "[", "(", ", ", "]", "", ")", is_pythonic=True)


def find_tool_format(template: str) -> ToolFormat | None:
    """The format of a published family's chat template that lists functions; None if not supported."""
    if "<tool_call>" in template:
        is_xml = "<arg_key>" in template or "<function=" in template
        return None if is_xml else HERMES
    if "[TOOL_CALLS]" in template:
        return None if "[ARGS]" in template else MISTRAL
    if re.search(r"\[func_name1?\(", template):
        return PYTHONIC
    if '"parameters": ' in template and "ipython" in template:
        return LLAMA3
    return None


def to_openai(function: Function) -> dict[str, Any]:
    """A function in the format of chat templates."""
    described = {"description": function.description} if function.description else {}
    parameters = json.loads(function.parameters)
    shown = {"name": function.name, **described, "parameters": parameters}
    return {"type": "function", "function": shown}


def to_shown(call: ToolCall) -> dict[str, Any]:
    """A call in the format of chat templates, with its arguments as an object if they can be encoded."""
    arguments: Any = call.arguments
    with suppress(ValueError, RecursionError):
        found = json.loads(call.arguments)
        json.dumps(found, ensure_ascii=False).encode()  # fails for half of a surrogate pair
        arguments = found
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def to_rules(tools: Tools, form: ToolFormat, *, is_loose: bool = False) -> str:
    """Lark rules `calls`, and `said` for text that may end with calls. `is_loose`: arguments are any object."""
    rules = [f"begun: {json.dumps(form.begin)} one" if form.begin else "begun: one"]
    names = []
    for place, function in enumerate(tools.functions):
        names.append(f"call{place}")
        rules.append(
            f"call{place}: {json.dumps(form.opening + function.name + form.middle)} of{place} {json.dumps(form.close)}"
        )
        if form.is_pythonic:
            rules += to_argument_rules(function, f"of{place}", is_loose=is_loose)
        else:
            schema = prepare(_ANY_OBJECT) if is_loose else _schema_of(function, form.max_text_chars)
            rules.append(f"of{place}: %json {json.dumps(schema)}")
    if form.is_pythonic:
        rules.append(SHARED_RULES)
    rules.append(f"one: {' | '.join(names)}")
    more = f" ({json.dumps(form.separator)} one)*" if tools.is_parallel else ""
    end = f" {json.dumps(form.end)}" if form.end else ""
    trigger = f"{json.dumps(form.trigger)} " if form.trigger else ""
    rules.append(f"calls: {trigger}begun{more}{end}")
    if form.trigger:
        rules += [
            f"lead[suffix={json.dumps(form.trigger)}]: /(?s:.*)/",
            "words: /(?s:.*)/",
            f"said: lead begun{more}{end} | words",
        ]
    else:
        first = form.mark[0]
        rules += [rf"words: /([^\{first}](?s:.*))?/", "said: calls | words"]
    return "\n".join(rules)


def _schema_of(function: Function, max_text_chars: int | None) -> dict[str, Any]:
    schema = json.loads(function.parameters)
    if not any(key in schema for key in ("type", "$ref", "anyOf", "oneOf", "allOf")):
        schema = _ANY_OBJECT | schema
    return prepare(schema, is_lenient=not function.is_strict, max_text_chars=max_text_chars)


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


_RESULT = TextPart("<tool_response>\n")


def describe_in_text(messages: Sequence[ChatMessage], tools: Tools | None) -> list[ChatMessage]:
    """Write functions, calls and results as text, for a template without tools."""
    described: list[ChatMessage] = []
    for message in messages:
        if message.role == "tool":
            parts = (_RESULT, *message.parts, TextPart("\n</tool_response>"))
            message = ChatMessage("user", parts)
        elif message.tool_calls:
            called = "\n".join(
                f'<tool_call>\n{{"name": {json.dumps(c.name)}, "arguments": {c.arguments}}}\n</tool_call>'
                for c in message.tool_calls
            )
            said = any(isinstance(part, TextPart) and part.text for part in message.parts)
            parts = (*message.parts, TextPart("\n" + called if said else called))
            message = replace(message, parts=parts, tool_calls=())
        last = described[-1] if described else ChatMessage("system", ())
        follows_result = last.role == "user" and last.parts[:1] == (_RESULT,)
        if message.role == "user" and follows_result:
            described[-1] = replace(last, parts=(*last.parts, TextPart("\n"), *message.parts))
        else:
            described.append(message)
    if tools is None:
        return described
    signatures = "\n".join(
        json.dumps(to_openai(each), ensure_ascii=False) for each in tools.functions
    )
    text = _INTRODUCTION.format(signatures=signatures)
    if described and described[0].role == "system":
        parts = (*described[0].parts, TextPart("\n\n" + text))
        return [replace(described[0], parts=parts), *described[1:]]
    return [ChatMessage("system", (TextPart(text),)), *described]


class CallReader:
    """Incremental parser of calls. The result does not depend on how the text is cut into pieces."""

    def __init__(self, form: ToolFormat) -> None:
        self.num_calls = 0
        self._form = form
        self._held = ""
        self.is_calling = False  #: whether the first call has begun
        self._arguments: JsonEnd | None = None  # parser of the current call's JSON arguments
        self._keywords: KeywordArguments | None = None  # parser of its Python arguments
        self._name = self._written = ""  # name of a Python call, and its text so far
        self._is_text = False  # the remaining output is text
        self.follows_text = not form.is_pythonic  #: whether text precedes the calls

    def feed(self, text: str) -> tuple[str, list[CallPiece]]:
        """Add text; returns the new text and the new pieces of calls."""
        said, pieces = "", []
        self._held += text
        if not self.is_calling:
            said = self._find_calls()
        read = self._read_keywords if self._form.is_pythonic else self._read
        while self.is_calling and read(pieces):
            pass
        if self._is_text:
            said, self._held = said + self._held, ""
        return said, pieces

    def finish(self) -> str:
        """The text that was held back because it might begin a call, or that did not become a call."""
        held, self._held = self._written + self._held, ""
        if self.is_calling and not self._form.is_pythonic:
            return "" if self.num_calls else self._form.trigger + held
        return held

    def _find_calls(self) -> str:
        """Text before the first call; text that may begin a call is held back."""
        mark, held = self._form.mark, self._held
        if self._is_text:
            self._held = ""
            return held
        if not self._form.trigger:
            if mark.startswith(held):
                return ""  # too few characters to decide
            self.is_calling, self._is_text = held.startswith(mark), not held.startswith(mark)
            return "" if self.is_calling else self._find_calls()
        before, found, behind = held.partition(mark)
        if found:
            self.is_calling, self._held = True, behind
            return before
        num_held = num_begun(held, mark)
        self._held = held[len(held) - num_held :]
        return held[: len(held) - num_held]

    def _read(self, pieces: list[CallPiece]) -> bool:
        form = self._form
        if self._arguments is None:
            _, opened, behind = self._held.partition(form.opening)
            name, is_named, rest = behind.partition(form.middle)
            if not (opened and is_named):
                return False
            pieces.append(CallPiece(self.num_calls, name))
            self.num_calls += 1
            self._held, self._arguments = rest, JsonEnd()
            return True
        end = self._arguments.find(self._held)
        arguments, self._held = self._held[:end], self._held[end:]
        if arguments:
            pieces.append(CallPiece(self.num_calls - 1, "", arguments))
        if not self._arguments.is_found:
            return False
        self._arguments = None
        return True

    def _read_keywords(self, pieces: list[CallPiece]) -> bool:
        """One parsing step of Python calls. Complete calls are reported; malformed calls become text."""
        if self._keywords is None:
            found = _BEGUN.match(self._held)
            if found is None:
                is_closed = self._held.startswith("]")  # after the last call
                self._held = self._held.removeprefix("]")
                self._is_text = is_closed or not _MAY_BEGIN.fullmatch(self._held)
                self.is_calling = not self._is_text
                return False
            self._name = found[1]
            self._written, self._held = found[0], self._held[found.end() :]
            self._keywords = KeywordArguments()
        try:
            end = self._keywords.feed(self._held)
        except MalformedCall:
            self._held, self._written = self._written + self._held, ""
            self._is_text, self.is_calling = True, False
            return False
        self._written += self._held[:end]
        self._held = self._held[end:]
        if not self._keywords.json:
            return False
        pieces += [
            CallPiece(self.num_calls, self._name),
            CallPiece(self.num_calls, "", self._keywords.json),
        ]
        self.num_calls += 1
        self._written, self._keywords = "", None
        return True


#: The start of a Python call in a list, before its arguments; and all prefixes of such a start.
_BEGUN = re.compile(r"[\[,]\s*([\w.:/-]{1,256})\(")
_MAY_BEGIN = re.compile(r"([\[,]\s*[\w.:/-]{0,256})?")


class JsonEnd:
    def __init__(self) -> None:
        self.is_found = False
        self._depth = 0
        self._is_string = self._is_escaped = False

    def find(self, text: str) -> int:
        """Number of characters that belong to the object."""
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


def num_begun(text: str, marker: str) -> int:
    """Length of the longest suffix of a text that begins a marker."""
    most = min(len(marker) - 1, len(text))
    return next((n for n in range(most, 0, -1) if text.endswith(marker[:n])), 0)
