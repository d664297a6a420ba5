"""Makes `suite.jsonl` of the JSON Schema Test Suite, draft 2020-12.

    pip download --no-deps --no-binary :all: jsonschema==4.25.1 && tar xf jsonschema-4.25.1.tar.gz
    python -m tests.schemas.make_suite jsonschema-4.25.1/json

A line is a group of that suite: its name, its schema, and its values with whether they conform.
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
SUITE = HERE / "suite.jsonl"


def main() -> None:
    root = Path(sys.argv[1])
    tests = root / "tests" / "draft2020-12"
    lines = []
    for path in sorted(tests.rglob("*.json")):
        file = path.relative_to(tests).with_suffix("").as_posix()
        for group in json.loads(path.read_text()):
            values = [(test["valid"], test["data"]) for test in group["tests"]]
            row = (f"{file}---{group['description']}", group["schema"], values)
            lines.append(json.dumps(row, separators=(",", ":")) + "\n")
    SUITE.write_text("".join(lines))
    (HERE / "suite.LICENSE").write_text((root / "LICENSE").read_text())


if __name__ == "__main__":
    main()
