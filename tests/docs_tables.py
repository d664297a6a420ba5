"""Write the generated tables of the docs: `make docs`, and `make docs ARGS=--numbers` for those that take a minute.

A table stands between `<!-- generated: NAME -->` and `<!-- end -->`.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import grimp
import networkx
import yaml

from engines.registry import settings_classes
from gateway.api.chat.schemas import IGNORED_FIELDS
from gateway.api.fields import UNSUPPORTED
from gateway.http.error_codes import ERROR_CODES
from shared.settings.table import rows as setting_rows
from shared.telemetry.metrics import GATEWAY_METRICS, WORKER_METRICS, Metric
from tests.size import count

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PRODUCT = ("gateway", "worker", "search", "deploy", "engines", "shared", "loadtest")
_TABLE = re.compile(r"(<!-- generated: ([\w ]+) -->\n).*?(<!-- end -->)", re.S)


def table(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown."""
    lines = [list(columns)]
    lines += [["---"] * len(lines[0]), *([str(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def settings() -> str:
    rows = [
        [code([row.variable]), code([row.default] if row.default else []), row.description]
        for row in setting_rows(settings_classes())
    ]
    return table(["variable", "default", "meaning"], rows)


def metrics() -> str:
    """Metrics of gateways and of workers."""

    def of(role: str, metrics: Iterable[Metric]) -> str:
        rows = [[code([each.name]), each.kind, code(each.labels), each.help] for each in metrics]
        return table([role, "kind", "labels", "meaning"], rows)

    return of("gateway", GATEWAY_METRICS) + "\n" + of("worker", WORKER_METRICS)


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
    rows = [[code([name]), status, meaning] for name, (status, meaning) in ERROR_CODES.items()]
    return table(["`code`", "status", "meaning"], rows)


def unsupported_fields() -> str:
    """Refused fields by path, with their no-op values."""

    def describe(name: str, values: tuple[object, ...]) -> str:
        noops = " or ".join(f"`{json.dumps(value)}`" for value in values)
        return f"`{name}` ({noops})" if noops else f"`{name}`"

    rows = [
        [code([path]), ", ".join(describe(*field) for field in sorted(fields.items()))]
        for path, fields in UNSUPPORTED.items()
    ]
    return table(["path", "refused"], rows)


def ignored_fields() -> str:
    return code(IGNORED_FIELDS) + "\n"


def numbers() -> str:
    """Lines, files, files of a streamed request, import cycles."""
    sizes = count(ROOT)
    rows: list[list[object]] = [
        [f"{area}: {language}", f"{lines:,}", f"{files:,}"]
        for area, languages in sizes.items()
        for language, (lines, files) in languages.items()
    ]
    rows += [
        [f"a streamed chat request, {engine} engine", "", num_request_files(engine)]
        for engine in ("mock", "torch")
    ]
    return table(["", "lines", "files"], [*rows, ["import cycles", "", num_import_cycles()]])


def num_request_files(engine: str) -> int:
    command = [sys.executable, "-m", "tests.trace_request", "--engine", engine]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return int(re.findall(r"^(\d+) files \(", done.stdout, re.M)[0])


def num_import_cycles() -> int:
    """Groups of files that import each other, at the top of a file or in a function."""
    graph = grimp.build_graph(*PRODUCT, cache_dir=None)
    imports = networkx.DiGraph(
        (importer, imported)
        for importer in graph.modules
        for imported in graph.find_modules_directly_imported_by(importer)
    )
    return sum(len(group) > 1 for group in networkx.strongly_connected_components(imports))


TABLES: dict[str, Callable[[], str]] = {
    "settings": settings,
    "metrics": metrics,
    "alerts": alerts,
    "error codes": error_codes,
    "unsupported fields": unsupported_fields,
    "ignored fields": ignored_fields,
}
NUMBERS: dict[str, Callable[[], str]] = {"numbers": numbers}


def fill(page: str, tables: dict[str, Callable[[], str]]) -> str:
    """The page with the tables that it names; others stay."""

    def replace(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        return f"{begin}{tables[name]()}{end}" if name in tables else found[0]

    return _TABLE.sub(replace, page)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the generated tables of the docs.")
    parser.add_argument("--numbers", action="store_true", help="also the numbers of the code base")
    tables = TABLES | NUMBERS if parser.parse_args().numbers else TABLES
    for path in sorted(DOCS.glob("*.md")):
        path.write_text(fill(path.read_text(), tables))


if __name__ == "__main__":
    main()
