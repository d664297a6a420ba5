"""Digest of a checkpoint's content."""

import hashlib
from pathlib import Path

_DECIDES = ("*.safetensors", "*.json", "*/*.json", "*.txt", "*.model")
_PIECE = 1024 * 1024


def digest_of(directory: Path) -> str:
    """SHA-256 over names and hashes of the files that determine the output, in order of names."""
    whole = hashlib.sha256()
    paths = {path for pattern in _DECIDES for path in directory.glob(pattern) if path.is_file()}
    for name, path in sorted((str(path.relative_to(directory)), path) for path in paths):
        whole.update(f"{name}\0{_hash(path)}\n".encode())
    return whole.hexdigest()


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()
