"""Calls of functions that others wrote, and how many steps an engine takes to write them.

A case goes the way of a request, to an engine whose model wants one text: it draws the tokens that
the tokenizer cuts it into, one after another, whatever was guessed. Steps take a pretended time.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import jsonschema

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

FORMATS = {each.name: each for each in vars(tools).values() if isinstance(each, ToolFormat)}
#: An answer that is the arguments of one call, as `response_format` asks for them.
PLAIN = "json"
MAX_MODEL_LEN = 32 * 1024
#: What BFCL calls types, in the words of JSON schemas; `any` is text, in the answers too.
_TYPES = {
    "dict": "object",
    "hashmap": "object",
    "tuple": "array",
    "list": "array",
    "arraylist": "array",
    "float": "number",
    "double": "number",
    "long": "integer",
    "byte": "integer",
    "short": "integer",
    "bigint": "integer",
    "any": "string",
    "char": "string",
    "bool": "boolean",
}


@dataclass(frozen=True)
class CallCase:
    """A question, the functions that it comes with, and calls (name, arguments) that answer it."""

    name: str
    question: str
    functions: tuple[Function, ...]
    calls: tuple[tuple[str, dict[str, Any]], ...]

    @property
    def conforms(self) -> bool:
        """Whether the calls are what their functions take."""
        schemas = {each.name: json.loads(each.parameters) for each in self.functions}
        validators = {name: jsonschema.Draft202012Validator(of) for name, of in schemas.items()}
        return all(validators[name].is_valid(arguments) for name, arguments in self.calls)


@dataclass(frozen=True)
class Outcome:
    """What came of one answer; `refusal` says why nothing did."""

    refusal: str = ""
    num_plain_steps: int = 0  #: without drafts: a token each, and what ends it
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


def read_case(row: dict[str, Any], answer: dict[str, Any]) -> CallCase:
    """Of two lines of BFCL. Raises: KeyError where the answer calls what is not there."""
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
        if key in ("enum", "default", "description", "required")
        else _to_schema(value)
        for key, value in schema.items()
        if key not in ("default", "optional", "format")
    }
    if isinstance(kind := made.get("type"), str):
        made["type"] = _TYPES.get(kind.lower(), kind.lower())
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
        return _choose_members(schema, value) if all(map(_is_list, value.values())) else value
    if isinstance(value, list):
        return [_choose(schema.get("items", {}), each) for each in value]
    return value


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def spell(case: CallCase, form: ToolFormat | None) -> Iterator[str]:
    """The answer as a model may write it, the likeliest first."""
    if form is None:
        yield json.dumps(case.calls[0][1], ensure_ascii=False)
        return
    writers = (_in_python, _in_python_with_json) if form.is_pythonic else (_in_json,)
    for write in writers:
        calls = (
            form.opening + name + form.middle + write(of) + form.close for name, of in case.calls
        )
        yield form.trigger + form.begin + form.separator.join(calls) + form.end


def _in_json(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _in_python(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def _in_python_with_json(arguments: dict[str, Any]) -> str:
    def write(value: Any) -> str:
        if isinstance(value, list | dict):
            return json.dumps(value, ensure_ascii=False)
        return repr(value)

    return ", ".join(f"{name}={write(value)}" for name, value in arguments.items())


class _Wanting(MockRunner):
    """A model that wants one text of each request; of what it may not write, the request fails."""

    def __init__(self, settings: MockEngineSettings, tokenizer: HfTokenizer) -> None:
        super().__init__(settings)
        self.vocab_size, self.max_model_len = tokenizer.vocab_size, MAX_MODEL_LEN
        self.num_blocks = 2 * MAX_MODEL_LEN // self.block_size
        self.wanted: dict[str, list[int]] = {}

    def _choose(self, sequence: Any, position: int) -> TokenChoice:
        token_id = self.wanted[sequence.request_id][position]
        mask = token_mask(sequence)
        if not mask[token_id >> 3] >> (token_id & 7) & 1:
            raise SequenceFailure(sequence.request_id, "it is not what the grammar asks for")
        return TokenChoice(token_id)


class _Timed(Speculator):
    """Takes a step for as long as pretended: `token_cost` is what a token of a draft adds to it."""

    def __init__(self, eos_token_ids: frozenset[int], token_cost: float) -> None:
        super().__init__(eos_token_ids, repeats=False)
        self._token_cost = token_cost

    def note(self, batch: Batch, result: StepResult, seconds: float) -> None:
        seconds = 0.01 * (1 + self._token_cost * sum(len(item.draft) for item in batch.items))
        super().note(batch, result, seconds)


class CallWriter:
    """Engines of one tokenizer, with and without drafts."""

    def __init__(self, tokenizer: HfTokenizer, token_cost: float = 0.02) -> None:
        self._tokenizer = tokenizer
        instant = MockSettings(decode_s=0, prefill_s_per_token=0)
        settings = MockEngineSettings(
            mock=instant, max_num_batched_tokens=MAX_MODEL_LEN, enable_prefix_cache=False
        )
        self._processor = MockProcessor(1)
        self._processor.tokenizer = tokenizer
        self._runner = _Wanting(settings, tokenizer)
        self._processor.max_model_len = MAX_MODEL_LEN
        self._engine = BatchingEngine(self._runner, self._processor, settings)
        self._speculator = _Timed(tokenizer.eos_token_ids, token_cost)
        self._num_asked = 0

    def close(self) -> None:
        self._engine.close()

    def write(
        self,
        case: CallCase,
        form: ToolFormat | None,
        *,
        is_required: bool = False,
        is_drafted: bool = True,
    ) -> Outcome:
        """Have one answer written; `form` None: it is the arguments of its first call."""
        if not case.conforms:
            return Outcome("its arguments do not conform to the schema that they came with")
        refusal = ""
        for text in spell(case, form):
            try:
                return self._write(case, form, text, is_required, is_drafted)
            except (BadGrammar, GrammarTooComplex, SequenceFailure) as error:
                refusal = str(error)
        return Outcome(refusal)

    def _write(
        self,
        case: CallCase,
        form: ToolFormat | None,
        text: str,
        is_required: bool,
        is_drafted: bool,
    ) -> Outcome:
        engine = self._engine
        engine.scheduler.speculator = self._speculator if is_drafted else None
        self._num_asked += 1
        request_id = str(self._num_asked)
        request = engine.prepare(self._ask(case, form, is_required, request_id), [])
        space = " " if self._tokenizer.drops_leading_space else ""
        eos = min(self._tokenizer.eos_token_ids)
        wanted = self._runner.wanted[request_id] = [*self._tokenizer.encode(space + text), eos]
        engine.add(request)
        before = engine.stats()
        token_ids: list[int] = []
        while engine.has_work():
            for output in engine.step():
                token_ids += output.token_ids
                if output.error is not None:
                    raise SequenceFailure(request_id, output.error)
        assert token_ids == wanted
        after, num_plain = engine.stats(), len(wanted)
        return Outcome(
            num_plain_steps=num_plain,
            num_steps=after.num_steps - before.num_steps,
            num_drafted=after.num_drafted_tokens - before.num_drafted_tokens,
            num_accepted=after.num_accepted_tokens - before.num_accepted_tokens,
        )

    def _ask(
        self, case: CallCase, form: ToolFormat | None, is_required: bool, request_id: str
    ) -> EngineCall:
        offered, grammar = Tools(case.functions, is_required), None
        messages = [ChatMessage("user", (TextPart(case.question),))]
        if form is None:
            [schema] = (f.parameters for f in case.functions if f.name == case.calls[0][0])
            grammar = Grammar("json", schema, "response_format")
            messages = tools.describe_in_text(messages, offered)
            offered = None
        else:
            cast("Any", self._processor).tool_format = form
        sampling = SamplingParams(temperature=0, max_tokens=4096)
        task = Generate(tuple(messages), sampling, grammar=grammar, tools=offered)
        return EngineCall(request_id, task)


def quantiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The tenth, the half, the mean."""
    ordered = sorted(values)
    return (
        ordered[len(ordered) // 10],
        ordered[len(ordered) // 2],
        sum(ordered) / len(ordered),
    )
