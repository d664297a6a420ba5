"""Conversations to token ids with slots for images, videos and audio.

Invariant: only the chat template can write a control token. A user's `<image>` or `</s>` stays text, in one message
part or across several, and there are as many runs of image slots as image parts.

A random guard is inserted into control tokens that user text spells. The rendered prompt is split at the remaining
control tokens, which are the template's; the guards are removed and the pieces are encoded as plain text. Without
guards the ids equal those of transformers.
"""

import re
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from engines.base import InvalidRequest
from engines.core.sequence import NO_OPTIONS, ImageInput, Prompt
from engines.text.chat_template import ChatTemplate
from engines.text.detokenizer import ControlToken
from engines.text.tools import describe_in_text, to_openai, to_shown
from shared.protocol import ChatMessage, Ending, ImagePart, TemplateOption, TextPart, Tools

if TYPE_CHECKING:
    from engines.text.reasoning import Reasoning
    from engines.text.tokenizer import HfTokenizer

_GUARD_ALPHABET = [chr(code) for code in range(0xE000, 0xE400)]  # private use: no case, no space


@dataclass(frozen=True, slots=True)
class Item:
    """A processed image, video or audio.

    `hash` covers the image and its processing: it is the key of every cache. `text` replaces the template's placeholder;
    it spells control tokens, among them the slots, and may contain plain text.
    """

    hash: str
    #: from the first control token of `text` to its last; None: not checked
    num_tokens: int | None
    pixels: Any
    text: str
    grid: tuple[int, ...] = ()  #: as in `ImageInput`
    is_whole: bool = False  #: as in `ImageInput`
    is_filled: bool = False  #: whether all tokens of the item are slots
    #: Separator token at both ends of the text; adjacent images share one, and a space separates it from a word.
    seam: str = ""
    kind: str = "image"
    slot_id: int | None = None  #: token of its slots; None: the model's
    #: Texts before and after the placeholder that `text` replaces too, if the template writes both.
    around: tuple[str, str] = ("", "")
    num_frames: int = 0  #: of a video


