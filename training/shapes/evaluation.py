"""Exact-match accuracy by topic, for any system that answers questions about images."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from PIL import Image

from training.shapes.conversations import Turn, sample_conversation
from training.shapes.questions import PAIR_TOPICS, SINGLE_TOPICS, Asker, ask_about_pair
from training.shapes.world import Scene, sample_scene, sample_variation

#: Topics that are reported as one group.
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
    """One turn of a conversation, as passed to the tested system; the last turn's `answer` is empty."""

    images: tuple[Image.Image, ...]
    question: str
    answer: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    topic: str
    messages: tuple[Message, ...]
    answer: str


@dataclass(frozen=True, slots=True)
class Score:
    """Answered cases. An answer is right if it equals the expected one, except for surrounding white space."""

    results: list[tuple[Case, str]]

    def accuracy(self, *topics: str) -> float:
        """Fraction of correct answers for some topics, or for all if none is given."""
        asked = [each for each in self.results if not topics or each[0].topic in topics]
        return sum(said.strip() == case.answer for case, said in asked) / len(asked)

    @property
    def mistakes(self) -> list[tuple[Case, str]]:
        return [(case, said) for case, said in self.results if said.strip() != case.answer]


def make_cases(num_scenes: int, draw: Renderer, seed: int = 1_000_000) -> Iterator[Case]:
    """Yield cases for `num_scenes` new scenes: a question of every topic about one image and about two images
    (with a second scene), and a conversation of three turns.
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
        scenes = (first, second)[: rng.randint(1, 2)]
        yield last_of(sample_conversation(scenes, 3, rng, rng.random() < 0.5), images)


def last_of(turns: Sequence[Turn], images: Sequence[Image.Image]) -> Case:
    """The last turn of a conversation as a case; earlier turns have the correct answers."""
    messages: list[Message] = []
    waiting = list(images)
    for turn in turns:
        new, waiting = waiting[: turn.num_images], waiting[turn.num_images :]
        messages.append(Message(tuple(new), turn.question.text, turn.question.answer))
    last = messages[-1]
    messages[-1] = Message(last.images, last.question)
    return Case("conversation", tuple(messages), last.answer)
