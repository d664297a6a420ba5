"""`make size` counts tracked files by area and language."""

import subprocess

from tests.size import count


def test_lines_are_counted_by_area_and_language(tmp_path):
    files = {
        "gateway/a.py": "x\n" * 3,
        "benchmarks/gateway/b.py": "x\n" * 5,
        "training/shapes/c.py": "x\n" * 7,
        "tests/d.py": "x\n" * 11,
        "docs/e.md": "x\n" * 13,
        "shared/f.lua": "x\n" * 17,
        "examples/g.py": "x\n" * 19,
        "untracked.py": "x\n" * 23,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for command in (["init", "-q"], ["add", *[name for name in files if name != "untracked.py"]]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)

    assert count(tmp_path) == {
        "product": {"Python": (3, 1), "Lua": (17, 1)},
        "training and benchmarks": {"Python": (12, 2)},
        "tests": {"Python": (11, 1)},
        "docs": {"Markdown": (13, 1)},
    }
