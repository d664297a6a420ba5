"""Compares the embedding engine with others, on the same random weights: texts to vectors, and pixels to vectors.

It measures the CPU time of one thread, which other programs on the machine hardly affect. Peers run in separate
processes and environments.
"""

import engines.torch_backend  # noqa: F401  isort: skip - before torchvision

import base64
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
from transformers import BertConfig, BertModel, BertTokenizer, CLIPConfig, CLIPModel

from benchmarks.peers.fleet import Peer, run_peers
from benchmarks.tables import in_turn, new_table, show
from engines.base import EngineCall
from engines.pooling.batch import Row
from engines.pooling.clip import ClipEncoder
from engines.pooling.engine import PoolingEngine
from engines.pooling.load import load_encoder, prepare_linears
from engines.pooling.settings import PoolingSettings
from shared.protocol import Embed, TextPart

SHAPES: dict[str, dict[str, Any]] = {
    "minilm-l6": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "bge-base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
}  # fmt: skip
#: By kind of text: minimum and maximum number of words, and number of texts.
LENGTHS: dict[str, tuple[int, int, int]] = {
    "short": (6, 30, 128),
    "long": (40, 256, 24),
    "mixed": (6, 256, 32),
    "full": (510, 510, 12),
}
CLIP = "clip-vit-b-32"
NUM_IMAGES = 8
NUM_WORDS = 30_000
PEERS = tuple(
    f"{maker}:{dtype}"
    for maker in ("sentence-transformers", "infinity")
    for dtype in ("float32", "bfloat16")
)

#: Returns the seconds of CPU time, and the vectors.
Compute = Callable[[Sequence[Any]], tuple[float, torch.Tensor]]


def run(shapes: Sequence[str], rounds: int, peers: Path | None) -> None:
    """Measure and print. `peers`: folder of the peers' environments; None: no peers."""
    torch.set_num_threads(1)
    table = new_table("", "shape", "inputs", "system", "inputs/s", "tokens/s", "x", "min cosine")
    for shape in shapes:
        for row in measure_images(rounds) if shape == CLIP else measure(shape, rounds, peers):
            table.add_row(shape, *row)
    show(table)


def measure(shape: str, rounds: int, peers: Path | None) -> list[Sequence[str]]:
    """Rows of all systems and kinds of texts. Every round measures one system after another."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make_checkpoint(folder, shape)
        systems: dict[str, Compute] = {}
        if peers is not None:
            options = {"checkpoint": str(folder)}
            found = stack.enter_context(run_peers(PEERS, peers, options))
            systems |= {name: _answers_of(peer) for name, peer in found.items()}
        systems |= {
            "ours float32": ours(folder, torch.float32),
            "ours bfloat16": ours(folder, torch.bfloat16),
            "ours int8": ours(folder, torch.float32, is_int8=True),
        }
        rows: list[Sequence[str]] = []
        for inputs, (least, most, count) in LENGTHS.items():
            chance = Random(inputs)
            texts = [_text(chance, chance.randint(least, most)) for _ in range(count)]
            num_tokens = sum(len(text.split()) + 2 for text in texts)
            rows += _measure(inputs, texts, num_tokens, rounds, systems)
    return rows


def measure_images(rounds: int) -> list[Sequence[str]]:
    """Table rows of our image tower of CLIP ViT-B/32 and of open_clip's; their weights differ."""
    import open_clip  # noqa: PLC0415 - takes seconds

    pixels = list(torch.rand(NUM_IMAGES, 3, 224, 224))
    systems: dict[str, Compute] = {}
    theirs = open_clip.create_model("ViT-B-32-quickgelu").eval()
    with tempfile.TemporaryDirectory() as folder:
        CLIPModel(CLIPConfig()).save_pretrained(folder)
        for name, dtype in (
            ("float32", torch.float32),
            ("bfloat16", torch.bfloat16),
            ("int8", torch.float32),
        ):
            if name != "int8":
                systems[f"open_clip {name}"] = _timed(_open_clip(theirs, dtype))
            model = CLIPModel.from_pretrained(folder, dtype=dtype).eval()
            prepare_linears(model, torch.device("cpu"), name == "int8")
            systems[f"ours {name}"] = _timed(_our_images(ClipEncoder(model, None, None)))  # type: ignore[arg-type]
    return _measure("images", pixels, 50 * NUM_IMAGES, rounds, systems)


