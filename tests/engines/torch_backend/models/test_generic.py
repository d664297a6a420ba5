"""Generic models run modules of transformers: each possible silent error is avoided, or the model is refused.

The second half tests which decoders are lowered to our own program, and which ones stay with transformers.
"""

import gc
import json
import logging
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.llama import modeling_llama
from transformers.models.qwen3_vl import modeling_qwen3_vl
from transformers.models.smollm3 import modeling_smollm3

from engines.base import EngineStartError
from engines.core.sequence import Batch, ScheduledSequence, Sequence
from engines.registry import create_engine
from engines.text.processor import example_prompt
from engines.torch_backend import runner
from engines.torch_backend.kv_cache import bytes_per_block
from engines.torch_backend.layers.linear import METHODS, Linear, quantized_layers
from engines.torch_backend.loading import weights as weights_module
from engines.torch_backend.loading.weights import ModelTooLarge, load_model
from engines.torch_backend.models import causal_lm
from engines.torch_backend.models.config import UnsupportedCheckpoint
from engines.torch_backend.models.generic.attention import PagedLayer
from engines.torch_backend.models.generic.family import FAMILY, GenericFamily
from engines.torch_backend.models.generic.model import GenericModel
from engines.torch_backend.models.hf_config import read_fields
from engines.torch_backend.models.llama import Llama
from engines.torch_backend.models.lowered import proof
from engines.torch_backend.models.registry import find_family
from engines.torch_backend.multimodal.transformers_images import PositionHooks
from engines.torch_backend.ops.linear.cpu import PACKED_INT8
from engines.torch_backend.ops.registry import Ops, cpu_ops
from engines.torch_backend.runner import TorchRunner
from engines.torch_backend.settings import TorchSettings
from shared.protocol import SamplingParams
from tests.contract.test_model_family import ask
from tests.engines.torch_backend import ways
from tests.engines.torch_backend.models.family_table import (
    FAMILIES,
    LLAMA3_ROPE,
    REFUSED,
    Family,
    named,
    text,
    write_checkpoint,
    write_processor,
)
from tests.engines.torch_backend.models.test_families import (
    CPU,
    QUESTIONS,
    generate,
    load,
    load_family,
    load_for_text,
    load_only,
    load_processor,
    load_reference,
    load_their_processor,
    made,
    prompts,
)
from tests.factories_torch import logits_of, run_to_end
from tests.long import few

LLAMA = text("Llama", "Llama", rope_parameters=LLAMA3_ROPE)
WINDOWED = text("Mistral", "Mistral", sliding_window=8)
GENERIC = GenericFamily(lowers=False)
KERNEL_FAMILIES = ("Llama", "Qwen3", "Gemma 2", "StableLM", "Cohere 2", "Falcon-H1")
PRECISIONS = ("float32", "bfloat16", "int8", "int4")
#: Each precision at least once, and models with states.
KERNEL_CASES = [
    ("Falcon-H1", "float32"),
    ("Llama", "int8"),
    ("Qwen3", "bfloat16"),
    ("Gemma 2", "int4"),
]
needs_kernels = pytest.mark.skipif(
    not cpu_ops("fast").is_native, reason="there are no C++ kernels here"
)


def write(family: Family, directory: Path, **changes: Any) -> Path:
    """Writes a family's checkpoint with other fields in its `config.json`."""
    write_checkpoint(family, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))
    return directory


def test_a_model_is_moved_to_its_device_without_accelerate(tmp_path: Path) -> None:
    directory = write(LLAMA, tmp_path)
    config = GENERIC.check(read_fields(directory))
    model = load_model(directory, GENERIC, config, torch.device("meta"), torch.float32)
    assert all(x.is_meta for x in (*model.parameters(), *model.buffers()))
    assert model.kv_shapes


