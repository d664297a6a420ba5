"""Pictures outside the image world: seven kinds that training draws in another way, and seven that it never draws."""

import math
from collections.abc import Callable
from random import Random

import numpy as np
from PIL import Image, ImageDraw


def _color(rng: Random, least: int = 0) -> tuple[int, int, int]:
    return rng.randint(least, 255), rng.randint(least, 255), rng.randint(least, 255)


def browser(rng: Random) -> Image.Image:
    """A window with tabs, an address, a heading, paragraphs, a picture and buttons."""
    image = Image.new("RGB", (640, 400), "white")
    pen = ImageDraw.Draw(image)
    pen.rectangle((0, 0, 640, 26), fill=(222, 225, 230))
    for tab in range(rng.randint(1, 4)):
        pen.rounded_rectangle(
            (10 + 120 * tab, 6, 120 + 120 * tab, 30),
            radius=6,
            fill="white" if tab == 0 else (200, 204, 210),
        )
        pen.text((20 + 120 * tab, 10), rng.choice(("Inbox", "News", "Shop", "Docs")), fill="black")
    pen.rounded_rectangle((60, 34, 560, 52), radius=9, fill=(241, 243, 244))
    pen.text(
        (72, 38), "https://www.example.org/articles/" + str(rng.randint(1, 999)), fill=(90, 90, 90)
    )
    pen.rectangle((0, 58, 640, 96), fill=_color(rng))
    pen.text((24, 70), "Latest articles and reports", fill="white", font_size=16)
    for line in range(rng.randint(8, 16)):
        pen.text(
            (24, 110 + 17 * line),
            "Lorem ipsum dolor sit amet consectetur adipiscing elit"[: rng.randint(20, 54)],
            fill=(40, 40, 40),
        )
    pen.rectangle((420, 120, 600, 240), fill=_color(rng, 90))
    for button in range(rng.randint(1, 3)):
        pen.rounded_rectangle(
            (420 + 64 * button, 260, 476 + 64 * button, 284), radius=4, fill=_color(rng)
        )
        pen.text((430 + 64 * button, 266), "Buy", fill="white")
    return image


