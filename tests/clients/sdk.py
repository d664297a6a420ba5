"""The tests that the sources of `openai` and `anthropic` bring, against a server: run by `make clients`.

    python sdk.py URL MODEL FOLDER     prints JSON: {client: {file: "yes" or what went wrong}}

They are generated, and name models of their own: on the way to the server each model becomes ours.
Many ask for things by made-up ids, or for what is not served: so many pass, of so many.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

URL, MODEL, FOLDER = sys.argv[1:]
_MODEL = re.compile(rb'("model"\s*:\s*)"[^"]*"')
TIMEOUT_S = 900  # of a file
_HOP = ("connection", "content-length", "host", "transfer-encoding")
#: The path behind the base URL, and the files of tests.
SUITES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "anthropic": ("", ("test_messages.py", "test_models.py")),
    "openai": ("/v1", ("chat/test_completions.py", "test_completions.py", "test_responses.py")),
}


class Renaming(BaseHTTPRequestHandler):
    """Sends each request on, for our model."""

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP}
        data = _MODEL.sub(rb'\1"%s"' % MODEL.encode(), body) or None
        request = urllib.request.Request(URL + self.path, data, headers, method=self.command)
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


def run(source: Path, files: list[str], base_url: str) -> dict[str, tuple[int, int]]:
    """Tests that passed, and all, of each file."""
    found: dict[str, tuple[int, int]] = {}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line"]
    for file in files:
        done = subprocess.run(
            [*command, f"tests/api_resources/{file}"],
            cwd=source,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            env={**os.environ, "TEST_API_BASE_URL": base_url},
        )
        assert "passed" in done.stdout, (done.stdout + done.stderr)[-500:]
        counts = {
            word: int(count) for count, word in re.findall(r"(\d+) (\w+)", done.stdout[-200:])
        }
        passed = counts.get("passed", 0)
        found[file] = (passed, passed + counts.get("failed", 0) + counts.get("error", 0))
        print(done.stdout[-8000:], file=sys.stderr)
    return found


def main() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Renaming)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base_url = f"http://127.0.0.1:{server.server_port}"
    told: dict[str, dict[str, str]] = {}
    for name, (suffix, files) in SUITES.items():
        [archive] = Path(FOLDER).glob(f"{name}-*.tar.gz")
        with tarfile.open(archive) as content:
            content.extractall(FOLDER, filter="data")
        source = archive.with_name(archive.name.removesuffix(".tar.gz"))
        results = told[f"tests of {source.name.replace('-', ' ')}"] = {}
        for file, (passed, count) in run(source, files, base_url + suffix).items():
            results[f"{file} {passed}/{count}"] = "yes"
    print(json.dumps(told))


if __name__ == "__main__":
    main()
