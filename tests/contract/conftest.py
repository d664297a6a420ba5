"""Imports our package before transformers, which imports torchvision, for suites that need torch."""

from importlib import import_module
from pathlib import Path


def pytest_pycollect_makemodule(module_path: Path) -> None:
    if "torch" in module_path.read_text():  # the other suites run in `make test-fast`
        import_module("engines.torch_backend")
        import_module("torch").set_num_threads(1)
