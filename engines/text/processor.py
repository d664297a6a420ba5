"""A checkpoint's processor: conversations to token ids with slots for images, videos and audio.

Invariant: only the chat template can write a control token. A user's `<image>` or `</s>` stays text, in one message
part or across several, and there are as many runs of image slots as image parts.

A random guard is inserted into control tokens that user text spells. The rendered prompt is split at the remaining
control tokens, which are the template's. The guards are removed and the pieces are encoded as plain text. Without
guards the ids equal those of transformers. Processors are immutable, and called from thread pools.
"""

import re
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from PIL import Image

from engines.base import (
    InvalidImage,
    InvalidRequest,
    OpenAudio,
    OpenVideo,
    RequestError,
    UnsupportedCheckpoint,
    can_decode_video,
)
from engines.core.runner import NO_LIMITS, PixelLimits
from engines.core.sequence import NO_OPTIONS, ImageInput, Positions, Prompt
from engines.text.chat_template import (
    PLAIN_TEMPLATE,
    ChatTemplate,
    UnusableTemplate,
    read_chat_template,
    with_videos,
)
from engines.text.detokenizer import ControlToken, Tokenizer
from engines.text.reasoning import Reasoning, find_reasoning
from engines.text.tokenizer import HfTokenizer
from engines.text.tools import TOLD, describe_in_text, to_openai, to_shown
from shared.protocol import (
    THINKING_SWITCHES,
    ChatMessage,
    Ending,
    ImagePart,
    TemplateOption,
    TextPart,
    Tools,
)

_GUARD_ALPHABET = [chr(code) for code in range(0xE000, 0xE400)]  # private use: no case, no space
_EXAMPLE_SIZE = (96, 64)


@dataclass(frozen=True, slots=True)
class Item:
    """A processed image, video or audio.

    `hash` covers the image and its processing: it is the key of every cache. `text` replaces the template's placeholder;
    it spells control tokens, among them the slots, and may contain plain text.
    """

    hash: str
    #: tokens from the first to the last control token of `text`; None: not checked
    num_tokens: int | None
    pixels: Any
    text: str
    is_whole: bool = False  #: as in `ImageInput`
    is_filled: bool = False  #: whether all tokens of the item are slots
    #: Separator token at both ends of the text. Adjacent images share a separator; a space follows it before a word.
    separator: str = ""
    kind: str = "image"
    slot_id: int | None = None  #: token of the item's slots; None: the model's slot token
    #: Texts before and after the placeholder; if the template writes both, `text` replaces them too.
    around: tuple[str, str] = ("", "")
    num_frames: int = 0  #: frames of a video


class ControlSpelling:
    """Finds texts of control tokens, and guards them in user text."""

    def __init__(self, tokens: Mapping[str, ControlToken], slot_id: int | None = None) -> None:
        """`slot_id`: a run of this token is split off as one piece, since an image has hundreds."""
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
        # templates may trim leading and trailing spaces, so the guards are inside of them
        head = guard if body.startswith(self._tails) else ""
        tail = guard if body.endswith(self._heads) else ""
        stop = len(text.rstrip())
        return text[:start] + head + body + tail + text[stop:]

    def protect_in(self, value: Any, guard: str) -> Any:
        """`protect` all texts in a JSON value."""
        if isinstance(value, str):
            return self.protect(value, guard)
        if isinstance(value, list):
            return [self.protect_in(each, guard) for each in value]
        if isinstance(value, dict):
            return {
                self.protect(key, guard): self.protect_in(each, guard)
                for key, each in value.items()
            }
        return value

    def find(self, text: str) -> list[tuple[int, ControlToken]]:
        return [(match.start(), self._tokens[match[0]]) for match in self._pattern.finditer(text)]

    def cut(self, rendered: str) -> list[tuple[str, ControlToken | None, int, int]]:
        """Split into (text, next control token, its position, its repetitions); the last token is None."""
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


def _cut_at(rendered: str, mark: str) -> str:
    """The prompt up to `mark`, which follows the text to continue, as in transformers. Raises: InvalidRequest."""
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


def _random_guard(texts: Sequence[Sequence[str]]) -> str:
    """An unpredictable string that no text contains."""
    while True:
        guard = "".join(secrets.choice(_GUARD_ALPHABET) for _ in range(12))
        if not any(guard in text for group in texts for text in group):
            return guard


