"""The environments of the peers: llama.cpp built from its published package, and embedding engines.

Our own environment is not changed. llama.cpp's environment also includes our packages, to read checkpoints with torch.
"""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

LLAMA_CPP_VERSION = "0.3.36"
#: Packages by maker. The embedding engines use one version of torch. Infinity's last release needs older transformers.
_PACKAGES = {
    "llama.cpp": (
        "--no-binary=llama-cpp-python", "gguf==0.19.0", f"llama-cpp-python=={LLAMA_CPP_VERSION}",
    ),
    "sentence-transformers": ("sentence-transformers==6.2.0", "transformers==5.23.0", "torch==2.13.0"),
    "infinity": ("infinity-emb[torch]==0.0.78", "transformers==4.57.6", "torch==2.13.0"),
}  # fmt: skip


def is_installed(folder: Path, maker: str) -> bool:
    return maker not in _PACKAGES or (folder / maker / "complete").exists()


def peer_python(folder: Path, maker: str) -> Path:
    """The Python interpreter for a peer, whose packages are installed at first use. Raises: subprocess.CalledProcessError, OSError."""
    if maker not in _PACKAGES:
        return Path(sys.executable)
    environment = folder / maker
    python = environment / "bin" / "python"
    if not is_installed(folder, maker):
        print(f"installing {maker}, which takes some minutes once", file=sys.stderr, flush=True)
        venv.create(environment, with_pip=True)
        subprocess.run(
            [python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", *_PACKAGES[maker]],
            check=True,
            env={**os.environ, "CMAKE_ARGS": "-DGGML_NATIVE=ON"},  # compile for this machine, as llama.cpp's users do
            stdout=sys.stderr,
        )  # fmt: skip
        if maker == "llama.cpp":
            _show_our_packages(environment)
        (environment / "complete").touch()
    return python


def _show_our_packages(environment: Path) -> None:
    """Let the environment import our packages too; its own packages have priority."""
    packages = sysconfig.get_path("purelib", vars={"base": str(environment)})
    line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (Path(packages) / "ours.pth").write_text(line)
