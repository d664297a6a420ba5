"""Uploads of packages through the gateway: permissions, refusals, and resumed uploads."""

import asyncio
import itertools
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest

from deploy.commands import GatewayStore, upload
from deploy.pack import pack
from shared.gateway_client import Client
from shared.packages.manifest import digest_of
from shared.packages.signature import sign
from shared.packages.store import PIECE_BYTES, PackageStore, open_store, read_manifest
from tests.factories_gateway import RunningGateway
from tests.waiting import until

DEPLOY = {"authorization": "Bearer may-deploy"}


class Uploads:
    """A gateway, its store, and a client that runs in another thread."""

    def __init__(self, gateway: RunningGateway, store: PackageStore) -> None:
        self.store = store
        self.http = gateway.client
        self.client = Client(str(gateway.client.base_url), "may-deploy")

    async def upload(self, folder: Path) -> tuple[str, int]:
        """Uploads a package; returns its digest and the number of files that were sent."""

        def run() -> tuple[str, int]:
            packed = pack(str(folder), engine={"kind": "mock"})
            target = GatewayStore(self.client)
            target.begin(packed.manifest)
            return packed.manifest.digest, upload(packed, target)

        return await asyncio.to_thread(run)

    async def put(self, data: bytes, digest: str = "", **headers: str) -> httpx.Response:
        url = f"/v1/blobs/{digest or digest_of(data)}"
        return await self.http.put(url, content=data, headers={**DEPLOY, **headers})


@pytest.fixture
def run(fleet, tmp_path):
    @asynccontextmanager
    async def run(body_timeout_s: float = 30.0, **deploy: str) -> AsyncIterator[Uploads]:
        keys = ("may-deploy", "deploys-too")
        gateway = {"deploy_keys": keys, "body_timeout_s": body_timeout_s}
        deploy = {"store": f"file://{tmp_path}/store", **deploy}
        async with fleet.gateway(gateway=gateway, deploy=deploy) as running:
            uploads = Uploads(running, open_store(deploy["store"]))
            try:
                yield uploads
            finally:
                uploads.client.close()

    return run


@pytest.fixture
async def uploads(run) -> AsyncIterator[Uploads]:
    async with run() as uploads:
        yield uploads


def make_folder(folder: Path, version: int) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(f'{{"version": {version}}}')
    (folder / "empty").write_bytes(b"")
    for number in range(6):
        (folder / f"weights-{number}.safetensors").write_bytes(bytes([number]) * 100_000)
    return folder


async def test_only_the_changed_file_of_a_package_is_sent(uploads, tmp_path):
    first, num_sent = await uploads.upload(make_folder(tmp_path / "package", 1))
    assert num_sent == 8
    manifest = read_manifest(uploads.store, first)
    assert all(uploads.store.size(layer.digest) == layer.size for layer in manifest.layers)
    second, num_sent = await uploads.upload(make_folder(tmp_path / "package", 2))
    assert (num_sent, first != second) == (1, True)
    again, num_sent = await uploads.upload(tmp_path / "package")
    assert (again, num_sent) == (second, 0)
    deployed = await uploads.http.put("/v1/applications/n", json={"digest": second}, headers=DEPLOY)
    assert deployed.status_code == 202, deployed.text


async def test_an_interrupted_upload_is_resumed(uploads):
    """If the connection closes within the body, the gateway keeps the bytes; the next upload sends the missing ones."""
    data = os.urandom(3 * PIECE_BYTES)
    digest, size, never = digest_of(data), len(data), asyncio.Event()
    sending = asyncio.create_task(send_paced(uploads, data, 2 * PIECE_BYTES, never.wait))
    await until(lambda: uploads.store.partial(digest) >= PIECE_BYTES)
    sending.cancel()
    await asyncio.wait({sending})

    async def send_rest() -> httpx.Response | None:
        found = await uploads.http.head(f"/v1/blobs/{digest}", headers=DEPLOY)
        start = int(found.headers["upload-offset"])
        if start < PIECE_BYTES:
            return None
        rest = f"bytes {start}-{size - 1}/{size}"
        sent = await uploads.put(data[start:], digest, **{"content-range": rest})
        return None if sent.status_code == 409 else sent

    sent = await until(send_rest)  # once the gateway has noticed that the first client left
    assert sent.status_code == 201, sent.text
    assert uploads.store.size(digest) == size


async def send_paced(
    uploads: Uploads,
    data: bytes,
    piece: int,
    pause: Callable[[], Awaitable[object]],
    key: str = "may-deploy",
):
    """Uploads a blob in pieces with pauses between them."""

    async def pieces():
        for start in range(0, len(data), piece):
            if start:
                await pause()
            yield data[start : start + piece]

    headers = {"authorization": f"Bearer {key}", "content-length": str(len(data))}
    url = f"/v1/blobs/{digest_of(data)}"
    return await uploads.http.put(url, content=pieces(), headers=headers, timeout=60)


