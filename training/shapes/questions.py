"""Questions about scenes with their answers, in the words of many people."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from training.shapes import answers, phrasings
from training.shapes.answers import ORDINALS
from training.shapes.world import (
    BACKGROUNDS,
    COLORS,
    KINDS,
    PLACES,
    Scene,
    Selector,
    Shape,
)


@dataclass(frozen=True, slots=True)
class Question:
    """A question as a user types it, the one right answer, and what a pronoun after it would mean."""

    topic: str
    text: str
    answer: str
    subject: Shape | None = None


@dataclass(frozen=True, slots=True)
class Asker:
    """Makes questions about one of `num_scenes` images; `plain` keeps to each topic's first phrasing."""

    rng: Random
    scene: Scene
    index: int = 0
    named: bool = False  # whether the question says which image it means
    plain: bool = False

    def ask(self, topic: str) -> Question:
        """A question of a topic of SINGLE_TOPICS."""
        return SINGLE_TOPICS[topic](self)

    def put(
        self,
        topic: str,
        templates: tuple[str, ...],
        answer: str,
        subject: Shape | None = None,
        **slots: str,
    ) -> Question:
        """Fill one of the templates; a question that must name its image uses one that can."""
        if self.named:
            templates = tuple(each for each in templates if "{where}" in each or "{image}" in each)
        template = templates[0] if self.plain else self.rng.choice(templates)
        noun = "image" if self.plain else self.rng.choice(phrasings.IMAGE_WORDS)
        named = f"{ORDINALS[self.index]} {noun}" if self.named else noun
        where = (
            f" in the {named}"
            if self.named or (not self.plain and self.rng.random() < 0.06)
            else ""
        )
        if self.named:
            template = template.replace("this {image}", "the {image}")
        text = template.format(image=named, where=where, **slots)
        return Question(topic, text if self.plain else vary(text, self.rng), answer, subject)

    def pick_selector(self, *kinds_of: str) -> Selector:
        """What a question points at; mostly something that is there. `kinds_of`: "kind", "color", "both"."""
        like = self.rng.choice(kinds_of)
        shape = (
            self.rng.choice(self.scene.shapes)
            if self.scene.shapes and self.rng.random() < 0.85
            else None
        )
        kind = shape.kind if shape else self.rng.choice(KINDS)
        color = shape.color if shape else self.rng.choice(COLORS)
        if like == "both" and shape and self.rng.random() < 0.1:
            color = self.rng.choice(COLORS)
        return Selector(kind if like != "color" else None, color if like != "kind" else None)

    def only(self, selector: Selector) -> Shape | None:
        """The shape that is meant, where it is the only one."""
        picked = selector.pick(self.scene)
        return picked[0] if len(picked) == 1 else None


def _describe(asker: Asker) -> Question:
    return asker.put("describe", phrasings.DESCRIBE, answers.describe(asker.scene))


def _count(asker: Asker) -> Question:
    selector = (
        Selector()
        if asker.rng.random() < 0.5
        else asker.pick_selector("kind", "kind", "color", "both")
    )
    return asker.put(
        "count", phrasings.COUNT, answers.count(asker.scene, selector), nouns=selector.nouns
    )


def _color(asker: Asker) -> Question:
    selector = asker.pick_selector("kind")
    answer = answers.color_of(asker.scene, selector)
    return asker.put("color", phrasings.COLOR, answer, asker.only(selector), noun=selector.noun)


def _kind(asker: Asker) -> Question:
    selector = asker.pick_selector("color")
    answer = answers.kind_of(asker.scene, selector)
    return asker.put(
        "kind", phrasings.KIND, answer, asker.only(selector), color=str(selector.color)
    )


def _place(asker: Asker) -> Question:
    selector = asker.pick_selector("kind", "kind", "both", "color")
    answer = answers.place_of(asker.scene, selector)
    return asker.put("place", phrasings.PLACE, answer, asker.only(selector), noun=selector.noun)


def _size(asker: Asker) -> Question:
    selector = asker.pick_selector("kind", "kind", "both", "color")
    answer = answers.size_of(asker.scene, selector)
    return asker.put("size", phrasings.SIZE, answer, asker.only(selector), noun=selector.noun)


def _content(asker: Asker) -> Question:
    place = asker.rng.choice(PLACES)
    if asker.scene.shapes and asker.rng.random() < 0.65:
        place = asker.rng.choice(asker.scene.shapes).place
    at = answers.at(place) if asker.plain else _at(place, asker.rng)
    answer = answers.content_at(asker.scene, place)
    return asker.put("content", phrasings.CONTENT, answer, asker.scene.at(place), at=at)


def _exists(asker: Asker) -> Question:
    selector = _fair_selector(asker.rng, (asker.scene,))
    answer = answers.exists(asker.scene, selector)
    return asker.put("exists", phrasings.EXISTS, answer, asker.only(selector), **_words(selector))


