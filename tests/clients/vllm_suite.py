"""vLLM's HTTP tests, from its sources on PyPI, against a fleet with the mock engine.

`vllm_stub` replaces vLLM within them. The mock generates no sense but follows constraints, so tests of the wording
fail. Passed tests are counted by file, and a file with fewer passed tests than before is reported.
"""

import json
import os
import re
import subprocess
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.clients.programs import HOME, SKIPPED, NotHad, Told, install
from tests.integration.fleet_process import start_fleet

HERE = Path(__file__).parent
VERSION = "0.33.0"
TIMEOUT_S = 600
MOCK = "VLM_ENGINE__MOCK__"
#: By settings of the mock: the files, and the minimum number of passed tests.
SUITES: tuple[tuple[Mapping[str, Any], Mapping[str, int]], ...] = (
    (
        {f"{MOCK}NUM_OUTPUT_TOKENS": "200"},
        {
            "anthropic/test_messages.py": 6,
            "openai/test_return_token_ids.py": 1,
            "openai/chat_completion/test_chat.py": 23,
            "openai/chat_completion/test_chat_completion.py": 4,
            "openai/chat_completion/test_chat_echo.py": 1,
            "openai/chat_completion/test_chat_logit_bias_validation.py": 2,
            "openai/chat_completion/test_logprob_token_ids.py": 1,
            "openai/completion/test_completion.py": 14,
            "openai/responses/test_basic.py": 0,
            "openai/responses/test_stateful.py": 0,
            "serve/tokenize/test_tokenization.py": 2,
            "serve/tokenize/test_tokenize_then_chat_vlm.py": 1,
            "multimodal/openai/chat_completion/test_vision.py": 10,
            "multimodal/openai/responses/test_image.py": 9,
        },
    ),
    (
        {f"{MOCK}NUM_OUTPUT_TOKENS": "60", f"{MOCK}NUM_REASONING_TOKENS": "20"},
        {
            "openai/chat_completion/test_completion_with_function_calling.py": 8,
            "openai/chat_completion/test_include_reasoning.py": 6,
            "openai/chat_completion/test_thinking_token_budget.py": 4,
            "openai/responses/test_function_call.py": 11,
            "openai/responses/test_simple.py": 9,
        },
    ),
)
#: Model names in the sources, and those that are not constants.
_MODEL = re.compile(r'^\w*MODEL\w* = "([^"]+)"', re.MULTILINE)
_OTHERS = ("claude-3-7-sonnet-latest", "zephyr-lora")
#: pip requests the metadata of a source; vLLM's own build backend would need torch for it.
_BACKEND = f"""
from pathlib import Path

def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    folder = Path(metadata_directory) / "vllm-{VERSION}.dist-info"
    folder.mkdir()
    text = "Metadata-Version: 2.1\\nName: vllm\\nVersion: {VERSION}\\n"
    (folder / "METADATA").write_text(text)
    return folder.name
"""


def ask_suite(python: Path) -> Told:
    """Returns the number of passed tests by file."""
    name = f"tests of vllm {VERSION}"
    try:
        sources = fetch(python)
    except NotHad as error:
        return {name: {"all": f"{SKIPPED}{error}"}}
    told: dict[str, str] = {}
    for variables, files in SUITES:
        with tempfile.TemporaryDirectory() as folder:
            found = _run(python, sources, Path(folder), files, variables)
        for file, least in files.items():
            passed, total = found.get(file, (0, 0))
            told[f"{file} {passed} of {total}"] = (
                "yes" if passed >= least and total else f"{least} passed before"
            )
    return {name: told}


def fetch(python: Path) -> Path:
    """Downloads vLLM's tests; returns their folder. Raises: NotHad."""
    folder = HOME / f"vllm-{VERSION}"
    if folder.exists():
        return folder
    with tempfile.TemporaryDirectory() as part:
        backend = Path(part) / "setuptools"
        backend.mkdir()
        (backend / "__init__.py").touch()
        (backend / "build_meta.py").write_text(_BACKEND)
        command = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "vllm"]
        install(
            [*command, "--no-build-isolation", "--dest", part, f"vllm=={VERSION}"], PYTHONPATH=part
        )
        [archive] = Path(part).glob("vllm-*.tar.gz")
        root = f"vllm-{VERSION}/tests/"
        with tarfile.open(archive) as content:
            wanted = (f"{root}entrypoints/", f"{root}__init__.py")  # not the root's conftest.py
            members = [each for each in content if each.name.startswith(wanted)]
            content.extractall(part, members, filter="data")
        (Path(part) / f"vllm-{VERSION}").rename(folder)
    return folder


def _run(
    python: Path,
    sources: Path,
    folder: Path,
    files: Mapping[str, int],
    variables: Mapping[str, Any],
) -> dict[str, tuple[int, int]]:
    """Returns by file the number of passed tests, and of all tests."""
    paths = [sources / "tests" / "entrypoints" / file for file in files]
    names = {name for path in paths for name in _MODEL.findall(path.read_text())}
    aliases = dict.fromkeys(sorted(names.union(_OTHERS)), "mock")
    options: dict[str, Any] = {
        "VLM_GATEWAY__ALIASES": json.dumps(aliases),
        f"{MOCK}DECODE_S": "0.0005",
    }
    report = folder / "report.xml"
    command = [python, "-m", "pytest", "-q", "-n", "0", "-p", "vllm_stub", "-p", "no:cacheprovider"]
    command += ["-c", os.devnull]  # ignores the options of this repository
    command += ["--continue-on-collection-errors", f"--rootdir={sources}", f"--junitxml={report}"]
    with start_fleet(folder, **options, **variables) as served:
        environment = {"VLM_URL": served.url, "PYTHONPATH": f"{HERE}{os.pathsep}{sources}"}
        done = subprocess.run(
            [*command, *paths],
            cwd=sources,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    assert done.returncode in (0, 1), (done.stdout + done.stderr)[-500:]
    counts: dict[str, tuple[int, int]] = dict.fromkeys(files, (0, 0))
    for case in ElementTree.parse(report).iter("testcase"):
        module = case.attrib["classname"].removeprefix("tests.entrypoints.")
        file = module.replace(".", "/") + ".py"
        if file in counts and case.find("skipped") is None:
            passed, total = counts[file]
            failed = case.find("failure") is not None or case.find("error") is not None
            counts[file] = (passed + (not failed), total + 1)
    return counts
