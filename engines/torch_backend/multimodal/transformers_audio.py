"""Processes audio with a checkpoint's transformers processor, one file at a time."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoProcessor, ProcessorMixin

from engines.base import InvalidImage, InvalidRequest, OpenAudio, UnsupportedCheckpoint
from engines.packages.checkpoint_json import one_line
from engines.text.chat_template import PLAIN_TEMPLATE
from engines.text.processor import Item, MultimodalProcessor
from engines.torch_backend.multimodal.processed import ProcessedImage, equal_steps

#: Models whose audio input the tests compare with transformers. Audio is refused for other models.
TAKES_AUDIO = frozenset(
    {
        "AudioFlamingo3ForConditionalGeneration",
        "Gemma3nForConditionalGeneration",
        "Gemma4ForConditionalGeneration",
        "GlmAsrForConditionalGeneration",
        "Qwen2AudioForConditionalGeneration",
        "Qwen2_5OmniThinkerForConditionalGeneration",
        "VoxtralForConditionalGeneration",
    }
)
#: Processors that accept only one audio file per prompt.
_TAKES_ONE = frozenset({"AudioFlamingo3Processor", "GlmAsrProcessor"})
_LENGTH_TOLERANCE_S = 0.05  #: tolerated excess length, because codecs pad the last packet
_TRANSCRIBE = "Transcribe the audio."
#: Chat template of Voxtral, which transformers leaves to mistral-common. Source: its `InstructTokenizerV7`.
_VOXTRAL_TEMPLATE = (
    "{{ '<s>' }}"
    "{% set parts = messages | map(attribute='content') | sum(start=[]) %}"
    "{% set has_audio = parts | selectattr('type', 'equalto', 'audio') | list | length > 0 %}"
    "{% for m in messages %}"
    "{% set text = m['content'] | selectattr('type', 'equalto', 'text') | map(attribute='text') | join('\n\n') %}"
    "{% if m['role'] == 'system' %}"
    "{% if has_audio %}{{ raise_exception('it accepts no system message with audio') }}{% endif %}"
    "{{ '[SYSTEM_PROMPT]' + text + '[/SYSTEM_PROMPT]' }}"
    "{% elif m['role'] == 'assistant' %}{{ text + '</s>' }}"
    "{% else %}"
    "{% set asked = text.partition('" + _TRANSCRIBE + "') %}"
    "{% set language = asked[2][17:19] %}"
    "{% set transcribes = loop.last and has_audio and asked[1] and not asked[0]"
    " and asked[2] in ('', ' The language is ' + language + '.') %}"
    "{% set more = not loop.first and loop.previtem['role'] == m['role'] %}"
    "{% set last = loop.previtem['content'] | last if more else {'type': ''} %}"
    "{{ '' if more else '[INST]' }}{% for c in m['content'] %}"
    "{% if c['type'] == 'audio' %}{{ '[BEGIN_AUDIO][AUDIO]' }}"
    "{% elif not transcribes %}"
    "{{ '\n\n' if (last if loop.first else loop.previtem)['type'] == 'text' }}{{ c['text'] }}"
    "{% endif %}{% endfor %}"
    "{{ '' if not loop.last and loop.nextitem['role'] == m['role'] else '[/INST]' }}"
    "{% if transcribes %}{{ 'lang:' + language if language }}{{ '[TRANSCRIBE]' }}{% endif %}"
    "{% endif %}{% endfor %}"
)
_MELS_PER_TOKEN = 8  #: spectrogram frames per token of Voxtral
_VOXTRAL_MAX_S = 2400  #: as published: 40 minutes


class Audios:
    """Processes audio with the audio part of a checkpoint's processor. Units: seconds."""

    def __init__(self, processor: Any, model_class: Any) -> None:
        self._processor = processor
        extractor = processor.feature_extractor
        tokenizer = processor.tokenizer
        #: The chat template's placeholder for audio, which is also the text of a slot.
        self.placeholder: str = processor.audio_token
        self._slot_id: int = tokenizer.convert_tokens_to_ids(self.placeholder)
        self._rate: int = extractor.sampling_rate
        self.max_s = _longest_s(processor)
        self._wanted = frozenset(inspect.signature(model_class.forward).parameters)
        merged = processor._merge_kwargs(
            tokenizer_init_kwargs=tokenizer.init_kwargs, return_tensors="pt"
        )
        self._options: dict[str, Any] = dict(merged["audio_kwargs"])
        if "sampling_rate" in inspect.signature(type(extractor).__call__).parameters:
            self._options["sampling_rate"] = self._rate

    def process(self, audio: OpenAudio) -> ProcessedImage:
        """Raises: InvalidImage."""
        self._check(audio.info.length_s)
        samples = np.frombuffer(audio.samples(self._rate), np.float32).copy()
        self._check(len(samples) / self._rate)
        samples = samples[: int(self.max_s * self._rate)]
        try:
            made, [text, *_] = self._processor._process_audio([samples], **self._options)
        except Exception as error:  # processors raise any type
            raise unfit("audio", error) from error
        text = str(text)
        num_slots = text.count(self.placeholder)
        inputs = {
            name: torch.as_tensor(np.asarray(x)) if not isinstance(x, Tensor) else x
            for name, x in dict(made).items()
            if name in self._wanted
        }
        # inputs are checked too, because Gemma 3n has slots even for empty audio
        if num_slots == 0 or any(x.numel() == 0 for x in inputs.values()):
            raise InvalidImage("The audio is too short: it results in no tokens.")
        if not all(bool(x.isfinite().all()) for x in inputs.values()):
            raise InvalidImage("The audio has samples that are not finite, or too large.")
        return ProcessedImage(
            inputs,
            text,
            num_slots,
            kind="audio",
            slots_of="audio",
            slot_id=self._slot_id,
            step_slots=self._slots_of_windows(inputs, num_slots),
        )

    def _slots_of_windows(self, inputs: dict[str, Tensor], num_slots: int) -> tuple[int, ...]:
        """The number of slots of each window; () if windows are not encoded independently."""
        if inputs.keys() == {"input_features"}:  # without masks, windows have equally many slots
            return equal_steps(num_slots, len(inputs["input_features"]))
        count = getattr(self._processor, "_get_audio_token_length", None)
        if count is None or inputs.keys() != {"input_features", "input_features_mask"}:
            return ()
        slots = tuple(count(inputs["input_features_mask"].sum(-1)).tolist())
        return slots if all(slots) and sum(slots) == num_slots else ()

    def _check(self, length_s: float) -> None:
        if length_s > self.max_s + _LENGTH_TOLERANCE_S:
            raise InvalidImage(
                f"The audio is {length_s:.1f} s long; this model accepts at most {self.max_s:g} s. Send shorter parts."
            )


