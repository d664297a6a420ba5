"""`make schemas`: MaskBench's schemas through gateway, compiler and sandbox.

    python -m tests.schemas.run [--sample 200] [NAME ...]

`MASKBENCH` names a checkout of github.com/guidance-ai/jsonschemabench; without it that repository is
cloned into `.cache`. Nothing of it is kept here: its schemas come from many places, with licences of
their own or none. Ends with 1 if a value that does not conform to its schema is accepted.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.integration.fleet_process import ROOT
from tests.schemas.checking import Case, Checker, Result

SOURCE = "https://github.com/guidance-ai/jsonschemabench"
COMMIT = "ba103c73756198dd9b149ddc7db7867da7a077f6"
HOME = ROOT / ".cache" / "maskbench"
MAX_REASONS = 4


def find_files() -> list[Path]:
    """The files of MaskBench, in the order of their names' hashes."""
    checkout = Path(os.environ["MASKBENCH"]) if "MASKBENCH" in os.environ else clone()
    files = list((checkout / "maskbench" / "data").glob("*.json"))
    if not files:
        sys.exit(f"{checkout}/maskbench/data holds no schemas: MASKBENCH is a checkout of {SOURCE}")
    return sorted(files, key=lambda path: hashlib.sha256(path.name.encode()).digest())


def clone() -> Path:
    """The repository at that commit."""
    if not HOME.exists():
        part = HOME.with_name("maskbench.part")
        part.mkdir(parents=True, exist_ok=True)
        for command in (
            ["init", "--quiet"],
            ["fetch", "--quiet", "--depth", "1", SOURCE, COMMIT],
            ["checkout", "--quiet", "FETCH_HEAD"],
        ):
            subprocess.run(["git", *command], cwd=part, check=True)
        part.rename(HOME)
    return HOME


def read(path: Path) -> Case:
    content = json.loads(path.read_text())
    tests = [(test["valid"], test["data"]) for test in content.get("tests", ())]
    return Case(path.stem, content["schema"], tests)


def choose(files: list[Path], count: int) -> list[Path]:
    """So many, of every source as many as of any other, as far as it has them."""
    by_source: dict[str, list[Path]] = defaultdict(list)
    for path in files:
        by_source[Case(path.stem, None, ()).source].append(path)
    turns = ((turn, source) for turn in range(len(files)) for source in sorted(by_source))
    chosen = (by_source[source][turn] for turn, source in turns if turn < len(by_source[source]))
    return [path for path, _ in zip(chosen, range(count), strict=False)]


@dataclass
class Summary:
    """What came of all."""

    num_schemas: int = 0
    num_compiled: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    compile_s: list[float] = field(default_factory=list)
    mask_s: list[float] = field(default_factory=list)
    counts: Counter[tuple[bool, str]] = field(default_factory=Counter)  #: (conforms, what came)
    wrong: list[str] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def add(self, case: Case, result: Result) -> None:
        self.num_schemas += 1
        if result.refusal:
            self.reasons[result.refusal] += 1
            return
        self.num_compiled += 1
        self.compile_s.append(result.compile_s)
        self.mask_s += result.mask_s
        for what in ("accepted", "rejected", "failed"):
            for place in getattr(result, what):
                is_valid, _ = case.tests[place]
                self.counts[is_valid, what] += 1
                if (is_valid, what) == (False, "accepted"):
                    self.wrong.append(f"{case.name} #{place}")
                elif (is_valid, what) == (True, "rejected"):
                    self.rejected.append(f"{case.name} #{place}")
                elif what == "failed":
                    self.failed.append(f"{case.name} #{place}")

    def to_table(self) -> str:
        """Markdown."""
        share = self.num_compiled / max(1, self.num_schemas)
        rows = [
            ("taken", f"{self.num_compiled:,} ({share:.1%})"),
            ("values that conform: accepted, not, failed", self._counts(True)),
            ("values that do not: **accepted**, not, failed", self._counts(False)),
            (
                "processor ms to compile, besides the child's: p50, p99, most",
                _quantiles(self.compile_s, 1e3),
            ),
            ("\u00b5s of a processor for a mask: p50, p99, most", _quantiles(self.mask_s, 1e6)),
        ]
        reasons = [
            (f"refused: {why}", f"{n:,}") for why, n in self.reasons.most_common(MAX_REASONS)
        ]
        others = sum(self.reasons.values()) - sum(
            n for _, n in self.reasons.most_common(MAX_REASONS)
        )
        rows += [*reasons, ("refused for other reasons", f"{others:,}")]
        head = f"| schemas | {self.num_schemas:,} |"
        return "\n".join([head, "|---|---|", *(f"| {name} | {said} |" for name, said in rows)])

    def _counts(self, is_valid: bool) -> str:
        names = ("accepted", "rejected", "failed")
        return " / ".join(f"{self.counts[is_valid, name]:,}" for name in names)


def _quantiles(values: list[float], scale: float) -> str:
    ordered = sorted(values) or [0.0]
    places = (len(ordered) // 2, len(ordered) * 99 // 100, len(ordered) - 1)
    return " / ".join(f"{scale * ordered[place]:,.1f}" for place in places)


def cases(names: list[str], count: int | None) -> Iterator[Case]:
    files = find_files()
    if names:
        files = [path for path in files if path.stem in names]
    elif count is not None:
        files = choose(files, count)
    began_s = shown_s = time.monotonic()
    for number, path in enumerate(files, 1):
        yield read(path)
        if time.monotonic() > shown_s + 5:
            shown_s = time.monotonic()
            print(f"{number:,} of {len(files):,}, {shown_s - began_s:.0f} s", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sample", type=int)
    parser.add_argument("names", nargs="*")
    wish = parser.parse_args()
    summary, checker = Summary(), Checker()
    for case in cases(wish.names, wish.sample):
        summary.add(case, checker.check(case))
    checker.close()
    for what in ("rejected", "failed", "wrong"):
        print(f"{what}:", *getattr(summary, what), sep="\n  ")
    print(summary.to_table())
    return 1 if summary.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
