"""Reasoning is separated from the answer in any split of the tokens, without the markers."""

from collections.abc import Mapping, Sequence

import pytest

from engines.core.answers import Answer
from engines.core.sequence import EngineRequest
from engines.text.detokenizer import ControlToken
from engines.text.reasoning import REASONING_FORMATS, Reasoning, find_reasoning
from shared.protocol import SamplingParams
from tests.engines.core.test_answers import make_processor, received, write
from tests.engines.text.test_detokenizer import split

THINK = REASONING_FORMATS["think"]
TAGS = [form for form in REASONING_FORMATS.values() if not form.head_end]
HARMONY = (
    "<|channel|>analysis<|message|>hm, 2<|end|><|start|>assistant<|channel|>commentary<|message|>I look. <|end|>"
    "<|start|>assistant<|channel|>analysis<|message|>, so 4<|end|><|start|>assistant<|channel|>final<|message|>Four."
)


def read(
    tokens: Sequence[bytes],
    form=THINK,
    stop: Sequence[str] = (),
    is_thinking: bool = False,
    spelled: Mapping[int, str] | None = None,
) -> tuple[tuple[str, str], int, list[str]]:
    """Reads a token per output; returns (reasoning, text), the number of reasoning tokens, and tokens with logprobs."""
    processor = make_processor(tokens, Reasoning(form, spelled or {}))
    sampling = SamplingParams(stop=tuple(stop))
    answer = Answer.begin(EngineRequest("r", [1], sampling, is_thinking=is_thinking), processor)
    token_ids = range(len(tokens))
    _, text, thought, scores, _, (num_reasoning_tokens, *_) = received(
        write(answer, token_ids, range(len(tokens)))
    )
    return (thought, text), num_reasoning_tokens, [entry.chosen.token for entry in scores]


def chars(text: str) -> list[bytes]:
    return [character.encode() for character in text]


@pytest.mark.parametrize("form", TAGS, ids=lambda form: form.name)
def test_reasoning_is_separated_in_any_split(form):
    text = f"{form.start}I see a < 3.\n{form.end}\n\nA caf\u00e9 <b>."
    data = text.encode()
    for tokens in (chars(text), *(split(data, [cut]) for cut in range(len(data)))):
        assert read(tokens, form)[0] == ("I see a < 3.", "A caf\u00e9 <b>.")


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
        ("<think>\n<think><think>a</think>b", ("a", "b")),
    ],
)
def test_answers_of_every_kind(text, told):
    assert read(chars(text) or [b""])[0] == read([text.encode()])[0] == told


HARMONY_FORM = {"form": REASONING_FORMATS["harmony"]}


@pytest.mark.parametrize(
    ("text", "options", "told"),
    [
        ("\nso it is.\n</think>\n\nYes.", {"is_thinking": True}, ("so it is.", "Yes.")),
        ("so it is", {"is_thinking": True}, ("so it is", "")),
        (
            "<think>stop here, no</think>go on, stop there",
            {"stop": ["stop"]},
            ("stop here, no", "go on, "),
        ),
        (HARMONY, HARMONY_FORM, ("hm, 2, so 4", "I look. Four.")),
        ("Plain words.", HARMONY_FORM, ("", "Plain words.")),
        ("Plain words, " * 30, HARMONY_FORM, ("", "Plain words, " * 30)),
        (f"{'a' * 200}<|message|>b", HARMONY_FORM, ("", f"{'a' * 200}<|message|>b")),
    ],
)
def test_prompts_stop_strings_and_channels(text, options, told):
    for tokens in (chars(text), [text.encode()]):
        assert read(tokens, **options)[0] == told


def test_markers_can_be_tokens_without_text():
    tokens = [b"", b"hm", b"", b"Yes", b""]
    spelled = {0: "[THINK]", 2: "[/THINK]"}
    told, num_reasoning_tokens, _ = read(tokens, REASONING_FORMATS["mistral"], spelled=spelled)
    assert (told, num_reasoning_tokens) == (("hm", "Yes"), 3)


@pytest.mark.parametrize(
    ("tokens", "num_reasoning_tokens", "scored"),
    [
        ([b"<think>", b"a", b"b", b"</think>", b"c"], 4, ["c"]),
        ([b"\n", b"<th", b"ink>", b"a", b"</think>"], 5, []),
        ([b"<thi", b"nk>", b"a", b"</think>", b"\n", b"c", b"d", b""], 4, ["c", "d", ""]),
        ([b"<", b"b", b">"], 0, ["<", "b", ">"]),
        ([b"<"], 0, ["<"]),
    ],
)
def test_reasoning_and_marker_tokens_are_counted_and_have_no_logprobs(
    tokens, num_reasoning_tokens, scored
):
    assert read(tokens)[1:] == (num_reasoning_tokens, scored)


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
        ("<|user|>...<|end|>", ("<|end|>",), None),  # Phi, which has no reasoning
        ("{{ messages }}", (), None),
    ],
)
def test_the_format_is_found_in_template_and_tokens(template, tokens, name):
    found = find_reasoning("auto", template, control(*tokens))
    assert (found and found.form.name) == name
    if name == "mistral":
        assert found.spelled == {0: "[THINK]", 1: "[/THINK]"}
    assert find_reasoning("none", template, control(*tokens)) is None
    assert find_reasoning("kimi", template, control(*tokens)).form.name == "kimi"