def test_a_module_can_read_the_bias_of_a_linear_layer(tmp_path: Path) -> None:
    """The model itself is refused: the self-check finds that its scores differ, because of its states."""
    jamba = text(
        "Jamba", "Jamba", shares_prefixes=False, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
        expert_layer_offset=1, num_experts=2, mamba_d_state=8, mamba_dt_rank=8,
    )  # fmt: skip
    with pytest.raises(UnsupportedCheckpoint, match=r"JambaForCausalLM.* differ"):
        create_engine({"kind": "torch", "model": str(write(jamba, tmp_path)), "device": "cpu"})


def test_a_failure_of_the_first_steps_is_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write(text("StableLM", "StableLm"), tmp_path)
    for error, kind, words in (
        (AttributeError("no such\npart"), UnsupportedCheckpoint, "AttributeError: no such part"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), ModelTooLarge, "GiB weights"),
    ):
        monkeypatch.setattr(GenericModel, "logits", Mock(side_effect=error))
        with pytest.raises(kind, match=words) as refused:
            create_engine({"kind": "torch", "model": str(directory), "device": "cpu"})
        assert "\n" not in str(refused.value)


def start(
    model: Any, ops: Ops | None = None, dtype: torch.dtype = torch.float32, **changes: Any
) -> TorchRunner:
    settings = TorchSettings(**{"num_kv_blocks": 64, "block_size": 4, **changes})
    return TorchRunner(model, settings, CPU, dtype, ops=ops)


def other_family(name: str, config_class: str, **fields: Any) -> Family:
    create = getattr(transformers, f"{config_class}Config")
    return Family(name, lambda: create(vocab_size=320, **fields))


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        (text("PhiMoE", "Phimoe", sliding_window=8, num_local_experts=4), "does not match its window or chunk size"),
        (text("DiffLlama", "DiffLlama"), "computed more than once for each token"),
        (other_family("Mamba", "Mamba", hidden_size=32, num_hidden_layers=2),
         "vocab_size|max_position_embeddings|not accept position_ids"),
        (other_family("Falcon", "Falcon", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, alibi=True),
         "cannot use paged attention: its layers bypass"),
    ],
    ids=lambda value: str(value) if isinstance(value, Family) else "",
)  # fmt: skip
def test_models_with_silent_errors_are_refused_with_the_reason(
    family: Family, reason: str, tmp_path: Path
) -> None:
    write_checkpoint(family, tmp_path)
    with pytest.raises(UnsupportedCheckpoint, match=reason):
        load(tmp_path)


@pytest.mark.parametrize(("family", "reason"), REFUSED, ids=lambda value: str(value)[:20])
def test_unsupported_models_with_images_are_refused_at_load_time(
    family: Family, reason: str, tmp_path: Path
) -> None:
    config = family.create()
    config.architectures = [family.architecture]
    config.save_pretrained(tmp_path)
    write_processor(family, tmp_path)
    with pytest.raises(UnsupportedCheckpoint, match=reason) as refused:
        load_processor(tmp_path)
    assert _names_another(refused.value)


def test_a_model_whose_images_attend_to_each_other_is_refused() -> None:
    model_class: Any = transformers.Molmo2ForConditionalGeneration
    hooks = PositionHooks.create(model_class, transformers.Molmo2Config())
    with pytest.raises(UnsupportedCheckpoint, match=r"Molmo2.* outside their image.*") as refused:
        hooks.lets_images_see_themselves()
    assert _names_another(refused.value)


def _names_another(refusal: UnsupportedCheckpoint) -> bool:
    """Returns whether the error is one line and suggests a tested model."""
    message = str(refusal)
    return "\n" not in message and any(f"as {each.name}," in message for each in FAMILIES)


def test_adjacent_images_have_one_token_between_them(tmp_path: Path) -> None:
    family = named("Idefics2")
    write_checkpoint(family, tmp_path)
    processor = load_processor(tmp_path)
    process = load_their_processor(family, tmp_path)

    question: list[Any] = [(28, 28, 1), (60, 20, 2), "And?"]
    prompt = ask(processor, question)
    assert prompt.token_ids == process(question)["input_ids"][0].tolist()
    assert [image.num_slots for image in prompt.images] == [4, 4]


