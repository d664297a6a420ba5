"""Links, paths, settings, metrics, commands and modules of the docs exist; generated tables are current."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import vlm
from engines.registry import settings_classes
from gateway.http.error_codes import ERROR_CODES
from shared.protocol import ErrorCode
from shared.settings import KEY_VARIABLE, URL_VARIABLE
from shared.settings.load import load_settings, rows
from shared.settings.tree import OidcSettings
from shared.telemetry.metrics import METRICS
from tests.docs_tables import TABLES, fill

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TOP = {path.name for path in ROOT.iterdir()} - {".cache"}  # filled by test runs
SETTINGS = {
    *(row.variable for row in rows(settings_classes())),
    *("VLM_CONFIG", KEY_VARIABLE, URL_VARIABLE),
}
#: `path/test_file.py::test_name`, `test_file.py::test_name`, or `::test_name` in the file named before
NAMED_TEST = re.compile(r"`([\w/]*test_\w+\.py)?(?:::(test_\w+))?`")
TESTS = {
    f"/{path.relative_to(ROOT)}": set(re.findall(r"^(?:async )?def (test_\w+)\(", path.read_text(), re.M))
    for path in ROOT.joinpath("tests").rglob("test_*.py")
}  # fmt: skip
METRIC_NAMES = {metric.name for metric in METRICS}


def heading_ids(page: Path) -> set[str]:
    """Returns the anchors that GitHub generates for headings."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", prose, re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def named(page: Path, pattern: str) -> set[str]:
    return set(re.findall(pattern, page.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_are_valid(page):
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
    unknown = {v for v in variables if not any(f"{s}__".startswith(f"{v}__") for s in SETTINGS)}
    assert not unknown
    metrics = {re.sub(r"_(bucket|sum|count)$", "", name) for name in named(page, r"`(vlm_\w+)")}
    assert metrics - {OidcSettings().key_claim} <= METRIC_NAMES
    targets = named(page, r"(?:`|^)make ([a-z-]+)")
    assert targets <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_generated_tables_are_current(page):
    assert fill(page.read_text(), TABLES) == page.read_text(), "run: make docs"


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "tests" / "findings.md"], ids=lambda page: page.name
)
def test_named_tests_exist(page):
    """A test name after a file name must be in that file."""
    for line in page.read_text().splitlines():
        file = ""
        for named, name in NAMED_TEST.findall(line):
            file = named or file
            if file and (name or "/" in file):
                found = [names for path, names in TESTS.items() if path.endswith(f"/{file}")]
                assert any(not name or name in names for names in found), (file, name)


def test_every_error_code_of_the_gateway_is_described_with_its_status():
    code = "\n".join(path.read_text() for path in (ROOT / "gateway").rglob("*.py"))
    raised = set(re.findall(r'code(?:: str)? ?= ?"(\w+)"', code))
    assert set(ERROR_CODES) == raised | {failure.value for failure in ErrorCode}


def test_the_settings_file_on_the_page_loads(tmp_path, monkeypatch):
    path, text = tmp_path / "config.yaml", (ROOT / "docs" / "settings.md").read_text()
    path.write_text(re.findall(r"^```yaml\n(.*?)^```$", text, re.M | re.S)[0])
    monkeypatch.setenv("VLM_CONFIG", str(path))
    monkeypatch.chdir(tmp_path)
    assert load_settings().gateway.port == 9000


TEXT = "\n".join(page.read_text() for page in PAGES)
COMMANDS = r"(?:`|^)vlm ((?:bench )?[a-z][a-z-]+)"


@pytest.mark.parametrize("command", sorted(set(re.findall(COMMANDS, TEXT, re.M))))
def test_every_vlm_command_that_is_named_exists(command):
    done = CliRunner().invoke(vlm.app, [*command.split(), "--help"])
    assert done.exit_code == 0, done.output