async def test_an_upload_can_take_longer_than_the_body_timeout(run):
    """The server closes a silent body one second after `body_timeout_s`."""
    async with run(body_timeout_s=1.0) as uploads:
        data = os.urandom(2_600_000)
        sent = await send_paced(uploads, data, 100_000, partial(asyncio.sleep, 0.1))
        assert sent.status_code == 201, sent.text
        assert uploads.store.size(digest_of(data)) == len(data)


async def test_an_upload_below_the_minimum_rate_is_cut(run):
    async with run(body_timeout_s=0.5) as uploads:
        reader, writer = await asyncio.open_connection("127.0.0.1", uploads.http.base_url.port)
        head = f"PUT /v1/blobs/{digest_of(b'')} HTTP/1.1\r\nhost: localhost\r\n"
        head += f"authorization: {DEPLOY['authorization']}\r\ncontent-length: 1000\r\n\r\n"
        writer.write(head.encode())
        answer = asyncio.create_task(reader.readline())
        for _ in range(1000):
            if answer.done():
                break
            writer.write(b"x")
            await asyncio.wait([answer], timeout=0.05)
        writer.close()
        assert answer.result().startswith(b"HTTP/1.1 408 ")


async def test_slow_uploads_of_a_key_are_bounded_and_do_not_block_others(run):
    async with run(body_timeout_s=10.0) as uploads:
        go_on = asyncio.Event()
        data = [os.urandom(200_000) for _ in range(8)]
        slow = [
            asyncio.create_task(send_paced(uploads, each, 199_999, go_on.wait)) for each in data
        ]
        await asyncio.wait(slow, timeout=3.0)  # four of the eight are refused
        other = await send_paced(uploads, b"data", 4, go_on.wait, key="deploys-too")
        assert other.status_code == 201
        go_on.set()
        sent = [await each for each in slow]
        statuses = [each.status_code for each in sent]
        assert (statuses.count(201), statuses.count(429)) == (4, 4), statuses
        refused = sent[statuses.index(429)]
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert refused.headers["retry-after"]


async def test_an_invalid_blob_is_refused_by_field(uploads):
    data, other = b"data", digest_of(b"other")
    wrong = await uploads.put(data, other)
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "digest_mismatch")
    assert uploads.store.size(other) is None
    assert (await uploads.put(data, "sha256:..%2F..%2Fx")).status_code in (400, 404)
    for value in ("bytes 1-2/3", "bytes 0-3/9", "lines 0-3/4", "bytes 9-3/4"):
        answer = await uploads.put(data, **{"content-range": value})
        assert (answer.status_code, "Content-Range" in answer.text) == (400, True), value
    late = await uploads.put(data, **{"content-range": "bytes 96-99/100"})
    assert late.status_code == 409
    kind = {**DEPLOY, "content-type": "application/vnd.oci.image.manifest.v1+json"}
    for content in (b"{", b"[]", b"x" * 100):
        planned = await uploads.http.post("/v1/packages", content=content, headers=kind)
        assert (planned.status_code, "manifest" in planned.text) == (400, True)


def junk_before(signature: str) -> list[str]:
    """Returns 16 texts whose digests sort before that of the signature."""
    texts = (f"junk {number}" for number in itertools.count())
    most = digest_of(signature.encode())
    return list(itertools.islice((t for t in texts if digest_of(t.encode()) < most), 16))


@pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="no ssh-keygen")
async def test_a_package_that_no_allowed_signer_signed_is_refused(run, tmp_path):
    key, signers = tmp_path / "key", tmp_path / "allowed"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    signers.write_text(f"me@example.com {key.with_suffix('.pub').read_text()}")
    async with run(allowed_signers=str(signers)) as uploads:
        digest, _ = await uploads.upload(make_folder(tmp_path / "package", 1))
        good = sign(key, digest)
        for junk in junk_before(good):
            body = {"digest": digest, "signature": junk}
            answer = await uploads.http.put("/v1/applications/junk", json=body, headers=DEPLOY)
            assert answer.status_code == 400
        for signature, status in ((None, 400), (good[:90], 400), (good, 202), (None, 200)):
            body = {"digest": digest, **({"signature": signature} if signature else {})}
            answer = await uploads.http.put("/v1/applications/n", json=body, headers=DEPLOY)
            assert answer.status_code == status, answer.text
            if status == 400:
                error = answer.json()["error"]
                assert (error["code"], error["param"]) == ("invalid_signature", "signature")
                assert digest in error["message"]