@dataclass(eq=False)
class PromptBuilder:
    """`_slot_id` is the token of image slots, None for a text-only model.

    The template writes it, or the token `_placeholder`, once per image. `others` maps the placeholders of videos and
    audio to their kind. `adds_special_tokens`: add the tokenizer's special tokens to a rendered template that does
    not begin with BOS, like transformers' processors and unlike `apply_chat_template` of its tokenizers.
    """

    _tokenizer: "HfTokenizer"
    _template: ChatTemplate
    _slot_id: int | None
    _placeholder: str = ""
    _reasoning: "Reasoning | None" = None
    adds_special_tokens: bool = True
    others: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._spelling = ControlSpelling(self._tokenizer.control_tokens, self._slot_id)
        self._kinds = {self._placeholder or self._spelling.run_text: "image", **self.others}

    def build(
        self,
        messages: Sequence[ChatMessage],
        items: Sequence[Item],
        options: Mapping[str, TemplateOption] = NO_OPTIONS,
        tools: Tools | None = None,
        ending: Ending = "answer",
    ) -> Prompt:
        """The prompt of a conversation. `items[i]` is the image with index i.

        `ending` "message" continues the last message, like `continue_final_message` of transformers. `options` are
        template variables, `tools` the functions that the template lists. Raises: InvalidRequest.
        """
        if self._template.tool_format is not None:
            messages = move_images(messages)
        elif tools is not None or any(m.tool_calls or m.role == "tool" for m in messages):
            messages, tools = describe_in_text(messages, tools), None
        if unknown := options.keys() - self._template.options:
            raise InvalidRequest(
                f"the model's chat template does not use {len(unknown)} of the given variables: omit those"
            )
        order = [p.image for m in messages for p in m.parts if isinstance(p, ImagePart)]
        if any(not 0 <= index < len(items) for index in order):
            raise InvalidRequest("A message refers to an image that the request does not contain.")
        texts = [_texts_of(message) for message in messages]
        words = [value for value in options.values() if isinstance(value, str)]
        guard = _random_guard([*texts, words])
        protect = self._spelling.protect
        protected = [[protect(text, guard) for text in group] for group in texts]
        options = {
            name: protect(value, guard) if isinstance(value, str) else value
            for name, value in options.items()
        }
        mark = f"{guard}{guard} " if ending == "message" else ""
        if mark:
            _mark_end(messages[-1], protected[-1], mark)
        calls = {
            place: [_protect_in(to_shown(call), protect, guard) for call in message.tool_calls]
            for place, message in enumerate(messages)
            if message.tool_calls
        }
        functions = () if tools is None else tools.functions
        shown_tools = [_protect_in(to_openai(each), protect, guard) for each in functions]
        rendered = self._template.render(
            messages,
            protected,
            options,
            shown_tools,
            calls,
            kinds=[item.kind for item in items],
            is_answered=ending == "answer",
        )
        if mark:
            rendered = _cut_at(rendered, mark)
        shown = [items[index] for index in order]
        expanded, places, shown = self._expand(rendered, shown, guard)
        token_ids, runs = self._encode(
            expanded, places, guard, add_special_tokens=self.adds_special_tokens
        )
        images = (self._place(token_ids, run, item) for run, item in zip(runs, shown, strict=True))
        is_thinking = self._reasoning is not None and self._reasoning.is_opened_by(rendered)
        return Prompt(token_ids, tuple(images), is_thinking=is_thinking)

    def encode(self, text: str, *, add_special_tokens: bool) -> Prompt:
        """Tokenize a text without the template. Control tokens spelled in it are tokens."""
        token_ids, _ = self._encode(text, [], "", add_special_tokens=add_special_tokens)
        return Prompt(token_ids)

    def _expand(
        self, rendered: str, items: list[Item], guard: str
    ) -> tuple[str, list[tuple[int, int]], list[Item]]:
        """Replace placeholders by the texts of items; returns the text, their (start, end), and the items in order.

        A template keeps the order of each kind, but may write all of a kind first.
        """
        found = [
            (start, token.text)
            for start, token in self._spelling.find(rendered)
            if token.text in self._kinds
        ]
        waiting = {
            kind: [item for item in items if item.kind == kind] for kind in self._kinds.values()
        }
        counts = Counter(self._kinds[text] for _, text in found)
        for kind, own in waiting.items():
            if counts[kind] != len(own):
                raise InvalidRequest(
                    f"The model's chat template places {counts[kind]} of the {len(own)} {kind}s "
                    f"of this conversation; send {kind}s in user messages only."
                )
        items = [waiting[self._kinds[text]].pop(0) for _, text in found]
        pieces: list[str] = []
        places: list[tuple[int, int]] = []
        end = length = 0
        for (start, placeholder), item in zip(found, items, strict=True):
            text = item.text
            before, after = item.around
            stop = start + len(placeholder)
            if rendered.endswith(before, end, start) and rendered.startswith(after, stop):
                start, stop = start - len(before), stop + len(after)
            if item.seam and places and places[-1][1] == length and start == end:
                text = text.removeprefix(item.seam)
            pieces += [rendered[end:start], text]
            length += start - end + len(text)
            places.append((length - len(text), length))
            end = stop
            following = rendered[end:].removeprefix(guard)[:1]
            if item.seam and following and not following.isspace() and following != "<":
                pieces.append(" ")
                length += 1
        return "".join([*pieces, rendered[end:]]), places, items

    def _encode(
        self,
        text: str,
        places: list[tuple[int, int]],
        guard: str,
        *,
        add_special_tokens: bool,
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of a text, and the (start, end) of the control tokens of each place."""
        tokenizer = self._tokenizer
        bos = tokenizer.bos_token
        adds_special = add_special_tokens and not (bos and text.startswith(bos))
        ids: list[int] = list(tokenizer.prefix_ids) if adds_special else []
        runs: list[tuple[int, int]] = []
        remaining = iter(places)
        begin, end = next(remaining, (len(text), len(text)))
        first = last = -1
        for number, (piece, control, start, count) in enumerate(self._spelling.cut(text)):
            if piece:
                ids += tokenizer.encode_piece(piece.replace(guard, ""), is_first=number == 0)
            while True:  # for each place within a run of slots
                while start >= end and len(runs) < len(places):
                    runs.append((first, last + 1))
                    begin, end = next(remaining, (len(text), len(text)))
                    first = last = -1
                if control is None or count == 0:
                    break
                is_inside = start >= begin
                taken = min(count, (end - start) // len(control.text)) if is_inside else count
                if is_inside:
                    first, last = len(ids) if first < 0 else first, len(ids) + taken - 1
                ids += [control.id] * taken
                start, count = start + taken * len(control.text), count - taken
        return (ids + list(tokenizer.suffix_ids) if adds_special else ids), runs

    def _place(self, token_ids: list[int], run: tuple[int, int], item: Item) -> ImageInput:
        """The image input of a run of tokens. Raises: InvalidRequest."""
        offset, stop = run
        if item.num_tokens is not None and stop - offset != item.num_tokens:
            raise InvalidRequest(
                f"An image has {stop - offset} tokens in the prompt, but {item.num_tokens} by its "
                "processor."
            )
        run_ids = token_ids[offset:stop]
        slot_id = self._slot_id if item.slot_id is None else item.slot_id
        is_slot = [item.is_filled or token_id == slot_id for token_id in run_ids]
        slots: tuple[tuple[int, int], ...] = ()
        if not all(is_slot):
            edges = [i for i, slot in enumerate(is_slot) if slot != (i > 0 and is_slot[i - 1])]
            edges += [len(is_slot)] * is_slot[-1]
            slots = tuple(zip(edges[::2], edges[1::2], strict=True))
        return ImageInput(
            offset,
            stop - offset,
            item.hash,
            item.pixels,
            slots,
            item.grid,
            item.is_whole,
            item.num_frames,
            item.kind,
        )


class ControlSpelling:
    """Finds spelled control tokens, and guards those in user text."""

    def __init__(self, tokens: Mapping[str, ControlToken], slot_id: int | None = None) -> None:
        """Runs of the token `slot_id` are split as one, since an image has hundreds."""
        self._tokens = tokens
        longest_first = sorted(tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        spelled = {text: re.escape(text) for text in longest_first}
        for text, token in tokens.items():
            is_alone = not any(other.startswith(text) for other in tokens if other != text)
            if token.id == slot_id and is_alone:
                spelled[text] = f"(?P<run>(?:{re.escape(text)})+)"
        self._run_pattern = re.compile("|".join(spelled.values()) or r"(?!)")
        self.run_text = next((text for text, token in tokens.items() if token.id == slot_id), "")
        # texts that may form a control token together with their neighbours
        self._heads = tuple({t[:end] for t in tokens for end in range(1, len(t))})
        self._tails = tuple({t[start:] for t in tokens for start in range(1, len(t))})

    def protect(self, text: str, guard: str) -> str:
        """Insert guards, so that the text spells no control token, alone or with its neighbours."""
        body = text.strip()
        if not body:
            return text
        start = text.index(body)
        while self._pattern.search(body):  # again for overlapping spellings
            body = self._pattern.sub(lambda match: match[0][0] + guard + match[0][1:], body)
        # inside leading and trailing spaces, which templates may trim
        head = guard if body.startswith(self._tails) else ""
        tail = guard if body.endswith(self._heads) else ""
        stop = len(text.rstrip())
        return text[:start] + head + body + tail + text[stop:]

    def find(self, text: str) -> list[tuple[int, ControlToken]]:
        return [(match.start(), self._tokens[match[0]]) for match in self._pattern.finditer(text)]

    def cut(self, rendered: str) -> list[tuple[str, ControlToken | None, int, int]]:
        """Split into (text, control token behind it, its position, its repetitions); the last token is None."""
        pieces: list[tuple[str, ControlToken | None, int, int]] = []
        start = 0
        for match in self._run_pattern.finditer(rendered):
            is_run = match.lastgroup == "run"
            token = self._tokens[self.run_text if is_run else match[0]]
            count = len(match[0]) // len(token.text)
            piece = rendered[start : match.start()]
            pieces.append((piece.rstrip() if token.lstrip else piece, token, match.start(), count))
            start = match.end()
            if token.rstrip:
                start += len(rendered[start:]) - len(rendered[start:].lstrip())
        pieces.append((rendered[start:], None, len(rendered), 1))
        return pieces


def _mark_end(message: ChatMessage, texts: list[str], mark: str) -> None:
    """Append a mark to the last text of a message. Raises: InvalidRequest."""
    last = sum(isinstance(part, TextPart) for part in message.parts) - 1
    if last < 0:
        raise InvalidRequest("The last message has no text to continue: add text to it.")
    texts[last] += mark


def _cut_at(rendered: str, mark: str) -> str:
    """The prompt before the mark, cut as in transformers. Raises: InvalidRequest."""
    start = rendered.rfind(mark.strip())
    if start < 0:
        raise InvalidRequest(
            "The model's chat template does not show the end of the last message: end with a user message."
        )
    before = rendered[:start]
    return before if rendered.startswith(mark, start) else before.rstrip()


def _texts_of(message: ChatMessage) -> list[str]:
    """The message's text parts, then its reasoning."""
    texts = [part.text for part in message.parts if isinstance(part, TextPart)]
    return [*texts, message.reasoning] if message.reasoning else texts


def _protect_in(value: Any, protect: Callable[[str, str], str], guard: str) -> Any:
    if isinstance(value, str):
        return protect(value, guard)
    if isinstance(value, list):
        return [_protect_in(each, protect, guard) for each in value]
    if isinstance(value, dict):
        return {
            protect(key, guard): _protect_in(each, protect, guard) for key, each in value.items()
        }
    return value


def _random_guard(texts: Sequence[Sequence[str]]) -> str:
    """An unpredictable string that no text contains."""
    while True:
        guard = "".join(secrets.choice(_GUARD_ALPHABET) for _ in range(12))
        if not any(guard in text for group in texts for text in group):
            return guard


def move_images(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Move images of tool results into a user message behind them, because templates do not support them there."""
    moved: list[ChatMessage] = []
    for message in messages:
        images = tuple(part for part in message.parts if isinstance(part, ImagePart))
        if message.role != "tool" or not images:
            moved.append(message)
            continue
        texts = tuple(part for part in message.parts if isinstance(part, TextPart))
        moved += [replace(message, parts=texts), ChatMessage("user", images)]
    return moved
