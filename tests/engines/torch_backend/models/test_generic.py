"""What may go wrong without a word where another's modules are driven: each is refused, or made right."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engines.core.sequence import Batch, ScheduledSequence, Sequence
from engines.registry import create_engine
from engines.text.processor import example_prompt
from engines.torch_backend.kv_cache import KVCacheTooSmall, bytes_per_block
from engines.torch_backend.layers.linear import METHODS, Linear, quantized_layers
from engines.torch_backend.loading.weights import ModelTooLarge, load_model
from engines.torch_backend.models.causal_lm import CausalFamily
from engines.torch_backend.models.config import UnsupportedCheckpoint
from engines.torch_backend.models.generic.attention import PagedLayer
from engines.torch_backend.models.generic.family import FAMILY, GenericFamily
from engines.torch_backend.models.generic.model import GenericModel
from engines.torch_backend.models.generic.states import LayerState
from engines.torch_backend.models.hf_config import read_fields
from engines.torch_backend.models.registry import find_family
from engines.torch_backend.multimodal.transformers_images import PositionHooks
from engines.torch_backend.ops.linear.cpu import PACKED_INT8
from engines.torch_backend.ops.registry import cpu_ops
from engines.torch_backend.runner import TorchRunner
from engines.torch_backend.settings import TorchSettings
from shared.protocol import SamplingParams
from tests.contract.test_model_family import ask
from tests.engines.torch_backend import ways
from tests.engines.torch_backend.models.family_table import (
    FAMILIES,
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
from tests.factories_torch import run_to_end
from tests.long import few

LLAMA = text("Llama", "Llama")
WINDOWED = text("Mistral", "Mistral", sliding_window=8)
GENERIC = GenericFamily(lowers=False)
KERNEL_FAMILIES = ("Llama", "Qwen3", "Gemma 2", "StableLM", "Cohere 2", "Falcon-H1")
PRECISIONS = ("float32", "bfloat16", "int8", "int4")
#: Each precision at least once, and states.
KERNEL_CASES = [
    ("Falcon-H1", "int4"),
    ("Llama", "int8"),
    ("Qwen3", "bfloat16"),
    ("Gemma 2", "float32"),
]
needs_kernels = pytest.mark.skipif(
    not cpu_ops("fast").is_native, reason="there are no C++ kernels here"
)


def write(family: Family, directory: Path, **changes: Any) -> Path:
    """A family's checkpoint, other fields in its `config.json`."""
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


JAMBA = text(
    "Jamba", "Jamba", shares_prefixes=False, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
    expert_layer_offset=1, num_experts=2, mamba_d_state=8, mamba_dt_rank=8,
)  # fmt: skip


def test_a_module_that_reads_the_bias_of_a_linear_layer_is_given_it(tmp_path: Path) -> None:
    """Its states stay another matter: the self-check finds that its scores differ."""
    with pytest.raises(UnsupportedCheckpoint, match=r"JambaForCausalLM.* differ"):
        create_engine({"kind": "torch", "model": str(write(JAMBA, tmp_path)), "device": "cpu"})


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (AttributeError("no such\npart"), UnsupportedCheckpoint, "AttributeError: no such part"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), ModelTooLarge, "GiB weights"),
    ],
)
def test_what_fails_in_the_first_steps_is_one_sentence(
    error: Exception, kind: type[Exception], words: str, tmp_path: Path, monkeypatch: Any
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(GenericModel, "logits", fail)
    directory = write(text("StableLM", "StableLm"), tmp_path)
    with pytest.raises(kind, match=words) as refused:
        create_engine({"kind": "torch", "model": str(directory), "device": "cpu"})
    assert "\n" not in str(refused.value)


def start(model: Any, **changes: Any) -> TorchRunner:
    settings = TorchSettings(**{"num_kv_blocks": 64, "block_size": 4, **changes})
    return TorchRunner(model, settings, CPU, torch.float32)


def other_family(name: str, config_class: str, **fields: Any) -> Family:
    create = getattr(transformers, f"{config_class}Config")
    return Family(name, lambda: create(vocab_size=320, **fields))


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        (text("PhiMoE", "Phimoe", sliding_window=8, num_local_experts=4), "does not match its window or chunk size"),
        (text("DiffLlama", "DiffLlama"), "computed more than once for each token"),
        (other_family("GPT-J", "GPTJ", n_embd=64, n_layer=2, n_head=4, n_positions=128, rotary_dim=8),
         "layers bypass transformers' attention interface"),
        (other_family("Mamba", "Mamba", hidden_size=32, num_hidden_layers=2),
         "vocab_size|max_position_embeddings|takes no position_ids"),
        (other_family("Falcon", "Falcon", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, alibi=True),
         "cannot use paged attention: its layers bypass"),
    ],
    ids=lambda value: str(value) if isinstance(value, Family) else "",
)  # fmt: skip
def test_what_would_be_wrong_in_silence_is_refused_by_its_reason(
    family: Family, reason: str, tmp_path: Path
) -> None:
    write_checkpoint(family, tmp_path)
    with pytest.raises(UnsupportedCheckpoint, match=reason):
        load(tmp_path)


