"""Conversations to token ids with slots for images.

Called by the torch processor. The law of this module: only the chat template can write a control
token. A user's `<image>` or `</s>` stays ordinary text, in one message part or spread over several,
and there are as many runs of image slots as image parts.

How: where a user's text spells a control token, a random guard is put inside; the rendered prompt
is cut at the control tokens that are left, which are the template's; the guards are taken out, and
the pieces between are encoded as plain text. Without such spellings no guard is put, and the ids
are those of transformers.
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from engines.base import InvalidRequest
from engines.core.request import ImageInput
from engines.core.runner import NO_OPTIONS, Prompt
from engines.text.chat_template import ChatTemplate
from engines.text.tools import describe_in_text, move_images, to_openai, to_shown
from shared.protocol import ChatMessage, Ending, ImagePart, TemplateOption, TextPart, Tools

if TYPE_CHECKING:
    from engines.text.reasoning import Reasoning

_GUARD_ALPHABET = [chr(code) for code in range(0xE000, 0xE400)]  # private use: no case, no space


@dataclass(frozen=True, slots=True)
class ControlToken:
    """A token that means something to the model beyond text. `lstrip`: it swallows spaces to its left."""

    id: int
    text: str
    lstrip: bool = False
    rstrip: bool = False


@dataclass(frozen=True, slots=True)
class Item:
    """An image as a family's processor made it ready.

    `hash` is of the image and of how it was processed: the key of every cache. `text` stands in the prompt in place of
    the template's placeholder; it spells control tokens, among them the slots, and may hold plain text between them.
    """

    hash: str
    #: from the first control token of `text` to its last; None: as many as there are
    num_tokens: int | None
    pixels: Any
    text: str
    grid: tuple[int, ...] = ()  #: rows and columns of slots and the like
    is_whole: bool = False  #: as of `ImageInput`
    is_filled: bool = False  #: whether all tokens of it are slots, whatever they are
    #: A token that the text begins and ends with; neighbours share one, and a space parts it from a word.
    seam: str = ""


class PromptTokenizer(Protocol):
    """What prompts need of a tokenizer, beyond what engines need."""

    control_tokens: Mapping[str, ControlToken]
    bos_token: str | None
    prefix_ids: Sequence[int]  #: put before every text, where the template does not begin with BOS
    suffix_ids: Sequence[int]

    def encode_piece(self, text: str, *, is_first: bool) -> list[int]:
        """Plain text at the start of a prompt, or behind a control token."""
        ...


class PromptBuilder:
    """Makes prompts for one model."""

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        template: ChatTemplate,
        slot_id: int | None,
        placeholder: str = "",
        reasoning: "Reasoning | None" = None,
        *,
        adds_special_tokens: bool = True,
    ) -> None:
        """`slot_id` is the token of image slots, None for no images.

        The template spells it once where an image is, or another token as `placeholder`. `adds_special_tokens`:
        a rendered template that does not begin with BOS gets the tokenizer's special tokens, as transformers'
        processors add them; `apply_chat_template` of its tokenizers never does.
        """
        self._tokenizer = tokenizer
        self._template = template
        self._slot_id = slot_id
        self._spelling = ControlSpelling(tokenizer.control_tokens, slot_id)
        self._placeholder = placeholder or self._spelling.run_text
        self._reasoning = reasoning
        self._adds_special_tokens = adds_special_tokens

    def build(
        self,
        messages: Sequence[ChatMessage],
        items: Sequence[Item],
        options: Mapping[str, TemplateOption] = NO_OPTIONS,
        tools: Tools | None = None,
        ending: Ending = "answer",
    ) -> Prompt:
        """Token ids and where images are. `items[i]` is the image of the part with index i.

        `ending` "message" continues the last message, as `continue_final_message` of transformers.

        `options` are further variables of the template, `tools` functions that the model is told of.
        Raises: InvalidRequest.
        """
        if self._template.tool_format is not None:
            messages = move_images(messages)
        elif tools is not None or any(m.tool_calls or m.role == "tool" for m in messages):
            messages, tools = describe_in_text(messages, tools), None
        if unknown := options.keys() - self._template.options:
            raise InvalidRequest(
                f"the model's chat template reads {len(unknown)} of the given variables nowhere"
            )
        order = [p.image for m in messages for p in m.parts if isinstance(p, ImagePart)]
        if any(not 0 <= index < len(items) for index in order):
            raise InvalidRequest("A message refers to an image that the request does not hold.")
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
            messages, protected, options, shown_tools, calls, is_answered=ending == "answer"
        )
        if mark:
            rendered = _cut_at(rendered, mark)
        shown = [items[index] for index in order]
        expanded, places = self._expand(rendered, shown, guard)
        token_ids, runs = self._encode(
            expanded, places, guard, add_special_tokens=self._adds_special_tokens
        )
        images = (self._place(token_ids, run, item) for run, item in zip(runs, shown, strict=True))
        is_thinking = self._reasoning is not None and self._reasoning.is_opened_by(rendered)
        return Prompt(token_ids, tuple(images), is_thinking=is_thinking)

    def encode(self, text: str, *, add_special_tokens: bool) -> Prompt:
        """A text as it stands, without the template: control tokens that it spells are tokens."""
        token_ids, _ = self._encode(text, [], "", add_special_tokens=add_special_tokens)
        return Prompt(token_ids)

    def _expand(
        self, rendered: str, items: list[Item], guard: str
    ) -> tuple[str, list[tuple[int, int]]]:
        """The prompt with the images' texts in the template's places, and where these begin and end."""
        found = [
            start
            for start, token in self._spelling.find(rendered)
            if token.text == self._placeholder
        ]
        if len(found) != len(items):
            raise InvalidRequest(
                f"The model's chat template places {len(found)} of the {len(items)} images "
                "of this conversation; only user messages may hold images."
            )
        pieces: list[str] = []
        places: list[tuple[int, int]] = []
        end = length = 0
        for start, item in zip(found, items, strict=True):
            text = item.text
            if item.seam and places and places[-1][1] == length and start == end:
                text = text.removeprefix(item.seam)
            pieces += [rendered[end:start], text]
            length += start - end + len(text)
            places.append((length - len(text), length))
            end = start + len(self._placeholder)
            if item.seam and _is_word(rendered[end:].removeprefix(guard)[:1]):
                pieces.append(" ")
                length += 1
        return "".join([*pieces, rendered[end:]]), places

    def _encode(
        self,
        text: str,
        places: list[tuple[int, int]],
        guard: str,
        *,
        add_special_tokens: bool,
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of a prompt's text, and between which of them the control tokens of each place are."""
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
            while True:  # for each place that a run of slots reaches into
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
        """An image at its run of tokens. Raises: InvalidRequest."""
        offset, stop = run
        if item.num_tokens is not None and stop - offset != item.num_tokens:
            raise InvalidRequest(
                f"An image comes to {stop - offset} tokens in the prompt, but its processor says "
                f"{item.num_tokens}."
            )
        run_ids = token_ids[offset:stop]
        is_slot = [item.is_filled or token_id == self._slot_id for token_id in run_ids]
        slots: tuple[tuple[int, int], ...] = ()
        if not all(is_slot):
            edges = [i for i, slot in enumerate(is_slot) if slot != (i > 0 and is_slot[i - 1])]
            edges += [len(is_slot)] * is_slot[-1]
            slots = tuple(zip(edges[::2], edges[1::2], strict=True))
        return ImageInput(
            offset, stop - offset, item.hash, item.pixels, slots, item.grid, item.is_whole
        )


