"""Wall-clock time is read where it is shown to somebody, and nowhere else: a clock that jumps can hurt nothing."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("gateway", "worker", "shared", "engines")
#: Of each module that may know the time of day: what for.
ALLOWED = {
    "gateway/calls/lifecycle.py": "`created` of an answer",
    "shared/telemetry/tracing.py": "the instants of a trace",
    "shared/telemetry/logs.py": "the time of a log line, which `logging` noted",
    "engines/mock/engine.py": "`created` of a model",
    "engines/torch_backend/loading/load.py": "`created` of a model",
    "engines/text/template_rendering.py": "today's date, for templates that ask for it",
    "engines/bench/peers/run.py": "the date of a measurement",
}
WALL_CLOCKS = {"time", "time_ns", "gmtime", "localtime", "ctime", "asctime", "strftime"}


def reads_wall_clock(tree: ast.AST) -> bool:
    """Whether a module calls `time.time` and its like, or has anything of `datetime` or of those by name."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="time"), attr=name) if name in WALL_CLOCKS:
                return True
            case ast.ImportFrom(module="time", names=names):
                if {alias.name for alias in names} & WALL_CLOCKS:
                    return True
            case ast.ImportFrom(module="datetime"):
                return True
            case ast.Import(names=names) if any(alias.name == "datetime" for alias in names):
                return True
    return False


def test_a_reading_of_the_wall_clock_is_found_in_any_spelling():
    readings = ["import time\ntime.time()", "from time import time_ns", "import datetime",
                "from datetime import UTC", "import time\nf = time.localtime"]  # fmt: skip
    assert all(reads_wall_clock(ast.parse(text)) for text in readings)
    assert not reads_wall_clock(ast.parse("import time\ntime.monotonic()\ntime.sleep(1)"))


def test_only_these_modules_know_the_time_of_day():
    modules = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    found = {
        path.relative_to(ROOT).as_posix()
        for path in modules
        if reads_wall_clock(ast.parse(path.read_text()))
    }
    assert len(modules) > 50
    assert found == set(ALLOWED)
