"""Endless lessons for `finetune`: processes that draw pictures and pack sequences about them.

A process keeps an album of pictures, of which it replaces some with every message. A message holds the new
pictures and sequences that show any of the album, so that a picture is sent once and shown many times.
"""

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from training.shapes.answers import OUTSIDE
from training.shapes.architecture import IMAGE_SIZE
from training.shapes.clips import Clip, ask_about_clip, render_clip, sample_clip
from training.shapes.conversations import (
    Conversation,
    Scenes,
    Turn,
    sample_conversation,
    sample_question,
    sample_system,
)
from training.shapes.foreign_pictures import draw_foreign
from training.shapes.gallery import (
    CODE_LENGTH,
    GROUP_SIZE,
    decode,
    encode,
    mirror_codes,
    render_group,
    to_input,
)
from training.shapes.questions import Question, ask_about_pair
from training.shapes.render import sample_style
from training.shapes.sequences import MAX_GAP, Encoder, Packer, Sequence
from training.shapes.small_talk import sample_small_talk
from training.shapes.structured import ask_with_tools, list_tools, sample_json, sample_tools
from training.shapes.world import Scene, sample_scene

LENGTH = 320  # tokens of every sequence
NUM_GROUPS, NUM_FOREIGN, NUM_CLIPS = 1500, 1500, 500  # of an album
NUM_SLOTS = GROUP_SIZE * NUM_GROUPS + NUM_FOREIGN + 4 * NUM_CLIPS
FIRST_GROUPS, FIRST_FOREIGN, FIRST_CLIPS = 200, 200, 60  # that an album begins with
NEW_GROUPS, NEW_FOREIGN, NEW_CLIPS = 1, 1, 1  # of a message
# Pairs of one group: the very same image, the same scene drawn otherwise, scenes alike
ALIKE = ((0, 0), (1, 1), (0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (1, 3), (3, 1), (2, 3))


@dataclass(slots=True)
class Picture:
    """Where a picture is in the album, and what it shows; None is a picture of something else."""

    slot: int
    scene: Scene | None
    is_mirrored: bool = False

    def mirror(self) -> "Picture":
        scene = self.scene and decode(mirror_codes(encode(self.scene)))
        return Picture(self.slot, scene, not self.is_mirrored)


@dataclass(slots=True)
class Album:
    """Pictures by their slots, counted from `first_slot`; `new` are drawn since the last message."""

    rng: Random
    first_slot: int
    groups: list[list[Picture]] = field(default_factory=list)
    foreign: list[Picture] = field(default_factory=list)
    clips: list[tuple[list[int], Clip]] = field(default_factory=list)
    new: list[tuple[int, np.ndarray, np.ndarray, bool]] = field(default_factory=list)
    drawn: list[int] = field(default_factory=lambda: [0, 0, 0])

    def draw(self, num_groups: int, num_foreign: int, num_clips: int) -> None:
        """Draw new pictures; they take the places of the oldest ones when the album is full."""
        for _ in range(num_groups):
            first = self.first_slot + GROUP_SIZE * (self.drawn[0] % NUM_GROUPS)
            group = [self._add(first + i, *pair) for i, pair in enumerate(render_group(self.rng))]
            self._put(self.groups, 0, NUM_GROUPS, group)
        for _ in range(num_foreign):
            slot = self.first_slot + GROUP_SIZE * NUM_GROUPS + self.drawn[1] % NUM_FOREIGN
            self._put(self.foreign, 1, NUM_FOREIGN, self._add(slot, None, draw_foreign(self.rng)))
        for _ in range(num_clips):
            first = self.first_slot + GROUP_SIZE * NUM_GROUPS + NUM_FOREIGN
            first += 4 * (self.drawn[2] % NUM_CLIPS)
            clip = sample_clip(self.rng, self.rng.choice((2, 3, 4, 4, 4, 4, 4, 4)))
            images = render_clip(clip, self.rng, sample_style(self.rng))
            shown = zip(clip.frames, images, clip.is_clear, strict=True)
            slots = [self._add(first + i, *frame).slot for i, frame in enumerate(shown)]
            self._put(self.clips, 2, NUM_CLIPS, (slots, clip))

    def _put(self, kept: list[Any], sort: int, most: int, item: Any) -> None:
        if len(kept) < most:
            kept.append(item)
        else:
            kept[self.drawn[sort] % most] = item
        self.drawn[sort] += 1

    def _add(self, slot: int, scene: Scene | None, image: Any, is_clear: bool = True) -> Picture:
        code = encode(scene) if scene else np.zeros(CODE_LENGTH, dtype=np.uint8)
        self.new.append((slot, to_input(image, IMAGE_SIZE), code, bool(scene) and is_clear))
        return Picture(slot, scene)

    def any(self, alike: float = 0.0, foreign: float = 0.0) -> list[Picture]:
        """Two pictures, sometimes of one group, sometimes not of the image world."""
        rng = self.rng
        group = rng.choice(self.groups)
        pictures = [group[index] for index in rng.choice(ALIKE)]
        if rng.random() >= alike:
            pictures[1] = rng.choice(rng.choice(self.groups))
        if rng.random() < foreign:
            pictures[rng.randrange(2)] = rng.choice(self.foreign)
        return [picture.mirror() for picture in pictures] if rng.random() < 0.5 else pictures


Lesson = tuple[Sequence, list[Picture]]


def _fill(
    packer: Packer, pictures: list[Picture], make: Callable[[], list[Question]], rng: Random,
    tools: str = "", system: str | None = None,
) -> Lesson:  # fmt: skip
    """Pictures, then as many conversations about them as fit, each alone with the pictures."""
    encoder = packer.encoder
    packer.add(encoder.opening(system, tools) + encoder.images(len(pictures)), 0, 0)
    start, branch, misses = len(packer.token_ids), 0, 0
    while misses < 4:
        turns = tuple(Turn(0, question) for question in make())
        gap = rng.randrange(MAX_GAP) if rng.random() < 0.2 else 0
        branch += 1
        misses += not packer.add_branch(Conversation(turns), branch, start + gap, skip_images=True)
    return packer.finish(), pictures


def about_pictures(album: Album, packer: Packer, pictures: list[Picture]) -> Lesson:
    """Conversations of one to four turns about one or two pictures."""
    rng = album.rng
    scenes: Scenes = tuple(picture.scene for picture in pictures)

    def make() -> list[Question]:
        number = rng.choice((1, 1, 1, 2, 3, 4))
        conversation = sample_conversation(scenes, number, rng, at_once=True)
        return [turn.question for turn in conversation.turns]

    return _fill(packer, pictures, make, rng, system=sample_system(rng))


def in_json(album: Album, packer: Packer) -> Lesson:
    """Answers as JSON, and a few in words, so that only who is asked for JSON gives it."""
    rng, picture = album.rng, album.any()[0]
    if rng.random() < 0.12:
        picture = rng.choice(album.foreign)

    def make() -> list[Question]:
        if rng.random() < 0.12:
            return [sample_question((picture.scene,), rng)]
        return [sample_json(picture.scene, rng)]

    return _fill(packer, [picture], make, rng, system=sample_system(rng))


def with_tools(album: Album, packer: Packer) -> Lesson:
    """Questions with functions at hand."""
    rng, picture = album.rng, album.any()[0]
    if rng.random() < 0.1:
        picture = rng.choice(album.foreign)
    tools = sample_tools(rng)
    system = sample_system(rng)
    return _fill(packer, [picture], lambda: ask_with_tools(picture.scene, tools, rng), rng, list_tools(tools), system)  # fmt: skip


def about_clip(album: Album, packer: Packer) -> Lesson:
    """Questions about what happens in a clip."""
    rng = album.rng
    slots, clip = rng.choice(album.clips)

    def make() -> list[Question]:
        if rng.random() < 0.12:
            return [sample_question(clip.frames, rng)]
        return [ask_about_clip(clip, rng) for _ in range(rng.choice((1, 1, 2)))]

    pictures = [Picture(slot, scene) for slot, scene in zip(slots, clip.frames, strict=True)]
    return _fill(packer, pictures, make, rng, system=sample_system(rng))


def in_text(album: Album, packer: Packer) -> Lesson:
    """Conversations without pictures: nothing can be answered."""
    rng = album.rng
    misses = branch = 0
    while misses < 4:
        branch += 1
        questions = [_ask_without_picture(rng) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        tools = list_tools(sample_tools(rng)) if rng.random() < 0.1 else ""
        opening = packer.encoder.opening(sample_system(rng), tools)
        turns = tuple(Turn(0, question) for question in questions)
        misses += not _add_apart(packer, Conversation(turns), opening, branch)
    return packer.finish(), []


def _ask_without_picture(rng: Random) -> Question:
    if rng.random() < 0.12:
        return sample_json(None, rng)
    text = sample_small_talk(rng)
    if rng.random() < 0.25:
        number = rng.choice((1, 1, 2))
        text = sample_question(tuple(sample_scene(rng) for _ in range(number)), rng).text
    return Question("outside", text, OUTSIDE)


def _add_apart(packer: Packer, conversation: Conversation, opening: list[int], branch: int) -> int:
    """Add a conversation that shares nothing; whole or not at all. Returns how many turns."""
    turns = list(packer.encoder.turns(conversation, skip_images=False))
    first = turns[0].prompt + turns[0].answer
    if len(packer.token_ids) + len(opening) + len(first) > packer.length:
        return 0
    packer.add(opening, branch, 0)
    return packer.add_branch(conversation, branch, len(opening), skip_images=False)


def in_pairs(album: Album, packer: Packer) -> Lesson:
    """Pairs of pictures, each for itself. Whether two are the same is one bit a pair: it takes many."""
    rng, shown = album.rng, []
    for branch in range(1, 4):
        pictures = album.any(alike=0.9)
        first, second = (picture.scene for picture in pictures)
        assert first is not None
        assert second is not None
        question = ask_about_pair("same", first, second, rng)
        turns = Conversation((Turn(2, question),))
        if _add_apart(packer, turns, packer.encoder.opening(None), branch):
            shown += pictures
    return packer.finish(), shown


def as_conversation(album: Album, packer: Packer) -> Lesson:
    """One long conversation in which the pictures come at any turn."""
    rng = album.rng
    number = rng.choice((1, 2, 2, 3, 4))
    pictures = [*album.any(0.4, 0.25), *album.any(0.4, 0.25)][:number]
    scenes: Scenes = tuple(picture.scene for picture in pictures)
    conversation = sample_conversation(scenes, rng.randint(8, 24), rng)
    if rng.random() < 0.3:
        greeting = Question("outside", sample_small_talk(rng), OUTSIDE)
        conversation = Conversation((Turn(0, greeting), *conversation.turns), conversation.system)
    packer.add(packer.encoder.opening(conversation.system), 0, 0)
    added = packer.add_branch(conversation, 0, len(packer.token_ids), skip_images=False)
    num_shown = sum(turn.num_images for turn in conversation.turns[:added])
    return packer.finish(), pictures[:num_shown]


LESSONS: tuple[tuple[Callable[[Album, Packer], Lesson], float], ...] = (
    (lambda album, packer: about_pictures(album, packer, album.any()[:1]), 0.20),
    (lambda album, packer: about_pictures(album, packer, album.any(alike=0.5, foreign=0.12)), 0.20),
    (lambda album, packer: about_pictures(album, packer, [album.rng.choice(album.foreign)]), 0.08),
    (in_text, 0.06),
    (in_json, 0.16),
    (with_tools, 0.06),
    (about_clip, 0.11),
    (in_pairs, 0.05),
    (as_conversation, 0.08),
)


def make_message(album: Album, encoder: Encoder, num_sequences: int) -> dict[str, Any]:
    """New pictures and sequences, as arrays; `shown` are slots doubled, odd if mirrored, in the order of the sequences."""
    rng = album.rng
    makers = rng.choices([make for make, _ in LESSONS], [share for _, share in LESSONS], k=num_sequences)  # fmt: skip
    lessons = [make(album, Packer(encoder, LENGTH)) for make in makers]
    types = {
        "token_ids": np.int16,
        "positions": np.int16,
        "branches": np.int8,
        "weights": np.float16,
    }
    message: dict[str, Any] = {
        name: np.stack([getattr(sequence, name) for sequence, _ in lessons]).astype(dtype)
        for name, dtype in types.items()
    }
    shown = [2 * each.slot + each.is_mirrored for _, pictures in lessons for each in pictures]
    message["shown"] = np.array(shown, dtype=np.int64)
    message["answers"] = [sequence.answers for sequence, _ in lessons]
    slots, images, codes, known = zip(*album.new, strict=True) if album.new else ((), (), (), ())
    if slots:
        message |= {"slots": np.array(slots), "images": np.stack(images), "codes": np.stack(codes), "known": np.array(known)}  # fmt: skip
    album.new = []
    return message


def teach(
    queue: Any, encoder: Encoder, num_sequences: int, index: int, seed: int, is_hungry: Any
) -> None:
    """The life of a process: messages without end. While the learner waits, fewer pictures are drawn."""
    album = Album(Random(f"{seed}/{index}"), index * NUM_SLOTS)
    album.draw(FIRST_GROUPS, FIRST_FOREIGN, FIRST_CLIPS)
    while True:
        try:
            queue.put(make_message(album, encoder, num_sequences))
        except (
            ArithmeticError,
            AssertionError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
        ):
            traceback.print_exc()  # one lesson less; the run is worth more than it
        if album.rng.random() < (0.85 if is_hungry.value else 0.5):
            continue
        album.draw(NEW_GROUPS, NEW_FOREIGN, NEW_CLIPS)
