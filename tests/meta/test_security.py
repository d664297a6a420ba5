"""Every test that `docs/security.md` names is there, and every row of its table has one or says why not."""

import re
from pathlib import Path

from tests.hostile.bodies import BODIES
from tests.hostile.wires import WIRES

TESTS = Path(__file__).parent.parent
TEXT = (TESTS.parent / "docs" / "security.md").read_text()
FILES = list(TESTS.rglob("test_*.py"))
ROWS = dict(re.findall(r"^\| ([A-L]\d+) \| .* \| (.*) \|$", TEXT, re.MULTILINE))


def test_named_files_exist():
    named = set(re.findall(r"`[\w/]*?(test_\w+\.py)", TEXT))
    assert named <= {path.name for path in FILES}


def test_named_tests_exist():
    named = {name for cell in ROWS.values() for name in re.findall(r"\.py::(\w+)`", cell)}
    defined = re.findall(
        r"^(?:async )?def (test_\w+)\(", "\n".join(path.read_text() for path in FILES), re.MULTILINE
    )
    assert named
    assert named <= set(defined)


def test_every_row_says_what_shows_it():
    assert ROWS
    assert all(len(cell) > 5 for cell in ROWS.values())


def test_hostile_rows_are_played():
    text = (TESTS / "hostile" / "test_attacks.py").read_text()
    suffixes = re.findall(r"^async def test_\w+?((?:_[a-k]\d+)+)\(", text, re.MULTILINE)
    played = {*BODIES, *WIRES, *(row.upper() for rows in suffixes for row in rows[1:].split("_"))}
    named = {
        other or row
        for row, cell in ROWS.items()
        for other in re.findall(r"\*hostile\*(?: ([A-L]\d+))?", cell)
    }
    assert named == played


def test_rows_that_are_not_hostile_say_why():
    """The list before the table: `- A12, A18 to A20: because ...`."""
    said: list[str] = []
    for rows in re.findall(r"^- ((?:[A-L]\d+(?:, | to )?)+): ", TEXT, re.MULTILINE):
        for span in rows.split(", "):
            first, _, last = span.partition(" to ")
            end = int((last or first)[1:])
            said += [f"{first[0]}{number}" for number in range(int(first[1:]), end + 1)]
    assert sorted(said) == sorted(row for row, cell in ROWS.items() if "*hostile*" not in cell)
