"""Prompts and images of a model: image bytes to pixels, messages to token ids.

Called from thread pools. Thread-safe, because processors are immutable.
"""

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
from PIL import Image

from engines.base import (
    Decode,
    InvalidImage,
    InvalidRequest,
    OpenAudio,
    OpenVideo,
    RequestError,
    UnsupportedCheckpoint,
    can_decode_video,
)
from engines.core.runner import NO_LIMITS, PixelLimits
from engines.core.sequence import NO_OPTIONS, Positions, Prompt
from engines.image_decoder import decode_image
from engines.text.chat_template import (
    PLAIN_TEMPLATE,
    ChatTemplate,
    UnusableTemplate,
    read_chat_template,
    with_videos,
)
from engines.text.detokenizer import Tokenizer
from engines.text.prompt import Item, PromptBuilder
from engines.text.reasoning import Reasoning, find_reasoning
from engines.text.tokenizer import HfTokenizer
from engines.text.tools import TOLD
from shared.protocol import (
    THINKING_SWITCHES,
    ChatMessage,
    Ending,
    ImagePart,
    TemplateOption,
    TextPart,
    Tools,
)

_EXAMPLE_SIZE = (96, 64)


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
    #: For conversations with a video, if the checkpoint's template writes none; empty: there is none.
    video_template: str = ""
    max_audio_s: float = 0.0  #: longest audio file; 0: audio is not supported
    #: The instruction that the model was trained to transcribe with; empty: any.
    transcription_prompt: str = ""
    #: The tokenizer's special tokens around a text, which a processor may have changed.
    around: Any = None

    def __init__(self, template: str) -> None:
        self.template = template  #: for checkpoints without a chat template

    @property
    def image_tokens(self) -> int:
        """Maximum tokens of one image; 0: unknown, or the model takes no images."""
        return 0

    def limit(self, max_pixels: int) -> None:
        """Scale larger images down to this number of pixels, if the model takes images of any size."""

    def process(
        self,
        data: bytes,
        expected_size: tuple[int, int],
        decode: Decode = decode_image,
        pixels: PixelLimits = NO_LIMITS,
    ) -> Any:
        """Pixels of one image, in the model's format. Raises: InvalidImage.

        `expected_size` is the admitted (width, height); `pixels` are the request's limits.
        """
        raise InvalidImage("The model takes no images.")

    def process_video(self, video: OpenVideo) -> Any:
        """Raises: InvalidImage."""
        raise InvalidImage("The model takes no videos.")

    def process_audio(self, audio: OpenAudio) -> Any:
        """Raises: InvalidImage."""
        raise InvalidImage("The model takes no audio.")

    def items(self, images: Sequence[tuple[str, Any]], slot: str) -> list[Item]:
        """The prompt text of a request's images, which may depend on each other. Raises: InvalidRequest.

        `images` are (hash, pixels); `slot` is the text of the slot token. Control tokens in an item's text are
        special.
        """
        return []

    def positions(self, prompt: Prompt) -> Positions:
        """Rotary positions of a prompt, one row per coordinate; () for token indices."""
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
        max_model_len: int,
        reasoning: Reasoning | None = None,
        *,
        adds_special_tokens: bool = True,
    ) -> None:
        """`adds_special_tokens` as in `PromptBuilder`."""
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
        self.max_model_len = max_model_len
        self.image_tokens = multimodal.image_tokens
        self.max_image_pixels = multimodal.max_pixels
        self._slot = tokenizer.image_token
        others: dict[str, str] = {}
        for kind in ("video", "audio") if can_decode_video() else ():
            spelled: str = getattr(multimodal, f"{kind}_placeholder")
            if spelled and template.takes(kind, spelled):
                others[spelled] = kind
        self.takes_video = "video" in others.values()
        takes_audio = "audio" in others.values()
        self.max_audio_s = multimodal.max_audio_s if takes_audio else 0.0
        self.transcription_prompt = multimodal.transcription_prompt
        self._multimodal = multimodal
        #: Decode and process an image, a video or audio. Raises: InvalidImage.
        self.process_image = multimodal.process
        self.process_video = multimodal.process_video
        self.process_audio = multimodal.process_audio
        self._prompt_builder = PromptBuilder(
            tokenizer,
            template,
            multimodal.slot_id,
            multimodal.placeholder,
            reasoning,
            adds_special_tokens=adds_special_tokens,
            others=others,
        )

    def build_prompt(
        self,
        messages: Sequence[ChatMessage],
        images: Sequence[tuple[str, Any]],
        options: Mapping[str, TemplateOption] = NO_OPTIONS,
        tools: Tools | None = None,
        ending: Ending = "answer",
    ) -> Prompt:
        """Apply the chat template. Raises: InvalidRequest."""
        items = self._multimodal.items(images, self._slot)
        prompt = self._prompt_builder.build(messages, items, options, tools, ending)
        return msgspec.structs.replace(prompt, positions=self._multimodal.positions(prompt))

    def encode_prompt(self, text: str, *, add_special_tokens: bool) -> Prompt:
        prompt = self._prompt_builder.encode(text, add_special_tokens=add_special_tokens)
        return msgspec.structs.replace(prompt, positions=self._multimodal.positions(prompt))

    @property
    def always_thinks(self) -> bool:
        """Whether prompts begin the reasoning, and no template variable changes that."""
        if self.reasoning is None or THINKING_SWITCHES & self.template_options:
            return False
        try:
            hello = ChatMessage("user", (TextPart("hello"),))
            return self._prompt_builder.build([hello], []).is_thinking
        except InvalidRequest:
            return False


def example_prompt(processor: ChatProcessor) -> Prompt | None:
    """A question about a generated image, processed like a request's. None for a text-only model.

    Raises: UnsupportedCheckpoint if the processor refuses it.
    """
    if not processor.image_tokens:
        return None
    width, height = _EXAMPLE_SIZE
    across, down = Image.linear_gradient("L").resize(_EXAMPLE_SIZE), Image.radial_gradient("L")
    image = Image.merge("RGB", (across, down.resize(_EXAMPLE_SIZE), across.rotate(180)))
    data = BytesIO()
    image.save(data, "PNG")
    try:
        made = processor.process_image(data.getvalue(), (width, height))
        parts = (ImagePart(0), TextPart("What is it?"))
        return processor.build_prompt([ChatMessage("user", parts)], [("example", made)])
    except RequestError as error:
        raise UnsupportedCheckpoint(f"the processor refuses a sample image: {error}") from error


def create_processor(
    directory: Path,
    multimodal: MultimodalProcessor,
    max_model_len: int,
    reasoning: str = "auto",
    max_pixels: int = 0,
) -> ChatProcessor:
    """The processor of a checkpoint. `reasoning` names a format, or is auto or none.

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
                "the checkpoint has a tekken.json and no chat template, which mistral-common would make; save its "
                "chat_template.jinja there"
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
        max_model_len,
        found,
        # a text model's own template is complete; the default one has no BOS
        adds_special_tokens=own is None
        or multimodal.slot_id is not None
        or bool(multimodal.audio_placeholder),
    )
