"""Builds a package: detects the kind of application, and hashes its files.

The source is a model directory, a hub id, the directory of a Python application or an executable, one executable, or
a `.tar.gz` of one of these. Equal files result in an equal package.
"""

import ast
import gzip
import os
import stat
import tarfile
import tomllib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from engines.base import EngineStartError
from engines.registry import check_package, find_kind, kind_of, read_settings
from shared.options import to_tree
from shared.packages.manifest import (
    MAX_PACKAGE_BYTES,
    BadPackage,
    Layer,
    Manifest,
    PackageConfig,
    check_content,
    check_path,
    digest_of_file,
    make_manifest,
)
from shared.packages.store import Report
from shared.settings import SettingsError

#: Folders and files of development tools, which are not packed.
_SKIPPED = frozenset(
    {".git", ".hg", ".svn", ".venv", ".cache", "__pycache__", ".DS_Store"}
    | {".mypy_cache", ".pytest_cache", ".ruff_cache"}
)
_ARCHIVES = (".tar.gz", ".tgz")
#: An archive is refused as a bomb if it unpacks to over `_FREE_BYTES`, and to over `_MAX_RATIO` times its size.
_MAX_RATIO = 200
_FREE_BYTES = 64 * 1024 * 1024
_PIECE_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Packed:
    """A package and the files of its layers, which exist until the caller closes `unpacked`."""

    manifest: Manifest
    files: Mapping[str, Path]  #: by digest
    unpacked: ExitStack = field(default_factory=ExitStack)  #: deletes unpacked files


def pack(
    application: str,
    *,
    engine: Mapping[str, str] | None = None,
    entry: str = "",
    command: Sequence[str] = (),
    report: Report | None = None,
) -> Packed:
    """Build the package of a path or hub id. Raises: BadPackage."""
    path = Path(application).expanduser()
    with ExitStack() as stack:
        if path.is_file() and application.endswith(_ARCHIVES):
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="vlm-package-")))
            unpack(path, folder)
            files = dict(_walk(folder, folder))
        elif path.is_file():
            files = {path.name: path}
        else:
            directory, root = _find_directory(application, path)
            files = dict(_walk(directory, root))
        config = find_config(files, dict(engine or {}), entry, tuple(command))
        manifest, by_digest = _hash(config, files, report)
        return Packed(manifest, by_digest, stack.pop_all())


def pack_installed(command: Sequence[str]) -> Packed:
    """A package without files, for a command that is installed on the nodes. Raises: BadPackage."""
    if not command or not command[0].startswith("/"):
        raise BadPackage("--installed: give --command with an absolute path, such as /usr/bin/x")
    return Packed(make_manifest(PackageConfig("executable", command=tuple(command)), []), {})


def _find_directory(application: str, path: Path) -> tuple[Path, Path]:
    """The directory to pack, and the directory in which its links must end. Raises: BadPackage."""
    if path.is_dir():
        return path, path.resolve()
    # The hub's client is slow to import, and not part of a gateway's image.
    from engines.packages.resolve import BUILT_IN, parse_hub_id, resolve_model  # noqa: PLC0415

    if application not in BUILT_IN and parse_hub_id(application) is None:
        raise BadPackage(
            "there is no such file or directory; give a model directory, a hub id as "
            "org/name[@revision], a Python application, an executable, or a .tar.gz of one"
        )
    try:
        directory = resolve_model(application)
    except EngineStartError as error:
        raise BadPackage(str(error)) from None
    # The hub's cache stores files as links: snapshots/REVISION/NAME -> ../../blobs/HASH.
    is_cached = directory.parent.name == "snapshots"
    return directory, (directory.parents[1] if is_cached else directory).resolve()


