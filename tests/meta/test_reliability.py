"""Every fault of the list is in `docs/reliability.md`, and every test that the page names is there."""

import re
from pathlib import Path

TESTS = Path(__file__).parent.parent
TEXT = (TESTS.parent / "docs" / "reliability.md").read_text()
ROWS = re.findall(r"^\| (F\d+) \| .* \| (.*) \|$", TEXT, re.MULTILINE)


def test_every_fault_is_there_once_and_says_what_plays_it_or_why_not():
    assert len({number for number, _ in ROWS}) == len(ROWS) > 0
    for number, cell in ROWS:
        assert "::" in cell or cell.startswith(("not played", "the same")), number


def test_named_tests_exist():
    named = {name for _, cell in ROWS for name in re.findall(r"\.py::(\w+)`", cell)}
    text = "\n".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    assert named
    assert named <= set(re.findall(r"^(?:async )?def (test_\w+)\(", text, re.MULTILINE))


def test_the_commands_of_the_measured_faults_choose_a_test():
    """The last column: part of a test's name, or of a parameter's."""
    chosen = re.findall(r"^\| \d+ \| .* \| `([\w.-]+)`[^|]* \|$", TEXT, re.MULTILINE)
    assert len(chosen) > 20
    known = "".join(path.name + path.read_text() for path in (TESTS / "faults").glob("test_*.py"))
    assert not [word for word in chosen if word not in known]
