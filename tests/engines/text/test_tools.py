"""Tool calls: grammars of calls, parsing of calls, and descriptions of tools for models without tool support."""

import json
from itertools import pairwise

import jsonschema
import pytest

from engines.base import BadGrammar, EngineCall
from engines.core.constraint import Constraint
from engines.mock.engine import MockProcessor
from engines.registry import create_engine
from engines.text import tools as module
from engines.text.chat_template import ChatTemplate
from engines.text.processor import move_images
from engines.text.tools import HERMES, CallReader, describe_in_text, find_tool_format, to_shown
from shared.protocol import (
    ChatMessage,
    FinishReason,
    Function,
    Generate,
    Grammar,
    ImagePart,
    SamplingParams,
    TextPart,
    ToolCall,
    Tools,
    join_calls,
)
from tests.engines.text.test_grammar import compiler as compiler
from tests.engines.text.test_grammar import follows as follows_exactly

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = Function("get_weather", json.dumps(SCHEMA), "The weather.")
TIME = Function("time.now", '{"properties": {}}')
TOOLS = Tools((WEATHER, TIME))
FORMS = [HERMES, module.MISTRAL, module.LLAMA3]
OSLO = '{"city": "Oslo"}'
PYTHONIC = module.PYTHONIC
SCHEMA_OF_ALL = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "L'Aquila"]},
        "days": {"type": "integer", "minimum": 1},
        "is_detailed": {"type": "boolean"},
        "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "hours": {"type": "array", "items": {"type": "integer"}},
        "at": {"type": "object", "properties": {"lat": {"type": "number"}}},
    },
    "required": ["city"],
}
ALL = Function("geo.weather", json.dumps(SCHEMA_OF_ALL), is_strict=True)
SCHEMAS = {WEATHER.name: SCHEMA, ALL.name: SCHEMA_OF_ALL, TIME.name: {}}


def follows(constraint: Constraint, text: str) -> bool:
    return follows_exactly(constraint, f" {text}")


def spell(form: module.ToolFormat, *calls: tuple[str, str]) -> str:
    written = [form.opening + name + form.middle + args + form.close for name, args in calls]
    return form.trigger + form.begin + form.separator.join(written) + form.end


#: Texts with one or two calls, further calls, and texts that are not calls.
PYTHON_CALLS = [
    "[geo.weather(city='Oslo')]",
    "[time.now(), geo.weather(city='Oslo', unit='C')]",
    """[geo.weather(city="L'Aquila", days=3)]""",
    r"[geo.weather(city='L\'Aquila', is_detailed=True, unit=None, hours=[1, 2])]",
    r"""[geo.weather(city="Oslo", unit='a "b" \n', at={"lat": -1.5})]""",
    "[time.now(zone='UTC', n=[1], ok=False)]",
]
NO_PYTHON_CALLS = [
    "[geo.weather()]",
    "[geo.weather(city='Bonn')]",
    "[geo.weather('Oslo')]",
    "[geo.weather(city='Oslo', days=0)]",
    "[geo.weather(city='Oslo', is_detailed='yes')]",
    "[geo.weather(city='Oslo', hours=['1'])]",
    "[geo.weather(city='Oslo', city='Oslo')]",
    "[geo.weather(city='Oslo', more=1)]",
    "[geo.weather(city='Oslo')",
    "[eval(x='1')]",
    "[time.now(x=open('f'))]",
    "[]",
]


@pytest.mark.parametrize("form", [*FORMS, PYTHONIC], ids=lambda form: form.name)
def test_calls_match_the_format_and_arguments_the_schema(compiler, form):
    functions, right, wrong = (ALL, TIME), PYTHON_CALLS, NO_PYTHON_CALLS
    if not form.is_pythonic:
        functions, one = (WEATHER, TIME), spell(form, ("get_weather", OSLO))
        right = [one, spell(form, ("get_weather", OSLO), ("time.now", "{}"))]
        bonn = spell(form, ("get_weather", '{"city": "Bonn"}'))
        wrong = [bonn, spell(form, ("get_rich", "{}")), one[:-1]]
    auto, required, alone = (
        compiler.compile_tools(Tools(functions, *wanted), form, None)
        for wanted in ((), (True,), (True, False))
    )
    talk = ["", "Words, [no] {call}.", *(["Let me see. " + right[0]] if form.trigger else [])]
    assert [text for text in (*right, *talk) if not follows(auto, text)] == []
    assert [text for text in right if not follows(required, text)] == []
    assert [text for text in (*wrong, *talk) if follows(required, text)] == []
    if form.trigger or form.is_pythonic:
        assert [text for text in wrong if follows(auto, text)] == []
    assert follows(alone, right[0])
    assert not follows(alone, right[1])
    for text in right:
        for name, arguments in read_in_parts(form, text)[1]:
            jsonschema.validate(arguments, SCHEMAS[name])


