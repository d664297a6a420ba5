"""Writes the generated parts of the docs: `make docs`. `make docs ARGS=--numbers` also writes sizes, in a minute.

A table is between `<!-- generated: NAME -->` and `<!-- end -->`.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import yaml

from engines.registry import settings_classes
from gateway.api.completions import IGNORED_FIELDS
from gateway.api.fields import UNSUPPORTED
from gateway.http.error_codes import ERROR_CODES
from shared.settings.load import rows as setting_rows
from tests.size import count

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
_WHAT_TO_DO = {
    400: "Correct the request; `param` names the field.",
    401: "Send a key that the server knows.",
    403: "Ask the operator for a key with this right, or to allow the host.",
    404: "Check the name: `GET /v1/models` lists the models.",
    405: "Use the method that the reference names.",
    408: "Send the body faster.",
    409: "Read the message: the object is not in the state that the request expects.",
    413: "Send less; the message names the limit.",
    415: "Send UTF-8 without compression.",
    422: "Read the message: the application, or the first request under this key, decides.",
    429: "Wait for `retry-after`.",
    500: "Do not repeat the request; report its id to the operator.",
    503: "Repeat the request after `retry-after`, if the answer has it; otherwise tell the operator.",
    504: "Request fewer tokens, or ask the operator for a longer deadline.",
}
_TABLE = re.compile(r"(<!-- generated: ([\w ]+) -->\n).*?(<!-- end -->)", re.S)


def table(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [list(columns)]
    lines += [["---"] * len(lines[0]), *([str(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def settings() -> str:
    rows = [
        [code([row.variable]), code([row.default] if row.default else []), row.description]
        for row in setting_rows(settings_classes())
        if "__MOCK__" not in row.variable  # only for tests
    ]
    return table(["variable", "default", "meaning"], rows)


def alerts() -> str:
    groups = yaml.safe_load((ROOT / "config/prometheus/alerts.yml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    rows = [
        [
            code([rule["alert"]]),
            rule["labels"]["severity"],
            rule.get("for", ""),
            rule["annotations"]["action"],
        ]
        for rule in rules
    ]
    return table(["alert", "severity", "for", "action"], rows)


def error_codes() -> str:
    codes: dict[int, list[str]] = {}
    for name, (status, _) in ERROR_CODES.items():
        codes.setdefault(status, []).append(name)
    rows = [[status, code(codes[status]), _WHAT_TO_DO[status]] for status in sorted(codes)]
    return table(["status", "`code`", "what to do"], rows)


def unsupported_fields() -> str:
    """Returns the refused fields by path, with their no-op values."""

    def describe(name: str, values: tuple[object, ...]) -> str:
        noops = " or ".join(f"`{json.dumps(value)}`" for value in values)
        return f"`{name}` ({noops})" if noops else f"`{name}`"

    rows = [
        [code([path]), ", ".join(describe(*field) for field in sorted(fields.items()))]
        for path, fields in UNSUPPORTED.items()
    ]
    return table(["path", "refused"], rows)


def numbers() -> str:
    """Returns the numbers of lines and files, and of the files whose code a streamed request runs."""
    sizes = count(ROOT)
    parts = [
        f"{area}: {sizes[area][language][0]:,} lines in {sizes[area][language][1]} files"
        for area, language in (("product", "Python"), ("tests", "Python"), ("docs", "Markdown"))
    ]
    mock, torch = num_request_files(), num_request_files("--engine", "torch", "--image")
    return (
        f"{'; '.join(parts)}. A streamed chat request runs code of {mock} source files with the mock engine,"
        f" and of {torch} with the torch engine and an image.\n"
    )


def num_request_files(*options: str) -> int:
    command = [sys.executable, "-m", "tests.trace_request", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return int(re.findall(r"^(\d+) files \(", done.stdout, re.M)[0])


TABLES: dict[str, Callable[[], str]] = {
    "settings": settings,
    "alerts": alerts,
    "error codes": error_codes,
    "unsupported fields": unsupported_fields,
    "ignored fields": lambda: code(IGNORED_FIELDS) + "\n",
}


def fill(page: str, tables: dict[str, Callable[[], str]]) -> str:
    """Returns the page with the given tables replaced; other tables are kept."""

    def replace(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        return f"{begin}{tables[name]()}{end}" if name in tables else found[0]

    return _TABLE.sub(replace, page)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the generated parts of the docs.")
    parser.add_argument("--numbers", action="store_true", help="also the sizes of the code base")
    tables = TABLES | {"numbers": numbers} if parser.parse_args().numbers else TABLES
    for path in sorted(DOCS.glob("*.md")):
        path.write_text(fill(path.read_text(), tables))


if __name__ == "__main__":
    main()
