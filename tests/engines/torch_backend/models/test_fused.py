"""What our operators compute of transformers' modules: recognised by what it computes, equal to the module, or left."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
)

from engines.core.runner import TokenChoice
from engines.core.sequence import Batch, ScheduledSequence, Sequence
from engines.text.processor import create_processor, example_prompt
from engines.torch_backend.layers.linear import METHODS, Linear, apply
from engines.torch_backend.layers.linear_group import LinearGroup, LinearSiblings
from engines.torch_backend.loading.weights import load_model
from engines.torch_backend.models.generic import fused
from engines.torch_backend.models.generic.family import GenericFamily
from engines.torch_backend.models.generic.model import GenericModel
from engines.torch_backend.models.hf_config import read_fields
from engines.torch_backend.ops.linear.cpu import PACKED_INT8
from engines.torch_backend.ops.registry import cpu_ops
from engines.torch_backend.runner import TorchRunner
from engines.torch_backend.settings import TorchSettings
from shared.protocol import SamplingParams
from tests.engines.torch_backend.models.family_table import Family, named, text, write_checkpoint
from tests.long import few

CPU = torch.device("cpu")
GENERIC = GenericFamily(lowers=False)
LLAMA = text("Llama", "Llama")
KERNEL_FAMILIES = ("Llama", "Qwen3", "Gemma 2", "StableLM", "Cohere 2", "Falcon-H1")
PRECISIONS = ("float32", "bfloat16", "int8", "int4")
#: Each family and each precision at least once.
KERNEL_CASES = [
    *(("Falcon-H1", precision) for precision in PRECISIONS),
    ("Llama", "int8"),
    ("Qwen3", "bfloat16"),
    ("Gemma 2", "float32"),
    ("StableLM", "int4"),
    ("Cohere 2", "bfloat16"),
]
needs_kernels = pytest.mark.skipif(
    not cpu_ops("fast").is_native, reason="there are no C++ kernels here"
)


def made(
    family: Family, directory: Path, dtype: torch.dtype = torch.float32, scheme: str = ""
) -> GenericModel:
    write_checkpoint(family, directory)
    config = GENERIC.check(read_fields(directory))
    ops = cpu_ops("fast")
    model = load_model(directory, GENERIC, config, CPU, dtype, METHODS.get(scheme), ops=ops)
    assert isinstance(model, GenericModel)
    return model


def start(model: GenericModel, dtype: torch.dtype = torch.float32) -> TorchRunner:
    settings = TorchSettings(num_kv_blocks=64, block_size=4)
    return TorchRunner(model, settings, CPU, dtype, ops=cpu_ops("fast"))


def recognised(model: GenericModel) -> fused.Recognised:
    assert model.fused is not None
    return model.fused.found


@pytest.mark.parametrize(
    ("name", "layers", "attentions", "gated"),
    [
        ("Llama", 2, 2, 2),
        ("Qwen3", 2, 2, 2),  # norms of queries and keys
        # one matrix for all three, and for gate and values; dropouts in its layers
        ("Phi-3", 0, 2, 2),
        ("Gemma 2", 2, 2, 2),  # gains of one more, norms behind, a gate that is no SiLU
        ("OLMo 2", 2, 2, 2),  # norms behind alone
        ("StableLM", 0, 2, 2),  # some channels are rotated
        ("Granite", 0, 2, 2),  # its layers scale what they add
        ("Cohere 2", 0, 1, 2),  # neighbours are rotated, and nothing in every other layer
        ("GPT-NeoX", 0, 0, 0),
        ("Gemma 3n, text", 0, 0, 4),  # its layers leave keys in what they are given
        ("Qwen2.5-VL", 2, 2, 2),
    ],
)
def test_modules_are_recognised_by_what_they_compute(
    name: str, layers: int, attentions: int, gated: int, tmp_path: Path
) -> None:
    found = recognised(made(named(name), tmp_path))
    assert (len(found.layers), len(found.attentions), len(found.gated)) == (
        layers,
        attentions,
        gated,
    )


@needs_kernels
@pytest.mark.parametrize(
    ("name", "precision"), few(product(KERNEL_FAMILIES, PRECISIONS), KERNEL_CASES)
)
def test_scores_by_kernels_are_those_of_the_plain_modules(
    name: str, precision: str, tmp_path: Path
) -> None:
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    model = made(named(name), tmp_path, dtype, precision)
    model.verify(start(model, dtype), "always")


def scores(runner: TorchRunner, *prompts: list[int]) -> list[TokenChoice | None]:
    """Of each prompt's next token."""
    items = []
    for number, ids in enumerate(prompts):
        params = SamplingParams(temperature=0, num_logprobs=8)
        sequence = Sequence(str(number), ids, len(ids), params)
        sequence.block_ids = [4 * number + each for each in range(4)]
        items.append(ScheduledSequence(sequence, len(ids)))
    return runner.run(Batch(items)).choices


