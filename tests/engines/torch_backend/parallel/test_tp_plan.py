"""Every model of transformers' that has a plan of what devices share: several ranks give the tokens of one."""

from pathlib import Path

import pytest

from engines.core.request import EngineRequest
from engines.torch_backend.models.config import UnsupportedCheckpoint
from shared.protocol import SamplingParams
from tests.contract.test_model_family import ask
from tests.engines.torch_backend import ways
from tests.engines.torch_backend.models import family_table
from tests.engines.torch_backend.models.family_table import FAMILIES, Family, named
from tests.engines.torch_backend.models.test_families import QUESTIONS, make_requests
from tests.engines.torch_backend.parallel.threads import SharedModel
from tests.long import IS_LONG

QUICK = ("OLMo 2", "Qwen3-MoE", "Qwen3-VL", "Gemma 3")
#: Transformers has no plan of their layers.
WITHOUT_PLAN = ("GPT-2", "GPT-OSS", "LFM2")
FOUND = [family for family in FAMILIES if IS_LONG or family.name in QUICK]


def requests_for(family: Family, shared: SharedModel) -> list[EngineRequest]:
    if family.create_processor is None:
        return make_requests()
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = {name: ask(shared.processor, question) for name, question in QUESTIONS.items()}
    return [
        EngineRequest(name, prompt.token_ids, params, prompt.images, positions=prompt.positions)
        for name, prompt in prompts.items()
    ]


@pytest.mark.parametrize("size", [2, 4] if IS_LONG else [2])
@pytest.mark.parametrize("family", FOUND, ids=lambda family: family.name)
def test_ranks_give_the_tokens_of_one(tmp_path: Path, family: Family, size: int) -> None:
    family_table.write_checkpoint(family, tmp_path)
    whole = SharedModel(tmp_path, 1)
    with whole.running() as start:
        expected = ways.run_batched(start, requests_for(family, whole))

    try:
        shared = SharedModel(tmp_path, size)
    except UnsupportedCheckpoint as refusal:
        if family.name in QUICK or "devices" not in str(refusal):
            raise
        pytest.skip(str(refusal))
    with shared.running() as start:
        for way in (ways.run_beside_smooth_streams, ways.run_taken_over):
            assert way(start, requests_for(family, shared)) == expected, way.__name__


@pytest.mark.parametrize("name", ["Gemma 2", "Qwen3", "Qwen2.5-VL"] if IS_LONG else ["Qwen2.5-VL"])
def test_ranks_in_few_bits_give_the_tokens_of_one(tmp_path: Path, name: str) -> None:
    family = named(name)
    family_table.write_checkpoint(family, tmp_path)
    whole, shared = (SharedModel(tmp_path, size, "int8") for size in (1, 2))
    with whole.running() as start:
        expected = ways.run_batched(start, requests_for(family, whole))
    with shared.running() as start:
        assert ways.run_batched(start, requests_for(family, shared)) == expected


@pytest.mark.parametrize("name", WITHOUT_PLAN if IS_LONG else ["GPT-2"])
def test_a_model_without_a_plan_is_refused(tmp_path: Path, name: str) -> None:
    family = named(name)
    family_table.write_checkpoint(family, tmp_path)

    with pytest.raises(UnsupportedCheckpoint, match=r"cannot be shared by 2 devices.*--workers"):
        SharedModel(tmp_path, 2)


def test_groups_of_inputs_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    family = named("Qwen3")
    family_table.write_checkpoint(family, tmp_path)

    with pytest.raises(UnsupportedCheckpoint, match="2 devices cannot share 64 int4 inputs"):
        SharedModel(tmp_path, 2, "int4")
