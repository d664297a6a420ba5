"""A bucket on moto, an S3-compatible server."""

import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from uuid import uuid4

import pytest

from loadtest.fleet import free_port
from tests.waiting import wait_for

MOTO = shutil.which("moto_server") or os.environ.get("MOTO_SERVER", "")


@pytest.fixture(scope="module")
def s3_url() -> Iterator[str]:
    """The URL of a folder in the bucket. `make store-test` installs the server."""
    pytest.importorskip("obstore")
    if not MOTO:
        pytest.skip("no moto_server: make store-test")
    port = free_port()
    url = f"http://127.0.0.1:{port}"

    def has_bucket() -> bool:
        with suppress(OSError):
            request = urllib.request.Request(f"{url}/packages", method="PUT")
            urllib.request.urlopen(request, timeout=5).close()
            return True
        return False

    command = [MOTO, "-p", str(port)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **quiet) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true", "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1",
        }.items():  # fmt: skip
            patch.setenv(name, value)
        try:
            wait_for(has_bucket, 60)
            yield f"s3://packages/{uuid4().hex}"
        finally:
            server.terminate()
