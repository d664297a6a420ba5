"""The settings of the torch engine. Importing them does not import torch."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from engines.core.settings import BatchingSettings


class TorchSettings(BatchingSettings):
    """Settings of the torch engine."""

    removed: ClassVar[Mapping[str, str]] = {
        "tensor_parallel": "use --engine vllm or --engine sglang for several GPUs",
        "kv_dtype": "the KV cache has the type of the engine; use --engine vllm or --engine sglang for one of 8 bits",
    }

    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Arithmetic; auto: bfloat16 where the device is fast at it, else float32."""
    quantization: Literal["none", "int8", "int4"] = "none"
    """Weights of the decoder; with CPU kernels the vision tower's and the head are int8 then."""
    num_threads: int = Field(default=0, ge=0)
    """CPU threads of each process of the engine; 0: one for a small model, else as many as the processors
    that the machine has and the container may use, or fewer where the start finds that faster."""
    memory_bytes: int = Field(default=0, ge=0)
    """Memory of the machine that all its processes may take together; a model sizes its caches by it. 0:
    any."""
    disabled_ops: tuple[str, ...] = ()
    """Faster ways that are not to be used, comma separated: an operator (`gate`), one candidate
    (`linear_int8.triton`), all of a kind (`cpu`, `triton`), or `cuda_graph`."""
    cpu_kernels: Literal["fast", "exact", "off"] = "fast"
    """C++ kernels, compiled at first use; `fast`: int8 and int4 weights meet activations of 8 bits, `exact`:
    of 16."""
    max_image_pixels: int = Field(default=0, ge=0, le=128_000_000)
    """Pixels of an image that the model sees; larger ones are scaled down as the model's processor does. 0:
    on a CPU 1048576, some 30 s of two fast cores for a tower of 32 layers; on a GPU the processor's own
    limit."""
    generation_config: str = "auto"
    """Default sampling parameters of requests: `auto` (those of the model's `generation_config.json`),
    `none` (OpenAI's defaults), or a folder with another such file."""
    reasoning: Literal[
        "auto", "none", "think", "mistral", "kimi", "seed", "cohere", "gemma", "harmony"
    ] = "auto"
    """How the model marks what it thinks before it answers; auto: as its chat template and tokens tell,
    none: all it writes is the answer."""
    self_check: Literal["auto", "always", "off"] = "auto"
    """Compare a few tokens of a model with transformers' own at the start; auto: where no test of the
    project does."""

    @field_validator("disabled_ops", mode="before")
    @classmethod
    def split_names(cls, value: Any) -> Any:
        """Accept a comma-separated string, as environments hold it."""
        if isinstance(value, str):
            return tuple(name.strip() for name in value.split(",") if name.strip())
        return value

    @property
    def switched_off(self) -> frozenset[str]:
        """Names of `disabled_ops`, and those that other settings imply."""
        names = [*self.disabled_ops]
        if self.cpu_kernels == "off":
            names.append("cpu")
        return frozenset(names)

    @property
    def outdated(self) -> list[str]:
        """Deprecated settings in use, each with its replacement."""
        if self.cpu_kernels == "off":
            return ["VLM_ENGINE__CPU_KERNELS=off: set VLM_ENGINE__DISABLED_OPS=cpu"]
        return []
