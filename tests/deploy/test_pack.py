"""Packages: one tree has one digest, and unsafe files are refused by name."""

import gzip
import io
import os
import socket
import tarfile
import zipfile
from pathlib import Path

import pytest

from deploy.pack import pack, unpack
from engines.mock.engine import load_mock_engine
from engines.registry import EngineKind, engine_kinds, register
from engines.settings import EngineSettings
from shared.packages.manifest import (
    BadPackage,
    Layer,
    PackageConfig,
    decode_manifest,
    make_manifest,
)
from tests.contract.toys.engine import TOY

MODEL = {"config.json": b"{}", "model.safetensors": b"weights", "sub/tokenizer.json": b"[]"}


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def make_tar(path: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for member, data in members:
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, to: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, to
    return info


def digest_of(path: Path | str, **options) -> str:
    packed = pack(str(path), **options)
    packed.unpacked.close()
    return packed.manifest.digest


def test_times_modes_order_and_archiving_do_not_change_the_digest(tmp_path):
    one = write(tmp_path / "one", MODEL)
    other = write(tmp_path / "other", dict(reversed(MODEL.items())))
    for path in other.rglob("*"):
        os.utime(path, (1, 1))
        path.chmod(0o700)
    (other / ".git").mkdir()
    (other / ".git" / "HEAD").write_text("left out")
    tar = make_tar(tmp_path / "m.tar.gz", [(member(name), data) for name, data in MODEL.items()])
    wrapped = [(member(f"m-1.0/{name}"), data) for name, data in MODEL.items()]
    wrapped_tar = make_tar(tmp_path / "w.tar.gz", wrapped)
    assert len({digest_of(path) for path in (one, other, tar, wrapped_tar)}) == 1


def test_bytes_names_and_the_engine_change_the_digest(tmp_path):
    base = digest_of(write(tmp_path / "a", MODEL))
    assert base == "sha256:775bdf61a4d59e5d69069f154504c47bc842a54d9006ac22add74a3173768dbf"
    assert digest_of(write(tmp_path / "b", {**MODEL, "config.json": b"{ }"})) != base
    assert digest_of(write(tmp_path / "c", {**MODEL, "x.json": b"{}"})) != base
    assert digest_of(tmp_path / "a", engine={"quantization": "int8"}) != base


def test_a_manifest_in_another_encoding_is_refused(tmp_path):
    data = pack(str(write(tmp_path / "m", MODEL))).manifest.encode()
    with pytest.raises(BadPackage, match="not canonical"):
        decode_manifest(data.replace(b'":', b'": ', 1))
    with pytest.raises(BadPackage, match="cannot be read"):
        decode_manifest(data[:-5])


@pytest.mark.parametrize(
    "path",
    ["../x", "a/../../x", "/etc/passwd", "a//b", "./a", "a\\b", "a\nb", "", "x" * 600, "a/",
     "d/" + 256 * "x", pytest.param(100 * "\U0001f600", id="400 bytes"), "a\u202eyp.exe", "a\u2067b", "a\u2028b", "a\x85b"],
)  # fmt: skip
def test_a_layer_with_an_unsafe_path_is_refused(path):
    layer = Layer(path, "sha256:" + 64 * "0", 1)
    with pytest.raises(BadPackage):
        make_manifest(PackageConfig("model", engine={"kind": "mock"}), [layer])


def test_the_longest_name_of_a_file_system_is_accepted():
    for path in ("d/" + 255 * "x", 63 * "\U0001f600", "\u05d0 \U0001f468\u200d\U0001f469"):
        layer = Layer(path, "sha256:" + 64 * "0", 1)
        make_manifest(PackageConfig("model", engine={"kind": "mock"}), [layer])


RUNS_CODE = EngineKind(EngineSettings, load_mock_engine, runs_code=True)
NEEDS_CHECKPOINT = EngineKind(EngineSettings, load_mock_engine, needs_checkpoint=True)


@pytest.fixture
def others(monkeypatch):
    """Registers engines that the project does not know."""
    monkeypatch.setattr("engines.registry.kinds", dict(engine_kinds()))
    for name, kind in {"toy": TOY, "runs": RUNS_CODE, "needs": NEEDS_CHECKPOINT}.items():
        register(name, kind)


@pytest.mark.parametrize("kind", ["application", "runs"])
@pytest.mark.parametrize("files", [MODEL, {"app.sh": b"#!"}])
def test_an_application_cannot_be_deployed_as_a_model(tmp_path, others, kind, files):
    engine = {"kind": kind, "command": '["config.json"]', "isolation": "none"}
    with pytest.raises(BadPackage, match=f"kind={kind} does not run models"):
        pack(str(write(tmp_path / "m", files)), engine=engine)


def test_only_an_engine_without_a_checkpoint_accepts_any_files(tmp_path, others):
    folder = str(write(tmp_path / "m", {"words.txt": b"x"}))
    for kind in ("mock", "mock_pooling", "toy"):
        packed = pack(folder, engine={"kind": kind})
        assert packed.manifest.config == PackageConfig("model", engine={"kind": kind})
    for kind in ("torch", "needs", "not-here"):
        with pytest.raises(BadPackage, match=r"config\.json"):
            pack(folder, engine={"kind": kind})
    with pytest.raises(BadPackage, match=r"config\.json"):
        pack(folder, engine={"quantization": "int8"})


def test_links_out_and_special_files_are_refused_by_name(tmp_path):
    folder = write(tmp_path / "m", MODEL)
    (tmp_path / "secret").write_text("x")
    (folder / "inside.json").symlink_to("config.json")
    digest_of(folder)
    (folder / "leak.json").symlink_to("../secret")
    with pytest.raises(BadPackage, match=r"leak\.json: a link to a file"):
        pack(str(folder))
    (folder / "leak.json").unlink()
    os.mkfifo(folder / "pipe")
    with pytest.raises(BadPackage, match="pipe: not a regular file"):
        pack(str(folder))
    (folder / "pipe").unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "s"))
        with pytest.raises(BadPackage, match="s: not a regular file"):
            pack(str(folder))


