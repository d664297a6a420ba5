"""Audio: the tokens of transformers for the same file, by every way."""

import io
import json
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers import AutoProcessor

from engines.base import InvalidImage, InvalidRequest
from engines.core.sequence import ImageInput, Prompt
from engines.registry import create_engine
from engines.text.processor import ChatProcessor, create_processor
from engines.torch_backend.models.generic.family import FAMILY
from engines.torch_backend.models.hf_config import read_fields
from engines.torch_backend.multimodal import parts
from engines.torch_backend.multimodal.processed import split
from engines.torch_backend.multimodal.transformers_audio import TAKES_AUDIO
from gateway.api.transcriptions import TranscriptionRequest
from shared.blobs.object_store import UrlBlobReader
from shared.protocol import (
    BlobRef,
    ChatMessage,
    ImagePart,
    ImageRef,
    ModelCard,
    SamplingParams,
    TextPart,
)
from shared.settings.limits import LimitSettings
from tests.contract.test_model_family import make_image
from tests.engines.torch_backend import ways
from tests.engines.torch_backend.models import family_table, test_families
from tests.engines.torch_backend.models.family_table import TEXT, Family, named, tokenizer, visual
from tests.engines.torch_backend.models.test_families import (
    CPU,
    Loaded,
    generate,
    load,
    make_request,
)
from tests.engines.torch_backend.models.test_video import WAYS, Question, ask_of
from tests.engines.torch_backend.models.test_video import pool as pool
from tests.engines.torch_backend.ways import Way
from tests.factories_audio import SOUNDS, make_audio, sound
from tests.factories_queue import make_request as make_queue_request
from tests.factories_tekken import make_tekken
from tests.factories_torch import run_to_end, smallest_chunks
from tests.long import IS_LONG
from worker.prepare.preparer import Preprocessor
from worker.prepare.video_pool import VideoPool

#: of processors' own ways with numpy
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
RATE = 16_000
QUICK = frozenset({"GLM-ASR", "Qwen2-Audio"})
QUICK_WAYS: list[Way] = [ways.run_alone, ways.run_chunked, ways.run_encoder_cached]
#: Strings are texts and names of files; numbers are seeds of images.
QUESTIONS: dict[str, Question] = {
    "audio": ["wav", "What is it?"],
    "again": ["wav", "What else?"],
    "other": ["See: ", "mp3", " and say."],
    # of one length: transformers pads the audio of a prompt to the longest, which Gemma 3n hears at the end
    "two": ["flac", "or ", "opus", "?"],
    "both": [3, "or ", "m4a", "?"],
    "text": ["Say a word."],
}


class _Auto:
    """What transformers loads an architecture with that is in no list of models of images and text."""

    def __init__(self, name: str) -> None:
        model_class = getattr(transformers, f"{name}ForConditionalGeneration")
        self._model_mapping = {getattr(transformers, f"{name}Config"): model_class}
        self.from_pretrained, self.from_config = model_class.from_pretrained, model_class


@dataclass(frozen=True)
class AudioFamily(Family):
    class_name: str = ""
    audio_placeholder: str = ""

    @property
    def auto(self) -> Any:
        return _Auto(self.class_name)


def row(family: Family, class_name: str, placeholder: str) -> AudioFamily:
    own = {name: getattr(family, name) for name in Family.__dataclass_fields__}
    opening = "{% set audio = '" + placeholder + "' %}" + family.opening
    return AudioFamily(
        **{**own, "opening": opening}, class_name=class_name, audio_placeholder=placeholder
    )


def whisper() -> Any:
    return transformers.WhisperFeatureExtractor(feature_size=80, chunk_length=4)


TOWER: dict[str, Any] = {
    "d_model": 32, "hidden_size": 32, "encoder_layers": 2, "num_hidden_layers": 2, "encoder_attention_heads": 2,
    "num_attention_heads": 2, "encoder_ffn_dim": 48, "intermediate_size": 48, "num_mel_bins": 80,
    "max_source_positions": 200,
}  # fmt: skip


def _qwen2() -> Family:
    special = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
    return visual(
        "Qwen2-Audio", "", lambda: transformers.Qwen2AudioProcessor(whisper(), tokenizer(*special)), "Qwen2Audio",
        lambda: {
            "audio_config": {**TOWER, "model_type": "qwen2_audio_encoder"},
            "text_config": {**TEXT, "model_type": "qwen2"}, "audio_token_id": 302, "audio_token_index": 302,
        },
    )  # fmt: skip


