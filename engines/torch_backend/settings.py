"""The settings of the torch engine. Importing them does not import torch."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from engines.core.settings import BatchingSettings


class TorchSettings(BatchingSettings):
    removed: ClassVar[Mapping[str, str]] = {
        "tensor_parallel": "use --engine vllm or --engine sglang for several GPUs",
        "kv_dtype": "the KV cache has the engine's dtype; use --engine vllm or --engine sglang for an 8-bit KV cache",
    }

    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the model's computation; auto: bfloat16 if the device computes it fast, else float32."""
    quantization: Literal["none", "int8", "int4"] = "none"
    """Quantization of the decoder's weights; with CPU kernels, vision tower and output head become int8 too."""
    num_threads: int = Field(default=0, ge=0)
    """CPU threads of each process of the engine; 0: one for a small model, else one per processor that the
    container can use, or fewer if a measurement at startup shows that fewer are faster."""
    memory_bytes: int = Field(default=0, ge=0)
    """Maximum host memory, in bytes, for weights and caches; caches are sized to fit. 0: limited by free memory
    only."""
    disabled_ops: tuple[str, ...] = ()
    """Optimized code to disable, comma separated: an operator (`gate`), one implementation
    (`linear_int8.triton`), all of a kind (`cpu`, `triton`), or `cuda_graph`."""
    cpu_kernels: Literal["fast", "exact"] = "fast"
    """C++ kernels, compiled on first use. For int8 and int4 weights, `fast` rounds activations to 8 bits,
    `exact` to 16."""
    max_image_pixels: int = Field(default=0, ge=0, le=128_000_000)
    """Maximum pixels of an image; the model's processor scales larger images down. 0: 1048576 on a CPU (about
    30 s on two fast cores for a tower of 32 layers), the processor's own limit on a GPU."""
    generation_config: str = "auto"
    """Default sampling parameters of requests: `auto` (those of the model's `generation_config.json`),
    `none` (OpenAI's defaults), or a folder with another `generation_config.json`."""
    reasoning: Literal[
        "auto", "none", "think", "mistral", "kimi", "seed", "cohere", "gemma", "harmony"
    ] = "auto"
    """Format in which the model marks its reasoning. auto: detected from its chat template and tokens;
    none: the whole output is the answer."""
    self_check: Literal["auto", "always", "off"] = "auto"
    """Compare the logits of a few tokens with transformers' at startup; auto: only for models that the
    project's tests do not cover."""

    @field_validator("disabled_ops", mode="before")
    @classmethod
    def split_names(cls, value: Any) -> Any:
        """Accept a comma-separated string, as in environment variables."""
        if isinstance(value, str):
            return tuple(name.strip() for name in value.split(",") if name.strip())
        return value
