"""Untrusted chat templates: rendering takes a bounded time, and the next prompt is rendered."""

import contextlib
import os
import threading
import time
import tracemalloc

import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from engines.base import InvalidRequest
from engines.text import chat_template
from engines.text.chat_template import (
    LLAVA_TEMPLATE,
    ChatTemplate,
    CompiledTemplate,
    UnusableTemplate,
)
from shared.protocol import ChatMessage, ImagePart, TextPart
from tests.long import few
from tests.rounds import in_one_round

#: Attacks of a template, which run if the conversation has a second message.
ATTACKS = {
    "a long loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a range without end": "{% for i in range(10**12) %}{% endfor %}",
    "a text multiplied": "{% set x = ('a' * 10**11) | length %}",
    "a list multiplied": "{% set x = ([0] * 10**11) | length %}",
    "a power": "{% set n = messages | length + 7 %}{% set x = n ** (n ** n) %}",
    "a wide format": "{% set x = '%99999999999d' % 1 %}",
    "a wide column": "{% set x = 'a'.center(99999999999) %}",
    "a text doubled": (
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
    ),
    "a list of lists": (
        "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
        "{% set y = n.x | string %}"
    ),
    "replacements": "{% set x = ('a' * 10**6).replace('a', 'a' * 10**6) %}",
    "filters in filters": "{% set x = range(99999) | map('string') | join('-' * 99999) %}",
    "macros that call twice": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"
    ),
    "macros without end": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "recursive loops": (
        "{% for i in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}"
    ),
    "an endless text": "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "a long text": "{{ 'x' * 100000 }}",
    "a block doubled": (
        "{% set n = namespace(x='ab') %}"
        "{% for i in range(60) %}{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}"
    ),
    "a dictionary doubled": (
        "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}{{ n.x }}"
    ),
    "tuples as keys": (
        "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = (n.x, n.x) %}{% endfor %}{% set y = {n.x: 1} %}"
    ),
    "namespaces in namespaces": (
        "{% set n = namespace(x=1) %}{% for i in range(60) %}"
        "{% set n.x = namespace(a=n.x, b=n.x) %}{% endfor %}{{ n.x }}"
    ),
    "lists of long texts": (
        "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% set n.x = n.x + ['x' * 60000 ~ i] %}{% endfor %}"
    ),
    "indented lines": "{% set x = ('\n' * 60000) | indent(60000) %}",
    "formatted widths": "{% set x = '{:>99999999}'.format(1) %}",
    "a width from a value": "{% set x = '{:>{}}'.format(1, 10**9) %}",
    "a wide date": "{{ strftime_now('%9999999999Y') }}",
    "digits": "{% set x = 1 | round(10**8) %}",
    "a sum of lists": "{% set x = [[1]] * 60000 %}{% set y = x | sum(start=[]) %}{% set z = y * 60000 %}",
    "a padded filter": "{% set x = ['a'] | map('center', 10**10) | list %}",
    "placeholder texts": "{{ lipsum(99999) }}",
    "classes of objects": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "a changed list": "{{ messages.append(1) }}",
    "the globals of a function": "{{ cycler.__init__.__globals__.os.getcwd() }}",
    "a division by zero": "{{ 1 / 0 }}",
}  # fmt: skip
#: One attack per resource (time, depth, memory), and one that accesses forbidden attributes.
EACH_KIND = [
    "a long loop", "a power", "a text multiplied", "a list of lists", "macros without end",
    "an endless text", "a width from a value", "a padded filter", "classes of objects", "a changed list",
    "the globals of a function", "a division by zero",
]  # fmt: skip
#: Attacks on the template compiler, before there is a conversation.
COMPILER_ATTACKS = {
    "a constant power": "{{ 9 ** (9 ** 9) }}",
    "a constant text": "{{ 'a' * 10**11 }}",
    "nested parentheses": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
}


def hello(template: ChatTemplate, num_messages: int = 1) -> str:
    messages = [ChatMessage("user", (ImagePart(0), TextPart("Hello")))] * num_messages
    texts, calls = [["Hello"]] * num_messages, [[]] * num_messages
    return template.render(messages, texts, ["image"], {}, [], calls, is_answered=True)


def attacked_by(attack: str) -> ChatTemplate:
    source = LLAVA_TEMPLATE + "{% if messages | length > 1 %}" + ATTACKS[attack] + "{% endif %}"
    return ChatTemplate(source, "<image>")


