"""Runs the tests in the sources of `openai` and `anthropic` against a server, for `make clients`.

    python sdk.py URL MODEL FOLDER      prints JSON: {client: {file: "yes" or what went wrong}}

The tests expect a mock server and name its models, files and responses; a proxy replaces these by existing ones.
`EXPECTED` has the tests that are expected to fail, with reasons. Other failures, and expected ones that pass, are
reported.
"""

import fnmatch
import json
import os
import re
import subprocess
import sys
import tarfile
import threading
import urllib.error
import urllib.request
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from openai import OpenAI

URL, MODEL, FOLDER = sys.argv[1:]
TIMEOUT_S = 900  # for the tests of one package
_HOP = ("connection", "content-length", "host", "transfer-encoding")
_MODEL = re.compile(rb'("model"\s*:\s*)"[^"]*"')
_FILE = re.compile(rb'("input_file_id"\s*:\s*)"[^"]*"')
_REFUSED = "Error code: 4"  #: in the error of a test that is expected to fail
_PATH = re.compile(r"/(models|responses|files|batches)/(?!input_tokens|compact)([^/?]+)")

EVERY_PARAMETER = "requests with every parameter, set to placeholders"
#: By package and file: reasons of expected failures, and the tests, without `test_method_` and similar prefixes.
EXPECTED: Mapping[str, Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "anthropic": {
        "test_messages.py": {EVERY_PARAMETER: ("create_with_all_params_*",)},
        "test_models.py": {},
    },
    "openai": {
        "chat/test_completions.py": {
            EVERY_PARAMETER: ("create_with_all_params_*",),
            "stored chat completions are not supported": (
                "retrieve", "update", "list", "list_with_all_params", "delete",
            ),
        },
        "test_completions.py": {EVERY_PARAMETER: ("create_with_all_params_*",)},
        "test_responses.py": {
            EVERY_PARAMETER: ("create_with_all_params_*", "retrieve_with_all_params_*"),
            "stored responses are not streamed": ("retrieve_overload_2",),
            "requests without a model": ("create_overload_*",),
            "responses cannot be cancelled by id, or compacted": ("cancel", "compact*"),
        },
        "responses/test_input_items.py": {EVERY_PARAMETER: ("list_with_all_params",)},
        "responses/test_input_tokens.py": {
            EVERY_PARAMETER: ("count_with_all_params",),
            "requests without a model": ("count",),
        },
        "test_models.py": {"models cannot be deleted": ("delete",)},
        "test_files.py": {
            EVERY_PARAMETER: ("create_with_all_params", "list_with_all_params"),
            "files of assistants need a search process": ("create",),
        },
        "test_batches.py": {EVERY_PARAMETER: ("list_with_all_params",)},
    },
}  # fmt: skip
#: The part of the API's path that the base URL includes.
SUFFIXES = {"anthropic": "", "openai": "/v1"}


def make(kind: str) -> str:
    """Creates an object for this kind of path; returns its ID."""
    client = OpenAI(base_url=f"{URL}/v1", max_retries=0)
    if kind == "models":
        return MODEL
    if kind == "responses":
        return client.responses.create(model=MODEL, input="a", max_output_tokens=16).id
    if kind == "files":
        body = {"model": MODEL, "input": "a", "max_output_tokens": 16}
        line = {"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": body}
        return client.files.create(file=json.dumps(line).encode(), purpose="batch").id
    return client.batches.create(
        input_file_id=make("files"), endpoint="/v1/responses", completion_window="24h"
    ).id


class Renaming(BaseHTTPRequestHandler):
    """Forwards each request with the names of existing objects."""

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP}
        data = _MODEL.sub(rb'\1"%s"' % MODEL.encode(), body) or None
        if data is not None and _FILE.search(data):
            data = _FILE.sub(rb'\1"%s"' % make("files").encode(), data)
        path = _PATH.sub(lambda found: f"/{found[1]}/{make(found[1])}", self.path)
        request = urllib.request.Request(URL + path, data, headers, method=self.command)
        try:
            answer = urllib.request.urlopen(request, timeout=60)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            said = answer.read()
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            if name.lower() not in _HOP:
                self.send_header(name, value)
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    do_GET = do_POST = do_DELETE = _pass_on

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def run(source: Path, files: list[str], base_url: str) -> dict[str, dict[str, str | None]]:
    """Returns the error of each test by file, or None."""
    report = source.resolve() / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, f"--junitxml={report}", *(f"tests/api_resources/{file}" for file in files)],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, "TEST_API_BASE_URL": base_url},
    )
    assert done.returncode in (0, 1), (done.stdout + done.stderr)[-500:]
    found: dict[str, dict[str, str | None]] = {file: {} for file in files}
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is not None:
            continue
        # The name of a test without a class contains no class.
        module, _, group = case.attrib["classname"].partition(".Test")
        file = module.removeprefix("tests.api_resources.").replace(".", "/") + ".py"
        wrong = [case.find("failure"), case.find("error")]
        told = [each.get("message", "failed") for each in wrong if each is not None]
        found[file][f"{group}.{case.attrib['name']}"] = told[0] if told else None
    return found


def judge(results: Mapping[str, str | None], expected: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Describes the unexpected results."""
    told = []
    for name, wrong in results.items():
        reason = why(name, expected)
        if wrong and not (reason and _REFUSED in wrong):
            told.append(f"{name}: {wrong.splitlines()[0]}"[:300])
        if reason and not wrong:
            told.append(f"{name} passes, though: {reason}")
    return told


def why(name: str, expected: Mapping[str, tuple[str, ...]]) -> str | None:
    """Returns the reason why a test is expected to fail, or None."""
    what = re.sub(r".*\.test_(method_|raw_response_|streaming_response_)?|\[.*", "", name)
    for reason, patterns in expected.items():
        if any(fnmatch.fnmatch(what, pattern) for pattern in patterns):
            return reason
    return None


def describe(results: Mapping[str, str | None], expected: Mapping[str, tuple[str, ...]]) -> str:
    """Returns how many tests passed, and why others did not."""
    passed = sum(wrong is None for wrong in results.values())
    reasons = Counter(why(name, expected) for name, wrong in results.items() if wrong)
    others = "; ".join(f"{count}: {reason}" for reason, count in reasons.items() if reason)
    return f"{passed} of {len(results)}" + (f" ({others})" if others else "")


def main() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Renaming)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base_url = f"http://127.0.0.1:{server.server_port}"
    told: dict[str, dict[str, str]] = {}
    for name, suites in EXPECTED.items():
        [archive] = Path(FOLDER).glob(f"{name}-*.tar.gz")
        with tarfile.open(archive) as content:
            content.extractall(FOLDER, filter="data")
        source = archive.with_name(archive.name.removesuffix(".tar.gz"))
        found = run(source, list(suites), base_url + SUFFIXES[name])
        told[f"tests of {source.name.replace('-', ' ')}"] = {
            f"{file} {describe(found[file], expected)}": "\n".join(judge(found[file], expected))
            or "yes"
            for file, expected in suites.items()
        }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
