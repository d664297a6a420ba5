"""Questions that are answered by JSON or function calls. A schema determines the JSON's property names."""

import json
from collections.abc import Iterator
from random import Random
from typing import Any

from training.shapes import answers, phrasings
from training.shapes.questions import Asker, Question, vary
from training.shapes.small_talk import sample_prose, sample_small_talk
from training.shapes.world import KINDS, Scene, Selector, Shape

#: Property names that schemas use, by property.
NAMES = {
    "count": ("count", "count", "count", "num_shapes", "number_of_shapes", "total", "number", "shape_count", "n", "how_many"),
    "shapes": ("shapes", "shapes", "shapes", "objects", "items", "figures", "elements"),
    "color": ("color", "color", "color", "colour"),
    "kind": ("kind", "kind", "shape", "type", "name", "form"),
    "place": ("position", "position", "place", "location", "where"),
    "size": ("size",),
    "background": ("background", "background", "background_color", "bg_color"),
    "colors": ("colors", "colours", "all_colors"),
    "kinds": ("kinds", "shape_types", "types"),
    "caption": ("description", "caption", "summary", "text"),
    "answer": ("answer", "answer", "result", "response", "value"),
    "empty": ("empty", "is_empty"),
    "is_there": ("exists", "found", "present", "is_there", "visible", "answer", "result"),
}  # fmt: skip
ASK = (
    "Describe the {image} as JSON.", "Answer as JSON.", "Return JSON.", "Give me JSON.", "What is in the {image}? Answer in JSON.",
    "Describe this {image} in JSON.", "JSON please", "Extract the data from the {image} as JSON.", "Output a JSON object.",
    "List the shapes as JSON.", "Fill in the JSON.", "Convert the {image} to JSON.", "What do you see? Reply with JSON.",
)  # fmt: skip
ASK_PLAINLY = (
    "Describe the {image}.", "What is in the {image}?", "What do you see?", "Extract the shapes.", "Analyze the {image}.", "What is it?",
    "List the shapes.", "Which shapes are in the {image}?", "Fill in the form.", "Give me the details.", "Inspect the {image}.",
    "Extract the information.", "Parse the {image}.", "Report what you see.", "Tell me about the {image}.",
)  # fmt: skip
ASK_OF_KIND = ("Describe the {noun}.", "Tell me about the {noun}.", "Find the {noun}.")
WITH_NAMES = (
    " Use the keys {names}.",
    " The keys are {names}.",
    " Fields: {names}.",
    " With {names}.",
    " Give {names}.",
)
OTHER_NAMES = (
    "name", "title", "age", "email", "price", "date", "city", "country", "author", "url", "id", "status", "comment", "reason", "notes",
    "weather", "temperature", "address", "phone", "currency", "language", "category", "tags", "brand", "model", "year", "month", "score",
    "confidence", "sentiment", "person", "animal", "vehicle", "label", "message", "code", "steps", "ingredients", "first_name", "company",
    "invoice_number", "amount", "items_sold", "population", "duration", "speed", "owner", "topic", "keywords", "version", "mood",
)  # fmt: skip
UNKNOWN = "unknown"
FORCED = 0.15  #: loss weight of a name that a schema forces: the model learns its spelling, not its choice

Piece = tuple[str, float]


def sample_json(scene: Scene | None, rng: Random) -> Question:
    """A question and its JSON answer. Without a scene, the answer has no facts."""
    way = rng.random()
    if scene is None or way < 0.12:
        return _about_anything(scene, rng)
    if way < 0.5:
        return _about_all(scene, rng)
    if way < 0.62:
        return _about_one(scene, rng)
    return _as_asked(scene, rng)