def refers(to: str) -> dict[str, object]:
    """Returns a schema with a reference outside the parameter, which must not be resolved within it."""
    within = {"type": "object", "properties": {"a": {"type": "integer"}, "c": {"$ref": to}}}
    return {"type": "object", "properties": {"a": {"type": "string"}, "b": within}}


@pytest.mark.parametrize(
    ("form", "schema", "reason"),
    [
        (HERMES, {"oneOf": [{"type": "object"}, {"required": ["a"]}]}, "oneOf"),
        (PYTHONIC, {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "only properties"),
        (PYTHONIC, {"properties": {"a b": {}}, "required": ["a b"]}, "name of a parameter"),
        (PYTHONIC, {"properties": [], "required": 3}, "not a list"),
        *((PYTHONIC, refers(to), "ref") for to in ("#", "#/properties/a", "#/properties/b")),
    ],
)
def test_unsupported_schemas_allow_any_object_unless_strict(compiler, form, schema, reason):
    source = json.dumps({"type": "object", **schema})
    loose = compiler.compile_tools(Tools((Function("f", source),), True), form, None)
    in_python = ("[f(a=1)]", "[f(a='b', c=[1, {}])]")
    for text in in_python if form.is_pythonic else (spell(form, ("f", '{"a": 1}')),):
        assert follows(loose, text)
    strict = Tools((Function("f", source, is_strict=True),), True)
    with pytest.raises(BadGrammar, match=reason) as caught:
        compiler.compile_tools(strict, form, None)
    assert caught.value.param == "tools"


def read_in_parts(form: module.ToolFormat, text: str, *cuts: int):
    """Returns the text around the calls, and the calls."""
    reader, said, pieces = CallReader(form), "", []
    for start, stop in pairwise((0, *cuts, len(text))):
        words, calls = reader.feed(text[start:stop])
        said += words
        pieces += calls
    said += reader.finish()
    return said, [(call.name, json.loads(call.arguments)) for call in join_calls(pieces)]


IN_PYTHON = (
    r"""[f.g(city='a \'[(, ]', at={"x": [1, 'y)'], "z": (2, -3.5)}, ok=True, no=null), now()]""",
    [
        ("f.g", {"city": "a '[(, ]", "at": {"x": [1, "y)"], "z": [2, -3.5]}, "ok": True, "no": None}),
        ("now", {}),
    ],
)  # fmt: skip


@pytest.mark.parametrize("form", [*FORMS, PYTHONIC], ids=lambda form: form.name)
def test_calls_are_parsed_the_same_in_any_split(form):
    quoted = '{"city": "a \\" } ]", "at": [{"x": "{"}]}'
    lead = "Well <to[TOOL " if form.trigger else ""
    text = lead + spell(form, ("get_weather", quoted), ("time.now", "{}"))
    expected = [("get_weather", json.loads(quoted)), ("time.now", {})]
    if form.is_pythonic:
        text, expected = IN_PYTHON
    for cut in range(len(text)):
        assert read_in_parts(form, text, cut, min(cut + 3, len(text))) == (lead, expected)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_text_that_is_not_a_call_is_returned_unchanged(form):
    for text in ("", "words", "<tool_cal", "[TOOL", '{"na', "{ no }", form.mark + "no"):
        assert read_in_parts(form, text, *range(1, len(text))) == (text, [])


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"additionalProperties": {"type": "integer"}}, "a=1, b=2", "a='1'"),
        ({"additionalProperties": False}, "", "a=1"),
        ({"properties": {"a": {"enum": ["x", "y"], "const": "x"}}}, 'a="x"', "a='y'"),
        ({"properties": {"a": {"enum": ["x", 1]}}}, "a=1", "a=2"),
        ({"properties": {"a": {"type": ["string", "null"]}, "b": {}}, "required": ["b"]}, "a=None, b=1", "a='x'"),
        ({"properties": {"a": {"$ref": "#/$defs/d"}}, "$defs": {"d": {"type": "string", "format": "date"}}},
         'a="2024-02-29"', 'a="2023-02-29"'),
        ({"properties": {"a-b": {"type": "boolean"}}}, "a-b=True", "a-b=1"),
        ({"properties": {"a": {"const": "\\\"'"}}}, r"""a='\\"\''""", "a=''"),
    ],
)  # fmt: skip
def test_strict_arguments_in_python_conform(compiler, schema, right, wrong):
    function = Function("f", json.dumps({"type": "object", **schema}), is_strict=True)
    constraint = compiler.compile_tools(Tools((function,), True), PYTHONIC, None)
    assert follows(constraint, f"[f({right})]")
    assert not follows(constraint, f"[f({wrong})]")
    said, [(_, arguments)] = read_all(f"[f({right})]")
    assert said == ""
    jsonschema.validate(arguments, schema)