def _walk(directory: Path, root: Path, prefix: str = "") -> Iterator[tuple[str, Path]]:
    """Yield the relative path and the path of each file of a directory tree. Raises: BadPackage."""
    for found in sorted(os.scandir(directory), key=lambda entry: entry.name):
        name, path = prefix + found.name, Path(found.path)
        if found.name in _SKIPPED or found.name.endswith(".pyc"):
            continue
        if found.is_symlink():
            if not path.resolve().is_relative_to(root):
                raise BadPackage(f"{name}: a link to a file outside the package; copy the file")
            if path.is_dir():
                raise BadPackage(f"{name}: a link to a directory; copy the directory")
        if found.is_dir():
            yield from _walk(path, root, name + "/")
            continue
        try:
            mode = path.stat().st_mode
        except OSError as error:
            raise BadPackage(f"{name}: cannot be read: {error.strerror}") from None
        if not stat.S_ISREG(mode):
            raise BadPackage(f"{name}: not a regular file (a device, a socket or a pipe)")
        yield name, path


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a `.tar.gz`. If all files are in one top folder, remove that level. Raises: BadPackage."""
    written, seen = 0, set[str]()
    try:
        with archive.open("rb") as raw, tarfile.open(fileobj=gzip.GzipFile(fileobj=raw)) as members:
            for member in members:
                name = member.name.removeprefix("./").rstrip("/")
                if member.isdir() or member.type in (tarfile.XGLTYPE, tarfile.XHDTYPE):
                    continue
                if not member.isreg():
                    raise BadPackage(f"{name}: not a regular file (a link, a device or a pipe)")
                check_path(name)
                if name in seen:
                    raise BadPackage(f"{name}: the archive has this file twice")
                seen.add(name)
                source = members.extractfile(member)
                assert source is not None
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("xb") as out:
                    while piece := source.read(_PIECE_BYTES):
                        written += len(piece)
                        is_bomb = written > _FREE_BYTES and written > _MAX_RATIO * raw.tell()
                        if is_bomb or written > MAX_PACKAGE_BYTES:
                            raise BadPackage(
                                f"{name}: the archive unpacks to more than {_MAX_RATIO} times its size, "
                                f"or to more than {MAX_PACKAGE_BYTES} bytes"
                            )
                        out.write(piece)
                target.chmod(0o755 if member.mode & 0o111 else 0o644)
    except (tarfile.TarError, zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise BadPackage(f"{archive.name}: incomplete, or not a .tar.gz: {error}") from None
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise BadPackage(
            f"{archive.name}: a file and a folder have the same name: {error}"
        ) from None
    _remove_top_folder(folder)


def _remove_top_folder(folder: Path) -> None:
    inside = list(folder.iterdir())
    if len(inside) == 1 and inside[0].is_dir():
        outer = inside[0].rename(folder / ".outer")
        for path in outer.iterdir():
            path.rename(folder / path.name)
        outer.rmdir()


def find_config(
    files: Mapping[str, Path], engine: dict[str, str], entry: str, command: tuple[str, ...]
) -> PackageConfig:
    """Detect how these files run: as a model, Python application or executable. Raises: BadPackage."""
    tool = _read_tool(files)
    network = tool.get("network") is True
    if command:
        return PackageConfig("executable", command=command, network=network)
    if entry:
        return PackageConfig("python", entry=entry, network=network)
    has_weights = any(path.endswith(".safetensors") for path in files)
    named = find_kind(kind_of(engine)) if engine else None
    needs_none = named is not None and not named.needs_checkpoint
    if ("config.json" in files and has_weights) or needs_none:
        try:
            check_package(engine, files)
            if find_kind(kind_of(engine)) is not None:  # else nodes check the settings
                read_settings(to_tree(engine, "__"), lambda name: f"--set {name}")
        except (EngineStartError, SettingsError) as error:
            raise BadPackage(str(error)) from None
        return PackageConfig("model", engine=engine)
    if engine:
        raise BadPackage("--set is only for models, which have config.json and *.safetensors")
    if found := str(tool.get("entry", "")) or _find_application(files):
        return PackageConfig("python", entry=found, network=network)
    programs = [path for path in files if path.startswith("bin/") and path.count("/") == 1]
    programs = programs or (list(files) if len(files) == 1 else [])
    programs = [path for path in programs if files[path].stat().st_mode & 0o111]
    if len(programs) == 1:
        return PackageConfig("executable", command=(programs[0],), network=network)
    raise BadPackage(
        "neither a model (config.json and *.safetensors), nor a Python application (app.py with one class "
        "of Application, or --entry module:Class), nor a program (one executable in bin/, or --command)"
    )


def _read_tool(files: Mapping[str, Path]) -> Mapping[str, object]:
    """The table `tool.vlm` of pyproject.toml. Raises: BadPackage."""
    if "pyproject.toml" not in files:
        return {}
    try:
        project = tomllib.loads(files["pyproject.toml"].read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadPackage(f"pyproject.toml: not valid TOML: {error}") from None
    tools = project.get("tool", {})
    tool = tools.get("vlm", {}) if isinstance(tools, dict) else tools
    if not isinstance(tool, dict):
        raise BadPackage("pyproject.toml: tool.vlm is not a table: write [tool.vlm]")
    return tool


def _find_application(files: Mapping[str, Path]) -> str:
    """The entry point of the only Application in app.py; empty if there is none. Raises: BadPackage."""
    sources = [
        path for path in files if path == "app.py" or (len(files) == 1 and path[-3:] == ".py")
    ]
    for path in sources:
        try:
            tree = ast.parse(files[path].read_bytes(), filename=path)
        except (SyntaxError, ValueError) as error:
            raise BadPackage(f"{path}: not valid Python: {error}") from None
        names = [
            node.name
            for node in tree.body
            if isinstance(node, ast.ClassDef)
            and any(ast.unparse(base).split(".")[-1] == "Application" for base in node.bases)
        ]
        if len(names) > 1:
            raise BadPackage(f"{path} has {len(names)} applications: choose one with --entry")
        if names:
            return f"{path.removesuffix('.py')}:{names[0]}"
    return ""


def _hash(
    config: PackageConfig, files: Mapping[str, Path], report: Report | None
) -> tuple[Manifest, dict[str, Path]]:
    """The manifest, and the files by digest. Hashes with one thread per processor. Raises: BadPackage."""
    for name in files:
        check_path(name)  # before gigabytes are read

    def read(name: str) -> Layer:
        path = files[name]
        with path.open("rb") as file:
            check_content(name, file)
        before = path.stat()
        digest = digest_of_file(path)
        if path.stat().st_mtime_ns != before.st_mtime_ns or path.stat().st_size != before.st_size:
            raise BadPackage(f"{name}: changed while it was read; try again")
        if report is not None:
            report(before.st_size)
        is_executable = config.kind != "model" and bool(before.st_mode & 0o111)
        return Layer(name, digest, before.st_size, is_executable)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        try:
            layers = list(threads.map(read, files))
        except OSError as error:
            raise BadPackage(f"{error.filename}: cannot be read: {error.strerror}") from None
    return make_manifest(config, layers), {layer.digest: files[layer.path] for layer in layers}
