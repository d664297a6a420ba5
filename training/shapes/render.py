"""Draws scenes in the styles of many different drawing programs.

A `Style` holds the parameters of one drawing program: resolution, anti-aliasing, shades, proportions, noise,
JPEG. `sample_style` returns a random style, so that a model trained on these images also recognizes images
that other programs draw from the same words.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from random import Random

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageOps

from training.shapes.world import PLACES, Scene, Shape

Rgb = tuple[int, int, int]
Point = tuple[float, float]
NO_SHIFTS: Mapping[str, Point] = {}

SHADES: dict[str, tuple[Rgb, ...]] = {
    "red": ((255, 0, 0), (255, 0, 0), (220, 20, 60), (220, 38, 38), (239, 68, 68), (244, 67, 54), (200, 30, 30), (178, 34, 34)),
    "green": ((0, 128, 0), (0, 255, 0), (0, 128, 0), (34, 139, 34), (50, 205, 50), (76, 175, 80), (34, 197, 94), (0, 100, 0)),
    "blue": ((0, 0, 255), (0, 0, 255), (30, 60, 220), (65, 105, 225), (30, 144, 255), (59, 130, 246), (33, 150, 243), (0, 0, 170)),
    "yellow": ((255, 255, 0), (255, 255, 0), (255, 215, 0), (250, 204, 21), (255, 235, 59), (240, 220, 40), (255, 223, 0)),
    "purple": ((128, 0, 128), (128, 0, 128), (160, 32, 240), (138, 43, 226), (156, 39, 176), (147, 51, 234), (102, 51, 153), (153, 50, 204)),
    "orange": ((255, 165, 0), (255, 165, 0), (255, 140, 0), (255, 127, 0), (249, 115, 22), (255, 152, 0), (245, 130, 32), (230, 120, 20)),
    "white": ((255, 255, 255), (255, 255, 255), (255, 255, 255), (250, 250, 250), (245, 245, 245), (248, 248, 240)),
    "black": ((0, 0, 0), (0, 0, 0), (0, 0, 0), (10, 10, 10), (26, 26, 26), (34, 34, 34)),
    "gray": ((128, 128, 128), (128, 128, 128), (192, 192, 192), (160, 160, 160), (105, 105, 105), (211, 211, 211)),
}  # fmt: skip
DIAMETERS = {"small": (0.13, 0.175), "large": (0.22, 0.31)}  # shares of the image's shorter side
SMALLEST = 10  # pixels of diameter; below it, a star cannot be distinguished from a circle
_FRAME_COLORS = ((0, 0, 0), (0, 0, 0), (128, 128, 128), (255, 255, 255), (139, 69, 19))
FARTHEST = 0.28  # largest distance from the border to the center of a shape at an outer place; the next place begins at 1/3


@dataclass(frozen=True, slots=True)
class Style:
    """The parameters of one drawing program. Lengths are shares of the image, angles are in degrees."""

    width: int = 256  # pixels
    height: int = 256  # pixels
    supersampling: int = 1  # 1 draws hard edges
    shade: int | None = None  # index into the shades of a color; None picks one for each shape
    shade_jitter: int = 0  # largest change of a color channel
    margin: float = 1 / 6  # from the border to the centers of the outer places
    place_jitter: float = 0.0  # jitter of each shape; the whole layout moves by up to half as much
    max_rotation: float = 0.0
    equal_sizes: bool = True  # whether shapes of one size word have the same diameter
    outline_width: float = 0.0
    outline_color: str = "black"
    noise: float = 0.0  # standard deviation in levels of 255
    blur: float = 0.0  # pixels
    jpeg_quality: int | None = None
    background_gradient: float = 0.0  # share of white or black that is mixed in at the far end
    shape_gradient: float = 0.0  # the same within shapes; all shapes have one light source
    shadow: float = 0.0  # how dark a shape's shadow is
    frame: float = 0.0  # width of the frame, as a share of the shorter side
    frame_color: Rgb = (0, 0, 0)
    mat: float = 0.0  # gap between drawing and frame, as a share of the shorter side


PLAIN = Style()


def sample_style(rng: Random) -> Style:
    width = height = rng.choice(
        (96, 128, 200, 224, 256, 336, 512, *[round(2 ** rng.uniform(6, 8)) for _ in range(9)])
    )
    if rng.random() < 0.4:
        ratio = rng.choice((rng.uniform(0.72, 1.35), 2 ** rng.uniform(-1.1, 1.1)))
        height = max(64, round(width * ratio))
    margin = rng.choice((1 / 6, 1 / 6, 0.2, 0.22, 0.25, rng.uniform(0.16, 0.26)))
    return Style(
        width=width,
        height=height,
        supersampling=min(rng.choice((1, 1, 2, 3, 4)), max(1, 500 // max(width, height))),
        shade=rng.choice((0, 0, 1, 2, 3, 4, 5, 6, 7, None, None, None, None)),
        shade_jitter=rng.choice((0, 0, 6, 12)),
        margin=margin,
        place_jitter=min(rng.choice((0.0, 0.0, 0.02, 0.04)), (FARTHEST - margin) / 1.5),
        max_rotation=rng.choice((0, 0, 0, 8, 15)),
        equal_sizes=rng.random() < 0.6,
        outline_width=rng.uniform(0.004, 0.014) if rng.random() < 0.12 else 0.0,
        outline_color=rng.choice(("black", "black", "white", "gray")),
        noise=rng.choice((0, 0, 0, 0, 0, 0, 3, 8)),
        blur=rng.uniform(0.3, 0.9) if rng.random() < 0.08 else 0.0,
        jpeg_quality=rng.choice((None, None, None, 50, 75, 85, 92)),
        background_gradient=rng.uniform(0.06, 0.3) if rng.random() < 0.2 else 0.0,
        shape_gradient=rng.uniform(0.06, 0.35) if rng.random() < 0.2 else 0.0,
        shadow=rng.uniform(0.15, 0.5) if rng.random() < 0.06 else 0.0,
        frame=rng.uniform(0.008, 0.05) if rng.random() < 0.25 else 0.0,
        frame_color=rng.choice([*_FRAME_COLORS, SHADES[rng.choice(list(SHADES))][0]]),
        mat=rng.choice((0.0, 0.0, rng.uniform(0.0, 0.03))),
    )


def render(
    scene: Scene,
    rng: Random,
    style: Style = PLAIN,
    shifts: Mapping[str, Point] = NO_SHIFTS,
    seed: float | None = None,
) -> Image.Image:
    """An RGB image of the scene, `style.width` by `style.height` pixels.

    `shifts` are offsets of shapes from their places, right and down, in units of places. With a `seed`, a shape
    of a kind and color looks the same in every frame of a clip.
    """
    scale = style.supersampling
    shorter = min(style.width, style.height) * scale
    line = max(1, round(style.frame * shorter)) if style.frame else 0
    mat = round(style.mat * shorter) if line else 0
    size = (style.width * scale - 2 * (line + mat), style.height * scale - 2 * (line + mat))
    background = _shade(scene.background, style, rng)
    image = Image.new("RGB", size, background)
    pen = ImageDraw.Draw(image)
    drift = [rng.uniform(-0.5, 0.5) * style.place_jitter for _ in "xy"]
    diameters = {word: rng.uniform(*between) for word, between in DIAMETERS.items()}
    for shape in scene.shapes:
        diameter = (
            diameters[shape.size] if style.equal_sizes else rng.uniform(*DIAMETERS[shape.size])
        )
        diameter = max(min(diameter, _room(style)) * min(size), SMALLEST * scale)
        radius = 0.5 * diameter
        shift = shifts.get(shape.place, (0.0, 0.0))
        center = _center(shape.place, shift, size, radius, style, drift, rng)
        own = rng if seed is None else Random(f"{seed}/{shape.kind}/{shape.color}")
        fill = _shade(shape.color, style, own)
        if style.shadow:
            state = own.getstate()
            below = center[0] + 0.1 * radius, center[1] + 0.16 * radius
            red, green, blue = (round(level * (1 - style.shadow)) for level in background)
            _draw(pen, shape, below, radius, (red, green, blue), style, own)
            own.setstate(state)
        _draw(pen, shape, center, radius, fill, style, own)
    if style.background_gradient or style.shape_gradient:
        image = _light(image, background, style, rng)
    if line:
        image = ImageOps.expand(ImageOps.expand(image, mat, background), line, style.frame_color)
    if scale > 1:
        image = image.resize(
            (style.width, style.height),
            rng.choice((Image.Resampling.BOX, Image.Resampling.LANCZOS)),
        )
    return _degrade(image, style, rng)


def _room(style: Style) -> float:
    """The largest diameter at which neighbours do not touch and their sizes can be distinguished."""
    spacing = 0.5 - style.margin - 2 * style.place_jitter
    return max(DIAMETERS["large"][0], 0.95 * spacing)


def _shade(color: str, style: Style, rng: Random) -> Rgb:
    shades = SHADES[color]
    base = rng.choice(shades) if style.shade is None else shades[style.shade % len(shades)]
    red, green, blue = (
        min(255, max(0, level + rng.randint(-style.shade_jitter, style.shade_jitter)))
        for level in base
    )
    return red, green, blue


def _center(
    place: str,
    shift: Point,
    size: tuple[int, int],
    radius: float,
    style: Style,
    drift: list[float],
    rng: Random,
) -> Point:
    """The center of a shape in pixels, such that the shape is inside the image."""
    row, column = divmod(PLACES.index(place), 3)
    center = []
    steps = column + shift[0], row + shift[1]
    for step, side, offset in zip(steps, size, drift, strict=True):
        share = style.margin + step * (0.5 - style.margin) + offset
        share += rng.uniform(-style.place_jitter, style.place_jitter)
        center.append(min(side - radius - 1, max(radius + 1, share * side)))
    return center[0], center[1]


def _draw(
    pen: ImageDraw.ImageDraw,
    shape: Shape,
    center: Point,
    radius: float,
    fill: Rgb,
    style: Style,
    rng: Random,
) -> None:
    x, y = center
    box = (x - radius, y - radius, x + radius, y + radius)
    width = round(style.outline_width * style.width * style.supersampling)
    line = max(1, width) if style.outline_width else 0
    outline = SHADES[style.outline_color][0] if style.outline_color != shape.color else None
    if shape.kind == "ring":
        thickness = radius * rng.choice((0.25, 0.33, 0.4, 0.5, rng.uniform(0.18, 0.55)))
        pen.ellipse(box, outline=fill, width=max(2, round(thickness)))
    elif shape.kind == "circle":
        pen.ellipse(box, fill=fill, outline=outline if line else None, width=line or 1)
    else:
        polygon = outline_of(shape.kind, rng, style.max_rotation)
        corners = [(x + radius * px, y + radius * py) for px, py in polygon]
        pen.polygon(corners, fill=fill, outline=outline if line else None, width=line or 1)


def outline_of(kind: str, rng: Random, max_rotation: float = 0.0) -> list[Point]:
    """A polygon of a kind around the origin, with coordinates from -1 to 1 and random proportions."""
    match kind:
        case "square":
            half = rng.choice((1.0, 1.0, 0.886))  # 0.886: the same area as the circle
            polygon = [(-half, -half), (half, -half), (half, half), (-half, half)]
        case "triangle":
            polygon = rng.choice(
                (_TRIANGLE_IN_BOX, _TRIANGLE_IN_BOX, _REGULAR_TRIANGLE, _LOW_TRIANGLE)
            )
        case "star":
            inner = rng.choice((0.382, 0.4, 0.45, 0.5, rng.uniform(0.35, 0.52)))
            polygon = _star(rng.choice((5, 5, 5, 5, 5, 5, 6)), inner)
        case _:  # a cross
            polygon = _plus(rng.choice((0.25, 0.3, 0.33, 0.35, 0.4, rng.uniform(0.18, 0.4))))
            if rng.random() < 0.25:  # an X, with longer arms because its corners point outwards
                polygon = _turned(polygon, 45, rng.choice((1.0, 1.2)))
    angle = rng.uniform(-max_rotation, max_rotation)
    if max_rotation and rng.random() < 0.08 and kind != "cross":
        angle = rng.uniform(-180, 180)
    return _turned(polygon, angle)


_TRIANGLE_IN_BOX: list[Point] = [(0, -1), (1, 1), (-1, 1)]
_REGULAR_TRIANGLE: list[Point] = [(0, -1), (0.95, 0.645), (-0.95, 0.645)]
_LOW_TRIANGLE: list[Point] = [(0, -0.85), (0.95, 0.8), (-0.95, 0.8)]


def _star(num_points: int, inner: float) -> list[Point]:
    points: list[Point] = []
    for index in range(2 * num_points):
        angle, radius = math.pi * index / num_points, inner if index % 2 else 1.0
        points.append((radius * math.sin(angle), -radius * math.cos(angle)))
    return points


def _plus(arm: float) -> list[Point]:
    """A plus sign; `arm` is half the width of its bars."""
    corner = [(arm, -1.0), (arm, -arm), (1.0, -arm)]
    points: list[Point] = []
    for _ in range(4):
        points += corner
        corner = [(-y, x) for x, y in corner]
    return points


def _turned(polygon: list[Point], angle: float, stretch: float = 1.0) -> list[Point]:
    cos, sin = stretch * math.cos(math.radians(angle)), stretch * math.sin(math.radians(angle))
    return [(x * cos - y * sin, x * sin + y * cos) for x, y in polygon]


def _light(image: Image.Image, background: Rgb, style: Style, rng: Random) -> Image.Image:
    """Add gradients towards white or black, along a line or from a point."""
    levels = np.asarray(image, dtype=np.float32)
    height, width = levels.shape[:2]
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    y, x = y / height - 0.5, x / width - 0.5
    is_shape = (levels != background).any(-1, keepdims=True)
    for share, where in (
        (style.background_gradient, ~is_shape),
        (style.shape_gradient, is_shape),
    ):
        angle = rng.uniform(0, 2 * math.pi)
        distance = x * math.cos(angle) + y * math.sin(angle) + 0.5
        if rng.random() < 0.3:
            distance = np.hypot(x, y) * 1.4
        end = rng.choice((0.0, 255.0))
        mixed = share * distance.clip(0, 1)[..., None] * where
        levels = levels * (1 - mixed) + end * mixed
    return Image.fromarray(levels.clip(0, 255).astype(np.uint8))


def _degrade(image: Image.Image, style: Style, rng: Random) -> Image.Image:
    """Apply the style's blur, noise and JPEG compression."""
    if style.blur:
        image = image.filter(ImageFilter.GaussianBlur(style.blur))
    if style.noise:
        generator = np.random.default_rng(rng.getrandbits(32))
        levels = np.asarray(image, dtype=np.float32)
        levels = levels + generator.normal(0.0, style.noise, levels.shape).astype(np.float32)
        image = Image.fromarray(levels.clip(0, 255).astype(np.uint8))
    if style.jpeg_quality:
        file = BytesIO()
        image.save(file, "JPEG", quality=style.jpeg_quality)
        image = Image.open(file).convert("RGB")
    return image
