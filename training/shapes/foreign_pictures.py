"""Draws pictures outside the image world: textures, charts, screenshots, documents, landscapes and others."""

import math
from collections.abc import Callable
from random import Random

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

Rgb = tuple[int, int, int]
WHITE = (255, 255, 255)


def draw_foreign(rng: Random) -> Image.Image:
    """Draw a random foreign picture, never a plain one. Some are blurred, rotated, cropped, gray or recolored."""
    while True:
        image = _draw(rng)
        if np.asarray(image.convert("L")).std() > 6:
            return image


def _draw(rng: Random) -> Image.Image:
    image = rng.choice(PICTURES)(rng)
    if rng.random() < 0.15:
        other = rng.choice(PICTURES)(rng).resize(image.size)
        image = Image.blend(image, other, rng.uniform(0.2, 0.6))
    if rng.random() < 0.1:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.5, 3)))
    if rng.random() < 0.1:
        image = image.convert("L").convert("RGB")
    if rng.random() < 0.15:
        image = image.transpose(rng.choice((Image.Transpose.ROTATE_90, Image.Transpose.ROTATE_180)))
    if rng.random() < 0.25:
        width, height = image.size
        left, top = rng.uniform(0, 0.4) * width, rng.uniform(0, 0.4) * height
        image = image.crop((int(left), int(top), int(left + 0.6 * width), int(top + 0.6 * height)))
    if rng.random() < 0.15:
        generator = np.random.default_rng(rng.getrandbits(32))
        noise = generator.normal(0, rng.uniform(3, 20), (*image.size[::-1], 3))
        image = _to_image(np.asarray(image) + noise)
    return image


def _color(rng: Random) -> Rgb:
    return rng.randrange(256), rng.randrange(256), rng.randrange(256)


def _ground(rng: Random) -> Rgb:
    """A background color: mostly almost black, white or gray, as in the image world."""
    level, tint = rng.choice((0, 0, 128, 225)), rng.randrange(30)
    pale = level + rng.randrange(tint + 1), level + rng.randrange(tint + 1), level + tint
    return rng.choice((_color(rng), pale, pale))


def _canvas(
    rng: Random, *colors: Rgb, scale: int = 1
) -> tuple[Image.Image, ImageDraw.ImageDraw, int, int]:
    """A canvas in one of `colors`, or in a random color without `colors`."""
    width = scale * rng.randint(110, 220)
    height = round(width * rng.choice((1, 1, 0.75, 0.62, 1.4)))
    image = Image.new("RGB", (width, height), rng.choice(colors) if colors else _color(rng))
    return image, ImageDraw.Draw(image), width, height


def _noise(rng: Random, roughness: float | None = None) -> np.ndarray:
    """Smooth noise of several scales, like clouds or stone. Shapes: (96, 96), 0 to 1."""
    generator = np.random.default_rng(rng.getrandbits(32))
    total = np.zeros((96, 96))
    roughness = rng.uniform(0.35, 0.9) if roughness is None else roughness
    for octave in range(1, 7):
        side = 2**octave
        layer = Image.fromarray(generator.random((side, side)).astype(np.float32))
        total += roughness**octave * np.asarray(layer.resize((96, 96), Image.Resampling.BICUBIC))
    return (total - total.min()) / max(1e-6, float(np.ptp(total)))


def _blend(first: Rgb, second: Rgb, share: np.ndarray) -> Image.Image:
    share = share[..., None]
    return _to_image(np.array(first) * (1 - share) + np.array(second) * share)


def _to_image(levels: np.ndarray) -> Image.Image:
    return Image.fromarray(levels.clip(0, 255).astype(np.uint8))


def _sky(rng: Random, size: tuple[int, int]) -> Image.Image:
    """A vertical gradient between two colors."""
    share = np.linspace(0, 1, 96)[:, None].repeat(96, 1)
    return _blend(_color(rng), _color(rng), share).resize(size)


def _clouds(rng: Random) -> Image.Image:
    if rng.random() < 0.5:
        return _to_image(255 * np.stack([_noise(rng) for _ in range(3)], axis=-1))
    return _blend(_color(rng), _color(rng), _noise(rng))


def _grain(rng: Random) -> Image.Image:
    side = rng.choice((8, 16, 32, 96))
    generator = np.random.default_rng(rng.getrandbits(32))
    levels = generator.integers(0, 256, (side, side, rng.choice((1, 3))), dtype=np.uint8)
    image = Image.fromarray(np.broadcast_to(levels, (side, side, 3)))
    way = rng.choice((Image.Resampling.NEAREST, Image.Resampling.BICUBIC))
    return image.resize((96, 96), way)


