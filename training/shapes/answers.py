"""The correct answer to every question in the image world, as a function of the scene."""

from collections.abc import Sequence

from training.shapes.world import PLACES, Scene, Selector, Shape

#: The answer to questions that are not about the image world.
OUTSIDE = "I only know pictures of simple coloured shapes. Send me one and ask what is where."
ORDINALS = ("first", "second", "third", "fourth")


def describe(scene: Scene) -> str:
    """A description without sizes: "A white background with a red star at the top left."."""
    shapes = join([f"{a(shape)} {at(shape.place)}" for shape in scene.shapes]) or "no shapes"
    return f"{article(scene.background).capitalize()} {scene.background} background with {shapes}."


def describe_all(scenes: tuple[Scene, ...]) -> str:
    """The descriptions of several images: "First image: a white background ... Second image: ..."."""
    described = (
        f"{ordinal.capitalize()} image: {describe(scene)}"
        for ordinal, scene in zip(ORDINALS, scenes, strict=False)
    )
    return " ".join(described)


def count(scene: Scene, selector: Selector) -> str:
    """The number of selected shapes, in digits."""
    return str(len(selector.pick(scene)))


def exists(scene: Scene, selector: Selector) -> str:
    """Whether a selected shape exists: "yes" or "no"."""
    return yes_no(bool(selector.pick(scene)))


def property_of(scene: Scene, selector: Selector, name: str) -> str:
    """Property `name` of the selected shapes, in reading order: "red", "red and blue" or "There is no star."."""
    words = dict.fromkeys(getattr(shape, name) for shape in selector.pick(scene))
    return join(list(words)) or missing(selector)


def content_at(scene: Scene, place: str) -> str:
    """The content of a place: "a red star", or "nothing"."""
    shape = scene.at(place)
    return a(shape) if shape else "nothing"


def is_at(scene: Scene, selector: Selector, place: str) -> str:
    """Whether a selected shape is at a place: "yes" or "no"."""
    shape = scene.at(place)
    return yes_no(shape is not None and selector.matches(shape))


def is_so(scene: Scene, selector: Selector, name: str, word: str) -> str:
    """Whether a selected shape has this "color", "kind" or "size": "yes", "no" or "There is no star."."""
    picked = selector.pick(scene)
    return yes_no(any(getattr(s, name) == word for s in picked)) if picked else missing(selector)


def list_shapes(shapes: Sequence[Shape]) -> str:
    """An enumeration: "a red star and a blue circle", or "nothing"."""
    return join([a(shape) for shape in shapes]) or "nothing"


def cell(place: str) -> tuple[int, int]:
    """Row and column of a place, from 0."""
    return divmod(PLACES.index(place), 3)


def is_on_side(shape: Shape, other: Shape, side: str) -> bool:
    """Whether a shape is "left", "right", "above" or "below" of another, in any row or column."""
    (row, column), (other_row, other_column) = cell(shape.place), cell(other.place)
    return {
        "left": column < other_column,
        "right": column > other_column,
        "above": row < other_row,
        "below": row > other_row,
    }[side]


def is_beside(scene: Scene, selector: Selector, other: Selector, side: str) -> str:
    """Whether a selected shape is on `side` of a shape of `other`: "yes", "no" or "There is no star."."""
    for each in (other, selector):
        if not each.pick(scene):
            return missing(each)
    return yes_no(
        any(is_on_side(a, b, side) for a in selector.pick(scene) for b in other.pick(scene))
    )


def what_is_beside(scene: Scene, other: Selector, side: str) -> str:
    """The shapes on `side` of the first shape of `other`: "a red star", "nothing" or "There is no star."."""
    picked = other.pick(scene)
    if not picked:
        return missing(other)
    return list_shapes([shape for shape in scene.shapes if is_on_side(shape, picked[0], side)])


def which(first: bool, second: bool) -> str:
    return {(True, True): "both", (True, False): "first", (False, True): "second"}.get(
        (first, second), "neither"
    )


def yes_no(truth: bool) -> str:
    return "yes" if truth else "no"


def article(word: str) -> str:
    """The indefinite article: "an" before a vowel, else "a"."""
    return "an" if word[0] in "aeiou" else "a"


def at(place: str) -> str:
    """A place with its preposition: "at the top left", "in the center"."""
    return f"in the {place}" if place == "center" else f"at the {place}"


def join(words: list[str]) -> str:
    """An enumeration: "x", "x and y", "x, y and z"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def a(shape: Shape) -> str:
    """A shape with its article: "a red star"."""
    return f"{article(shape.color)} {shape.color} {shape.kind}"


def missing(selector: Selector) -> str:
    return f"There is no {selector.noun}."
