"""Schemas, patterns and grammars that need unlimited time or memory, reference other files, or are invalid."""

from typing import Any


def nested(depth: int, wrap: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        items = {"type": "array", "items": schema}
        schema = {wrap: [schema, items]} if wrap != "items" else items
    return schema


LAUGHS = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 9} for i in range(20)}
HOSTILE: list[tuple[str, Any]] = [
    ("json", nested(13, "anyOf")),
    ("json", nested(500, "items")),
    ("json", {"$ref": "#"}),
    ("json", {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    ("json", {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}),
    ("json", {"$defs": LAUGHS | {"a20": {"type": "string"}}, "$ref": "#/$defs/a0"}),
    ("json", {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}),
    ("json", {"enum": [f"value {i}" for i in range(9000)]}),
    ("json", {"enum": ["x" * 4096 + str(i) for i in range(15)]}),
    ("json", {"type": "object", "properties": {f"p{i}": {} for i in range(3000)}}),
    ("json", {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(900)},
              "required": [f"p{i}" for i in range(900)], "additionalProperties": False}),
    ("json", {"type": "object", "patternProperties": {f"^a{{{i}}}b*$": {} for i in range(1, 60)}}),
    ("json", {"type": "object", "minProperties": 4000}),
    ("json", {"type": "array", "minItems": 4096, "items": {"type": "array", "minItems": 4096}}),
    ("json", {"type": "string", "minLength": 10**9, "maxLength": 10**9}),
    ("json", {"type": "string", "maxLength": 10**15}),
    ("json", {"type": "integer", "minimum": 1, "maximum": 10**300}),
    ("json", {"type": "string", "pattern": "^(a|a|a|a|a|a)*(.*x){50}$"}),
    ("json", {"type": "string", "pattern": "(.*a){1,200}(.*b){1,200}", "format": "email"}),
    ("json", {"allOf": [{"type": "string", "pattern": f"[^{c}]*{c}.*"} for c in "abcdefghijklmnop"]}),
    ("json", {"type": "string", "pattern": r"^(\w+\s?)*$", "minLength": 500, "maxLength": 501}),
    ("json", {"properties": {"\u202e\u0000\U0001f600" * 20: {"const": "\u0301" * 2000}}, "minProperties": 1}),
    ("json", '{"type": "string", "type": "array", "items": {"type": "integer"}, "items": {"enum": [1]}}'),
    ("json", {"type": "string", "pattern": ["a"], "maxLength": "7", "minLength": None}),
    ("json", {"type": "object", "required": {"a": 1}, "properties": [1], "patternProperties": 7}),
    ("json", {"type": "integer", "minimum": 10**4000, "maximum": 10**4000 + 1}),
    ("json", {"type": ["string"] * 4000 + [7, None, {}]}),
    ("json", {"$ref": "#/properties/a/properties/a/properties/a", "properties": {"a": {"$ref": "#"}}}),
    ("json", {"anyOf": [{"pattern": f"^(a{{0,{i}}}b?){{{i}}}$", "type": "string"} for i in range(1, 60)]}),
    ("json", {"allOf": [{"properties": {f"p{i}": {"anyOf": [{"const": i}, {"const": -i}]}}} for i in range(200)]}),
    ("regex", "x{1000000}"),
    ("regex", "((((a{10}){10}){10}){10}){10}"),
    ("regex", r"(\p{L}{1,500}|\p{N}{1,500}){500}"),
    ("choice", ["y" * 4000 + str(i) for i in range(15)]),
    ("lark", "start: s\ns: s s | /a/"),
    ("lark", "start: a\na: b\nb: a"),
]  # fmt: skip
