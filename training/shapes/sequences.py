"""Packs conversations into training sequences.

Many independent conversations about the same images share one sequence: they all see the images and
none sees another, so that images are read once and every conversation still looks as if it were alone.
"""

from collections.abc import Sequence
from functools import lru_cache

from training.shapes.architecture import NUM_IMAGE_TOKENS
from training.shapes.conversations import Turn
from training.shapes.llava import PreTrainedTokenizerFast
from training.shapes.questions import Question
from training.shapes.tokenizer import BOS_ID, EOS_ID, IMAGE_ID, PAD_ID

PADDING = -1  # the branch of padding; 0 is what all branches share
MAX_GAP = 700  # positions by which a branch may stand apart from its images, as after a long talk


class Encoder:
    """Text to token ids, piece by piece; the same ids as the chat template as a whole gives."""

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
        """The rest of a user's turn, and the invitation to answer."""
        return list(self.encode(f"{text} ASSISTANT: "))

    def answer(self, question: Question) -> tuple[list[int], list[float]]:
        """What the model should say, and how much each token counts: those of an answer as much as its root."""
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
        """A prompt, its answer, and the weights of the answer's tokens; `skip_images` if they are there already."""
        question, start = turn.question, []
        if not skip_images:
            is_user = question.role == "USER"
            role = f"{question.role}: "
            start = self.images(turn.num_images) if is_user else list(self.encode(role))
        return start + self.question(question.text), *self.answer(question)


class Packer:
    """Fills one sequence of `length` tokens with conversations.

    `branches` says which conversation a token belongs to (0: to all), `positions` where it stands in its
    own conversation, and `weights` how much it counts in the loss when it is predicted (0 for prompts).
    """

    def __init__(self, encoder: Encoder, length: int) -> None:
        self.encoder = encoder
        self.length = length
        self.token_ids: list[int] = []
        self.positions: list[int] = []
        self.branches: list[int] = []
        self.weights: list[float] = []

    def add(
        self, token_ids: list[int], branch: int, position: int, weights: list[float] | None = None
    ) -> None:
        """Add tokens of a branch, the first of them at a position."""
        self.token_ids += token_ids
        self.positions += range(position, position + len(token_ids))
        self.branches += [branch] * len(token_ids)
        self.weights += [0.0] * len(token_ids) if weights is None else weights

    def add_branch(
        self,
        turns: Sequence[Turn],
        branch: int,
        position: int,
        opening: Sequence[int] = (),
        skip_images: bool = False,
    ) -> int:
        """Add as many turns as fit, after an opening; return how many. `skip_images` leaves out the first images."""
        for index, turn in enumerate(turns):
            prompt, answer, weights = self.encoder.turn(turn, skip_images and index == 0)
            prompt = prompt if index else [*opening, *prompt]
            if len(self.token_ids) + len(prompt) + len(answer) > self.length:
                return index
            self.add(prompt, branch, position)
            self.add(answer, branch, position + len(prompt), weights)
            position += len(prompt) + len(answer)
        return len(turns)

    def padded(self) -> tuple[list[int], list[int], list[int], list[float]]:
        """Token ids, positions, branches and weights, padded to the length."""
        missing = self.length - len(self.token_ids)
        return (
            self.token_ids + [PAD_ID] * missing,
            self.positions + [0] * missing,
            self.branches + [PADDING] * missing,
            self.weights + [0.0] * missing,
        )
