"""Packs conversations into training sequences.

Many independent conversations about the same images share one sequence: they all see the images and
none sees another, so that images are read once and every conversation still looks as if it were alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from transformers import PreTrainedTokenizerFast

from training.shapes.conversations import Conversation
from training.shapes.questions import Question
from training.shapes.tokenizer import BOS_ID, EOS_ID, IMAGE_ID, PAD_ID

PADDING = -1  # the branch of padding; 0 is what all branches share
MAX_GAP = 700  # positions by which a branch may stand apart from its images, as after a long talk


@dataclass(frozen=True, slots=True)
class Sequence:
    """One packed sequence. Shapes: all (T,).

    `branches` says which conversation a token belongs to (0: to all), `positions` where it stands in its
    own conversation, and `weights` how much it counts in the loss when it is predicted (0 for prompts).
    `answers` are (topic, start, end) of each answer's tokens.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    branches: np.ndarray
    weights: np.ndarray
    answers: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class EncodedTurn:
    """Token ids of a prompt and of its answer, and the weights of the answer's tokens."""

    topic: str
    prompt: list[int]
    answer: list[int]
    weights: list[float]


class Encoder:
    """Text to token ids, piece by piece; the same ids as the chat template as a whole gives."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, num_image_tokens: int) -> None:
        self.num_image_tokens = num_image_tokens
        self.encode = lru_cache(100_000)(
            lambda text: tuple(tokenizer.encode(text, add_special_tokens=False))
        )

    def opening(self, system: str | None, tools: str = "") -> list[int]:
        """The beginning of every conversation; `tools` is the list of functions."""
        return [BOS_ID, *self.encode(tools), *self.encode(f"{system} " if system else "")]

    def images(self, num_images: int) -> list[int]:
        """A user's turn up to and including its images."""
        image = [IMAGE_ID] * self.num_image_tokens + list(self.encode("\n"))
        return [*self.encode("USER: "), *(num_images * image)]

    def question(self, text: str) -> list[int]:
        """The rest of a user's turn, and the invitation to answer."""
        return list(self.encode(f"{text} ASSISTANT: "))

    def answer(self, text: str) -> list[int]:
        """What the model should say."""
        return [*self.encode(text), EOS_ID]

    def weighted_answer(self, question: Question) -> tuple[list[int], list[float]]:
        """What the model should say, and how much each token counts: those of an answer as much as its root."""
        pieces = question.pieces or ((question.answer, 1.0),)
        ids: list[int] = []
        weights: list[float] = []
        for text, weight in pieces:
            encoded = self.encode(text)
            ids += encoded
            weights += len(encoded) * [weight]
        ids.append(EOS_ID)
        weights.append(1.0)
        share = sum(weights) ** -0.5
        return ids, [share * weight for weight in weights]

    def turns(self, conversation: Conversation, skip_images: bool) -> Iterator[EncodedTurn]:
        """Every turn; `skip_images` leaves out the first images."""
        for index, turn in enumerate(conversation.turns):
            question = turn.question
            if skip_images and index == 0:
                start = []
            elif question.role == "USER":
                start = self.images(turn.num_images)
            else:
                start = list(self.encode(f"{question.role}: "))
            prompt = start + self.question(question.text)
            yield EncodedTurn(question.topic, prompt, *self.weighted_answer(question))


class Packer:
    """Fills one sequence of `length` tokens with conversations."""

    def __init__(self, encoder: Encoder, length: int) -> None:
        self.encoder = encoder
        self.length = length
        self.token_ids: list[int] = []
        self.positions: list[int] = []
        self.branches: list[int] = []
        self.weights: list[float] = []
        self.answers: list[tuple[str, int, int]] = []

    def add(
        self, token_ids: list[int], branch: int, position: int, weights: list[float] | None = None
    ) -> None:
        """Add tokens of a branch, the first of them at a position."""
        self.token_ids += token_ids
        self.positions += range(position, position + len(token_ids))
        self.branches += [branch] * len(token_ids)
        self.weights += [0.0] * len(token_ids) if weights is None else weights

    def add_branch(
        self, conversation: Conversation, branch: int, position: int, skip_images: bool
    ) -> int:
        """Add as many turns as fit; return how many."""
        num_added = 0
        for turn in self.encoder.turns(conversation, skip_images):
            prompt, answer = turn.prompt, turn.answer
            if len(self.token_ids) + len(prompt) + len(answer) > self.length:
                break
            self.add(prompt, branch, position)
            self.add(answer, branch, position + len(prompt), turn.weights)
            end = len(self.token_ids)
            self.answers.append((turn.topic, end - len(answer), end))
            position += len(prompt) + len(answer)
            num_added += 1
        return num_added

    def finish(self) -> Sequence:
        """The sequence, padded to its length."""
        missing = self.length - len(self.token_ids)
        return Sequence(
            np.array(self.token_ids + [PAD_ID] * missing, dtype=np.int64),
            np.array(self.positions + [0] * missing, dtype=np.int64),
            np.array(self.branches + [PADDING] * missing, dtype=np.int64),
            np.array(self.weights + [0.0] * missing, dtype=np.float32),
            tuple(self.answers),
        )
