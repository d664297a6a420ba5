"""The examples of the page for contributors: each diff applies to the project, and what it adds works."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import engines.torch_backend  # noqa: F401 - before transformers, which imports torchvision
from engines.packages.checkpoint_files import make_tokenizer
from tests.integration.fleet_process import ROOT, Served, start_fleet

PAGE = (ROOT / "docs" / "contributing.md").read_text()
PACKAGES = ("gateway", "shared", "worker", "search", "deploy", "engines", "loadtest")


def diffs_of_page() -> list[str]:
    return re.findall(r"^```diff\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The project with every diff of the page."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copy(ROOT / "vlm.py", folder)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package)
    for diff in diffs_of_page():
        done = subprocess.run(
            ["git", "apply", "-"],
            cwd=folder, input=diff, text=True, capture_output=True,
            env={**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr + diff
    return folder


@pytest.fixture(scope="module")
def fleet(copy, tmp_path_factory) -> Iterator[Served]:
    """The copy's own, on the page's engine."""
    folder = tmp_path_factory.mktemp("fleet")
    served = start_fleet(folder, engine="parrot", cwd=copy, VLM_ENGINE__GREETING="hello:")
    yield served
    served.end()


def test_the_engine_answers_a_chat(fleet):
    with fleet.client() as client:
        messages = [{"role": "user", "content": "what is it?"}]
        answer = client.post("/v1/chat/completions", json={"model": "parrot", "messages": messages})
    assert answer.json()["choices"][0]["message"]["content"] == " hello: what is it?"


def test_the_api_answers_whole_streamed_and_with_an_error(fleet):
    body = {"model": "parrot", "prompt": "say it"}
    with fleet.client() as client:
        whole = client.post("/v1/echo", json=body)
        streamed = client.post("/v1/echo", json={**body, "stream": True})
        wrong = client.post("/v1/echo", json={"model": "parrot"})
        document = client.get("/openapi.json").json()
    assert whole.json()["text"] == " hello: say it"
    assert whole.json()["id"].startswith("echo-")
    events = [json.loads(data) for data in re.findall(r"^data: (.*)$", streamed.text, re.MULTILINE)]
    assert "".join(event["text"] for event in events) == " hello: say it"
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "prompt")
    assert "/v1/echo" in document["paths"]


def test_the_operator_is_found_tried_and_chosen(copy):
    code = (
        "import torch\n"
        "from engines.torch_backend.ops.registry import Site, choose\n"
        "ops = choose(Site(torch.device('cpu')))\n"
        "print(ops.chosen['double'], ops['double'](torch.ones(2)).tolist())\n"
    )
    done = run_in(copy, "-c", code)
    assert done.stdout.splitlines()[-1] == "adding [2.0, 2.0]", done.stderr


def test_the_family_is_served(copy, tmp_path):
    make_llama(tmp_path / "model")
    served = start_fleet(
        tmp_path / "data", "--model", str(tmp_path / "model"),
        engine="torch", cwd=copy, VLM_ENGINE__CPU_KERNELS="off",
    )  # fmt: skip
    try:
        body = {
            "model": "model",
            "messages": [{"role": "user", "content": "Say a word."}],
            "max_tokens": 5,
            "ignore_eos": True,
        }
        with served.client() as client:
            [model] = client.get("/v1/models").json()["data"]
            answer = client.post("/v1/chat/completions", json={**body, "model": model["id"]})
    finally:
        served.end()
    assert model["supports_images"] is False
    assert answer.json()["usage"]["completion_tokens"] == 5


def make_llama(directory: Path) -> None:
    """A small one at random, under the name of the page's family."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    path = directory / "config.json"
    path.write_text(path.read_text().replace("LlamaForCausalLM", "PlainLlamaForCausalLM"))
    make_tokenizer(320).save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def run_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )  # fmt: skip
