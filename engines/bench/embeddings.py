"""The embedding engine beside transformers with padded batches, on the same random weights, in turn.

One thread, CPU time: what other programs take of the machine counts for nobody. "sorted" is how sentence-transformers
encodes: texts by length, 32 at a time; "as they come" is a server that pads whoever arrived together.
"""

import engines.torch_backend  # noqa: F401  isort: skip - before torchvision

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModel, BertConfig, BertModel

from engines.pooling import attention
from engines.pooling.batch import Row
from engines.pooling.checkpoint import SentenceConfig
from engines.pooling.encoder import Encoder, Texts, Words
from engines.pooling.engine import PoolingEngine, PoolingInput
from engines.pooling.settings import PoolingSettings
from shared.protocol import Priority

SHAPES: dict[str, dict[str, Any]] = {
    "minilm-l6": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "bge-base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
}  # fmt: skip
#: Tokens of each text: like sentences and short queries, like paragraphs, and both.
LENGTHS: dict[str, tuple[int, int, int]] = {
    "short": (6, 30, 128),
    "long": (40, 256, 24),
    "mixed": (6, 256, 32),
}
BATCH_SIZE = 32  # of the others


@dataclass(frozen=True, slots=True)
class Result:
    """The median of a system's rounds. Units: texts and real tokens per CPU second."""

    shape: str
    texts: str
    system: str
    texts_per_s: float
    tokens_per_s: float
    ratio: float  #: to transformers in float32, sorted
    min_cosine: float  #: to the same


Compute = Callable[[list[list[int]]], torch.Tensor]


def run(shapes: Sequence[str], rounds: int, as_json: bool) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    results = [result for shape in shapes for result in measure(shape, rounds)]
    if as_json:
        print(json.dumps([asdict(result) for result in results], indent=2))
        return
    table = Table("shape", "texts", "system", "texts/s", "tokens/s", "x", "min cosine")
    for r in results:
        table.add_row(
            r.shape, r.texts, r.system, f"{r.texts_per_s:.0f}", f"{r.tokens_per_s:.0f}", f"{r.ratio:.2f}",
            f"{r.min_cosine:.5f}",
        )  # fmt: skip
    Console().print(table)


def measure(shape: str, rounds: int) -> list[Result]:
    """All systems on all kinds of texts, one after another in every round."""
    torch.manual_seed(0)
    config = BertConfig(**SHAPES[shape])
    with tempfile.TemporaryDirectory() as folder:
        BertModel(config, add_pooling_layer=False).eval().save_pretrained(folder)
        base = "transformers float32, sorted"
        systems: dict[str, Compute] = {base: padded(folder, torch.float32, is_sorted=True)}
        systems["transformers float32, as they come"] = padded(
            folder, torch.float32, is_sorted=False
        )
        systems["ours float32"] = ours(folder, torch.float32)
        systems["transformers bfloat16, sorted"] = padded(folder, torch.bfloat16, is_sorted=True)
        systems["ours bfloat16"] = ours(folder, torch.bfloat16)
    results = []
    for name, (least, most, count) in LENGTHS.items():
        random = Random(name)
        texts = [
            [random.randrange(1000, 30_000) for _ in range(random.randint(least, most))]
            for _ in range(count)
        ]
        seconds: dict[str, list[float]] = {system: [] for system in systems}
        vectors = {}
        for _ in range(rounds):
            for system, compute in systems.items():
                began_s = time.process_time()
                vectors[system] = compute(texts)
                seconds[system].append(time.process_time() - began_s)
        for system, times in seconds.items():
            took_s = median(times)
            cosines = torch.cosine_similarity(vectors[system].float(), vectors[base], dim=1)
            num_tokens = sum(map(len, texts))
            results.append(
                Result(
                    shape, name, system, count / took_s, num_tokens / took_s,
                    median(seconds[base]) / took_s, float(cosines.min()),
                )
            )  # fmt: skip
    return results


def padded(folder: str | Path, dtype: torch.dtype, *, is_sorted: bool) -> Compute:
    """Transformers over padded batches, the mean over what is real."""
    model = AutoModel.from_pretrained(folder, dtype=dtype, add_pooling_layer=False).eval()

    @torch.inference_mode()
    def compute(texts: list[list[int]]) -> torch.Tensor:
        order = (
            sorted(range(len(texts)), key=lambda i: -len(texts[i]))
            if is_sorted
            else range(len(texts))
        )
        order = list(order)
        out = torch.empty(len(texts), model.config.hidden_size)
        for begin in range(0, len(order), BATCH_SIZE):
            batch = order[begin : begin + BATCH_SIZE]
            longest = max(len(texts[i]) for i in batch)
            ids = torch.tensor([texts[i] + [0] * (longest - len(texts[i])) for i in batch])
            mask = torch.tensor(
                [[1] * len(texts[i]) + [0] * (longest - len(texts[i])) for i in batch]
            )
            hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
            weights = mask[..., None].float()
            out[torch.tensor(batch)] = (hidden * weights).sum(1) / weights.sum(1)
        return torch.nn.functional.normalize(out, dim=1)

    return compute


def ours(folder: str | Path, dtype: torch.dtype) -> Compute:
    """The engine, steps and all: each text is a call."""
    model = AutoModel.from_pretrained(
        folder, dtype=dtype, add_pooling_layer=False, attn_implementation=attention.NAME
    ).eval()
    encoder = Encoder(
        model,
        cast(Texts, None),  # it has ids already
        SentenceConfig("mean"),
        (),
        is_scorer=False,
    )
    engine = PoolingEngine(encoder, PoolingSettings(result_cache_bytes=0))

    def compute(texts: list[list[int]]) -> torch.Tensor:
        for index, ids in enumerate(texts):
            row = Row(Words(ids, [0] * len(ids)), len(ids))
            engine.add(PoolingInput(str(index), Priority.INTERACTIVE, [row], encoder.dimensions))
        out = torch.empty(len(texts), encoder.dimensions)
        while engine.has_work():
            for output in engine.step():
                out[int(output.request_id)] = torch.frombuffer(
                    bytearray(output.values), dtype=torch.float32
                )
        return out

    return compute
