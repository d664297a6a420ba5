"""SSH signatures of package digests, checked against a file of allowed signers.

Source: OpenSSH, PROTOCOL.sshsig; ssh-keygen(1), ALLOWED SIGNERS.
"""

import shutil
import subprocess
from base64 import b64decode
from pathlib import Path
from tempfile import TemporaryDirectory

from shared.packages.manifest import digest_of
from shared.packages.store import PackageStore, StoreError

NAMESPACE = "vlm-fleet"
MAX_SIGNATURE_CHARS = 16 * 1024
#: Prefix of the file names of signatures that were verified before they were stored, one per signer's key.
_BY_KEY = "key-"
_MAX_UNVERIFIED = 16  # signatures stored by earlier releases, which did not verify them
_TIMEOUT_S = 20.0


class BadSignature(Exception):
    """No allowed signer has signed the package; the message gives the reason."""


def sign(key: Path, digest: str) -> str:
    """Sign a digest with an SSH key. If the key has a passphrase, ssh-keygen asks for it. Raises: BadSignature."""
    done = _run("-Y", "sign", "-f", str(key), "-n", NAMESPACE, stdin=digest, timeout_s=None)
    if done.returncode:
        raise BadSignature(f"{key} cannot sign: {_last_line(done.stderr)}")
    return done.stdout


def keep_signature(store: PackageStore, digest: str, signature: str, signers: Path) -> None:
    """Store a signature of one of `signers`, once per signer. Raises: BadSignature, StoreError."""
    if len(signature) > MAX_SIGNATURE_CHARS:
        raise BadSignature(f"the signature has more than {MAX_SIGNATURE_CHARS} characters")
    _check_file(signers)
    try:
        _verify(signature.encode(), digest, signers)
    except BadSignature as error:
        raise BadSignature(f"the package {digest} is refused: {error}") from None
    name = digest_of(_public_key(signature)).removeprefix("sha256:")[:32]
    store.put_if_absent(f"{signatures_key(digest)}/{_BY_KEY}{name}.sig", signature.encode())


def _public_key(signature: str) -> bytes:
    """The signer's key in a verified signature."""
    data = b64decode("".join(signature.split("-----")[2].split()))
    start = len(b"SSHSIG") + 8  # version and length
    return data[start : start + int.from_bytes(data[start - 4 : start])]


def signatures_key(digest: str) -> str:
    """The folder of a package's signatures."""
    return f"signatures/{digest.removeprefix('sha256:')}"


def check_signed(store: PackageStore, digest: str, signers: Path) -> str:
    """Check that one of `signers`, an `allowed_signers` file of OpenSSH, has signed. Returns the signer.

    Raises: BadSignature, StoreError.
    """
    _check_file(signers)
    keys = store.list(signatures_key(digest))
    by_key = [key for key in keys if key.rpartition("/")[2].startswith(_BY_KEY)]
    old = [key for key in keys if key not in by_key]
    problem = "it has no signature; deploy it with --sign KEY"
    for key in by_key + old[:_MAX_UNVERIFIED]:
        data = store.get(key) or b""
        try:
            return _verify(data[: MAX_SIGNATURE_CHARS + 1], digest, signers)
        except BadSignature as error:
            problem = str(error)
    raise BadSignature(f"the package {digest} is refused: {problem}")


def _check_file(signers: Path) -> None:
    """Raises: BadSignature if the file of allowed signers does not exist."""
    if not signers.is_file():
        raise BadSignature(f"the file of allowed signers {signers} does not exist")


def _verify(signature: bytes, digest: str, signers: Path) -> str:
    """Verify a signature. Returns the signer. Raises: BadSignature."""
    with TemporaryDirectory(prefix="vlm-signature-") as folder:
        file = Path(folder) / "signature"
        file.write_bytes(signature)
        known = ("-s", str(file), "-f", str(signers))
        found = _run("-Y", "find-principals", *known)
        names = found.stdout.splitlines()
        if found.returncode or not names:
            raise BadSignature(f"no allowed signer has signed it: {_last_line(found.stderr)}")
        problem = ""
        for name in names:
            checked = _run("-Y", "verify", "-n", NAMESPACE, "-I", name, *known, stdin=digest)
            if checked.returncode == 0:
                return name
            problem = _last_line(checked.stderr or checked.stdout)
    raise BadSignature(f"its signature is wrong: {problem}")


def _run(
    *arguments: str, stdin: str = "", timeout_s: float | None = _TIMEOUT_S
) -> "subprocess.CompletedProcess[str]":
    program = shutil.which("ssh-keygen")
    if program is None:
        raise StoreError("signatures need ssh-keygen, which is not installed: install OpenSSH")
    try:
        return subprocess.run(
            [program, *arguments], input=stdin, capture_output=True, timeout=timeout_s,
            check=False, text=True, errors="replace",
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StoreError(f"ssh-keygen does not answer: {error}") from None


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:200] if lines else "ssh-keygen printed no reason"
