"""The image world of the built-in model: scenes described in words.

A scene is a background colour and up to four shapes, each at one of nine places. `render` draws
scenes; `answers` and `questions` write about them. This module must not import torch.
"""

from dataclasses import dataclass, replace
from random import Random

KINDS = ("circle", "square", "triangle", "star", "cross", "ring")
COLORS = ("red", "green", "blue", "yellow", "purple", "orange")
BACKGROUNDS = ("white", "black", "gray", *COLORS)
SIZES = ("small", "large")
PLACES = (
    "top left",
    "top center",
    "top right",
    "middle left",
    "center",
    "middle right",
    "bottom left",
    "bottom center",
    "bottom right",
)
MAX_SHAPES = 4

_NUM_SHAPES_WEIGHTS = (1, 9, 13, 14, 13)  # weights of scenes with 0, 1, 2, 3 and 4 shapes
_BACKGROUND_WEIGHTS = (8, 3, 3, 1, 1, 1, 1, 1, 1)  # in the order of BACKGROUNDS; white is common


@dataclass(frozen=True, slots=True)
class Shape:
    """One shape of a scene, in the words of KINDS, COLORS, SIZES and PLACES."""

    kind: str
    color: str
    size: str
    place: str


@dataclass(frozen=True, slots=True)
class Scene:
    """A background colour and at most MAX_SHAPES shapes, in reading order, one per place."""

    background: str
    shapes: tuple[Shape, ...]

    def __post_init__(self) -> None:
        order = [PLACES.index(shape.place) for shape in self.shapes]
        if order != sorted(set(order)):
            raise ValueError("shapes must be in reading order, with at most one per place")
        if any(shape.color == self.background for shape in self.shapes):
            raise ValueError("a shape cannot have the background's color")

    def at(self, place: str) -> Shape | None:
        return next((shape for shape in self.shapes if shape.place == place), None)


@dataclass(frozen=True, slots=True)
class Selector:
    """Selects the shapes that a question is about: by kind, by color, or both; by neither, any shape."""

    kind: str | None = None
    color: str | None = None

    def matches(self, shape: Shape) -> bool:
        return self.kind in (None, shape.kind) and self.color in (None, shape.color)

    def pick(self, scene: Scene) -> tuple[Shape, ...]:
        """The selected shapes of a scene, in reading order."""
        return tuple(shape for shape in scene.shapes if self.matches(shape))

    @property
    def noun(self) -> str:
        """The words for a selected shape: "star", "red shape" or "red star"."""
        return " ".join(word for word in (self.color, self.kind or "shape") if word)

    @property
    def nouns(self) -> str:
        """The plural of `noun`: "stars", "red shapes", "red crosses"."""
        return self.noun + ("es" if self.kind == "cross" else "s")


def in_reading_order(shapes: list[Shape]) -> tuple[Shape, ...]:
    """The shapes from top left to bottom right."""
    return tuple(sorted(shapes, key=lambda shape: PLACES.index(shape.place)))


def mirror(scene: Scene) -> Scene:
    """The scene with left and right exchanged."""
    shapes = []
    for shape in scene.shapes:
        row, column = divmod(PLACES.index(shape.place), 3)
        shapes.append(replace(shape, place=PLACES[3 * row + 2 - column]))
    return Scene(scene.background, in_reading_order(shapes))


def sample_scene(rng: Random, num_shapes: int | None = None, alike: float = 0.0) -> Scene:
    """A random scene with `num_shapes` (0 to MAX_SHAPES) shapes; None: a random number.

    `alike`: the share of scenes whose shapes all have one kind or one color.
    """
    background = rng.choices(BACKGROUNDS, _BACKGROUND_WEIGHTS)[0]
    if num_shapes is None:
        num_shapes = rng.choices(range(MAX_SHAPES + 1), _NUM_SHAPES_WEIGHTS)[0]
    colors = [color for color in COLORS if color != background]
    kinds: tuple[str, ...] = KINDS
    if alike and rng.random() < alike:
        if rng.random() < 0.6:
            kinds = (rng.choice(KINDS),)
        else:
            colors = [rng.choice(colors)]
    shapes = [
        Shape(rng.choice(kinds), rng.choice(colors), rng.choice(SIZES), place)
        for place in rng.sample(PLACES, num_shapes)
    ]
    return Scene(background, in_reading_order(shapes))


def sample_variation(scene: Scene, rng: Random) -> Scene:
    """A scene that differs from the given one in a single word, which makes it the hardest to distinguish."""
    while True:
        if rng.random() < 0.1 or not scene.shapes:
            taken = {shape.color for shape in scene.shapes}
            free = [word for word in BACKGROUNDS if word not in taken]
            varied = replace(scene, background=rng.choice(free))
        else:
            varied = _vary_shape(scene, rng)
        if varied != scene:
            return varied


def _vary_shape(scene: Scene, rng: Random) -> Scene:
    shapes = list(scene.shapes)
    index = rng.randrange(len(shapes))
    free = [place for place in PLACES if scene.at(place) is None]
    match rng.choices(("kind", "color", "place", "size", "missing"), (5, 5, 5, 2, 2))[0]:
        case "kind":
            shapes[index] = replace(shapes[index], kind=rng.choice(KINDS))
        case "color":
            colors = [color for color in COLORS if color != scene.background]
            shapes[index] = replace(shapes[index], color=rng.choice(colors))
        case "place":
            shapes[index] = replace(shapes[index], place=rng.choice(free))
        case "size":
            shapes[index] = replace(shapes[index], size=rng.choice(SIZES))
        case "missing":
            del shapes[index]
    return Scene(scene.background, in_reading_order(shapes))