def _glm() -> Family:
    return visual(
        "GLM-ASR", "",
        lambda: transformers.GlmAsrProcessor(whisper(), tokenizer("<|audio|>"), audio_token="<|audio|>", max_audio_len=40),
        "GlmAsr",
        lambda: {
            "audio_config": {
                **TOWER, "intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 16,
                "max_position_embeddings": 200,
            },
            "text_config": {**TEXT, "model_type": "llama"}, "audio_token_id": 302,
        },
    )  # fmt: skip


def _flamingo() -> Family:
    return visual(
        "Audio Flamingo 3", "",
        lambda: transformers.AudioFlamingo3Processor(whisper(), tokenizer("<sound>"), max_audio_len=40),
        "AudioFlamingo3",
        lambda: {"audio_config": TOWER, "text_config": {**TEXT, "model_type": "qwen2"}, "audio_token_id": 302},
    )  # fmt: skip


def _gemma() -> Family:
    family = named("Gemma 4 E")

    def create() -> Any:
        config = family.create().to_dict()
        config["audio_config"] = {
            "model_type": "gemma4_audio", "use_clipped_linears": False, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "output_proj_dims": 48, "subsampling_conv_channels": [128, 4], "conv_kernel_size": 3,
            "attention_chunk_size": 4, "attention_context_left": 5,
        }  # fmt: skip
        return transformers.Gemma4Config(**config)

    return replace(family, create=create)


class _VoxtralFiles:
    """What is published beside Voxtral's weights: no tokenizer.json, and no chat template."""

    def save_pretrained(self, directory: Path) -> None:
        transformers.WhisperFeatureExtractor(feature_size=80).save_pretrained(directory)
        (directory / "tekken.json").write_text(json.dumps(make_tekken()))


def _read_voxtral(processor: Any, audio: list[Any], text: str) -> dict[str, Any]:
    """Its processor leaves prompts to mistral-common."""
    text = "<s>[INST]" + text.replace("[AUDIO]", "[AUDIO]" * 375) + "[/INST]"
    made = dict(processor.tokenizer([text], add_special_tokens=False, return_tensors="pt"))
    if audio:
        made["input_features"] = processor._retrieve_input_features(audio, **processor.audio_kwargs)
    return made


def _voxtral() -> Family:
    family = visual(
        "Voxtral", "", _VoxtralFiles, "Voxtral",
        lambda: {
            "audio_config": {
                "model_type": "voxtral_encoder", "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2,
                "num_attention_heads": 2, "num_mel_bins": 80,
            },
            "text_config": {**TEXT, "model_type": "llama", "head_dim": 16, "max_position_embeddings": 2048},
            "audio_token_id": 24,
        },
        read=_read_voxtral,
    )  # fmt: skip
    return family


AUDIO_FAMILIES = [
    row(_qwen2(), "Qwen2Audio", "<|audio_bos|><|AUDIO|><|audio_eos|>"),
    row(_glm(), "GlmAsr", "<|audio|>"),
    row(_flamingo(), "AudioFlamingo3", "<sound>"),
    row(_gemma(), "Gemma4", "<|audio|>"),
    row(named("Qwen2.5-Omni"), "Qwen2_5OmniThinker", "<|audio_bos|><|AUDIO|><|audio_eos|>"),
    row(_voxtral(), "Voxtral", "[BEGIN_AUDIO][AUDIO]"),
    row(named("Gemma 3n"), "Gemma3n", "<audio_soft_token>"),
]
ONE_AUDIO = frozenset({"GLM-ASR", "Audio Flamingo 3"})
#: It pads audio to windows of half a minute.
ANY_LENGTH = frozenset({"Voxtral"})
RUN = [family for family in AUDIO_FAMILIES if IS_LONG or family.name in QUICK]


def process(pool: VideoPool, processor: ChatProcessor, data: bytes, media_type: str) -> Any:
    with pool.open_audio(io.BytesIO(data), ImageRef("", len(data), media_type, 0, 0)) as audio:
        return processor.process_audio(audio)


def samples_of(pool: VideoPool, name: str) -> np.ndarray:
    data = sound(name)
    with pool.open_audio(
        io.BytesIO(data), ImageRef("", len(data), SOUNDS[name][1], 0, 0)
    ) as opened:
        return np.frombuffer(opened.samples(RATE), np.float32).copy()


def ask(pool: VideoPool, processor: ChatProcessor, question: Question) -> Prompt:
    return ask_of(processor, question, SOUNDS, lambda name: read(pool, processor, name))


def read(pool: VideoPool, processor: ChatProcessor, name: str) -> Any:
    return process(pool, processor, sound(name), SOUNDS[name][1])