@pytest.mark.parametrize(("family", "reason"), REFUSED, ids=lambda value: str(value)[:20])
def test_models_of_images_that_cannot_be_run_are_refused_before_a_request(
    family: Family, reason: str, tmp_path: Path
) -> None:
    config = family.create()
    config.architectures = [family.architecture]
    config.save_pretrained(tmp_path)
    write_processor(family, tmp_path)
    with pytest.raises(UnsupportedCheckpoint, match=reason) as refused:
        load_processor(tmp_path)
    assert _names_another(refused.value)


def test_a_model_whose_images_see_each_other_is_refused() -> None:
    model_class: Any = transformers.Molmo2ForConditionalGeneration
    hooks = PositionHooks.create(model_class, transformers.Molmo2Config())
    with pytest.raises(UnsupportedCheckpoint, match=r"Molmo2.* outside their image.*") as refused:
        hooks.lets_images_see_themselves()
    assert _names_another(refused.value)


def _names_another(refusal: UnsupportedCheckpoint) -> bool:
    """Whether it is one line, and says which of the models that are tested would do."""
    message = str(refusal)
    return "\n" not in message and any(f"as {each.name}," in message for each in FAMILIES)


def test_images_side_by_side_have_one_token_between_them_and_a_space_before_a_word(
    tmp_path: Path,
) -> None:
    family = named("Idefics2")
    write_checkpoint(family, tmp_path)
    processor = load_processor(tmp_path)
    process = load_their_processor(family, tmp_path)

    question: list[Any] = [(28, 28, 1), (60, 20, 2), "And?"]
    prompt = ask(processor, question)
    assert prompt.token_ids == process(question)["input_ids"][0].tolist()
    assert [image.num_slots for image in prompt.images] == [4, 4]


def test_a_slot_that_the_model_writes_itself_is_no_image(tmp_path: Path) -> None:
    """Another's image may be in the same step; the prompt goes on as transformers has it."""
    loaded = load_family(named("Qwen2.5-VL"), tmp_path)
    [text, image] = [r for r in loaded.requests if r.request_id in ("text", "small")]
    slot: int = loaded.model.config.full.image_token_id
    written = replace(text, output_token_ids=(slot, 7, slot))
    alone = ways.run_alone(loaded.start, [written])
    assert alone["text"] != loaded.expected["text"]
    together = run_to_end(loaded.start(), [written, image])
    assert together == {**alone, "small": loaded.expected["small"]}


@pytest.mark.parametrize("kind", ["longrope", "dynamic", "yarn"])
def test_frequencies_do_not_depend_on_who_shares_the_step(kind: str, tmp_path: Path) -> None:
    """They are those of the longest sequence that there may be: transformers' own, told of one so long."""
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