def _about_all(scene: Scene, rng: Random) -> Question:
    """Some properties of the scene, in any order."""
    if rng.random() < 0.12:  # the format of an answer without a schema
        shapes = [_object(shape, ("color", "kind", "position")) for shape in scene.shapes]
        return _put(_ask(ASK, rng), {"count": len(shapes), "shapes": shapes}, 1.0)
    fields = list(_fields(scene, rng))
    rng.shuffle(fields)
    fields.sort(key=lambda field: rng.random() > field[2])
    number = rng.choice((1, 1, 2, 2, 3, 4))
    chosen = {name: value for name, value, _ in fields[:number]}
    texts = ASK if rng.random() < 0.5 else ASK_PLAINLY
    if rng.random() < 0.3:
        named = rng.choice(WITH_NAMES).format(names=answers.join(list(chosen)))
        return _put(_ask(texts, rng, named), chosen, 1.0)
    return _put(_ask(texts, rng), chosen)


def _object(shape: Shape, names: tuple[str, ...]) -> dict[str, str]:
    known = {"color": shape.color, "colour": shape.color, "size": shape.size}
    known |= dict.fromkeys(NAMES["kind"], shape.kind) | dict.fromkeys(NAMES["place"], shape.place)
    return {name: known[name] for name in names}


def _object_names(rng: Random) -> tuple[str, ...]:
    """Property names of a shape, often color, kind and position."""
    if rng.random() < 0.4:
        return ("color", "kind", "position")
    names = [rng.choice(NAMES[name]) for name in ("color", "kind", "place", "size")]
    if rng.random() < 0.5:
        rng.shuffle(names)
    return tuple(names[: rng.choice((1, 2, 3, 3, 4))])


def _fields(scene: Scene, rng: Random) -> Iterator[tuple[str, object, float]]:
    """Name, value and frequency of every property of a scene."""

    def name(what: str) -> str:
        return rng.choice(NAMES[what])

    shapes = scene.shapes
    names = _object_names(rng)
    yield name("count"), len(shapes), 0.6
    yield name("shapes"), [_object(shape, names) for shape in shapes], 0.6
    yield name("background"), scene.background, 0.4
    yield name("colors"), list(dict.fromkeys(shape.color for shape in shapes)), 0.3
    yield name("kinds"), list(dict.fromkeys(shape.kind for shape in shapes)), 0.2
    yield name("caption"), answers.describe(scene), 0.12
    yield name("empty"), not shapes, 0.15
    asker = Asker(rng, scene)
    selector = asker.pick_selector("kind", "kind", "color")
    if rng.random() < 0.4:
        selector = Selector(rng.choice(KINDS))
    words = [word for word in (selector.color, selector.kind) if word]
    count = len(selector.pick(scene))
    has = rng.choice(("has", "has", "contains", "is_there_a", "shows"))
    yield "_".join((has, *words)), count > 0, 0.5
    noun = selector.nouns.replace(" shapes", "").replace(" ", "_")
    bare = noun if selector.kind else f"{noun}_shapes"
    name_of_count = rng.choice((bare, f"num_{noun}", f"{noun}_count", f"number_of_{noun}"))
    yield name_of_count, count, 0.4 if selector.kind else 0.3


def _about_one(scene: Scene, rng: Random) -> Question:
    """Properties of one shape: the only shape, or the shape that the question names."""
    names = _object_names(rng)
    if len(scene.shapes) == 1 and rng.random() < 0.6:
        return _put(_ask(ASK + ASK_PLAINLY, rng), dict(_object(scene.shapes[0], names)))
    asker = Asker(rng, scene)
    place = asker.pick_place(0.9)
    shape = scene.at(place)
    text = asker.put(phrasings.CONTENT, "", at=asker.at(place)).text
    if shape and asker.only(Selector(shape.kind)) and rng.random() < 0.5:
        text = vary(rng.choice(ASK_OF_KIND).format(noun=shape.kind), rng)
    return _put(text, _object(shape, names) if shape else dict.fromkeys(names, "none"))


def _as_asked(scene: Scene, rng: Random) -> Question:
    topic = rng.choice(("count", "count", "color", "color", "kind", "place", "size", "exists", "exists", "is at", "background", "content", "all same", "is beside", "count special"))  # fmt: skip
    question = Asker(rng, scene).ask(topic)
    value: object = question.answer
    names: tuple[str, ...] = NAMES["answer"]
    if question.answer.startswith("There is no"):
        value = False if topic == "is beside" else "none"
    elif question.answer in ("yes", "no"):
        names = NAMES["is_there"]
        value = question.answer == "yes" if rng.random() < 0.8 else question.answer
    elif question.answer.isdigit():
        names = NAMES["count"] if rng.random() < 0.7 else names
        value = int(question.answer)
    elif topic in ("color", "kind", "place", "size", "background") and rng.random() < 0.7:
        names = NAMES[topic]
    text = question.text
    if rng.random() < 0.25:
        text += rng.choice((" Answer as JSON.", " Reply in JSON.", " Use JSON.", " JSON only."))
    return _put(text, {rng.choice(names): value})


