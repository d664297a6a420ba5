"""Questions about scenes in many phrasings, and their answers."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from training.shapes import answers, phrasings
from training.shapes.answers import ORDINALS
from training.shapes.world import BACKGROUNDS, COLORS, KINDS, PLACES, SIZES, Scene, Selector, Shape


@dataclass(frozen=True, slots=True)
class Question:
    """A question as a user types it, its correct answer, and the shape that a pronoun in the next question means.

    `pieces` are parts of the answer with their loss weights; empty: all tokens have the same weight.
    """

    text: str
    answer: str
    subject: Shape | None = None
    pieces: tuple[tuple[str, float], ...] = ()
    role: str = "USER"


@dataclass(frozen=True, slots=True)
class Asker:
    """Makes questions about one of several images."""

    rng: Random
    scene: Scene
    index: int = 0
    named: bool = False  # whether the question says which image it means

    def ask(self, topic: str) -> Question:
        return SINGLE_TOPICS[topic](self)

    def put(
        self,
        templates: tuple[str, ...],
        answer: str,
        subject: Shape | None = None,
        **slots: str,
    ) -> Question:
        """Fill a random template. If the question must name its image, the template has a slot for the name."""
        if self.named:
            templates = tuple(each for each in templates if "{where}" in each or "{image}" in each)
        is_usual = self.rng.random() < 0.05  # the first template is the most common phrasing
        template = templates[0] if is_usual else self.rng.choice(templates)
        if template.endswith("|"):  # the template asks for the opposite
            template, answer = template[:-1], answers.yes_no(answer == "no")
        noun = self.rng.choice(phrasings.IMAGE_WORDS)
        named = f"{ORDINALS[self.index]} {noun}" if self.named else noun
        says_where = self.named or self.rng.random() < 0.06
        where = f" in the {named}" if says_where else ""
        if self.named:
            template = template.replace("this {image}", "the {image}")
        elif self.rng.random() < 0.06:
            where = self.rng.choice(phrasings.HERE)
        text = template.format(image=named, where=where, **slots)
        return Question(vary(text, self.rng), answer, subject)

    def pick_selector(self, *kinds_of: str) -> Selector:
        """A selector, mostly of existing shapes. `kinds_of`: "kind", "color", "both"."""
        like = self.rng.choice(kinds_of)
        is_there = self.scene.shapes and self.rng.random() < 0.85
        shape = self.rng.choice(self.scene.shapes) if is_there else None
        kind = shape.kind if shape else self.rng.choice(KINDS)
        color = shape.color if shape else self.rng.choice(COLORS)
        if like == "both" and shape and self.rng.random() < 0.1:
            color = self.rng.choice(COLORS)
        return Selector(kind if like != "color" else None, color if like != "kind" else None)

    def pick_place(self, share: float) -> str:
        """A random place. With probability `share`, a place that has a shape, if there is any."""
        if self.scene.shapes and self.rng.random() < share:
            return self.rng.choice(self.scene.shapes).place
        return self.rng.choice(PLACES)

    def at(self, place: str) -> str:
        """A place with its preposition, in a random phrasing."""
        if self.rng.random() < 0.4:
            return answers.at(place)
        words = self.rng.choice(phrasings.PLACE_SYNONYMS[place])
        return f"{self.rng.choice(phrasings.PREPOSITIONS)} the {words}"

    def pick_two(self) -> tuple[Selector, Selector]:
        """Two selectors for a comparison, which mostly select one shape each."""
        shapes = list(self.scene.shapes)
        self.rng.shuffle(shapes)
        picked = [self._single_out(shape) for shape in shapes[:2]]
        while len(picked) < 2 or self.rng.random() < 0.05:
            picked.insert(0, Selector(self.rng.choice(KINDS)))
            self.rng.shuffle(picked)
        return picked[0], picked[1]

    def _single_out(self, shape: Shape) -> Selector:
        """A selector of only this shape, if that is possible."""
        ways = [
            Selector(shape.kind),
            Selector(shape.kind, shape.color),
            Selector(None, shape.color),
        ]
        self.rng.shuffle(ways)
        single = [way for way in ways if len(way.pick(self.scene)) == 1]
        return (single or [Selector(shape.kind, shape.color)])[0]

    def only(self, selector: Selector) -> Shape | None:
        """The selected shape, if there is exactly one."""
        picked = selector.pick(self.scene)
        return picked[0] if len(picked) == 1 else None


def _count(asker: Asker) -> Question:
    selector = Selector()
    if asker.rng.random() < 0.5:
        selector = asker.pick_selector("kind", "kind", "color", "both")
    answer = answers.count(asker.scene, selector)
    return asker.put(phrasings.COUNT, answer, None, **_words(selector))


def _property(asker: Asker, name: str, templates: tuple[str, ...], *kinds_of: str) -> Question:
    selector = asker.pick_selector(*kinds_of)
    answer = answers.property_of(asker.scene, selector, name)
    return asker.put(templates, answer, asker.only(selector), **_words(selector))


def _content(asker: Asker) -> Question:
    place = asker.pick_place(0.65)
    answer, shape = answers.content_at(asker.scene, place), asker.scene.at(place)
    return asker.put(phrasings.CONTENT, answer, shape, at=asker.at(place))


def _exists(asker: Asker) -> Question:
    selector = _fair_selector(asker.rng, (asker.scene,))
    answer = answers.exists(asker.scene, selector)
    return asker.put(phrasings.EXISTS, answer, asker.only(selector), **_words(selector))


def _is_at(asker: Asker) -> Question:
    selector, place = asker.pick_selector("kind", "both", "both"), asker.pick_place(0.75)
    answer, slots = answers.is_at(asker.scene, selector, place), _words(selector)
    return asker.put(phrasings.IS_AT, answer, None, at=asker.at(place), **slots)


def _is_color(asker: Asker) -> Question:
    selector = asker.pick_selector("kind")
    picked = selector.pick(asker.scene)
    color = picked[0].color if picked and asker.rng.random() < 0.5 else asker.rng.choice(COLORS)
    answer = answers.is_so(asker.scene, selector, "color", color)
    slots = _words(selector) | {"color": color}
    return asker.put(phrasings.IS_COLOR, answer, asker.only(selector), **slots)


def _count_special(asker: Asker) -> Question:
    """Count the shapes of a color or size, the different colors or kinds, or the shapes in a row or column."""
    rng, shapes = asker.rng, asker.scene.shapes
    match rng.choice(("color", "size", "different", "band")):
        case "color":
            selector = asker.pick_selector("color")
            answer, slots = answers.count(asker.scene, selector), _words(selector)
            return asker.put(phrasings.COUNT_COLOR, answer, None, **slots)
        case "size":
            size = rng.choice(SIZES)
            selector = Selector() if rng.random() < 0.7 else asker.pick_selector("kind")
            number = sum(shape.size == size for shape in selector.pick(asker.scene))
            slots = _words(selector) | {"size": _size_word(size, rng)}
            return asker.put(phrasings.COUNT_SIZE, str(number), None, **slots)
        case "different":
            what = rng.choice(("color", "kind"))
            things = "colors" if what == "color" else rng.choice(("kinds of shapes", "kinds"))
            answer = str(len({getattr(shape, what) for shape in shapes}))
            return asker.put(phrasings.COUNT_DIFFERENT, answer, things=things)
        case _:
            band, picked = _pick_band(asker)
            return asker.put(phrasings.COUNT_IN_BAND, str(len(picked)), band=band)


def _in_band(asker: Asker) -> Question:
    band, picked = _pick_band(asker)
    return asker.put(phrasings.IN_BAND, answers.list_shapes(picked), band=band)


def _pick_band(asker: Asker) -> tuple[str, list[Shape]]:
    """A random row or column, and its shapes."""
    rng = asker.rng
    is_row, index = rng.random() < 0.6, rng.randrange(3)
    names = ("top", "middle", "bottom") if is_row else ("left", "middle", "right")
    picked = [s for s in asker.scene.shapes if answers.cell(s.place)[0 if is_row else 1] == index]
    return f"{names[index]} {'row' if is_row else 'column'}", picked


def _is_beside(asker: Asker) -> Question:
    first, second = asker.pick_two()
    side = asker.rng.choice(tuple(phrasings.BESIDE))
    answer = answers.is_beside(asker.scene, first, second, side)
    slots = {"other": second.noun, "beside": asker.rng.choice(phrasings.BESIDE[side])}
    return asker.put(phrasings.IS_BESIDE, answer, None, **slots, **_words(first))


def _what_is_beside(asker: Asker) -> Question:
    _, other = asker.pick_two()
    side = asker.rng.choice(tuple(phrasings.BESIDE))
    answer = answers.what_is_beside(asker.scene, other, side)
    slots = {"other": other.noun, "beside": asker.rng.choice(phrasings.BESIDE[side])}
    return asker.put(phrasings.WHAT_IS_BESIDE, answer, None, **slots)


def _all_same(asker: Asker) -> Question:
    rng, shapes = asker.rng, asker.scene.shapes
    if rng.random() < 0.35:
        color = shapes[0].color if shapes and rng.random() < 0.6 else rng.choice(COLORS)
        answer = answers.yes_no(bool(shapes) and all(shape.color == color for shape in shapes))
        return asker.put(phrasings.ALL_ARE, answer, color=color)
    what = rng.choice(("color", "color", "kind", "size"))
    answer = answers.yes_no(len({getattr(shape, what) for shape in shapes}) <= 1)
    templates = phrasings.ALL_SAME_OF[what] if rng.random() < 0.3 else phrasings.ALL_SAME
    return asker.put(templates, answer, thing=what)


def _colors(asker: Asker) -> Question:
    answer = answers.property_of(asker.scene, Selector(), "color")
    return asker.put(phrasings.COLORS_OF_ALL, answer)


def _more(asker: Asker) -> Question:
    like = asker.rng.choice(("kind", "color"))
    first, second = asker.pick_selector(like), asker.pick_selector(like)
    numbers = [len(each.pick(asker.scene)) for each in (first, second)]
    answer = answers.yes_no(numbers[0] > numbers[1])
    return asker.put(phrasings.MORE, answer, nouns=first.nouns, others=second.nouns)


def _anything(asker: Asker) -> Question:
    if asker.rng.random() < 0.3:
        answer = answers.yes_no(bool(asker.scene.shapes))
        return asker.put(phrasings.ANYTHING, answer)
    place = asker.pick_place(0.5)
    answer = answers.yes_no(asker.scene.at(place) is not None)
    return asker.put(phrasings.ANYTHING_AT, answer, at=asker.at(place))


def _of_size(asker: Asker) -> Question:
    size = asker.rng.choice(SIZES)
    picked = [shape for shape in asker.scene.shapes if shape.size == size]
    words = _size_word(size, asker.rng)
    return asker.put(phrasings.OF_SIZE, answers.list_shapes(picked), size=words)


def _color_at(asker: Asker) -> Question:
    place = asker.pick_place(0.8)
    shape = asker.scene.at(place)
    answer = shape.color if shape else "nothing"
    return asker.put(phrasings.COLOR_AT, answer, at=asker.at(place))


def _is_so(asker: Asker) -> Question:
    """Ask whether the red shape is a star, a star is small, or the background is white."""
    rng = asker.rng
    match rng.choice(("kind", "size", "background")):
        case "kind":
            selector = asker.pick_selector("color")
            picked = selector.pick(asker.scene)
            kind = picked[0].kind if picked and rng.random() < 0.5 else rng.choice(KINDS)
            answer = answers.is_so(asker.scene, selector, "kind", kind)
            slots = _words(selector) | {"a_kind": f"{answers.article(kind)} {kind}"}
            return asker.put(phrasings.IS_KIND, answer, None, **slots)
        case "size":
            selector, size = asker.pick_selector("kind", "both"), rng.choice(SIZES)
            answer = answers.is_so(asker.scene, selector, "size", size)
            slots = _words(selector) | {"size": _size_word(size, rng)}
            return asker.put(phrasings.IS_SIZE, answer, None, **slots)
        case _:
            color = rng.choice((asker.scene.background, rng.choice(BACKGROUNDS)))
            answer = answers.yes_no(color == asker.scene.background)
            a_color = f"{answers.article(color)} {color}"
            return asker.put(phrasings.IS_BACKGROUND, answer, color=color, a_color=a_color)


def _size_word(size: str, rng: Random) -> str:
    return rng.choice(
        ("large", "big", "large") if size == "large" else ("small", "small", "little")
    )


_OF_ANY = ("kind", "kind", "both", "color")
SINGLE_TOPICS: dict[str, Callable[[Asker], Question]] = {
    "describe": lambda asker: asker.put(phrasings.DESCRIBE, answers.describe(asker.scene)),
    "count": _count,
    "color": lambda asker: _property(asker, "color", phrasings.COLOR, "kind"),
    "kind": lambda asker: _property(asker, "kind", phrasings.KIND, "color"),
    "place": lambda asker: _property(asker, "place", phrasings.PLACE, *_OF_ANY),
    "size": lambda asker: _property(asker, "size", phrasings.SIZE, *_OF_ANY),
    "content": _content,
    "exists": _exists,
    "is at": _is_at,
    "is color": _is_color,
    "background": lambda asker: asker.put(phrasings.BACKGROUND, asker.scene.background),
    "count special": _count_special,
    "in band": _in_band,
    "is beside": _is_beside,
    "what is beside": _what_is_beside,
    "all same": _all_same,
    "colors": _colors,
    "more": _more,
    "anything": _anything,
    "of size": _of_size,
    "color at": _color_at,
    "is so": _is_so,
}
PAIR_TOPICS = ("which has", "which has background", "same", "describe all")


def ask_about_pair(topic: str, first: Scene, second: Scene, rng: Random) -> Question:
    scenes = (first, second)
    asker = Asker(rng, first)
    match topic:
        case "which has":
            selector = _fair_selector(rng, scenes)
            answer = answers.which(*(bool(selector.pick(scene)) for scene in scenes))
            return asker.put(phrasings.WHICH_HAS, answer, None, **_words(selector))
        case "which has background":
            color = rng.choice((first.background, second.background, rng.choice(BACKGROUNDS)))
            answer = answers.which(*(scene.background == color for scene in scenes))
            slots = {"a_color": f"{answers.article(color)} {color}", "bare_color": color}
            return asker.put(phrasings.WHICH_HAS_BACKGROUND, answer, None, **slots)
        case "same":
            return asker.put(phrasings.SAME, answers.yes_no(first == second))
        case _:
            return asker.put(phrasings.DESCRIBE_ALL, answers.describe_all(scenes))


def follow_up(subject: Shape, rng: Random) -> Question:
    """A question that refers to the shape of the previous question as "it"."""
    attribute, templates = rng.choice(tuple(phrasings.PRONOUN.items()))
    text = vary(rng.choice(templates), rng)
    return Question(text, getattr(subject, attribute), subject)


_SPELLINGS = (("center", "centre", 0.15), ("gray", "grey", 0.3), ("background", "backdrop", 0.04))


def vary(text: str, rng: Random) -> str:
    """The same question in a hasty or polite form."""
    if rng.random() < 0.3:
        text = re.sub(r"^(What|Where) is\b", r"\1's", text)
    if rng.random() < 0.2:
        text = text.replace("color", "colour")
    for word, other, share in _SPELLINGS:
        if word in text and rng.random() < share:
            text = text.replace(word, other)
    if "shape" in text and rng.random() < 0.12:
        text = text.replace("shape", rng.choice(phrasings.SHAPE_SYNONYMS))
    if rng.random() < 0.04:
        kind = rng.choice(tuple(phrasings.KIND_SYNONYMS))
        text = text.replace(kind, rng.choice(phrasings.KIND_SYNONYMS[kind]))
    return _type(text, rng)


def _type(text: str, rng: Random) -> str:
    """Add greetings, drop punctuation, or misspell words."""
    if rng.random() < 0.12:
        text = rng.choice(phrasings.PREFIXES) + text[0].lower() + text[1:]
    if rng.random() < 0.2:
        text = text.rstrip("?.")
    if rng.random() < 0.05:
        text = text.rstrip("?.") + rng.choice(("??", "?!", "!", " ?", "...", "."))
    if rng.random() < 0.2:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.1:
        suffix = rng.choice(phrasings.SUFFIXES)
        text = (text.rstrip("?.") if suffix.startswith(",") else text) + suffix
    if rng.random() < 0.04:
        text = misspell(text, rng)
    if rng.random() < 0.06:
        text = rng.choice((text.upper(), text.lower(), text.title()))
    return text


def misspell(text: str, rng: Random) -> str:
    """Misspell one long word: a letter is omitted, typed twice, or swapped with the next letter."""
    letters = [
        index
        for word in re.finditer(r"[^\W\d_]{5,}", text)
        if word[0].lower() not in answers.ORDINALS
        for index in range(word.start() + 1, word.end() - 1)
    ]
    if not letters:
        return text
    index = rng.choice(letters)
    slip = rng.choice(("", 2 * text[index], text[index + 1] + text[index]))
    skipped = 2 if len(slip) == 2 and slip[0] != slip[1] else 1
    return text[:index] + slip + text[index + skipped :]


def _fair_selector(rng: Random, scenes: tuple[Scene, ...]) -> Selector:
    """A selector for yes-no questions. "yes" and "no" are about equally likely; some "no" cases are near misses."""
    shapes = [shape for scene in scenes for shape in scene.shapes]
    shape = rng.choice(shapes) if shapes else None
    like = rng.choice(("kind", "kind", "both", "both", "color"))
    kind = shape.kind if shape and rng.random() < 0.6 else rng.choice(KINDS)
    color = shape.color if shape and rng.random() < 0.65 else rng.choice(COLORS)
    return Selector(kind if like != "color" else None, color if like != "kind" else None)


def _words(selector: Selector) -> dict[str, str]:
    noun, color = selector.noun, selector.color or ""
    a_noun = f"{answers.article(noun)} {noun}"
    return {"noun": noun, "nouns": selector.nouns, "a_noun": a_noun, "color": color}
