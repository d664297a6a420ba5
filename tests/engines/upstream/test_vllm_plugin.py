"""The logits processor for vLLM, with the interfaces of both model runners."""

import importlib.util
import sys
from abc import ABC
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import engines.upstream.plugin
from engines.text.grammar_child import Vocabulary, create_tokenizer, to_source
from engines.upstream.vllm import PLUGIN, PLUGIN_VERSION

TOKENS = (b"", *(bytes([code]) for code in range(32, 127)))
EOS, VOCAB = 0, 128  # vLLM pads logits beyond the vocabulary
GRAMMAR = to_source('start: %json {"enum": ["ab", "ac"]}')
ANSWER = [TOKENS.index(bytes([code])) for code in b'"ab"']


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plugin module, with stand-ins for the modules of vLLM."""
    names = {
        "vllm.tokenizers.registry": {"cached_tokenizer_from_config": lambda model: None},
        "vllm.v1.sample.logits_processor": {
            "LogitsProcessor": type("V1", (ABC,), {}),
            "process_dict_updates": _update,
        },
        "vllm.v1.worker.gpu.sample.logits_processor.interface": {
            "LogitsProcessor": type("V2", (ABC,), {})
        },
    }
    for name, values in names.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(name))
        vars(sys.modules[name]).update(values)
    file = next(iter(engines.upstream.plugin.__path__)) + "/vlm_fleet_vllm.py"
    spec = importlib.util.spec_from_file_location("vlm_fleet_vllm", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tokenizer = create_tokenizer(Vocabulary((*TOKENS, *[b""] * (VOCAB - len(TOKENS))), (EOS,)))
    monkeypatch.setattr(module.llguidance.hf, "from_tokenizer", lambda *_: tokenizer)
    return module


def _update(entries: dict[int, Any], update: Any, begin: Any) -> None:
    for index, params, prompt_ids, output_ids in () if update is None else update:
        entries[index] = begin(params, prompt_ids, output_ids)
        if entries[index] is None:
            del entries[index]


CONFIG = SimpleNamespace(
    speculative_config=None, model_config=SimpleNamespace(get_vocab_size=lambda: VOCAB)
)


def params(plugin: Any, **wanted: Any) -> Any:
    return SimpleNamespace(extra_args={"vlm_fleet": {"version": plugin.VERSION, **wanted}})


def next_logits(plugin: Any, runner: str, num_in_prompt: int, num_output: int, **wanted: Any):
    """Returns the logits after tokens of `ANSWER`; the first `num_in_prompt` of them are at the end of the prompt."""
    wanted_params = params(plugin, num_earlier=num_in_prompt, **wanted)
    prompt = [5, 6, *ANSWER[:num_in_prompt]]
    output = ANSWER[num_in_prompt : num_in_prompt + num_output]
    logits = torch.zeros(2, VOCAB)
    other = SimpleNamespace(extra_args=None)
    if runner == "v1":
        processor = plugin.ContinueAnswer(CONFIG, "cpu", False)
        shared: list[int] = []
        processor.update_state([(0, other, [1], []), (1, wanted_params, prompt, shared)])
        shared += [*output, -1]  # the last token is not known yet
        processor.update_state(None)
        processor.apply(logits)
    else:
        ids = torch.zeros(4, 16, dtype=torch.int32)
        ids[3, : len(prompt) + len(output)] = torch.tensor([*prompt, *output])
        lengths = np.array([0, 0, 1, len(prompt)])
        state = SimpleNamespace(
            prompt_len=SimpleNamespace(np=lengths), all_token_ids=SimpleNamespace(gpu=ids)
        )
        processor = plugin.ContinueAnswer(CONFIG, state)
        assert not processor.add_request(2, other)
        assert processor.add_request(3, wanted_params)
        context = SimpleNamespace(
            idx_mapping_np=np.array([2, 3]),
            seq_lens_upper_bound_np=np.array([1, len(prompt) + len(output)]),
        )
        processor.apply(logits, context)
    assert not logits[0].any()
    return logits[1]


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_grammar_continues_at_any_cut(plugin: Any, runner: str):
    for length in range(len(ANSWER) + 1):
        whole = next_logits(plugin, runner, 0, length, grammar=GRAMMAR)
        for cut in range(length + 1):
            found = next_logits(plugin, runner, cut, length - cut, grammar=GRAMMAR)
            assert torch.equal(found, whole)
        allowed = set((whole == 0).nonzero().flatten().tolist())
        assert (ANSWER[length] if length < len(ANSWER) else EOS) in allowed
        assert len(allowed) == (2 if length == 2 else 1)


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_penalties_count_earlier_tokens(plugin: Any, runner: str):
    wanted = {"presence_penalty": 1.0, "frequency_penalty": 0.25}
    for cut in range(len(ANSWER) + 1):
        found = next_logits(plugin, runner, cut, len(ANSWER) - cut, **wanted)
        assert found[ANSWER[0]] == -1.5  # two occurrences
        assert found[ANSWER[1]] == -1.25
        assert found.sum() == -4.0  # no other token, not even those of the prompt


def test_an_unfinished_prompt_is_not_changed(plugin: Any):
    state = SimpleNamespace(prompt_len=SimpleNamespace(np=np.array([9])))
    processor = plugin.ContinueAnswer(CONFIG, state)
    processor.add_request(0, params(plugin, grammar=GRAMMAR, num_earlier=4))
    logits = torch.zeros(1, VOCAB)
    context = SimpleNamespace(idx_mapping_np=np.array([0]), seq_lens_upper_bound_np=np.array([8]))
    assert not processor.apply(logits, context).any()


def test_discarded_tokens_are_not_counted(plugin: Any):
    processor = plugin.ContinueAnswer(CONFIG, "cpu", False)
    shared = ANSWER[:3]
    processor.update_state([(0, params(plugin, grammar=GRAMMAR), [1], shared)])
    processor.apply(torch.zeros(1, VOCAB))
    del shared[2:]
    logits = processor.apply(torch.zeros(1, VOCAB))[0]
    assert (logits == 0).sum() == 2


def test_parameters_of_another_version_are_refused(plugin: Any):
    assert (plugin.KEY, plugin.VERSION) == (PLUGIN, PLUGIN_VERSION)
    plugin.ContinueAnswer.validate_params(params(plugin))
    plugin.ContinueAnswer.validate_params(SimpleNamespace(extra_args=None))
    wrong = SimpleNamespace(extra_args={"vlm_fleet": {"version": "probe"}})
    with pytest.raises(ValueError, match=plugin.VERSION):
        plugin.ContinueAnswer.validate_params(wrong)
