"""Function calls in Python syntax, `f(city='Oslo', days=3)`: grammar rules of arguments, and their conversion to JSON.

Values are literals; nothing is evaluated.
"""

import ast
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from engines.text.schemas import Refusal, prepare
from shared.protocol import Function

_NAME = re.compile(r"[^\s=,()\[\]{}'\"\\#]{1,256}")
#: Keywords that do not constrain a value, or are handled elsewhere.
_ASIDE = frozenset(("title", "description", "default", "examples", "deprecated", "$comment"))
_ASIDE |= {"$defs", "definitions"}
#: References that stay valid in the schema of one parameter.
_SHARED = ("#/$defs/", "#/definitions/")
_OF_PARAMETERS = _ASIDE | {"type", "properties", "required", "additionalProperties", "$schema"}

#: Rules shared by all calls. Strings have single or double quotes; numbers and bracketed values are JSON.
SHARED_RULES = rf"""
PY_TEXT: /"([^"\\\x00-\x1F\x7F]|\\["\\bfnrt])*"/ | /'([^'\\\x00-\x1F\x7F]|\\['\\bfnrt])*'/
PY_NAME: /[A-Za-z_][A-Za-z0-9_]{{0,255}}/
py_json: %json {json.dumps(prepare({}))}
py_any: PY_TEXT | "True" | "False" | "None" | py_json"""


def to_argument_rules(function: Function, name: str, *, is_loose: bool = False) -> list[str]:
    """Rules of a call's keyword arguments, in the schema's order. `is_loose`: any arguments. Raises: Refusal."""
    schema: dict[str, Any] = {} if is_loose else json.loads(function.parameters)
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise Refusal("properties is not an object, or required is not a list")
    named = {**properties, **{str(each): True for each in required if each not in properties}}
    if function.is_strict and not (schema.keys() <= _OF_PARAMETERS):
        raise Refusal("this model's strict calls support only properties and required of an object")
    if not all(map(_NAME.fullmatch, named)):
        raise Refusal("the name of a parameter has characters these calls do not allow")
    rules = _Rules(name, schema, is_lenient=not function.is_strict)
    if named:
        return rules.arguments(named, required)
    return rules.free_arguments(schema.get("additionalProperties", True))


class _Rules:
    def __init__(self, name: str, schema: dict[str, Any], *, is_lenient: bool) -> None:
        self._name = name
        self._is_lenient = is_lenient
        self._defs = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        self._made: list[str] = []

    def free_arguments(self, schema: Any) -> list[str]:
        """Arguments of any name, with values of this schema."""
        name = self._name
        if schema is False:
            return [f'{name}: ""']
        one = f'{name}_any: PY_NAME "=" {self._value(schema)}'
        return [f'{name}: ({name}_any (", " {name}_any)*)?', one, *self._made]

    def arguments(self, named: dict[str, Any], required: list[str]) -> list[str]:
        """Rules of each argument, of the arguments after it (`_more_`), and of all arguments."""
        rules, starts, can_be_first = [], [], True
        for place, (key, schema) in enumerate(named.items()):
            this = f"{self._name}_{place}"
            more = f" {self._name}_more_{place + 1}" if place + 1 < len(named) else ""
            rules.append(f"{this}: {_text(f'{key}=')} {self._value(schema)}")
            written = f'", " {this}' if key in required else f'(", " {this})?'
            rules.append(f"{self._name}_more_{place}: {written}{more}")
            if can_be_first:
                starts.append(this + more)
            can_be_first = can_be_first and key not in required
        if can_be_first:
            starts.append('""')
        return [f"{self._name}: {' | '.join(starts)}", *rules, *self._made]

    def _value(self, schema: Any) -> str:
        """The rule of a value: Python syntax for simple schemas, else JSON."""
        if schema is True:
            return "py_any"
        if not isinstance(schema, dict):
            raise Refusal("a parameter's schema is not an object")
        keys = schema.keys() - _ASIDE
        if not keys:
            return "py_any"
        if keys == {"type"}:
            kinds = schema["type"]
            return _any_of(map(self._of_type, kinds if isinstance(kinds, list) else [kinds]))
        values: Any = [schema["const"]] if keys <= {"const", "type"} else schema.get("enum")
        if keys - {"type"} in ({"const"}, {"enum"}) and _are_texts(schema, values):
            return _any_of(map(_spell, values))
        if keys == {"anyOf"} and isinstance(schema["anyOf"], list) and schema["anyOf"]:
            return _any_of(map(self._value, schema["anyOf"]))
        if keys == {"type", "items"} and schema["type"] == "array":
            item = self._value(schema["items"])
            return f'"[" ({item} (", " {item})*)? "]"'
        return self._json(schema)

    def _of_type(self, kind: Any) -> str:
        if kind == "string":
            return "PY_TEXT"
        if kind == "boolean":
            return '("True" | "False")'
        return '"None"' if kind == "null" else self._json({"type": kind})

    def _json(self, schema: dict[str, Any]) -> str:
        """A rule for a JSON value. Raises: Refusal."""
        whole = {**schema, **self._defs}
        if not all(reference.startswith(_SHARED) for reference in _references(whole)):
            raise Refusal("this model's calls support $ref only to #/$defs/ of the parameters")
        name = f"{self._name}_value{len(self._made)}"
        self._made.append(
            f"{name}: %json {json.dumps(prepare(whole, is_lenient=self._is_lenient))}"
        )
        return name


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(reference := schema.get("$ref"), str):
            yield reference
        schema = schema.values()
    elif not isinstance(schema, list):
        return
    for each in schema:
        yield from _references(each)


