"""The settings of the torch engine. Imported without torch, by whoever lists or checks settings."""

from typing import Any, Literal

from pydantic import Field, field_validator

from engines.core.settings import BatchingSettings

#: Fast ways of a GPU that can be switched off, by name.
GpuKernel = Literal[
    "add_norm",
    "rotate_keep",
    "gate",
    "attend_decodes",
    "multiply_int8",
    "multiply_int4",
    "cuda_graph",
    "varlen",
]


class TorchSettings(BatchingSettings):
    """A model on a device of this machine."""

    device: str = Field(default="auto", description="`auto`, `cpu`, `cuda` or `cuda:N`.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Arithmetic; auto: bfloat16 where the device is fast at it, else float32.",
    )
    quantization: Literal["none", "int8", "int4"] = Field(
        default="none",
        description="Weights of the decoder; with CPU kernels the vision tower's are int8 then.",
    )
    num_threads: int = Field(
        default=0,
        ge=0,
        description="CPU threads of the engine; 0: one for a small model, else torch's choice.",
    )
    disabled_gpu_kernels: tuple[GpuKernel, ...] = Field(
        default=(), description="What a GPU is to compute in a slower way, comma separated."
    )
    cpu_kernels: Literal["fast", "exact", "off"] = Field(
        default="fast",
        description="C++ kernels, compiled at first use; fast: int8 and int4 weights meet activations of "
        "8 bits, exact: of 16.",
    )

    self_check: Literal["auto", "always", "off"] = Field(
        default="auto",
        description="Compare a few tokens of a model with transformers' own at the start; auto: where "
        "no test of the project does.",
    )

    @field_validator("disabled_gpu_kernels", mode="before")
    @classmethod
    def split_names(cls, value: Any) -> Any:
        """Accept a comma-separated string, as environments hold it."""
        if isinstance(value, str):
            return tuple(name.strip() for name in value.split(",") if name.strip())
        return value
