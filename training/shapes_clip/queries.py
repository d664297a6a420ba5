"""Search queries about the world of shapes, and the scenes that match them.

A query is about shapes (by kind, color, size and place), about the background, or about a whole scene.
"""

from dataclasses import dataclass, replace
from random import Random

import numpy as np

from training.shapes.answers import article, describe
from training.shapes.world import BACKGROUNDS, COLORS, KINDS, PLACES, SIZES, Scene, Shape

KINDS_OF_QUERIES = {
    "color and kind": 4,
    "kind or color": 2,
    "with size": 3,
    "with place": 4,
    "background": 1,
    "two shapes": 6,
    "shape and background": 2,
    "description": 2,
}  #: with their relative frequencies in training
SINGLE_FACTS = ("color and kind", "kind or color", "with size", "with place", "background")
TWO_FACTS = ("two shapes", "shape and background")

_BEFORE = (
    "a picture of ", "a photo of ", "an image of ", "an image with ", "a picture with ", "image with ",
    "images with ", "pictures with ", "find ", "show me ", "there is ", "I am looking for ", "where is ",
)  # fmt: skip
_SYNONYMS = {"large": ("big",), "small": ("little", "tiny"), "gray": ("grey",)}
_WORDS_FOR_ROWS = {"top": "upper", "bottom": "lower"}


@dataclass(frozen=True, slots=True)
class Fact:
    """A shape that a scene must contain. None: any value."""

    kind: str | None = None
    color: str | None = None
    size: str | None = None
    place: str | None = None

    def cells(self, codes: np.ndarray) -> np.ndarray:
        """Whether each place has such a shape. Shapes: uint8 (N, CODE_LENGTH) in, bool (N, places) out."""
        cells = codes[:, 1:].reshape(len(codes), len(PLACES), 3)
        found = cells[..., 0] > 0
        for index, (word, words) in enumerate(
            ((self.kind, KINDS), (self.color, COLORS), (self.size, SIZES))
        ):
            if word is not None:
                found = found & (cells[..., index] == 1 + words.index(word))
        if self.place is not None:
            found = found & (np.arange(len(PLACES)) == PLACES.index(self.place))
        return found


@dataclass(frozen=True, slots=True)
class Query:
    """The text, and the facts that must hold, each for a different shape.

    `is_complete`: the scene must have no other shapes.
    """

    text: str
    facts: tuple[Fact, ...] = ()
    background: str | None = None
    is_complete: bool = False

    def holds_of(self, codes: np.ndarray) -> np.ndarray:
        """Whether each scene, encoded by `gallery.encode`, matches. Shapes: (N, CODE_LENGTH) in, bool (N,) out.

        Three or more facts must name different places, because each is searched without the others.
        """
        held = np.ones(len(codes), dtype=bool)
        if self.background is not None:
            held &= codes[:, 0] == BACKGROUNDS.index(self.background)
        found = [fact.cells(codes) for fact in self.facts]
        if len(found) == 2:
            first, second = found
            held &= first.sum(1) * second.sum(1) > (first & second).sum(1)
        else:
            for cells in found:
                held &= cells.any(1)
        if self.is_complete:
            held &= (codes[:, 1::3] > 0).sum(1) == len(self.facts)
        return held


def sample_query(scene: Scene, rng: Random, kind: str | None = None) -> Query:
    """A query that matches a scene, of a kind of KINDS_OF_QUERIES; of another kind if the scene has too few shapes."""
    kind = kind or rng.choices(list(KINDS_OF_QUERIES), list(KINDS_OF_QUERIES.values()))[0]
    if kind == "two shapes" and len(scene.shapes) < 2:
        kind = "shape and background"
    if kind == "description":
        facts = tuple(Fact(shape.kind, shape.color, None, shape.place) for shape in scene.shapes)
        return Query(_vary(describe(scene), rng), facts, scene.background, is_complete=True)
    if kind == "background" or not scene.shapes:
        return Query(_frame(_background(scene.background, rng), rng), (), scene.background)
    if kind == "two shapes":
        facts = tuple(
            _fact(shape, rng.choice(("color and kind",) * 6 + SINGLE_FACTS[1:4]), rng)
            for shape in rng.sample(scene.shapes, 2)
        )
        ways = (" and ", " with ", ", ", " together with ", " beside ")
        nouns = rng.choices(ways, (6, 2, 2, 1, 1))[0].join(_noun(fact, rng) for fact in facts)
        return Query(_frame(nouns, rng), facts)
    shape = rng.choice(scene.shapes)
    if kind == "shape and background":
        fact = _fact(shape, rng.choice(("color and kind",) * 2 + SINGLE_FACTS[1:4]), rng)
        color = _say(scene.background, rng)
        noun = _noun(fact, rng)
        text = rng.choice(
            (
                f"{noun} on {article(color)} {color} background",
                f"{noun} on {article(color)} {color} background",
                f"{noun} on {color}",
                f"{article(color)} {color} background with {noun}",
            )
        )
        return Query(_frame(text, rng), (fact,), scene.background)
    fact = _fact(shape, kind, rng)
    return Query(_frame(_noun(fact, rng), rng), (fact,))


def _fact(shape: Shape, kind: str, rng: Random) -> Fact:
    fact = Fact(shape.kind, shape.color)
    if kind == "kind or color" or (kind != "color and kind" and rng.random() < 0.4):
        fact = rng.choice((Fact(shape.kind), Fact(color=shape.color)))
    if kind == "with size":
        return replace(fact, size=shape.size)
    if kind == "with place":
        return replace(fact, place=shape.place)
    return fact


def _noun(fact: Fact, rng: Random) -> str:
    words = [_say(word, rng) for word in (fact.size, fact.color) if word]
    noun = fact.kind or rng.choice(("shape", "shape", "object", "thing"))
    if fact.kind is None and fact.color and not fact.size and rng.random() < 0.3:
        text = f"something {words[0]}"
    else:
        text = " ".join([*words, noun])
        begin = rng.choices((f"{article(text)} ", "", "the "), (8, 3, 1))[0]
        text = begin + text
    return f"{text} {_where(fact.place, rng)}" if fact.place else text


def _where(place: str, rng: Random) -> str:
    if place == "center":
        return rng.choice(("in the center", "in the middle", "at the center", "in the centre"))
    row, column = place.split()
    if row in _WORDS_FOR_ROWS and rng.random() < 0.15:
        row = _WORDS_FOR_ROWS[row]
    corner = " corner" if row != "middle" and column != "center" and rng.random() < 0.2 else ""
    return f"{rng.choice(('at', 'at', 'in'))} the {row} {column}{corner}"


def _background(color: str, rng: Random) -> str:
    color = _say(color, rng)
    return rng.choice(
        (
            f"{article(color)} {color} background",
            f"{color} background",
            f"on {article(color)} {color} background",
            f"the background is {color}",
        )
    )


def _frame(text: str, rng: Random) -> str:
    before = rng.choice(_BEFORE) if rng.random() < 0.35 else ""
    return _vary(before + text, rng)


def _vary(text: str, rng: Random) -> str:
    text = text.removesuffix(".") if rng.random() < 0.7 else text.removesuffix(".") + "."
    return text[:1].upper() + text[1:] if rng.random() < 0.3 else text


def _say(word: str, rng: Random) -> str:
    others = _SYNONYMS.get(word, ())
    return rng.choice(others) if others and rng.random() < 0.25 else word
