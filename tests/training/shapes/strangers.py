"""Three drawing programs for scenes of the image world, which share no code with `render`."""

import math
from random import Random

from PIL import Image, ImageColor, ImageDraw, ImageEnhance

from training.shapes.world import PLACES, Scene


def draw_plainly(scene: Scene, rng: Random) -> Image.Image:
    """256 by 256 pixels, CSS colors, hard edges, shapes centered in their cells."""
    image = Image.new("RGB", (256, 256), scene.background)
    pen = ImageDraw.Draw(image)
    for shape in scene.shapes:
        row, column = divmod(PLACES.index(shape.place), 3)
        center = (43 + 85 * column, 43 + 85 * row)
        radius = 20 if shape.size == "small" else 35
        draw_shape(pen, shape.kind, center, radius, shape.color, scene.background)
    return image


def draw_smoothly(scene: Scene, rng: Random) -> Image.Image:
    """Any size from 150 to 450 pixels, four times supersampled, shapes 15 to 28 % of the width."""
    width = rng.randint(150, 450)
    side = 4 * width
    image = Image.new("RGB", (side, side), scene.background)
    pen = ImageDraw.Draw(image)
    for shape in scene.shapes:
        row, column = divmod(PLACES.index(shape.place), 3)
        center = (round(side * (0.2 + 0.3 * column)), round(side * (0.2 + 0.3 * row)))
        share = rng.uniform(0.15, 0.18) if shape.size == "small" else rng.uniform(0.23, 0.28)
        draw_shape(pen, shape.kind, center, round(share * side / 2), shape.color, scene.background)
    return image.resize((width, width), Image.Resampling.LANCZOS)


def draw_framed(scene: Scene, rng: Random) -> Image.Image:
    """Landscape or portrait, with a frame and gradients, three times supersampled."""
    width, height = rng.choice(((360, 200), (300, 220), (250, 250), (210, 320), (480, 300)))
    inner = 3 * width, 3 * height
    shorter = min(inner)
    end = rng.choice((0.75, 0.85, 1.0, 1.2))
    image = _graded(inner, scene.background, end, rng)
    for shape in scene.shapes:
        row, column = divmod(PLACES.index(shape.place), 3)
        center = round(inner[0] * (2 * column + 1) / 6), round(inner[1] * (2 * row + 1) / 6)
        share = 0.16 if shape.size == "small" else 0.27
        mask = Image.new("L", inner)
        draw_shape(
            ImageDraw.Draw(mask), shape.kind, center, round(share * shorter / 2), "white", "black"
        )
        image.paste(_graded(inner, shape.color, end, rng), mask=mask)
    line = round(shorter * rng.uniform(0.015, 0.04))
    framed = Image.new("RGB", (inner[0] + 2 * line, inner[1] + 2 * line), rng.choice(_FRAMES))
    framed.paste(image, (line, line))
    return framed.resize((width, height), Image.Resampling.BICUBIC)


_FRAMES = ("black", "saddlebrown", "dimgray", "gold", "navy")


def _graded(size: tuple[int, int], color: str, end: float, rng: Random) -> Image.Image:
    """Returns a color gradient whose brightness is multiplied by `end` at the lower or upper edge."""
    plain = Image.new("RGB", size, color)
    grade = Image.linear_gradient("L").resize(size)
    if rng.random() < 0.5:
        grade = grade.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    return Image.composite(ImageEnhance.Brightness(plain).enhance(end), plain, grade)


def draw_as_a_stranger(scene: Scene, rng: Random) -> Image.Image:
    """Draws with one of the three programs."""
    return rng.choice((draw_plainly, draw_smoothly, draw_framed))(scene, rng)


def draw_shape(
    pen: ImageDraw.ImageDraw, kind: str, center: tuple[int, int], r: int, fill: str, background: str
) -> None:
    x, y = center
    color = ImageColor.getrgb(fill) if pen.mode == "RGB" else 255
    match kind:
        case "circle":
            pen.ellipse((x - r, y - r, x + r, y + r), fill=color)
        case "ring":
            pen.ellipse((x - r, y - r, x + r, y + r), fill=color)
            inner = round(0.6 * r)
            pen.ellipse((x - inner, y - inner, x + inner, y + inner), fill=background)
        case "square":
            pen.rectangle((x - r, y - r, x + r, y + r), fill=color)
        case "triangle":
            pen.polygon([(x, y - r), (x + r, y + r), (x - r, y + r)], fill=color)
        case "cross":
            arm = r // 3
            pen.rectangle((x - arm, y - r, x + arm, y + r), fill=color)
            pen.rectangle((x - r, y - arm, x + r, y + arm), fill=color)
        case "star":
            corners = []
            for index in range(10):
                length = r if index % 2 == 0 else 0.4 * r
                angle = math.pi * index / 5 - math.pi / 2
                corners.append((x + length * math.cos(angle), y + length * math.sin(angle)))
            pen.polygon(corners, fill=color)