def unfit(kind: str, error: Exception) -> InvalidImage:
    return InvalidImage(f"The model's processor cannot process this {kind}: {one_line(error)}")


def find_audio(processor: Any, model_class: Any) -> Audios | None:
    """The audio part of a processor; None if it has none, or the model is not in `TAKES_AUDIO`."""
    token = getattr(processor, "audio_token", None)
    if (
        model_class.__name__ not in TAKES_AUDIO
        or getattr(processor, "feature_extractor", None) is None
        or token not in processor.tokenizer.get_added_vocab()
    ):
        return None
    return Audios(processor, model_class)


def _spell(processor: Any) -> None:
    """Give Voxtral's processor a method that returns audio and its text; the existing one requires mistral-common."""
    if type(processor).__name__ != "VoxtralProcessor":
        return

    def process(audio: Any, max_source_positions: int, **options: Any) -> tuple[Any, list[str]]:
        windows = processor._retrieve_input_features(audio, max_source_positions, **options)
        num_slots = len(windows) * max_source_positions // _MELS_PER_TOKEN
        return {"input_features": windows}, [processor.audio_token * num_slots]

    processor._process_audio = process
    processor.max_audio_len = _VOXTRAL_MAX_S
    processor.default_chat_template = _VOXTRAL_TEMPLATE
    processor.default_transcription_prompt = _TRANSCRIBE


def _longest_s(processor: Any) -> float:
    """Length in seconds beyond which the processor would truncate audio."""
    if (ms := getattr(processor, "audio_ms_per_token", None)) is not None:
        return processor.audio_seq_length * ms / 1000
    extractor = processor.feature_extractor
    if not hasattr(extractor, "chunk_length"):
        most: int = inspect.signature(type(extractor).__call__).parameters["max_length"].default
        return most / extractor.sampling_rate
    window: int = extractor.chunk_length
    longest: int = getattr(processor, "max_audio_len", window)
    return float(longest // window * window)


def load_processor(directory: Path, kind: str, part: str) -> ProcessorMixin:
    """Load a checkpoint's processor, which must have the attribute `part`. Raises: UnsupportedCheckpoint."""
    try:
        processor = AutoProcessor.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # processors raise any type
        raise UnsupportedCheckpoint(
            f"transformers cannot load the checkpoint's {kind} processor: {one_line(error)}"
        ) from error
    if not isinstance(processor, ProcessorMixin) or not hasattr(processor, part):
        raise UnsupportedCheckpoint(f"the checkpoint has a tokenizer, but no {kind} processor")
    return processor


class TransformersAudio(MultimodalProcessor):
    """Processor of models that accept audio but no images."""

    def __init__(self, directory: Path, model_class: Any) -> None:
        processor: Any = load_processor(directory, "audio", "feature_extractor")
        _spell(processor)
        found = find_audio(processor, model_class)
        if found is None:
            raise UnsupportedCheckpoint("the checkpoint has a tokenizer, but no audio processor")
        self._audios = found
        self.audio_placeholder = found.placeholder
        self.max_audio_s = found.max_s
        self._takes_one = type(processor).__name__ in _TAKES_ONE
        self.transcription_prompt = getattr(processor, "default_transcription_prompt", "")
        # Qwen2-Audio's published checkpoint has no template.
        super().__init__(getattr(processor, "default_chat_template", PLAIN_TEMPLATE))
        self.around = getattr(processor.tokenizer, "backend_tokenizer", None)

    def process_audio(self, audio: OpenAudio) -> ProcessedImage:
        return self._audios.process(audio)

    def items(self, images: Sequence[tuple[str, Any]], slot: str) -> list[Item]:
        if self._takes_one and len(images) > 1:
            raise InvalidRequest(
                f"This model accepts one audio file; the request has {len(images)}.", "messages"
            )
        return [
            Item(name, None, audio, audio.text, kind="audio", slot_id=audio.slot_id)
            for name, audio in images
        ]
