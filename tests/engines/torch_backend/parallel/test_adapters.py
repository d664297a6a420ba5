"""Members of a mesh have their shares of adapters: several ranks give the tokens of one."""

import gc
from dataclasses import replace
from pathlib import Path

import pytest

from engines.core.engine import BatchingEngine
from tests.engines.torch_backend.models import family_table
from tests.engines.torch_backend.models.family_table import named
from tests.engines.torch_backend.models.test_families import load_reference, make_requests
from tests.engines.torch_backend.parallel.threads import SharedModel
from tests.engines.torch_backend.ways import Tokens
from tests.factories_adapters import LIMITS, linear_names, make_changes, write_adapter
from tests.factories_torch import run_to_end
from tests.long import IS_LONG

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SOME = ("q_proj", "v_proj", "down_proj")


def answer(engine: BatchingEngine, *directories: Path) -> Tokens:
    """To the usual questions, every third one without an adapter."""
    adapters = [engine.load_adapter(directory, LIMITS) for directory in directories]
    wanted = [*adapters, None] if adapters else [None]
    questions = make_requests()
    return run_to_end(
        engine, [replace(each, adapter=wanted[i % len(wanted)]) for i, each in enumerate(questions)]
    )


@pytest.mark.parametrize(
    ("name", "size", "scheme"),
    [("Llama", 4, None), ("Qwen3", 2, "int8")] + [("Llama", 2, "int8")] * IS_LONG,
)
def test_ranks_give_the_tokens_of_one(
    name: str, size: int, scheme: str | None, tmp_path: Path
) -> None:
    family = named(name)
    family_table.write_checkpoint(family, tmp_path / "m")
    theirs = load_reference(tmp_path / "m")
    first, second = (
        write_adapter(
            tmp_path / f"{rank}",
            make_changes(theirs, linear_names(theirs, ends, "model.layers"), rank),
        )
        for rank, ends in ((4, ALL), (8, SOME))
    )

    found = []
    for count in (1, size):
        with SharedModel(tmp_path / "m", count, scheme).running() as start:
            engine = start()
            plain, both = answer(engine), answer(engine, first, second)
            gc.collect()  # the others' shares go with what nobody has any more
            found.append((plain, both, answer(engine, second)))
    assert found[0] == found[1]
    assert len({str(tokens) for tokens in found[0]}) == 3
