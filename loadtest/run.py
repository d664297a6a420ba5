"""The load test in one command: a fleet on the mock engine, Locust users, one table.

    python -m loadtest.run [--users 8] [--seconds 30] [--url http://127.0.0.1:8000]

Exits with 1 if any request failed. It puts processes together; what users do is in the locustfile.
"""

import argparse
import csv
import ipaddress
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from loadtest.fleet import ROOT, ServerError, run_fleet
from loadtest.report import Table, in_ms, in_number, percentile, show

LOCUSTFILE = Path(__file__).parent / "locustfile.py"
STOP_TIMEOUT_S = 10
GRACE_S = 60.0
METRICS = ("TTFT", "ITL", "E2E")
SHARES = (0.5, 0.95, 0.99)


@dataclass(slots=True)
class Result:
    """What a run of Locust left behind. Units: seconds; `values_s` by scenario and metric."""

    exit_code: int
    seconds: float
    values_s: dict[str, dict[str, list[float]]]
    errors: dict[str, int] = field(default_factory=dict)

    @property
    def num_errors(self) -> int:
        """Requests that were not answered completely."""
        return sum(self.errors.values())

    @property
    def num_requests(self) -> int:
        """Complete answers."""
        return sum(len(metrics["E2E"]) for metrics in self.values_s.values())


def main() -> int:
    """Run the load test; returns the exit code."""
    options = parse_options()
    with ExitStack() as stack:
        try:
            url = options.url or stack.enter_context(run_fleet(options.engine)).url
        except ServerError as error:
            print(error, file=sys.stderr)
            return 1
        result = run_locust(url, options)
    show([to_table(result, options.users)], options.markdown)
    for error, number in result.errors.items():
        print(f"{number} x {error}", file=sys.stderr)
    if not result.num_requests:
        print("no request was answered", file=sys.stderr)
    return 1 if result.exit_code or result.errors or not result.num_requests else 0


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.run", description="Load a fleet on this machine with Locust users."
    )
    parser.add_argument("--users", type=int, default=8, help="concurrent users (default: 8)")
    parser.add_argument("--seconds", type=float, default=30.0, help="length (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all questions (default: 0)")
    parser.add_argument("--engine", default="mock", help="engine of the fleet (default: mock)")
    parser.add_argument("--url", type=loopback_url, help="a running server on this machine")
    parser.add_argument("--markdown", action="store_true", help="print a table for a document")
    return parser.parse_args()


def loopback_url(text: str) -> str:
    """The URL, if it is on this machine. Raises: argparse.ArgumentTypeError."""
    host = urlsplit(text).hostname or ""
    try:
        is_local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = False
    if not is_local:
        raise argparse.ArgumentTypeError("only servers on this machine (127.0.0.1) are loaded")
    return text


def run_locust(url: str, options: argparse.Namespace) -> Result:
    """Run Locust headless to its end and read what it wrote."""
    with tempfile.TemporaryDirectory(prefix="vlm-load-") as directory:
        samples = Path(directory, "samples")
        done = subprocess.run(
            locust_command(url, options, samples, Path(directory, "stats")),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=options.seconds + GRACE_S,
        )
        values_s = read_samples(samples)
        errors = read_errors(Path(directory, "stats_failures.csv"))
    if done.returncode and not errors:
        print(done.stderr, file=sys.stderr)
    [took_s] = values_s.pop("", {}).get("run", [options.seconds])
    return Result(done.returncode, took_s, values_s, errors)


def locust_command(url: str, options: argparse.Namespace, samples: Path, stats: Path) -> list[str]:
    """The command line of Locust."""
    flags = {
        "--locustfile": LOCUSTFILE,
        "--host": url,
        "--users": options.users,
        "--spawn-rate": options.users,
        "--run-time": f"{max(1, round(options.seconds))}s",
        "--stop-timeout": STOP_TIMEOUT_S,
        "--seed": options.seed,
        "--samples": samples,
        "--csv": stats,
        "--loglevel": "WARNING",
    }
    pairs = [str(word) for flag in flags.items() for word in flag]
    return [sys.executable, "-m", "locust", "--headless", *pairs]


def read_samples(path: Path) -> dict[str, dict[str, list[float]]]:
    """All values of a file of samples, by scenario and metric."""
    values_s: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    if path.exists():
        for line in path.read_text().splitlines():
            scenario, metric, values = json.loads(line)
            values_s[scenario][metric] += values
    return values_s


def read_errors(path: Path) -> dict[str, int]:
    """How often which error occurred, from Locust's own file of failures."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        return {f"{row['Name']}: {row['Error']}": int(row["Occurrences"]) for row in rows}


def to_table(result: Result, num_users: int) -> Table:
    """For each scenario its requests/s and the percentiles of each latency."""
    title = f"{num_users} users, {result.seconds:.0f} s, {result.num_errors} errors; milliseconds"
    shares = [f"p{share * 100:.0f}" for share in SHARES]
    table = Table(title, ["scenario", "latency", "requests/s", "values", *shares])
    for scenario, metrics in sorted(result.values_s.items()):
        rate = in_number(len(metrics["E2E"]) / result.seconds)
        for metric in METRICS:
            values_s = metrics.get(metric, [])
            if values_s:
                cells = [in_ms(percentile(values_s, share)) for share in SHARES]
                table.add(scenario, metric, rate, f"{len(values_s):,}", *cells)
    total = in_number(result.num_requests / result.seconds)
    table.add("all", "", total, f"{result.num_requests:,}", *[""] * len(SHARES))
    return table


if __name__ == "__main__":
    sys.exit(main())
