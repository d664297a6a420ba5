"""Loads a model by name: files, configuration, weights, caches, warm-up."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from engines.base import EngineStartError, LoadedEngine, Progress
from engines.core.budget import measure_prefill_limit
from engines.core.engine import BatchingEngine
from engines.core.runner import DeviceOutOfMemory
from engines.heap import keep_freed_memory
from engines.packages.checkpoint_json import one_line, quantization_section
from engines.packages.generation_config import read_sampling_defaults
from engines.packages.resolve import default_name, resolve_model
from engines.text.processor import create_processor, example_prompt
from engines.torch_backend.layers.linear import METHODS
from engines.torch_backend.loading.check import check_model
from engines.torch_backend.loading.gguf_checkpoint import TEXT_FILE, open_checkpoint
from engines.torch_backend.loading.weights import ModelTooLarge, load_model
from engines.torch_backend.memory import free_bytes, limit_memory
from engines.torch_backend.models.config import UnsupportedCheckpoint
from engines.torch_backend.models.hf_config import DTYPES, read_fields
from engines.torch_backend.models.registry import find_family
from engines.torch_backend.ops import native
from engines.torch_backend.ops.cpu_level import choose_level
from engines.torch_backend.ops.registry import check_disabled, cpu_ops
from engines.torch_backend.runner import TorchRunner
from engines.torch_backend.settings import TorchSettings
from engines.torch_backend.threads import settle_num_threads

#: A tower of 32 layers encodes an image of this size in about 30 s on two fast cores.
MAX_IMAGE_PIXELS_ON_CPU = 1024 * 1024


def load_engine(settings: TorchSettings, progress: Progress | None) -> LoadedEngine:
    """Create the engine of a model and warm it up. Raises: EngineStartError."""
    limit_memory(settings.memory_bytes)
    phases = _Phases(progress)
    check_disabled(settings.disabled_ops)
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    with phases.measure("download"):
        report = partial(phases.progress, "download") if progress else None
        check = partial(check_model, device=device, quantization=settings.quantization)
        directory = open_checkpoint(resolve_model(settings.model, report, check))
    sampling = read_sampling_defaults(directory, settings.generation_config)
    kernels, is_cpu = None, device.type == "cpu"
    if is_cpu:
        with phases.measure("compile"):
            kernels = cpu_ops(settings.cpu_kernels, disabled=frozenset(settings.disabled_ops))
    with phases.measure("load"):
        family, config = find_family(directory)
        multimodal = family.processor(directory, config)
        max_pixels = settings.max_image_pixels or (MAX_IMAGE_PIXELS_ON_CPU if is_cpu else 0)
        processor = create_processor(directory, multimodal, settings.reasoning, max_pixels)
        free = free_bytes(device)
        scheme = None if settings.quantization == "none" else METHODS[settings.quantization]
        told = partial(phases.progress, "load"), phases.seconds
        model = load_model(directory, family, config, device, dtype, scheme, *told, kernels)
        runner = TorchRunner(model, settings, device, dtype, free, kernels)
    if is_cpu:
        keep_freed_memory()  # the next image reuses it: half a gigabyte for several tiles
    with phases.measure("warmup"), _explained(runner):
        runner.warm_up()
        if is_cpu and not settings.num_threads:
            library = native.load(runner.ops.site.level) if runner.ops.is_native else None
            weights = runner.memory_bytes()["weights"]
            form = f"{settings.dtype} {settings.quantization} {settings.cpu_kernels}"
            settle_num_threads(runner, f"{weights} {form} {config!r}", library)
        example = partial(example_prompt, processor)
        runner.model.verify(runner, settings.self_check, example)
        limit = measure_prefill_limit(runner, settings.max_num_batched_tokens)
    engine = BatchingEngine(runner, processor, settings, phases.seconds, limit)
    card = engine.card(
        settings.served_name or default_name(settings.model),
        supports_images=processor.image_tokens > 0,
        transcription_prompt=processor.transcription_prompt,
        max_image_pixels=processor.max_image_pixels,
        sampling=sampling,
        always_thinks=processor.always_thinks,
        dtype=str(dtype).removeprefix("torch."),
        quantization=quantization_of(directory, settings.quantization),
        format="gguf" if (directory / TEXT_FILE).is_file() else "safetensors",
    )
    return LoadedEngine(engine, card)


@contextmanager
def _explained(runner: TorchRunner) -> Iterator[None]:
    """Report a failure of the first steps in one sentence. Raises: UnsupportedCheckpoint, ModelTooLarge."""
    try:
        yield
    except DeviceOutOfMemory as error:
        used = ", ".join(f"{n / 2**30:.1f} GiB {use}" for use, n in runner.memory_bytes().items())
        raise ModelTooLarge(
            f"out of memory on {error}: {used} are in use and "
            f"{free_bytes(runner.device) / 2**30:.1f} GiB are free; lower kv_cache_bytes or "
            "max_num_batched_tokens, or try --quantization int8 or int4"
        ) from error
    except (EngineStartError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # transformers models raise any type
        if runner.model.speed_path == "native":
            raise
        raise UnsupportedCheckpoint(
            "the model cannot run: its first steps fail with "
            f"{type(error).__name__}: {one_line(error)}"
        ) from error


def quantization_of(directory: Path, chosen: str) -> str:
    """The quantization of the weights: the setting, else the format of the checkpoint."""
    if chosen != "none":
        return chosen
    stored = quantization_section(read_fields(directory)).get("quant_method")
    return stored[:64] if isinstance(stored, str) else ""


def choose_device(name: str) -> torch.device:
    """`auto`: a GPU if there is one. Raises: EngineStartError for an unknown device."""
    num_gpus = torch.cuda.device_count()
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise EngineStartError(f"device {name!r} is unknown: use auto, cpu, cuda or cuda:N")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= num_gpus:
        raise EngineStartError(
            f"device {name} does not exist: torch finds {num_gpus} GPUs; use another device, or auto"
        )
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 if the device computes it fast, else float32."""
    if name != "auto":
        return DTYPES[name]
    is_fast = device.type == "cuda" or choose_level().has_fast_bfloat16
    return torch.bfloat16 if is_fast else torch.float32


class _Phases:
    def __init__(self, progress: Progress | None) -> None:
        self.seconds: dict[str, float] = {}
        self.progress = progress or (lambda phase, share: None)

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Time a phase, excluding phases that are measured inside it."""
        started, before = time.perf_counter(), sum(self.seconds.values())
        self.progress(phase, 0.0)
        yield
        within = sum(self.seconds.values()) - before
        self.seconds[phase] = time.perf_counter() - started - within
        self.progress(phase, 1.0)
