"""Chooses an installed server for a model when the engine is `auto`."""

import logging
import shutil
import struct
from functools import cache
from pathlib import Path

from packaging.version import InvalidVersion, Version

#: Tested versions of vLLM: from, and before.
VLLM_VERSIONS = ("0.32", "0.34")
#: Architectures of GGUF files that the torch engine reads.
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
GPU_DRIVER = Path("/proc/driver/nvidia/version")
_HEADER_BYTES = 64 * 1024
_ARCHITECTURE = b"general.architecture"

logger = logging.getLogger(__name__)


@cache
def find_server(model: str) -> str | None:
    """`llama-server` or `vllm` if it suits model and machine better than the torch engine, else None."""
    if model.endswith(".gguf"):
        architecture = _read_architecture(Path(model).expanduser())
        if architecture is None or architecture in GGUF_ARCHITECTURES:
            return None
        if shutil.which("llama-server") is None:
            return None
        logger.info("engine llama-server: the torch engine does not read %s", architecture)
        return "llama-server"
    version = _vllm_version() if GPU_DRIVER.exists() else None
    if version is None:
        return None
    first, last = map(Version, VLLM_VERSIONS)
    if not first <= version < last:
        logger.info("engine torch: vLLM %s is not from %s and below %s", version, first, last)
        return None
    logger.info("engine vllm: vLLM %s is installed and there is a GPU", version)
    return "vllm"


def _read_architecture(file: Path) -> str | None:
    """`general.architecture` of a GGUF file, which writers put first."""
    try:
        with file.open("rb") as opened:
            header = opened.read(_HEADER_BYTES)
    except OSError:
        return None
    place = header.find(_ARCHITECTURE) + len(_ARCHITECTURE)
    if not header.startswith(b"GGUF") or place < len(_ARCHITECTURE):
        return None
    kind, length = struct.unpack_from("<IQ", header, place)
    name = header[place + 12 : place + 12 + length]
    return name.decode(errors="replace") if kind == 8 and length < 100 else None


def _vllm_version() -> Version | None:
    """The version of the `vllm` program, from its environment's metadata: running it takes seconds."""
    program = shutil.which("vllm")
    if program is None:
        return None
    packages = Path(program).parent.parent.glob("lib/python*/site-packages/vllm-*.dist-info")
    for folder in packages:
        try:
            return Version(folder.name.removeprefix("vllm-").removesuffix(".dist-info"))
        except InvalidVersion:
            continue
    return None
