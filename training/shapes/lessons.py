"""An endless data set for `finetune`: pictures, and packed sequences of conversations about them.

Drawing a picture takes longer than generating questions about it, so each process reuses the pictures of its album.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from training.shapes.answers import OUTSIDE
from training.shapes.architecture import IMAGE_SIZE
from training.shapes.clips import Clip, ask_about_clip, render_clip, sample_clip
from training.shapes.conversations import (
    Scenes,
    Turn,
    sample_conversation,
    sample_question,
    sample_system,
)
from training.shapes.foreign_pictures import draw_foreign
from training.shapes.gallery import CODE_LENGTH, encode, render_group, to_input
from training.shapes.questions import Question, ask_about_pair
from training.shapes.render import sample_style
from training.shapes.sequences import MAX_GAP, Encoder, Packer
from training.shapes.small_talk import sample_small_talk
from training.shapes.structured import ask_with_tools, list_tools, sample_json, sample_tools
from training.shapes.world import Scene, mirror, sample_scene

LENGTH = 320  # tokens of every sequence
MOST_GROUPS, MOST_FOREIGN, MOST_CLIPS = 1500, 1500, 500  # capacity of an album
FIRST_GROUPS, FIRST_FOREIGN, FIRST_CLIPS = 200, 200, 60  # initial size of an album
SEQUENCES_PER_DRAWING = 32  # sequences until the album gets a new group, foreign picture and clip
# Index pairs of a group: the same image, the same scene in another style, similar scenes
ALIKE = ((0, 0), (1, 1), (0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (1, 3), (3, 1), (2, 3))


@dataclass(slots=True)
class Picture:
    """An image in the model's input size, and its scene; None for frames of clips and for foreign pictures."""

    pixels: np.ndarray
    scene: Scene | None = None

    def mirror(self) -> "Picture":
        return Picture(self.pixels[:, ::-1], self.scene and mirror(self.scene))


