"""Adapter directories: the fields that are read, and refusals that name the unsupported field."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines.base import AdapterLimits, BadAdapter
from tests.engines.torch_backend.test_equivalence import generate_with_transformers, model_pair
from tests.factories_adapters import LIMITS, linear_names, make_changes, merged, write_adapter
from tests.factories_torch import PROMPTS, make_engine, make_request, run_to_end

Q = "model.language_model.layers.0.self_attn.q_proj"


def tokens_of(directory: Path) -> list[int]:
    pair = model_pair("grouped")
    engine = make_engine(pair)
    adapter = engine.load_adapter(directory, LIMITS)
    request = make_request(pair.config, "r", PROMPTS["one"], max_tokens=16)
    return run_to_end(engine, [replace(request, adapter=adapter)])["r"]


def expected_tokens(theirs: Any) -> list[int]:
    pair = replace(model_pair("grouped"), theirs=theirs)
    request = make_request(pair.config, "r", PROMPTS["one"], max_tokens=16)
    return generate_with_transformers(pair, request)


def changes(names: list[str] | None = None, **options: Any) -> Any:
    theirs = model_pair("grouped").theirs
    names = names or linear_names(theirs, ("q_proj", "up_proj"), "language_model.layers")
    return make_changes(theirs, names, **options)


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({"lora_alpha": 4, "use_rslora": True}, 4 / 2),
        ({"lora_alpha": 1, "alpha_pattern": {"q_proj": 8, "layers.*.up_proj": 8}}, 8 / 4),
        ({"r": 8, "rank_pattern": {".*": 4}}, 8 / 4),
        ({"lora_dropout": 0.1, "target_modules": ["q_proj"], "future_field": None}, 8 / 4),
    ],
    ids=str,
)
def test_the_scale_equals_that_of_peft(config: dict[str, Any], scale: float, tmp_path: Path):
    made = changes()
    expected = expected_tokens(merged(model_pair("grouped").theirs, made, scale))
    path = write_adapter(tmp_path, made, **config)
    (path / "more").write_text("")
    assert tokens_of(path) == expected


def test_names_of_older_and_newer_versions_are_equivalent(tmp_path: Path):
    made = changes()
    expected = expected_tokens(merged(model_pair("grouped").theirs, made))
    for prefix in ("model.language_model", "language_model.model", "model"):
        renamed = {n.replace("model.language_model", prefix): pair for n, pair in made.items()}
        assert tokens_of(write_adapter(tmp_path / prefix, renamed)) == expected


def _change(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        file = directory / "adapter_model.safetensors"
        weights = load_file(file)
        change(weights)
        save_file({name: value.contiguous() for name, value in weights.items()}, file)

    return apply


A = f"base_model.model.{Q}.lora_A.weight"
B = f"base_model.model.{Q}.lora_B.weight"


def _config(**fields: Any) -> Callable[[Path], Any]:
    return lambda directory: write_adapter(directory, changes(), **fields)


def _also(name: str) -> Callable[[Path], Any]:
    return lambda directory: write_adapter(directory, {**changes([Q]), name: changes([Q])[Q]})


ELSEWHERE = "the adapter changes {}, but only linear layers"
TOWER, HEAD = "model.multi_modal_projector.linear_1", "lm_head"
LAYER_9 = "model.language_model.layers.9.self_attn.q_proj"
NORM = "model.language_model.layers.0.input_layernorm"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_config(peft_type="LOHA"), "peft_type 'LOHA' cannot be run"),
        (_config(peft_type=None), "peft_type"),
        (_config(use_dora=True), "use_dora .*DoRA is not supported"),
        (_config(bias="lora_only"), "bias is trained"),
        (_config(lora_bias=True), "bias is trained"),
        (_config(modules_to_save=["lm_head"]), r"modules_to_save is \['lm_head'\]"),
        (_config(init_lora_weights="pissa"), "init_lora_weights is 'pissa', which changes the base"),
        (_config(fan_in_fan_out=True), "fan_in_fan_out is True: this is not supported"),
        (_config(trainable_token_indices=[3]), "trainable_token_indices"),
        (_config(alora_invocation_tokens=[5]), "alora_invocation_tokens"),
        (_config(r=17), "r is 17"),
        (_config(r=3), "rank 4; it must be the rank in adapter_config.json, 3"),
        (_config(lora_alpha=float("inf")), "lora_alpha"),
        (_config(alpha_pattern={"q_proj": "x"}), "lora_alpha is 'x'"),
        (_config(rank_pattern={"(": 4}), "rank_pattern has the invalid pattern"),
        (_config(rank_pattern=[4]), "rank_pattern is"),
        (lambda d: (d / "adapter_config.json").unlink(), "there is no adapter_config.json"),
        (lambda d: (d / "adapter_config.json").write_text("[]"), "is not a JSON object"),
        (lambda d: (d / "adapter_model.safetensors").unlink(), "there is no adapter_model.safetens"),
        (lambda d: (d / "adapter_model.safetensors").rename(d / "adapter_model.bin"), "unpickling can run"),
        (lambda d: (d / "adapter_model.safetensors").write_bytes(b"\x08" + bytes(20)), "damaged"),
        (_change(lambda w: w.clear()), "holds no weights"),
        (_change(lambda w: w.pop(A)), "does not have lora_A and lora_B"),
        (_change(lambda w: w.update({A: w[A][:2]})), "lora_A and lora_B of the same rank"),
        (_change(lambda w: w.update({A: w[A][:, :-1]})), "use the adapter.s base model"),
        (_change(lambda w: w.update({A: w[A].int()})), "not a matrix of numbers"),
        (_change(lambda w: w.update({B: w[B] * torch.inf})), "beyond the range of"),
        (_change(lambda w: w.update({f"{Q}.lora_magnitude_vector": torch.ones(4)})), "neither lora_A nor lora_B"),
        *((_also(name), ELSEWHERE.format(name)) for name in (TOWER, HEAD, LAYER_9, NORM)),
    ],
)  # fmt: skip
def test_unsupported_adapters_are_refused_with_the_reason(
    damage: Callable[[Path], Any], reason: str, tmp_path: Path
):
    write_adapter(tmp_path, changes())
    damage(tmp_path)
    with pytest.raises(BadAdapter, match=reason) as refused:
        tokens_of(tmp_path)
    assert "\n" not in str(refused.value)


def test_the_error_of_a_limit_names_its_setting_and_equal_adapters_have_one_digest(tmp_path: Path):
    engine = make_engine(model_pair("grouped"))
    here, there, other = (
        write_adapter(tmp_path / name, changes(seed=seed))
        for name, seed in (("here", 1), ("there", 1), ("other", 2))
    )
    with pytest.raises(BadAdapter, match="VLM_LIMITS__MAX_LORA_BYTES"):
        engine.load_adapter(here, AdapterLimits(max_rank=16, max_bytes=1000))
    with pytest.raises(BadAdapter, match="not an integer from 1 to 2"):
        engine.load_adapter(here, AdapterLimits(max_rank=2, max_bytes=2**20))
    digests = [engine.load_adapter(path, LIMITS).digest for path in (here, there, other)]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.filterwarnings("ignore")  # transformers warns about its calls of peft
@pytest.mark.parametrize(
    "options",
    [
        {"r": 4, "lora_alpha": 8},
        {"r": 8, "lora_alpha": 4, "use_rslora": True},
        {"r": 4, "rank_pattern": {"q_proj": 8}, "alpha_pattern": {"down_proj": 2}},
    ],
    ids=str,
)
def test_answers_equal_those_of_peft_with_merged_weights(options: dict[str, Any], tmp_path: Path):
    peft = pytest.importorskip("peft")
    base = merged(model_pair("grouped").theirs, {})
    targets = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=targets, **options))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == "LORA"
    expected = expected_tokens(model.merge_and_unload())
    assert expected != expected_tokens(model_pair("grouped").theirs)
    assert tokens_of(tmp_path) == expected
