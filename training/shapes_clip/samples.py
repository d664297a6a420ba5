"""Draws the sample images that README searches.

python -m training.shapes_clip.samples
"""

from dataclasses import replace
from random import Random

from training import PACKAGES
from training.shapes.render import PLAIN, render
from training.shapes.world import Scene, make_scene

FOLDER = PACKAGES / "shapes_clip" / "samples"
SCENES: dict[str, Scene] = {
    "flag": make_scene("red", ("yellow", "star", "top left")),
    "traffic-light": make_scene(
        "black",
        ("red", "circle", "top center"),
        ("yellow", "circle", "center"),
        ("green", "circle", "bottom center"),
    ),
    "first-aid": make_scene("white", ("red", "cross", "center")),
    "wreath": make_scene(
        "white", ("green", "ring", "center"), ("red", "star", "top center", "small")
    ),
    "night": make_scene(
        "black", ("yellow", "star", "top left", "small"), ("yellow", "star", "top right", "small")
    ),
    "toys": make_scene(
        "gray",
        ("blue", "square", "bottom left"),
        ("orange", "triangle", "bottom center"),
        ("purple", "ring", "middle right"),
    ),
    "sea": make_scene(
        "blue", ("orange", "circle", "top right"), ("green", "triangle", "bottom left")
    ),
    "party": make_scene(
        "yellow",
        ("red", "star", "middle left"),
        ("blue", "circle", "center"),
        ("purple", "square", "bottom right", "small"),
    ),
}


def main() -> None:
    """Draw them."""
    FOLDER.mkdir(exist_ok=True)
    style = replace(PLAIN, width=160, height=160, supersampling=4)
    for index, (name, scene) in enumerate(SCENES.items()):
        render(scene, Random(index), style).save(FOLDER / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
