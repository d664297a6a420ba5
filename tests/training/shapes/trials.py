"""A second generator of questions with its own phrasings, pictures and clips, which training never imports.

A trial is a request and a check of its answer. `tests/e2e/test_goals.py` has the goals. Trials are created one at a
time, because drawing images is slow.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from PIL import Image, ImageDraw

from tests.training.shapes.foreign import FOREIGN
from tests.training.shapes.strangers import draw_as_a_stranger, draw_framed, draw_shape
from training.shapes.answers import OUTSIDE, describe, describe_all
from training.shapes.world import (
    COLORS,
    KINDS,
    PLACES,
    Scene,
    Shape,
    in_reading_order,
    sample_scene,
)


@dataclass(frozen=True)
class Reply:
    text: str
    calls: tuple[tuple[str, Any], ...] = ()
    num_tokens: int = 0

    @classmethod
    def of(cls, text: str | None, calls: Iterable[Any], num_tokens: int) -> "Reply":
        """Creates a reply from the fields of OpenAI's client."""
        called = ((call.function.name, json.loads(call.function.arguments)) for call in calls)
        return cls((text or "").strip(), tuple(called), num_tokens)


@dataclass(frozen=True)
class Trial:
    images: tuple[Image.Image, ...]
    question: str
    is_right: Callable[[Reply], bool]
    expected: object = ""
    schema: dict[str, Any] | None = None
    tools: tuple[dict[str, Any], ...] = ()
    kind: str = ""  #: kind of a foreign picture


def _says(images: tuple[Image.Image, ...], question: str, *answers: str, **more: Any) -> Trial:
    return Trial(images, question, lambda reply: reply.text in answers, answers, **more)


def _few(scene: Scene) -> bool:
    """Returns whether every shape has a unique kind and a unique color."""
    kinds, colors = [s.kind for s in scene.shapes], [s.color for s in scene.shapes]
    return len(set(kinds)) == len(kinds) > 1 and len(set(colors)) == len(colors)


def _scene(rng: Random, is_wanted: Callable[[Scene], bool] = _few) -> Scene:
    while not is_wanted(scene := sample_scene(rng)):
        pass
    return scene


# ---------------------------------------------------------------- natural phrasings

Slots = dict[str, str]


