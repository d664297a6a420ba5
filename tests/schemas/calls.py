"""In how many steps an engine writes calls of functions, for a model that wants to write exactly these.

A case goes the way of a request. The model draws the tokens that the tokenizer cuts its text into, whatever was drafted.
Steps take a pretended time.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
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
    num_drafted: int = 0
    num_accepted: int = 0


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
    def __init__(self, tokenizer: HfTokenizer, token_cost: float = 0.02) -> None:
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

    def write(
        self, case: CallCase, form: ToolFormat | None, *, is_required: bool = False
    ) -> Outcome:
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
        before = engine.stats()
        token_ids: list[int] = []
        while engine.has_work():
            for output in engine.step():
                token_ids += output.token_ids
                if output.error is not None:
                    raise SequenceFailure(output.request_id, output.error)
        assert token_ids == wanted
        after = engine.stats()
        return Outcome(
            num_plain_steps=len(wanted),
            num_steps=after.num_steps - before.num_steps,
            num_drafted=after.num_drafted_tokens - before.num_drafted_tokens,
            num_accepted=after.num_accepted_tokens - before.num_accepted_tokens,
        )

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
