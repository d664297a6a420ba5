"""The dashboard and what provisions it, held to the form that Grafana reads; nothing here starts Grafana.

Grafana passes over a field that it does not know, so that a slip of the pen is seen only by who looks at the panel.
"""

import re
from itertools import combinations
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
import yaml

GRAFANA = Path(__file__).parents[2] / "config/grafana"
NUM_COLUMNS = 24
UNITS = {"short", "s", "bytes", "percentunit", "reqps"}  # and what begins with suffix:
COLOR = re.compile(r"#[0-9a-f]{6}|red|orange|green|blue")
GRAFANAS_VARIABLES = {"__rate_interval"}

Word = Annotated[str, msgspec.Meta(min_length=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class Form(msgspec.Struct, forbid_unknown_fields=True):
    """What may be there, and must unless it has a default."""


class Source(Form):
    type: Literal["prometheus"]
    uid: Literal["${datasource}"]


class Target(Form):
    refId: Annotated[str, msgspec.Meta(pattern="^[A-Z]$")]
    datasource: Source
    expr: Word
    legendFormat: str


class Position(Form):
    h: Annotated[int, msgspec.Meta(ge=1)]
    w: Annotated[int, msgspec.Meta(ge=1, le=NUM_COLUMNS)]
    x: Count
    y: Count


class Color(Form):
    mode: Literal["thresholds", "fixed"]
    fixedColor: str = "blue"


class Step(Form):
    color: str
    value: float | None


class Thresholds(Form):
    mode: Literal["absolute"]
    steps: list[Step]


class Stacking(Form):
    mode: Literal["normal"]
    group: Word


class Custom(Form):
    lineWidth: Count
    fillOpacity: Annotated[int, msgspec.Meta(ge=0, le=100)]
    showPoints: Literal["never", "auto", "always"]
    stacking: Stacking | None = None


class Defaults(Form):
    unit: str
    min: float
    max: float | None = None
    color: Color | None = None
    thresholds: Thresholds | None = None
    custom: Custom | None = None


class Matcher(Form):
    id: Literal["byName"]
    options: Word


class Property(Form):
    id: Literal["color"]
    value: Color


class Override(Form):
    matcher: Matcher
    properties: list[Property]


class FieldConfig(Form):
    defaults: Defaults
    overrides: list[Override]


class Legend(Form):
    displayMode: Literal["list", "table"]
    placement: Literal["bottom", "right"]


class Tooltip(Form):
    mode: Literal["single", "multi"]
    sort: Literal["none", "asc", "desc"]


class LineOptions(Form):
    legend: Legend
    tooltip: Tooltip


class Reduce(Form):
    calcs: list[Literal["lastNotNull"]]


class NumberOptions(Form):
    colorMode: Literal["value", "none"]
    graphMode: Literal["area", "none"]
    reduceOptions: Reduce


class Row(Form, tag_field="type", tag="row"):
    id: int
    title: Word
    collapsed: Literal[False]
    gridPos: Position
    panels: Annotated[list, msgspec.Meta(max_length=0)]


class Panel(Form):
    id: int
    title: Word
    description: Word
    datasource: Source
    gridPos: Position
    targets: Annotated[list[Target], msgspec.Meta(min_length=1)]
    fieldConfig: FieldConfig


class Lines(Panel, tag_field="type", tag="timeseries", kw_only=True):
    options: LineOptions


class Number(Panel, tag_field="type", tag="stat", kw_only=True):
    options: NumberOptions


class Variable(Form):
    """A choice at the top of the page."""

    name: Word
    label: Word
    type: Literal["datasource", "query"]
    query: str | dict[str, str]
    datasource: Source | None = None
    refresh: Literal[0, 1, 2] = 0
    includeAll: bool = False
    multi: bool = False
    allValue: str = ""
    current: dict[str, str] = {}
    sort: Count = 0


class Variables(Form):
    list: list[Variable]


class Dashboard(Form):
    title: Word
    uid: Annotated[str, msgspec.Meta(pattern="^[a-z0-9-]{1,40}$")]
    tags: list[Word]
    description: Word
    editable: bool
    graphTooltip: Literal[0, 1, 2]
    refresh: Word
    schemaVersion: Annotated[int, msgspec.Meta(ge=36)]
    time: dict[Literal["from", "to"], Word]
    timezone: Literal["browser", "utc"]
    templating: Variables
    panels: list[Row | Lines | Number]


DASHBOARD = msgspec.json.decode(
    (GRAFANA / "dashboards/vlm-fleet.json").read_bytes(), type=Dashboard, strict=True
)
PANELS = [panel for panel in DASHBOARD.panels if isinstance(panel, Panel)]
TITLES = [panel.title for panel in PANELS]


def test_every_panel_is_one_of_its_kind():
    ids = [panel.id for panel in DASHBOARD.panels]
    assert len(set(ids)) == len(ids)
    assert len(set(TITLES)) == len(TITLES)
    for panel in PANELS:
        references = [target.refId for target in panel.targets]
        assert len(set(references)) == len(references), panel.title


def test_panels_lie_beside_each_other_within_the_page():
    def squares(at: Position) -> set[tuple[int, int]]:
        return {(x, y) for x in range(at.x, at.x + at.w) for y in range(at.y, at.y + at.h)}

    for panel in DASHBOARD.panels:
        assert panel.gridPos.x + panel.gridPos.w <= NUM_COLUMNS, panel.title
    for one, other in combinations(DASHBOARD.panels, 2):
        assert not squares(one.gridPos) & squares(other.gridPos), (one.title, other.title)


@pytest.mark.parametrize("panel", PANELS, ids=TITLES)
def test_units_and_colors_are_known(panel):
    defaults = panel.fieldConfig.defaults
    assert defaults.unit in UNITS or defaults.unit.startswith("suffix:")
    steps = defaults.thresholds.steps if defaults.thresholds else []
    values = [step.value for step in steps]
    assert values[:1] in ([], [None])
    assert values[1:] == sorted(value for value in values if value is not None)
    colors = [step.color for step in steps]
    for override in panel.fieldConfig.overrides:
        colors += [change.value.fixedColor for change in override.properties]
    assert all(COLOR.fullmatch(color) for color in colors)


@pytest.mark.parametrize("panel", PANELS, ids=TITLES)
def test_queries_use_variables_and_labels_that_there_are(panel):
    known = {variable.name for variable in DASHBOARD.templating.list} | GRAFANAS_VARIABLES
    for target in panel.targets:
        assert set(re.findall(r"\$\{?(\w+)", target.expr)) <= known
        kept = {
            label for by in re.findall(r"by \(([^)]*)\)", target.expr) for label in by.split(", ")
        }
        assert set(re.findall(r"{{(\w+)}}", target.legendFormat)) <= kept


def test_the_prometheus_that_is_provisioned_can_be_chosen():
    [source] = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    assert (source["type"], source["isDefault"], source["access"]) == ("prometheus", True, "proxy")
    assert re.fullmatch(r"[\w-]{1,40}", source["uid"])
    [choice, _] = DASHBOARD.templating.list
    assert (choice.name, choice.type, choice.query) == ("datasource", "datasource", source["type"])
    [provider] = yaml.safe_load((GRAFANA / "provisioning/dashboards/vlm-fleet.yml").read_text())[
        "providers"
    ]
    assert (provider["type"], set(provider["options"])) == ("file", {"path"})