def _about_anything(scene: Scene | None, rng: Random) -> Question:
    """Properties whose values are unknown. Without a scene, also properties of the image world."""
    fields: dict[str, object] = {}
    for _ in range(rng.choice((1, 1, 2, 3, 4))):
        name = rng.choice(OTHER_NAMES) if rng.random() < 0.7 else _any_name(rng)
        values = (UNKNOWN, UNKNOWN, UNKNOWN, 0, 0, False, None, [], [UNKNOWN], {})
        fields[name] = rng.choice(values)
    if scene is None and rng.random() < 0.5:
        names = ("background", "color", "kind", "position", "description", "answer")
        known = [("count", 0), ("shapes", []), *((name, UNKNOWN) for name in names)]
        fields = dict(rng.sample(known, rng.choice((1, 2, 3))))
    elif scene is not None and rng.random() < 0.3:
        fields["count"] = len(scene.shapes)
    if scene is not None and rng.random() < 0.3:
        return _put(Asker(rng, scene).ask("describe").text, fields)
    texts = ASK + ASK_PLAINLY if rng.random() < 0.4 else (sample_small_talk(rng),)
    return _put(_ask(texts, rng), fields)


def _any_name(rng: Random) -> str:
    words = [word.strip(",.?").lower() for word in sample_prose(rng).split()]
    return "_".join(words[: rng.choice((1, 1, 2))]).replace("'", "") or "x"


def _ask(texts: tuple[str, ...], rng: Random, more: str = "") -> str:
    text = rng.choice(texts).replace("{image}", rng.choice(phrasings.IMAGE_WORDS))
    return vary(text + more, rng)


def _put(text: str, fields: dict[str, Any], weight: float = FORCED) -> Question:
    """A question with a JSON answer. `weight`: loss weight of the property names."""
    pieces = list(_write(fields, weight))
    pieces[0] = "{", 1.0 if "json" in text.lower() else 0.0
    answer = "".join(piece for piece, _ in pieces)
    return Question(text, answer, pieces=tuple(pieces))


def _write(value: object, weight: float) -> Iterator[Piece]:
    """JSON in pieces. `weight`: loss weight of the property names, which a schema forces."""
    if isinstance(value, dict):
        yield "{", 1.0
        for index, (name, each) in enumerate(value.items()):
            if index:
                yield ", ", 1.0
            yield '"', 1.0
            yield name, weight
            yield '": ', 1.0
            yield from _write(each, weight)
        yield "}", 1.0
    elif isinstance(value, list):
        yield "[", 1.0
        for index, each in enumerate(value):
            if index:
                yield ", ", 1.0
            yield from _write(each, weight)
        yield "]", 1.0
    else:
        yield json.dumps(value), 1.0


