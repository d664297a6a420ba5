"""The dashboard and what provisions it, held to the form that Grafana reads; nothing here starts Grafana.

Grafana passes over a field that it does not know, so that a slip of the pen is seen only by who looks at the panel.
"""

import json
import re
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import yaml

GRAFANA = Path(__file__).parents[2] / "config/grafana"
NUM_COLUMNS = 24
UNITS = {"short", "s", "bytes", "percentunit", "reqps"}  # and what begins with suffix:
COLOR = re.compile(r"#[0-9a-f]{6}|red|orange|green|blue")
GRAFANAS_VARIABLES = {"__rate_interval"}
#: The fields of each object, by the field that holds it.
FIELDS = {
    "dashboard": "title uid tags description editable graphTooltip refresh schemaVersion time timezone templating panels",
    "time": "from to",
    "templating": "list",
    "list": "name label type query datasource refresh includeAll multi allValue current sort",
    "datasource": "type uid",
    "query": "query refId",
    "current": "text value",
    "panels": "id type title description collapsed datasource gridPos targets fieldConfig options panels",
    "gridPos": "h w x y",
    "targets": "refId datasource expr legendFormat",
    "fieldConfig": "defaults overrides",
    "defaults": "unit min max color thresholds custom",
    "color": "mode fixedColor",
    "thresholds": "mode steps",
    "steps": "color value",
    "custom": "lineWidth fillOpacity showPoints stacking",
    "stacking": "mode group",
    "overrides": "matcher properties",
    "matcher": "id options",
    "properties": "id value",
    "value": "mode fixedColor",
    "options": "legend tooltip colorMode graphMode reduceOptions",
    "legend": "displayMode placement",
    "tooltip": "mode sort",
    "reduceOptions": "calcs",
}
DASHBOARD = json.loads((GRAFANA / "dashboards/vlm-fleet.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TITLES = [panel["title"] for panel in PANELS]


def unknown_fields(value: Any, place: str = "dashboard") -> list[str]:
    if isinstance(value, list):
        return [found for each in value for found in unknown_fields(each, place)]
    if not isinstance(value, dict):
        return []
    unknown = [f"{place}.{name}" for name in value.keys() - set(FIELDS[place].split())]
    return unknown + [found for name, each in value.items() for found in unknown_fields(each, name)]


def test_every_field_is_one_that_grafana_reads():
    assert unknown_fields(DASHBOARD) == []
    assert {panel["type"] for panel in PANELS} == {"timeseries", "stat"}


def test_every_panel_is_one_of_its_kind():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    assert len(set(TITLES)) == len(TITLES)
    for panel in PANELS:
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) > 0, panel["title"]


def test_panels_lie_beside_each_other_within_the_page():
    def squares(at: dict[str, int]) -> set[tuple[int, int]]:
        columns, rows = range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])
        return set(product(columns, rows))

    for panel in DASHBOARD["panels"]:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= NUM_COLUMNS, panel["title"]
    for one, other in combinations(DASHBOARD["panels"], 2):
        assert not squares(one["gridPos"]) & squares(other["gridPos"]), (
            one["title"],
            other["title"],
        )


@pytest.mark.parametrize("panel", PANELS, ids=TITLES)
def test_units_and_colors_are_known(panel):
    defaults = panel["fieldConfig"]["defaults"]
    assert defaults["unit"] in UNITS or defaults["unit"].startswith("suffix:")
    steps = defaults.get("thresholds", {}).get("steps", [])
    values = [step["value"] for step in steps]
    assert values[:1] in ([], [None])
    assert values[1:] == sorted(value for value in values if value is not None)
    colors = [step["color"] for step in steps]
    for override in panel["fieldConfig"]["overrides"]:
        colors += [change["value"]["fixedColor"] for change in override["properties"]]
    assert all(COLOR.fullmatch(color) for color in colors)


@pytest.mark.parametrize("panel", PANELS, ids=TITLES)
def test_queries_use_variables_and_labels_that_there_are(panel):
    known = {each["name"] for each in DASHBOARD["templating"]["list"]} | GRAFANAS_VARIABLES
    for target in panel["targets"]:
        assert set(re.findall(r"\$\{?(\w+)", target["expr"])) <= known
        kept = {
            label
            for by in re.findall(r"by \(([^)]*)\)", target["expr"])
            for label in by.split(", ")
        }
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= kept


def test_the_prometheus_that_is_provisioned_can_be_chosen():
    [source] = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    assert (source["type"], source["isDefault"], source["access"]) == ("prometheus", True, "proxy")
    assert re.fullmatch(r"[\w-]{1,40}", source["uid"])
    [choice, _] = DASHBOARD["templating"]["list"]
    assert (choice["name"], choice["type"]) == ("datasource", "datasource")
    assert choice["query"] == source["type"]
    [provider] = yaml.safe_load((GRAFANA / "provisioning/dashboards/vlm-fleet.yml").read_text())[
        "providers"
    ]
    assert (provider["type"], set(provider["options"])) == ("file", {"path"})