def read_all(text: str, *cuts: int) -> tuple[str, list[tuple[str, str]]]:
    return read_in_parts(PYTHONIC, text, *cuts)


@pytest.mark.parametrize(
    ("text", "num_calls"),
    [
        *((text, 0) for text in ("[1, 2] is a list", "words [f(x=1)]", "[f(1)]", "[f(**x)]", "[f(x=1", "[f(x=1,,)]")),
        *((f"[f(x={value})]", 0) for value in (
            "open('y')", "__import__('os').system('y')", "y", "f'{y}'", "b'y'", "{1, 2}", "{1: 2}", "'\\ud800'", "[1",
            "'1", "[" * 5000, "[1 2]", "[1,, 2]", "{'y'}", "{'y': 1, 2}", "'y' 'z'", "01", "+-1", ".", "(,)", "[,]",
            "[1,,]", "", "9" * 4301, "[" * 65 + "]" * 65,  # no client could parse the last two
        )),
        ("[f(x=1), g(x=y)]", 1),
        ("[f(x=1)], g(y=2)]", 1),
    ],
)  # fmt: skip
def test_python_that_is_not_a_call_is_text(text, num_calls):
    said, calls = read_all(text, *range(1, min(len(text), 50)))
    assert len(calls) == num_calls
    assert said == (text if num_calls == 0 else said)
    assert said  # the text is returned
    assert read_all(text) == (said, calls)


@pytest.mark.parametrize(
    "value",
    ["9" * 17, "-1e400", "[" * 63 + "]" * 63, '{"a": ' * 61 + "[1, {}]" + "}" * 61, "'" + "y" * 70_000 + "'",
     r"""'\'"\\\n'""", '["a", true, null, -0.5e-7]', "None", "[ 1 , { } ]"],
)  # fmt: skip
def test_any_text_of_the_grammar_is_parsed_as_a_call(compiler, value):
    text = f"[f({'n' * 256}={value}, b=[{value}])]"
    loose = compiler.compile_tools(Tools((Function("f", "{}"),), True), PYTHONIC, None)
    is_json = value[0] not in "'N"
    if not is_json:
        text = text.replace("[" + value + "]", "1")
    if len(value) < 6000:
        assert follows(loose, text)
    reader = CallReader(PYTHONIC)
    said, pieces = reader.feed(text)
    (call,) = join_calls(pieces)
    assert (said, reader.finish(), call.name) == ("", "", "f")
    found = json.loads(call.arguments, parse_int=str, parse_float=str)
    assert list(found) == ["n" * 256, "b"]
    if is_json:
        expected = json.loads(value, parse_int=str, parse_float=str)
        assert found == {"n" * 256: expected, "b": [expected]}


def test_a_model_without_tool_support_gets_them_described_as_text():
    image = ImagePart(0)
    messages = [
        ChatMessage("user", (TextPart("Weather?"),)),
        ChatMessage("assistant", (TextPart(""),), "", (ToolCall("c", "get_weather", OSLO),)),
        ChatMessage("tool", (TextPart("rain"), image), tool_call_id="c"),
        ChatMessage("user", (TextPart("So?"),)),
    ]
    told = describe_in_text(messages, TOOLS)
    assert [message.role for message in told] == ["system", "user", "assistant", "user"]
    text = ["".join(getattr(part, "text", "@") for part in message.parts) for message in told]
    assert '"name": "get_weather"' in text[0]
    assert f'{{"name": "get_weather", "arguments": {OSLO}}}' in text[2]
    assert text[3] == "<tool_response>\nrain@\n</tool_response>\nSo?"
    empty = [ChatMessage("user", ()), messages[0]]  # as the Responses API allows
    assert describe_in_text(empty, TOOLS)[1:] == empty


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (OSLO, json.loads(OSLO)),
        ('{"city', '{"city'),
        (r'{"city": "\ud83d"}', r'{"city": "\ud83d"}'),
    ],
)
def test_templates_get_arguments_as_an_object_if_possible(arguments, shown):
    """Half of a surrogate pair cannot be encoded as UTF-8."""
    call = ToolCall("c", "get_weather", arguments)
    assert to_shown(call)["function"] == {"name": "get_weather", "arguments": shown}


