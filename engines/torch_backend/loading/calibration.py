"""Weights in 4 bits that keep what linear maps give on examples: GPTQ, for `vlm quantize --calibrate`.

The engine answers the examples in full precision, and what each map is given is summed up. Each column of a map is
rounded, and its error made good by the columns after it. Maps are quantized some layers at a time, so that the next ones
see what those before give then. Source: Frantar et al. 2022, arXiv:2210.17323; columns in the order of their weight,
groups as they lie ("static groups").

Shape letters: M tokens, K inputs, N outputs, G groups of inputs.
"""

import base64
import hashlib
import io
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from PIL import Image
from torch import Tensor, nn

from engines.base import InvalidImage, InvalidRequest
from engines.core.engine import BatchingEngine
from engines.core.request import EngineRequest
from engines.torch_backend.loading.formats.reader import Integers
from engines.torch_backend.loading.load import load_engine
from engines.torch_backend.loading.rounding import choose_scale_and_zero
from engines.torch_backend.models.config import UnsupportedCheckpoint
from engines.torch_backend.settings import TorchSettings
from shared.protocol import ChatMessage, ImagePart, SamplingParams, TextPart

OWN = "own"  #: examples that the model writes itself
NUM_OWN, OWN_TOKENS = 64, 128
_ANSWER_TOKENS = 32
_MAX_EXAMPLE_BYTES = 64 * 1024 * 1024
MAX_SUM_BYTES = 4 << 30  # of what is summed up at a time
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7)  # of a group's span: what is cut off may be worth it
_DAMPING = (0.01, 0.1, 1.0)  # of the mean of squares; more, if less is not enough
_BLOCK = 128  # columns whose errors go to those behind them together

Report = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Target:
    """A weight that is to be quantized."""

    path: str  #: of its layer in the model
    dtype: torch.dtype  #: of its scales


def calibrate(
    source: Path, examples: str, targets: Mapping[str, Target], group_size: int, progress: Report
) -> dict[str, Integers]:
    """The integers of weights, by their stored names; `progress` is told the share done, 0..1.

    `examples` is a file, or "own". Raises: UnsupportedCheckpoint, OSError.
    """
    settings = TorchSettings(
        model=str(source),
        disabled_ops=("cpu", "triton", "cuda_graph"),  # whose products call no layers
        enable_prefix_cache=False,  # or later runs would not compute
        max_num_seqs=8,
    )
    read = None if examples == OWN else read_examples(Path(examples))
    loaded = load_engine(
        settings, lambda phase, share: progress(0.05 * share) if phase == "load" else None
    )
    engine: Any = loaded.engine
    try:
        requests = own_requests(engine, NUM_OWN) if read is None else to_requests(engine, read)
        layers = {name: engine.runner.model.get_submodule(t.path) for name, t in targets.items()}
        chunks = list(_chunks(targets, layers))
        found: dict[str, Integers] = {}
        for number, chunk in enumerate(chunks):
            start, part = 0.05 + 0.95 * number / len(chunks), 0.95 / len(chunks)
            sums = _Sums([layers[name] for name in chunk])
            for share in answer_all(engine, requests):
                progress(start + 0.5 * part * share)
            sums.close()
            for done, name in enumerate(chunk, 1):
                layer, total = layers[name], sums.of(layers[name])
                if total is None:
                    raise UnsupportedCheckpoint(f"the examples never reach the weight {name}")
                weight = layer.weight.detach()
                integers = quantize(weight.float(), total, group_size, targets[name].dtype)
                numbers = integers.numbers(weight.dtype)
                layer.weight = nn.Parameter(numbers, requires_grad=False)
                found[name] = integers
                progress(start + part * (0.5 + 0.5 * done / len(chunk)))
    finally:
        engine.close()
    return found


def _chunks(targets: Mapping[str, Target], layers: Mapping[str, nn.Linear]) -> Iterator[list[str]]:
    """Weights whose sums fit into memory together; those of one block of a layer stay together."""
    chunk: list[str] = []
    known: set[tuple[str, int]] = set()
    num_bytes = 0
    for name, layer in layers.items():
        inputs = targets[name].path.rpartition(".")[0], layer.in_features
        size = 0 if inputs in known else 4 * layer.in_features**2
        if chunk and num_bytes + size > MAX_SUM_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
        known.add(inputs)
        chunk.append(name)
        num_bytes += size
    if chunk:
        yield chunk


