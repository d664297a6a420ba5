"""Every test that `docs/security.md` names is there."""

import re
from pathlib import Path

TESTS = Path(__file__).parent.parent
TEXT = (TESTS.parent / "docs" / "security.md").read_text()
FILES = {path.relative_to(TESTS).as_posix(): path for path in TESTS.rglob("test_*.py")}


def test_named_files_exist():
    named = set(re.findall(r"`([\w/]*test_\w+\.py)`", TEXT))
    assert named
    assert not [name for name in named if not any(file.endswith(name) for file in FILES)]


def test_short_names_are_tests_of_the_gateway():
    cells = [line.rsplit("|", 2)[1] for line in TEXT.splitlines() if line.count("|") == 4]
    short = {name for cell in cells for name in re.findall(r"`([a-z_]+)`", cell)}
    assert {"bad_inputs", "limits"} <= short
    assert not [name for name in short if f"gateway/test_{name}.py" not in FILES]
