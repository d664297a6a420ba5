"""Counts the lines and files of the repository: `make size`."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

AREAS = ("product", "training and benchmarks", "tests", "docs")
LANGUAGES = {
    "Python": (".py",),
    "C++": (".cpp", ".h"),
    "Lua": (".lua",),
    "JavaScript": (".js", ".mjs"),
    "YAML": (".yaml", ".yml"),
    "Markdown": (".md",),
}
_LANGUAGE_OF = {suffix: name for name, suffixes in LANGUAGES.items() for suffix in suffixes}
_LAB = ("training/", "benchmarks/")


def area_of(path: str) -> str | None:
    """Returns the area of a tracked file; None for examples and licenses, which are not counted."""
    if path.startswith("examples/"):
        return None
    if path.startswith("tests/"):
        return "tests"
    if path.startswith(_LAB):
        return "training and benchmarks"
    if path.startswith("docs/"):
        return "docs"
    return "product"


def count(root: Path) -> dict[str, dict[str, tuple[int, int]]]:
    """Counts lines and files by area and language, for the files that git tracks below `root`."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    lines: Counter[tuple[str, str]] = Counter()
    files: Counter[tuple[str, str]] = Counter()
    for name in filter(None, listed):
        language, area = _LANGUAGE_OF.get(Path(name).suffix), area_of(name)
        path = root / name
        if language and area and path.is_file():
            lines[area, language] += path.read_bytes().count(b"\n")
            files[area, language] += 1
    return {
        area: {
            language: (lines[area, language], files[area, language])
            for language in LANGUAGES
            if files[area, language]
        }
        for area in AREAS
    }


def main() -> None:
    """Prints one row for each area and language."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
    print(f"{'area':<25}{'language':<12}{'lines':>9}{'files':>7}")
    for area, languages in count(root).items():
        for language, (num_lines, num_files) in languages.items():
            print(f"{area:<25}{language:<12}{num_lines:>9,}{num_files:>7,}")


if __name__ == "__main__":
    main()
