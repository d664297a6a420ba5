"""What a model thinks is told apart from its answer, whatever the pieces are, and no marker is in either."""

from collections.abc import Mapping, Sequence

import pytest

from engines.core.answers import Answer
from engines.core.runner import TokenChoice
from engines.core.sequence import EngineRequest
from engines.text.detokenizer import ControlToken
from engines.text.reasoning import (
    REASONING_FORMATS,
    Reasoning,
    find_reasoning,
)
from shared.protocol import FinishReason, SamplingParams
from tests.engines.core.test_answers import make_processor
from tests.engines.text.test_detokenizer import split

THINK = REASONING_FORMATS["think"]
TAGS = [form for form in REASONING_FORMATS.values() if not form.head_end]
HARMONY = (
    "<|channel|>analysis<|message|>hm, 2<|end|><|start|>assistant<|channel|>commentary<|message|>I look. <|end|>"
    "<|start|>assistant<|channel|>analysis<|message|>, so 4<|end|><|start|>assistant<|channel|>final<|message|>Four."
)


class Told:
    """The pieces of one answer, put together."""

    def __init__(self) -> None:
        self.reasoning = self.text = ""
        self.num_reasoning_tokens = 0
        self.tokens: list[str] = []  # whose probabilities are told

    def __eq__(self, other: object) -> bool:
        return (self.reasoning, self.text) == other


def read(
    tokens: Sequence[bytes],
    form=THINK,
    stop: Sequence[str] = (),
    is_thinking: bool = False,
    spelled: Mapping[int, str] | None = None,
) -> Told:
    """As the engine does it: an output a token, the rest with the last one."""
    processor = make_processor(tokens, Reasoning(form, spelled or {}))
    sampling = SamplingParams(stop=tuple(stop))
    answer = Answer.begin(EngineRequest("r", [1], sampling, is_thinking=is_thinking), processor)
    told = Told()
    for token_id in range(len(tokens)):
        reason = FinishReason.LENGTH if token_id == len(tokens) - 1 else None
        output = answer.output([TokenChoice(token_id, -1.0)], reason)
        told.text += output.text
        told.reasoning += output.reasoning
        told.tokens += [entry.chosen.token for entry in output.logprobs]
        if output.finish_reason is not None:
            assert output.usage is not None
            told.num_reasoning_tokens = output.usage.num_reasoning_tokens
            break
    return told


def chars(text: str) -> list[bytes]:
    return [character.encode() for character in text]


@pytest.mark.parametrize("form", TAGS, ids=lambda form: form.name)
def test_thinking_is_told_apart_at_every_way_to_cut_it(form):
    text = f"{form.start}I see a < 3.\n{form.end}\n\nA caf\u00e9 <b>."
    data = text.encode()
    for cut in range(len(data)):
        assert read(split(data, [cut]), form) == ("I see a < 3.", "A caf\u00e9 <b>.")
    assert read(chars(text), form) == ("I see a < 3.", "A caf\u00e9 <b>.")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Just an answer.", ("", "Just an answer.")),
        ("\n  <b>bold</b>", ("", "\n  <b>bold</b>")),
        ("<thin ice>", ("", "<thin ice>")),
        ("<", ("", "<")),
        ("", ("", "")),
        ("  ", ("", "  ")),
        ("<think></think>Yes.", ("", "Yes.")),
        ("\n<think>\n\n</think>\n\nYes.", ("", "Yes.")),
        ("</think>\n\nYes.", ("", "Yes.")),
        ("<think>cut in the mid", ("cut in the mid", "")),
        ("<think>cut in the marker</thi", ("cut in the marker", "")),
        ("<think>a</think>", ("a", "")),
        ("<think>a </thin> b</think>c", ("a </thin> b", "c")),
        ("<think>a</think>What is <think>?", ("a", "What is <think>?")),
        ("What is <think>?", ("", "What is <think>?")),
        ("<think><think>a</think>b", ("a", "b")),
    ],
)
def test_answers_of_every_kind(text, told):
    assert read(chars(text) or [b""]) == told
    assert read([text.encode()]) == told


