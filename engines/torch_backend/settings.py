"""The settings of the torch engine. Imported without torch, by whoever lists or checks settings."""

from typing import Any, Literal

from pydantic import Field, field_validator

from engines.core.settings import BatchingSettings

#: What an earlier version called that which can be switched off.
_OLD_NAMES = {
    "add_norm": "add_norm",
    "rotate_keep": "rotate_keep",
    "gate": "gate",
    "attend_decodes": "decode_attention",
    "multiply_int8": "linear_int8.triton",
    "multiply_int4": "linear_int4.triton",
    "cuda_graph": "cuda_graph",
    "varlen": "varlen_attention",
}


class TorchSettings(BatchingSettings):
    """A model on a device of this machine."""

    device: str = Field(default="auto", description="`auto`, `cpu`, `cuda` or `cuda:N`.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Arithmetic; auto: bfloat16 where the device is fast at it, else float32.",
    )
    quantization: Literal["none", "int8", "int4"] = Field(
        default="none",
        description="Weights of the decoder; with CPU kernels the vision tower's and the head are int8 then.",
    )
    tensor_parallel: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Devices, or processes on a CPU, that share the model; each has a part of every layer.",
    )
    num_threads: int = Field(
        default=0,
        ge=0,
        description="CPU threads of each process of the engine; 0: one for a small model, else as many as the "
        "processors that the machine has and the container may use, or fewer where the start finds that faster.",
    )
    memory_bytes: int = Field(
        default=0,
        ge=0,
        description="Memory of the machine that all its processes may take together; a model sizes its caches by it. 0: any.",
    )
    disabled_ops: tuple[str, ...] = Field(
        default=(),
        description="Faster ways that are not to be used, comma separated: an operator (`gate`), one "
        "candidate (`linear_int8.triton`), all of a kind (`cpu`, `triton`), or `cuda_graph`.",
    )
    cpu_kernels: Literal["fast", "exact", "off"] = Field(
        default="fast",
        description="C++ kernels, compiled at first use; `fast`: int8 and int4 weights meet activations of "
        "8 bits, `exact`: of 16.",
    )
    disabled_gpu_kernels: tuple[str, ...] = Field(
        default=(), description="As `DISABLED_OPS`, by older names; gone in the next version."
    )

    max_image_pixels: int = Field(
        default=0,
        ge=0,
        le=128_000_000,
        description="Pixels of an image that the model sees; larger ones are scaled down as the model's "
        "processor does. 0: on a CPU 1048576, some 30 s of two fast cores for a tower of 32 layers; on a GPU the "
        "processor's own limit.",
    )
    generation_config: str = Field(
        default="auto",
        description="Sampling where a request says nothing: `auto` (what the model's "
        "`generation_config.json` suggests), `none` (OpenAI's defaults), or a folder with another such file.",
    )
    reasoning: Literal[
        "auto", "none", "think", "mistral", "kimi", "seed", "cohere", "gemma", "harmony"
    ] = Field(
        default="auto",
        description="How the model marks what it thinks before it answers; auto: as its chat template "
        "and tokens tell, none: all it writes is the answer.",
    )
    self_check: Literal["auto", "always", "off"] = Field(
        default="auto",
        description="Compare a few tokens of a model with transformers' own at the start; auto: where "
        "no test of the project does.",
    )

    @field_validator("disabled_ops", "disabled_gpu_kernels", mode="before")
    @classmethod
    def split_names(cls, value: Any) -> Any:
        """Accept a comma-separated string, as environments hold it."""
        if isinstance(value, str):
            return tuple(name.strip() for name in value.split(",") if name.strip())
        return value

    @field_validator("disabled_gpu_kernels")
    @classmethod
    def know_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """Raises: ValueError for a name that there never was."""
        if unknown := [name for name in value if name not in _OLD_NAMES]:
            raise ValueError(f"there is no {unknown[0]!r}; use VLM_ENGINE__DISABLED_OPS")
        return value

    @property
    def switched_off(self) -> frozenset[str]:
        """Names of `disabled_ops`, with those of settings that it replaces."""
        names = [*self.disabled_ops, *(_OLD_NAMES[name] for name in self.disabled_gpu_kernels)]
        if self.cpu_kernels == "off":
            names.append("cpu")
        if self.tensor_parallel > 1:
            names.append("cuda_graph")
        return frozenset(names)

    @property
    def outdated(self) -> list[str]:
        """Settings in use that are to go, each with what replaces it."""
        found = []
        if self.disabled_gpu_kernels:
            names = ",".join(_OLD_NAMES[name] for name in self.disabled_gpu_kernels)
            found.append(f"VLM_ENGINE__DISABLED_GPU_KERNELS: set VLM_ENGINE__DISABLED_OPS={names}")
        if self.cpu_kernels == "off":
            found.append("VLM_ENGINE__CPU_KERNELS=off: set VLM_ENGINE__DISABLED_OPS=cpu")
        return found