def test_a_generated_image_token_is_not_an_image_slot(tmp_path: Path) -> None:
    """The slot could otherwise show another request's image. The prompt continues as in transformers."""
    loaded = load_family(named("Qwen2.5-VL"), tmp_path)
    [text, image] = [r for r in loaded.requests if r.request_id in ("text", "small")]
    slot: int = loaded.model.config.full.image_token_id
    written = replace(text, output_token_ids=(slot, 7, slot))
    alone = ways.run_alone(loaded.start, [written])
    assert alone["text"] != loaded.expected["text"]
    together = run_to_end(loaded.start(), [written, image])
    assert together == {**alone, "small": loaded.expected["small"]}


@pytest.mark.parametrize("kind", ["longrope", "dynamic", "yarn"])
def test_rotary_frequencies_do_not_depend_on_other_sequences(kind: str, tmp_path: Path) -> None:
    """They equal those that transformers computes for a sequence of the maximum length."""
    more: dict[str, Any] = {"original_max_position_embeddings": 30}
    rope = {"rope_type": kind, "rope_theta": 10000.0, "partial_rotary_factor": 1.0, **more}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 16.0}
        family = text("Phi-3", "Phi3", num_key_value_heads=4, rope_parameters=rope, **more)
    else:
        rope["factor"], longest = 4.0, 30 if kind == "dynamic" else 120
        family = text("Llama", "Llama", rope_parameters=rope, max_position_embeddings=longest)
    write_checkpoint(family, tmp_path)
    loaded = load_for_text(family, tmp_path, max_tokens=8)
    alone = ways.run_alone(loaded.start, loaded.requests)
    assert ways.run_batched(loaded.start, loaded.requests) == alone
    assert ways.run_chunked(loaded.start, loaded.requests) == alone


