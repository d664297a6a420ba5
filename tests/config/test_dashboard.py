"""The dashboard and the alerts use existing metrics."""

import json
import re
from pathlib import Path

import pytest
import yaml

from gateway.http.error_codes import ERROR_CODES
from shared.protocol import ErrorCode
from shared.telemetry.metrics import METRICS

CONFIG = Path(__file__).parents[2] / "config"
GRAFANAS_VARIABLES = {"__rate_interval"}
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


@pytest.mark.parametrize("panel", PANELS, ids=TITLES)
def test_queries_use_existing_variables_and_labels(panel):
    known = {each["name"] for each in DASHBOARD["templating"]["list"]} | GRAFANAS_VARIABLES
    for target in panel["targets"]:
        assert set(re.findall(r"\$\{?(\w+)", target["expr"])) <= known
        kept = set(", ".join(re.findall(r"by \(([^)]*)\)", target["expr"])).split(", "))
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= kept


@pytest.mark.parametrize("query", QUERIES)
def test_queries_name_existing_series_and_labels(query):
    series = {m.name + suffix: m for m in METRICS for suffix in SUFFIXES[m.kind]}
    selectors = re.findall(r"\b((?:vlm_|up\b)\w*)(?:\{([^}]*)\})?", query)
    assert selectors
    for name, matchers in selectors:
        labels = set(re.findall(r"(\w+)(?:=~|!~|!=|=)\"", matchers))
        if name == "up":
            assert labels <= {"job"}
        else:
            assert labels <= {*series[name].labels, "job", "instance"}, name


def test_all_server_errors_are_named():
    """Errors of clients that disconnected do not count, although their status is above 500."""
    ours = {code for code in ErrorCode if ERROR_CODES[code.value][0] >= 500}
    codes = {code.value for code in ours - {ErrorCode.CANCELLED}} | {"internal_error"}
    found = re.findall(r'outcome=~\\?"([a-z_|]+)\\?"', "\n".join(QUERIES))
    named = [set(outcomes.split("|")) - {"ok"} for outcomes in found]
    assert [outcomes for outcomes in named if "internal_error" in outcomes] == [codes] * 2
