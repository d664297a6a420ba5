"""The panels of the dashboard as images, drawn from a Prometheus about as Grafana would: for people to look at."""

import re
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import httpx
import plotly.graph_objects as go
from PIL import Image
from plotly.offline import get_plotlyjs
from selenium.webdriver import Chrome

from tests.integration.fleet_process import ROOT
from tests.integration.prometheus_process import SCRAPE_PAUSE_S, as_asked

Point = tuple[float, float]

FOLDER = ROOT / ".cache" / "dashboard"
COLUMN, ROW = 60, 36  # pixels of a cell of the dashboard's grid
COLORS = (
    "#73bf69", "#f2cc0c", "#5794f2", "#ff780a", "#b877d9", "#f2495c", "#8ab8ff", "#c8f2c2",
)  # fmt: skip
STYLE = """
body { margin: 0; background: #111217; color: #ccccdc; font: 13px sans-serif; }
main { position: relative; } section { position: absolute; box-sizing: border-box; padding: 8px; }
section { border: 1px solid #2c3235; background: #181b1f; }
h3 { margin: 0; font-size: 14px; font-weight: 500; } small { color: #9fa7b3; font-weight: normal; }
p { margin: 14px 0; font-size: 40px; text-align: center; }
"""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a panel, under the name that its legend has."""

    name: str
    points: list[Point]


def read_target(client: httpx.Client, target: dict[str, Any], span: Point) -> list[Series]:
    """What one query of a panel has drawn in a span of time."""
    asked = {"query": as_asked(target["expr"]), "start": span[0], "end": span[1]}
    answer = client.get("/api/v1/query_range", params={**asked, "step": SCRAPE_PAUSE_S}).json()
    assert answer["status"] == "success", (target, answer)
    found = []
    for line in answer["data"]["result"]:
        points = [(at - span[0], float(value)) for at, value in line["values"]]
        known = [point for point in points if point[1] == point[1]]
        if known:
            found.append(Series(legend(target["legendFormat"], line["metric"]), known))
    return found


def legend(form: str, labels: dict[str, str]) -> str:
    """The name of a line, by a target's `legendFormat`."""
    return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), form)


def shown_as(unit: str) -> tuple[float, str]:
    """How much of a value is 1 on the axis, and what is written beside it."""
    known = {
        "s": (1e-3, "ms"),
        "percentunit": (0.01, "%"),
        "bytes": (2**20, "MiB"),
        "short": (1.0, ""),
        "reqps": (1.0, "req/s"),
    }
    return known.get(unit) or (1.0, unit.removeprefix("suffix:"))


def draw_dashboard(browser: Chrome, panels: list[dict[str, Any]], drawn: dict[int, str]) -> None:
    """Write an image of each panel, and one of all. `drawn`: the inside of a panel, by its id."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels) * ROW
    parts = "".join(place(panel, drawn.get(panel["id"], "")) for panel in panels)
    page = FOLDER / "dashboard.html"
    page.write_text(
        f"<!doctype html><meta charset=utf-8><style>{STYLE}</style>"
        f"<script>{get_plotlyjs()}</script><main>{parts}</main>"
    )
    screen = {"width": 24 * COLUMN, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    browser.get(page.as_uri())
    browser.save_screenshot(str(FOLDER / "dashboard.png"))
    with Image.open(FOLDER / "dashboard.png") as image:
        for panel in panels:
            if panel["type"] != "row":
                image.crop(box(panel)).save(image_of(panel))


def box(panel: dict[str, Any]) -> tuple[int, int, int, int]:
    """Left, top, right and bottom on the image of all."""
    cell = panel["gridPos"]
    left, top = cell["x"] * COLUMN, cell["y"] * ROW
    return left, top, left + cell["w"] * COLUMN, top + cell["h"] * ROW


def image_of(panel: dict[str, Any]) -> Path:
    return FOLDER / f"{panel['title'].lower().replace(' ', '-')}.png"


def place(panel: dict[str, Any], inside: str) -> str:
    """A panel where the dashboard has it."""
    left, top, right, bottom = box(panel)
    where = f"left:{left}px; top:{top}px; width:{right - left - 4}px; height:{bottom - top - 4}px"
    _, unit = shown_as(panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "short"))
    title = f"<h3>{escape(panel['title'])} <small>{escape(unit)}</small></h3>"
    return f'<section style="{where}">{title}{inside}</section>'


def draw(panel: dict[str, Any], lines: list[Series], length_s: float) -> str:
    """The inside of a panel."""
    axis = panel["fieldConfig"]["defaults"]
    one, _ = shown_as(axis["unit"])
    lines = [Series(line.name, [(at, v / one) for at, v in line.points]) for line in lines]
    if panel["type"] == "stat":
        return f"<p>{lines[0].points[-1][1]:.4g}</p>"
    is_stacked = "stacking" in axis["custom"]
    figure = go.Figure()
    for index, line in enumerate(lines):
        at, values = zip(*line.points, strict=True)
        color = {"color": COLORS[index % len(COLORS)], "width": 1.5}
        stack = {"stackgroup": "all"} if is_stacked else {}
        figure.add_scatter(x=at, y=values, name=line.name, mode="lines", line=color, **stack)
    grid = {"gridcolor": "#2c3235", "zeroline": False, "rangemode": "tozero"}
    _, _, right, bottom = box({"gridPos": panel["gridPos"] | {"x": 0, "y": 0}})
    figure.update_layout(
        width=right - 20, height=bottom - 40, margin={"l": 45, "r": 5, "t": 5, "b": 5},
        paper_bgcolor="#181b1f", plot_bgcolor="#181b1f", font={"color": "#9fa7b3", "size": 11},
        showlegend=True, legend={"orientation": "h", "y": -0.15},
        xaxis=grid | {"range": [0, length_s]}, yaxis=grid,
    )  # fmt: skip
    if "max" in axis:
        figure.update_yaxes(range=[axis["min"], axis["max"] / one])
    return figure.to_html(
        full_html=False, include_plotlyjs=False, config={"staticPlot": True}, include_mathjax=False
    )
