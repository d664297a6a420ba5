"""Conversations of several turns about images, which are sent with the first or a later turn."""

from dataclasses import dataclass
from random import Random

from training.shapes import phrasings
from training.shapes.answers import OUTSIDE
from training.shapes.clips import ask_about_clip, find_event
from training.shapes.questions import Asker, Question, ask_about_pair, follow_up
from training.shapes.small_talk import sample_prose, sample_small_talk
from training.shapes.world import Scene, sample_scene

Scenes = tuple[Scene | None, ...]  #: None: a foreign picture
OUTSIDE_SHARE = 0.06  #: share of questions outside the image world

_SINGLE_WEIGHTS = {
    "describe": 5, "count": 3, "color": 4, "kind": 5, "place": 5, "size": 3, "content": 2,
    "exists": 2, "is at": 2, "is color": 1.5, "background": 1, "count special": 6, "in band": 2, "is beside": 2.5, "what is beside": 6,
    "all same": 3, "colors": 4.5, "more": 2.5, "anything": 2, "of size": 6.5, "color at": 1, "is so": 1.5,
}  # fmt: skip
_PAIR_WEIGHTS = {"which has": 5, "which has background": 2, "same": 5, "describe all": 3}


@dataclass(frozen=True, slots=True)
class Turn:
    """A user's turn: the number of new images, which precede the text, and a question."""

    num_images: int
    question: Question


def sample_question(scenes: Scenes, rng: Random, before: Question | None = None) -> Question:
    """A question about the images so far. A question that names no image is about the latest."""
    if rng.random() < OUTSIDE_SHARE:
        return Question(sample_small_talk(rng), OUTSIDE)
    if before and before.subject and rng.random() < 0.4:
        return follow_up(before.subject, rng)
    known = tuple(scene or sample_scene(rng) for scene in scenes)
    if len(known) == 2 and rng.random() < 0.5:
        question, meant = _ask_about_pair(known, rng), scenes
    else:
        named = len(known) > 1 and rng.random() < 0.75
        index = rng.randrange(len(known)) if named else len(known) - 1
        question, meant = _ask_about_one(known[index], index, named, rng), scenes[index : index + 1]
    return Question(question.text, OUTSIDE) if None in meant else question


def _ask_about_one(scene: Scene, index: int, named: bool, rng: Random) -> Question:
    topic = rng.choices([*_SINGLE_WEIGHTS], [*_SINGLE_WEIGHTS.values()])[0]
    return Asker(rng, scene, index, named).ask(topic)


def _ask_about_pair(scenes: tuple[Scene, ...], rng: Random) -> Question:
    first, second = scenes
    if (clip := find_event(first, second)) and rng.random() < 0.35:
        return ask_about_clip(clip, rng)
    topic = rng.choices([*_PAIR_WEIGHTS], [*_PAIR_WEIGHTS.values()])[0]
    return ask_about_pair(topic, first, second, rng)


def sample_conversation(scenes: Scenes, num_turns: int, rng: Random, at_once: bool) -> list[Turn]:
    """Turns about all scenes. `at_once`: the first turn has all images; else later turns have some of them."""
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
    return turns


def sample_system(rng: Random) -> str | None:
    chance = rng.random()
    if chance < 0.03:
        return sample_prose(rng)
    return rng.choice(phrasings.SYSTEM_PROMPTS) if chance < 0.12 else None
