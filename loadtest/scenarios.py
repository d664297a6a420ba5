"""Messages of chat requests. The same seed produces the same messages.

Used by the users and the open loop. No network, no clock, no Locust.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from loadtest.albums import Album, Fact, Group
from loadtest.record import Profile

SUBJECTS = ("a lighthouse", "the harbour", "a red bicycle", "two clouds", "an old map", "the clock")
WISHES = ("Tell me about", "Describe", "Compare with a stone", "Write one line on", "Explain")
MAX_TURNS = 8
MAX_NUMBER = 10**6

Message = dict[str, Any]


def take_note(text: str) -> None:
    """Ignores the answer of a question without a follow-up."""


@dataclass(frozen=True, slots=True)
class Question:
    """Messages, the correct answer if it is known, and a callback for the answer."""

    messages: list[Message]
    expected: str | None = None
    on_answer: Callable[[str], None] = take_note


#: A kind of question. Each caller has its own random generator, so that runs are reproducible.
Scenario = Callable[[random.Random], Question]


def text(draw: random.Random) -> Question:
    """A random sentence. Its number makes it new to a prefix cache."""
    sentence = f"{draw.choice(WISHES)} {draw.choice(SUBJECTS)}, no. {draw.randrange(MAX_NUMBER)}."
    return Question([user_message([text_part(sentence)])])


class Conversation:
    """Questions about one image, each with the conversation so far.

    After an answered turn, the conversation continues; a failed turn ends it. If all conversations wait for an answer,
    a new one begins.
    """

    def __init__(self, album: Album) -> None:
        self._album = album
        self._resting: deque[tuple[list[Message], tuple[Fact, ...]]] = deque()

    def next_question(self, draw: random.Random) -> Question:
        """The next turn of an idle conversation, or the first turn of a new one."""
        if self._resting:
            said, facts = self._resting.popleft()
            images = []
        else:
            group = self._album.new(draw)
            said, facts, images = [], group.facts, list(map(image_part, group.urls))
        text, expected = draw.choice(facts)
        messages = [*said, user_message([*images, text_part(text)])]
        return Question(messages, expected, partial(self._go_on, messages, facts))

    def _go_on(self, messages: list[Message], facts: tuple[Fact, ...], text: str) -> None:
        if len(messages) < 2 * MAX_TURNS - 1:
            self._resting.append(([*messages, {"role": "assistant", "content": text}], facts))


def _about(group: Group, draw: random.Random) -> Question:
    text, expected = draw.choice(group.facts)
    parts = [*map(image_part, group.urls), text_part(text)]
    return Question([user_message(parts)], expected)


SCENARIOS: dict[str, Callable[[Album], Scenario]] = {
    "text": lambda _: text,
    "image": lambda album: lambda draw: _about(album.new(draw), draw),
    "repeated image": lambda album: lambda draw: _about(album.fixed(), draw),
    "several images": lambda album: lambda draw: _about(album.several(draw), draw),
    "conversation": lambda album: Conversation(album).next_question,
}

#: Weights of the scenarios, by profile.
PROFILES: dict[Profile, dict[str, int]] = {
    "mixed": {"text": 3, "image": 2, "repeated image": 2, "several images": 1, "conversation": 2},
    "text": {"text": 1},
    "image": {"image": 1},
    "repeated": {"repeated image": 1},
    "several": {"several images": 1},
    "conversation": {"conversation": 1},
}


def user_message(parts: list[dict[str, Any]]) -> Message:
    return {"role": "user", "content": parts}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def to_chat_body(
    model: str, messages: list[Message], max_tokens: int, stream: bool
) -> dict[str, Any]:
    """A greedy request. The last chunk of a stream has the usage."""
    body: dict[str, Any] = {"model": model, "messages": messages}
    body |= {"max_tokens": max_tokens, "temperature": 0}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body
