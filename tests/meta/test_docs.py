"""The documents name what is there: files, headings, settings, commands, metrics, error codes."""

import re
from inspect import isfunction, signature
from pathlib import Path

import pytest

from engines.registry import settings_classes
from gateway.http.errors import FAILURES, from_status
from shared.queue.keys import RedisKeys
from shared.settings import KEY_VARIABLE, URL_VARIABLE
from shared.settings.table import rows
from shared.telemetry.metrics import METRICS

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "loadtest/RESULTS.md"]
MORE_PAGES = [ROOT / "CHANGELOG.md", ROOT / "engines/packages/shapes/README.md"]
TOP = {path.name for path in ROOT.iterdir()} - {".cache"}  # which runs fill
SETTINGS = {
    *(row.variable for row in rows(settings_classes())),
    *("VLM_CONFIG", KEY_VARIABLE, URL_VARIABLE),
}
METRIC_NAMES = {metric.name for metric in METRICS}


def heading_ids(page: Path) -> set[str]:
    """The anchors that GitHub gives headings."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", prose, re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def prose(page: Path) -> list[str]:
    """The lines that are neither code nor tables."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.M | re.S)
    return [line for line in text.splitlines() if not re.match(r" *\||    ", line)]


def named(page: Path, pattern: str) -> set[str]:
    return set(re.findall(pattern, page.read_text()))


@pytest.mark.parametrize("page", [*PAGES, *MORE_PAGES], ids=lambda page: page.name)
def test_lines_of_prose_end_at_100_characters(page):
    assert not [line for line in prose(page) if len(line) > 100 and " " in line.strip()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in named(page, r"\]\(([^)\s]+)\)"):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in heading_ids(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_of_the_repository_exist(page):
    for path in named(page, r"`([\w.*-]+(?:/[\w.*{},-]+)+/?)`"):
        if path.split("/")[0] in TOP and "..." not in path and "{" not in path:
            found = [
                *ROOT.glob(path.rstrip("/")), *ROOT.glob(f"{path}.py"), *ROOT.glob(f"tests/{path}"),
            ]  # fmt: skip
            assert found, f"{page.name}: {path}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_metrics_and_targets_exist(page):
    variables = named(page, r"\bVLM_[A-Z0-9_]*[A-Z0-9]\b(?!\.\.\.)")
    unknown = {
        v
        for v in variables
        if v not in SETTINGS and not any(s.startswith(f"{v}__") for s in SETTINGS)
    }
    assert not unknown
    metrics = {re.sub(r"_(bucket|sum|count)$", "", name) for name in named(page, r"`(vlm_\w+)")}
    assert metrics <= METRIC_NAMES
    targets = named(page, r"(?:`|^)make ([a-z-]+)")
    assert targets <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "engines/packages/shapes/README.md"], ids=lambda page: page.name
)
def test_modules_of_ours_that_are_to_be_run_do_something(page):
    for module in named(page, r"python3? -m ([\w.]+)"):
        if module.split(".")[0] in {path.removesuffix(".py") for path in TOP}:
            path = ROOT / f"{module.replace('.', '/')}.py"
            main = path if path.exists() else path.with_suffix("") / "__main__.py"
            assert main.exists(), module
            assert main.name == "__main__.py" or '__name__ == "__main__"' in main.read_text(), (
                module
            )


def test_every_key_of_redis_has_its_row():
    keys, made = RedisKeys(), set()
    for name, member in vars(RedisKeys).items():
        if isinstance(member, property):
            made.add(getattr(keys, name))
        elif isfunction(member) and not name.startswith("_"):
            made.add(
                member(
                    keys, *(parameter.upper() for parameter in [*signature(member).parameters][1:])
                )
            )
    page = (ROOT / "docs" / "redis.md").read_text()
    rows = re.findall(r"^\| (`vlm:.*?) \|", page, re.M)
    shown = {key for row in rows for key in re.findall(r"`([^`]+)`", row)}
    assert shown == {key for key in made if not key.endswith(":")}  # beginnings are no keys


def test_every_error_code_has_its_row():
    page = (ROOT / "docs" / "api.md").read_text()
    table = [
        line.split("|") for line in page.splitlines() if re.match(r"\| `\w+`.*\| \d{3} \|", line)
    ]
    shown = {code: int(row[2]) for row in table for code in re.findall(r"`(\w+)`", row[1])}
    code = "\n".join(path.read_text() for path in (ROOT / "gateway").rglob("*.py"))
    raised = set(re.findall(r'code(?:: str)? ?= ?"(\w+)"', code))
    framework = {from_status(status).code for status in (404, 405)}
    assert set(shown) == raised | {failure.value for failure in FAILURES} | framework
    for failure, (_, status, _) in FAILURES.items():
        assert shown[failure.value] == status