def their_inputs(
    family: AudioFamily, directory: Path, pool: VideoPool, question: Question, prompt: Prompt
) -> dict[str, Any]:
    """What transformers' processor makes of the same samples."""
    processor: Any = AutoProcessor.from_pretrained(directory)
    text, images, audio = "", [], []
    for part in question:
        if isinstance(part, int):
            text += family.placeholder
            images.append(Image.open(io.BytesIO(make_image(28, 28, part))))
        elif part in SOUNDS:
            text += family.audio_placeholder
            audio.append(samples_of(pool, part))
        else:
            text += part
    media = {"images": images, "audio": audio}
    if family.read is not None:
        made = family.read(processor, audio, text)
        assert made.pop("input_ids")[0].tolist() == prompt.token_ids
        return made
    made = processor(
        text=[text + "\n"],
        return_tensors="pt",
        **{name: each for name, each in media.items() if each},
    )
    assert made.pop("input_ids")[0].tolist() == prompt.token_ids
    return dict(made)


@pytest.fixture(scope="module", params=RUN, ids=str)
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, pool: VideoPool
) -> Loaded:
    family: AudioFamily = request.param
    assert family.architecture in TAKES_AUDIO
    directory = tmp_path_factory.mktemp("family")
    family_table.write_checkpoint(family, directory)
    test_families.lengthen_context(directory)
    model, processor = load(directory)
    assert processor.max_audio_s > 0
    theirs = test_families.load_reference(directory, family.auto)
    requests, expected = [], {}
    for name, question in QUESTIONS.items():
        if (name == "both" and not family.placeholder) or (
            name == "two" and family.name in ONE_AUDIO
        ):
            continue
        prompt = ask(pool, processor, question)
        inputs = their_inputs(family, directory, pool, question, prompt)
        requests.append(make_request(name, prompt))
        expected[name] = generate(theirs, prompt.token_ids, **inputs)
    return Loaded(family, directory, model, processor, requests, expected)


@pytest.mark.parametrize("way", WAYS if IS_LONG else QUICK_WAYS)
def test_tokens_are_those_of_transformers(loaded: Loaded, way: Way) -> None:
    assert way(loaded.start, loaded.requests) == loaded.expected


