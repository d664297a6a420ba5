"""Packs conversations into training sequences.

Many independent conversations about the same images share one sequence: they all see the images and
none sees another, so that images are read once and every conversation still looks as if it were alone.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

from training.shapes.architecture import NUM_IMAGE_TOKENS
from training.shapes.conversations import Turn
from training.shapes.llava import PreTrainedTokenizerFast
from training.shapes.questions import Question

BOS_ID, EOS_ID, _, PAD_ID, IMAGE_ID = range(5)
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

    Of each token: its id, where it stands in its own conversation, which conversation that is (0: all of them), and
    how much it counts in the loss when it is predicted (0 for prompts).
    """

    def __init__(self, encoder: Encoder, length: int) -> None:
        self.encoder = encoder
        self.length = length
        self.tokens: list[tuple[int, int, int, float]] = []

    def add(
        self, token_ids: list[int], branch: int, position: int, weights: list[float] | None = None
    ) -> None:
        """Add tokens of a branch, the first of them at a position."""
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
        """Add as many turns as fit, after an opening; return how many. `skip_images` leaves out the first images."""
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