def _gradient(rng: Random) -> Image.Image:
    """A gradient between two different colors. Gradients of the image world are shades of one color."""
    y, x = np.mgrid[0:96, 0:96] / 95 - 0.5
    angle = rng.uniform(0, 2 * math.pi)
    share = x * math.cos(angle) + y * math.sin(angle) + 0.5
    if rng.random() < 0.4:
        share = 1.4 * np.hypot(x - rng.uniform(-0.4, 0.4), y - rng.uniform(-0.4, 0.4))
    if rng.random() < 0.3:
        share = 0.5 + 0.5 * np.sin(share * rng.uniform(4, 40))
    first, second = _color(rng), _color(rng)
    while sum(abs(a - b) for a, b in zip(first, second, strict=True)) < 220:
        second = _color(rng)
    return _blend(first, second, share.clip(0, 1))


def _stripes(rng: Random) -> Image.Image:
    """Vertical, horizontal or diagonal stripes, or bricks of two colors."""
    image, pen, width, height = _canvas(rng)
    step, color, other = rng.randint(3, 30), _color(rng), _color(rng)
    lean, is_brick = rng.choice((0, 0, height)), step >= 5 and rng.random() < 0.25
    for start in range(-height, width + height, 2 * step):
        if not is_brick:
            end = start + lean
            corners = ((start, 0), (start + step, 0), (end + step, height), (end, height))
            pen.polygon(corners, fill=color)
            continue
        for row in range(0, height, step):
            left = start + row // step % 2 * step
            fill = rng.choice((color, color, other))
            pen.rectangle((left, row, left + step, row + step), fill=fill)
    return image if rng.random() < 0.7 else image.transpose(Image.Transpose.ROTATE_90)


def _dead_leaves(rng: Random) -> Image.Image:
    """Many overlapping patches of all sizes, as cluttered as photographs."""
    image, pen, width, height = _canvas(rng)
    base = _color(rng)
    for _ in range(rng.randint(25, 160)):
        size = min(90.0, 4 * rng.paretovariate(1.1))
        x, y = rng.uniform(0, width), rng.uniform(0, height)
        color = tuple(min(255, max(0, level + round(rng.gauss(0, 60)))) for level in base)
        box = (x - size, y - size * rng.uniform(0.3, 1), x + size, y + size * rng.uniform(0.3, 1))
        if rng.random() < 0.5:
            pen.ellipse(box, fill=color)
        else:
            steps = [rng.uniform(-size, size) for _ in range(2 * rng.randint(3, 6))]
            corners = [(x + dx, y + dy) for dx, dy in zip(steps[::2], steps[1::2], strict=True)]
            pen.polygon(corners, fill=color)
    image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0, 2)))
    shade = 0.4 + 0.8 * _noise(rng, 0.4)
    return _to_image(np.asarray(image.resize((96, 96)), dtype=np.float32) * shade[..., None])


