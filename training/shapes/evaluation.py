"""Exact-match accuracy by topic, for anything that answers questions about images.

The answerer is a function, so that the same questions go to a checkpoint or over HTTP.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from PIL import Image

from training.shapes.conversations import Conversation, sample_conversation
from training.shapes.questions import (
    PAIR_TOPICS,
    SINGLE_TOPICS,
    Asker,
    ask_about_pair,
)
from training.shapes.world import Scene, sample_scene, sample_variation

#: The topics that are reported together.
GROUPS = {
    "single questions": tuple(topic for topic in SINGLE_TOPICS if topic != "describe"),
    "the first eight topics": (
        "count",
        "color",
        "kind",
        "place",
        "size",
        "content",
        "background",
        "exists",
    ),
    "full descriptions": ("describe",),
    "two images": ("which has", "which has background", "same"),
    "descriptions of two images": ("describe all",),
    "follow-up questions": ("conversation",),
}

Renderer = Callable[[Scene, Random], Image.Image]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation as an answerer sees it; the last turn's `answer` is empty."""

    images: tuple[Image.Image, ...]
    question: str
    answer: str = ""


#: Answers the last message of a conversation.
Answerer = Callable[[Sequence[Message]], str]


@dataclass(frozen=True, slots=True)
class Case:
    topic: str
    messages: tuple[Message, ...]
    answer: str


@dataclass(slots=True)
class Score:
    """How many answers of each topic were asked for and right, and the wrong ones."""

    asked: Counter[str] = field(default_factory=Counter)
    right: Counter[str] = field(default_factory=Counter)
    mistakes: list[tuple[Case, str]] = field(default_factory=list)

    def accuracy(self, *topics: str) -> float:
        """Share of right answers; of all topics if none is named."""
        topics = topics or tuple(self.asked)
        return sum(self.right[topic] for topic in topics) / max(
            1, sum(self.asked[topic] for topic in topics)
        )


def make_cases(num_scenes: int, draw: Renderer, seed: int = 1_000_000) -> Iterator[Case]:
    """For each of `num_scenes` fresh scenes a question of every single topic, of every topic about two
    images (with a second scene), and a conversation of three turns.
    """
    for index in range(num_scenes):
        rng = Random(f"{seed}/{index}")
        first = sample_scene(rng)
        second = rng.choice(
            (first, sample_variation(first, rng), sample_variation(first, rng), sample_scene(rng))
        )
        images = draw(first, rng), draw(second, rng)
        for topic in SINGLE_TOPICS:
            question = Asker(rng, first).ask(topic)
            yield Case(topic, (Message(images[:1], question.text),), question.answer)
        for topic in PAIR_TOPICS:
            question = ask_about_pair(topic, first, second, rng)
            yield Case(topic, (Message(images, question.text),), question.answer)
        yield last_of(sample_conversation((first, second)[: rng.randint(1, 2)], 3, rng), images)


def last_of(conversation: Conversation, images: Sequence[Image.Image]) -> Case:
    """The last turn of a conversation as a case; the turns before are answered rightly."""
    messages: list[Message] = []
    waiting = list(images)
    for turn in conversation.turns:
        new, waiting = waiting[: turn.num_images], waiting[turn.num_images :]
        messages.append(Message(tuple(new), turn.question.text, turn.question.answer))
    last = messages[-1]
    messages[-1] = Message(last.images, last.question)
    return Case("conversation", tuple(messages), conversation.turns[-1].question.answer)


def evaluate(answer: Answerer, cases: Sequence[Case]) -> Score:
    """Ask everything, compare exactly (but for space around the answer)."""
    score = Score()
    for case in cases:
        said = answer(case.messages).strip()
        score.asked[case.topic] += 1
        score.right[case.topic] += said == case.answer
        if said != case.answer:
            score.mistakes.append((case, said))
    return score
