"""Two drawing programs that know the words of the picture world and nothing of `render`."""

import math
from random import Random

from PIL import Image, ImageColor, ImageDraw

from engines.packages.shapes.training.world import PLACES, Scene, Shape


def draw_plainly(scene: Scene, rng: Random) -> Image.Image:
    """256 by 256 pixels, CSS colors, hard edges, shapes in the middle of their ninths."""
    picture = Image.new("RGB", (256, 256), scene.background)
    pen = ImageDraw.Draw(picture)
    for shape in scene.shapes:
        row, column = divmod(PLACES.index(shape.place), 3)
        center = (43 + 85 * column, 43 + 85 * row)
        radius = 20 if shape.size == "small" else 35
        _draw(pen, shape, center, radius, scene.background)
    return picture


def draw_smoothly(scene: Scene, rng: Random) -> Image.Image:
    """Any size from 150 to 450 pixels, four times supersampled, shapes 15 to 28 % of the width."""
    width = rng.randint(150, 450)
    side = 4 * width
    picture = Image.new("RGB", (side, side), scene.background)
    pen = ImageDraw.Draw(picture)
    for shape in scene.shapes:
        row, column = divmod(PLACES.index(shape.place), 3)
        center = (round(side * (0.2 + 0.3 * column)), round(side * (0.2 + 0.3 * row)))
        share = rng.uniform(0.15, 0.18) if shape.size == "small" else rng.uniform(0.23, 0.28)
        _draw(pen, shape, center, round(share * side / 2), scene.background)
    return picture.resize((width, width), Image.Resampling.LANCZOS)


def _draw(
    pen: ImageDraw.ImageDraw, shape: Shape, center: tuple[int, int], r: int, background: str
) -> None:
    x, y = center
    color = ImageColor.getrgb(shape.color)
    match shape.kind:
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
