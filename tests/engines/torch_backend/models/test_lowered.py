"""Which decoders our own program computes, and that it leaves to transformers what it does not understand."""

import gc
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.llama import modeling_llama
from transformers.models.qwen3_vl import modeling_qwen3_vl
from transformers.models.smollm3 import modeling_smollm3

from engines.core.sequence import EngineRequest, ScheduledSequence, Sequence
from engines.torch_backend import runner
from engines.torch_backend.layers.linear import METHODS
from engines.torch_backend.loading import weights as weights_module
from engines.torch_backend.loading.weights import ModelTooLarge
from engines.torch_backend.models import causal_lm
from engines.torch_backend.models.generic.family import FAMILY, GenericFamily
from engines.torch_backend.models.llama import Llama
from engines.torch_backend.models.lowered import proof
from engines.torch_backend.models.registry import FamilyModel
from engines.torch_backend.ops.registry import cpu_ops
from engines.torch_backend.settings import TorchSettings
from tests.contract.test_model_family import ask
from tests.engines.torch_backend import ways
from tests.engines.torch_backend.models.family_table import (
    LATENT,
    LLAMA3_ROPE,
    Family,
    named,
    text,
    write_checkpoint,
)
from tests.engines.torch_backend.models.test_families import (
    CPU,
    QUESTIONS,
    load_family,
    load_only,
    load_processor,
    made,
    make_requests,
)
from tests.long import few

PLAIN_SCALE: dict[str, Any] = {"attention_multiplier": 0.25}
LLAMA = text("Llama", "Llama", rope_parameters=LLAMA3_ROPE)


needs_kernels = pytest.mark.skipif(
    not cpu_ops("fast").uses("linear_int8", "cpu"), reason="no compiler"
)


