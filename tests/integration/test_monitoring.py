"""Prometheus accepts its configuration, alerts fire as expected, and every query of the dashboard parses.

`tests/config/test_dashboard.py` tests that queries name existing series and labels.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.integration.fleet_process import ROOT

CONFIG = ROOT / "config" / "prometheus"
DASHBOARD = json.loads((ROOT / "config/grafana/dashboards/vlm-fleet.json").read_text())


def promtool(*arguments: str | Path) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    done = subprocess.run([program, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("words", ["test rules alerts_test.yml", "check config prometheus.yml"])
def test_alerts_fire_as_expected_and_the_configuration_is_valid(words):
    *command, file = words.split()
    promtool(*command, CONFIG / file)


def test_every_query_of_the_dashboard_parses(tmp_path):
    shown = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    assert len(shown) > 20
    asked = [query.replace("$__rate_interval", "4s").replace("$model", ".*") for query in shown]
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(asked)]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    promtool("check", "rules", file)
