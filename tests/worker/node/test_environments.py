"""Python packages of an application: installed from its own wheels, by its lock file, without network access."""

import base64
import hashlib
import socket
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from engines.application.engine import ApplicationEngine
from engines.application.settings import ApplicationSettings
from shared.packages.manifest import Layer, Manifest, PackageConfig, digest_of
from tests.engines.application.test_engine import ISOLATIONS, Driver
from worker.node.cache import Cache, Uses
from worker.node.install import InstallError, make_packages

WHEEL = "wheels/greetings-1.0-py3-none-any.whl"
APPLICATION = """
import greetings
from vlm_app import Application

class Toy(Application):
    def run(self, task):
        try:
            import msgspec
        except ImportError:
            return greetings.WORD
        return "the worker's packages are here too"
"""


def make_wheel(path: Path, word: str) -> None:
    path.parent.mkdir(exist_ok=True)
    info = "greetings-1.0.dist-info"
    files = {
        "greetings.py": f"WORD = {word!r}\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: greetings\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        rows.append(f"{name},sha256={digest.decode()},{len(text)}")
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,\n"])
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)


def make_package(folder: Path, word: str, lock: str | None = None) -> Manifest:
    folder.mkdir(exist_ok=True)
    (folder / "app.py").write_text(APPLICATION)
    make_wheel(folder / WHEEL, word)
    found = hashlib.sha256((folder / WHEEL).read_bytes()).hexdigest()
    locked = f"greetings==1.0 --hash=sha256:{found}\n" if lock is None else lock
    (folder / "requirements.lock").write_text(locked)
    layers = [
        Layer(name, digest_of((folder / name).read_bytes()), (folder / name).stat().st_size)
        for name in ("app.py", "requirements.lock", WHEEL)
    ]
    return Manifest(PackageConfig("python", entry="app:Toy"), tuple(layers))


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_an_environment_has_the_locked_packages_and_none_of_the_worker(tmp_path, isolation):
    manifest = make_package(tmp_path / "package", "hello")
    packages = make_packages(manifest, tmp_path / "package", cache=Cache(tmp_path / "cache"))
    assert packages is not None
    own = {"packages": str(packages), "isolation": isolation}
    settings = ApplicationSettings(model=str(tmp_path / "package"), entry="app:Toy", **own)
    with closing(ApplicationEngine(settings)) as engine:
        assert Driver(engine).ask(0) == "hello"
    again = make_packages(manifest, tmp_path / "package", cache=Cache(tmp_path / "cache"))
    assert again == packages


def test_a_wheel_that_is_not_the_locked_one_is_refused(tmp_path):
    options = (
        "\ufeff--index-url  http://127.0.0.1:9/simple\n--trusted-host h\n--only-binary :all:\n"
    )
    lock = f"{options}greetings==1.0 --hash=sha256:{'0' * 64}\n"
    manifest = make_package(tmp_path / "package", "hello", lock)
    (tmp_path / "package" / "pip.py").write_text("raise SystemExit('code of the package')")
    with pytest.raises(InstallError, match=r"requirements.lock: .* DO NOT MATCH"):
        make_packages(manifest, tmp_path / "package", cache=Cache(tmp_path / "cache"))
    assert not list((tmp_path / "cache").rglob("*.py"))


@pytest.mark.parametrize("line", ["-r /x", "a @ file:///a.zip", "./a", "# \\\n-e .", "-i h://${X}"])
def test_a_lock_can_only_name_packages_of_an_index(tmp_path, line):
    """A lock with other lines is refused, because pip would read files of the node or build sources."""
    manifest = make_package(tmp_path / "package", "hello", line + "\n")
    with pytest.raises(InstallError, match="write NAME==VERSION"):
        make_packages(manifest, tmp_path / "package", cache=Cache(tmp_path / "cache"))


def test_an_unneeded_installation_is_stopped_immediately(tmp_path, monkeypatch):
    """The wheel is missing, so pip contacts an index that never responds."""
    manifest, uses = make_package(tmp_path / "package", "hello"), Uses()
    manifest = replace(manifest, layers=manifest.layers[:2])
    with socket.create_server(("127.0.0.1", 0)) as index, ThreadPoolExecutor(1) as threads:
        index.settimeout(60.0)
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{index.getsockname()[1]}/simple")
        installing = threads.submit(
            make_packages, manifest, tmp_path / "package", uses, cache=Cache(tmp_path / "cache")
        )
        with index.accept()[0]:
            uses.is_over = True
            with pytest.raises(InstallError, match="interrupted"):
                installing.result(5.0)
    uses.close()
    assert not list((tmp_path / "cache").rglob("*.part"))
