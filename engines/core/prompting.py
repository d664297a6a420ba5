"""Prompts of generate and tokenize tasks, for every engine that takes token ids."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

from engines.base import (
    Adapter,
    AdapterUnavailable,
    Decode,
    Engine,
    InvalidRequest,
    OpenAudio,
    OpenVideo,
    PreparedImage,
    PromptTooLong,
    Tokenization,
)
from engines.core.request import EngineRequest, Prompt
from engines.core.runner import PixelLimits, Processor
from engines.text.detokenizer import decode
from shared.protocol import Generate, ImageRef, SamplingParams, TextPart, Tokenize, Tools

Request = TypeVar("Request", bound=EngineRequest)


class PromptingEngine(Engine[Request]):
    """An engine with a processor: chat template, tokenizer and images."""

    processor: Processor
    vocab_size: int
    max_model_len: int
    _adapters: dict[str, Adapter]  # by digest

    def prepare_image(self, data: bytes, image: ImageRef, decode: Decode) -> Any:
        """The processor's pixels of an image. Raises: InvalidImage."""
        limits = PixelLimits(image.min_pixels, image.max_pixels)
        return self.processor.process_image(data, (image.width, image.height), decode, limits)

    def prepare_video(self, video: OpenVideo) -> Any:
        """The processor's pixels of a video. Raises: InvalidImage."""
        return self.processor.process_video(video)

    def prepare_audio(self, audio: OpenAudio) -> Any:
        """The processor's features of audio. Raises: InvalidImage."""
        return self.processor.process_audio(audio)

    def tokenize(self, task: Tokenize, images: Sequence[PreparedImage]) -> Tokenization:
        """Token ids of a request, or the text of ids. Raises: InvalidRequest."""
        tokenizer = self.processor.tokenizer
        if task.of is None:
            self._check_ids(task.token_ids, "tokens")
            return Tokenization(text=decode(tokenizer, task.token_ids))
        prompt = self._build_prompt(task.of, images, self._choose_tools(task.of.tools))
        return Tokenization(
            prompt.token_ids,
            sum(image.num_tokens for image in prompt.images),
            [tokenizer.token_string(token_id) for token_id in prompt.token_ids]
            if task.with_strings
            else (),
        )

    def _choose_tools(self, tools: Tools | None) -> Tools | None:
        """The functions that the prompt lists."""
        raise NotImplementedError

    def _build_prompt(
        self, task: Generate, images: Sequence[PreparedImage], tools: Tools | None
    ) -> Prompt:
        """Raises: InvalidRequest."""
        prompt = task.prompt
        if prompt is None:
            pairs = [(image.image_hash, image.content) for image in images]
            return self.processor.build_prompt(
                task.messages, pairs, task.template_options, tools, task.ending
            )
        if isinstance(prompt, TextPart):
            return self.processor.encode_prompt(
                prompt.text, add_special_tokens=task.add_special_tokens
            )
        self._check_ids(prompt.token_ids, "prompt")
        return Prompt(list(prompt.token_ids))

    def _find_adapter(self, digest: str) -> Adapter | None:
        """Raises: AdapterUnavailable."""
        if not digest:
            return None
        adapter = self._adapters.get(digest)
        if adapter is None:
            raise AdapterUnavailable("the adapter is no longer loaded", "model")
        return adapter

    def _check_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Raises: InvalidRequest."""
        if any(not 0 <= token_id < self.vocab_size for token_id in token_ids):
            raise InvalidRequest(
                f"A token id is outside the vocabulary: send 0 to {self.vocab_size - 1}.", param
            )

    def _check_request(self, request: EngineRequest) -> None:
        """Check lengths and token ids against the model. Raises: PromptTooLong, InvalidRequest."""
        num_prompt_tokens, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
        if num_prompt_tokens + (max_tokens != 0) > self.max_model_len:
            raise PromptTooLong(
                f"the model's maximum context length is {self.max_model_len} tokens; the prompt has"
                f" {num_prompt_tokens} tokens{_of_media(request)}"
            )
        if num_prompt_tokens == 0:
            raise InvalidRequest("the prompt is empty: send at least one token", "prompt")
        if max_tokens is not None and max_tokens < 0:
            raise InvalidRequest(f"max_tokens is {max_tokens}: send at least 0")
        self._check_token_ids(request.sampling)
        if any(not 0 <= token_id < self.vocab_size for token_id in request.output_token_ids):
            raise InvalidRequest("the answer so far holds tokens of another model")

    def _check_token_ids(self, sampling: SamplingParams) -> None:
        """Raises: InvalidRequest."""
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            for token_id in getattr(sampling, name):
                if not 0 <= token_id < self.vocab_size:
                    raise InvalidRequest(
                        f"{name} names token {token_id}: send token ids below {self.vocab_size}",
                        name,
                    )
        if sampling.min_tokens and sampling.allowed_token_ids:
            ends = self.processor.tokenizer.eos_token_ids.union(sampling.stop_token_ids)
            if ends.issuperset(sampling.allowed_token_ids):
                raise InvalidRequest(
                    "allowed_token_ids has only tokens that min_tokens forbids: send others too",
                    "allowed_token_ids",
                )

    def _max_output_tokens(self, request: EngineRequest) -> int:
        """The requested number, limited by the context length."""
        space = self.max_model_len - len(request.prompt_token_ids)
        max_tokens = request.sampling.max_tokens
        return space if max_tokens is None else min(max_tokens, space)


def _of_media(request: EngineRequest) -> str:
    """The end of the sentence: tokens of images and videos, and what to send instead."""
    videos = [item for item in request.images if item.num_frames]
    counts = Counter[str]()
    for item in request.images:
        if not item.num_frames:
            is_audio = getattr(item.pixels, "kind", "image") == "audio"
            counts["audio" if is_audio else "images"] += item.num_tokens
    text = "".join(f", {count} of them of its {kind}," for kind, count in counts.items())
    if not videos:
        return f"{text} and leaves no room for output"
    num_frames = sum(video.num_frames for video in videos)
    count = sum(video.num_tokens for video in videos)
    what = "video has" if len(videos) == 1 else f"{len(videos)} videos have"
    return (
        f"{text} and leaves no room for output; the {what} {num_frames} frames, {count} tokens: "
        "send fewer frames, by num_frames or fps"
    )
