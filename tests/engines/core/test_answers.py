"""An answer depends only on its tokens, not on their grouping or on the end of an earlier attempt."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.base import EngineOutput
from engines.core.answers import REPORT_EVERY_S, Answer
from engines.core.runner import Processor, TokenChoice
from engines.core.sequence import EngineRequest
from engines.mock.engine import MockProcessor
from engines.text.reasoning import REASONING_FORMATS, Reasoning
from engines.text.tools import HERMES, LLAMA3, MISTRAL, PYTHONIC
from shared.protocol import CallPiece, ErrorCode, FinishReason, SamplingParams, join_calls
from tests.engines.text.test_detokenizer import TokenTable, split
from tests.factories_engine import make_image


def make_processor(tokens: Sequence[bytes], reasoning: Reasoning | None = None) -> Processor:
    """Returns a processor whose token `i` is the i-th of the given byte strings."""
    processor = MockProcessor(1)
    processor.tokenizer = TokenTable(tokens)
    processor.reasoning = reasoning
    return processor


def write(
    answer: Answer, token_ids: Sequence[int], ends: Iterable[int], num_running: int = 40
) -> list[EngineOutput]:
    """Returns the outputs for tokens in groups with these ends, up to a stop string."""
    start, outputs = 0, []
    groups = sorted({*(end % (len(token_ids) + 1) for end in ends), len(token_ids)} - {0})
    for step, end in enumerate(groups):
        tokens = [TokenChoice(token_id, -1.0 - token_id) for token_id in token_ids[start:end]]
        reason = FinishReason.LENGTH if end == len(token_ids) else None
        start, output = end, answer.add(tokens, reason, 0.4 * REPORT_EVERY_S * step, num_running)
        if output is None:
            continue
        outputs.append(output)
        if output.finish_reason is not None:
            break
    return outputs


def received(outputs: Sequence[EngineOutput]) -> tuple[object, ...]:
    token_ids: list[int] = []
    for output in outputs:
        assert output.index == len(token_ids)
        token_ids += output.token_ids
    last = outputs[-1]
    assert last.usage is not None
    assert last.usage.num_output_tokens == len(token_ids)
    return (
        token_ids,
        "".join(output.text for output in outputs),
        "".join(output.reasoning for output in outputs),
        [entry for output in outputs for entry in output.logprobs],
        join_calls([piece for output in outputs for piece in output.calls]),
        (last.usage.num_reasoning_tokens, last.finish_reason, last.stopped_by),
    )


FRAGMENTS = (
    "<think>", "</think>", "[THINK]", "[/THINK]", "<|channel|>analysis<|message|>", "<|channel|>final<|message|>",
    "<|end|>", "<|start|>assistant", "<tool_call>\n", "\n</tool_call>", "[TOOL_CALLS] [", "]",
    '{"name": "f", "arguments": {"a": [1, "}"]}}', '{"name": "f", "parameters": {}}', '[f(a="b", c=[1]), g()]',
    " ", "\n", "<", "stop", "st", "here", "caf\u00e9 \u20ac",
)  # fmt: skip
CUTS = st.lists(st.integers(0, 1000), max_size=12)


@given(
    st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=8).map("".join),
    st.sampled_from([None, *map(REASONING_FORMATS.get, ("think", "mistral", "harmony"))]),
    st.sampled_from([None, HERMES, MISTRAL, LLAMA3, PYTHONIC]),
    st.sampled_from([(), ("stop",), ("stop here", "\u20ac")]),
    st.booleans(),
    st.booleans(),
    CUTS,
    st.tuples(CUTS, CUTS, CUTS),
    st.integers(0, 1000),
)
def test_an_answer_continues_after_any_output_of_an_earlier_attempt(
    text, form, tool_format, stop, is_thinking, is_streamed, cuts, groups, cut
):
    tokens = [token for token in split(text.encode(), cuts) if token]
    processor = make_processor(tokens, Reasoning(form) if form else None)
    request = EngineRequest(
        "r",
        [1],
        SamplingParams(stop=stop),
        is_thinking=is_thinking,
        tool_format=tool_format,
        is_streamed=is_streamed,
    )
    token_ids = range(len(tokens))
    whole = received(write(Answer.begin(request, processor), token_ids, groups[0]))
    first = write(Answer.begin(request, processor), token_ids, groups[1])
    assert received(first) == whole
    told = first[: cut % len(first)]
    earlier = tuple(token_id for output in told for token_id in output.token_ids)
    answer = Answer.begin(replace(request, output_token_ids=earlier), processor)
    rest = write(answer, token_ids[len(earlier) :], groups[2])
    assert received([*told, *rest]) == whole


@pytest.mark.parametrize("stop", ["}", "\n", "<tool", "m ", " then"])
@pytest.mark.parametrize("size", [1, 3, 100])
def test_stop_strings_have_no_effect_in_function_calls(stop, size):
    text = b'hm <tool_call>\n{"name": "f", "arguments": {"a": 0}}\n</tool_call>'
    tokens = [text[start : start + size] for start in range(0, len(text), size)]
    request = EngineRequest("r", [1], SamplingParams(stop=(stop,)), tool_format=HERMES)
    answer = Answer.begin(request, make_processor(tokens))
    outputs = write(answer, range(len(tokens)), range(len(tokens)))
    _, said, _, _, calls, (*_, stopped_by) = received(outputs)
    assert size > 1 or not outputs[-1].text
    call = join_calls([CallPiece(0, "f"), CallPiece(0, "", '{"a": 0}')])
    assert (said, calls, stopped_by) == (("h", (), stop) if stop == "m " else ("hm ", call, ""))


def test_an_answer_that_is_not_streamed_and_a_stream_of_many_report_several_tokens_together():
    processor, texts = make_processor([b"a", b"b", b"c", b"d", b"e", b"f"]), []
    for is_streamed, num_running in ((True, 1), (True, 40), (False, 1)):
        request = EngineRequest("r", [1], SamplingParams(), is_streamed=is_streamed)
        outputs = write(Answer.begin(request, processor), range(6), range(6), num_running)
        texts.append(" ".join(output.text for output in outputs))
    assert texts == ["a b c d e f", "a bc de f", "a bcd ef"]


def test_a_failure_reports_the_tokens_that_were_held_back():
    answer = Answer.begin(EngineRequest("r", [1], SamplingParams()), make_processor([b"a", b"b"]))
    assert answer.add([TokenChoice(0)], None, 0.0, num_running=40) is not None
    assert answer.add([TokenChoice(1)], None, 0.01, num_running=40) is None
    failed = answer.fail("no memory", ErrorCode.ENGINE_FAILURE)
    assert (failed.index, failed.text, failed.error) == (1, "b", "no memory")


def test_the_first_and_last_output_have_the_usage():
    media = (make_image(0, 4), replace(make_image(4, 1), kind="audio"))
    request = EngineRequest("r", [0] * 6, SamplingParams(returns_prompt_ids=True), media)
    answer = Answer.begin(request, make_processor([b"a", b"b"]))
    answer.num_cached_tokens = 2
    outputs = [answer.announce(), *(answer.output([TokenChoice(i)]) for i in (0, 1))]
    outputs.append(answer.output([TokenChoice(0)], FinishReason.STOP))
    assert [output.usage is not None for output in outputs] == [True, False, False, True]
    assert [output.prompt_token_ids for output in outputs] == [(0,) * 6, (), (), ()]
    usage = outputs[-1].usage
    assert usage is not None
    assert (usage.num_prompt_tokens, usage.num_image_tokens, usage.num_cached_tokens) == (6, 4, 2)
    assert (usage.num_audio_tokens, usage.num_text_tokens) == (1, 1)
    assert usage.num_output_tokens == 3
    assert outputs[-1].timings is not None


def test_tokens_that_can_begin_reasoning_are_held_back_until_decided():
    processor = make_processor([b"<", b"b", b">"], Reasoning(REASONING_FORMATS["think"]))
    answer = Answer.begin(EngineRequest("r", [1], SamplingParams()), processor)
    first = answer.output([TokenChoice(0, -0.5)])
    assert (first.token_ids, first.text, first.logprobs) == ((), "", ())
    second = answer.output([TokenChoice(1, -1.0)])
    assert (second.index, second.token_ids, second.text) == (0, (0, 1), "<b")
    assert [entry.chosen.logprob for entry in second.logprobs] == [-0.5, -1.0]