def _landscape(rng: Random) -> Image.Image:
    image = _sky(rng, (160, 120))
    pen = ImageDraw.Draw(image)
    if rng.random() < 0.5:
        x, y, r = rng.randint(10, 150), rng.randint(5, 50), rng.randint(5, 16)
        sun = rng.choice(((255, 240, 180), WHITE, (250, 200, 60)))
        pen.ellipse((x - r, y - r, x + r, y + r), fill=sun)
    for layer in range(rng.randint(1, 4)):
        level, color = 50 + 20 * layer, _color(rng)
        phase, step = rng.uniform(0, 6), rng.uniform(0.02, 0.12)
        ridge = [
            (x, level + 14 * math.sin(x * step + phase) + rng.uniform(-4, 4))
            for x in range(0, 161, 4)
        ]
        pen.polygon([(0, 120), *ridge, (160, 120)], fill=color)
    for _ in range(rng.randint(0, 14)):
        x, y, size = rng.randint(0, 160), rng.randint(60, 118), rng.randint(4, 18)
        pen.rectangle((x - 1, y, x + 1, y + size // 2), fill=(90, 60, 30))
        green = (30, rng.randint(50, 160), 40)
        pen.ellipse((x - size // 2, y - size, x + size // 2, y), fill=green)
    return image.filter(ImageFilter.GaussianBlur(rng.uniform(0, 1.5)))


def _text(
    pen: ImageDraw.ImageDraw, rng: Random, box: tuple[float, float, float, float], color: Rgb
) -> None:
    """Draw lines of letters, or bars that look like text."""
    x, y, right, bottom = box
    step = rng.randint(5, 12)
    letters = rng.random() < 0.5
    while y + step < bottom:
        end = right if rng.random() < 0.7 else x + rng.uniform(0.2, 0.9) * (right - x)
        if letters:
            words = "".join(rng.choice("abcdefghilmnoprstu e  ") for _ in range(int((end - x) / 6)))
            pen.text((x, y), words, fill=color)
            y += 5
        else:
            left = x
            while left < end:
                width = rng.randint(3, 18)
                pen.rectangle((left, y, min(end, left + width), y + max(1, step // 3)), fill=color)
                left += width + 3
        y += step


def _document(rng: Random) -> Image.Image:
    is_dark = rng.random() < 0.2
    papers = ((30, 32, 40),) if is_dark else (WHITE, (250, 248, 240), (240, 240, 240))
    image, pen, width, height = _canvas(rng, *papers)
    ink = (200, 210, 200) if is_dark else (20, 20, 20)
    columns = rng.choice((1, 1, 2))
    if rng.random() < 0.6:
        pen.rectangle((10, 8, rng.randint(40, width - 10), rng.randint(12, 20)), fill=ink)
    for column in range(columns):
        left, right = (8 + place * width // columns for place in (column, column + 1))
        box = (left, rng.randint(24, 40), right - 16, height - rng.randint(4, 60))
        _text(pen, rng, box, ink)
    return image


def _screenshot(rng: Random) -> Image.Image:
    grounds = (WHITE, (245, 246, 248), (32, 33, 36), (240, 240, 240))
    image, pen, width, height = _canvas(rng, *grounds)
    pen.rectangle((0, 0, width, rng.randint(8, 22)), fill=_color(rng))
    if rng.random() < 0.5:
        pen.rectangle((0, 0, rng.randint(20, 60), height), fill=_color(rng))
    for _ in range(rng.randint(1, 8)):
        x, y = rng.randint(0, width - 30), rng.randint(16, height - 20)
        box = (x, y, x + rng.randint(15, 110), y + rng.randint(6, 50))
        radius, fill = rng.choice((0, 2, 4)), rng.choice((None, _color(rng)))
        pen.rounded_rectangle(box, radius=radius, fill=fill, outline=_color(rng))
        if rng.random() < 0.7:
            _text(pen, rng, (box[0] + 3, box[1] + 3, box[2] - 3, box[3]), _color(rng))
    return image


def _chart(rng: Random) -> Image.Image:
    """Bars, curves, points or a pie."""
    image, pen, width, height = _canvas(rng, WHITE, (248, 248, 250), (30, 30, 40), (20, 22, 30))
    base, axis = height - rng.randint(8, 24), (120, 120, 120)
    draw = rng.choice((_bars, _bars, _curves, _curves, _points, _pie))
    if draw is not _pie:
        pen.line((16, 6, 16, base, width - 4, base), fill=axis)
        for line in range(rng.choice((0, 4, 6))):
            pen.line((16, base - line * 20, width - 4, base - line * 20), fill=(200, 200, 200))
    draw(rng, pen, width, base)
    for x in range(20, width, rng.randint(12, 40)):
        if rng.random() < 0.5:
            pen.text((x, base + 2), rng.choice("ABCDE12345"), fill=axis)
    return image if rng.random() < 0.75 else image.transpose(Image.Transpose.ROTATE_270)


def _bars(rng: Random, pen: ImageDraw.ImageDraw, width: int, base: int) -> None:
    number, color = rng.randint(3, 12), _color(rng)
    step = (width - 24) / number
    for index in range(number):
        x, top = 20 + index * step, base - rng.uniform(0.05, 0.9) * (base - 10)
        fill = color if number % 2 else _color(rng)
        pen.rectangle((x, top, x + step * rng.uniform(0.5, 0.9), base), fill=fill)


def _curves(rng: Random, pen: ImageDraw.ImageDraw, width: int, base: int) -> None:
    for _ in range(rng.randint(1, 4)):
        y, color, points = rng.uniform(0.2, 0.8) * base, _color(rng), []
        for x in range(16, width, rng.randint(3, 14)):
            y = min(base, max(5, y + rng.gauss(0, 9)))
            points.append((x, y))
        pen.line(points, fill=color, width=rng.randint(1, 3))
        for point in points if rng.random() < 0.3 else ():
            pen.circle(point, 2, fill=color)


def _points(rng: Random, pen: ImageDraw.ImageDraw, width: int, base: int) -> None:
    for _ in range(rng.randint(1, 4)):
        x, y = rng.uniform(0.2, 0.8) * width, rng.uniform(0.2, 0.8) * base
        spread, color = rng.uniform(5, 40), _color(rng)
        for _ in range(rng.randint(8, 50)):
            point = rng.gauss(x, spread), rng.gauss(y, spread)
            pen.circle(point, rng.choice((1, 2, 2, 3)), fill=color)


def _pie(rng: Random, pen: ImageDraw.ImageDraw, width: int, base: int) -> None:
    r, start = rng.uniform(0.25, 0.45) * min(width, base), 0.0
    x, y = width * rng.uniform(0.4, 0.6), base * rng.uniform(0.45, 0.55)
    while start < 360:
        end = start + rng.uniform(20, 150)
        box = (x - r, y - r, x + r, y + r)
        pen.pieslice(box, start, min(360, end), fill=_color(rng), outline=WHITE)
        start = end


def _object(rng: Random) -> Image.Image:
    """One large object in soft light on a table."""
    image = _sky(rng, (150, 150))
    pen = ImageDraw.Draw(image)
    color = np.array(_color(rng))
    x, y, r = rng.uniform(50, 100), rng.uniform(55, 95), rng.uniform(28, 55)
    squash, lean = rng.uniform(0.5, 1.3), rng.uniform(-0.4, 0.4)
    shadow = (x - r, y + r * squash * 0.7, x + 1.4 * r, y + r * squash * 1.15)
    pen.ellipse(shadow, fill=tuple((color // 4).tolist()))
    for step in range(24):
        share = step / 24
        size, light = r * (1 - share), color * (0.45 + 0.75 * share)
        px, py = x - lean * r * share, y - 0.35 * r * share
        box = (px - size, py - size * squash, px + size, py + size * squash)
        pen.ellipse(box, fill=tuple(light.clip(0, 255).astype(int).tolist()))
    return image.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 1.5)))


def _specks(rng: Random) -> Image.Image:
    """Snow, rain, dust, confetti, bubbles or stars, sometimes with a hill or a round object behind them."""
    ground, color = _ground(rng), _color(rng)
    while sum(abs(a - b) for a, b in zip(ground, color, strict=True)) < 320:
        ground, color = _ground(rng), _color(rng)
    image, pen, width, height = _canvas(rng, ground, scale=rng.choice((1, 2)))
    if rng.random() < 0.6:
        center, r = (rng.uniform(0, width), rng.uniform(0, height)), rng.uniform(0.03, 0.15) * width
        pale = tuple(round(0.7 * 255 + 0.3 * level) for level in _color(rng))
        pen.circle(center, r, fill=rng.choice((_color(rng), color, pale)))
    if rng.random() < 0.5:
        top = rng.uniform(0.5, 0.95) * height
        ridge = [(x, top + rng.uniform(-0.1, 0.1) * height) for x in range(0, width + 20, 20)]
        shade = tuple(round(level * rng.uniform(0, 1)) for level in ground)
        fill = rng.choice((_color(rng), shade))
        pen.polygon([(0, height), *ridge, (width, height)], fill=fill)
    is_colored, faintest = rng.random() < 0.2, rng.uniform(0.3, 0.9)
    size, length = rng.choice((0.6, 0.6, 1, 2, 4)), rng.choice((0, 0, 0, 0, 4, 12))
    for _ in range(max(60, int(rng.uniform(0.002, 0.006) * width * height))):
        x, y, r = rng.uniform(0, width), rng.uniform(0, height), rng.uniform(0.8, 1.4) * size
        light = rng.uniform(faintest, 1)
        faint = tuple(
            round(light * a + (1 - light) * b) for a, b in zip(color, ground, strict=True)
        )
        fill = _color(rng) if is_colored else faint
        if length:
            pen.line((x, y, x + length / 3, y + length), fill=fill, width=max(1, round(r)))
        else:
            pen.circle((x, y), r, fill=fill)
    return image


PICTURES: tuple[Callable[[Random], Image.Image], ...] = (
    _clouds, _clouds, _grain, _gradient, _gradient, _stripes, _dead_leaves, _dead_leaves, _dead_leaves, _landscape,
    _landscape, _document, _document, _screenshot, _screenshot, _screenshot, *[_chart] * 6,
    _object, _object, *[_specks] * 18,
)  # fmt: skip
