"""Separates the reasoning of a model from its answer by the markers of its family.

Markers may be single tokens or span several. The result does not depend on how the text is cut into pieces, and
contains no markers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from engines.text.detokenizer import ControlToken, Detokenizer, Tokenizer
from engines.text.tools import num_begun

_MAX_HEAD_CHARS = 200  #: an answer without a marker in its first characters has no reasoning


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    name: str
    start: str
    end: str
    #: End of a channel header, for families whose answers consist of channels; else empty.
    head_end: str = ""


#: Source: the chat templates of the families, as they are published.
REASONING_FORMATS = {
    found.name: found
    for found in (
        # DeepSeek-R1, Qwen3, Qwen3-VL, GLM-4.5V, InternVL3.5, MiniMax, Nemotron, Keye ...
        ReasoningFormat("think", "<think>", "</think>"),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),  # Magistral, Ministral
        ReasoningFormat("kimi", "\u25c1think\u25b7", "\u25c1/think\u25b7"),  # Kimi-VL-Thinking
        ReasoningFormat("seed", "<seed:think>", "</seed:think>"),  # Seed-OSS
        ReasoningFormat("cohere", "<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
        ReasoningFormat("gemma", "<|channel>thought\n", "<channel|>"),  # Gemma 4
        # Source: OpenAI, "Harmony response format".
        ReasoningFormat("harmony", "analysis", "<|end|>", "<|message|>"),  # gpt-oss
    )
}


class State(Enum):
    """Position in an answer."""

    HEAD = auto()  #: a possible marker, or the header of a channel
    THINKING = auto()
    BETWEEN = auto()  #: after the reasoning, before the answer's first word
    CONTENT = auto()


class TagSplitter:
    """Splits answers that start with reasoning between two markers; white space around it is dropped."""

    has_parts = False  #: whether answers have several channels, so that markers may occur anywhere

    def __init__(self, form: ReasoningFormat, is_thinking: bool) -> None:
        self.state = State.THINKING if is_thinking else State.HEAD
        self._form = form
        self._held = ""
        self._has_thought = False

    def feed(self, text: str) -> tuple[str, str]:
        """Add text; returns the new reasoning and the new answer text."""
        reasoning = ""
        if self.state is State.HEAD:
            text = self._read_head(text)
        if self.state is State.THINKING:
            reasoning, text = self._think(text)
        if self.state is State.BETWEEN:
            text = text.lstrip()
            if text:
                self.state = State.CONTENT
        return reasoning, text

    def finish(self) -> tuple[str, str]:
        """The remaining reasoning and answer text; an incomplete end marker is dropped."""
        held, self._held = self._held, ""
        if self.state is State.HEAD:
            return "", held
        return held[: len(held) - num_begun(held, self._form.end)].rstrip(), ""

    def _read_head(self, text: str) -> str:
        """The text after the start marker; all of it if there is none."""
        self._held += text
        body = self._held.lstrip()
        start, end = self._form.start, self._form.end
        if body.startswith(start):
            self.state, rest = State.THINKING, body[len(start) :]
        elif body.startswith(end):  # the prompt contains the start marker
            self.state, rest = State.BETWEEN, body[len(end) :]
        elif (start.startswith(body) or end.startswith(body)) and len(self._held) < _MAX_HEAD_CHARS:
            return ""
        else:
            self.state, rest = State.CONTENT, self._held
        self._held = ""
        return rest

    def _think(self, text: str) -> tuple[str, str]:
        """The new reasoning, and the text after it."""
        known = self._held + text
        if not self._has_thought:
            start = self._form.start
            known = known.lstrip()
            while known.startswith(start):  # some models repeat the marker of the prompt
                known = known[len(start) :].lstrip()
            if known and start.startswith(known):
                self._held = known
                return "", ""
        before, marker, behind = known.partition(self._form.end)
        if marker:
            self.state, self._held = State.BETWEEN, ""
            return before.rstrip(), behind
        thought = known[: len(known) - num_begun(known, self._form.end)].rstrip()
        self._held = known[len(thought) :]
        self._has_thought |= bool(thought)
        return thought, ""


class ChannelSplitter:
    """Splits channels, each after a header with its name. All channels except reasoning are the answer."""

    has_parts = True

    def __init__(self, form: ReasoningFormat) -> None:
        self.state = State.HEAD
        self._form = form
        self._held = ""

    def feed(self, text: str) -> tuple[str, str]:
        said = {State.THINKING: "", State.CONTENT: ""}
        known, self._held = self._held + text, ""
        while known:
            is_head = self.state is State.HEAD
            mark = self._form.head_end if is_head else self._form.end
            before, found, behind = known.partition(mark)
            if not is_head:
                if not found:
                    self._held = known[len(known) - num_begun(known, mark) :]
                    before = known[: len(known) - len(self._held)]
                said[self.state] += before
                self.state = State.HEAD if found else self.state
            elif found and len(before) + len(mark) <= _MAX_HEAD_CHARS:
                self.state = State.THINKING if self._form.start in before else State.CONTENT
            elif len(known) < _MAX_HEAD_CHARS:
                self._held = known
            else:
                self.state, behind = State.CONTENT, known
            known = behind
        return said[State.THINKING], said[State.CONTENT]

    def finish(self) -> tuple[str, str]:
        """The remaining reasoning and answer text; headers are dropped."""
        held, self._held = self._held, ""
        is_head = self.state is State.HEAD and "<|" in held
        return ("", "" if is_head or self.state is State.THINKING else held)


@dataclass(frozen=True, slots=True)
class Reasoning:
    form: ReasoningFormat
    #: Spelling of special tokens in markers.
    spelled: Mapping[int, str] = field(default_factory=dict)

    def is_opened_by(self, prompt: str) -> bool:
        """Whether a prompt ends within the reasoning."""
        form = self.form
        return not form.head_end and prompt.rstrip().endswith(form.start.rstrip())


def find_reasoning(
    choice: str, template: str, control_tokens: Mapping[str, ControlToken]
) -> Reasoning | None:
    """The format by name; for `auto`, by the markers in template and vocabulary; for `none`, None."""
    for form in REASONING_FORMATS.values():
        marks = (form.end, form.head_end) if form.head_end else (form.end,)
        is_spelled = all(mark in template or mark in control_tokens for mark in marks)
        if choice != form.name and not (choice == "auto" and is_spelled):
            continue
        whole = f"{form.start}{form.end}{form.head_end}"
        spelled = {
            token.id: text
            for text, token in control_tokens.items()
            if text in whole or (form.head_end and text.startswith("<|"))
        }
        return Reasoning(form, spelled)
    return None


class ReasoningDetokenizer(Detokenizer):
    """A detokenizer for a model that reasons. Its text is the answer; `reasoning` is separate.

    Stop strings end the answer only; they have no effect in the reasoning.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        reasoning: Reasoning,
        *,
        is_thinking: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(tokenizer, **options)
        form = reasoning.form
        self._splitter: TagSplitter | ChannelSplitter = (
            ChannelSplitter(form) if form.head_end else TagSplitter(form, is_thinking)
        )
        self._spelled = reasoning.spelled
        self._num_undecided = 0  # tokens of the undecided head

    def append(self, token_id: int) -> str:
        is_read = self._splitter.state is not State.CONTENT or self._splitter.has_parts
        spelled = self._spelled.get(token_id) if is_read else None
        if spelled is None:
            return self.append_bytes(self._token_bytes(token_id))
        return self._append_text(self._flush() + spelled)

    def append_bytes(self, data: bytes) -> str:
        return self._append_text(self._decode(data))

    def _append_text(self, text: str) -> str:
        before = self._splitter.state
        content = self._add(*self._splitter.feed(text))
        self._count(before, self._splitter.state)
        return content

    def finish(self) -> str:
        if self.is_undecided:  # an answer too short for a marker
            self.is_content, self.is_undecided = True, False
        first = self._add(*self._splitter.feed(self._flush()))
        rest, content = self._splitter.finish()
        self.reasoning += rest
        return first + self._release_all(content)

    def _add(self, reasoning: str, content: str) -> str:
        self.reasoning += reasoning
        return self._release(content)

    def _count(self, before: State, after: State) -> None:
        has_parts = self._splitter.has_parts
        is_head = before is State.HEAD and has_parts
        self.is_content = after is State.CONTENT and before is not State.THINKING and not is_head
        if before is State.HEAD:
            self._num_undecided += 1
        if before is State.THINKING:
            self.num_reasoning_tokens += 1
        elif before is State.HEAD and after in (State.THINKING, State.BETWEEN):
            self.num_reasoning_tokens += self._num_undecided
        if after is not State.HEAD:
            self._num_undecided = 0
        self.is_undecided = after is State.HEAD and not has_parts