def _slots(scene: Scene, rng: Random) -> Slots:
    one, two = rng.sample(scene.shapes, 2)
    gone_kind = rng.choice([kind for kind in KINDS if kind not in [s.kind for s in scene.shapes]])
    gone_color = rng.choice(
        [color for color in COLORS if color not in [s.color for s in scene.shapes]]
    )
    rows = {name: PLACES.index(shape.place) // 3 for name, shape in (("one", one), ("two", two))}
    columns = {name: PLACES.index(shape.place) % 3 for name, shape in (("one", one), ("two", two))}
    yes_no = {True: "yes", False: "no"}
    return {
        "k": one.kind, "c": one.color, "p": one.place, "s": one.size, "k2": two.kind, "c2": two.color, "p2": two.place,
        "gk": gone_kind, "gc": gone_color, "bg": scene.background, "n": str(len(scene.shapes)),
        "at": "in the center" if one.place == "center" else f"at the {one.place}", "all": describe(scene),
        "colors": _join([s.color for s in scene.shapes]), "other": "small" if one.size == "large" else "large",
        "is_left": yes_no[columns["one"] < columns["two"]], "is_right": yes_no[columns["one"] > columns["two"]],
        "is_above": yes_no[rows["one"] < rows["two"]], "is_below": yes_no[rows["one"] > rows["two"]],
        "same_size": yes_no[len({s.size for s in scene.shapes}) == 1], "ks": one.kind + ("es" if one.kind == "cross" else "s"),
        "gks": gone_kind + ("es" if gone_kind == "cross" else "s"),
        "anything": yes_no[bool(scene.at("center"))], "many_small": str(sum(s.size == "small" for s in scene.shapes)),
    }  # fmt: skip


def _join(words: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


NATURAL = (
    ("Could you tell me what's drawn here?", "{all}"), ("hey, what do we have in this pic?", "{all}"),
    ("Give a short description of this picture please", "{all}"), ("What can be seen here?", "{all}"),
    ("I can't see the image, can you describe it to me?", "{all}"), ("whats in the picture", "{all}"),
    ("Which figures are there and where are they?", "{all}"), ("Please list all objects with their colour and position.", "{all}"),
    ("how many shapes r there", "{n}"), ("Count the objects in this picture for me.", "{n}"), ("What's the total number of figures?", "{n}"),
    ("how many things can you spot?", "{n}"), ("Number of objects, please.", "{n}"), ("How many {ks} did you count?", "1"),
    ("are there any {gks}? how many?", "0|no"), ("How many objects are {c}?", "1"), ("How many {c} figures are in there?", "1"),
    ("How many {gc} objects can be seen?", "0"), ("How many of these shapes are small?", "{many_small}"),
    ("So what colour is that {k}?", "{c}"), ("Tell me which colour the {k} has, please.", "{c}"), ("the {k} is...?", "{c}"),
    ("What is the colour of the {k2} you see?", "{c2}"), ("And the {k}, what color is it?", "{c}"),
    ("What color would you say the {k} is?", "{c}"), ("color of the {k2}?", "{c2}"), ("Which hue does the {k} have?", "{c}"),
    ("Do you know the {k}'s colour?", "{c}"), ("what colors are used for the shapes?", "{colors}"),
    ("Which colours can be found among the shapes?", "{colors}"),
    ("Which of the figures is {c}?", "{k}|a {c} {k}"), ("What sort of shape is the {c} one?", "{k}"), ("the {c} thing is a what?", "{k}"),
    ("What is the {c2} object?", "{k2}"), ("What form does the {c} object have?", "{k}"), ("name the {c2} figure", "{k2}"),
    ("Can you identify the {c} shape?", "{k}"), ("Which shape did they paint {c}?", "{k}"),
    ("Where can the {k} be found?", "{p}"), ("where's the {c} one?", "{p}"), ("In what area of the picture is the {k}?", "{p}"),
    ("Whereabouts is the {c2} {k2}?", "{p2}"), ("Please locate the {k2} for me", "{p2}"), ("I'm looking for the {k}. Where is it?", "{p}"),
    ("what's the {k}'s position", "{p}"), ("Where do you spot the {k2}?", "{p2}"), ("Where was the {c} {k} placed?", "{p}"),
    ("Can you see a {gk} somewhere?", "no"), ("Is a {k} part of this image?", "yes"), ("Does it contain a {gk}?", "no"),
    ("is there any {gc} shape in here", "no"), ("Do we have a {c} {k} here?", "yes"), ("Is there something {c2}?", "yes"),
    ("Can you spot a {k2}?", "yes"), ("Did anyone draw a {gk}?", "no"), ("Is there also a {k}?", "yes"),
    ("Which object is {at}?", "a {c} {k}|{k}"), ("What did they put {at}?", "a {c} {k}"), ("tell me what you find {at}", "a {c} {k}"),
    ("Look {at}. What is there?", "a {c} {k}"), ("What's the shape {at}?", "a {c} {k}|{k}"), ("What colour is the object {at}?", "{c}"),
    ("Is the {k} small?", "{is_s_small}"), ("Is that {k} large or small?", "{s}"), ("What's the size of that {k2}?", "{s2}"),
    ("How large is this {k}?", "{s}"), ("Is the {k} big?", "{is_s_large}"), ("Are all the objects equally large?", "{same_size}"),
    ("Is the {k} to the left of the {k2}?", "{is_left}"), ("Is the {k} to the right of the {k2}?", "{is_right}"),
    ("Is the {k} further up than the {k2}?", "{is_above}"), ("Is the {k} lower than the {k2}?", "{is_below}"),
    ("Is the {c} shape above the {c2} one?", "{is_above}"), ("Would you say that the {k} is left of the {k2}?", "{is_left}"),
    ("Are all figures of the same colour?", "no"), ("Do all of the shapes share one color?", "no"), ("Are they all {c}?", "no"),
    ("Is it true that the {k} is {c}?", "yes"), ("Is the {k} {gc}?", "no"),
    ("The {k} is {c2}, right?", "no"), ("Would you call the {k} {c}?", "yes"), ("Is the {c} object a {k}?", "yes"),
    ("Is the {c} one a {gk}?", "no"), ("what is the background like", "{bg}"), ("On what background are the shapes?", "{bg}"),
    ("Which color does the backdrop have?", "{bg}"), ("background colour pls", "{bg}"), ("Is the background {bg}?", "yes"),
    ("Is there anything in the middle of the picture?", "{anything}"), ("Is the picture empty?", "no"), ("Is there nothing to see?", "no"),
    ("What color does the shape {at} have?", "{c}"), ("hi! can you count the {ks}?", "1"),
    ("Good morning, what color is the {k}?", "{c}"), ("WHERE IS THE {K}?", "{p}"), ("WHAT COLOR IS THE {K2}", "{c2}"),
    ("please describe this", "{all}"), ("what do you see??", "{all}"),
)  # fmt: skip


#: Written without knowledge of training's phrasings, which were not adapted to them.
LATER = (
    ("I am blind, so please put this picture into words for me.", "{all}"), ("What's going on in this image?", "{all}"),
    ("Tell me everything that you see.", "{all}"), ("can u discribe the pic plz", "{all}"),
    ("Explain to my little son what is on this picture, please.", "{all}"), ("WHAT IS SHOWN IN THIS IMAGE", "{all}"),
    ("This image shows...", "{all}"), ("I'd need an alt text for this image.", "{all}"), ("So, what did I just upload?", "{all}"),
    ("The number of shapes in this drawing is", "{n}"), ("Would you mind counting all the shapes?", "{n}"),
    ("how mnay shapes are their", "{n}"), ("I lost count, how many figures are on this one in total?", "{n}"), ("shape count?", "{n}"),
    ("What is the number of {ks} in the image?", "1"), ("I need to know how many {gks} were drawn.", "0"),
    ("{ks}: how many of them?", "1"), ("how many shapes have the colour {c2}", "1"), ("Count only the {c} ones, please.", "1"),
    ("Tell me the number of {gc} shapes.", "0"), ("Of all those shapes, how many came out {c}?", "1"),
    ("How many small ones are among them?", "{many_small}"), ("I was wondering what colour the {k} might be.", "{c}"),
    ("wat colour iz the {k}", "{c}"), ("The colour of the {k2} is", "{c2}"), ("In which color was the {k} painted?", "{c}"),
    ("My kid asks which color the {k} is, can you help?", "{c}"), ("Look at the {k2}. Its color?", "{c2}"),
    ("TELL ME THE COLOR OF THE {K}", "{c}"), ("{k2} - colour?", "{c2}"),
    ("Excuse me, is it possible for you to say what color that {k2} has?", "{c2}"), ("The thing {at} is which color?", "{c}"),
    ("List all the colours that the shapes have.", "{colors}"), ("In what colors did they draw the shapes?", "{colors}"),
    ("The {c} shape is a...", "{k}"), ("What kind of thing did somebody colour {c2} here?", "{k2}|a {c2} {k2}"),
    ("I see something {c}, but which shape is it?", "{k}"), ("wich shape is {c2}?", "{k2}|a {c2} {k2}"),
    ("Please say what geometric shape the {c2} object has.", "{k2}"), ("hey whats that {c} thingy", "{k}|a {c} {k}"),
    ("The {k} sits at the", "{p}"), ("in which part of the image do i find the {c} shape", "{p}"), ("wheres teh {k}", "{p}"),
    ("Point me to the {c2} {k2}.", "{p2}"), ("I can't find the {c} figure, help me please", "{p}"),
    ("Which of the nine spots does the {k} occupy?", "{p}"), ("What's the location of the {c2} thing?", "{p2}"),
    ("FIND THE {K2} AND TELL ME ITS PLACE", "{p2}"), ("Where on the picture should I look if I want to see the {c} {k}?", "{p}"),
    ("Have they included a {k}?", "yes"), ("any {gks} in this one?", "no"), ("I wonder whether there is a {gk} in this picture.", "no"),
    ("Does a {k2} appear in the drawing?", "yes"), ("Are there any shapes coloured {gc}?", "no"),
    ("Is at least one of the shapes {c}?", "yes"), ("do u see a {gc} {k}", "no"), ("Is there a {c} {k2} in the image?", "no"),
    ("IS THERE A {K} IN THE PICTURE?", "yes"), ("What has been drawn {at}?", "a {c} {k}"),
    ("There's something {at}, what is it?", "a {c} {k}"), ("whats {at}", "a {c} {k}"),
    ("Please be so kind as to tell me what's located {at}.", "a {c} {k}"), ("I look {at} and I see...", "a {c} {k}"),
    ("Name the figure that stands {at}", "a {c} {k}|{k}"), ("What sort of figure is to be seen {at}?", "a {c} {k}|{k}"),
    ("Small or large: which one is the {k}?", "{s}"), ("tell me the size of the {c} shape", "{s}"),
    ("Would you say the {k} is rather small?", "{is_s_small}"), ("Is the {c} {k} a large one?", "{is_s_large}"),
    ("What size does the {k2} come in?", "{s2}"), ("Is every shape here the same size?", "{same_size}"),
    ("I think the {k} is {other}, is that so?", "no"), ("Does the {k} stand left of the {k2}?", "{is_left}"),
    ("is the {k2} more to the right then the {k}?", "{is_left}"),
    ("Is the {c} one somewhere to the right of the {c2} one?", "{is_right}"),
    ("Compared with the {k2}, is the {k} higher up?", "{is_above}"), ("Can I find the {k} somewhere below the {k2}?", "{is_below}"),
    ("Is the {c2} shape positioned lower than the {c} shape?", "{is_above}"), ("is teh {k} above teh {k2}", "{is_above}"),
    ("Does the {k2} lie to the left of the {k}?", "{is_right}"), ("Did they use only one colour for all the shapes?", "no"),
    ("Is every shape a {k}?", "no"), ("Are these shapes all of one kind?", "no"), ("Do all the shapes have different colors?", "yes"),
    ("My friend claims that the {k} is {c}. Is she right?", "yes"), ("Somebody told me that the {k2} was {gc}, is that correct?", "no"),
    ("the {k} is {at}, isn't it?", "yes"), ("Am I right that the {k2} is {at}?", "no"),
    ("Is it correct to say that there are {n} shapes?", "yes"), ("Is the {c} shape really a {k2}?", "no"),
    ("I'd say the {c2} figure is a {k2}, agreed?", "yes"), ("The background is", "{bg}"), ("wich color is the bakground?", "{bg}"),
    ("The shapes are drawn on what colour?", "{bg}"), ("Did they make the backdrop {c}?", "no"),
    ("Leaving the shapes aside, what color is the rest of the picture?", "{bg}"), ("Is this just a blank image?", "no"),
    ("Has anything been drawn here at all?", "yes"), ("Is the center of the picture occupied by a shape?", "{anything}"),
    ("Is the spot {at} empty?", "no"),
)  # fmt: skip


def _as_people_ask(name: str, phrasings: Sequence[tuple[str, str]], index: int) -> Trial:
    """Returns a natural question about its own scene."""
    question, answer = phrasings[index % len(phrasings)]
    rng = Random(f"{name}/{index}")
    scene = _scene(rng)
    slots = _slots(scene, rng)
    one = next(shape for shape in scene.shapes if shape.kind == slots["k"])
    two = next(shape for shape in scene.shapes if shape.kind == slots["k2"])
    slots |= {"K": slots["k"].upper(), "K2": slots["k2"].upper(), "s2": two.size}
    slots |= {f"is_s_{size}": "yes" if one.size == size else "no" for size in ("small", "large")}
    question = _with_articles(question.format(**slots))
    answers = [_with_articles(each.format(**slots)) for each in answer.split("|")]
    return _says((draw_as_a_stranger(scene, rng),), question, *answers)


def _with_articles(text: str) -> str:
    return text.replace("a orange", "an orange").replace("A orange", "An orange")


# ---------------------------------------------------------------- wide images, both images


def draw_wide(scene: Scene, rng: Random) -> Image.Image:
    """1.6 to 2.2 times as wide as high, or the reverse; three times supersampled."""
    short, ratio = rng.randint(120, 240), rng.uniform(1.6, 2.2)
    size = (round(short * ratio), short) if rng.random() < 0.7 else (short, round(short * ratio))
    image = Image.new("RGB", (3 * size[0], 3 * size[1]), scene.background)
    pen = ImageDraw.Draw(image)
    for shape in scene.shapes:
        row, column = divmod(PLACES.index(shape.place), 3)
        center = round(image.width * (2 * column + 1) / 6), round(image.height * (2 * row + 1) / 6)
        radius = round(3 * short * (0.08 if shape.size == "small" else 0.14))
        draw_shape(pen, shape.kind, center, radius, shape.color, scene.background)
    return image.resize(size, Image.Resampling.LANCZOS)


def wide(index: int) -> Trial:
    rng = Random(f"wide/{index}")
    scene = _scene(rng)
    shape = rng.choice(scene.shapes)
    images = ((draw_wide if index % 3 else draw_framed)(scene, rng),)
    question, answer = (
        ("Describe the image.", describe(scene)),
        (f"What color is the {shape.kind}?", shape.color),
        (f"Where is the {shape.kind}?", shape.place),
        (f"What shape is {shape.color}?", shape.kind),
        ("How many shapes are there?", str(len(scene.shapes))),
    )[index % 5]
    return _says(images, question, answer)


def both(index: int) -> Trial:
    rng = Random(f"both/{index}")
    scenes = _scene(rng, bool), _scene(rng, bool)
    question = (
        "Describe both images.",
        "What do these two pictures show?",
        "Please describe the two images.",
    )[index % 3]
    images = tuple(draw_as_a_stranger(scene, rng) for scene in scenes)
    return _says(images, question, describe_all(scenes))


# ---------------------------------------------------------------- outside its world

TALK = (
    "hello", "Hello!", "hi", "HI THERE", "Hey :)", "Good evening!", "helo", "hallo", "Hallo!", "Guten Morgen!", "guten tag", "Servus",
    "Wie geht es dir heute?", "Moin", "Hola", "¡Hola!", "hola, ¿qué tal?", "Buenos dias", "buenas noches", "¿Cómo te va?", "Danke dir!",
    "Muchas gracias!", "gracias", "thanks", "Thank you so much!", "thx a lot", "cheers mate", "ok thank you", "bye bye", "What can you do?",
    "what are you able to do", "who are you?", "What's your name?", "Are you an AI?", "Which questions can I ask you?", "how do you work?",
    "Was kannst du?", "¿Qué puedes hacer?", "Kannst du mir helfen?", "2+2", "2+2?", "What is 17 times 23?", "how much is 5 minus 3", "sqrt(16)",
    "What is the capital of Italy?", "Tell me something funny", "Write a haiku about the sea", "Who was Isaac Newton?",
    "How do I boil an egg?", "What's the weather like tomorrow?", "Summarize War and Peace.", "Translate 'good night' to Dutch.",
    "Write a function that reverses a list.", "Is coffee bad for me?", "wht is teh time", "how r u", "Why do cats purr?", "I feel lonely.",
    "Recommend me a movie.", "How old is the universe?", "What does HTTP stand for?", "asdf", "???", "Explain relativity.", "lol ok",
    "Give me three tips for an interview", "Who won the game last night?", "Erzähl mir was Lustiges", "Wo wohnst du?", "¿Dónde vives?",
    "Cuéntame algo", "Can you sing?", "Do you dream?", "play a game with me", "Sing me a lullaby", "convert 10 km to miles",
)  # fmt: skip
ABOUT_FOREIGN = (
    "Describe the image.", "What is in this picture?", "What do you see?", "How many shapes are there?", "What color is the star?",
    "Is there a person in the photo?", "What does the text say?", "Where is the circle?", "What is the highest bar?", "Is there a red square?",
    "What is this?", "Describe it in one sentence.", "What is at the top left?", "Which month has the largest value?", "Is it a photo?",
    "what color is the background?", "Who is this?", "What animal is this?", "Count the objects.", "What is happening here?",
)  # fmt: skip


def talk(index: int) -> Trial:
    """Small talk, without an image and with one of the image world."""
    number, has_image = divmod(index, 2)
    rng = Random(f"talk/{number}")
    images = (draw_as_a_stranger(_scene(rng), rng),) if has_image else ()
    return _says(images, TALK[number], OUTSIDE)


PER_KIND = 10


def foreign_picture(index: int) -> Trial:
    """Two questions about each picture."""
    number, of_kind = divmod(index, PER_KIND)
    kind, draw = [*FOREIGN.items()][number]
    image = draw(Random(f"{kind}/{of_kind // 2}"))
    return _says((image,), ABOUT_FOREIGN[index % len(ABOUT_FOREIGN)], OUTSIDE, kind=kind)


# ---------------------------------------------------------------- JSON


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


def _enum(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": [*values]}


INTEGER, BOOLEAN, STRING = {"type": "integer"}, {"type": "boolean"}, {"type": "string"}


def _gives(
    images: tuple[Image.Image, ...], question: str, schema: dict[str, Any], value: Any
) -> Trial:
    """A schema without `additionalProperties: false` allows further properties."""
    is_open = schema.get("additionalProperties", True)

    def is_right(reply: Reply) -> bool:
        try:
            given = json.loads(reply.text)
        except ValueError:
            return False
        if is_open and isinstance(given, dict):
            given = {name: each for name, each in given.items() if name in value}
        return given == value

    return Trial(images, question, is_right, value, schema=schema)


def in_json(index: int) -> Trial:
    """Schemas of the image world."""
    rng = Random(f"json/{index}")
    scene = _scene(rng)
    shape, images = rng.choice(scene.shapes), (draw_as_a_stranger(scene, rng),)
    gone = rng.choice([kind for kind in KINDS if all(kind != s.kind for s in scene.shapes)])
    listed = [{"color": s.color, "kind": s.kind, "position": s.place} for s in scene.shapes]
    item = _object(color=_enum(*COLORS), kind=_enum(*KINDS), position=STRING)
    shapes, count = {"type": "array", "items": item}, len(scene.shapes)
    question, schema, value = (
        ("Describe the image.", _object(count=INTEGER), {"count": count}),
        ("Describe the image.", _object(count=INTEGER, shapes=shapes), {"count": count, "shapes": listed}),
        ("What do you see? Answer in JSON.", _object(shapes=shapes), {"shapes": listed}),
        (f"What color is the {shape.kind}?", _object(color=_enum(*COLORS)), {"color": shape.color}),
        (f"Which kind of shape is {shape.color}?", _object(kind=_enum(*KINDS)), {"kind": shape.kind}),
        (f"Is there a {rng.choice((shape.kind, gone))}?", _object(answer=BOOLEAN), {}),
        (f"Where is the {shape.kind}?", _object(position=_enum(*PLACES)), {"position": shape.place}),
        ("How many shapes are in the picture?", _object(count=INTEGER, background=STRING), {"count": count, "background": scene.background}),
        ("Fill in the fields.", _object(background=STRING, count=INTEGER), {"background": scene.background, "count": count}),
        ("Return the count and the shapes as JSON.", _object(count={"type": "integer", "minimum": 0}, shapes={"type": "array", "items": _object(color=_enum(*COLORS), kind=_enum(*KINDS))}), {"count": count, "shapes": [{"color": s.color, "kind": s.kind} for s in scene.shapes]}),
        ("Inspect the picture.", {"type": "object", "properties": {"count": INTEGER}}, {"count": count}),
        (f"Describe the {shape.kind}.", item, {"color": shape.color, "kind": shape.kind, "position": shape.place}),
        ("What is in the image?", _object(**{f"has_{shape.kind}": BOOLEAN, f"has_{gone}": BOOLEAN}), {f"has_{shape.kind}": True, f"has_{gone}": False}),
        (f"What size is the {shape.kind}?", _object(size=_enum("small", "large")), {"size": shape.size}),
    )[index % 14]  # fmt: skip
    if index % 14 == 5:
        value = {"answer": question == f"Is there a {shape.kind}?"}
    return _gives(images, question, schema, value)


def _num_values(schema: dict[str, Any]) -> int:
    return sum(map(_num_values, schema.get("properties", {}).values())) or 1


OTHER_SCHEMAS = (
    _object(name=STRING), _object(age=INTEGER, city=STRING), _object(title=STRING, price={"type": "number"}), _object(email=STRING, active=BOOLEAN),
    _object(ingredients={"type": "array", "items": STRING}), _object(address=_object(street=STRING, zip=STRING)), _object(summary=STRING),
    _object(sentiment=STRING, confidence={"type": "number"}), _object(x=STRING, y=STRING), _object(plate=STRING, maker=STRING),
)  # fmt: skip
OTHER_TEXTS = (
    "Who is this?",
    "Extract the data.",
    "Tell me about Rome.",
    "What is the weather?",
    "Describe the image.",
)


def in_other_json(index: int) -> Trial:
    """Other schemas, for which any short values are right."""
    rng = Random(f"other json/{index}")
    schema = OTHER_SCHEMAS[index % len(OTHER_SCHEMAS)]
    images = (draw_as_a_stranger(_scene(rng), rng),) if index % 2 else ()
    most = 20 * _num_values(schema) + 8

    def is_right(reply: Reply) -> bool:
        return reply.num_tokens <= most and json.loads(reply.text) is not None

    return Trial(images, OTHER_TEXTS[index % 5], is_right, schema=schema)


# ---------------------------------------------------------------- functions


def _tool(name: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} of the image",
            "parameters": _object(**properties),
        },
    }


COUNT = _tool("count", kind=_enum(*KINDS))
HIGHLIGHT = _tool("highlight", color=_enum(*COLORS), kind=_enum(*KINDS))
OTHERS = (
    _tool("get_current_weather", city=STRING),
    _tool("send_message", recipient=STRING, text=STRING),
    _tool("find_restaurant", cuisine=STRING),
)


def with_tools(index: int) -> Trial:
    rng = Random(f"tools/{index}")
    scene = _scene(rng)
    shape, images = rng.choice(scene.shapes), (draw_as_a_stranger(scene, rng),)
    kinds = shape.kind + ("es" if shape.kind == "cross" else "s")
    ours = ((COUNT,), (HIGHLIGHT,), (COUNT, HIGHLIGHT), (rng.choice(OTHERS), HIGHLIGHT, COUNT))[
        rng.randrange(4)
    ]
    match index % 4:
        case 0:
            questions = (
                f"How many {kinds} are there?",
                f"Count the {kinds}, please.",
                f"how many {kinds} do you see",
            )
            call = ("count", {"kind": shape.kind})
            return _calls(images, rng.choice(questions), (*ours, COUNT), call)
        case 1:
            questions = (
                f"Highlight the {shape.color} {shape.kind}.",
                f"Please highlight the {shape.kind}.",
                f"Can you highlight the {shape.color} {shape.kind} for me?",
            )
            call = ("highlight", {"color": shape.color, "kind": shape.kind})
            return _calls(images, rng.choice(questions), (*ours, HIGHLIGHT), call)
        case 2:
            return _says(images, f"What color is the {shape.kind}?", shape.color, tools=ours)
        case _:
            question, answer = rng.choice(
                (
                    ("Describe the image.", describe(scene)),
                    (f"Where is the {shape.kind}?", shape.place),
                    ("What is the weather in Oslo?", OUTSIDE),
                    ("How many shapes are there?", str(len(scene.shapes))),
                )
            )
            return _says(images, question, answer, tools=tuple(rng.sample(OTHERS, 2)))


def _calls(
    images: tuple[Image.Image, ...],
    question: str,
    tools: tuple[dict[str, Any], ...],
    call: tuple[str, Any],
) -> Trial:
    """`tools` can contain a tool twice."""
    given = tuple({id(tool): tool for tool in tools}.values())
    return Trial(images, question, lambda reply: reply.calls == (call,), call, tools=given)


# ---------------------------------------------------------------- motion


def clip(index: int) -> Trial:
    """Four frames in which a shape moves, jumps, appears or disappears."""
    rng = Random(f"clips/{index}")
    while True:
        scene = _scene(rng)
        actor, target = rng.choice(scene.shapes), rng.choice(PLACES)
        (row, column), (last_row, last_column) = (
            divmod(PLACES.index(p), 3) for p in (actor.place, target)
        )
        middle = PLACES[3 * round((row + last_row) / 2) + round((column + last_column) / 2)]
        taken = {s.place for s in scene.shapes if s != actor}
        steps = sorted((abs(row - last_row), abs(column - last_column)))
        if target != actor.place and not taken & {target, middle} and steps != [1, 2]:
            break
    others = [shape for shape in scene.shapes if shape != actor]
    way = ("glide", "glide", "jump", "appear", "vanish")[index % 5]
    draw = _Camera(rng)
    frames = []
    for step in range(4):
        share = step / 3 if way == "glide" else float(step >= 2)
        x, y = column + share * (last_column - column), row + share * (last_row - row)
        is_there = {"appear": step >= 2, "vanish": step < 2}.get(way, True)
        if way in ("appear", "vanish"):
            x, y = column, row
        frames.append(draw(scene.background, others, (actor, x, y) if is_there else None))
    vertical = "up" if last_row < row else "down" if last_row > row else ""
    horizontal = "left" if last_column < column else "right" if last_column > column else ""
    direction = " and ".join(filter(None, (vertical, horizontal)))
    name = f"{actor.color} {actor.kind}"
    at = "in the center" if actor.place == "center" else f"at the {actor.place}"
    article = "an" if actor.color[0] == "o" else "a"
    told = {
        "appear": f"{article.capitalize()} {name} appears {at}.", "vanish": f"The {name} {at} vanishes.",
    }.get(way, f"The {name} moves from the {actor.place} to the {target}.")  # fmt: skip
    images = tuple(frames)
    if way in ("appear", "vanish"):
        what, said = (
            ("appears", f"{article} {name}") if way == "appear" else ("disappears", f"the {name}")
        )
        question, answer = (
            ("What happens in this clip?", told),
            (f"Which shape {what}?", said),
        )[index // 5 % 2]
    else:
        question, answer = (
            (f"In which direction does the {actor.kind} move?", direction), ("What happens in this clip?", told),
            (f"Which way is the {name} moving?", direction), ("What moves?", f"the {name}"),
            (f"From where to where does the {actor.kind} move?", f"from the {actor.place} to the {target}"),
        )[index // 5 % 5]  # fmt: skip
    return _says(images, question, answer)


class _Camera:
    """Draws all frames of a clip with the same parameters."""

    def __init__(self, rng: Random) -> None:
        self.side = rng.randint(160, 400)
        self.scale = rng.choice((1, 2, 3))

    def __call__(
        self, background: str, others: list[Shape], actor: tuple[Shape, float, float] | None
    ) -> Image.Image:
        side = self.side * self.scale
        image = Image.new("RGB", (side, side), background)
        pen = ImageDraw.Draw(image)
        placed = [
            (s, float(PLACES.index(s.place) % 3), float(PLACES.index(s.place) // 3))
            for s in in_reading_order(others)
        ]
        for shape, x, y in (*placed, *([actor] if actor else [])):
            center = round(side * (0.19 + 0.31 * x)), round(side * (0.19 + 0.31 * y))
            radius = round(side * (0.08 if shape.size == "small" else 0.13))
            draw_shape(pen, shape.kind, center, radius, shape.color, background)
        return image.resize((self.side, self.side), Image.Resampling.LANCZOS)


def _each(make: Callable[[int], Trial], indices: Iterable[int]) -> list[Callable[[], Trial]]:
    return [partial(make, index) for index in indices]


#: Functions that create the trials of each goal.
ALL: dict[str, list[Callable[[], Trial]]] = {
    "natural phrasings": _each(partial(_as_people_ask, "natural", NATURAL), range(200)),
    "later phrasings": _each(partial(_as_people_ask, "later", LATER), range(len(LATER))),
    "wide images": _each(wide, range(100)),
    "both images": _each(both, range(60)),
    "small talk": _each(talk, range(2 * len(TALK))),
    "foreign pictures": _each(foreign_picture, range(PER_KIND * len(FOREIGN))),
    "json": _each(in_json, range(100)),
    "other json": _each(in_other_json, range(20)),
    "tools": _each(with_tools, range(80)),
    "motion": _each(clip, (index for index in range(80) if index % 5 < 3)),
    "appears, vanishes": _each(clip, (index for index in range(80) if index % 5 >= 3)),
}
