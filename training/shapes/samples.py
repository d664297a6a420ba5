"""Draws the sample images, whose scenes are known: for the README, for curl, for smoke tests.

python -m training.shapes.samples
"""

from random import Random

from training import PACKAGES
from training.shapes.render import Style, render
from training.shapes.world import make_scene

FOLDER = PACKAGES / "shapes" / "samples"
STYLE = Style(supersampling=4, shade=0)
SCENES = {
    "shapes": make_scene(
        "white",
        ("red", "star", "top left"),
        ("blue", "circle", "center"),
        ("green", "square", "bottom right", "small"),
    ),
    "night": make_scene(
        "black", ("yellow", "ring", "top right"), ("orange", "cross", "bottom left", "small")
    ),
    "crowd": make_scene(
        "gray",
        ("purple", "triangle", "top center"),
        ("red", "star", "middle left", "small"),
        ("yellow", "circle", "middle right"),
        ("blue", "cross", "bottom center"),
    ),
}


def main() -> None:
    """Write the images as PNG."""
    FOLDER.mkdir(exist_ok=True)
    for name, scene in SCENES.items():
        render(scene, Random(0), STYLE).save(FOLDER / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