def _any_of(rules: Iterable[str]) -> str:
    return f"({' | '.join(rules)})"


def _are_texts(schema: dict[str, Any], values: Any) -> bool:
    """Whether the values are strings and their type allows that."""
    texts = isinstance(values, list) and all(isinstance(value, str) for value in values)
    return bool(values) and texts and schema.get("type", "string") == "string"


def _spell(value: str) -> str:
    """A rule that matches a string in double or single quotes."""
    double = json.dumps(value, ensure_ascii=False)
    single = "'" + double[1:-1].replace('\\"', '"').replace("'", "\\'") + "'"
    return f"{_text(double)} | {_text(single)}"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class MalformedCall(Exception):
    """The text is not keyword arguments with literal values."""


class KeywordArguments:
    """Incremental parser of the arguments of one call, up to its closing bracket.

    More than 64 levels, or numbers of more than 4,300 characters, are malformed: clients could not read the JSON.
    """

    def __init__(self) -> None:
        self.json = ""  #: the arguments as JSON; empty until the call is complete
        self._found: dict[str, str] = {}  # values as JSON
        self._written: list[str] = []  # text of the argument that is being read
        self._brackets: list[str] = []
        self._quote = ""
        self._is_escaped = False

    def feed(self, text: str) -> int:
        """Add text; returns the number of characters that belong to the arguments. Raises: MalformedCall."""
        for place, character in enumerate(text):
            if self._quote:
                self._read_in_string(character)
            elif not self._brackets and character in ",)":
                self._take(is_last=character == ")")
                if character == ")":
                    found = (f"{_text(name)}: {value}" for name, value in self._found.items())
                    self.json = f"{{{', '.join(found)}}}"
                    return place + 1
                continue
            elif character in "'\"":
                self._quote = character
            elif character in _CLOSING:
                self._brackets.append(_CLOSING[character])
                if len(self._brackets) > _MAX_DEPTH:
                    raise MalformedCall
            elif character in ")]}" and (not self._brackets or self._brackets.pop() != character):
                raise MalformedCall
            self._written.append(character)
        return len(text)

    def _read_in_string(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == self._quote:
            self._quote = ""

    def _take(self, *, is_last: bool) -> None:
        written = "".join(self._written).strip()
        self._written.clear()
        if is_last and not written:
            return
        name, _, value = written.partition("=")
        if not _NAME.fullmatch(name):
            raise MalformedCall
        self._found[name] = _to_json(value)


_MAX_DEPTH = 64
_MAX_NUMBER = 4300  #: characters; Python's limit of the digits of an integer
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_WORDS = {"True": "true", "False": "false", "None": "null"}
_WORDS |= {word: word for word in _WORDS.values()}
_STRING = re.compile(r""""[^"\\]*(?:\\.[^"\\]*)*"|'[^'\\]*(?:\\.[^'\\]*)*'""")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_LEADING_ZERO = re.compile(r"-?0[0-9]")  #: not allowed in JSON
#: Escapes that Python reads without a warning.
_ESCAPES = frozenset("\\'\"abfnrtvxuUN")


def _to_json(text: str) -> str:
    """Convert a Python or JSON literal to JSON; numbers keep their spelling. Raises: MalformedCall."""
    # Python also keeps the backslash of an unknown escape, but warns.
    text = re.sub(r"\\(.)", lambda e: e[0] if e[1] in _ESCAPES else "\\" + e[0], text.strip())
    if "\n" in text or "\r" in text:
        raise MalformedCall
    try:
        tree, source = ast.parse(text, mode="eval").body, text.encode()
        made = _write(tree, source)
        made.encode()
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise MalformedCall from None
    if source[tree.end_col_offset :].strip(b" \t)"):  # a comment
        raise MalformedCall
    return made


def _write(node: ast.expr | None, source: bytes) -> str:
    if node is None:  # the key of `**`
        raise MalformedCall
    written = source[node.col_offset : node.end_col_offset].decode()
    match node:
        case ast.Constant(value=str(value)) if _STRING.fullmatch(written):
            return json.dumps(value, ensure_ascii=False)
        case ast.Constant() | ast.UnaryOp(operand=ast.Constant()) if _NUMBER.fullmatch(written):
            return _read_number(written)
        case ast.Constant() | ast.Name() if written in _WORDS:
            return _WORDS[written]
        case ast.List(elts=values) | ast.Tuple(elts=values):
            return f"[{', '.join(_write(value, source) for value in values)}]"
        case ast.Dict(keys=keys, values=values):
            if all(isinstance(getattr(key, "value", None), str) for key in keys):
                names = [_write(key, source) for key in keys]
                pairs = zip(names, values, strict=True)
                return f"{{{', '.join(f'{name}: {_write(x, source)}' for name, x in pairs)}}}"
    raise MalformedCall


def _read_number(text: str) -> str:
    whole, sign, rest = text.removeprefix("+").partition(".")
    if len(text) > _MAX_NUMBER or _LEADING_ZERO.match(whole):
        raise MalformedCall
    if not sign:
        return whole
    whole = whole if whole.strip("-") else f"{whole}0"
    rest = rest if rest[:1].isdigit() else f"0{rest}"
    return f"{whole}.{rest}"
