"""Conversations: questions in turns, about images that come with the first or with a later turn."""

from dataclasses import dataclass
from random import Random

from training.shapes import phrasings
from training.shapes.questions import (
    PAIR_TOPICS,
    SINGLE_TOPICS,
    Asker,
    Question,
    ask_about_pair,
    follow_up,
)
from training.shapes.world import Scene

_SINGLE_WEIGHTS = {
    "describe": 5, "count": 3, "color": 4, "kind": 4, "place": 3, "size": 3, "content": 3,
    "exists": 3, "is at": 2, "is color": 1, "background": 1.5,
}  # fmt: skip
_PAIR_WEIGHTS = {"which has": 5, "which has background": 2, "same": 5, "describe all": 3}


@dataclass(frozen=True, slots=True)
class Turn:
    """What a user sends: the number of new images, put before the text, and a question."""

    num_images: int
    question: Question


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in order, after an optional system message."""

    turns: tuple[Turn, ...]
    system: str | None = None

    @property
    def num_images(self) -> int:
        return sum(turn.num_images for turn in self.turns)


def sample_question(
    scenes: tuple[Scene, ...], rng: Random, before: Question | None = None, plain: bool = False
) -> Question:
    """A question about the images seen so far; one that names no image means the latest."""
    if before and before.subject and rng.random() < 0.25:
        return follow_up(before.subject, rng, plain)
    if len(scenes) == 2 and rng.random() < 0.5:
        topic = rng.choices(PAIR_TOPICS, [_PAIR_WEIGHTS[name] for name in PAIR_TOPICS])[0]
        return ask_about_pair(topic, *scenes, rng, plain)
    named = len(scenes) > 1 and rng.random() < 0.75
    index = rng.randrange(len(scenes)) if named else len(scenes) - 1
    topics = tuple(SINGLE_TOPICS)
    topic = rng.choices(topics, [_SINGLE_WEIGHTS[name] for name in topics])[0]
    return Asker(rng, scenes[index], index, named, plain).ask(topic)


def sample_conversation(
    scenes: tuple[Scene, ...], num_turns: int, rng: Random, at_once: bool | None = None
) -> Conversation:
    """Turns about all the scenes; unless `at_once`, an image may come with a later turn."""
    if at_once is None:
        at_once = rng.random() < 0.5
    arrivals = [0] * num_turns
    for _ in scenes[1:]:
        arrivals[0 if at_once else rng.randrange(num_turns)] += 1
    arrivals[0] += 1
    turns: list[Turn] = []
    num_seen = 0
    for num_new in arrivals:
        num_seen += num_new
        before = turns[-1].question if turns and not num_new else None
        turns.append(Turn(num_new, sample_question(scenes[:num_seen], rng, before)))
    return Conversation(tuple(turns), sample_system(rng))


def sample_system(rng: Random) -> str | None:
    """A system message, mostly none."""
    return rng.choice(phrasings.SYSTEM_PROMPTS) if rng.random() < 0.12 else None