def _is_at(asker: Asker) -> Question:
    selector = asker.pick_selector("kind", "both", "both")
    place = asker.rng.choice(PLACES)
    if asker.scene.shapes and asker.rng.random() < 0.75:
        place = asker.rng.choice(asker.scene.shapes).place
    at = answers.at(place) if asker.plain else _at(place, asker.rng)
    return asker.put(
        "is at",
        phrasings.IS_AT,
        answers.is_at(asker.scene, selector, place),
        at=at,
        **_words(selector),  # pyright: ignore[reportArgumentType]
    )


def _is_color(asker: Asker) -> Question:
    selector = asker.pick_selector("kind")
    picked = selector.pick(asker.scene)
    color = picked[0].color if picked and asker.rng.random() < 0.5 else asker.rng.choice(COLORS)
    answer = answers.is_color(asker.scene, selector, color)
    return asker.put(
        "is color",
        phrasings.IS_COLOR,
        answer,
        asker.only(selector),
        noun=selector.noun,
        color=color,
    )


def _background(asker: Asker) -> Question:
    return asker.put("background", phrasings.BACKGROUND, answers.background(asker.scene))


SINGLE_TOPICS: dict[str, Callable[[Asker], Question]] = {
    "describe": _describe,
    "count": _count,
    "color": _color,
    "kind": _kind,
    "place": _place,
    "size": _size,
    "content": _content,
    "exists": _exists,
    "is at": _is_at,
    "is color": _is_color,
    "background": _background,
}
PAIR_TOPICS = ("which has", "which has background", "same", "describe all")


def ask_about_pair(
    topic: str, first: Scene, second: Scene, rng: Random, plain: bool = False
) -> Question:
    """A question of a topic of PAIR_TOPICS about two images."""
    scenes = (first, second)
    asker = Asker(rng, first, plain=plain)
    match topic:
        case "which has":
            selector = _fair_selector(rng, scenes)
            answer = answers.which_has(first, second, selector)
            return asker.put(topic, phrasings.WHICH_HAS, answer, **_words(selector))  # pyright: ignore[reportArgumentType]
        case "which has background":
            color = rng.choice((first.background, second.background, rng.choice(BACKGROUNDS)))
            answer = answers.which_has_background(first, second, color)
            a_color = f"{answers.article(color)} {color}"
            return asker.put(topic, phrasings.WHICH_HAS_BACKGROUND, answer, a_color=a_color)
        case "same":
            return asker.put(topic, phrasings.SAME, answers.are_same(first, second))
        case "describe all":
            return asker.put(topic, phrasings.DESCRIBE_ALL, answers.describe_all(scenes))
        case _:
            raise ValueError(f"no pair topic {topic!r}")


def follow_up(subject: Shape, rng: Random, plain: bool = False) -> Question:
    """A question that calls the shape of the question before it "it"."""
    attribute, templates = rng.choice(
        (
            ("color", phrasings.PRONOUN_COLOR),
            ("kind", phrasings.PRONOUN_KIND),
            ("place", phrasings.PRONOUN_PLACE),
            ("size", phrasings.PRONOUN_SIZE),
        )
    )
    text = templates[0] if plain else vary(rng.choice(templates), rng)
    return Question("follow-up", text, getattr(subject, attribute), subject)


def vary(text: str, rng: Random) -> str:
    """The same question as a hasty or a polite person types it."""
    if rng.random() < 0.2:
        text = text.replace("color", "colour")
    if "center" in text and rng.random() < 0.15:
        text = text.replace("center", "centre")
    if "gray" in text and rng.random() < 0.3:
        text = text.replace("gray", "grey")
    if rng.random() < 0.05 and text[0].isupper():
        text = rng.choice(phrasings.PREFIXES) + text[0].lower() + text[1:]
    if rng.random() < 0.2:
        text = text.rstrip("?.")
    if rng.random() < 0.2:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.02:
        text = text.upper()
    if rng.random() < 0.05:
        text += rng.choice(phrasings.SUFFIXES)
    return text


def _at(place: str, rng: Random) -> str:
    if rng.random() < 0.4:
        return answers.at(place)
    words = rng.choice(phrasings.PLACE_SYNONYMS[place])
    return f"{rng.choice(phrasings.PREPOSITIONS)} the {words}"


def _fair_selector(rng: Random, scenes: tuple[Scene, ...]) -> Selector:
    """A selector for yes or no, there about as often as not, and near misses among those that are not."""
    shapes = [shape for scene in scenes for shape in scene.shapes]
    shape = rng.choice(shapes) if shapes else None
    like = rng.choice(("kind", "kind", "both", "both", "color"))
    kind = shape.kind if shape and rng.random() < 0.6 else rng.choice(KINDS)
    color = shape.color if shape and rng.random() < 0.65 else rng.choice(COLORS)
    return Selector(kind if like != "color" else None, color if like != "kind" else None)


def _words(selector: Selector) -> dict[str, str]:
    noun = selector.noun
    return {"noun": noun, "nouns": selector.nouns, "a_noun": f"{answers.article(noun)} {noun}"}
