"""The right answer to every question the model knows, as a function of the scene."""

from training.shapes.world import Scene, Selector, Shape

ORDINALS = ("first", "second", "third", "fourth")


def describe(scene: Scene) -> str:
    """All of a scene but the sizes: "A white background with a red star at the top left."."""
    shapes = join([f"{_a(shape)} {at(shape.place)}" for shape in scene.shapes]) or "no shapes"
    return f"{article(scene.background).capitalize()} {scene.background} background with {shapes}."


def describe_all(scenes: tuple[Scene, ...]) -> str:
    """The descriptions of several images: "First image: a white background ... Second image: ..."."""
    described = (
        f"{ordinal.capitalize()} image: {describe(scene)}"
        for ordinal, scene in zip(ORDINALS, scenes, strict=False)
    )
    return " ".join(described)


def count(scene: Scene, selector: Selector) -> str:
    """How many shapes are meant, in digits."""
    return str(len(selector.pick(scene)))


def exists(scene: Scene, selector: Selector) -> str:
    """Whether one is there: "yes" or "no"."""
    return yes_no(bool(selector.pick(scene)))


def color_of(scene: Scene, selector: Selector) -> str:
    """Their colors, in reading order: "red", "red and blue"."""
    return _property(scene, selector, "color")


def kind_of(scene: Scene, selector: Selector) -> str:
    """Their kinds, in reading order: "star", "star and ring"."""
    return _property(scene, selector, "kind")


def size_of(scene: Scene, selector: Selector) -> str:
    """Their sizes: "small", "large" or both, in reading order."""
    return _property(scene, selector, "size")


def place_of(scene: Scene, selector: Selector) -> str:
    """Their places: "top left", "top left and center"."""
    return _property(scene, selector, "place")


def content_at(scene: Scene, place: str) -> str:
    """What stands at a place: "a red star", or "nothing"."""
    shape = scene.at(place)
    return _a(shape) if shape else "nothing"


def is_at(scene: Scene, selector: Selector, place: str) -> str:
    """Whether one stands at a place: "yes" or "no"."""
    shape = scene.at(place)
    return yes_no(shape is not None and selector.matches(shape))


def is_color(scene: Scene, selector: Selector, color: str) -> str:
    """Whether one of them has this color: "yes", "no" or "There is no star."."""
    picked = selector.pick(scene)
    return yes_no(any(shape.color == color for shape in picked)) if picked else _missing(selector)


def background(scene: Scene) -> str:
    """The background's color."""
    return scene.background


def which_has(first: Scene, second: Scene, selector: Selector) -> str:
    """Which of two images has one: "first", "second", "both" or "neither"."""
    return which(bool(selector.pick(first)), bool(selector.pick(second)))


def which_has_background(first: Scene, second: Scene, color: str) -> str:
    """Which of two images has this background: "first", "second", "both" or "neither"."""
    return which(first.background == color, second.background == color)


def are_same(first: Scene, second: Scene) -> str:
    """Whether two images show the same scene: "yes" or "no"."""
    return yes_no(first == second)


def which(first: bool, second: bool) -> str:
    """The word for what holds of two images."""
    return {(True, True): "both", (True, False): "first", (False, True): "second"}.get(
        (first, second), "neither"
    )


def yes_no(truth: bool) -> str:
    """The word for a truth."""
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


def _a(shape: Shape) -> str:
    return f"{article(shape.color)} {shape.color} {shape.kind}"


def _property(scene: Scene, selector: Selector, name: str) -> str:
    words = dict.fromkeys(getattr(shape, name) for shape in selector.pick(scene))
    return join(list(words)) or _missing(selector)


def _missing(selector: Selector) -> str:
    return f"There is no {selector.noun}."
