"""GGUF files give the logits of their dequantized tensors, or are refused by name."""

import logging
import os
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from benchmarks.make_checkpoint import make_checkpoint
from engines.core.sequence import EngineRequest
from engines.registry import create_engine
from engines.torch_backend.layers.linear import INT4, METHODS
from engines.torch_backend.loading.formats.gguf import GgufReader, GgufTensor
from engines.torch_backend.loading.formats.reader import Integers
from engines.torch_backend.loading.gguf_checkpoint import list_weights, open_checkpoint
from engines.torch_backend.loading.stored_tensors import list_tensors
from engines.torch_backend.loading.weights import load_model
from engines.torch_backend.models.config import UnsupportedCheckpoint
from engines.torch_backend.models.hf_config import read_fields
from engines.torch_backend.models.registry import FamilyModel, find_family
from engines.torch_backend.ops.registry import CpuKernels, cpu_ops
from shared.protocol import ChatMessage, ImagePart, SamplingParams, TextPart
from tests import factories_gguf as factories
from tests.engines.torch_backend.loading.test_weights import mapped_ranges
from tests.engines.torch_backend.models.family_table import LLAMA3_ROPE
from tests.factories_gguf import Kind
from tests.factories_torch import logits_of
from tests.long import few

CPU = torch.device("cpu")
TOKEN_IDS = torch.arange(5, 255, 13)
MIXTURES = {
    "F16": lambda name: Kind.F16,
    "Q4_0": lambda name: Kind.Q4_0,
    "Q4_1": lambda name: Kind.Q4_1,
    "Q5_0 and Q5_1": factories.mixture(Kind.Q5_0, Kind.Q5_1),
    "Q8_0": lambda name: Kind.Q8_0,
    "Q4_K_M": factories.mixture(Kind.Q4_K, Kind.Q6_K),
    "Q5_K_M": factories.mixture(Kind.Q5_K, Kind.Q6_K),
    "Q6_K": lambda name: Kind.Q6_K,
}
#: The architecture determines the names of tensors, the mixture their number formats.
CELLS = few(
    product(("llama", "qwen2", "qwen3"), MIXTURES),
    [*(("llama", name) for name in MIXTURES), ("qwen2", "Q5_K_M"), ("qwen3", "Q4_0")],
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "files").mkdir()
    return tmp_path / "files" / "model.gguf"


def opened(file: Path) -> Path:
    with patch.dict(os.environ, XDG_CACHE_HOME=str(file.parent.parent / "cache")):
        return open_checkpoint(file)


def load(file: Path, mode: CpuKernels = "off", **options: Any) -> FamilyModel:
    directory, ops = opened(file), cpu_ops(mode)
    model = load_model(directory, *find_family(directory), CPU, torch.float32, ops=ops, **options)
    model.bind(ops, torch.float32)
    return model


@torch.inference_mode()
def expected_logits(model: Any, weights: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
    """Returns the logits of transformers, with these weights if given."""
    model.load_state_dict(model.state_dict() | (weights or {}))
    return model(input_ids=TOKEN_IDS[None]).logits[0]


@pytest.mark.parametrize(
    "kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K]
)
def test_values_equal_those_of_the_gguf_package(kind: Kind, file: Path) -> None:
    meant = factories.write_text(file, factories.make_model("llama"), "llama", lambda name: kind)

    reader = GgufReader(read_fields(opened(file)))
    linears, _ = reader.split(list_weights(opened(file)), CPU)

    assert len(linears) == 16
    for linear in linears:
        found, expected = reader.read(linear), meant[f"{linear.name}.weight"]
        if isinstance(found, Integers):
            assert_close(found.numbers(), expected, rtol=1e-6, atol=1e-8)
        else:
            assert torch.equal(found, expected.half())


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q4_1, Kind.Q8_0, Kind.Q4_K])
def test_numbers_that_are_not_finite_are_refused_by_name(kind: Kind, file: Path) -> None:
    factories.write_text(file, factories.make_model("llama"), "llama", lambda name: kind)
    name = "model.layers.1.mlp.up_proj.weight"
    [tensor] = [x for x in list_weights(opened(file)) if x.name == name]
    assert isinstance(tensor, GgufTensor)
    with file.open("r+b") as content:  # the first value, or the scale of the first block
        content.seek(tensor.offset)
        content.write(np.float16(np.nan).tobytes())

    with pytest.raises(UnsupportedCheckpoint, match=f"weight {name.removesuffix('.weight')}") as e:
        load(file, "fast")
    assert "not finite" in str(e.value)


