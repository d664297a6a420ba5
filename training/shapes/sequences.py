"""Packs conversations into training sequences.

Many independent conversations about the same images share one sequence, so that images are encoded once. Each
conversation attends to the images and to itself, but not to other conversations.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

from training.shapes.architecture import NUM_IMAGE_TOKENS
from training.shapes.conversations import Turn
from training.shapes.llava import PreTrainedTokenizerFast
from training.shapes.questions import Question

BOS_ID, EOS_ID, _, PAD_ID, IMAGE_ID = range(5)
PADDING = -1  # branch of padding; branch 0 is the prefix that all branches share
MAX_GAP = 700  # largest gap in positions between images and a branch, as in a long conversation


class Encoder:
    """Encodes conversations piece by piece, to the same token ids as the whole chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.encode = lru_cache(100_000)(
            lambda text: tuple(tokenizer.encode(text, add_special_tokens=False))
        )

    def opening(self, system: str | None, tools: str = "") -> list[int]:
        """The beginning of every conversation; `tools` is the list of functions."""
        return [BOS_ID, *self.encode(tools), *self.encode(f"{system} " if system else "")]

    def images(self, num_images: int) -> list[int]:
        """A user's turn up to and including its images."""
        image = [IMAGE_ID] * NUM_IMAGE_TOKENS + list(self.encode("\n"))
        return [*self.encode("USER: "), *(num_images * image)]

    def question(self, text: str) -> list[int]:
        """The remainder of a user's turn, and the generation prompt."""
        return list(self.encode(f"{text} ASSISTANT: "))

    def answer(self, question: Question) -> tuple[list[int], list[float]]:
        """Target token ids and loss weights; the weights are scaled to add up to the square root of their sum."""
        ids: list[int] = []
        weights: list[float] = []
        for text, weight in question.pieces or ((question.answer, 1.0),):
            encoded = self.encode(text)
            ids += encoded
            weights += len(encoded) * [weight]
        ids.append(EOS_ID)
        weights.append(1.0)
        share = sum(weights) ** -0.5
        return ids, [share * weight for weight in weights]

    def turn(self, turn: Turn, skip_images: bool) -> tuple[list[int], list[int], list[float]]:
        """A prompt, its answer, and the loss weights of the answer. `skip_images`: the images are already packed."""
        question, start = turn.question, []
        if not skip_images:
            is_user = question.role == "USER"
            role = f"{question.role}: "
            start = self.images(turn.num_images) if is_user else list(self.encode(role))
        return start + self.question(question.text), *self.answer(question)


class Packer:
    """Fills one sequence of `length` tokens with conversations.

    A token has an id, a position in its conversation, a branch (the number of its conversation; 0: shared by all) and a
    loss weight (0 for prompts).
    """

    def __init__(self, encoder: Encoder, length: int) -> None:
        self.encoder = encoder
        self.length = length
        self.tokens: list[tuple[int, int, int, float]] = []

    def add(
        self, token_ids: list[int], branch: int, position: int, weights: list[float] | None = None
    ) -> None:
        """Add tokens of a branch; `position` is that of the first token."""
        weights = weights or [0.0] * len(token_ids)
        for index, (token_id, weight) in enumerate(zip(token_ids, weights, strict=True)):
            self.tokens.append((token_id, position + index, branch, weight))

    def add_branch(
        self,
        turns: Sequence[Turn],
        branch: int,
        position: int,
        opening: Sequence[int] = (),
        skip_images: bool = False,
    ) -> int:
        """Add an opening and as many turns as fit; return their number. `skip_images` omits the first turn's images."""
        for index, turn in enumerate(turns):
            prompt, answer, weights = self.encoder.turn(turn, skip_images and index == 0)
            prompt = prompt if index else [*opening, *prompt]
            if len(self.tokens) + len(prompt) + len(answer) > self.length:
                return index
            self.add(prompt, branch, position)
            self.add(answer, branch, position + len(prompt), weights)
            position += len(prompt) + len(answer)
        return len(turns)

    def padded(self) -> Iterator[tuple[float, ...]]:
        """Token ids, positions, branches and weights, padded to the length."""
        padding = [(PAD_ID, 0, PADDING, 0.0)] * (self.length - len(self.tokens))
        return zip(*self.tokens, *padding, strict=True)