def bar_chart(rng: Random) -> Image.Image:
    image = Image.new("RGB", (480, 360), "white")
    pen = ImageDraw.Draw(image)
    pen.text((160, 10), "Sales by month", fill="black", font_size=18)
    bars, color = rng.randint(4, 9), _color(rng)
    for line in range(6):
        pen.line((50, 310 - 50 * line, 460, 310 - 50 * line), fill=(220, 220, 220))
        pen.text((20, 303 - 50 * line), str(20 * line), fill="black")
    for bar in range(bars):
        left = 60 + bar * 400 // bars
        pen.rectangle((left, 310 - rng.randint(20, 250), left + 280 // bars, 310), fill=color)
        pen.text((left, 318), "JFMAMJJAS"[bar], fill="black")
    return image


def line_chart(rng: Random) -> Image.Image:
    image = Image.new("RGB", (420, 300), rng.choice(("white", "#111827", "#f8fafc")))
    pen = ImageDraw.Draw(image)
    pen.rectangle((40, 20, 400, 260), outline="gray")
    for _ in range(rng.randint(1, 3)):
        phase, period, color = rng.uniform(0, 6), rng.uniform(20, 90), _color(rng)
        points = [
            (x, 140 + 80 * math.sin(x / period + phase) + rng.uniform(-9, 9))
            for x in range(40, 400, 6)
        ]
        pen.line(points, fill=color, width=2)
    pen.text((180, 272), "time (s)", fill="gray")
    return image


def gradient(rng: Random) -> Image.Image:
    corners = np.array([_color(rng) for _ in range(4)], dtype=float).reshape(2, 2, 3)
    corners[0, 0], corners[1, 1] = (250, 60, 40), (30, 60, 230)
    y, x = np.mgrid[0:256, 0:256][..., None] / 255
    mixed = (
        corners[0, 0] * (1 - x) * (1 - y)
        + corners[0, 1] * x * (1 - y)
        + corners[1, 0] * (1 - x) * y
        + corners[1, 1] * x * y
    )
    return Image.fromarray(mixed.astype(np.uint8))


def texture(rng: Random) -> Image.Image:
    """Two-colored noise of one scale, like cloth or sand."""
    generator = np.random.default_rng(rng.randrange(2**32))
    coarse = Image.fromarray((255 * generator.random((40, 40))).astype(np.uint8)).resize(
        (300, 300), Image.Resampling.BILINEAR
    )
    share = np.asarray(coarse)[..., None] / 255 * 0.7 + generator.random((300, 300, 1)) * 0.3
    return Image.fromarray(
        (share * np.array(_color(rng, 120)) + (1 - share) * np.array(_color(rng)) * 0.5).astype(
            np.uint8
        )
    )


def seaside(rng: Random) -> Image.Image:
    """Sky, sun, sea and beach."""
    image = Image.new("RGB", (400, 260))
    pen = ImageDraw.Draw(image)
    for y in range(260):
        share = y / 260
        pen.line(
            (0, y, 400, y),
            fill=(round(80 + 150 * share), round(150 + 60 * share), 235)
            if y < 130
            else (20, round(90 + 80 * share), round(120 + 60 * share)),
        )
    x = rng.randint(60, 340)
    pen.ellipse((x - 22, 40, x + 22, 84), fill=(255, 236, 160))
    pen.polygon(
        [(0, 260), (0, rng.randint(190, 230)), (400, rng.randint(190, 240)), (400, 260)],
        fill=(226, 202, 150),
    )
    for _ in range(rng.randint(40, 90)):
        wave = rng.randint(0, 400), rng.randint(134, 200)
        pen.line((*wave, wave[0] + rng.randint(8, 30), wave[1]), fill=(200, 225, 235))
    for _ in range(rng.randint(2, 5)):
        cloud = rng.randint(0, 380), rng.randint(10, 90)
        for _ in range(6):
            cx, cy, r = (
                cloud[0] + rng.randint(-30, 30),
                cloud[1] + rng.randint(-8, 8),
                rng.randint(8, 18),
            )
            pen.ellipse((cx - r, cy - r, cx + r, cy + r), fill=(250, 250, 252))
    return image


def rendering(rng: Random) -> Image.Image:
    """Ray-traced spheres on a checkered floor."""
    side = 200
    y, x = np.mgrid[0:side, 0:side] / side - 0.5
    ray = np.stack([x, -y, np.ones_like(x)], axis=-1)
    ray /= np.linalg.norm(ray, axis=-1, keepdims=True)
    depth = np.where(ray[..., 1] < -0.01, -0.5 / np.minimum(ray[..., 1], -0.01), 1e3)
    checked = (np.floor(ray[..., 0] * depth * 2) + np.floor(ray[..., 2] * depth * 2)) % 2
    levels = (
        np.where(depth < 30, 90 + 120 * checked, 200.0)[..., None]
        * np.array(_color(rng, 150))
        / 255
    )
    light = np.array([0.5, 0.7, -0.5]) / np.linalg.norm([0.5, 0.7, -0.5])
    for _ in range(rng.randint(2, 6)):
        center, radius = (
            np.array([rng.uniform(-1, 1), rng.uniform(-0.3, 0.5), rng.uniform(2, 4)]),
            rng.uniform(0.2, 0.6),
        )
        middle = ray @ center
        reach = middle**2 - center @ center + radius**2
        near = middle - np.sqrt(np.maximum(reach, 0))
        hit = (reach > 0) & (near < depth)
        normal = (ray * near[..., None] - center) / radius
        bright = 0.2 + 0.8 * np.clip(normal @ light, 0, 1) + np.clip(normal @ light, 0, 1) ** 40
        levels = np.where(hit[..., None], bright[..., None] * np.array(_color(rng, 60)), levels)
        depth = np.where(hit, near, depth)
    return Image.fromarray(levels.clip(0, 255).astype(np.uint8))


def fractal(rng: Random) -> Image.Image:
    """A part of the Mandelbrot set."""
    center, width = (
        complex(-0.74 + rng.uniform(-0.1, 0.1), 0.12 + rng.uniform(-0.1, 0.1)),
        rng.uniform(0.05, 1.2),
    )
    y, x = np.mgrid[0:160, 0:160] / 160 - 0.5
    c = center + width * (x + 1j * y)
    z, steps = np.zeros_like(c), np.zeros(c.shape)
    for _ in range(60):
        alive = np.abs(z) < 4
        z = np.where(alive, z * z + c, z)
        steps += alive
    phase = rng.uniform(0, 6)
    return Image.fromarray(
        np.stack(
            [127 + 120 * np.sin(steps / 6 + phase + shift) for shift in (0, 2, 4)], axis=-1
        ).astype(np.uint8)
    )


def bricks(rng: Random) -> Image.Image:
    image = Image.new("RGB", (300, 220), (190, 185, 175))
    pen = ImageDraw.Draw(image)
    for row in range(12):
        for column in range(-1, 8):
            left, top = column * 44 + row % 2 * 22, row * 19
            color = rng.randint(130, 190), rng.randint(50, 90), rng.randint(40, 70)
            pen.rectangle((left, top, left + 40, top + 15), fill=color)
    return image


def qr_code(rng: Random) -> Image.Image:
    image = Image.new("1", (25, 25), 1)
    pen = ImageDraw.Draw(image)
    for y in range(25):
        for x in range(25):
            pen.point((x, y), rng.randrange(2))
    for x, y in ((0, 0), (18, 0), (0, 18)):
        for step, fill in ((0, 0), (1, 1), (2, 0)):
            pen.rectangle((x + step, y + step, x + 6 - step, y + 6 - step), fill=fill)
    return image.convert("RGB").resize((275, 275), Image.Resampling.NEAREST)


def sheet_music(rng: Random) -> Image.Image:
    image = Image.new("RGB", (420, 300), (253, 251, 244))
    pen = ImageDraw.Draw(image)
    for staff in range(3):
        top = 30 + 90 * staff
        for line in range(5):
            pen.line((15, top + 9 * line, 405, top + 9 * line), fill=(60, 60, 60))
        for note in range(rng.randint(8, 14)):
            x, y = 40 + note * 27, top + rng.randint(-4, 36)
            pen.ellipse((x - 5, y - 4, x + 5, y + 4), fill="black")
            pen.line((x + 5, y, x + 5, y - 28), fill="black", width=2)
    return image


def night_sky(rng: Random) -> Image.Image:
    image = Image.new("RGB", (360, 240), (6, 8, 24))
    pen = ImageDraw.Draw(image)
    for _ in range(rng.randint(90, 250)):
        x, y, level = rng.randrange(360), rng.randrange(240), rng.randint(120, 255)
        r = rng.choice((0, 0, 0, 1))
        pen.ellipse((x - r, y - r, x + r, y + r), fill=(level, level, min(255, level + 20)))
    pen.ellipse((280, 24, 320, 64), fill=(235, 232, 215))
    pen.polygon(
        [(0, 240), (0, 200), *((x, rng.randint(170, 215)) for x in range(20, 360, 20)), (360, 240)],
        fill=(0, 0, 0),
    )
    return image


def circuit(rng: Random) -> Image.Image:
    """A board with traces, chips and pads."""
    image = Image.new("RGB", (320, 260), (12, rng.randint(70, 110), 48))
    pen = ImageDraw.Draw(image)
    for _ in range(rng.randint(20, 40)):
        x, y = rng.randrange(0, 320, 8), rng.randrange(0, 260, 8)
        corner, end = x + 8 * rng.randint(2, 14), y + 8 * rng.randint(-9, 9)
        pen.line((x, y, corner, y, corner, end), fill=(196, 164, 72), width=2)
        pen.ellipse((corner - 4, end - 4, corner + 4, end + 4), fill=(210, 210, 205))
    for _ in range(rng.randint(2, 5)):
        x, y, width, height = (
            rng.randint(*each) for each in ((10, 220), (10, 180), (36, 80), (28, 60))
        )
        for pin in range(x + 4, x + width - 4, 8):
            pen.rectangle((pin, y - 5, pin + 3, y + height + 5), fill=(200, 200, 200))
        pen.rectangle((x, y, x + width, y + height), fill=(24, 24, 26))
        pen.text((x + 5, y + 8), f"IC{rng.randint(10, 99)}", fill=(180, 180, 180))
    return image


def keyboard(rng: Random) -> Image.Image:
    image = Image.new("RGB", (420, 180), (rng.randint(190, 225),) * 3)
    pen = ImageDraw.Draw(image)
    cap = rng.choice(((245, 245, 245), (60, 62, 66), (30, 30, 32)))
    ink = (40, 40, 40) if cap[0] > 128 else (235, 235, 235)
    for row, letters in enumerate(("1234567890", "QWERTYUIOP", "ASDFGHJKL", "ZXCVBNM")):
        for column, letter in enumerate(letters):
            x, y = 14 + 10 * row + 38 * column, 10 + 33 * row
            pen.rounded_rectangle((x, y, x + 33, y + 28), radius=4, fill=cap)
            pen.text((x + 7, y + 5), letter, fill=ink, font_size=12)
    pen.rounded_rectangle((110, 144, 300, 170), radius=4, fill=cap)
    return image


FOREIGN: dict[str, Callable[[Random], Image.Image]] = {
    each.__name__: each
    for each in (browser, bar_chart, line_chart, gradient, texture, seaside, rendering, fractal, bricks, qr_code, sheet_music, night_sky, circuit, keyboard)
}  # fmt: skip