class _Sums:
    """Sums of products of what layers are given, one for layers that are given the same."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._sums: dict[nn.Module, Tensor] = {}
        self._same: dict[nn.Module, nn.Module] = {}
        self._last: tuple[Tensor, nn.Module] | None = None
        self._hooks = [layer.register_forward_pre_hook(self._add) for layer in layers]

    def _add(self, layer: nn.Module, given: tuple[Tensor, ...]) -> None:
        x = given[0]
        if self._last is not None and self._last[0] is x:
            self._same[layer] = self._last[1]
            return
        self._last = (x, layer)
        rows = x.detach().flatten(0, -2).float()
        if layer not in self._sums:
            self._sums[layer] = rows.new_zeros(rows.shape[1], rows.shape[1])
        self._sums[layer].addmm_(rows.t(), rows)

    def of(self, layer: nn.Module) -> Tensor | None:
        """Shapes: returns (K, K); None for a layer that was never called."""
        return self._sums.get(self._same.get(layer, layer))

    def close(self) -> None:
        """Take no more."""
        self._last = None
        for hook in self._hooks:
            hook.remove()


def quantize(weight: Tensor, total: Tensor, group_size: int, dtype: torch.dtype) -> Integers:
    """Integers whose products with examples are near to those of a weight.

    `total` is the sum over tokens of products of their inputs. Shapes: weight (N, K), total (K, K).
    """
    num_outputs, num_inputs = weight.shape
    tells = total.diagonal()
    scale, zero = _choose(weight, tells, group_size, dtype)
    order = tells.argsort(descending=True)
    factor = _error_factor(total[order][:, order])
    weight = weight[:, order].clone()
    group = order // group_size
    values = torch.empty(num_outputs, num_inputs, dtype=torch.uint8, device=weight.device)
    for start in range(0, num_inputs, _BLOCK):
        stop = min(start + _BLOCK, num_inputs)
        block, within = weight[:, start:stop], factor[start:stop, start:stop]
        errors = torch.empty_like(block)
        for column in range(stop - start):
            of = group[start + column]
            value = (block[:, column] / scale[:, of]).round_().add_(zero[:, of]).clamp_(0, 15)
            values[:, start + column] = value.to(torch.uint8)
            error = block[:, column] - (value - zero[:, of]) * scale[:, of]
            errors[:, column] = error / within[column, column]
            block[:, column:] -= errors[:, column, None] * within[column, column:]
        weight[:, stop:] -= errors @ factor[start:stop, stop:]
    restored = torch.empty_like(values)
    restored[:, order] = values
    scales = scale.t().contiguous(), zero.t().contiguous()
    return Integers(restored, 4, group_size, *scales)


def _choose(
    weight: Tensor, tells: Tensor, group_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Scale and zero of each group, with the least error where inputs tell most. Shapes: returns (N, G) each."""
    groups = weight.unflatten(1, (-1, group_size))
    weights = tells.view(-1, group_size)
    best = torch.full(groups.shape[:2], torch.inf, device=weight.device)
    chosen = choose_scale_and_zero(groups, dtype)
    for shrink in _SHRINKS:
        scale, zero = choose_scale_and_zero(groups * shrink, dtype)
        values = (groups / scale[..., None]).round_().add_(zero[..., None]).clamp_(0, 15)
        error = (values - zero[..., None]) * scale[..., None] - groups
        found = error.square_().mul_(weights).sum(-1)
        better = found < best
        best = torch.where(better, found, best)
        chosen = (
            torch.where(better, scale, chosen[0]),
            torch.where(better, zero, chosen[1]),
        )
    return chosen


def _error_factor(total: Tensor) -> Tensor:
    """What a column's error adds to those behind it: the upper root of the inverse. Shapes: (K, K), kept."""
    diagonal = total.diagonal()
    mean = diagonal.mean().clamp(min=torch.finfo(total.dtype).tiny)
    for damping in _DAMPING:
        damped = total.clone()
        damped.diagonal().add_(damping * mean)
        root, failed = torch.linalg.cholesky_ex(damped)
        if failed:
            continue
        inverse = torch.cholesky_inverse(root)
        root, failed = torch.linalg.cholesky_ex(inverse, upper=True)
        if not failed:
            return root
    return torch.eye(len(total), device=total.device)  # no error is made good: to the nearest


# -- examples


@dataclass(frozen=True, slots=True)
class Example:
    """A conversation, and the files of its images."""

    messages: tuple[ChatMessage, ...]
    images: tuple[bytes, ...] = ()


def read_examples(file: Path) -> list[Example]:
    """A question a line; in a `.jsonl` file lines are objects with OpenAI's `messages`, images as paths or data URLs.

    Raises: UnsupportedCheckpoint, naming the line; OSError.
    """
    if not file.is_file():
        raise UnsupportedCheckpoint(
            f"--calibrate {file}: there is no such file; name one with a question a line, a .jsonl file "
            f"of OpenAI messages, or `{OWN}`"
        )
    if file.stat().st_size > _MAX_EXAMPLE_BYTES:
        raise UnsupportedCheckpoint(f"{file.name} has more than {_MAX_EXAMPLE_BYTES} bytes")
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise UnsupportedCheckpoint(f"{file.name} is not UTF-8: convert it first") from None
    examples = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if file.suffix != ".jsonl":
            examples.append(Example((ChatMessage("user", (TextPart(line),)),)))
            continue
        try:
            examples.append(_parse(json.loads(line), file.parent))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UnsupportedCheckpoint(
                f"{file.name}: line {number} has no OpenAI messages: {error}"
            ) from None
    if not examples:
        raise UnsupportedCheckpoint(f"{file.name} has no examples")
    return examples