class ControlSpelling:
    """Finds control tokens where they are spelled, and breaks those that a user spells."""

    def __init__(self, tokens: Mapping[str, ControlToken], slot_id: int | None = None) -> None:
        """Runs of the token `slot_id` are cut as one, since an image has hundreds."""
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
        # What a text may begin or end with to make a control token together with its neighbours.
        self._heads = tuple({t[:end] for t in tokens for end in range(1, len(t))})
        self._tails = tuple({t[start:] for t in tokens for start in range(1, len(t))})

    def protect(self, text: str, guard: str) -> str:
        """The text with guards, so that neither it alone nor with its neighbours spells a control token."""
        body = text.strip()
        if not body:
            return text
        start = text.index(body)
        while self._pattern.search(body):  # again, where spellings overlap
            body = self._pattern.sub(lambda match: match[0][0] + guard + match[0][1:], body)
        # Within leading and trailing spaces, which templates may trim.
        head = guard if body.startswith(self._tails) else ""
        tail = guard if body.endswith(self._heads) else ""
        stop = len(text.rstrip())
        return text[:start] + head + body + tail + text[stop:]

    def find(self, text: str) -> list[tuple[int, ControlToken]]:
        """The control tokens of a text, each with the place where its spelling begins."""
        return [(match.start(), self._tokens[match[0]]) for match in self._pattern.finditer(text)]

    def cut(self, rendered: str) -> list[tuple[str, ControlToken | None, int, int]]:
        """Pieces of text, each with the control token behind it, that one's place and how often it stands there.

        The last has none.
        """
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
    """Put a mark behind the last text of a message. Raises: InvalidRequest."""
    last = sum(isinstance(part, TextPart) for part in message.parts) - 1
    if last < 0:
        raise InvalidRequest("The last message holds no text that could be continued.")
    texts[last] += mark


def _cut_at(rendered: str, mark: str) -> str:
    """The prompt up to the mark, as transformers cuts it. Raises: InvalidRequest."""
    start = rendered.rfind(mark.strip())
    if start < 0:
        raise InvalidRequest(
            "The model's chat template does not show the end of the last message: end with a user message."
        )
    before = rendered[:start]
    return before if rendered.startswith(mark, start) else before.rstrip()


def _is_word(character: str) -> bool:
    return bool(character) and not character.isspace() and character != "<"


def _texts_of(message: ChatMessage) -> list[str]:
    """Its text parts, and last what was thought before them."""
    texts = [part.text for part in message.parts if isinstance(part, TextPart)]
    return [*texts, message.reasoning] if message.reasoning else texts


def _protect_in(value: Any, protect: Callable[[str, str], str], guard: str) -> Any:
    """The same with every string in it protected."""
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
    """A string that no text holds and that no user can foresee."""
    while True:
        guard = "".join(secrets.choice(_GUARD_ALPHABET) for _ in range(12))
        if not any(guard in text for group in texts for text in group):
            return guard
