"""On a GPU, a checkpoint gives the same answers as on the CPU, with caches in GPU memory.

Every kernel is right on shapes of real models, graphs are captured, and all fast ways give the same answer. Tests of
Triton's interpreter (`tests/engines/torch_backend/ops/test_triton_kernels.py`) run compiled here, too.
"""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

from benchmarks.make_checkpoint import make_checkpoint
from engines.base import LoadedEngine
from engines.core.engine import BatchingEngine
from engines.core.runner import DeviceOutOfMemory
from engines.core.sequence import Batch, EngineRequest, ScheduledSequence
from engines.core.sequence import Sequence as EngineSequence
from engines.registry import create_engine
from engines.torch_backend.graphs import SamplingKind
from engines.torch_backend.models.config import TextConfig
from engines.torch_backend.ops.registry import Op, Site, discover
from engines.torch_backend.runner import TorchRunner
from engines.torch_backend.sampling import random_bits, signed, stream_key
from shared.protocol import SamplingParams
from tests.contract.test_model_family import ask
from tests.factories_torch import make_text_config, run_to_end
from tests.triton_device import REAL_SHAPES, has_gpu, import_kernels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_gpu(), reason="needs a CUDA device")]
CUDA = torch.device("cuda")
KERNELS = [op for op in discover() if any(c.name == "triton" for c in op.candidates)]
FAST = (*(op.name for op in KERNELS), "paged_attention.triton_varlen", "cuda_graph")
CONFIG = {"kv_cache_bytes": 4 * 1024 * 1024, "block_size": 8, "dtype": "float32"}
NUM_TOKENS = 30
VOCAB_SIZE = 384


