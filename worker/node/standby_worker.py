"""The program of a warm process (`worker.node.standby`)."""

import json
import os
import sys

from engines.registry import engine_kinds
from shared.process import die_with_parent
from shared.settings import SettingsError
from shared.settings.load import load_settings
from shared.telemetry.logs import setup_logging
from worker.main import run_worker


def main(kind: str, parent: int) -> int:
    """Import an engine, read an environment, run a worker with it. Returns the exit code."""
    die_with_parent(parent)
    engine_kinds()[kind].load_all()
    line = sys.stdin.buffer.readline()
    if not line:
        return 0
    os.environ.clear()
    os.environ.update(json.loads(line))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    try:
        settings = load_settings()
    except SettingsError as error:
        print(error, file=sys.stderr)
        return os.EX_CONFIG
    setup_logging(settings.logs, "worker")
    return run_worker(settings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[3])))
