"""Grammars of clients: compiled, refused, or stopped at their limits of time and memory."""

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest

from engines.base import BadGrammar, EngineCall, GrammarTooComplex
from engines.core.constraint import Constraint, ConstraintFailure
from engines.mock.engine import EOS_ID, VOCAB_SIZE, MockTokenizer
from engines.registry import create_engine
from engines.text import grammar as module
from engines.text.grammar import GrammarCompiler
from engines.text.reasoning import REASONING_FORMATS, Reasoning
from engines.text.tokenizer import HfTokenizer
from shared.protocol import ChatMessage, Generate, Grammar, SamplingParams, TextPart
from tests.schemas import checking
from tests.schemas.checking import CHECKPOINT
from tests.schemas.hostile import HOSTILE

TOKENIZER = MockTokenizer()


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler.create(TOKENIZER, VOCAB_SIZE, None)
    assert made is not None
    yield made
    made.close()


def make_grammar(kind: Any, source: Any, **fields: Any) -> Grammar:
    text = source if isinstance(source, str) else json.dumps(source)
    return Grammar(kind, text, "the.field", **fields)


def follows(constraint: Constraint, text: str) -> bool:
    """Returns whether the grammar allows this text as a complete answer."""
    return checking.follows(constraint, [*text.encode(), EOS_ID])