def test_streams_go_on_while_audio_is_encoded_in_parts(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART_S", 0.0)
    assert ways.run_beside_smooth_streams(loaded.start, loaded.requests) == loaded.expected


def test_answers_differ(loaded: Loaded) -> None:
    assert len({tuple(tokens) for tokens in loaded.expected.values()}) >= len(loaded.expected) - 1


def test_more_audio_than_the_processor_takes_is_refused(loaded: Loaded, pool: VideoPool) -> None:
    if loaded.family.name not in ONE_AUDIO:
        pytest.skip("it takes several")
    with pytest.raises(InvalidRequest, match="takes one audio file; the request has 2"):
        ask(pool, loaded.processor, QUESTIONS["two"])


def test_audio_that_the_processor_would_cut_is_refused(loaded: Loaded, pool: VideoPool) -> None:
    if loaded.family.name in ANY_LENGTH:
        pytest.skip("it takes audio of any length")
    with pytest.raises(InvalidImage, match=r"41.0 s long: this model takes at most (4|40|30) s"):
        process(pool, loaded.processor, make_audio(seconds=41.0), "audio/wav")


def test_long_audio_is_encoded(loaded: Loaded, pool: VideoPool) -> None:
    audio = make_audio(seconds=min(loaded.processor.max_audio_s, 40.0))
    made = process(pool, loaded.processor, audio, "audio/wav")
    image = ImageInput(0, made.num_slots, "audio", made, kind="audio")
    with smallest_chunks():
        chunks = split(image)
    assert (len(chunks) > 1) is (loaded.family.name in ANY_LENGTH)
    features, *found = loaded.model.encode([image, *chunks], CPU, torch.float32)
    assert len(features) == made.num_slots
    torch.testing.assert_close(torch.cat(found), features)


@pytest.mark.parametrize("name", ["Voxtral", "GLM-ASR"])
def test_a_stream_goes_on_beside_ten_minutes_of_audio(
    pool: VideoPool, tmp_path: Path, name: str
) -> None:
    [family] = [each for each in AUDIO_FAMILIES if each.name == name]
    family_table.write_checkpoint(family, tmp_path)
    test_families.lengthen_context(tmp_path)
    for file in tmp_path.glob("*processor_config.json"):
        file.write_text(file.read_text().replace('"max_audio_len": 40', '"max_audio_len": 600'))
    model, processor = load(tmp_path)
    made = process(pool, processor, make_audio(seconds=600.0, rate=8000), "audio/wav")
    parts = (ImagePart(0), TextPart("What is it?"))
    prompt = processor.build_prompt([ChatMessage("user", parts)], [("audio", made)])
    assert prompt.images[0].num_tokens == 7500
    median, p99, _ = test_families.gaps_beside(model, processor, prompt)
    assert p99 <= max(2 * median, 0.25)


@torch.inference_mode()
def test_audio_of_gemma_3n_does_not_depend_on_longer_audio(pool: VideoPool, tmp_path: Path) -> None:
    """Transformers pads it to the longest of the prompt, and the end of its features changes."""
    family = next(each for each in AUDIO_FAMILIES if each.name == "Gemma 3n")
    family_table.write_checkpoint(family, tmp_path)
    model, processor = load(tmp_path)
    theirs = test_families.load_reference(tmp_path, family.auto)
    extract = AutoProcessor.from_pretrained(tmp_path).feature_extractor
    samples = [samples_of(pool, name) for name in ("opus", "m4a")]
    of_both, alone = [
        theirs.model.get_audio_features(
            made["input_features"], ~made["input_features_mask"]
        ).pooler_output[0]
        for made in (extract(each, return_tensors="pt") for each in (samples, samples[:1]))
    ]
    assert (of_both - alone).abs()[-1].max() > 0.1
    image = ask(pool, processor, ["m4a", "or ", "opus"]).images[1]
    [features] = model.encode([image], test_families.CPU, torch.float32)
    torch.testing.assert_close(features[: len(alone)], alone)


def test_each_segment_of_longer_audio_is_taken(loaded: Loaded, pool: VideoPool) -> None:
    data = make_audio(seconds=41.0, rate=8000, pauses=(3.0, 25.0))
    ref = ImageRef("", len(data), "audio/wav", 0, 0)
    with pool.open_audio(io.BytesIO(data), ref, min(30.0, loaded.processor.max_audio_s)) as audio:
        ends = audio.info.segment_ends
    assert len(ends) > 1
    for start, end in pairwise((0.0, *ends)):
        with pool.open_audio(
            io.BytesIO(data), msgspec.structs.replace(ref, start_s=start, end_s=end)
        ) as audio:
            assert loaded.processor.process_audio(audio).num_slots > 0


def test_audio_without_tokens_is_refused(loaded: Loaded, pool: VideoPool) -> None:
    if loaded.family.name in ANY_LENGTH:
        pytest.skip("it pads all audio")
    with pytest.raises(InvalidImage, match=r"too short|cannot process this audio"):
        process(pool, loaded.processor, make_audio(seconds=0.001), "audio/wav")


VOXTRAL_PROMPTS: list[tuple[list[tuple[str, list[str]]], str]] = [
    ([("user", ["What is it?"])], "<s>[INST]What is it?[/INST]"),
    (
        [("system", ["Be brief."]), ("user", ["Say", "a word."]), ("assistant", ["the"]), ("user", ["No"])],
        "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Say\n\na word.[/INST]the</s>[INST]No[/INST]",
    ),
    ([("user", ["a"]), ("user", ["b", "wav"]), ("user", ["c"])], "<s>[INST]a\n\nbSLOTSc[/INST]"),
    (
        [("user", ["wav", "Transcribe the audio. It is loud."])],
        "<s>[INST]SLOTSTranscribe the audio. It is loud.[/INST]",
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def voxtral(tmp_path_factory: pytest.TempPathFactory) -> tuple[ChatProcessor, Any]:
    """Our processor of such a checkpoint, and the tokenizer of transformers."""
    directory = tmp_path_factory.mktemp("voxtral")
    [family] = [each for each in AUDIO_FAMILIES if each.name == "Voxtral"]
    family_table.write_checkpoint(family, directory)
    config = FAMILY.check(read_fields(directory))
    multimodal = FAMILY.processor(directory, config)
    ours = create_processor(directory, multimodal, config.text.max_position_embeddings)
    return ours, AutoProcessor.from_pretrained(directory).tokenizer  # type: ignore[attr-defined]


def ask_voxtral(
    pool: VideoPool, processor: ChatProcessor, turns: list[tuple[str, list[str]]]
) -> Prompt:
    messages, media = [], []
    for role, texts in turns:
        parts: list[TextPart | ImagePart] = []
        for text in texts:
            parts.append(ImagePart(len(media)) if text in SOUNDS else TextPart(text))
            if text in SOUNDS:
                media.append((text, process(pool, processor, sound(text), SOUNDS[text][1])))
        messages.append(ChatMessage(role, tuple(parts)))  # type: ignore[arg-type]
    return processor.build_prompt(messages, media)


@pytest.mark.parametrize(("turns", "text"), VOXTRAL_PROMPTS)
def test_prompts_of_voxtral_are_those_of_mistral_common(
    voxtral: tuple[ChatProcessor, Any], pool: VideoPool, turns: Any, text: str
) -> None:
    ours, theirs = voxtral
    spelled = text.replace("SLOTS", "[BEGIN_AUDIO]" + "[AUDIO]" * 375)
    prompt = ask_voxtral(pool, ours, turns)
    assert prompt.token_ids == theirs(spelled, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("language", "end"), [(None, "[TRANSCRIBE]"), ("fr", "lang:fr[TRANSCRIBE]")]
)
def test_the_transcription_prompt_of_voxtral_is_that_of_mistral_common(
    voxtral: tuple[ChatProcessor, Any], pool: VideoPool, language: str | None, end: str
) -> None:
    ours, theirs = voxtral
    card = ModelCard("m", 0, 1, 1, transcription_prompt=ours.transcription_prompt)
    text = TranscriptionRequest(file="f", model="m", language=language).instruction(card)
    prompt = ask_voxtral(pool, ours, [("user", ["wav", text])])
    spelled = "<s>[INST][BEGIN_AUDIO]" + "[AUDIO]" * 375 + "[/INST]" + end
    assert prompt.token_ids == theirs(spelled, add_special_tokens=False)["input_ids"]


@torch.inference_mode()
def test_long_audio_of_voxtral_is_encoded_window_by_window(pool: VideoPool, tmp_path: Path) -> None:
    [family] = [each for each in AUDIO_FAMILIES if each.name == "Voxtral"]
    family_table.write_checkpoint(family, tmp_path)
    model, processor = load(tmp_path)
    audio = process(pool, processor, make_audio(seconds=71.0, rate=8000), "audio/wav")
    assert audio.num_slots == 3 * 375
    tower, sizes = model.front.inner.model.audio_tower, []  # type: ignore[union-attr]
    hook = tower.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    image = ImageInput(0, audio.num_slots, "audio", audio)
    rows = torch.cat(model.encode(split(image), CPU, torch.float32))
    hook.remove()
    assert sizes == [1, 1, 1]
    theirs = test_families.load_reference(tmp_path, family.auto)
    whole = theirs.get_audio_features(audio.inputs["input_features"], return_dict=True)
    torch.testing.assert_close(rows, whole.pooler_output, rtol=0, atol=1e-5)


def test_voxtral_refuses_a_system_message_beside_audio(
    voxtral: tuple[ChatProcessor, Any], pool: VideoPool
) -> None:
    with pytest.raises(InvalidRequest, match="no system message beside audio"):
        ask_voxtral(pool, voxtral[0], [("system", ["Be brief."]), ("user", ["wav", "What?"])])


async def test_a_worker_prepares_audio_for_a_checkpoint(loaded: Loaded, pool: VideoPool) -> None:
    """As a worker starts it, from a message and stored bytes to tokens."""
    started = create_engine(
        {
            "kind": "torch",
            "model": str(loaded.directory),
            "dtype": "float32",
            "device": "cpu",
            "num_kv_blocks": 512,
        }
    )
    assert started.card.supports_audio
    is_trained = loaded.family.name in ONE_AUDIO | ANY_LENGTH
    assert bool(started.card.transcription_prompt) == is_trained
    assert started.card.supports_images == bool(loaded.family.placeholder)
    preprocessor = Preprocessor(
        started.engine, UrlBlobReader(Store()), LimitSettings(), 1, videos=pool
    )  # type: ignore[arg-type]
    ref = ImageRef(sha256(b"wav").hexdigest(), 1, "audio/wav", 0, 0, param="file")
    parts = (ImagePart(0), TextPart("What is it?"))
    sampling = SamplingParams(temperature=0.0, max_tokens=test_families.NUM_TOKENS, ignore_eos=True)
    call = make_queue_request(
        images=(ref,), messages=(ChatMessage("user", parts),), sampling=sampling
    )
    request: Any = await preprocessor.prepare(call, "r")
    assert run_to_end(started.engine, [request])["r"] == loaded.expected["audio"]  # type: ignore[arg-type]
    assert preprocessor.media.length_s == pytest.approx(2.0)
    preprocessor.close()
    started.engine.close()


class Store:
    """Stands in for the blobs: each is a file by its name."""

    async def get(self, ref: BlobRef) -> bytes:
        return next(
            sound(name) for name in SOUNDS if sha256(name.encode()).hexdigest() == ref.sha256
        )
