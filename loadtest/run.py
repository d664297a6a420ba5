"""`vlm loadtest`: starts a fleet if no server is given, runs the load and reports the result."""

import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime  # noqa: TID251
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from threading import Thread

import msgspec
import psutil
from msgspec.structs import replace
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from loadtest.asking import first_model
from loadtest.client import AnswerError
from loadtest.fleet import ROOT, ServerError, run_fleet
from loadtest.record import Objective, Order, Plan, Record
from loadtest.result import (
    MAX_FAULTS,
    Result,
    failure_ratio,
    failures,
    in_percent,
    progress_words,
    show,
    to_failure_table,
    to_latency_table,
    to_rate_table,
    to_stage_table,
)

DRIVER = (sys.executable, "-m", "loadtest.drive")
PAUSE_S = 0.2
BUSY_RATIO = 0.8  # ratio of a core; above it, the client may be the bottleneck


class LoadTestError(Exception):
    """The test could not run."""


def run(
    order: Order,
    objective: Objective,
    max_failure_ratio: float,
    engine: str = "mock",
    json: Path | None = None,
    html: Path | None = None,
) -> int:
    """Run the test and show its result. Returns the exit code. Raises: LoadTestError."""
    result = make_load(order, objective, engine)
    tables = [to_rate_table, to_latency_table, to_stage_table]
    show([table for make in tables if (table := make(result)).rows])
    if html:
        show([*(make(result) for make in tables), to_failure_table(result)], html)
    if json:
        result.save(json)
    for fault, number in failures(result).most_common(MAX_FAULTS):
        print(f"{number} x {fault}", file=sys.stderr)
    if result.client_core_ratio > BUSY_RATIO:
        used = in_percent(result.client_core_ratio)
        print(f"the client used {used} of its core: it may be the bottleneck", file=sys.stderr)
    if not any(not record.error for record in result.records):
        print("no request was answered", file=sys.stderr)
        return 1
    return int(failure_ratio(result) > max_failure_ratio)


def make_load(order: Order, objective: Objective, engine: str) -> Result:
    """Load the server or, without a URL, a temporary fleet with `engine`. Raises: LoadTestError."""
    if find_spec("locust") is None:
        raise LoadTestError("Locust is not installed: pip install '.[loadtest]'")
    wanted = order.target
    try:
        with nullcontext() if wanted.url else run_fleet(engine) as fleet:
            url = fleet.url if fleet else wanted.url
            api_key = wanted.api_key if wanted.url else ""  # a temporary fleet requires none
            model = wanted.model or first_model(url, api_key)
            target = replace(wanted, url=url, model=model, api_key=api_key)
            records, core_ratio = drive(replace(order, target=target))
    except (AnswerError, ServerError, ValueError) as error:
        raise LoadTestError(str(error)) from None
    return Result(
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        url=wanted.url or "a fleet of its own",
        model=model,
        machine=f"{psutil.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        client_core_ratio=core_ratio,
        workload=order.workload,
        plan=order.plan,
        objective=objective,
        records=records,
    )


@dataclass(slots=True)
class DriverOutput:
    records: list[Record] = field(default_factory=list)
    core_ratio: float | None = None  #: value of the last line
    unexpected: str = ""  #: the first unexpected line

    def read(self, process: subprocess.Popen[bytes]) -> None:
        """Read lines until the process ends. Kills it after an unexpected line, because records may be lost."""
        decoder = msgspec.json.Decoder(Record | float)
        assert process.stdout is not None
        for text in process.stdout:
            try:
                line = decoder.decode(text)
            except msgspec.DecodeError:
                self.unexpected = text[:200].decode(errors="replace").strip()
                process.kill()
                return
            if isinstance(line, Record):
                self.records.append(line)
            else:
                self.core_ratio = line


def drive(order: Order) -> tuple[list[Record], float]:
    """Run the load generator. Returns its records, and the ratio of a core that it used. Raises: LoadTestError."""
    output = DriverOutput()
    with TemporaryFile() as complaints, driver(order, complaints.fileno()) as process:
        reader = Thread(target=output.read, args=(process,))
        reader.start()
        watch(reader, order.plan, output.records)
        if output.unexpected:
            raise LoadTestError(
                f"the load generator wrote a line that is not a record: {output.unexpected}"
            )
        if process.wait():
            complaints.seek(0)
            raise LoadTestError(complaints.read()[-2000:].decode(errors="replace"))
    if output.core_ratio is None:
        raise LoadTestError("the load generator ended early")
    return output.records, output.core_ratio


@contextmanager
def driver(order: Order, complaints: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run the load generator as a process. It is killed at the end of the block."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        DRIVER, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=complaints, start_new_session=True
    ) as process:
        try:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(order))
            process.stdin.close()
            yield process
        finally:
            process.kill()


def watch(reader: Thread, plan: Plan, records: list[Record]) -> None:
    columns = (TextColumn("loading"), BarColumn(), TextColumn("{task.description}"))
    latencies_s: list[float] = []
    num_seen = num_failures = 0
    length_s = plan.warmup_s + plan.duration_s
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=length_s)
        while reader.is_alive():
            reader.join(PAUSE_S)
            new = records[num_seen:]
            num_seen += len(new)
            num_failures += sum(bool(record.error) for record in new)
            latencies_s += [record.e2e_s for record in new if not record.error]
            words = progress_words(num_seen - num_failures, num_failures, latencies_s[-500:])
            progress.update(task, description=words, advance=PAUSE_S)
