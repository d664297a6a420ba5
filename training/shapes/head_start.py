"""Gives the decoder a head start: words begin as what the eye says of what they name.

A decoder from scratch spends most of its time on finding that "star" in a question and a star in an image
have to do with each other. Here the embedding of such a word begins with its vector of the code book, and
some heads begin as what every solution seems to need: one looks at the patches that a word names and copies
what is known of them, one fetches the word before ("top" for "left"), one tells the first image from later
ones, one gathers the words that name something, two compare images. All of it is open to training.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from training.shapes.code_book import COLUMNS, COMPARED, ROWS, CodeBook
from training.shapes.llava import LlavaForConditionalGeneration
from training.shapes.world import BACKGROUNDS, COLORS, KINDS, MAX_SHAPES, SIZES

MEANING = 1.5  # of a word that names something, where what the eye gives has 1
MARK = 0.7  # in a word that names nothing; after normalization, all words have the same
NAME_MARK = 1.26  # in a word that names something
OUTPUT = 0.3  # of a meaning in the output head
NUM_LAYERS = 4  # that begin as something
MATCH_GAIN = 0.6  # a name's patches get about 6 more in the logits than others
MARK_GAIN = 0.6  # and any patch about as much more than a word
SYNONYMS = {
    "upper": "top", "lower": "bottom", "centre": "center", "grey": "gray", "big": "large",
}  # fmt: skip


@torch.no_grad()
def give_head_start(
    model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, book: CodeBook
) -> None:
    """Set embeddings, output head and some attention heads of a fresh model."""
    decoder = model.model.language_model
    newline = _write_words(decoder.embed_tokens.weight, model.lm_head.weight, tokenizer, book)
    for layer in decoder.layers[NUM_LAYERS:]:  # which add nothing at first
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    for index, layer in enumerate(decoder.layers[:NUM_LAYERS]):
        heads = HeadGroups(layer.self_attn)
        if index > 0:
            heads.look_up(0, book, ("kind", "color"))
            heads.look_up(1, book, ("row", "column"))
        if index < 2:
            heads.copy_the_word_before(2, book)
        if index == 0:
            heads.mark_later_images(3, book, newline)
        if index == 1:
            heads.gather_names(3, book)
        if index == 2:
            heads.compare_images(2, 3, book)
            _find_differences(layer.mlp, book)
        if index == 3:
            heads.look_for_differences(2, book)


def _write_words(
    embeddings: Tensor, output: Tensor, tokenizer: PreTrainedTokenizerFast, book: CodeBook
) -> Tensor:
    """Embeddings: what only this token has, the mark of words, and the meaning; returns the newline's own.

    Shapes: (tokens, width) both; (width,) out.
    """
    marks = torch.stack([book.patch, book.word, book.second, book.differs])
    codes = torch.cat([*book.vectors.values(), marks, book.spare])
    own = torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(0))
    own = nn.functional.normalize(own - own @ codes.T @ codes, dim=1)
    embeddings.copy_(own + MARK * book.word)
    for word, meaning in _meanings(book):
        for token in _tokens_of(word, tokenizer):
            embeddings[token] = own[token] + NAME_MARK * book.word + MEANING * meaning
            output[token] += OUTPUT * meaning
    return own[tokenizer.encode("\n", add_special_tokens=False)[0]]


def _tokens_of(word: str, tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """The tokens that are this word: with a space or not, plural or not, with a capital or not."""
    spellings = {word, word.capitalize(), f"{word}s", f"{word}es"}
    encoded = [
        tokenizer.encode(f"{spelling}{space}", add_special_tokens=False)
        for spelling in spellings
        for space in ("", " ")
    ]
    return {ids[0] for ids in encoded if len(ids) == 1}


def _meanings(book: CodeBook) -> Iterator[tuple[str, Tensor]]:
    """Words with what they mean."""
    meanings: dict[str, Tensor] = {"second": book.second, "first": -book.second}
    for name, words in (("kind", ("nothing", *KINDS)), ("size", SIZES), ("color", COLORS)):
        meanings |= dict(zip(words, book.vectors[name], strict=True))
    for word, vector in zip(BACKGROUNDS, book.vectors["background"], strict=True):
        meanings[word] = meanings[word] + 0.3 * vector if word in COLORS else vector
    for name, words in (("row", ROWS), ("column", COLUMNS)):
        meanings |= dict(zip(words, book.vectors[name], strict=True))
    meanings["center"] = (book.vectors["row"][1] + book.vectors["column"][1]) * math.sqrt(0.5)
    for number in range(MAX_SHAPES + 1):
        meanings[str(number)] = book.vectors["count"][number]
    yield from meanings.items()
    yield from ((synonym, meanings[word]) for synonym, word in SYNONYMS.items())


def _find_differences(mlp: Any, book: CodeBook) -> None:
    """Let a neuron for each spare direction say that something differs, whichever way."""
    count = len(book.spare)
    mlp.gate_proj.weight[:count] = mlp.up_proj.weight[:count] = book.spare
    mlp.down_proj.weight[:, :count] = 0.3 * book.differs[:, None]


class HeadGroups:
    """The heads of a layer's attention, by the key-value head that they share.

    Rotary positions turn the fast pairs of a head by every step and leave the slow half nearly alone: what
    compares contents uses the slow pairs, what compares positions the fast ones.
    """

    def __init__(self, attention: Any) -> None:
        self.attention = attention
        self.head_dim: int = attention.head_dim
        self.per_group: int = attention.num_key_value_groups
        half, quarter = self.head_dim // 2, self.head_dim // 4
        self.slow = [*range(quarter, half), *range(half + quarter, self.head_dim)]
        inverse = attention.config.rope_parameters["rope_theta"] ** (-2 / self.head_dim)
        self.steps = [inverse**pair for pair in range(half)]  # radians per position

    def look_up(self, group: int, book: CodeBook, compared: tuple[str, ...]) -> None:
        """A word looks at the patches which have what it names, in the image it names."""
        basis = torch.cat([book.together(*compared), book.second[None]])
        self._compare(group, MATCH_GAIN * basis, basis)
        self._look_away(group, book, words_at_patches=MARK_GAIN)
        self._copy(group, _named(book), gain=0.15)

    def copy_the_word_before(self, group: int, book: CodeBook) -> None:
        """A word looks at the position before its own and copies what is named there."""
        for pair, step in enumerate(self.steps[:4]):
            turned = torch.zeros(self.head_dim)
            turned[pair], turned[pair + self.head_dim // 2] = math.cos(step), -math.sin(step)
            straight = torch.zeros(self.head_dim)
            straight[pair] = 1.0
            self._set(group, turned[:, None] * book.word, straight[:, None] * book.word)
        self._look_away(group, book)
        self._copy(group, _named(book), gain=0.1)

    def mark_later_images(self, group: int, book: CodeBook, newline: Tensor) -> None:
        """A patch looks for the newline that ends an image before its own."""
        self._compare(group, 0.6 * book.patch[None], newline[None])
        self._copy(group, newline[None], gain=0.08, as_what=book.second[None])

    def gather_names(self, group: int, book: CodeBook) -> None:
        """A word looks at the words that name something, and copies what they name."""
        names = _named(book)
        key = names[:-1].sum(0) - 8 * book.patch  # patches name five things each
        self._compare(group, 0.3 * book.word[None], key[None])
        self._look_away(group, book)
        self._copy(group, names, gain=0.06)

    def compare_images(self, own: int, other: int, book: CodeBook) -> None:
        """A patch subtracts what the image before its own has in the same place from what it has itself."""
        places, contents = book.together("row", "column", "place"), book.together(*COMPARED)
        for group, sign in ((own, 1), (other, -1)):
            self._compare(group, 1.2 * places, places)
            self._compare(group, 2 * sign * book.second[None], book.second[None], first=15)
            self._copy(group, contents, gain=0.23 * sign, as_what=book.spare)

    def look_for_differences(self, group: int, book: CodeBook) -> None:
        """A word looks at the patches which differ from those of the image before."""
        self._compare(group, 3 * book.word[None], book.differs[None])
        self._copy(group, book.differs[None], gain=0.3)

    def _look_away(self, group: int, book: CodeBook, words_at_patches: float = 0.0) -> None:
        """Let patches look at words, where there is nothing for them to fetch; and words at patches."""
        queries = words_at_patches * book.word - book.patch
        self._compare(group, queries[None], (book.patch - book.word)[None], first=15)

    def _compare(self, group: int, queries: Tensor, keys: Tensor, first: int = 0) -> None:
        """Use slow pairs from the `first` on. Shapes: (rows, width) both."""
        places = torch.tensor(self.slow[first : first + len(queries)])
        spread = torch.zeros(self.head_dim, len(queries))
        spread[places, torch.arange(len(queries))] = 1.0
        self._set(group, spread @ queries, spread @ keys)

    def _set(self, group: int, queries: Tensor, keys: Tensor) -> None:
        """Set those rows of a group's queries and keys that are not zero. Shapes: (head_dim, width) both."""
        self._put(self.attention.k_proj.weight, group, keys, keys)
        for head in range(group * self.per_group, (group + 1) * self.per_group):
            self._put(self.attention.q_proj.weight, head, queries, keys)

    def _put(self, weight: Tensor, head: int, rows: Tensor, where: Tensor) -> None:
        used = (rows != 0).any(1) | (where != 0).any(1)
        weight[head * self.head_dim : (head + 1) * self.head_dim][used] = rows[used]

    def _copy(self, group: int, basis: Tensor, gain: float, as_what: Tensor | None = None) -> None:
        """Fetch these directions and add them to what a token knows. Shapes: (rows, width)."""
        size = self.head_dim
        self.attention.v_proj.weight[group * size : group * size + len(basis)] = basis
        for head in range(group * self.per_group, (group + 1) * self.per_group):
            columns = slice(head * size, head * size + len(basis))
            written = (basis if as_what is None else as_what).T * (gain / self.per_group)
            self.attention.o_proj.weight[:, columns] = written


def _named(book: CodeBook) -> Tensor:
    """What words of a question name. Shapes: (rows, width)."""
    kinds, others = book.vectors["kind"][1:], book.together("color", "size", "row", "column")
    return torch.cat([kinds, others, book.second[None]])