def make_checkpoint(folder: Path, shape: str) -> None:
    """Write a BERT of a shape with random weights and mean pooling."""
    torch.manual_seed(0)
    config = BertConfig(**SHAPES[shape])
    BertModel(config, add_pooling_layer=False).eval().save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(NUM_WORDS))]
    vocab = {word: number for number, word in enumerate(words)}
    BertTokenizer(vocab, do_lower_case=False, model_max_length=512).save_pretrained(folder)


def ours(folder: Path, dtype: torch.dtype, *, is_int8: bool = False) -> Compute:
    """Our complete engine, with one call per text."""
    model = load_encoder(folder, torch.device("cpu"), dtype, is_int8=is_int8)
    engine = PoolingEngine(model, PoolingSettings(result_cache_bytes=0))

    def compute(texts: Sequence[str]) -> torch.Tensor:
        for index, text in enumerate(texts):
            engine.add(engine.prepare(EngineCall(str(index), Embed((TextPart(text),))), []))
        values: dict[int, bytes] = {}
        while engine.has_work():
            for output in engine.step():
                values[int(output.request_id)] = output.values
        found = bytearray().join(values[index] for index in range(len(texts)))
        return torch.frombuffer(found, dtype=torch.float32).view(len(texts), -1)

    return _timed(compute)


def _measure(
    name: str, inputs: Sequence[Any], num_tokens: int, rounds: int, systems: dict[str, Compute]
) -> list[Sequence[str]]:
    """Median inputs and tokens per CPU second; the speed and the lowest cosine are relative to the first system."""
    seconds: dict[str, list[float]] = {system: [] for system in systems}
    vectors: dict[str, torch.Tensor] = {}
    for _, system in in_turn(rounds + 1, list(systems)):  # the first round is not counted
        took_s, vectors[system] = systems[system](inputs)
        seconds[system].append(took_s)
    base, *_ = systems
    rows = []
    for system, times in seconds.items():
        took_s = median(times[1:])
        cosines = torch.cosine_similarity(vectors[system], vectors[base], dim=1)
        ratio = median(seconds[base][1:]) / took_s
        rates = f"{len(inputs) / took_s:.1f}", f"{num_tokens / took_s:.0f}", f"{ratio:.2f}"
        rows.append((name, system, *rates, f"{float(cosines.min()):.5f}"))
    return rows


def _answers_of(peer: Peer) -> Compute:
    def compute(texts: Sequence[str]) -> tuple[float, torch.Tensor]:
        took_s, vectors = peer.ask("embed", texts=list(texts))
        data = bytearray(base64.b64decode(vectors))
        return took_s, torch.frombuffer(data, dtype=torch.float32).view(len(texts), -1)

    return compute


def _timed(compute: Callable[[Sequence[Any]], torch.Tensor]) -> Compute:
    def timed(inputs: Sequence[Any]) -> tuple[float, torch.Tensor]:
        began_s = time.process_time()
        vectors = compute(inputs)
        return time.process_time() - began_s, vectors.float()

    return timed


def _open_clip(model: Any, dtype: torch.dtype) -> Callable[[Sequence[Any]], torch.Tensor]:
    model = deepcopy(model).to(dtype)

    @torch.inference_mode()
    def compute(pixels: Sequence[Any]) -> torch.Tensor:
        return model.encode_image(torch.stack(list(pixels)).to(dtype), normalize=True)

    return compute


def _our_images(encoder: ClipEncoder) -> Callable[[Sequence[Any]], torch.Tensor]:
    def compute(pixels: Sequence[Any]) -> torch.Tensor:
        rows = [Row(each, encoder.image_tokens, "image") for each in pixels]
        encoder.compute(rows)
        return torch.tensor([array("f", row.result) for row in rows])

    return compute


def _text(chance: Random, num_tokens: int) -> str:
    """A text of `num_tokens` words of one token each."""
    return " ".join(f"w{chance.randrange(NUM_WORDS)}" for _ in range(num_tokens))
