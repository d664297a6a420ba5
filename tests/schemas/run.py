"""`make schemas`: MaskBench's schemas through gateway, compiler and sandbox.

    python -m tests.schemas.run [--sample 200] [NAME ...]

`MASKBENCH` names a checkout of github.com/guidance-ai/jsonschemabench; by default the repository is cloned into
`.cache`. It is not copied into this project, because its schemas have various licenses or none. Exits with 1 if a
value that does not conform to its schema is accepted.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

from tests.integration.fleet_process import ROOT
from tests.schemas.checking import Case, Checker

SOURCE = "https://github.com/guidance-ai/jsonschemabench"
COMMIT = "ba103c73756198dd9b149ddc7db7867da7a077f6"
HOME = ROOT / ".cache" / "maskbench"


def find_files() -> list[Path]:
    """Returns the files of MaskBench, ordered by the hashes of their names."""
    checkout = Path(os.environ["MASKBENCH"]) if "MASKBENCH" in os.environ else clone()
    files = (checkout / "maskbench" / "data").glob("*.json")
    return sorted(files, key=lambda path: hashlib.sha256(path.name.encode()).digest())


def clone() -> Path:
    """Clones the repository at the pinned commit."""
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


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sample", type=int)
    parser.add_argument("names", nargs="*")
    wish = parser.parse_args()
    files = [path for path in find_files() if not wish.names or path.stem in wish.names]
    refusals: Counter[str] = Counter()
    #: Results by whether the value conforms.
    values: dict[tuple[bool, str], list[str]] = defaultdict(list)
    checker = Checker()
    for path in files[: wish.sample]:
        case = read(path)
        result = checker.check(case)
        if result.refusal:
            refusals[result.refusal] += 1
        for what in ("accepted", "rejected", "failed"):
            for place in getattr(result, what):
                values[case.tests[place][0], what].append(f"{case.name} #{place}")
    checker.close()
    wrong = values[False, "accepted"]
    print("do not conform and are accepted:", *wrong, sep="\n  ")
    print("conform and are not:", *values[True, "rejected"], *values[True, "failed"], sep="\n  ")
    taken = len(files[: wish.sample]) - refusals.total()
    print(f"{taken:,} of {len(files[: wish.sample]):,} schemas are taken")
    for reason, count in refusals.most_common():
        print(f"refused: {reason}: {count:,}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