def _parse(line: dict[str, Any], folder: Path) -> Example:
    images: list[bytes] = []
    messages = []
    for message in line["messages"]:
        content = message["content"]
        parts: list[TextPart | ImagePart] = []
        is_text = isinstance(content, str)
        given: list[Any] = [{"type": "text", "text": content}] if is_text else content
        for part in given:
            if part["type"] == "text":
                parts.append(TextPart(str(part["text"])))
            elif part["type"] == "image_url":
                url = part["image_url"]["url"]
                data = url.partition("base64,")[2] if url.startswith("data:") else None
                images.append(base64.b64decode(data) if data else (folder / url).read_bytes())
                parts.append(ImagePart(len(images) - 1))
            else:
                raise ValueError(f"a part is of the type {part['type']!r:.40}")
        messages.append(ChatMessage(message["role"], tuple(parts)))
    return Example(tuple(messages), tuple(images))


@dataclass(slots=True)
class Request:
    """What is asked of the engine in every run, and what it answered in the first."""

    request: EngineRequest
    answer: list[int] = field(default_factory=list)


def own_requests(engine: BatchingEngine, count: int, seed: int = 0) -> list[Request]:
    """A token by chance each, which the model goes on from as it likes. Source: Liu et al. 2023, arXiv:2305.17888."""
    processor: Any = engine.processor
    tokenizer = processor.tokenizer
    special = {token.id for token in tokenizer.control_tokens.values()}
    plain = [number for number in range(tokenizer.vocab_size) if number not in special]
    prefix = list(tokenizer.prefix_ids)
    chance = random.Random(seed)
    num_tokens = min(OWN_TOKENS, engine.max_model_len - len(prefix) - 2)
    requests = []
    for number in range(count):
        first = chance.choice(plain)
        sampling = SamplingParams(
            max_tokens=num_tokens, temperature=1.0, seed=seed + number, ignore_eos=True
        )
        request = EngineRequest(str(number), [*prefix, first], sampling)
        requests.append(Request(request))
    return requests


def to_requests(
    engine: BatchingEngine, examples: Sequence[Example], answer_tokens: int = _ANSWER_TOKENS
) -> list[Request]:
    """Raises: UnsupportedCheckpoint, naming the example."""
    processor: Any = engine.processor
    requests = []
    for number, example in enumerate(examples):
        try:
            images = [(_hash(data), _pixels(processor, data)) for data in example.images]
            prompt = processor.build_prompt(list(example.messages), images)
        except (InvalidRequest, InvalidImage, OSError) as error:
            raise UnsupportedCheckpoint(f"example {number + 1}: {error}") from None
        room = engine.max_model_len - len(prompt.token_ids)
        if room < 1:
            raise UnsupportedCheckpoint(
                f"example {number + 1} has {len(prompt.token_ids)} tokens; the model takes "
                f"{engine.max_model_len - 1} at most"
            )
        sampling = SamplingParams(max_tokens=min(answer_tokens, room), temperature=0)
        request = EngineRequest(
            str(number), prompt.token_ids, sampling, prompt.images, positions=prompt.positions
        )
        requests.append(Request(request))
    return requests


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _pixels(processor: Any, data: bytes) -> Any:
    with Image.open(io.BytesIO(data)) as image:
        size = image.size
    return processor.process_image(data, size)


def answer_all(engine: BatchingEngine, requests: Sequence[Request]) -> Iterator[float]:
    """Have all answered, or what was answered before computed again; yields the share of tokens done.

    Raises: UnsupportedCheckpoint.
    """
    is_first = not any(entry.answer for entry in requests)
    by_id = {entry.request.request_id: entry for entry in requests}
    for entry in requests:
        request = entry.request
        if not is_first:
            sampling = msgspec.structs.replace(
                request.sampling, max_tokens=len(entry.answer), ignore_eos=True
            )
            known = tuple(entry.answer[:-1])
            request = replace(request, sampling=sampling, output_token_ids=known)
        engine.add(request)
    limits = {name: entry.request.sampling.max_tokens or 1 for name, entry in by_id.items()}
    done = dict.fromkeys(by_id, 0)
    while engine.has_work():
        for output in engine.step():
            name = output.request_id
            if output.error is not None:
                raise UnsupportedCheckpoint(f"the engine cannot answer an example: {output.error}")
            if is_first:
                by_id[name].answer += output.token_ids
                done[name] = len(by_id[name].answer)
            if output.finish_reason is not None:
                done[name] = limits[name]
        yield sum(done.values()) / sum(limits.values())