def path_of(family: Family, directory: Path, caplog: pytest.LogCaptureFixture) -> tuple[str, str]:
    """Who computes the decoder, and what the log says of it."""
    with caplog.at_level(logging.INFO, "engines.torch_backend.models.generic.model"):
        model = made(family, directory)
    [line] = [text for text in caplog.messages if "the decoder" in text]
    return model.speed_path, line


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        (text("Granite", "Granite", embedding_multiplier=3.0, **PLAIN_SCALE), "after embeddings"),
        (text("Granite", "Granite", residual_multiplier=0.5, **PLAIN_SCALE), "the output of layer 0 differs"),
        (text("Granite", "Granite", logits_scaling=2.0, **PLAIN_SCALE), "after the head"),
        (text("Granite", "Granite", attention_multiplier=0.2), "attention scale"),
        (text("StableLM", "StableLm"), "not an RMS norm"),
        (text("OLMo 2", "Olmo2"), "post_feedforward_layernorm"),
        (text("Llama", "Llama", hidden_act="sigmoid"), "activation"),
        (text("Mixtral", "Mixtral", num_local_experts=4), "mlp"),
        (text("DeepSeek V2", "DeepseekV2", q_lora_rank=None, **LATENT), "widths"),
    ],
    ids=lambda value: str(value) if isinstance(value, Family) else "",
)  # fmt: skip
def test_what_the_program_does_not_say_stays_generic_with_its_reason(
    family: Family, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, line = path_of(family, tmp_path, caplog)
    assert path == "generic"
    assert reason in line


def _between_layers(forward: Callable[..., Any]) -> Callable[..., Any]:
    def changed(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        is_second = self.self_attn.layer_idx == 1
        return forward(self, hidden_states * (2 if is_second else 1), *args, **kwargs)

    return changed


def _after_layers(forward: Callable[..., Any]) -> Callable[..., Any]:
    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs).tanh()

    return changed


@pytest.mark.parametrize("change", [_between_layers, _after_layers])
def test_a_layer_of_the_same_parts_that_computes_something_else_is_found(
    change: Callable[[Callable[..., Any]], Callable[..., Any]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = modeling_llama.LlamaDecoderLayer
    monkeypatch.setattr(layer, "forward", change(layer.forward))
    path, line = path_of(LLAMA, tmp_path, caplog)
    assert path == "generic"
    assert "differs from ours" in line


def test_of_a_large_model_each_kind_of_layer_is_computed_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of this family's four layers is not turned."""
    monkeypatch.setattr(proof, "LARGE", 0)
    loaded = load_family(text("SmolLM3", "SmolLM3", num_hidden_layers=9), tmp_path / "right")
    assert loaded.model.speed_path == "lowered"
    assert ways.run_chunked(loaded.start, loaded.requests) == loaded.expected

    layer = modeling_smollm3.SmolLM3DecoderLayer
    monkeypatch.setattr(layer, "forward", _between_layers(layer.forward))
    path, line = path_of(
        text("SmolLM3", "SmolLM3", num_hidden_layers=2), tmp_path / "wrong", caplog
    )
    assert path == "generic"
    assert "the output of layer 1 differs" in line


@pytest.mark.parametrize(
    "family",
    [
        text("Phi-4 mini", "Phi3", partial_rotary_factor=0.75, hidden_size=128),
        text("GLM", "Glm", head_dim=16),
        text("ERNIE 4.5", "Ernie4_5"),
        text("Helium", "Helium", head_dim=16),
    ],
    ids=str,
)
def test_channels_that_are_turned_otherwise_are_put_in_our_order(
    family: Family, tmp_path: Path
) -> None:
    """Neighbours, or only some of them."""
    loaded = load_family(family, tmp_path)
    assert loaded.model.speed_path == "lowered"
    for kernels in ("fast", "off"):
        start = partial(loaded.start, cpu_ops(kernels))
        assert ways.run_chunked(start, loaded.requests) == loaded.expected


@pytest.mark.parametrize(
    ("scheme", "kernels"), [("none", "off"), ("int8", "fast"), ("int4", "fast")]
)
def test_it_computes_as_the_native_family_does(scheme: str, kernels: Any, tmp_path: Path) -> None:
    """The same program with the same weights, by transformers' angles."""
    lowered, native = (
        made(LLAMA, tmp_path, family, torch.float32, METHODS.get(scheme), ops=cpu_ops(kernels))
        for family in (FAMILY, causal_lm.FAMILY)
    )
    shape = native.language_model.text
    assert lowered.language_model.text == replace(shape, rope_theta=10000.0, rope_scaling=None)
    scores = [
        torch.cat([score(start(each, kernels), request) for request in make_requests()])
        for each in (lowered, native)
    ]
    torch.testing.assert_close(*scores, rtol=0, atol=1e-5 if scheme == "none" else 1e-3)


def start(model: FamilyModel, kernels: Any = "off", dtype: torch.dtype = torch.float32) -> Any:
    settings = TorchSettings(num_kv_blocks=64, block_size=4)
    return runner.TorchRunner(model, settings, CPU, dtype, ops=cpu_ops(kernels))


def score(started: Any, request: EngineRequest) -> torch.Tensor:
    """Behind each third token of a prompt, in chunks. Shapes: returns (chunks, V)."""
    ids = request.prompt_token_ids
    sequence = Sequence(request.request_id, list(ids), len(ids), request.sampling)
    sequence.block_ids = list(range(len(ids) // 4 + 1))
    rows = []
    while sequence.num_pending_tokens:
        item = ScheduledSequence(sequence, min(3, sequence.num_pending_tokens))
        rows.append(started.logits([item]))
        sequence.num_computed_tokens = item.end
    return torch.cat(rows)


@needs_kernels
@pytest.mark.parametrize(
    ("name", "lowers"),
    few(
        product(("Idefics3", "Qwen2.5-VL", "LFM2-VL", "MiniCPM-V 4.6"), (True, False)),
        [("Idefics3", True), ("LFM2-VL", False)],
    ),
)
def test_towers_are_in_int8_beside_a_decoder_in_few_bits(
    name: str, lowers: bool, tmp_path: Path
) -> None:
    write_checkpoint(named(name), tmp_path)
    [image] = ask(load_processor(tmp_path), QUESTIONS["small"]).images
    features = []
    for scheme in (None, METHODS["int4"]):
        model = load_only(
            tmp_path, GenericFamily(lowers), torch.float32, scheme, ops=cpu_ops("fast")
        )
        start(model, "fast")
        with torch.inference_mode():
            features += model.encode([image], CPU, torch.float32)
    difference = (features[0] - features[1]).norm() / features[0].norm()
    assert 0 < difference < 0.1


@pytest.mark.parametrize(
    "name",
    few(
        ["Qwen2", "Qwen2.5-VL", "Gemma 2", "Gemma 3, text", "Qwen3-Next"],
        ["Qwen2.5-VL", "Gemma 3, text"],
    ),
)
def test_matrices_stay_as_they_are_stored_where_kernels_read_them(
    name: str, tmp_path: Path
) -> None:
    """Half the memory; the tokens are those of the same numbers in float32."""
    family = named(name)
    halve(family, tmp_path)
    ops = cpu_ops("fast")
    tokens = []
    for lowering in (FAMILY, GenericFamily(lowers=False)):
        model = load_only(tmp_path, lowering, ops=ops)
        if isinstance(model.language_model, Llama):
            attention: Any = model.language_model.model.layers[0]
            assert attention.self_attn.q_proj.weight.dtype == torch.bfloat16
            assert model.language_model.model.norm.weight.dtype == torch.float32
            others = [p for n, p in model.named_parameters() if not n.startswith("language_model")]
            assert all(p.dtype == torch.float32 for p in others)
        else:
            narrow = [n for n, p in model.named_parameters() if p.dtype == torch.bfloat16]
            assert any("o_proj" in n for n in narrow)
            assert all(model.get_parameter(n).dim() == 2 for n in narrow)
        loaded = replace(load_family(family, tmp_path / "asked"), model=model)
        tokens.append(ways.run_batched(partial(loaded.start, ops), loaded.requests))
    assert tokens[0] == tokens[1]


def halve(family: Family, directory: Path) -> int:
    """Write a checkpoint in bfloat16. Returns: its bytes."""
    write_checkpoint(family, directory)
    weights = load_file(directory / "model.safetensors")
    rounded = {name: x.bfloat16() for name, x in weights.items()}
    save_file(rounded, directory / "model.safetensors", metadata={"format": "pt"})
    return sum(x.nbytes for x in rounded.values())


@pytest.mark.parametrize("lowers", [True, False])
def test_memory_is_asked_for_matrices_as_they_will_be(
    lowers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a decoder that stays transformers', too."""
    stored = halve(named("Mistral, window"), tmp_path)
    for room, expected in ((1.1, nullcontext()), (0.9, pytest.raises(ModelTooLarge))):
        monkeypatch.setattr(weights_module, "free_bytes", lambda _, room=room: room * stored)
        with expected:
            load_only(tmp_path, GenericFamily(lowers), ops=cpu_ops("fast"))


@pytest.mark.parametrize(
    "name",
    few(["Mistral, window", "Gemma 3, text", "Qwen2.5-VL", "Qwen3-VL"], ["Qwen3-VL"]),
)
def test_a_gpu_computes_it_as_a_native_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its buffers and fused layers, kernels by their reference implementations."""
    monkeypatch.setattr(runner, "runs_graphs", lambda device: True)
    loaded = load_family(named(name), tmp_path)
    assert ways.run_chunked(loaded.start, loaded.requests) == loaded.expected
    assert ways.run_overlapped(loaded.start, loaded.requests) == loaded.expected


def test_features_that_go_elsewhere_than_behind_the_first_layers_are_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = modeling_qwen3_vl.Qwen3VLTextModel
    add = stack._deepstack_process
    monkeypatch.setattr(stack, "_deepstack_process", lambda self, *given: add(self, *given) * 2)
    path, line = path_of(named("Qwen3-VL"), tmp_path, caplog)
    assert path == "generic"
    assert "image features are not added after" in line


def test_gains_of_one_more_are_not_rounded_in_16_bits(tmp_path: Path) -> None:
    """Which would keep the decoder from being the same."""
    model = made(named("Gemma 3, text"), tmp_path, FAMILY, torch.bfloat16)
    assert model.speed_path == "lowered"
    [ours, theirs] = [
        score(each, make_requests()[0]).float()
        for each in (start(model, dtype=torch.bfloat16), start(load_only(tmp_path)))
    ]
    assert float((ours - theirs).std() / theirs.std()) < 0.03


@pytest.mark.parametrize("name", ["Qwen2-VL", "Qwen3"])
def test_nothing_of_transformers_decoder_is_kept(name: str, tmp_path: Path) -> None:
    """What its modules hold would stay beside what it was quantized to."""
    before = _count_decoder_layers()
    model = made(named(name), tmp_path)
    kept = sum(p.numel() for p in model.parameters())
    assert kept == sum(x.numel() for x in load_file(tmp_path / "model.safetensors").values())
    model = load_only(tmp_path, FAMILY, torch.float32, METHODS["int8"])
    assert model.speed_path == "lowered"
    assert _count_decoder_layers() == before


def _count_decoder_layers() -> int:
    gc.collect()
    kinds = [type(x) for x in gc.get_objects()]
    return sum(
        x.__name__.endswith("DecoderLayer") and "transformers" in x.__module__ for x in kinds
    )