@pytest.mark.parametrize(("arch", "name"), CELLS)
def test_logits_equal_those_of_the_dequantized_tensors(
    arch: str, name: str, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Four-bit tensors stay in four bits."""
    model = factories.make_model(arch)
    expected = expected_logits(model, factories.write_text(file, model, arch, MIXTURES[name]))

    with caplog.at_level(logging.INFO):
        ours = load(file)
    found = logits_of(ours, TOKEN_IDS)
    assert (found - expected).norm() < 2e-3 * expected.norm()  # unquantized tensors are float16
    if name == "Q4_K_M":
        layers = ours.language_model.model.layers
        maps = {n: m for n, m in layers.named_modules() if n.endswith("_proj")}
        assert maps.pop("0.mlp.down_proj").method is not INT4
        assert all(m.method is INT4 for m in maps.values())
        assert "13 as int4" in caplog.text
        assert "3 dequantized" in caplog.text

    native = logits_of(load(file, "fast"), TOKEN_IDS)
    assert (native - expected).norm() < 0.02 * expected.norm()


def test_unquantized_tensors_stay_memory_mapped(file: Path) -> None:
    factories.write_text(file, factories.make_model("qwen2"), "qwen2", MIXTURES["F16"])
    directory = opened(file)

    model = load_model(directory, *find_family(directory), CPU, torch.float16)

    weight = model.language_model.model.layers[0].mlp.up_proj.weight
    assert any(weight.data_ptr() in each for each in mapped_ranges(file))


LLAMA3 = {**LLAMA3_ROPE, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    "config",
    [{"tie_word_embeddings": True}, {"attention_bias": True}, {"rope_parameters": LLAMA3}],
    ids=["tied embeddings", "biases of heads", "scaling of Llama 3"],
)
def test_variants_of_llama_are_detected(config: dict[str, Any], file: Path) -> None:
    model, extra = factories.make_model("llama", **config), {}
    if "rope_parameters" in config:  # determined by its factors
        plain = factories.make_model("llama", rope_parameters={"rope_theta": 500000.0})
        rotary: Any = model.model.rotary_emb
        factors = (plain.model.rotary_emb.inv_freq / rotary.inv_freq).numpy()
        extra = {"rope_freqs.weight": factors}
    is_tied = "tie_word_embeddings" in config
    mixture = MIXTURES["Q6_K"] if is_tied else lambda name: Kind.F32
    meant = factories.write_text(file, model, "llama", mixture, extra=extra)
    if is_tied:
        meant["lm_head.weight"] = meant["model.embed_tokens.weight"]
    expected = expected_logits(model, meant)
    found = logits_of(load(file), TOKEN_IDS)
    assert (found - expected).norm() < (2e-3 if is_tied else 1e-4) * expected.norm()


def test_a_gguf_model_can_be_quantized_at_load_time(file: Path) -> None:
    model = factories.make_model("llama")
    meant = factories.write_text(file, model, "llama", MIXTURES["Q8_0"])
    expected = expected_logits(model, meant)

    found = logits_of(load(file, scheme=METHODS["int8"]), TOKEN_IDS)

    assert (found - expected).norm() < 0.02 * expected.norm()


def test_an_engine_runs_a_gguf_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_llava(file)
    monkeypatch.setenv("XDG_CACHE_HOME", str(file.parent.parent / "cache"))
    settings = {"device": "cpu", "dtype": "float32", "disabled_ops": "cpu"}

    loaded = create_engine({**settings, "kv_cache_bytes": 1 << 22, "model": str(file)})

    assert loaded.card.name == "model"
    assert loaded.card.supports_images
    processor: Any = loaded.engine.processor
    size = loaded.engine.runner.model.config.vision.image_size
    image = ("image", np.zeros((3, size, size), np.float32))
    message = ChatMessage("user", (ImagePart(0), TextPart("ab <unk> a")))
    prompt = processor.build_prompt([message], [image])
    slots = loaded.card.image_tokens
    assert prompt.token_ids.count(0) == slots  # an image token typed by a user stays text
    sampling = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    loaded.engine.add(EngineRequest("r", prompt.token_ids, sampling, prompt.images))
    outputs = [output for _ in range(10) for output in loaded.engine.step()]
    assert sum(len(output.token_ids) for output in outputs) == 3
    loaded.engine.close()


# Towers

TOWER_NAMES = {
    "embeddings.class_embedding": "v.class_embd",
    "embeddings.patch_embedding.weight": "v.patch_embd.weight",
    "embeddings.position_embedding.weight": "v.position_embd.weight",
    "pre_layrnorm": "v.pre_ln",
    "post_layernorm": "v.post_ln",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}


def write_llava(file: Path, kind: Kind = Kind.F32, is_old: bool = False, **changes: Any) -> Path:
    """Writes a text model and a tower beside it. Returns the checkpoint whose tower it is."""
    directory = file.parent.parent / "llava"
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    make_checkpoint(
        "tiny", directory, changes={"vision_config": vision, "text_config": {"hidden_size": 256}}
    )
    config = read_fields(directory).values
    tensors = {}
    for stored in list_tensors(directory):
        value = stored.map().float().numpy()
        name = stored.name.removeprefix("vision_tower.vision_model.")
        stem, _, part = name.rpartition(".")
        if name.startswith("multi_modal_projector."):
            number = {"linear_1": 0, "linear_2": 2}[stem.split(".")[1]]
            tensors[f"mm.{number}.{part}"] = value
        elif stored.name == name:
            continue
        elif name.startswith("encoder.layers."):
            _, _, number, rest = stem.split(".", 3)
            theirs = TOWER_NAMES[rest]
            if is_old and int(number) == 2:
                continue
            if is_old and theirs.startswith("ffn"):
                theirs = "ffn_down" if theirs == "ffn_up" else "ffn_up"
            tensors[f"v.blk.{number}.{theirs}.{part}"] = value
        elif not (is_old and "post_layernorm" in name):
            tensors[TOWER_NAMES.get(name) or f"{TOWER_NAMES[stem]}.{part}"] = value
    section: Any = config["vision_config"]
    metadata = {
        "clip.has_vision_encoder": True,
        "clip.projector_type": "mlp",
        "clip.use_gelu": section.get("hidden_act", "quick_gelu") == "gelu",
        "clip.vision.image_size": section["image_size"],
        "clip.vision.patch_size": section["patch_size"],
        "clip.vision.embedding_length": 64,
        "clip.vision.feed_forward_length": 128,
        "clip.vision.block_count": 2 if is_old else 3,
        "clip.vision.attention.head_count": section["num_attention_heads"],
        "clip.vision.attention.layer_norm_epsilon": 1e-5,
        "clip.vision.image_mean": [0.5, 0.25, 0.5],
        "clip.vision.image_std": [0.5, 0.5, 0.5],
    }
    factories.write_tower(file.parent / "mmproj-model.gguf", metadata | changes, tensors, kind)
    factories.write_text(file, factories.make_model("llama"), "llama")
    return directory


@pytest.mark.parametrize("is_old", [False, True], ids=["new", "old"])
@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0])
def test_a_tower_beside_the_file_encodes_images(kind: Kind, is_old: bool, file: Path) -> None:
    directory = write_llava(file, kind, is_old)
    original = load_model(directory, *find_family(directory), CPU, torch.float32)
    size = original.config.vision.image_size
    pixels = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))

    model = load(file)

    with torch.inference_mode():
        expected, found = original.encode_images(pixels), model.encode_images(pixels)
    most = 1e-4 if kind is Kind.F32 else 0.05
    assert (found - expected).norm() < most * expected.norm()
    processor = find_family(opened(file))[0].processor(opened(file), model.config)
    assert processor.images.mean == (0.5, 0.25, 0.5)
    assert processor.slot_id == 0  # the ID of `<unk>`


# Refusals


@pytest.mark.parametrize(
    ("arch", "options", "reason"),
    [
        ("clip", {}, r"'clip' \(an mmproj file\); supported: llama"),
        ("qwen9", {}, "general.architecture is 'qwen9'"),
        ("llama", {"metadata": {"llama.expert_count": 8}}, "mixtures of experts"),
        ("llama", {"metadata": {"split.count": 3}}, "one part of several; join them"),
        ("llama", {"metadata": {"llama.rope.scaling.type": "yarn"}}, "scaling.type 'yarn' is not"),
        ("llama", {"metadata": {"llama.rope.dimension_count": 8}}, "is not the head width"),
        ("llama", {"extra": {"blk.0.ffn_exps.weight": np.ones(2)}}, "ffn_exps.weight does not"),
        ("llama", {"extra": {"rope_freqs.weight": np.ones(32) * 3}}, "not the scaling of Llama"),
        ("mmproj", {"clip.projector_type": "qwen2vl_merger"}, "clip.projector_type 'qwen2vl_merger': only"),
        ("mmproj", {"clip.vision.image_grid_pinpoints": [336, 672]}, "images in tiles: only CLIP"),
        ("mmproj", {"clip.vision.block_count": "many"}, "block_count is 'many', not an integer"),
        ("mmproj", {"clip.use_silu": True}, "clip.use_silu is true"),
        ("damaged", b"", "not a readable GGUF file"),
        ("damaged", b"GGUF" + b"\xff" * 64, "not a readable GGUF file"),
        ("cut", {}, "ends within the tensor"),
        ("twice", {}, "has 2 mmproj files; keep only the one"),
    ],
)  # fmt: skip
def test_unsupported_parts_are_named(arch: str, options: Any, reason: str, file: Path) -> None:
    if arch == "mmproj":
        write_llava(file, **options)
    elif arch == "damaged":
        file.write_bytes(options)
    elif arch in ("cut", "twice"):
        factories.write_text(file, factories.make_model("llama"), "llama")
    else:
        extra = {n: v.astype(np.float32) for n, v in options.get("extra", {}).items()}
        model = factories.make_model("llama")
        factories.write_text(file, model, arch, **options | {"extra": extra})
    if arch == "cut":
        file.write_bytes(file.read_bytes()[:-1000])
    for name in ("mmproj-a.gguf", "mmproj-b.gguf") if arch == "twice" else ():
        (file.parent / name).touch()

    with pytest.raises(UnsupportedCheckpoint, match=reason) as refused:
        load(file)
    named = {"mmproj": "mmproj-model.gguf:", "twice": file.parent.name}.get(arch, "model.gguf:")
    assert named in str(refused.value)


def test_a_changed_file_is_opened_again(file: Path) -> None:
    factories.write_text(file, factories.make_model("llama"), "llama")
    before = opened(file)

    factories.write_text(file, factories.make_model("qwen2"), "qwen2")

    assert opened(file) != before
    assert read_fields(opened(file)).get("model_type") == "qwen2"
    assert isinstance(load(file).language_model.model.layers[0].mlp.up_proj, nn.Linear)