def move_images(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Move images of tool results into a user message after them, because templates do not support them there."""
    moved: list[ChatMessage] = []
    for is_result, group in groupby(messages, lambda message: message.role == "tool"):
        run = list(group)
        images = [part for m in run for part in m.parts if isinstance(part, ImagePart)]
        if not is_result or not images:
            moved += run
            continue
        for message in run:
            texts = tuple(part for part in message.parts if isinstance(part, TextPart))
            moved.append(replace(message, parts=texts))
        moved.append(ChatMessage("user", tuple(images)))
    return moved


class MultimodalProcessor:
    """The image processing of a model family. This base class is for text-only models. Thread-safe."""

    #: Token of the image slots, which the chat template writes once per image. None for a model without images.
    slot_id: int | None = None
    #: Larger images are scaled down to this number of pixels; 0: to a fixed size.
    max_pixels: int = 0
    #: The chat template's placeholders for an image (empty: the slot token), a video and audio (empty: unsupported).
    placeholder: str = ""
    video_placeholder: str = ""
    audio_placeholder: str = ""
    #: Template for conversations with a video, if the checkpoint's own has no video placeholder; empty: none.
    video_template: str = ""
    max_audio_s: float = 0.0  #: longest audio file; 0: audio is not supported
    #: The instruction for transcription that the model was trained with; empty: any instruction.
    transcription_prompt: str = ""
    #: The processor's tokenizer, which may add other special tokens around a text than tokenizer.json.
    around: Any = None

    def __init__(self, template: str) -> None:
        self.template = template  #: template for checkpoints without a chat template

    @property
    def image_tokens(self) -> int:
        """Maximum tokens of one image; 0: unknown, or images are not supported."""
        return 0

    def limit(self, max_pixels: int) -> None:
        """Scale larger images down to this number of pixels, if the model supports images of any size."""

    def process(self, image: Image.Image, pixels: PixelLimits = NO_LIMITS) -> Any:
        """Pixels of one image, in the model's format; `pixels` are the request's limits. Raises: InvalidImage."""
        raise InvalidImage("The model does not support images.")

    def process_video(self, video: OpenVideo) -> Any:
        raise InvalidImage("The model does not support videos.")

    def process_audio(self, audio: OpenAudio) -> Any:
        raise InvalidImage("The model does not support audio.")

    def items(self, images: Sequence[tuple[str, Any]], slot: str) -> list[Item]:
        """The items of a request's images; an item may depend on the other images. Raises: InvalidRequest.

        `images` are (hash, pixels); `slot` is the text of the slot token. Control tokens in an item's text are
        encoded as such.
        """
        return []

    def positions(self, prompt: Prompt) -> Positions:
        """Rotary positions of a prompt, one row per coordinate; (): the indices of the tokens."""
        return ()


class ChatProcessor:
    """Implements `Processor` for a checkpoint."""

    is_quick = False  #: chat templates may be slow
    decodes_images = True

    def __init__(
        self,
        tokenizer: HfTokenizer,
        multimodal: MultimodalProcessor,
        template: ChatTemplate,
        reasoning: Reasoning | None = None,
        *,
        adds_special_tokens: bool = True,
    ) -> None:
        """`adds_special_tokens`: add the tokenizer's special tokens to rendered templates that do not begin with BOS.

        transformers' processors add them, but `apply_chat_template` of its tokenizers does not.
        """
        self.reasoning = reasoning
        self.tool_format = template.tool_format or TOLD
        self.shows_tools = template.tool_format is not None
        marks = self.tool_format.trigger + self.tool_format.end
        self.spelled: Mapping[int, str] = {
            token.id: text
            for text, token in tokenizer.control_tokens.items()
            if text in marks and not tokenizer.token_bytes(token.id)
        }
        self.template_options = template.options
        self.control_tokens = tokenizer.control_tokens
        self.image_token_id = multimodal.slot_id
        self.tokenizer: Tokenizer = tokenizer
        self.image_tokens = multimodal.image_tokens
        self.max_image_pixels = multimodal.max_pixels
        self._tokenizer, self._multimodal, self._template = tokenizer, multimodal, template
        self._adds_special_tokens = adds_special_tokens
        self._spelling = ControlSpelling(tokenizer.control_tokens, multimodal.slot_id)
        #: Kinds of media by their placeholders.
        self._kinds = {multimodal.placeholder or self._spelling.run_text: "image"}
        for kind in ("video", "audio") if can_decode_video() else ():
            placeholder: str = getattr(multimodal, f"{kind}_placeholder")
            if placeholder and template.takes(kind, placeholder):
                self._kinds[placeholder] = kind
        self.takes_video = "video" in self._kinds.values()
        takes_audio = "audio" in self._kinds.values()
        self.max_audio_s = multimodal.max_audio_s if takes_audio else 0.0
        self.transcription_prompt = multimodal.transcription_prompt
        #: Process an image, a video or audio. Raises: InvalidImage.
        self.process_image = multimodal.process
        self.process_video = multimodal.process_video
        self.process_audio = multimodal.process_audio

    def build_prompt(
        self,
        messages: Sequence[ChatMessage],
        images: Sequence[tuple[str, Any]],
        options: Mapping[str, TemplateOption] = NO_OPTIONS,
        tools: Tools | None = None,
        ending: Ending = "answer",
    ) -> Prompt:
        """Apply the template. `ending` "message" is transformers' `continue_final_message`. Raises: InvalidRequest."""
        items = self._multimodal.items(images, self._tokenizer.image_token)
        if self._template.tool_format is not None:
            messages = move_images(messages)
        elif tools is not None or any(m.tool_calls or m.role == "tool" for m in messages):
            messages, tools = describe_in_text(messages, tools), None
        if unknown := options.keys() - self._template.options:
            raise InvalidRequest(
                f"the model's chat template does not use {len(unknown)} of the given variables: omit them"
            )
        order = [p.image for m in messages for p in m.parts if isinstance(p, ImagePart)]
        if any(not 0 <= index < len(items) for index in order):
            raise InvalidRequest("A message refers to an image that the request does not contain.")
        words = [value for value in options.values() if isinstance(value, str)]
        guard = _random_guard([*map(_texts_of, messages), words])
        kinds = [item.kind for item in items]
        rendered = self._render(messages, kinds, options, tools, ending, guard)
        shown = [items[index] for index in order]
        expanded, places, shown = self._expand(rendered, shown, guard)
        token_ids, runs = self._encode(
            expanded, places, guard, add_special_tokens=self._adds_special_tokens
        )
        inputs = [self._place(token_ids, run, item) for run, item in zip(runs, shown, strict=True)]
        is_thinking = self.reasoning is not None and self.reasoning.is_opened_by(rendered)
        return self._with_positions(Prompt(token_ids, tuple(inputs), is_thinking=is_thinking))

    def encode_prompt(self, text: str, *, add_special_tokens: bool) -> Prompt:
        token_ids, _ = self._encode(text, [], "", add_special_tokens=add_special_tokens)
        return self._with_positions(Prompt(token_ids))

    def _with_positions(self, prompt: Prompt) -> Prompt:
        return replace(prompt, positions=self._multimodal.positions(prompt))

    def _render(
        self,
        messages: Sequence[ChatMessage],
        kinds: Sequence[str],
        options: Mapping[str, TemplateOption],
        tools: Tools | None,
        ending: Ending,
        guard: str,
    ) -> str:
        """The rendered template, with guards in texts of the request. Raises: InvalidRequest."""
        protect = partial(self._spelling.protect_in, guard=guard)
        texts = [protect(_texts_of(message)) for message in messages]
        mark = f"{guard}{guard} " if ending == "message" else ""
        if mark:
            last = sum(isinstance(part, TextPart) for part in messages[-1].parts) - 1
            if last < 0:
                raise InvalidRequest("The last message has no text to continue: add text to it.")
            texts[-1][last] += mark
        rendered = self._template.render(
            messages,
            texts,
            kinds,
            {name: protect(value) for name, value in options.items()},
            [] if tools is None else [protect(to_openai(each)) for each in tools.functions],
            [[protect(to_shown(call)) for call in message.tool_calls] for message in messages],
            is_answered=ending == "answer",
        )
        return _cut_at(rendered, mark) if mark else rendered

    def _expand(
        self, rendered: str, items: list[Item], guard: str
    ) -> tuple[str, list[tuple[int, int]], list[Item]]:
        """Replace placeholders by the texts of items. Returns the text, the (start, end) of each item in it, and the items.

        A template keeps the order of the items of each kind, but may write all items of one kind first.
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
            if item.separator and places and places[-1][1] == length and start == end:
                text = text.removeprefix(item.separator)
            pieces += [rendered[end:start], text]
            length += start - end + len(text)
            places.append((length - len(text), length))
            end = stop
            following = rendered[end:].removeprefix(guard)[:1]
            if item.separator and following and not following.isspace() and following != "<":
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
                f"An image has {stop - offset} tokens in the prompt, but its processor "
                f"expects {item.num_tokens}."
            )
        run_ids = token_ids[offset:stop]
        slot_id = self.image_token_id if item.slot_id is None else item.slot_id
        is_slot = [item.is_filled or token_id == slot_id for token_id in run_ids]
        slots: tuple[tuple[int, int], ...] = ()
        if not all(is_slot):
            edges = [i for i, slot in enumerate(is_slot) if slot != (i > 0 and is_slot[i - 1])]
            edges += [len(is_slot)] * is_slot[-1]
            slots = tuple(zip(edges[::2], edges[1::2], strict=True))
        others = (item.is_whole, item.num_frames, item.kind)
        return ImageInput(offset, stop - offset, item.hash, item.pixels, slots, *others)

    @property
    def always_thinks(self) -> bool:
        """Whether prompts end within the reasoning, and no template variable changes that."""
        if self.reasoning is None or THINKING_SWITCHES & self.template_options:
            return False
        try:
            hello = ChatMessage("user", (TextPart("hello"),))
            return self.build_prompt([hello], []).is_thinking
        except InvalidRequest:
            return False


def example_prompt(processor: ChatProcessor) -> Prompt | None:
    """A question about a generated image; None for a text-only model. Raises: UnsupportedCheckpoint if refused."""
    if not processor.image_tokens:
        return None
    across, down = Image.linear_gradient("L").resize(_EXAMPLE_SIZE), Image.radial_gradient("L")
    image = Image.merge("RGB", (across, down.resize(_EXAMPLE_SIZE), across.rotate(180)))
    try:
        made = processor.process_image(image)
        parts = (ImagePart(0), TextPart("What is it?"))
        return processor.build_prompt([ChatMessage("user", parts)], [("example", made)])
    except RequestError as error:
        raise UnsupportedCheckpoint(f"the processor refuses a sample image: {error}") from error


def create_processor(
    directory: Path,
    multimodal: MultimodalProcessor,
    reasoning: str = "auto",
    max_pixels: int = 0,
) -> ChatProcessor:
    """The processor of a checkpoint. `reasoning` is the name of a format, auto or none.

    Images are scaled down to `max_pixels` if it is not 0. Raises: UnsupportedCheckpoint.
    """
    if max_pixels:
        multimodal.limit(max_pixels)
    try:
        own = read_chat_template(directory)
        source = own or multimodal.template
        is_tekken = (
            not (directory / "tokenizer.json").is_file() and (directory / "tekken.json").is_file()
        )
        if source == PLAIN_TEMPLATE and is_tekken:
            raise UnsupportedCheckpoint(
                "the checkpoint has a tekken.json but no chat template; save a chat_template.jinja there "
                "(mistral-common renders prompts by code, which is not supported)"
            )
        tokenizer = HfTokenizer(directory, multimodal.slot_id, source)
        if multimodal.around is not None:
            tokenizer.surround(multimodal.around)
        placeholder = multimodal.placeholder or tokenizer.image_token
        template = ChatTemplate(source, placeholder, tokenizer.special_variables)
        if multimodal.video_template and not template.takes("video", multimodal.video_placeholder):
            both = with_videos(source, multimodal.video_template)
            template = ChatTemplate(both, placeholder, tokenizer.special_variables)
    except UnusableTemplate as error:
        raise UnsupportedCheckpoint(str(error)) from None
    found = find_reasoning(reasoning, source, tokenizer.control_tokens)
    return ChatProcessor(
        tokenizer,
        multimodal,
        template,
        found,
        # a text model's own template writes its special tokens itself; the default one has no BOS
        adds_special_tokens=own is None
        or multimodal.slot_id is not None
        or bool(multimodal.audio_placeholder),
    )
