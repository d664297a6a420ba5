"""Third-party imports of the product are declared, and programs start without the packages of extras."""

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.utils import canonicalize_name

from tests.hidden_packages import closure, hide, modules_without, names_of, requirements_of

ROOT = Path(__file__).parent.parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
PRODUCT = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
OWN = {name.removesuffix(".py") for name in PRODUCT} | {"benchmarks"}
#: torch for CUDA installs Triton; vLLM loads the plugin in its own environment.
NOT_OURS = {"triton", "vllm"}
#: Programs that must start without extras.
PROGRAMS = (
    "vlm", "vlm_app", "gateway.main", "worker.main", "worker.node.serve", "worker.node.agent", "worker.node.ray_workers",
    "deploy.commands", "engines.mock.engine", "engines.mock_pooling.engine", "engines.application.engine",
    "engines.upstream.load", "engines.upstream.vectors", "gateway.chat_client", "loadtest.run",
)  # fmt: skip


def top_level_imports(file: Path) -> Iterator[str]:
    """Returns the packages that a file imports at import time."""
    waiting: list[ast.AST] = [ast.parse(file.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (each.name.partition(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += ast.iter_child_nodes(node)


def test_every_imported_package_is_a_declared_dependency():
    lines = [*PROJECT["dependencies"], *(line for extra in PROJECT["optional-dependencies"].values() for line in extra)]  # fmt: skip
    declared = {name for each in requirements_of(lines) for name in names_of(each)}
    owners = packages_distributions()
    missing = {
        (module, str(file.relative_to(ROOT)))
        for name in PRODUCT
        for file in ([ROOT / name] if name.endswith(".py") else (ROOT / name).rglob("*.py"))
        for module in top_level_imports(file)
        if module not in sys.stdlib_module_names | OWN | NOT_OURS
        and not declared & set(map(canonicalize_name, owners.get(module, [module])))
    }
    assert missing == set()


def test_programs_start_with_only_the_dependencies(tmp_path):
    base = closure(requirements_of(PROJECT["dependencies"]))
    hidden = hide(tmp_path, modules_without(base))
    done = subprocess.run(
        [sys.executable, "-c", f"import {', '.join(PROGRAMS)}"], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": f"{hidden}:{ROOT}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