def test_scores_are_those_of_the_wanted_rows_where_the_model_cannot_choose(tmp_path: Path) -> None:
    """Then `**kwargs` would swallow `logits_to_keep`."""
    model = made(WINDOWED, tmp_path, GENERIC)
    whole = type(model.inner).forward

    def forward(self: Any, input_ids: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        kwargs.pop("logits_to_keep", None)
        return whole(self, input_ids=input_ids, position_ids=position_ids, **kwargs)

    model.inner.forward = MethodType(forward, model.inner)
    model.find_arguments()
    loaded = load_for_text(WINDOWED, tmp_path, model)
    theirs = load_reference(tmp_path)
    expected = {name: generate(theirs, ids) for name, ids in prompts().items()}
    assert ways.run_chunked(loaded.start, loaded.requests) == expected


@pytest.mark.parametrize("change", [{"window": None}, {"scale": 0.2}])
def test_the_self_check_finds_an_engine_that_computes_something_else(
    change: dict[str, Any], tmp_path: Path
) -> None:
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
    """Features of other sizes, and none at all, are found; a prompt without room is left out."""
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


def test_a_decoder_of_our_own_program_is_run_by_it(tmp_path: Path) -> None:
    write_checkpoint(LLAMA, tmp_path / "plain")
    assert isinstance(find_family(tmp_path / "plain")[0], CausalFamily)
    write_checkpoint(WINDOWED, tmp_path / "window")
    family, config = find_family(tmp_path / "window")
    assert config.model_class.__name__ == "MistralForCausalLM"
    assert not isinstance(family, CausalFamily)


def test_nothing_of_a_config_makes_transformers_fetch_or_run_code(tmp_path: Path) -> None:
    changes = {
        "_attn_implementation": "somebody/kernels", "attn_implementation": "somebody/kernels",
        "auto_map": {"AutoModelForCausalLM": "evil.Model"}, "experts_implementation": "somebody/experts",
        "transformers_weights": "https://example.com/weights",
    }  # fmt: skip
    write(text("Qwen3", "Qwen3", head_dim=16), tmp_path, **changes)
    model, _ = load(tmp_path)
    model.verify(start(model), "always")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"model_type": "qwen2"}, "model_type 'qwen2' is not the type"),
        ({"model_type": "nothing"}, "model_type 'nothing' is unknown"),
    ],
)
def test_a_config_that_cannot_be_believed_is_refused_by_its_field(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    write(text("Qwen3", "Qwen3", head_dim=16), tmp_path, **changes)
    with pytest.raises(UnsupportedCheckpoint, match=reason):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda w: w.pop("model.norm.weight"), r"lacks weights: model\.norm\.weight"),
        (lambda w: w.update(surprise=torch.zeros(3)), "has unknown weights: surprise"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(3)}), r"model\.norm\.weight is \(3,\)"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_are_named(
    change: Callable[[dict[str, torch.Tensor]], Any], reason: str, tmp_path: Path
) -> None:
    write_checkpoint(text("Qwen3", "Qwen3", head_dim=16), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedCheckpoint, match=reason):
        load(tmp_path)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_linear_maps_may_be_in_few_bits(scheme: str, tmp_path: Path) -> None:
    """Every way gives the same tokens, and they are those of the weights that the integers stand for."""
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


def made_for_kernels(family: Family, directory: Path, dtype: torch.dtype, scheme: str) -> Any:
    return made(family, directory, GENERIC, dtype, METHODS.get(scheme), ops=cpu_ops("fast"))


def check_with_kernels(model: Any, dtype: torch.dtype) -> None:
    """The scores of steps are those of transformers' modules."""
    settings = TorchSettings(num_kv_blocks=64, block_size=4)
    model.verify(TorchRunner(model, settings, CPU, dtype, ops=cpu_ops("fast")), "always")


@needs_kernels
@pytest.mark.parametrize(
    ("name", "precision"), few(product(KERNEL_FAMILIES, PRECISIONS), KERNEL_CASES)
)
def test_scores_by_kernels_are_those_of_the_plain_modules(
    name: str, precision: str, tmp_path: Path
) -> None:
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    check_with_kernels(made_for_kernels(named(name), tmp_path, dtype, precision), dtype)


