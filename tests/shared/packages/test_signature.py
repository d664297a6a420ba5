"""Package signatures: gateway and node refuse packages without a signature of an allowed signer."""

import shutil
import subprocess
from pathlib import Path

import pytest

from shared.packages.signature import (
    BadSignature,
    check_signed,
    keep_signature,
    sign,
    signatures_key,
)
from shared.packages.store import FileStore
from tests.worker.node.test_install import FILES, add
from worker.node.cache import Cache
from worker.node.install import InstallError, install

pytestmark = pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="no ssh-keygen")


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Path:
    """A folder with two keys; only `known` is allowed to sign."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("known", "stranger"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", folder / name]
        subprocess.run(command, check=True)
    public = (folder / "known.pub").read_text()
    (folder / "allowed").write_text(f'release@example.com namespaces="vlm-fleet" {public}')
    return folder


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "store")


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        (None, None, "has no signature"),
        ("stranger", None, "no allowed signer"),
        ("known", lambda text: text[: len(text) // 2], "no allowed signer"),
        ("known", lambda text: "", "no allowed signer"),
        ("other digest", None, "wrong"),
    ],
)
def test_bad_signatures_are_refused_by_a_node(store, keys, tmp_path, name, damage, says):
    digest = add(store, FILES)
    if name is not None:
        signed = "sha256:" + 64 * "0" if name == "other digest" else digest
        text = sign(keys / ("stranger" if name == "stranger" else "known"), signed)
        text = damage(text) if damage else text
        with pytest.raises(BadSignature, match=rf"{digest} is refused: .*{says}"):
            keep_signature(store, digest, text, keys / "allowed")
        assert not store.list(signatures_key(digest))
        # stored by an earlier release, which did not verify signatures
        store.put_if_absent(f"{signatures_key(digest)}/0.sig", text.encode())
    with pytest.raises(InstallError, match=rf"{digest} is refused: .*{says}"):
        install(store, digest, Cache(tmp_path / "cache"), signers=keys / "allowed")
    assert not (tmp_path / "cache").exists()
    install(store, digest, Cache(tmp_path / "cache"))  # without required signatures


def test_unverified_signatures_of_an_earlier_release_block_nothing(store, keys, tmp_path):
    """The signed package is installed, and its signer is reported."""
    digest = add(store, FILES)
    for number in range(16):
        store.put_if_absent(f"{signatures_key(digest)}/{number:016d}.sig", b"junk")
    for key in ("known", "known"):
        keep_signature(store, digest, sign(keys / key, digest), keys / "allowed")
    assert len(store.list(signatures_key(digest))) == 17
    assert check_signed(store, digest, keys / "allowed") == "release@example.com"
    install(store, digest, Cache(tmp_path / "cache"), signers=keys / "allowed")


def test_missing_keys_missing_signers_and_long_signatures_are_refused(store, keys, tmp_path):
    digest = add(store, FILES)
    with pytest.raises(BadSignature, match="cannot sign"):
        sign(tmp_path / "none", digest)
    with pytest.raises(BadSignature, match="does not exist"):
        check_signed(store, digest, tmp_path / "none")
    with pytest.raises(BadSignature, match="characters"):
        keep_signature(store, digest, "x" * 20_000, keys / "allowed")