@pytest.fixture(autouse=True)
def exact_cuda() -> Iterator[None]:
    """Computes float32 as the CPU does; torch's default rounds the inputs of convolutions."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cuda") / "tiny"
    make_checkpoint("tiny", directory, seed=3)
    return directory


def load(model: Path, device: str, **settings: Any) -> LoadedEngine:
    return create_engine({**CONFIG, "model": str(model), "device": device, **settings})


def core(loaded: LoadedEngine) -> tuple[BatchingEngine, TorchRunner]:
    engine = loaded.engine
    assert isinstance(engine, BatchingEngine)
    assert isinstance(engine.runner, TorchRunner)
    return engine, engine.runner


def make_request(
    loaded: LoadedEngine, name: str, text: str, seeds: Sequence[int] = (), **sampling: Any
) -> EngineRequest:
    """Returns a question about images, which are given by their seeds."""
    prompt = ask(loaded.engine.processor, [*((28, 28, seed) for seed in seeds), text])
    greedy = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True}
    params = SamplingParams(**{**greedy, **sampling})
    return EngineRequest(name, prompt.token_ids, params, prompt.images)


def make_requests(loaded: LoadedEngine) -> list[EngineRequest]:
    return [
        make_request(loaded, "text", "What is it, and what is it not?"),
        make_request(loaded, "one", "What color is the star?", [1]),
        make_request(loaded, "two", "Which is larger?", [1, 2]),
        make_request(loaded, "again", "What color is the star on the left?", [1]),
    ]


def answers(loaded: LoadedEngine, requests: list[EngineRequest]) -> dict[str, list[int]]:
    """Returns the tokens of requests that are computed together."""
    return run_to_end(core(loaded)[0], requests)


def first_logprobs(loaded: LoadedEngine, request: EngineRequest) -> torch.Tensor:
    """Returns the logprobs of the first output token. Shapes: (V,)."""
    _, runner = core(loaded)
    sequence = EngineSequence.from_request(request, max_output_tokens=1)
    sequence.block_ids = list(range(-(-sequence.num_tokens // runner.block_size)))
    share = ScheduledSequence(sequence, sequence.num_pending_tokens)
    [choice] = runner.launch(Batch([share])).wait().choices
    assert choice is not None
    assert len(choice.top_logprobs) == VOCAB_SIZE
    return torch.tensor([logprob for _, logprob in sorted(choice.top_logprobs)])


def distance(first: LoadedEngine, second: LoadedEngine) -> float:
    """Returns the largest difference between the first logprobs of two engines."""
    differences = []
    for seeds in ([], [1], [1, 2]):
        request = make_request(first, "r", "Which is it?", seeds, num_logprobs=VOCAB_SIZE)
        found = first_logprobs(first, request) - first_logprobs(second, request)
        differences.append(found.abs().max().item())
    return max(differences)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="batched"),
        pytest.param({"max_num_batched_tokens": 7}, id="chunked"),
        pytest.param({"num_kv_blocks": 18}, id="preempted"),
        pytest.param({"encoder_cache_bytes": 0, "enable_prefix_cache": False}, id="uncached"),
    ],
)
def test_greedy_answers_in_float32_equal_those_of_the_cpu(
    tiny: Path, changes: dict[str, Any]
) -> None:
    on_cpu, on_gpu = load(tiny, "cpu"), load(tiny, "cuda", **changes)

    found = answers(on_gpu, make_requests(on_gpu))

    assert found == answers(on_cpu, make_requests(on_cpu))
    if "num_kv_blocks" in changes:
        assert on_gpu.engine.stats().num_preemptions > 0


def test_probabilities_equal_those_of_the_cpu(tiny: Path) -> None:
    """bfloat16 differs from float32 about as much as on the CPU."""
    exact = load(tiny, "cpu")
    assert distance(exact, load(tiny, "cuda")) < 1e-4
    rounded = distance(exact, load(tiny, "cuda", dtype="bfloat16"))
    assert 0 < rounded < 3 * distance(exact, load(tiny, "cpu", dtype="bfloat16"))


def test_auto_selects_the_gpu_and_bfloat16(tiny: Path) -> None:
    _, runner = core(load(tiny, "auto", dtype="auto"))
    _, rounded = core(load(tiny, "cpu", dtype="bfloat16"))

    assert runner.memory_bytes()["weights"] == rounded.memory_bytes()["weights"]
    assert torch.cuda.memory_allocated() >= runner.memory_bytes()["weights"]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_quantized_checkpoint_loads_and_computes_as_on_the_cpu(
    tiny: Path, quantization: str
) -> None:
    small = load(tiny, "cuda", quantization=quantization)
    # without the CPU's kernels, whose towers and heads are also in int8
    on_cpu = load(tiny, "cpu", quantization=quantization, disabled_ops=("cpu",))

    weights = [core(loaded)[1].memory_bytes()["weights"] for loaded in (small, on_cpu)]
    assert weights[0] == weights[1] < core(load(tiny, "cuda"))[1].memory_bytes()["weights"]
    assert distance(on_cpu, small) < 1e-3
    in_bfloat16 = load(tiny, "cuda", quantization=quantization, dtype="bfloat16")
    assert len(answers(in_bfloat16, make_requests(in_bfloat16))["two"]) == NUM_TOKENS


def test_the_caches_are_on_the_gpu_until_the_engine_is_closed(tiny: Path) -> None:
    gc.collect()
    before = torch.cuda.memory_allocated()
    loaded = load(tiny, "cuda")
    answers(loaded, make_requests(loaded))
    used = loaded.engine.stats().memory_bytes
    full = torch.cuda.memory_allocated()

    loaded.engine.close()

    assert used["encoder_cache"] > 0
    assert full - before >= sum(used.values())
    assert full - torch.cuda.memory_allocated() >= sum(used.values())


def test_a_step_without_memory_can_be_run_again(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(tiny, "cuda")
    engine, runner = core(loaded)
    request = make_request(loaded, "r", "What color is the star?", [1])
    engine.add(request)
    with monkeypatch.context() as patch:
        patch.setattr(
            runner.model.language_model,
            "forward",
            lambda *given: torch.empty(1 << 50, dtype=torch.int8, device=CUDA),
        )
        with pytest.raises(DeviceOutOfMemory, match="cuda"):
            runner.launch(engine.scheduler.schedule()).wait()
    engine.abort("r")

    found = answers(loaded, [request])

    on_cpu = load(tiny, "cpu")
    assert found == answers(on_cpu, [request])


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 7}])
def test_overlapped_steps_change_no_token(tiny: Path, sampling: dict[str, Any]) -> None:
    """Answers of different lengths and a later request, so that steps are discarded."""
    found = []
    for overlap_steps in (False, True):
        loaded = load(tiny, "cuda", overlap_steps=overlap_steps)
        engine, _ = core(loaded)
        wanted = [
            make_request(loaded, f"r{i}", f"Say {i}.", max_tokens=3 + 5 * i, **sampling)
            for i in range(6)
        ]
        found.append([answers(loaded, wanted[:4]), answers(loaded, wanted)])
        assert (engine.pipeline.num_overlapped > 0) == overlap_steps
    assert found[0] == found[1]


def test_random_bits_equal_those_of_the_cpu() -> None:
    streams = [stream_key(seed, position) for seed in (0, -1, 1 << 63) for position in (0, 7)]
    keys = torch.tensor([signed(key) for key in streams])

    on_gpu = random_bits(keys.to(CUDA), 5000).cpu()

    assert torch.equal(on_gpu, random_bits(keys, 5000))


def test_a_seeded_answer_is_the_same_in_a_batch(tiny: Path) -> None:
    loaded = load(tiny, "cuda")
    seeded = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 11}
    alone = make_request(loaded, "seeded", "What color is the star?", [1], **seeded)
    [expected] = answers(loaded, [alone]).values()

    together = answers(loaded, [*make_requests(loaded), alone])

    assert together["seeded"] == expected


def make_text(shape: str) -> TextConfig:
    return make_text_config(max_position_embeddings=4096, **REAL_SHAPES[shape])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", REAL_SHAPES)
@pytest.mark.parametrize("op", KERNELS, ids=lambda op: op.name)
def test_a_kernel_is_right_on_a_real_shape(op: Op, shape: str, dtype: torch.dtype) -> None:
    [kernel] = [candidate for candidate in op.candidates if candidate.name == "triton"]
    assert not op.complaint(kernel, Site(CUDA, dtype, make_text(shape), 16))


@pytest.mark.parametrize("num_sequences", [1, 16, 64])
@pytest.mark.parametrize("shape", REAL_SHAPES)
def test_long_contexts_are_split_and_joined(shape: str, num_sequences: int) -> None:
    text = make_text(shape)
    pool = Site(CUDA, torch.bfloat16, text).pool()  # 8 blocks, used repeatedly
    tables = torch.arange(256, device=CUDA, dtype=torch.int32).remainder(8).repeat(num_sequences, 1)
    lengths = torch.linspace(1, 4096, num_sequences, device=CUDA).to(torch.int64)
    query = torch.randn(
        num_sequences, text.num_heads, text.head_dim, device=CUDA, dtype=torch.bfloat16
    )
    found = import_kernels("paged_attention").attend_decodes(pool, 0, query, tables, lengths)
    slots = tables.repeat_interleave(16, 1).long() * 16 + torch.arange(4096, device=CUDA) % 16
    keys, values = (x.transpose(1, 2) for x in pool.read(0, slots))
    mask = torch.arange(4096, device=CUDA) < lengths[:, None]
    expected = scaled_dot_product_attention(
        query[:, :, None], keys, values, attn_mask=mask[:, None, None], enable_gqa=True
    )
    assert_close(found, expected.flatten(1), rtol=2e-2, atol=2e-3)


def test_every_fast_way_is_used(tiny: Path) -> None:
    _, runner = core(load(tiny, "cuda", dtype="bfloat16"))
    assert all(runner.ops.uses(op.name) for op in KERNELS)
    assert runner.ops.uses("paged_attention", "triton_varlen")
    assert runner.graphs is not None
    met = {(size, SamplingKind.GREEDY) for size in (1, 2, 4, 8, 16, 24, 32)}
    assert met <= set(runner.graphs.captured)


@pytest.mark.parametrize("off", [*((name,) for name in FAST), FAST], ids=lambda off: "+".join(off))
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_disabled_kernels_change_no_answer(
    tiny: Path, quantization: str, off: tuple[str, ...]
) -> None:
    # without the CPU's kernels, whose towers and heads are also in int8
    on_cpu = load(tiny, "cpu", quantization=quantization, disabled_ops=("cpu",))
    on_gpu = load(tiny, "cuda", quantization=quantization, disabled_ops=off)
    assert answers(on_gpu, make_requests(on_gpu)) == answers(on_cpu, make_requests(on_cpu))


@pytest.mark.parametrize(
    "sampling", [{"top_p": 0.9, "top_k": 50}, {"num_logprobs": 3}, {}], ids=str
)
def test_graphs_sample_the_same_tokens(tiny: Path, sampling: dict[str, Any]) -> None:
    found = []
    for off in ((), ("cuda_graph",)):
        loaded = load(tiny, "cuda", disabled_ops=off)
        requests = [
            replace(
                r, sampling=msgspec.structs.replace(r.sampling, temperature=0.8, seed=5, **sampling)
            )
            for r in make_requests(loaded)
        ]
        found.append(answers(loaded, requests))
    assert found[0] == found[1]