@needs_kernels
@pytest.mark.parametrize(("is_tied", "dtype"), [(False, torch.bfloat16), (True, torch.float32)])
def test_beside_layers_in_few_bits_the_head_is_in_int8_if_it_is_no_table_of_tokens(
    is_tied: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    family = text("Llama", "Llama", tie_word_embeddings=is_tied)
    model = made_for_kernels(family, tmp_path, dtype, "int4")
    head = model.inner.get_output_embeddings()
    assert isinstance(head, Linear) != is_tied
    table = model.inner.get_input_embeddings().weight
    if isinstance(head, Linear):
        assert head.method is PACKED_INT8
    assert table.dtype == dtype
    check_with_kernels(model, dtype)


def test_slots_of_an_image_see_each_other_where_the_model_says_so(tmp_path: Path) -> None:
    """Where they did not, the answers would be others."""
    loaded = load_family(named("Gemma 3"), tmp_path)
    assert ways.run_chunked(loaded.start, loaded.requests) == loaded.expected
    apart = [
        replace(request, images=tuple(replace(image, is_whole=False) for image in request.images))
        for request in loaded.requests
    ]
    assert ways.run_chunked(loaded.start, apart) != loaded.expected


def test_positions_do_not_depend_on_the_prompt_before(tmp_path: Path) -> None:
    """Transformers' hooks leave what they count by in the model."""
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
    for number in range(2):
        sequence = Sequence(f"{number}", [5, 6, 7, 8], 4, SamplingParams(temperature=0))
        sequence.block_ids = [number]
        runner.run(Batch([ScheduledSequence(sequence, 4)]))
    # convolution: 4 of 64 * 2 + 2 * 8 channels; state: 8 heads of 16 by 8; the first step begins with nothing
    state_bytes = 4 * (4 * (128 + 16) + 8 * 16 * 8)
    assert runner.memory_bytes()["states"] == 2 * state_bytes
    runner.release("0")
    runner.release("1")
    assert runner.memory_bytes()["states"] == 0

    weights = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    states = 3 * state_bytes  # of a sequence: before and after a step, and in it
    [pool] = model.kv_shapes
    room = 100 * bytes_per_block(pool, 4, torch.float32)

    def num_blocks(max_num_seqs: int, free: int) -> int:
        settings = TorchSettings(block_size=4, max_num_seqs=max_num_seqs)
        runner = TorchRunner(model, settings, CPU, torch.float32, free_before_load=weights + free)
        return runner.num_blocks

    assert num_blocks(8, room + 8 * states) == num_blocks(16, room + 16 * states) == 40
    with pytest.raises(KVCacheTooSmall, match=r"states of 8 sequences need .* Lower max_num_seqs"):
        num_blocks(8, 8 * states)


def test_a_state_that_is_lost_between_chunks_is_found_by_the_self_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers' first Mamba does with its own."""
    model = made(named("Bamba"), tmp_path)
    model.verify(start(model), "always")
    monkeypatch.setattr(LayerState, "get_recurrent_state", lambda *args, **more: None)
    monkeypatch.setattr(LayerState, "get_conv_state", lambda *args, **more: None)
    monkeypatch.setattr(LayerState, "has_previous_state", lambda *args, **more: False)
    with pytest.raises(UnsupportedCheckpoint, match="differ from transformers' by"):
        model.verify(start(model), "always")


def test_an_image_among_others_is_what_the_processor_makes_of_it_there(tmp_path: Path) -> None:
    """LLaVA-OneVision cuts a prompt's only image into tiles, and no other."""
    write_checkpoint(named("LLaVA-OneVision"), tmp_path)
    processor = load_processor(tmp_path)
    image = QUESTIONS["wide"][1]
    [alone] = ask(processor, [image, "What?"]).images
    first, second = ask(processor, [image, "Or ", image, "?"]).images
    assert alone.num_slots > first.num_slots == second.num_slots == 5
    assert alone.image_hash != first.image_hash == second.image_hash


def test_of_a_whole_qwen_omni_the_thinker_runs(tmp_path: Path) -> None:
    """As published: one folder with the parts that generate text, codes of speech and waves."""
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
