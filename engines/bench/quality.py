"""What fewer bits cost: each quantized copy of a model beside the model itself, on texts of its own.

The texts are sampled from the model at temperature 1, so that its own perplexity on them is the least that there can be, and
a model of random weights can be compared too. The built-in model answers questions about images besides. Scores come from
the engine's own steps, with the kernels that serve.
"""

import io
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from engines.base import EngineStartError
from engines.core.sequence import ScheduledSequence
from engines.core.sequence import Sequence as EngineSequence
from engines.packages.resolve import resolve_model
from engines.torch_backend.loading.calibration import (
    OWN,
    Example,
    Request,
    answer_all,
    own_requests,
    to_requests,
)
from engines.torch_backend.loading.load import load_engine
from engines.torch_backend.loading.quantize_checkpoint import quantize_checkpoint
from engines.torch_backend.settings import TorchSettings
from shared.protocol import ChatMessage, ImagePart, SamplingParams, TextPart

_SEED = 10_000  # of texts: others than those of the calibration
_QUESTIONS_SEED = 2_000_000
_ANSWER_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Copy:
    """A way to quantize."""

    name: str
    scheme: str
    head: str = "none"
    examples: str = "none"


COPIES = (
    Copy("int8", "int8"),
    Copy("int8, head int8", "int8", "int8"),
    Copy("int4 to the nearest", "int4"),
    Copy("int4 calibrated", "int4", "none", OWN),
    Copy("int4 calibrated, head int8", "int4", "int8", OWN),
)


@dataclass(slots=True)
class Quality:
    """What a copy is worth. Units: MiB, nats, percent."""

    name: str
    weights_mib: float
    perplexity: float
    divergence: float  #: Kullback-Leibler, of the model's next token from the copy's
    same_token_percent: float  #: places where both find the same token the likeliest
    right_percent: float | None  #: answers of the built-in model


def measure(
    source: Path, num_texts: int, examples: Sequence[tuple[Example, str]]
) -> Iterator[Quality]:
    """The model in float32, then each copy. Raises: UnsupportedCheckpoint, OSError."""
    engine = _load(source)
    texts = own_requests(engine, num_texts, _SEED)
    for _ in answer_all(engine, texts):
        pass
    expected = _scores(engine, texts)
    yield _compare("float32", source, expected, expected, texts, _right(engine, examples))
    for copy in COPIES:
        with TemporaryDirectory() as folder:
            target = Path(folder) / "copy"
            quantize_checkpoint(source, target, copy.scheme, head=copy.head, examples=copy.examples)
            engine = _load(target)
            found = _scores(engine, texts)
            yield _compare(copy.name, target, expected, found, texts, _right(engine, examples))


def _load(directory: Path) -> Any:
    settings = TorchSettings(model=str(directory), dtype="float32", self_check="off")
    return load_engine(settings, None).engine


def _scores(engine: Any, texts: Sequence[Request]) -> list[Tensor]:
    """Scores behind each token of each text's answer, a token a step. Shapes: returns (tokens, V) each."""
    runner, found = engine.runner, []
    for text in texts:
        prompt = text.request.prompt_token_ids
        tokens = [*prompt, *text.answer]
        sequence = EngineSequence(
            text.request.request_id, tokens, len(prompt), SamplingParams(temperature=0)
        )
        sequence.block_ids = list(range(-(-len(tokens) // runner.block_size)))
        rows = []
        while sequence.num_computed_tokens < len(tokens) - 1:
            is_prompt = sequence.num_computed_tokens == 0
            item = ScheduledSequence(sequence, len(prompt) if is_prompt else 1)
            rows.append(runner.logits([item])[0].float().cpu())
            sequence.num_computed_tokens = item.end
        runner.release(sequence.request_id)
        found.append(torch.stack(rows))
    return found


def _compare(
    name: str,
    directory: Path,
    expected: Sequence[Tensor],
    found: Sequence[Tensor],
    texts: Sequence[Request],
    right: float | None,
) -> Quality:
    ours, theirs = (torch.cat(list(rows)).log_softmax(1) for rows in (found, expected))
    tokens = torch.tensor([token for text in texts for token in text.answer])
    divergence = (theirs.exp() * (theirs - ours)).sum(1).mean()
    return Quality(
        name,
        sum(file.stat().st_size for file in directory.glob("*.safetensors")) / 2**20,
        float((-ours.gather(1, tokens[:, None]).mean()).exp()),
        float(divergence),
        100 * float((ours.argmax(1) == theirs.argmax(1)).float().mean()),
        right,
    )


def _right(engine: Any, examples: Sequence[tuple[Example, str]]) -> float | None:
    """The share of answers that are word by word right."""
    if not examples:
        return None
    requests = to_requests(engine, [example for example, _ in examples], _ANSWER_TOKENS)
    for _ in answer_all(engine, requests):
        pass
    tokenizer = engine.processor.tokenizer
    said = [b"".join(map(tokenizer.token_bytes, entry.answer)).decode() for entry in requests]
    wanted = [answer for _, answer in examples]
    return 100 * sum(a.strip() == b for a, b in zip(said, wanted, strict=True)) / len(wanted)


def run(model: str, num_texts: int, num_scenes: int, as_json: bool) -> None:
    """The command: a table, a row as soon as it is measured. Raises: SystemExit with the reason."""
    try:
        directory = resolve_model(model)
    except EngineStartError as error:
        raise SystemExit(f"bench quality: {error}") from None
    has_questions = model == "shapes" and find_spec("engines.packages.shapes.training") is not None
    rows = []
    with Progress(transient=True, console=Console(stderr=True)) as bar:
        task = bar.add_task("float32", total=1 + len(COPIES))
        examples = _questions(num_scenes) if has_questions else []
        for number, row in enumerate(measure(directory, num_texts, examples), 1):
            rows.append(row)
            bar.update(task, completed=number)
            if number <= len(COPIES):
                bar.update(task, description=COPIES[number - 1].name)
    if as_json:
        json.dump([asdict(row) for row in rows], sys.stdout, indent=2)
        return
    table = Table("weights", "MiB", "perplexity", "divergence, nats", "same token", "right answers")
    for row in rows:
        right = "" if row.right_percent is None else f"{row.right_percent:.1f} %"
        numbers = f"{row.weights_mib:.1f}", f"{row.perplexity:.3f}", f"{row.divergence:.4f}"
        table.add_row(row.name, *numbers, f"{row.same_token_percent:.1f} %", right)
    Console().print(table)


def _questions(num_scenes: int) -> list[tuple[Example, str]]:
    """Those of the built-in model's evaluation, on scenes of their own."""
    from engines.packages.shapes.training.evaluation import make_cases  # noqa: PLC0415

    found = []
    for case in make_cases(num_scenes, _QUESTIONS_SEED):
        images, messages = [], []
        for message in case.messages:
            parts: list[ImagePart | TextPart] = []
            for image in message.images:
                buffer = io.BytesIO()
                image.save(buffer, "PNG")
                images.append(buffer.getvalue())
                parts.append(ImagePart(len(images) - 1))
            messages.append(ChatMessage("user", (*parts, TextPart(message.question))))
            if message.answer:
                messages.append(ChatMessage("assistant", (TextPart(message.answer),)))
        found.append((Example(tuple(messages), tuple(images)), case.answer))
    return found
