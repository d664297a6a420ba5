"""Every test that a document names is there: in the file that stands before it, where one does."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGES = [*(ROOT / "docs").glob("*.md"), ROOT / "tests" / "findings.md"]
#: `path/test_file.py::test_name`, `test_file.py::test_name`, or `::test_name` of the file before
NAMED = re.compile(r"`([\w/]*test_\w+\.py)?(?:::(test_\w+))?`")


@pytest.fixture(scope="module")
def tests() -> dict[str, set[str]]:
    """Names of tests by file."""
    found = {}
    for path in ROOT.joinpath("tests").rglob("test_*.py"):
        names = re.findall(r"^(?:async )?def (test_\w+)\(", path.read_text(), re.MULTILINE)
        found[f"/{path.relative_to(ROOT)}"] = set(names)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_tests_exist(page: Path, tests: dict[str, set[str]]) -> None:
    for line in page.read_text().splitlines():
        file = ""
        for named, name in NAMED.findall(line):
            file = named or file
            if file and (name or "/" in file):
                places = [names for path, names in tests.items() if path.endswith(f"/{file}")]
                assert any(not name or name in names for names in places), (file, name)
