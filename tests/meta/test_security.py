"""Every test that `docs/security.md` names is there, and every row of its table has one or says why not."""

import re
from pathlib import Path

from tests.hostile.bodies import BODIES
from tests.hostile.wires import WIRES

TESTS = Path(__file__).parent.parent
TEXT = (TESTS.parent / "docs" / "security.md").read_text()
FILES = {path.relative_to(TESTS).as_posix(): path for path in TESTS.rglob("test_*.py")}


def test_named_files_exist():
    named = set(re.findall(r"`([\w/]*test_\w+\.py)`", TEXT))
    assert named
    assert not [name for name in named if not any(file.endswith(name) for file in FILES)]


def test_short_names_are_tests_of_the_gateway():
    sections = TEXT.partition("## Every row")[0]
    cells = [line.rsplit("|", 2)[1] for line in sections.splitlines() if line.count("|") == 4]
    short = {name for cell in cells for name in re.findall(r"`([a-z_]+)`", cell)}
    assert {"bad_inputs", "limits"} <= short
    assert not [name for name in short if f"gateway/test_{name}.py" not in FILES]


ROWS = dict(re.findall(r"^\| ([A-K]\d+) \| .* \| (.*) \|$", TEXT, re.MULTILINE))
#: How many rows each section of the page has.
SECTIONS = {"A": 22, "B": 14, "C": 28, "D": 10, "E": 12, "F": 8, "G": 10, "H": 12, "J": 14, "K": 6}


def test_every_row_is_there_once_and_says_what_shows_it():
    numbers = [f"{section}{i + 1}" for section, count in SECTIONS.items() for i in range(count)]
    assert list(ROWS) == numbers
    assert TEXT.count("\n| A1 |") == 1
    assert all(len(cell) > 5 for cell in ROWS.values())


def test_named_tests_exist():
    named = [name for cell in ROWS.values() for name in re.findall(r"`([\w/]+\.py::\w+)`", cell)]
    assert len(named) > 100
    for name in named:
        file, _, test = name.partition("::")
        assert re.search(rf"^(async )?def {test}\(", FILES[file].read_text(), re.MULTILINE), name


def test_hostile_rows_are_played():
    text = (TESTS / "hostile" / "test_attacks.py").read_text()
    suffixes = re.findall(r"^async def test_\w+?((?:_[a-k]\d+)+)\(", text, re.MULTILINE)
    played = {*BODIES, *WIRES, *(row.upper() for rows in suffixes for row in rows[1:].split("_"))}
    named = {
        other or row
        for row, cell in ROWS.items()
        for other in re.findall(r"\*hostile\*(?: ([A-K]\d+))?", cell)
    }
    assert named == played


def test_rows_that_are_not_hostile_say_why():
    """The list before the table: `- A12, A18 to A20: because ...`."""
    said: list[str] = []
    for rows in re.findall(r"^- ((?:[A-K]\d+(?:, | to )?)+): ", TEXT, re.MULTILINE):
        for span in rows.split(", "):
            first, _, last = span.partition(" to ")
            end = int((last or first)[1:])
            said += [f"{first[0]}{number}" for number in range(int(first[1:]), end + 1)]
    assert sorted(said) == sorted(row for row, cell in ROWS.items() if "*hostile*" not in cell)
