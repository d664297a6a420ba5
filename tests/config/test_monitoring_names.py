"""Queries of dashboard and alerts name metrics, labels and outcomes of the fleet."""

import json
import re
from pathlib import Path

import pytest
import yaml

from gateway.http.error_codes import ERROR_CODES
from shared.protocol import ErrorCode
from shared.telemetry.metrics import METRICS

ROOT = Path(__file__).parent.parent.parent
PANELS = json.loads((ROOT / "config/grafana/dashboards/vlm-fleet.json").read_text())["panels"]
RULES = [
    rule
    for group in yaml.safe_load((ROOT / "config/prometheus/alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
QUERIES = [target["expr"] for panel in PANELS for target in panel.get("targets", [])]
QUERIES += [rule["expr"] for rule in RULES]
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}


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
    shown = [panel for panel in PANELS if panel["type"] != "row"]
    assert all(panel["description"] for panel in shown)
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    cells = [
        (x, y)
        for panel in PANELS
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)), "panels overlap"
    assert max(x for x, _ in cells) == 23
