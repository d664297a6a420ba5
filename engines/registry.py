"""From a description of an engine to an engine that is loaded and ready.

Called by the worker and by tools. It must not know settings or Redis; torch is imported only when
asked for.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from engines.base import Engine, EngineConfig, EngineStartError
from engines.core.runner import Processor
from engines.mock.engine import MockConfig, create_mock_engine
from shared.protocol import ModelCard

#: Called with a phase (`download`, `compile`, `load`, `quantize`, `warmup`) and its share done, 0..1.
Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Which engine to make. Fields mean what they mean in the settings of the same names."""

    kind: Literal["torch", "mock"] = "torch"
    model: str = "shapes"
    served_name: str = ""
    device: str = "auto"
    dtype: str = "auto"
    quantization: str = "none"
    num_threads: int = 0
    cpu_kernels: Literal["fast", "exact", "off"] = "fast"
    config: EngineConfig = field(default_factory=EngineConfig)
    mock: MockConfig = field(default_factory=MockConfig)
    progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine, what prepares its prompts, and what the world may know of its model."""

    engine: Engine
    processor: Processor
    card: ModelCard


def create_engine(spec: EngineSpec) -> LoadedEngine:
    """Make the engine that the specification asks for; blocks until it can serve.

    Raises: EngineStartError, with a message that says what to do.
    """
    if spec.kind == "mock":
        engine, processor = create_mock_engine(spec.config, spec.mock)
        card = ModelCard(
            name=spec.served_name or "mock",
            created_at=int(time.time()),
            max_model_len=engine.max_model_len,
            vocab_size=processor.tokenizer.vocab_size,
            image_tokens=processor.image_tokens,
        )
        return LoadedEngine(engine, processor, card)
    try:
        from engines.torch_backend.loading.load import load_engine  # noqa: PLC0415 - only when asked for
    except ModuleNotFoundError as error:
        raise EngineStartError(
            f"the torch engine needs the package {error.name!r}: "
            "pip install 'vlm-fleet[torch]', or take --engine mock"
        ) from None
    return load_engine(spec)