OBJECT = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "count": {"type": "integer"}},
    "required": ["color"],
    "additionalProperties": False,
}
CASES = [
    ("json", {"type": "object"}, ['{"a": [1, {}]}', "{}"], ["[]", "1", "", " {}", "{} ", "{  }"]),
    ("json", OBJECT, ['{"color":"red"}', '{ "color": "red", "count": 5 }'],
     ['{"color":"green"}', '{"count":5}', '{"color":"red","more":1}', '{"color":"red"']),
    ("json", "true", ["[1]", '"x"'], ["x"]),
    ("json", OBJECT | {"x-guidance": {"lenient": True, "whitespace_pattern": ".*"}},
     ['{"color":"red"}'], ['{\n"color":"red"}']),
    # a property name with escapes is the same name
    ("json", {"properties": {"a": {"type": "integer"}}, "additionalProperties": True}, ['{"a": 1}', '{"b": "x"}', '{"\u00e9": 1}'],
     ['{"a": "x"}', r'{"\u0061": "x"}', r'{"b\u0061": 1}', r'{"b": "\u0061"}']),
    ("json", {"type": "string", "format": "date"}, ['"2024-02-29"', '"2000-02-29"', '"1999-12-31"'],
     ['"2023-02-29"', '"1900-02-29"', '"2024-02-30"', '"2024-04-31"', '"2024-1-1"', '"24-01-01"']),
    ("json", {"type": "string", "format": "date-time", "pattern": "^2"},
     ['"2024-02-29T23:59:59.5Z"', '"2024-01-01t00:00:00+05:30"'],
     ['"2023-02-29T00:00:00Z"', '"2024-01-01T24:00:00Z"', '"2024-01-01T00:00:60Z"', '"1999-01-01T00:00:00Z"']),
    ("json", {"properties": {"format": {"const": {"format": "date"}}, "b": {"$ref": "#/x/d"}},
     "x": {"d": {"format": "date"}}, "type": "object"},
     ['{"format": {"format": "date"}}', '{"b": "2024-02-29"}'], ['{"b": "2023-02-29"}', '{"format": {"format": "2024-01-01"}}']),
    ("json", {"type": "string", "pattern": r"^\S[\S]\\S$"}, [r'"ab\\S"'], ['"a\ufeff\\\\S"', '" b\\\\S"', r'"ab\\x"']),
    ("json", {"required": ["a"], "minProperties": 2}, ['{"a": 1, "b": 1}'], ['{"a": 1}', '{"a": 1, "a": 1}']),
    # objects have no additional properties by default, except in combined schemas
    ("json", {"properties": {"a": {"properties": {"b": {}}}}}, ["{}", '{"a": {"b": 1}}', '{"a": 1}', "[]"], ['{"b": 1}', '{"a": {"a": 1}}']),
    ("json", {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, ['{"a": 1, "b": 1}', '{"c": 1}'], []),
    ("json", {"anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, ['{"a": 1}', '{"b": 1}'], ['{"c": 1}', '{"a": 1, "b": 1}']),
    ("json", {"properties": {"a": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, ['{"a": 1, "b": 1}', '{"b": 1}'], ["{}"]),
    ("json", {"properties": {"a": {}}, "required": ["a", "b"]}, ['{"a": 1, "b": 1, "c": 1}'], ['{"a": 1}']),
    ("json", {"properties": {"a": {}}, "maxProperties": 1}, ["{}", '{"a": 1}'], ['{"a": 1, "a": 1}', '{"b": 1}']),
    ("regex", "[0-9]+", ["1" * 30], ["", "a"]),
    ("regex", r"\d{3}-[a-c]+", ["123-abc"], ["12-a", "123-d", "x123-a"]),
    ("regex", r"^(a|b)/c\n$", ["a/c\n"], ["a/c"]),
    ("choice", ["red", "blue green", 'q"\\\n\u00e9', "<|end|>"],
     ["red", "blue green", 'q"\\\n\u00e9', "<|end|>"], ["blue", "red ", "Red"]),
    ("lark", 'start: "a" rest\nrest: /b+/', ["abb"], ["a", "ba"]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "source", "right", "wrong"), CASES)
def test_a_grammar_allows_exactly_its_texts(compiler, kind, source, right, wrong):
    constraint = compiler.compile(make_grammar(kind, source))
    # This tokenizer drops the first space of a text, so one is added.
    assert [text for text in right if not follows(constraint, " " + text)] == []
    assert [text for text in wrong if follows(constraint, " " + text)] == []
    assert not any(follows(constraint, text) for text in right)


REFUSED = [
    ("json", {"not": {}}, "keywords are not supported: not"),
    ("json", {"type": "array", "uniqueItems": True}, "uniqueItems"),
    ("json", {"$ref": "http://127.0.0.1:1/x"}, r"an external \$ref"),
    ("json", {"$ref": "file:///etc/passwd"}, r"an external \$ref"),
    ("json", {"$ref": "#/nothing"}, "nothing in the schema"),
    ("json", {"oneOf": [{"type": "number"}, {"type": "integer"}]}, "use anyOf"),
    ("json", {"type": "canary"}, "a type is unknown"),
    ("json", {"type": "string", "format": "canary"}, "format is not supported"),
    ("json", {"type": "string", "minLength": 5, "maxLength": 1}, "no value conforms"),
    ("json", "false", "no value conforms"),
    ("json", "[", "not JSON"),
    ("json", {"type": "string", "pattern": "(?=canary)"}, "look-around"),
    ("regex", "(canary", "cannot be read"),
    ("regex", r"(a)\1", "backreferences are not supported"),
    ("lark", "start: canary", "cannot be read"),
    ("json", {"properties": {"limit": {"oneOf": [{}, {}]}}}, "use anyOf"),
    ("json", {"minProperties": 2}, "one more than the number of names in required"),
    ("json", {"properties": {"a": {}, "b": {}, "c": {}}, "maxProperties": 2}, "all names of properties are required"),
    ("json", {"const": ["canary\0"]}, "control character"),
    ("json", {"enum": ["canary\x7f"]}, "control character"),
    ("json", {"maxItems": 2.5}, "not a whole number"),
    ("json", {"patternProperties": {"a": {}, "b": {}}}, "can match the same key"),
    ("json", {"$dynamicAnchor": "canary"}, r"\$dynamicAnchor"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "source", "reason"), REFUSED)
def test_unsupported_grammars_are_refused_without_quoting_them(compiler, kind, source, reason):
    for _ in range(2):
        with pytest.raises(BadGrammar, match=reason) as caught:
            compiler.compile(make_grammar(kind, source))
        assert caught.value.param == "the.field"
        assert "the.field" in str(caught.value)
        assert "canary" not in str(caught.value)


def test_a_lenient_schema_ignores_unsupported_keywords(compiler):
    grammar = make_grammar("json", {"type": "integer", "not": {"const": 1}}, is_lenient=True)
    assert follows(compiler.compile(grammar), " 1")


NUMBERS = [
    ({"type": "integer"}, ["1" * 19, "-" + "9" * 19, "0"], ["1" * 20, "-" + "1" * 20]),
    ({"type": "integer", "minimum": 0}, ["1" * 19], ["1" * 20]),
    (
        {"type": "number"},
        ["1" * 17, "0." + "1" * 16, "1" * 16 + ".5", "-" + "1" * 17 + "e-300", "1.5E+123", "1e5"],
        ["1" * 18, "0." + "1" * 17, "1" * 17 + ".5", "1e1234"],
    ),
    ({}, ["1" * 17, "[" + "1" * 17 + "]"], ["1" * 18, '{"a":' + "1" * 18 + "}"]),
    ({"const": 10**25}, [str(10**25)], []),
    ({"enum": [10**25, 1]}, [str(10**25), "1"], []),
    ({"type": "string"}, ['"' + "1" * 30 + '"', '"1e12345"'], []),
    ({"type": "string", "pattern": "^[0-9]{30,40}$"}, ['"' + "1" * 30 + '"', '"' + "1" * 40 + '"'], []),
    ({"type": "string", "format": "uuid"}, ['"550e8400-e29b-41d4-a716-446655440000"'], []),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "taken", "refused"), NUMBERS)
def test_unbounded_numbers_of_a_schema_have_limits(compiler, schema, taken, refused):
    constraint = compiler.compile(make_grammar("json", schema))
    for text in taken:
        assert follows(constraint, f" {text}"), text
    for text in refused:
        assert not follows(constraint, f" {text}"), text


def follow_at_random(constraint: Constraint) -> str:
    """Returns the first tokens of a random answer, or those before the failure that ended it."""
    token_ids: list[int] = []
    with suppress(ConstraintFailure):
        while len(token_ids) < 40 and EOS_ID not in token_ids:
            mask = constraint.mask(token_ids, 0)
            allowed = [t for t in range(VOCAB_SIZE) if mask[t >> 3] >> (t & 7) & 1]
            token_ids.append(allowed[7 * len(token_ids) % len(allowed)])
    return b"".join(map(TOKENIZER.token_bytes, token_ids)).decode(errors="replace")


@pytest.mark.parametrize("place", range(len(HOSTILE)))
def test_hostile_grammars_are_refused_or_followed_within_bounds(compiler, place):
    kind, source = HOSTILE[place]
    began_s = time.process_time()
    try:
        constraint = compiler.compile(make_grammar(kind, source))
    except (BadGrammar, GrammarTooComplex) as error:
        outcome = str(error)
    else:
        outcome = follow_at_random(constraint)
    assert outcome
    assert time.process_time() - began_s < 10.0  # compilation of accepted ones


def test_forced_text_has_the_tokens_of_the_tokenizer():
    """The text could be split into other tokens, after which a model often continues wrongly."""
    tokenizer = HfTokenizer(CHECKPOINT, None)
    compiler = GrammarCompiler.create(tokenizer, tokenizer.vocab_size, None)
    assert compiler is not None
    schema = {"type": "object", "properties": {"shapes": {"enum": ["star", "square"]}}}
    schema |= {"required": ["shapes"], "additionalProperties": False}
    constraint = compiler.compile(make_grammar("json", schema))

    def allowed(text: str) -> set[str]:
        mask = constraint.begin().mask(tokenizer.encode(text), 0)
        ids = (i for i in range(tokenizer.vocab_size) if mask[i >> 3] >> (i & 7) & 1)
        return {tokenizer.token_bytes(i).decode(errors="replace") for i in ids}

    assert allowed('{"') == {"shapes"}
    assert allowed('{"shapes') == {'"'}
    assert {":", ": "} <= allowed('{"shapes"'), "what may follow can change the token"
    assert {"s", "star", "square"} <= allowed('{"shapes": "'), "nothing is forced"
    compiler.close()


def test_forced_text_uses_only_tokens_that_the_request_allows():
    engine = create_engine({"kind": "torch", "model": str(CHECKPOINT), "device": "cpu"}).engine
    tokenizer = HfTokenizer(CHECKPOINT, None)
    letters = {i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1}
    sampling = SamplingParams(
        temperature=0, max_tokens=40, allowed_token_ids=tuple(letters | tokenizer.eos_token_ids)
    )
    schema = {"type": "object", "properties": {"shapes": {"const": 1}}}
    schema |= {"required": ["shapes"], "additionalProperties": False}
    message = ChatMessage("user", (TextPart("Describe it."),))
    task = Generate((message,), sampling, grammar=make_grammar("json", schema))
    engine.add(engine.prepare(EngineCall("r", task), []))
    text = ""
    while engine.has_work():
        text += "".join(output.text for output in engine.step())
    engine.close()
    assert json.loads(text) == {"shapes": 1}


def test_a_lost_child_process_fails_one_grammar(compiler, monkeypatch):
    compiler.compile(make_grammar("choice", ["there"]))
    with monkeypatch.context() as patch:
        patch.setattr(module, "ANSWER_TIMEOUT_S", 0.2)
        for child in psutil.Process().children():  # suspended, it does not answer
            if module.grammar_child.__name__ in child.cmdline():
                child.suspend()
        with pytest.raises(GrammarTooComplex, match="simpler"):
            compiler.compile(make_grammar("choice", ["lost", "found"]))
    for texts in (["found"], ["lost", "found"]):  # the lost grammar is not refused later
        assert follows(compiler.compile(make_grammar("choice", texts)), " found")


@pytest.mark.parametrize("is_thinking", [False, True])
def test_the_reasoning_before_an_answer_is_unconstrained(is_thinking):
    reasoning = Reasoning(REASONING_FORMATS["think"])
    compiler = GrammarCompiler.create(TOKENIZER, VOCAB_SIZE, reasoning)
    assert compiler is not None
    constraint = compiler.compile(make_grammar("choice", ["red"]), is_thinking=is_thinking)
    begin = "" if is_thinking else " <think>"
    assert follows(constraint, begin + "Is it { red }?</think>\n\nred")
    assert follows(constraint, begin + "</think>red")
    assert not follows(constraint, begin + "red")
    assert not follows(constraint, begin + "hm</think>blue")
    assert follows(constraint, " red") is not is_thinking
    compiler.close()
