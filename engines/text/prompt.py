"""Conversations to token ids with slots for images.

Called by the torch processor. The law of this module: only the chat template can write a control token. A
user's `<image>` or `</s>` stays ordinary text, in one message part or spread over several, and there are as
many runs of image slots as image parts. It must not know tensors, files or the wire.

How: where a user's text spells a control token, a random guard is put inside; the rendered prompt is cut at
the control tokens that are left, which are the template's; the guards are taken out, and the pieces between
are encoded as plain text. Without such spellings no guard is put, and the ids are those of transformers.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engines.base import ImageInput, InvalidRequest
from engines.core.runner import Prompt
from engines.text.chat_template import ChatTemplate
from shared.protocol import ChatMessage, ImagePart, TextPart

_GUARD_ALPHABET = [chr(code) for code in range(0xE000, 0xE400)]  # private use: no case, no space


@dataclass(frozen=True, slots=True)
class ControlToken:
    """A token that means something to the model beyond text. `lstrip`: it swallows spaces to its left."""

    id: int
    text: str
    lstrip: bool = False
    rstrip: bool = False


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
        image_token_id: int,
        tokens_per_image: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._image_token_id = image_token_id
        self._tokens_per_image = tokens_per_image
        self._spelling = ControlSpelling(tokenizer.control_tokens)

    def build(self, messages: Sequence[ChatMessage], images: Sequence[tuple[str, Any]]) -> Prompt:
        """Token ids and image offsets. `images[i]` is (image hash, pixels) of the part with index i.

        Raises: InvalidRequest.
        """
        order = [p.image for m in messages for p in m.parts if isinstance(p, ImagePart)]
        if any(not 0 <= index < len(images) for index in order):
            raise InvalidRequest("A message names a image that the request does not hold.")
        texts = [[p.text for p in m.parts if isinstance(p, TextPart)] for m in messages]
        guard = _draw_guard(texts)
        protected = [[self._spelling.protect(text, guard) for text in group] for group in texts]
        rendered = self._template.render(messages, protected)
        token_ids, offsets = self._encode(rendered, guard)
        if len(offsets) != len(order):
            raise InvalidRequest(
                f"The model's chat template places {len(offsets)} of the {len(order)} images "
                "of this conversation; only user messages may hold images."
            )
        inputs = (
            ImageInput(offset, self._tokens_per_image, *images[index])
            for offset, index in zip(offsets, order, strict=True)
        )
        return Prompt(token_ids, tuple(inputs))

    def _encode(self, rendered: str, guard: str) -> tuple[list[int], list[int]]:
        """Ids of a rendered prompt, and where its images begin."""
        tokenizer = self._tokenizer
        bos = tokenizer.bos_token
        adds_special = not (bos and rendered.startswith(bos))
        ids: list[int] = list(tokenizer.prefix_ids) if adds_special else []
        offsets: list[int] = []
        for number, (piece, control) in enumerate(self._spelling.cut(rendered)):
            ids += tokenizer.encode_piece(piece.replace(guard, ""), is_first=number == 0)
            if control is not None and control.id == self._image_token_id:
                offsets.append(len(ids))
                ids += [control.id] * self._tokens_per_image
            elif control is not None:
                ids.append(control.id)
        return (ids + list(tokenizer.suffix_ids) if adds_special else ids), offsets


class ControlSpelling:
    """Finds control tokens where they are spelled, and breaks those that a user spells."""

    def __init__(self, tokens: Mapping[str, ControlToken]) -> None:
        self._tokens = tokens
        longest_first = sorted(tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
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

    def cut(self, rendered: str) -> list[tuple[str, ControlToken | None]]:
        """Pieces of text, each with the control token behind it; the last has none."""
        pieces: list[tuple[str, ControlToken | None]] = []
        start = 0
        for match in self._pattern.finditer(rendered):
            token = self._tokens[match[0]]
            piece = rendered[start : match.start()]
            pieces.append((piece.rstrip() if token.lstrip else piece, token))
            start = match.end()
            if token.rstrip:
                start += len(rendered[start:]) - len(rendered[start:].lstrip())
        pieces.append((rendered[start:], None))
        return pieces


def _draw_guard(texts: Sequence[Sequence[str]]) -> str:
    """A string that no text holds and that no user can foresee."""
    while True:
        guard = "".join(secrets.choice(_GUARD_ALPHABET) for _ in range(12))
        if not any(guard in text for group in texts for text in group):
            return guard