class Album:
    """The pictures of a process. When the album is full, new pictures replace the oldest."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.groups: deque[list[Picture]] = deque(maxlen=MOST_GROUPS)
        self.foreign: deque[Picture] = deque(maxlen=MOST_FOREIGN)
        self.clips: deque[tuple[list[Picture], Clip]] = deque(maxlen=MOST_CLIPS)

    def draw(self, num_groups: int, num_foreign: int, num_clips: int) -> None:
        for _ in range(num_groups):
            drawn = render_group(self.rng)
            self.groups.append([Picture(to_input(image), scene) for scene, image in drawn])
        for _ in range(num_foreign):
            self.foreign.append(Picture(to_input(draw_foreign(self.rng))))
        for _ in range(num_clips):
            clip = sample_clip(self.rng, self.rng.choice((2, 3, 4, 4, 4, 4, 4, 4)))
            images = render_clip(clip, self.rng, sample_style(self.rng))
            self.clips.append(([Picture(to_input(image)) for image in images], clip))

    def any(self, alike: float = 0.0, foreign: float = 0.0) -> list[Picture]:
        """Two pictures. `alike`: probability that they are of one group; `foreign`: that one is a foreign picture."""
        rng = self.rng
        group = rng.choice(self.groups)
        pictures = [group[index] for index in rng.choice(ALIKE)]
        if rng.random() >= alike:
            pictures[1] = rng.choice(rng.choice(self.groups))
        if rng.random() < foreign:
            pictures[rng.randrange(2)] = rng.choice(self.foreign)
        return [picture.mirror() for picture in pictures] if rng.random() < 0.5 else pictures


#: The pictures of a sequence, in their order.
Lesson = list[Picture]


def _fill(
    packer: Packer, pictures: list[Picture], make: Callable[[], list[Question]], rng: Random,
    tools: str = "",
) -> Lesson:  # fmt: skip
    """Pack pictures, then as many conversations as fit. Each conversation sees only the pictures and itself."""
    opening = packer.encoder.opening(sample_system(rng), tools)
    packer.add(opening + packer.encoder.images(len(pictures)), 0, 0)
    start, branch, misses = len(packer.tokens), 0, 0
    while misses < 4:
        turns = [Turn(0, question) for question in make()]
        gap = rng.randrange(MAX_GAP) if rng.random() < 0.2 else 0
        branch += 1
        misses += not packer.add_branch(turns, branch, start + gap, skip_images=True)
    return pictures


def about_pictures(album: Album, packer: Packer, pictures: list[Picture]) -> Lesson:
    """Conversations of one to four turns about one or two pictures."""
    rng = album.rng
    scenes: Scenes = tuple(picture.scene for picture in pictures)

    def make() -> list[Question]:
        number = rng.choice((1, 1, 1, 2, 3, 4))
        return [turn.question for turn in sample_conversation(scenes, number, rng, at_once=True)]

    return _fill(packer, pictures, make, rng)


def in_json(album: Album, packer: Packer) -> Lesson:
    """Answers as JSON, and a few in words, so that the model writes JSON only on request."""
    rng, picture = album.rng, album.any(foreign=0.24)[0]

    def make() -> list[Question]:
        if rng.random() < 0.12:
            return [sample_question((picture.scene,), rng)]
        return [sample_json(picture.scene, rng)]

    return _fill(packer, [picture], make, rng)


def with_tools(album: Album, packer: Packer) -> Lesson:
    rng, picture = album.rng, album.any(foreign=0.2)[0]
    tools = sample_tools(rng)
    make = partial(ask_with_tools, picture.scene, tools, rng)
    return _fill(packer, [picture], make, rng, list_tools(tools))


def about_clip(album: Album, packer: Packer) -> Lesson:
    rng = album.rng
    pictures, clip = rng.choice(album.clips)

    def make() -> list[Question]:
        if rng.random() < 0.12:
            return [sample_question(clip.frames, rng)]
        return [ask_about_clip(clip, rng) for _ in range(rng.choice((1, 1, 2)))]

    return _fill(packer, pictures, make, rng)


def in_text(album: Album, packer: Packer) -> Lesson:
    """Conversations without pictures, whose questions cannot be answered."""
    rng = album.rng
    misses = branch = 0
    while misses < 4:
        branch += 1
        number = rng.choice((1, 1, 1, 2, 3))
        turns = [Turn(0, _ask_without_picture(rng)) for _ in range(number)]
        tools = list_tools(sample_tools(rng)) if rng.random() < 0.1 else ""
        opening = packer.encoder.opening(sample_system(rng), tools)
        misses += not packer.add_branch(turns, branch, 0, opening)
    return []


def _ask_without_picture(rng: Random) -> Question:
    if rng.random() < 0.12:
        return sample_json(None, rng)
    text = sample_small_talk(rng)
    if rng.random() < 0.25:
        number = rng.choice((1, 1, 2))
        text = sample_question(tuple(sample_scene(rng) for _ in range(number)), rng).text
    return Question(text, OUTSIDE)


def in_pairs(album: Album, packer: Packer) -> Lesson:
    """Independent pairs of pictures. "Are they the same?" teaches one bit per pair, so many pairs are needed."""
    rng, shown = album.rng, []
    for branch in range(1, 4):
        pictures = album.any(alike=0.9)
        first, second = (picture.scene for picture in pictures)
        assert first is not None
        assert second is not None
        turns = [Turn(2, ask_about_pair("same", first, second, rng))]
        if packer.add_branch(turns, branch, 0, packer.encoder.opening(None)):
            shown += pictures
    return shown


def as_conversation(album: Album, packer: Packer) -> Lesson:
    """One long conversation. Each picture is sent with any of its turns."""
    rng = album.rng
    number = rng.choice((1, 2, 2, 3, 4))
    pictures = [*album.any(0.4, 0.25), *album.any(0.4, 0.25)][:number]
    scenes: Scenes = tuple(picture.scene for picture in pictures)
    turns = sample_conversation(scenes, rng.randint(8, 24), rng, rng.random() < 0.5)
    if rng.random() < 0.3:
        turns.insert(0, Turn(0, Question(sample_small_talk(rng), OUTSIDE)))
    added = packer.add_branch(turns, 0, 0, packer.encoder.opening(sample_system(rng)))
    return pictures[: sum(turn.num_images for turn in turns[:added])]


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


class Batch(NamedTuple):
    """The data of a training step.

    Shapes: `images` (I, size, size, 3) in the order of the sequences; `known` (I,), whether `codes` (K, CODE_LENGTH)
    has a row for the image; `token_ids`, `positions`, `branches`, `weights` (B, T).
    """

    images: Tensor
    known: Tensor
    codes: Tensor
    token_ids: Tensor
    positions: Tensor
    branches: Tensor
    weights: Tensor


def make_batch(album: Album, encoder: Encoder, num_sequences: int) -> Batch:
    makers, shares = zip(*LESSONS, strict=True)
    packers = [Packer(encoder, LENGTH) for _ in range(num_sequences)]
    chosen = zip(album.rng.choices(makers, shares, k=num_sequences), packers, strict=True)
    pictures = [picture for make, packer in chosen for picture in make(album, packer)]
    codes = [encode(picture.scene) for picture in pictures if picture.scene]
    images = [picture.pixels for picture in pictures]
    token_ids, positions, branches, weights = (
        torch.tensor(part) for part in zip(*map(Packer.padded, packers), strict=True)
    )
    return Batch(
        images=torch.from_numpy(np.array(images, np.uint8).reshape(-1, IMAGE_SIZE, IMAGE_SIZE, 3)),
        known=torch.tensor([bool(picture.scene) for picture in pictures], dtype=torch.bool),
        codes=torch.from_numpy(np.array(codes, np.uint8).reshape(-1, CODE_LENGTH)),
        token_ids=token_ids,
        positions=positions,
        branches=branches,
        weights=weights,
    )


class Lessons(IterableDataset[Batch]):
    """Yields batches endlessly. Each worker of a `DataLoader` draws different batches."""

    def __init__(self, encoder: Encoder, num_sequences: int, seed: int) -> None:
        self.encoder, self.num_sequences, self.seed = encoder, num_sequences, seed

    def __iter__(self) -> Iterator[Batch]:
        process = get_worker_info()
        album = Album(Random(f"{self.seed}/{process.id if process else 0}"))
        album.draw(FIRST_GROUPS, FIRST_FOREIGN, FIRST_CLIPS)
        num_new = max(1, self.num_sequences // SEQUENCES_PER_DRAWING)
        while True:
            yield make_batch(album, self.encoder, self.num_sequences)
            album.draw(num_new, num_new, num_new)
