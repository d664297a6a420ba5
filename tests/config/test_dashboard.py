"""The dashboard and the alerts, held to the form that Grafana reads and to the metrics of the fleet.

Grafana passes over a field that it does not know, so that a slip of the pen is seen only by who looks at the panel.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.http.error_codes import ERROR_CODES
from shared.protocol import ErrorCode
from shared.telemetry.metrics import METRICS

CONFIG = Path(__file__).parents[2] / "config"
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
DASHBOARD = json.loads((CONFIG / "grafana/dashboards/vlm-fleet.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TITLES = [panel["title"] for panel in PANELS]
RULES = [
    rule
    for group in yaml.safe_load((CONFIG / "prometheus/alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
QUERIES += [rule["expr"] for rule in RULES]
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}


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
    assert len(set(TITLES)) == len(TITLES)
    for panel in PANELS:
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) > 0, panel["title"]


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


@pytest.mark.parametrize("query", QUERIES)
def test_queries_name_series_and_labels_that_are_there(query):
    series = {m.name + suffix: m for m in METRICS for suffix in SUFFIXES[m.kind]}
    selectors = re.findall(r"\b((?:vlm_|up\b)\w*)(?:\{([^}]*)\})?", query)
    assert selectors
    for name, matchers in selectors:
        labels = set(re.findall(r"(\w+)(?:=~|!~|!=|=)\"", matchers))
        if name == "up":
            assert labels <= {"job"}
        else:
            assert labels <= {*series[name].labels, "job", "instance"}, name


def test_errors_that_are_ours_are_all_named():
    """A client that left is not an error of ours, whatever its status would be."""
    ours = {code for code in ErrorCode if ERROR_CODES[code.value][0] >= 500}
    codes = {code.value for code in ours - {ErrorCode.CANCELLED}} | {"internal_error"}
    found = re.findall(r'outcome=~\\?"([a-z_|]+)\\?"', "\n".join(QUERIES))
    named = [set(outcomes.split("|")) - {"ok"} for outcomes in found]
    assert [outcomes for outcomes in named if "internal_error" in outcomes] == [codes] * 2


def test_panels_say_what_they_show_and_overlap_nowhere():
    assert all(panel["description"] for panel in PANELS)
    all_panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in all_panels}) == len(all_panels)
    cells = [
        (x, y)
        for panel in all_panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)), "panels overlap"
    assert max(x for x, _ in cells) == 23