def test_a_prompt_may_have_begun_the_thinking():
    assert read(chars("\nso it is.\n</think>\n\nYes."), is_thinking=True) == ("so it is.", "Yes.")
    assert read(chars("so it is"), is_thinking=True) == ("so it is", "")
    reasoning = Reasoning(THINK)
    assert reasoning.is_opened_by("<|im_start|>assistant\n<think>\n")
    assert not reasoning.is_opened_by("<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize("pieces", [chars(HARMONY), [HARMONY.encode()]])
def test_parts_with_heads_are_told_apart_by_their_channels(pieces):
    told = read(pieces, REASONING_FORMATS["harmony"])
    assert told == ("hm, 2, so 4", "I look. Four.")


@pytest.mark.parametrize("text", ["Plain words.", "Plain words, " * 30])
def test_an_answer_without_heads_is_an_answer(text):
    assert read(chars(text), REASONING_FORMATS["harmony"]) == ("", text)


def test_markers_may_be_tokens_that_are_no_text():
    tokens = [b"", b"hm", b"", b"Yes", b""]
    spelled = {0: "[THINK]", 2: "[/THINK]"}
    told = read(tokens, REASONING_FORMATS["mistral"], spelled=spelled)
    assert told == ("hm", "Yes")
    assert told.num_reasoning_tokens == 3


def test_tokens_of_the_thinking_are_counted_with_its_markers():
    assert read([b"<think>", b"a", b"b", b"</think>", b"c"]).num_reasoning_tokens == 4
    assert read([b"\n", b"<th", b"ink>", b"a", b"</think>"]).num_reasoning_tokens == 5
    assert read([b"<", b"b", b">"]).num_reasoning_tokens == 0


def test_only_the_tokens_of_the_answer_have_probabilities():
    told = read([b"<thi", b"nk>", b"a", b"</think>", b"\n", b"c", b"d", b""])
    assert told.tokens == ["c", "d", ""]
    assert read([b"<", b"b", b">"]).tokens == ["<", "b", ">"]
    assert read([b"<"]).tokens == ["<"]


def test_a_stop_string_ends_the_answer_and_not_the_thinking():
    text = "<think>stop here, no</think>go on, stop there"
    assert read(chars(text), stop=["stop"]) == ("stop here, no", "go on, ")


def control(*texts: str) -> dict[str, ControlToken]:
    return {text: ControlToken(index, text) for index, text in enumerate(texts)}


@pytest.mark.parametrize(
    ("template", "tokens", "name"),
    [
        ("{{ '<think>' }}...{{ '</think>' }}", (), "think"),
        ("{{ messages }}", ("<think>", "</think>"), "think"),
        ("[SYSTEM_PROMPT]", ("[THINK]", "[/THINK]"), "mistral"),
        ("<|start|>assistant", ("<|start|>", "<|message|>", "<|end|>", "<|channel|>"), "harmony"),
        ("{{ '<|channel>thought\n<channel|>' }}", (), "gemma"),
        ("<|user|>...<|end|>", ("<|end|>",), None),  # Phi's, which thinks not
        ("{{ messages }}", (), None),
    ],
)
def test_the_format_is_found_in_template_and_tokens(template, tokens, name):
    found = find_reasoning("auto", template, control(*tokens))
    assert (found and found.form.name) == name
    assert find_reasoning("none", template, control(*tokens)) is None
    chosen = find_reasoning("kimi", template, control(*tokens))
    assert chosen is not None
    assert chosen.form.name == "kimi"


def test_the_tokens_of_markers_are_known_by_their_ids():
    found = find_reasoning("auto", "", control("</s>", "[THINK]", "[/THINK]"))
    assert found is not None
    assert found.spelled == {1: "[THINK]", 2: "[/THINK]"}