#: Functions of the image world: (name, names of its parameters).
COUNT_TOOLS = (("count", "kind"), ("count", "kind"), ("count", "shape"), ("count_shapes", "kind"), ("count_kind", "kind"), ("get_count", "kind"))  # fmt: skip
MARK_TOOLS = (
    ("highlight", "color", "kind"), ("highlight", "color", "kind"), ("highlight", "kind", "color"), ("highlight_shape", "color", "shape"),
    ("mark", "color", "kind"), ("select", "color", "kind"), ("highlight", "color", "shape"),
)  # fmt: skip
OTHER_TOOLS = (
    ("get_weather", "city"), ("get_weather", "location", "unit"), ("search", "query"), ("web_search", "query"), ("send_email", "to", "subject", "body"),
    ("calculate", "expression"), ("get_time", "timezone"), ("translate", "text", "language"), ("book_flight", "origin", "destination"),
    ("play_music", "song"), ("set_timer", "minutes"), ("create_event", "title", "date"), ("get_stock_price", "symbol"), ("run_code", "code"),
    ("read_file", "path"), ("add", "a", "b"), ("lookup", "id"), ("order_pizza", "size", "toppings"), ("zoom", "x", "y", "factor"),
    ("save", "name"), ("rotate", "angle"), ("get_user", "id"), ("list_files",), ("delete", "id"), ("ask_human", "question"), ("roll_dice", "sides"),
)  # fmt: skip
ASK_TO_MARK = (
    "Highlight {the}.", "Please highlight {the}.", "Can you highlight {the}?", "Mark {the}.", "Show me {the}.", "Highlight {the} in the image.",
    "Select {the}.", "Point out {the}.", "Could you mark {the} for me?", "I want {the} highlighted.", "Emphasize {the}.", "Put a mark on {the}.",
)  # fmt: skip

Tool = tuple[str, ...]


def sample_tools(rng: Random) -> tuple[Tool, ...]:
    """Functions that a request may offer."""
    tools: list[Tool] = []
    if rng.random() < 0.65:
        tools.append(rng.choice(COUNT_TOOLS))
    if rng.random() < 0.6:
        tools.append(rng.choice(MARK_TOOLS))
    while not tools or rng.random() < 0.3:
        tool = rng.choice(OTHER_TOOLS)
        if rng.random() < 0.3:
            tool = (_any_name(rng), *[_any_name(rng) for _ in range(rng.randint(0, 3))])
        tools.append(tool)
    rng.shuffle(tools)
    return tuple(tools)


def list_tools(tools: tuple[Tool, ...]) -> str:
    """The functions as the chat template lists them."""
    return "TOOLS: " + "".join(f"{name}({', '.join(parameters)}) " for name, *parameters in tools)


def ask_with_tools(scene: Scene | None, tools: tuple[Tool, ...], rng: Random) -> list[Question]:
    """A question that needs one of the tools or none, sometimes followed by the tool's result as a second turn."""
    count = next((tool for tool in tools if tool in COUNT_TOOLS), None)
    mark = next((tool for tool in tools if tool in MARK_TOOLS), None)
    way = rng.random()
    if way < 0.45 and count and scene:
        selector = Asker(rng, scene).pick_selector("kind")
        text = rng.choice(phrasings.COUNT).format(nouns=selector.nouns, where="", image="image")
        called = _call(text, count[0], {count[1]: selector.kind or ""}, rng)
        number = answers.count(scene, selector)
        found = [json.dumps({name: int(number)}) for name in ("count", "result")]
        given = _give(rng.choice((number, *found)), number)
        return [called, given] if rng.random() < 0.4 else [called]
    if way < 0.85 and mark and scene:
        selector = Asker(rng, scene).pick_selector("both", "both", "kind", "color")
        text = rng.choice(ASK_TO_MARK).format(the=f"the {selector.noun}")
        picked = selector.pick(scene)
        if not picked:
            return [Question(vary(text, rng), answers.missing(selector))]
        words = {"color": picked[0].color, "kind": picked[0].kind, "shape": picked[0].kind}
        called = _call(text, mark[0], {name: words[name] for name in mark[1:]}, rng)
        given = _give(rng.choice(("done", "ok", "true")), "done")
        return [called, given] if rng.random() < 0.3 else [called]
    if scene is None or rng.random() < 0.3:
        return [Question(sample_small_talk(rng), answers.OUTSIDE)]
    topic = rng.choice(("describe", "color", "color", "place", "kind", "content", "exists", "size", "background", "count"))  # fmt: skip
    question = Asker(rng, scene).ask(topic)
    if topic == "count" and count and question.answer.isdigit():
        question = Asker(rng, scene).ask("color")
    return [question]


def _call(text: str, name: str, arguments: dict[str, str], rng: Random) -> Question:
    called = json.dumps({"name": name, "arguments": arguments})
    return Question(vary(text, rng), f"<tool_call>\n{called}\n</tool_call>")


def _give(result: str, answer: str) -> Question:
    return Question(result, answer, role="TOOL")