def count(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[None]:
    """One more in the list for each call."""
    calls: list[None] = []
    own = getattr(owner, name)

    def note(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return own(*args, **kwargs)

    monkeypatch.setattr(owner, name, note)
    return calls


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_of_an_image_are_added_between_the_layers(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(named("Qwen3-VL"), tmp_path, dtype)  # adds some behind its first layers
    multimodal = GENERIC.processor(tmp_path, model.config)
    length = model.config.text.max_position_embeddings
    processor = create_processor(tmp_path, multimodal, length)
    at_once: list[bool] = []
    own = fused.Run.compute

    def note(*args: Any) -> Any:
        found = own(*args)
        at_once.append(found is not None)
        return found

    monkeypatch.setattr(fused.Run, "compute", note)
    model.verify(start(model, dtype), "always", lambda: example_prompt(processor))
    assert set(at_once) == {True, False}  # texts and what is sampled behind the image; the image


@needs_kernels
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_beside_layers_in_few_bits_the_head_is_in_int8_if_it_is_no_table_of_tokens(
    dtype: torch.dtype, is_tied: bool, tmp_path: Path
) -> None:
    model = made(text("Llama", "Llama", tie_word_embeddings=is_tied), tmp_path, dtype, "int4")
    head = model.inner.get_output_embeddings()
    assert isinstance(head, Linear) != is_tied
    table = model.inner.get_input_embeddings().weight
    if isinstance(head, Linear):
        assert head.method is PACKED_INT8
    assert table.dtype == dtype
    model.verify(start(model, dtype), "always")


@needs_kernels
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("Llama", torch.float32),
        ("Llama", torch.bfloat16),  # whoever computes them, nothing is rounded between layers
        ("Qwen3", torch.float32),
        ("Qwen3", torch.bfloat16),
        ("Mistral, window", torch.float32),
    ],
    ids=str,
)
def test_layers_one_after_another_are_computed_at_once(
    name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = start(made(named(name), tmp_path, dtype), dtype)
    prompts = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [9]
    alone = count(monkeypatch, fused.Attention, "mix")
    at_once = scores(runner, *prompts)
    assert not alone
    monkeypatch.setattr(fused.Run, "compute", lambda *args: None)
    assert scores(runner, *prompts) == at_once  # to the last bit
    assert alone


def _hand_on_twice_as_much(module: nn.Module, args: Any) -> Any:
    return 2 * args[0], *args[1:]


def _double_in_place(module: nn.Module, args: Any) -> None:
    args[0].mul_(2)


@needs_kernels
@pytest.mark.parametrize("change", [_hand_on_twice_as_much, _double_in_place])
def test_layers_that_are_not_given_what_came_before_are_not_passed_by(
    change: Callable[..., Any], tmp_path: Path
) -> None:
    model = made(LLAMA, tmp_path)
    runner = start(model)
    second = model.inner.get_submodule("model.layers.1")
    handle = second.register_forward_pre_hook(change)
    with pytest.raises(RuntimeError, match="changed the input of a layer"):
        scores(runner, [5, 6, 7])
    handle.remove()
    assert scores(runner, [5, 6, 7])


def test_a_model_that_changes_in_place_what_its_layers_hand_on_gets_each_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call: Any = LlamaDecoderLayer.__call__

    def scale_before(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.self_attn.layer_idx:
            hidden_states *= 3
        return call(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(LlamaDecoderLayer, "__call__", scale_before)
    model = made(LLAMA, tmp_path)
    assert len(recognised(model).layers) == 2
    model.verify(start(model), "always")


@needs_kernels
@pytest.mark.parametrize("num_tokens", [1, 7, 100])
@pytest.mark.parametrize("kind", ["norms", "gated"])
def test_a_fast_module_gives_what_the_plain_one_gives(
    kind: str, num_tokens: int, tmp_path: Path
) -> None:
    model = made(named("Gemma 2"), tmp_path)
    start(model)
    for module in getattr(recognised(model), kind):
        width = next(p.shape[-1] for p in module.parameters())
        width = 64 if kind == "gated" else width
        x = torch.randn(1, num_tokens, width)
        with torch.inference_mode():
            torch.testing.assert_close(
                module(x), type(module).forward(module, x), atol=2e-5, rtol=1e-4
            )


@needs_kernels
def test_maps_that_read_one_tensor_are_computed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(named("Falcon-H1"), tmp_path)
    start(model)
    mlp: Any = model.inner.get_submodule("model.layers.0.feed_forward")
    x = torch.randn(1, 3, 64)
    calls = []
    compute = LinearSiblings.compute

    def note(self: LinearSiblings, member: LinearGroup, given: torch.Tensor) -> torch.Tensor | None:
        calls.append(given is self._input)
        return compute(self, member, given)

    monkeypatch.setattr(LinearSiblings, "compute", note)
    with torch.inference_mode():
        up, gate = mlp.up_proj(x), mlp.gate_proj(x)
        expected = [apply(each, x) for each in (mlp.up_proj, mlp.gate_proj)]
        assert calls == [False, True]
        for found, wanted in zip((up, gate), expected, strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
        other = x.clone()
        mlp.up_proj(x)
        torch.testing.assert_close(mlp.gate_proj(other), expected[1], atol=1e-5, rtol=1e-4)


def _double_the_late(self: Any, hidden_states: Any, position_ids: Any = None, **kwargs: Any) -> Any:
    """An attention that depends on more than it was seen to do."""
    scale = torch.where(position_ids > 100, 2.0, 1.0)[..., None]
    return _ATTENTION(self, hidden_states * scale, **kwargs)


def _halve_what_is_added(self: Any, hidden_states: Any, **kwargs: Any) -> Any:
    return hidden_states + 0.5 * (_LAYER(self, hidden_states, **kwargs) - hidden_states)


def _cube_the_gate(self: Any, x: Any) -> Any:
    return self.down_proj(self.act_fn(self.gate_proj(x)) ** 3 * self.up_proj(x))


def _leave_the_mean_in(self: Any, x: Any) -> Any:
    return F.layer_norm(x, x.shape[-1:], self.weight)


_ATTENTION: Any = LlamaAttention.forward
_LAYER: Any = LlamaDecoderLayer.forward


@pytest.mark.parametrize(
    ("module", "forward", "kind"),
    [
        (LlamaAttention, _double_the_late, "attentions"),
        (LlamaDecoderLayer, _halve_what_is_added, "layers"),
        (LlamaMLP, _cube_the_gate, "gated"),
        (LlamaRMSNorm, _leave_the_mean_in, "norms"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_computes_something_else_is_left_to_the_module(
    module: type[nn.Module],
    forward: Callable[..., Any],
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "forward", forward)
    model = made(LLAMA, tmp_path)
    found = recognised(model)
    assert not getattr(found, kind)
    assert not found.layers
    model.verify(start(model), "always")
