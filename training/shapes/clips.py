"""Clips of several frames in which shapes move, appear, vanish or change, and questions about them."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from random import Random

from PIL import Image

from training.shapes.answers import a, at, cell, join, list_shapes, yes_no
from training.shapes.questions import Question, vary
from training.shapes.render import Point, Style, render
from training.shapes.world import (
    BACKGROUNDS,
    COLORS,
    KINDS,
    MAX_SHAPES,
    PLACES,
    SIZES,
    Scene,
    Selector,
    Shape,
    in_reading_order,
    sample_scene,
)

NOTHING_CHANGES = "Nothing changes."

#: The shape before, the shape after, and the first frame with the latter; -1 if the shape moves gradually.
Path = tuple[Shape | None, Shape | None, int]


@dataclass(frozen=True, slots=True)
class Event:
    """A change of one shape: `before` is None if it appears, `after` if it vanishes."""

    before: Shape | None
    after: Shape | None

    @property
    def moves(self) -> bool:
        return bool(self.before and self.after and self.before.place != self.after.place)

    def tell(self) -> str:
        """The event as a sentence."""
        before, after = self.before, self.after
        if before is None:
            assert after is not None
            return f"{a(after).capitalize()} appears {at(after.place)}."
        name = f"The {before.color} {before.kind}"
        if after is None:
            return f"{name} {at(before.place)} vanishes."
        if self.moves:
            return f"{name} moves from the {before.place} to the {after.place}."
        if before.color != after.color:
            return (
                f"The {before.kind} {at(before.place)} turns from {before.color} to {after.color}."
            )
        if before.kind != after.kind:
            return f"{name} {at(before.place)} turns into {a(after)}."
        return f"{name} {at(before.place)} {'grows' if after.size == 'large' else 'shrinks'}."


@dataclass(frozen=True, slots=True)
class Clip:
    """Scenes in order, the offsets of shapes from their places (see `render`), and the events."""

    frames: tuple[Scene, ...]
    shifts: tuple[dict[str, Point], ...]
    events: tuple[Event, ...]

    def tell(self) -> str:
        """All events as sentences."""
        first, last = self.frames[0].background, self.frames[-1].background
        told = [event.tell() for event in self.events]
        if first != last:
            told.append(f"The background turns from {first} to {last}.")
        return " ".join(told) or NOTHING_CHANGES


def sample_clip(rng: Random, num_frames: int = 4) -> Clip:
    """A random clip with one event, or sometimes with two or none."""
    while True:
        clip = _play(sample_scene(rng, rng.choice((1, 1, 2, 2, 3, 4))), num_frames, rng)
        if clip is not None:
            return clip


def _play(scene: Scene, num_frames: int, rng: Random) -> Clip | None:
    """A clip from a scene; each event changes a different shape. None if shapes would overlap, or an event changes nothing."""
    still = rng.sample(scene.shapes, len(scene.shapes))
    paths: list[Path] = []
    background = scene.background
    for kind in rng.choices(
        ("move", "glide", "appear", "vanish", "change", "background", "none"),
        (30, 30, 9, 9, 12, 3, 7),
        k=2 if rng.random() < 0.18 else 1,
    ):
        when = rng.randrange(1, num_frames)
        if kind == "background":
            taken = {shape.color for shape in scene.shapes}
            background = rng.choice([word for word in BACKGROUNDS if word not in taken])
        elif kind == "appear":
            paths.append((None, sample_scene(rng, 1).shapes[0], when))
        elif kind != "none" and still:
            before = still.pop()
            after = None if kind == "vanish" else _changed(before, kind, rng)
            paths.append((before, after, -1 if kind == "glide" else when))
    if any(before == after for before, after, _ in paths):
        return None
    when = rng.randrange(1, num_frames)
    frames, shifts = [], []
    for index in range(num_frames):
        placed = _place(still, paths, index, num_frames)
        color = scene.background if index < when else background
        if placed is None or len(placed) > MAX_SHAPES + 1:
            return None
        if any(shape.color == color for shape, _ in placed.values()):
            return None
        frames.append(Scene(color, in_reading_order([shape for shape, _ in placed.values()])))
        shifts.append({place: shift for place, (_, shift) in placed.items() if any(shift)})
    events = [Event(before, after) for before, after, _ in paths]
    events.sort(key=lambda event: PLACES.index((event.before or event.after).place))  # pyright: ignore[reportOptionalMemberAccess]
    return Clip(tuple(frames), tuple(shifts), tuple(events))


def _changed(shape: Shape, kind: str, rng: Random) -> Shape:
    if kind != "change":
        return replace(shape, place=rng.choice(PLACES))
    what = rng.choice(("color", "color", "kind", "size"))
    return replace(
        shape, **{what: rng.choice({"color": COLORS, "kind": KINDS, "size": SIZES}[what])}
    )


def _place(
    still: list[Shape], paths: list[Path], index: int, num_frames: int
) -> dict[str, tuple[Shape, Point]] | None:
    """The shapes of a frame and their offsets, by place; None if two shapes are at one place."""
    placed: dict[str, tuple[Shape, Point]] = {shape.place: (shape, (0.0, 0.0)) for shape in still}
    for before, after, start in paths:
        shape, shift = (before if index < start else after), (0.0, 0.0)
        if start < 0 and before and after:
            shape, shift = _between(before, after, index / (num_frames - 1))
        if shape is None:
            continue
        if shape.place in placed:
            return None
        placed[shape.place] = shape, shift
    return placed


def _between(before: Shape, after: Shape, share: float) -> tuple[Shape, Point]:
    """A shape on a straight path, at the nearest place, and its offset from this place."""
    (row, column), (last_row, last_column) = cell(before.place), cell(after.place)
    y, x = row + share * (last_row - row), column + share * (last_column - column)
    place = PLACES[3 * round(y) + round(x)]
    return replace(before, place=place), (x - round(x), y - round(y))


def render_clip(clip: Clip, rng: Random, style: Style) -> list[Image.Image]:
    """The frames in one style, with the same shades."""
    style = replace(
        style, shade=style.shade or 0, shade_jitter=0, place_jitter=0.0, equal_sizes=True
    )
    seed = rng.random()
    return [
        render(frame, Random(seed), style, shifts, seed)
        for frame, shifts in zip(clip.frames, clip.shifts, strict=True)
    ]


WHAT_HAPPENS = (
    "What happens in these frames?", "What happens?", "What changes?", "What changes in the frames?", "Describe the clip.",
    "Describe what happens.", "What is going on in this clip?", "What do you see happening?", "What changed?", "Describe the changes.",
    "What is different from frame to frame?", "These are frames of a video. What happens?", "What happens in the video?",
    "Describe the motion.", "Summarize the clip.", "These are four frames of a clip. Describe what happens.", "Tell me what changes.",
    "What happens from the first frame to the last?", "How does the picture change?", "What changes from image to image?",
)  # fmt: skip
WHAT_HAPPENS_TO_TWO = (
    "What changed?", "What changes from the first image to the second?", "What is different in the second image?",
    "What changed between the images?", "What is the difference between the images?", "What is the difference?",
    "How does the second image differ from the first?", "Spot the difference.", "Which difference do you see?",
)  # fmt: skip
WHAT_MOVES = (
    "What moves?", "Which shape moves?", "What is moving?", "Which object is moving?", "Which shape changes its place?",
    "What moves in this clip?", "Which of the shapes is moving?", "What moved?", "Which one moves?", "Name the moving shape.",
)  # fmt: skip
DIRECTION = (
    "In which direction does the {noun} move?", "Which way does the {noun} move?", "Which way does the {noun} go?",
    "Where is the {noun} moving?", "What is the direction of the {noun}?", "In what direction is the {noun} moving?",
    "Which direction does the {noun} go in?", "Direction of the {noun}?", "In which direction did the {noun} move?",
)  # fmt: skip
DIRECTION_OF_IT = (
    "In which direction does it move?", "In which direction does the shape move?", "Which way does it go?", "Which direction?",
    "What is the direction of the motion?", "In which direction is the motion?", "Which way is it moving?", "Direction of motion?",
)  # fmt: skip
FROM_TO = (
    "From where to where does the {noun} move?", "From where to where does the {noun} go?", "Where does the {noun} start and end?",
    "What is the path of the {noun}?", "Between which places does the {noun} move?", "Where does the {noun} move from and to?",
)  # fmt: skip
END = (
    "Where does the {noun} end?", "Where does the {noun} end up?", "Where is the {noun} at the end?", "Where is the {noun} in the last frame?",
    "Where does the {noun} move to?", "Where does the {noun} arrive?", "Where does the {noun} stop?",
)  # fmt: skip
START = (
    "Where does the {noun} start?", "Where is the {noun} at the beginning?", "Where is the {noun} in the first frame?",
    "Where does the {noun} come from?", "Where was the {noun} at first?", "Where did the {noun} start?",
)  # fmt: skip
APPEARS = (
    "What appears?",
    "Which shape appears?",
    "What is new?",
    "What comes in?",
    "What shows up?",
    "Which shape is added?",
)
VANISHES = ("What vanishes?", "What disappears?", "Which shape disappears?", "Which shape vanishes?", "What goes away?", "What is gone at the end?")  # fmt: skip
CHANGES_COLOR = ("What changes its color?", "Which shape changes color?", "What changes color?", "Which shape gets another color?")  # fmt: skip
DOES_MOVE = ("Does the {noun} move?", "Is the {noun} moving?", "Does the {noun} change its place?")
ANYTHING = {
    "move": ("Does anything move?", "Is anything moving?", "Is there any motion?", "Is something moving?"),
    "appear": ("Does anything appear?", "Does something new appear?", "Does a shape appear?"),
    "vanish": ("Does anything vanish?", "Does anything disappear?", "Does a shape disappear?"),
    "change": ("Does anything change?", "Is there any change?", "Do the frames differ?", "Does anything happen?"),
}  # fmt: skip


def direction(event: Event) -> str:
    """The direction of a movement: "left", "up and right" and so on."""
    assert event.before is not None
    assert event.after is not None
    (row, column), (last_row, last_column) = cell(event.before.place), cell(event.after.place)
    words = []
    if row != last_row:
        words.append("up" if last_row < row else "down")
    if column != last_column:
        words.append("left" if last_column < column else "right")
    return " and ".join(words)


def ask_about_clip(clip: Clip, rng: Random) -> Question:
    """A random question about the events."""
    moving = [event for event in clip.events if event.moves]
    last, is_pair = clip.frames[-1], len(clip.frames) == 2
    noun, event = _pick_actor(clip, rng)
    shown = [event for event in clip.events if not event.moves]
    match rng.choices(
        ("all", "moves", "direction", "it", "from to", "end", "start", "appears", "vanishes", "color", "does", "any"),
        (30, 9, 14, 5, 7, 5, 5, 4, 4, 4, 5, 8),
    )[0]:  # fmt: skip
        case "moves":
            return _put(WHAT_MOVES, _the([e.before for e in moving]), rng)
        case "direction" if noun:
            answer = direction(event) if event and event.moves else "It does not move."
            return _put(DIRECTION, answer, rng, noun)
        case "it" if len(moving) == 1:
            return _put(DIRECTION_OF_IT, direction(moving[0]), rng)
        case "from to" if noun and event and event.moves and event.before and event.after:
            answer = f"from the {event.before.place} to the {event.after.place}"
            return _put(FROM_TO, answer, rng, noun)
        case "end" if noun and event and event.after:
            return _put(END, event.after.place, rng, noun)
        case "start" if noun and event and event.before:
            return _put(START, event.before.place, rng, noun)
        case "appears":
            answer = list_shapes([e.after for e in shown if e.after and not e.before])
            return _put(APPEARS, answer, rng)
        case "vanishes":
            return _put(VANISHES, _the([e.before for e in shown if not e.after]), rng)
        case "color":
            pairs = [(e.before, e.after) for e in shown if e.before and e.after]
            changed = [before for before, after in pairs if before.color != after.color]
            return _put(CHANGES_COLOR, _the(changed), rng)
        case "does" if noun:
            return _put(DOES_MOVE, yes_no(bool(event and event.moves)), rng, noun)
        case "any":
            what = rng.choice(tuple(ANYTHING))
            truth = {
                "move": bool(moving),
                "appear": any(e.before is None for e in clip.events),
                "vanish": any(e.after is None for e in clip.events),
                "change": bool(clip.events) or last.background != clip.frames[0].background,
            }[what]
            return _put(ANYTHING[what], yes_no(truth), rng)
        case _:
            return _put(WHAT_HAPPENS_TO_TWO if is_pair else WHAT_HAPPENS, clip.tell(), rng)


def _the(shapes: Sequence[Shape | None]) -> str:
    return join([f"the {shape.color} {shape.kind}" for shape in shapes if shape]) or "nothing"


def _pick_actor(clip: Clip, rng: Random) -> tuple[str, Event | None]:
    """Words for one shape that is unique in the first and last frames, mostly a shape of an event."""
    first, last = clip.frames[0], clip.frames[-1]
    events = [event for event in clip.events if event.before]
    event = rng.choice(events) if events and rng.random() < 0.85 else None
    shape = event.before if event else rng.choice(first.shapes) if first.shapes else None
    if shape is None:
        return "", None
    event = next((each for each in clip.events if each.before == shape), Event(shape, shape))
    ways = [Selector(shape.kind), Selector(shape.kind, shape.color)]
    rng.shuffle(ways)
    for way in ways:
        if len(way.pick(first)) == 1 and len(way.pick(last)) <= 1:
            return way.noun, event
    return "", None


def _put(templates: tuple[str, ...], answer: str, rng: Random, noun: str = "") -> Question:
    return Question(vary(rng.choice(templates).format(noun=noun), rng), answer)


def find_event(first: Scene, second: Scene) -> Clip | None:
    """Two scenes as a clip of two frames, if they differ in at most one shape or the background."""
    gone = [shape for shape in first.shapes if shape not in second.shapes]
    new = [shape for shape in second.shapes if shape not in first.shapes]
    if max(len(gone), len(new)) > 1 or (first.background != second.background and (gone or new)):
        return None
    before, after = next(iter(gone), None), next(iter(new), None)
    if before and after:
        words = zip(astuple(before), astuple(after), strict=True)
        if sum(old == new for old, new in words) < 3:
            return None
    events = (Event(before, after),) if gone or new else ()
    return Clip((first, second), ({}, {}), events)
