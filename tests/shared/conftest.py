"""A bucket of moto, an S3-compatible server."""

import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from uuid import uuid4

import pytest

MOTO = shutil.which("moto_server") or os.environ.get("MOTO_SERVER", "")


@pytest.fixture(scope="module")
def s3_url() -> Iterator[str]:
    """The URL of a folder in it; `make store-test` installs the server."""
    pytest.importorskip("obstore")
    if not MOTO:
        pytest.skip("no moto_server: make store-test")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [MOTO, "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    patch = pytest.MonkeyPatch()
    for name, value in {
        "AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true", "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1",
    }.items():  # fmt: skip
        patch.setenv(name, value)
    try:
        for _ in range(600):
            try:
                request = urllib.request.Request(f"{url}/packages", method="PUT")
                urllib.request.urlopen(request, timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"s3://packages/{uuid4().hex}"
    finally:
        patch.undo()
        server.send_signal(signal.SIGTERM)
        server.wait()
