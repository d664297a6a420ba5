"""Chat templates of strangers: whatever they do, a prompt costs a bounded time, and the next one is answered."""

import gc
import time
from pathlib import Path

import psutil
import pytest

from engines import template_process
from engines.base import InvalidRequest
from engines.chat_template import LLAVA_TEMPLATE, ChatTemplate
from engines.template_rendering import UnusableTemplate
from shared.protocol import ChatMessage, ImagePart, TextPart

SHAPES = Path(__file__).parents[2] / "engines" / "shapes" / "checkpoint" / "chat_template.jinja"
#: What a template may try, when a conversation has a second message.
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
    "placeholder texts": "{{ lipsum(99999) }}",
}  # fmt: skip
#: What a compiler may run into before there is any conversation.
COMPILER_ATTACKS = {
    "a constant power": "{{ 9 ** (9 ** 9) }}",
    "a constant text": "{{ 'a' * 10**11 }}",
    "nested parentheses": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
}


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "MAX_CPU_S", 0.25)  # half of the real one


def hello(num_messages: int = 1) -> tuple[list[ChatMessage], list[list[str]]]:
    messages = [ChatMessage("user", (ImagePart(0), TextPart("Hello")))] * num_messages
    return messages, [["Hello"]] * num_messages


def children() -> list[psutil.Process]:
    return psutil.Process().children()


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_an_attack_ends_the_one_prompt_and_nothing_else(attack: str) -> None:
    source = LLAVA_TEMPLATE + "{% if messages | length > 1 %}" + attack + "{% endif %}"
    template = ChatTemplate(source, "<image>")
    expected = template.render(*hello())
    begun = time.monotonic()

    with pytest.raises(InvalidRequest, match="chat template"):
        template.render(*hello(2))

    assert time.monotonic() - begun < template_process._MAX_S
    assert template.render(*hello()) == expected == "USER: <image>\nHello ASSISTANT:"


@pytest.mark.parametrize("attack", COMPILER_ATTACKS.values(), ids=COMPILER_ATTACKS)
def test_an_attack_on_the_compiler_is_refused_when_it_is_loaded(attack: str) -> None:
    with pytest.raises(UnusableTemplate):
        ChatTemplate(LLAVA_TEMPLATE + attack, "<image>")


def test_known_templates_are_rendered_here() -> None:
    before = children()
    for source in (LLAVA_TEMPLATE, SHAPES.read_text()):
        ChatTemplate(source, "<image>").render(*hello())
    assert not set(children()) - set(before)


def test_a_child_has_nothing_and_ends_with_its_template() -> None:
    before = children()
    template = ChatTemplate(LLAVA_TEMPLATE + " ", "<image>")
    [child] = set(children()) - set(before)

    assert child.environ().keys() <= {"PYTHONPATH", "LC_CTYPE"}
    assert child.rlimit(psutil.RLIMIT_FSIZE) == (0, 0)
    assert child.rlimit(psutil.RLIMIT_AS)[0] == template_process._MAX_BYTES
    del template
    gc.collect()
    assert not child.is_running()


def test_a_killed_child_costs_one_prompt() -> None:
    before = children()
    template = ChatTemplate(LLAVA_TEMPLATE + " ", "<image>")
    expected = template.render(*hello())
    [child] = set(children()) - set(before)
    child.kill()

    with pytest.raises(InvalidRequest, match="cannot render"):
        template.render(*hello())
    assert template.render(*hello()) == expected


def test_long_conversations_are_rendered_whole() -> None:
    template = ChatTemplate(LLAVA_TEMPLATE + " ", "<image>")
    text = "long " * 40_000
    messages = [ChatMessage("user", (TextPart(text),))]
    assert template.render(messages, [[text]]) == f"USER: {text} ASSISTANT: "