def test_images_of_results_follow_all_results_of_a_turn():
    """Templates expect the results of parallel calls in consecutive messages."""
    asked = ChatMessage(
        "assistant", (), "", (ToolCall("a", "look", "{}"), ToolCall("b", "look", "{}"))
    )
    results = [
        ChatMessage("tool", (TextPart("left"), ImagePart(0)), tool_call_id="a"),
        ChatMessage("tool", (ImagePart(1),), tool_call_id="b"),
    ]
    thanks = ChatMessage("user", (TextPart("So?"), ImagePart(2)))
    assert move_images([asked, *results, thanks]) == [
        asked,
        ChatMessage("tool", (TextPart("left"),), tool_call_id="a"),
        ChatMessage("tool", (), tool_call_id="b"),
        ChatMessage("user", (ImagePart(0), ImagePart(1))),
        thanks,
    ]


QWEN = """{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools> in <tool_call>{% endif %}\
{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}\
<tool_call>{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"""


def test_templates_that_support_tools_are_detected():
    assert ChatTemplate(QWEN, "").tool_format is HERMES
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}<tool_call>"
    assert ChatTemplate(plain, "").tool_format is None
    assert find_tool_format("[TOOL_CALLS]") is module.MISTRAL
    python = QWEN.replace(" in <tool_call>", " as [func_name1(params_name1=params_value1)]")
    assert ChatTemplate(python.replace("<tool_call>", ""), "").tool_format is PYTHONIC
    assert find_tool_format("<tool_call><arg_key>") is None
    told = "in the format of [func_name1(params_name1=params_value1, params_name2=...)]"
    assert find_tool_format(told) is PYTHONIC


def answer(engine, tools: Tools, *messages: ChatMessage, told=(), leave_after: int = 999):
    """Returns the tokens, text, calls and finish reason of an answer. Aborts it after `leave_after` tokens."""
    task = Generate(messages, SamplingParams(max_tokens=300, temperature=0), tools=tools)
    engine.add(engine.prepare(EngineCall("r", task, output_token_ids=told), []))
    token_ids, text, pieces, reason = list(told), "", [], None
    while engine.has_work() and len(token_ids) < leave_after:
        for output in engine.step():
            assert output.error is None
            token_ids += output.token_ids
            text += output.text
            pieces += output.calls
            reason = output.finish_reason
    engine.abort("r")
    return token_ids, text, join_calls(pieces), reason


@pytest.mark.parametrize("form", [HERMES, PYTHONIC], ids=lambda form: form.name)
def test_the_mock_calls_a_function_answers_its_result_and_continues_a_call(form, monkeypatch):
    monkeypatch.setattr(MockProcessor, "tool_format", form)
    instant = {"decode_s": 0, "prefill_s_per_token": 0}
    engine = create_engine({"kind": "mock", "mock": instant}).engine
    asked = ChatMessage("user", (TextPart("Weather?"),))
    try:
        for place in range(4):
            function = Function(f"f{place}", json.dumps(SCHEMA_OF_ALL), is_strict=True)
            tools = Tools((function,), True, False)
            token_ids, text, calls, reason = answer(engine, tools, asked)
            assert (text, reason) == ("", FinishReason.TOOL_CALLS)
            (call,) = calls
            assert call.name == function.name
            jsonschema.validate(json.loads(call.arguments), SCHEMA_OF_ALL)
        half, _, before, _ = answer(engine, tools, asked, leave_after=len(token_ids) - 9)
        again, _, after, reason = answer(engine, tools, asked, told=tuple(half))
        assert (again, reason) == (token_ids, FinishReason.TOOL_CALLS)
        assert join_calls((*before, *after)) == calls
        result = ChatMessage("tool", (TextPart("rain"),), tool_call_id="c")
        _, text, calls, reason = answer(engine, TOOLS, asked, result)
        assert (bool(text), calls, reason) == (True, (), FinishReason.STOP)
    finally:
        engine.close()


def test_an_answer_can_be_a_call_or_match_a_schema(compiler):
    grammar = Grammar("choice", '["yes"]', "response_format")
    constraint = compiler.compile_tools(TOOLS, HERMES, grammar)
    assert follows(constraint, "yes")
    assert follows(constraint, spell(HERMES, ("time.now", "{}")))
    assert not follows(constraint, "no")
