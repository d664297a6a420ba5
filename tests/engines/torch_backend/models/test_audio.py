"""Audio: the tokens of transformers for the same file, by every way."""

from pathlib import Path
from typing import Any

import pytest
import torch
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
from shared.protocol import ChatMessage, ImagePart, ModelCard, TextPart
from tests.engines.torch_backend import ways
from tests.engines.torch_backend.models import test_families
from tests.engines.torch_backend.models.family_table import write_checkpoint
from tests.engines.torch_backend.models.media import (
    AUDIO_FAMILIES,
    Question,
    ask,
    load_media,
    named_audio,
    process_audio,
    read,
    samples_of,
)
from tests.engines.torch_backend.models.media import pool as pool
from tests.engines.torch_backend.models.test_families import CPU, Loaded, load
from tests.engines.torch_backend.models.test_video import WAYS
from tests.engines.torch_backend.ways import Way
from tests.factories_audio import SOUNDS, make_audio
from tests.factories_torch import smallest_chunks
from tests.long import IS_LONG, few, long
from worker.prepare.video_pool import VideoPool

#: of processors' own ways with numpy
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
QUICK = [each for each in AUDIO_FAMILIES if each.name in ("GLM-ASR", "Qwen2-Audio")]
QUICK_WAYS: list[Way] = [ways.run_beside_smooth_streams, ways.run_encoder_cached]
QUESTIONS: dict[str, Question] = {
    "audio": ["wav", "What is it?"],
    "again": ["wav", "What else?"],
    "other": ["See: ", "mp3", " and say."],
    # of one length: transformers pads the audio of a prompt to the longest, which Gemma 3n hears at the end
    "two": ["flac", "or ", "opus", "?"],
    "both": [3, "or ", "m4a", "?"],
    "text": ["Say a word."],
}
ONE_AUDIO = frozenset({"GLM-ASR", "Audio Flamingo 3"})
#: It pads audio to windows of half a minute.
ANY_LENGTH = frozenset({"Voxtral"})


def test_every_listed_family_is_tested() -> None:
    assert {family.architecture for family in AUDIO_FAMILIES} == TAKES_AUDIO


@pytest.fixture(scope="module", params=few(AUDIO_FAMILIES, QUICK), ids=str)
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, pool: VideoPool
) -> Loaded:
    family = request.param
    questions = {
        name: question
        for name, question in QUESTIONS.items()
        if (name != "both" or family.placeholder)
        and (name != "two" or family.name not in ONE_AUDIO)
    }
    return load_media(family, tmp_path_factory.mktemp("family"), pool, questions)


@pytest.mark.parametrize("way", WAYS if IS_LONG else QUICK_WAYS)
def test_tokens_are_those_of_transformers(
    loaded: Loaded, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART_S", 0.0)
    assert way(loaded.start, loaded.requests) == loaded.expected


def test_more_audio_than_the_processor_takes_is_refused(loaded: Loaded, pool: VideoPool) -> None:
    if loaded.family.name in ONE_AUDIO:
        with pytest.raises(InvalidRequest, match="takes one audio file; the request has 2"):
            ask(pool, loaded.processor, QUESTIONS["two"])
    if loaded.family.name not in ANY_LENGTH:
        with pytest.raises(
            InvalidImage, match=r"41.0 s long: this model takes at most (4|40|30) s"
        ):
            process_audio(pool, loaded.processor, make_audio(seconds=41.0))
        with pytest.raises(InvalidImage, match=r"too short|cannot process this audio"):
            process_audio(pool, loaded.processor, make_audio(seconds=0.001))


def test_long_audio_is_encoded(loaded: Loaded, pool: VideoPool) -> None:
    audio = make_audio(seconds=min(loaded.processor.max_audio_s, 40.0))
    made = process_audio(pool, loaded.processor, audio)
    image = ImageInput(0, made.num_slots, "audio", made, kind="audio")
    with smallest_chunks():
        chunks = split(image)
    assert (len(chunks) > 1) is (loaded.family.name in ANY_LENGTH)
    features, *found = loaded.model.encode([image, *chunks], CPU, torch.float32)
    assert len(features) == made.num_slots
    torch.testing.assert_close(torch.cat(found), features)


@long("families")
@torch.inference_mode()
def test_audio_of_gemma_3n_does_not_depend_on_longer_audio(pool: VideoPool, tmp_path: Path) -> None:
    """Transformers pads it to the longest of the prompt, and the end of its features changes."""
    family = named_audio("Gemma 3n")
    write_checkpoint(family, tmp_path)
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
    [features] = model.encode([image], CPU, torch.float32)
    torch.testing.assert_close(features[: len(alone)], alone)


SLOTS = "[BEGIN_AUDIO]" + "[AUDIO]" * 375
VOXTRAL_PROMPTS: list[tuple[list[tuple[str, list[str]]], str]] = [
    (
        [("system", ["Be brief."]), ("user", ["Say", "a word."]), ("assistant", ["the"]), ("user", ["No"])],
        "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Say\n\na word.[/INST]the</s>[INST]No[/INST]",
    ),
    ([("user", ["a"]), ("user", ["b", "wav"]), ("user", ["c"])], f"<s>[INST]a\n\nb{SLOTS}c[/INST]"),
    (
        [("user", ["wav", "Transcribe the audio. It is loud."])],
        f"<s>[INST]{SLOTS}Transcribe the audio. It is loud.[/INST]",
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def voxtral(tmp_path_factory: pytest.TempPathFactory) -> tuple[ChatProcessor, Any]:
    """Our processor of such a checkpoint, and the tokenizer of transformers."""
    directory = tmp_path_factory.mktemp("voxtral")
    write_checkpoint(named_audio("Voxtral"), directory)
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
                media.append((text, read(pool, processor, text)))
        messages.append(ChatMessage(role, tuple(parts)))  # type: ignore[arg-type]
    return processor.build_prompt(messages, media)


def test_prompts_of_voxtral_are_those_of_mistral_common(
    voxtral: tuple[ChatProcessor, Any], pool: VideoPool
) -> None:
    ours, theirs = voxtral
    card = ModelCard("m", 0, 1, 1, transcription_prompt=ours.transcription_prompt)
    asked = list(VOXTRAL_PROMPTS)
    for language, end in ((None, "[TRANSCRIBE]"), ("fr", "lang:fr[TRANSCRIBE]")):
        text = TranscriptionRequest(file="f", model="m", language=language).instruction(card)
        asked.append(([("user", ["wav", text])], f"<s>[INST]{SLOTS}[/INST]{end}"))
    for turns, text in asked:
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        assert ask_voxtral(pool, ours, turns).token_ids == expected
    with pytest.raises(InvalidRequest, match="no system message beside audio"):
        ask_voxtral(pool, ours, [("system", ["Be brief."]), ("user", ["wav", "What?"])])


@torch.inference_mode()
def test_long_audio_of_voxtral_is_encoded_window_by_window(pool: VideoPool, tmp_path: Path) -> None:
    family = named_audio("Voxtral")
    write_checkpoint(family, tmp_path)
    model, processor = load(tmp_path)
    audio = process_audio(pool, processor, make_audio(seconds=71.0, rate=8000))
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


def test_the_card_says_what_a_checkpoint_takes(loaded: Loaded) -> None:
    started = create_engine({"kind": "torch", "device": "cpu", "model": str(loaded.directory)})
    assert started.card.supports_audio
    is_trained = loaded.family.name in ONE_AUDIO | ANY_LENGTH
    assert bool(started.card.transcription_prompt) == is_trained
    assert started.card.supports_images == bool(loaded.family.placeholder)