def test_logits_of_the_requested_rows_if_the_model_returns_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a model has `**kwargs`, which accept and ignore `logits_to_keep`."""
    model_class = type(made(WINDOWED, tmp_path, GENERIC).inner)
    whole = model_class.forward

    def forward(self: Any, input_ids: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        kwargs.pop("logits_to_keep", None)
        return whole(self, input_ids=input_ids, position_ids=position_ids, **kwargs)

    monkeypatch.setattr(model_class, "forward", forward)
    loaded = load_for_text(WINDOWED, tmp_path, made(WINDOWED, tmp_path, GENERIC))
    theirs = load_reference(tmp_path)
    expected = {name: generate(theirs, ids) for name, ids in prompts().items()}
    assert ways.run_chunked(loaded.start, loaded.requests) == expected


@pytest.mark.parametrize("change", [{"window": None}, {"scale": 0.2}])
def test_the_self_check_detects_wrong_results(change: dict[str, Any], tmp_path: Path) -> None:
    model = made(WINDOWED, tmp_path, GENERIC)
    runner = start(model)
    model.verify(runner, "always")
    for module in model.modules():
        if isinstance(pages := getattr(module, "pages", None), PagedLayer):
            pages.spec = replace(pages.spec, **change)
    with pytest.raises(UnsupportedCheckpoint, match="differ from transformers' by"):
        model.verify(runner, "always")
    model.verify(runner, "off")


@pytest.mark.parametrize(
    "name",
    few(
        ("LLaVA-NeXT", "Idefics3", "Qwen2.5-VL", "Gemma 3", "PaliGemma", "ERNIE 4.5 VL"),
        ("Idefics3", "Qwen2.5-VL", "PaliGemma"),
    ),
)
def test_the_self_check_compares_a_prompt_with_an_image(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Features of other sizes and missing features are found; a prompt that is too long is skipped."""
    write_checkpoint(named(name), tmp_path)
    model, processor = load(tmp_path, GENERIC)
    assert isinstance(model, GenericModel)

    def verify(**changes: Any) -> None:
        model.verify(start(model, **changes), "always", lambda: example_prompt(processor))

    with caplog.at_level("INFO"):
        verify()
        assert "logits of a prompt with an image differ by" in caplog.text
        verify(num_kv_blocks=3)
        assert "do not fit the KV cache" in caplog.text
    encode = model.encode
    for method, change in (
        ("encode", lambda *args: [1.2 * rows for rows in encode(*args)]),
        ("inputs", lambda *args: {}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(model, method, change)
            with pytest.raises(UnsupportedCheckpoint, match="of a prompt with an image differ"):
                verify()


def test_no_field_of_a_config_makes_transformers_fetch_or_run_code(tmp_path: Path) -> None:
    changes = {
        "_attn_implementation": "somebody/kernels", "attn_implementation": "somebody/kernels",
        "auto_map": {"AutoModelForCausalLM": "evil.Model"}, "experts_implementation": "somebody/experts",
        "transformers_weights": "https://example.com/weights",
    }  # fmt: skip
    write(text("Qwen3", "Qwen3", head_dim=16), tmp_path, **changes)
    model, _ = load(tmp_path)
    model.verify(start(model), "always")


@pytest.mark.parametrize(
    ("fields", "weights", "reason"),
    [
        ({"num_hidden_layers": 10**9}, {}, "num_hidden_layers is 1000000000"),
        ({"model_type": "qwen2"}, {}, "model_type 'qwen2' is not the type"),
        ({"model_type": "nothing"}, {}, "model_type 'nothing' is unknown"),
        ({}, {"model.norm.weight": None}, r"lacks weights: model\.norm\.weight"),
        ({}, {"surprise": torch.zeros(3)}, "has unknown weights: surprise"),
        ({}, {"model.norm.weight": torch.zeros(3)}, r"model\.norm\.weight is \(3,\)"),
    ],
)
def test_fields_and_weights_that_do_not_fit_are_named(
    fields: dict[str, Any], weights: dict[str, torch.Tensor | None], reason: str, tmp_path: Path
) -> None:
    write(text("Qwen3", "Qwen3", head_dim=16), tmp_path, **fields)
    changed = load_file(tmp_path / "model.safetensors") | weights
    stored = {name: x for name, x in changed.items() if x is not None}
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedCheckpoint, match=reason):
        load_only(tmp_path)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_linear_layers_can_be_quantized(scheme: str, tmp_path: Path) -> None:
    """Every way gives the same tokens, which equal those of the dequantized weights."""
    model = made(WINDOWED, tmp_path, GENERIC, torch.float32, METHODS[scheme])
    whole = load_only(tmp_path, GENERIC)
    assert len(quantized_layers(model)) == 2 * 7
    for name, module in model.inner.named_modules():
        if isinstance(module, Linear):
            whole.inner.get_submodule(name).weight.data = module.weight
    loaded, expected = (load_for_text(WINDOWED, tmp_path, each) for each in (model, whole))
    tokens = ways.run_batched(expected.start, expected.requests)
    assert ways.run_batched(loaded.start, loaded.requests) == tokens
    assert ways.run_chunked(loaded.start, loaded.requests) == tokens
    model.verify(start(model), "always")


@needs_kernels
@pytest.mark.parametrize(
    ("name", "precision"), few(product(KERNEL_FAMILIES, PRECISIONS), KERNEL_CASES)
)
def test_logits_of_kernels_equal_those_of_the_plain_modules(
    name: str, precision: str, tmp_path: Path
) -> None:
    """The head is in int8 if layers are quantized and it is not tied to the embeddings."""
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    ops, scheme = cpu_ops("fast"), METHODS.get(precision)
    model = made(named(name), tmp_path, GENERIC, dtype, scheme, ops=ops)
    head, table = model.inner.get_output_embeddings(), model.inner.get_input_embeddings()
    is_tied = model.inner.config.tie_word_embeddings
    if scheme is not None:
        assert is_tied or head.method is PACKED_INT8
    assert not is_tied or head.weight is table.weight
    assert table.weight.dtype == dtype
    model.verify(start(model, ops, dtype), "always")


def test_attention_within_an_image_is_bidirectional_if_configured(tmp_path: Path) -> None:
    """With causal attention the answers would differ."""
    loaded = load_family(named("Gemma 3"), tmp_path)
    assert ways.run_chunked(loaded.start, loaded.requests) == loaded.expected
    apart = [
        replace(request, images=tuple(replace(image, is_whole=False) for image in request.images))
        for request in loaded.requests
    ]
    assert ways.run_chunked(loaded.start, apart) != loaded.expected


def test_positions_do_not_depend_on_the_prompt_before(tmp_path: Path) -> None:
    """Hooks of transformers store the last rope deltas in the model."""
    write_checkpoint(named("Qwen2.5-VL"), tmp_path)
    processor = load_processor(tmp_path)
    with_image, without = QUESTIONS["wide"], QUESTIONS["text"]
    first = ask(processor, with_image).positions
    assert len(first) == 3
    assert ask(processor, without).positions == ()
    assert ask(processor, QUESTIONS["two"]).positions != first
    assert ask(processor, without).positions == ()
    assert ask(processor, with_image).positions == first


def test_memory_for_states_is_counted_and_reserved_before_that_of_keys_and_values(
    tmp_path: Path,
) -> None:
    model = made(named("Bamba"), tmp_path)
    runner = start(model)
    runner.warm_up()
    assert runner.memory_bytes()["states"] == 0
    for number in range(2):
        sequence = Sequence(f"{number}", [5, 6, 7, 8], 4, SamplingParams(temperature=0))
        sequence.block_ids = [number]
        runner.launch(Batch([ScheduledSequence(sequence, 4)])).wait()
    # convolution: 4 of 64 * 2 + 2 * 8 channels; state: 8 heads of 16 by 8; the first step has no earlier state
    state_bytes = 4 * (4 * (128 + 16) + 8 * 16 * 8)
    assert runner.memory_bytes()["states"] == 2 * state_bytes
    runner.release("0")
    runner.release("1")
    assert runner.memory_bytes()["states"] == 0

    weights = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    states = 3 * state_bytes  # a sequence has states before, during and after a step
    [pool] = model.kv_shapes
    room = 100 * bytes_per_block(pool, 4, torch.float32)

    def num_blocks(max_num_seqs: int, free: int) -> int:
        settings = TorchSettings(block_size=4, max_num_seqs=max_num_seqs)
        runner = TorchRunner(model, settings, CPU, torch.float32, free_before_load=weights + free)
        return runner.num_blocks

    assert num_blocks(8, room + 8 * states) == num_blocks(16, room + 16 * states) == 40
    with pytest.raises(EngineStartError, match=r"states of 8 sequences need .* Lower max_num_seqs"):
        num_blocks(8, 8 * states)


def test_a_complete_qwen_omni_runs_its_thinker(tmp_path: Path) -> None:
    """The published folder contains the parts that generate text, speech codes and waveforms."""
    thinker = load_family(named("Qwen2.5-Omni"), tmp_path / "thinker")
    whole = tmp_path / "whole"
    shutil.copytree(thinker.directory, whole)
    config = json.loads((whole / "config.json").read_text())
    config["architectures"] = ["Qwen2OmniNaViTThinkerForConditionalGeneration"]
    parts = {"thinker_config": config, "talker_config": {}, "token2wav_config": {}}
    named_whole = {"model_type": "qwen2_5_omni", "architectures": ["Qwen2_5OmniModel"]}
    (whole / "config.json").write_text(json.dumps({**named_whole, **parts}))
    made = json.loads((whole / "processor_config.json").read_text())
    flat = {**made["feature_extractor"], **made["image_processor"]}
    flat["processor_class"] = made["processor_class"]
    (whole / "preprocessor_config.json").write_text(json.dumps(flat))
    (whole / "processor_config.json").unlink()
    stored = load_file(whole / "model.safetensors")
    weights = {f"thinker.{name}": x for name, x in stored.items()}
    weights |= {"talker.codec_head.weight": torch.ones(2, 2), "token2wav.bias": torch.ones(2)}
    save_file(weights, whole / "model.safetensors", {"format": "pt"})
    family, _ = find_family(whole)
    assert family is FAMILY
    model, processor = load(whole)
    loaded = replace(thinker, directory=whole, model=model, processor=processor)
    assert ways.run_batched(loaded.start, loaded.requests) == thinker.expected


PLAIN_SCALE: dict[str, Any] = {"attention_multiplier": 0.25}


def path_of(family: Family, directory: Path, caplog: pytest.LogCaptureFixture) -> tuple[str, str]:
    """Returns the speed path of the decoder and its line in the log."""
    with caplog.at_level(logging.INFO, "engines.torch_backend.models.generic.model"):
        model = made(family, directory)
    [line] = [text for text in caplog.messages if "the decoder" in text]
    return model.speed_path, line


def _between_layers(forward: Callable[..., Any]) -> Callable[..., Any]:
    def changed(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        is_second = self.self_attn.layer_idx == 1
        return forward(self, hidden_states * (2 if is_second else 1), *args, **kwargs)

    return changed


def _after_layers(forward: Callable[..., Any]) -> Callable[..., Any]:
    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs).tanh()

    return changed


def _twice(add: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *given: add(self, *given) * 2


@pytest.mark.parametrize(
    ("family", "reason", "changes"),
    [
        (text("Granite", "Granite", embedding_multiplier=3.0, **PLAIN_SCALE), "after embeddings", ()),
        (text("Granite", "Granite", residual_multiplier=0.5, **PLAIN_SCALE), "the output of layer 0 differs", ()),
        (text("Granite", "Granite", logits_scaling=2.0, **PLAIN_SCALE), "after the head", ()),
        (text("Granite", "Granite", attention_multiplier=0.2), "attention scale", ()),
        (text("StableLM", "StableLm"), "not an RMS norm", ()),
        (text("Llama", "Llama", hidden_act="sigmoid"), "activation", ()),
        (LLAMA, "differs from ours", (modeling_llama.LlamaDecoderLayer, "forward", _between_layers)),
        (LLAMA, "differs from ours", (modeling_llama.LlamaDecoderLayer, "forward", _after_layers)),
        (named("Qwen3-VL"), "image features are not added after",
         (modeling_qwen3_vl.Qwen3VLTextModel, "_deepstack_process", _twice)),
    ],
    ids=lambda value: str(value) if isinstance(value, Family) else "",
)  # fmt: skip
def test_other_decoders_stay_generic_with_the_reason(
    family: Family, reason: str, changes: Any, tmp_path: Path, caplog: Any, monkeypatch: Any
) -> None:
    if changes:
        module, method, change = changes
        monkeypatch.setattr(module, method, change(getattr(module, method)))
    path, line = path_of(family, tmp_path, caplog)
    assert path == "generic"
    assert reason in line


def test_each_kind_of_layer_of_a_large_model_is_verified(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every fourth layer of this family has no rotary embedding."""
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
def test_other_orders_of_rotary_channels_are_converted(family: Family, tmp_path: Path) -> None:
    """The rotated channel pairs are neighbors, or only some channels are rotated."""
    loaded = load_family(family, tmp_path)
    assert loaded.model.speed_path == "lowered"
    for kernels in ("fast", "off"):
        start = partial(loaded.start, cpu_ops(kernels))
        assert ways.run_chunked(start, loaded.requests) == loaded.expected


@pytest.mark.parametrize(
    ("scheme", "kernels"), [("none", "off"), ("int8", "fast"), ("int4", "fast")]
)
def test_a_lowered_decoder_equals_the_native_family(
    scheme: str, kernels: Any, tmp_path: Path
) -> None:
    """The same program with the same weights, and the rotary angles of transformers."""
    lowered, native = (
        made(LLAMA, tmp_path, family, torch.float32, METHODS.get(scheme), ops=cpu_ops(kernels))
        for family in (FAMILY, causal_lm.FAMILY)
    )
    shape = native.language_model.text
    assert lowered.language_model.text == replace(shape, rope_theta=10000.0, rope_scaling=None)
    scores = []
    for each in (lowered, native):
        start(each, cpu_ops(kernels))
        scores.append(torch.cat([logits_of(each, torch.tensor(ids)) for ids in prompts().values()]))
    torch.testing.assert_close(*scores, rtol=0, atol=1e-5 if scheme == "none" else 1e-3)


@needs_kernels
@pytest.mark.parametrize(
    ("name", "lowers"),
    few(
        product(("Idefics3", "Qwen2.5-VL", "LFM2-VL", "MiniCPM-V 4.6"), (True, False)),
        [("Idefics3", True), ("LFM2-VL", False)],
    ),
)
def test_towers_are_in_int8_if_the_decoder_is_quantized(
    name: str, lowers: bool, tmp_path: Path
) -> None:
    write_checkpoint(named(name), tmp_path)
    [image] = ask(load_processor(tmp_path), QUESTIONS["small"]).images
    features = []
    for scheme in (None, METHODS["int4"]):
        model = load_only(
            tmp_path, GenericFamily(lowers), torch.float32, scheme, ops=cpu_ops("fast")
        )
        start(model, cpu_ops("fast"))
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
def test_matrices_stay_in_their_stored_dtype_if_kernels_read_them(
    name: str, tmp_path: Path
) -> None:
    """They need half the memory and give the tokens of the same values in float32."""
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
    """Writes a checkpoint in bfloat16. Returns its size in bytes."""
    write_checkpoint(family, directory)
    weights = load_file(directory / "model.safetensors")
    rounded = {name: x.bfloat16() for name, x in weights.items()}
    save_file(rounded, directory / "model.safetensors", metadata={"format": "pt"})
    return sum(x.nbytes for x in rounded.values())


@pytest.mark.parametrize("lowers", [True, False])
def test_the_checked_memory_is_that_of_the_matrices_in_their_final_dtype(
    lowers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check includes matrices of a decoder that is not lowered."""
    stored = halve(named("Mistral, window"), tmp_path)
    for room, expected in ((1.1, nullcontext()), (0.9, pytest.raises(ModelTooLarge))):
        monkeypatch.setattr(weights_module, "free_bytes", lambda _, room=room: room * stored)
        with expected:
            load_only(tmp_path, GenericFamily(lowers), ops=cpu_ops("fast"))


@pytest.mark.parametrize(
    "name", few(["Mistral, window", "Gemma 3, text", "Qwen2.5-VL", "Qwen3-VL"], ["Qwen3-VL"])
)
def test_the_gpu_path_of_a_lowered_model_equals_the_generic_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses the buffers and fused layers of a GPU, with kernels replaced by reference implementations."""
    monkeypatch.setattr(runner, "runs_graphs", lambda device: True)
    loaded = load_family(named(name), tmp_path)
    assert ways.run_chunked(loaded.start, loaded.requests) == loaded.expected
    assert ways.run_overlapped(loaded.start, loaded.requests) == loaded.expected


def test_norm_gains_plus_one_are_not_rounded_to_16_bits(tmp_path: Path) -> None:
    """Rounded, the lowered decoder would differ from the original one."""
    model = made(named("Gemma 3, text"), tmp_path, FAMILY, torch.bfloat16)
    assert model.speed_path == "lowered"
    sequence = Sequence("r", [*range(5, 40)], 35, SamplingParams(temperature=0))
    sequence.block_ids = [*range(9)]
    ours, theirs = (
        started.logits([ScheduledSequence(sequence, 35)]).float()
        for started in (start(model, dtype=torch.bfloat16), start(load_only(tmp_path)))
    )
    assert float((ours - theirs).std() / theirs.std()) < 0.03


@pytest.mark.parametrize("name", ["Qwen2-VL", "Qwen3"])
def test_modules_of_the_lowered_decoder_are_freed(name: str, tmp_path: Path) -> None:
    """Otherwise the modules would keep full weights beside the quantized ones."""
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