def test_pickles_are_refused_by_name_and_by_content(tmp_path):
    torch_zip = io.BytesIO()
    with zipfile.ZipFile(torch_zip, "w") as file:
        file.writestr("archive/data.pkl", b"x")
    cases = {
        "pytorch_model.bin": b"x",
        "a/weights.PT": b"x",
        "notes.json": b"\x80\x04N.",
        "renamed.safetensors": torch_zip.getvalue(),
    }
    for number, (name, data) in enumerate(cases.items()):
        folder = write(tmp_path / str(number), {**MODEL, name: data})
        with pytest.raises(BadPackage, match=rf"{name}: pickle files"):
            pack(str(folder))


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (member("../../evil.json"), "send a relative path"),
        (member("/etc/evil.json"), "send a relative path"),
        (member("link.json", tarfile.SYMTYPE, "/etc/passwd"), "not a regular file"),
        (member("hard.json", tarfile.LNKTYPE, "config.json"), "not a regular file"),
        (member("disk", tarfile.BLKTYPE), "not a regular file"),
        (member("config.json/x"), "the same name"),
    ],
)
def test_a_hostile_archive_is_refused_and_leaves_no_files(tmp_path, monkeypatch, made, says):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    tar = make_tar(tmp_path / "m.tar.gz", [(member("config.json"), b"{}"), (made, b"")])
    with pytest.raises(BadPackage, match=says):
        pack(str(tar))
    assert not list((tmp_path / "tmp").iterdir())
    assert not list(tmp_path.rglob("evil.json"))


def test_a_bomb_is_refused_before_it_fills_the_disk(tmp_path):
    tar = tmp_path / "bomb.tar.gz"
    info = member("zeros.json")
    info.size = 100 * 1024 * 1024
    with gzip.open(tar, "wb", compresslevel=9) as out:
        out.write(info.tobuf())
        for _ in range(100):
            out.write(bytes(1024 * 1024))
    folder = tmp_path / "out"
    folder.mkdir()
    with pytest.raises(BadPackage, match=r"zeros\.json: .* to more than 200 times"):
        unpack(tar, folder)
    assert (folder / "zeros.json").stat().st_size < 80 * 1024 * 1024


def test_the_kind_of_a_package_is_detected(tmp_path):
    python = write(tmp_path / "py", {"app.py": b"class A(vlm_app.Application): pass", "l.txt": b""})
    assert pack(str(python)).manifest.config == PackageConfig("python", entry="app:A")
    program = write(tmp_path / "p", {"bin/run": b"#!/bin/sh\n", "data.json": b"{}"})
    (program / "bin" / "run").chmod(0o755)
    found = pack(str(program)).manifest
    assert found.config == PackageConfig("executable", command=("bin/run",))
    assert [layer.is_executable for layer in found.layers] == [True, False]
    alone = pack(str(program / "bin" / "run")).manifest
    assert alone.config == PackageConfig("executable", command=("run",))
    assert pack(str(program), command=["bin/run", "-v"]).manifest.config.command[1] == "-v"
    with pytest.raises(BadPackage, match="neither a model"):
        pack(str(write(tmp_path / "none", {"readme.md": b""})))
    with pytest.raises(BadPackage, match="no such file"):
        pack(str(tmp_path / "missing"))
    for table in (b"tool = 3", b"tool.vlm = 3"):
        with pytest.raises(BadPackage, match=r"tool\.vlm is not a table"):
            pack(str(write(python, {"pyproject.toml": table})))


def test_a_model_of_the_hubs_cache_is_read_through_its_links(tmp_path, monkeypatch):
    repo = tmp_path / "models--org--name"
    snapshot = repo / "snapshots" / "abc"
    write(repo / "blobs", {"1": b"{}", "2": b"weights"})
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to("../../blobs/1")
    (snapshot / "model.safetensors").symlink_to("../../blobs/2")
    monkeypatch.setattr("engines.packages.resolve.resolve_model", lambda _: snapshot)
    plain = write(tmp_path / "m", {"config.json": b"{}", "model.safetensors": b"weights"})
    assert digest_of("org/name") == digest_of(plain)


def test_the_minimum_memory_of_a_model_is_that_of_its_loaded_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    found = [
        pack(str(tmp_path), engine=engine).manifest.least_memory_bytes
        for engine in ({}, {"quantization": "int8"}, {"quantization": "int4"})
    ]
    assert found == [1000, 400, 200]