@pytest.mark.parametrize("attack", few(ATTACKS, EACH_KIND))
def test_an_attack_fails_only_its_prompt(attack: str) -> None:
    template = attacked_by(attack)
    expected = hello(template)
    tracemalloc.start()
    begun = time.thread_time()

    with pytest.raises(InvalidRequest, match="chat template") as refused:
        hello(template, 2)

    assert os.getcwd() not in str(refused.value)
    # CPU time of this thread, because other processes do not affect it; `tracemalloc` adds to it.
    assert time.thread_time() - begun < 5 * chat_template.MAX_S
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 300 * 1024 * 1024
    assert hello(template) == expected == "USER: <image>\nHello ASSISTANT:"


@pytest.mark.parametrize("attack", COMPILER_ATTACKS.values(), ids=COMPILER_ATTACKS)
def test_an_attack_on_the_compiler_is_refused_at_load_time(attack: str) -> None:
    with pytest.raises(UnusableTemplate):
        ChatTemplate(LLAVA_TEMPLATE + attack, "<image>")


def test_pauses_of_the_machine_do_not_count_as_rendering_time(monkeypatch) -> None:
    class Paused(str):
        def __str__(self) -> str:
            time.sleep(0.3)
            return "user"

    source = "{% for m in messages %}{{ m.role }}{% endfor %}"
    messages = [{"role": Paused("user")}, {"role": "assistant"}]
    monkeypatch.setattr(chat_template, "MAX_S", 0.1)
    assert CompiledTemplate(source, {}).render(messages) == "userassistant"


@in_one_round
def test_a_slow_template_does_not_delay_other_conversations() -> None:
    """They are rendered in other threads while the slow template runs into its time limit."""
    template = attacked_by("a long loop")
    ended: list[str] = []

    def render(name: str, num_messages: int) -> None:
        with contextlib.suppress(InvalidRequest):
            hello(template, num_messages)
        ended.append(name)

    threads = [threading.Thread(target=render, args=each) for each in (("slow", 2), ("quick", 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ended == ["quick", "slow"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{{ loop.index ~ m.role ~ '\n' }}{% endfor %}", "1user\n"),
        ("{% generation %}{{ 'x' }}{% endgeneration %}", "x"),
        ("{% for i in range(9) %}{% if i > 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{{ messages[0].content | tojson }}", '[{"type": "image"}, {"type": "text", "text": "é<"}]'),
        ("{{ {'a': [1, messages | length]} | tojson(indent=2) }}", '{\n  "a": [\n    1,\n    1\n  ]\n}'),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% macro m(a, b=2) %}{{ a + b }}{% endmacro %}{{ m(1) }}{{ m(1, b=3) }}", "34"),
        ("{% set n = namespace(x='') %}{% for c in 'abc' %}{% set n.x = n.x + c %}{% endfor %}{{ n.x }}", "abc"),
        ("{% set x %}{{ 'a' }}b{% endset %}{{ x * 3 }}", "ababab"),
        ("{{ 'a-b'.split('-') | join('+') }}{{ 'x'.replace('x', 'yz') }}", "a+byz"),
        ("{{ '%s is %03d' % ('a', 7) }}{{ '{} {:>3}'.format('b', 1) }}", "a is 007b   1"),
        ("{{ [1, 2] + [messages | length] }}{{ (1, 2) }}", "[1, 2, 1](1, 2)"),
        ("{{ tools is none }}{{ missing is defined }}{{ add_generation_prompt }}", "TrueFalseTrue"),
        ("{% for a, b in {'k': 1}.items() %}{{ a }}{{ b }}{% endfor %}", "k1"),
        ("{{ messages | map(attribute='role') | list }}", "['user']"),
        ("{% filter upper %}abc{% endfilter %}{{ 7 % 4 }}{{ 2 ** 8 }}{{ 'a' | indent(2, true) }}", "ABC3256  a"),
    ],
)  # fmt: skip
def test_templates_render_as_in_transformers(source: str, expected: str) -> None:
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "é<"}]}]
    assert CompiledTemplate(source, {}).render(messages) == expected
    reference = _compile_jinja_template(source)
    if "strftime" not in source:
        assert expected == reference.render(
            messages=messages, tools=None, documents=None, add_generation_prompt=True
        )
