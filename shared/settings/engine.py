"""The settings of an engine. Part of the tree in `shared/settings/tree.py`."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator
from pydantic_settings import NoDecode

from shared.settings.group import MIB, Group, split_items

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


class MockSettings(Group):
    """What the mock engine pretends."""

    vision_s: float = Field(default=0.02, ge=0, description="Simulated time to encode one image.")
    prefill_s_per_token: float = Field(
        default=0.00002, ge=0, description="Simulated time per prompt token."
    )
    decode_s: float = Field(default=0.005, ge=0, description="Simulated time of one step.")
    jitter_ratio: float = Field(
        default=0.0, ge=0, le=1, description="Random share of the simulated times."
    )
    seed: int = Field(default=0, description="Seed of that randomness.")
    tokens_per_image: int = Field(default=64, ge=1, description="Image slots of one image.")
    num_output_tokens: int = Field(
        default=24, ge=1, description="Length of an answer when nothing else ends it."
    )


class EngineSettings(Group):
    """The engine of a worker."""

    kind: Literal["torch", "mock"] = Field(
        default="torch", description="Which engine runs the model."
    )
    model: str = Field(
        default="shapes",
        description="Built-in name, directory, or Hugging Face id (`org/name[@revision]`).",
    )
    served_name: str = Field(default="", description="Name on the wire; empty: the model's own.")
    device: str = Field(default="auto", description="`auto`, `cpu`, `cuda` or `cuda:N`.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Arithmetic; auto: bfloat16 where the device is fast at it, else float32.",
    )
    quantization: Literal["none", "int8", "int4"] = Field(
        default="none",
        description="Weights of the decoder; with CPU kernels the vision tower's are int8 then.",
    )
    max_num_seqs: int = Field(default=32, ge=1, le=4096, description="Sequences that share a step.")
    max_num_batched_tokens: int = Field(
        default=1024, ge=16, description="New tokens that one step computes."
    )
    max_mixed_prefill_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Prompt tokens of a step beside running streams; none: measured, so that it takes less than twice as long.",
    )
    overlap_steps: bool | None = Field(
        default=None,
        description="Launch a step before the tokens of the one before it are known; none: on a GPU.",
    )
    max_model_len: int | None = Field(
        default=None, ge=16, description="Context length; none: the model's own."
    )
    block_size: int = Field(default=16, ge=1, le=256, description="Tokens in a KV block.")
    kv_cache_bytes: int | None = Field(
        default=None, ge=1, description="Size of the KV cache; none: from free memory."
    )
    kv_dtype: Literal["auto", "int8"] = Field(
        default="auto", description="Keys and values; int8: half the bytes, nearly the answers."
    )
    enable_prefix_cache: bool = Field(
        default=True, description="Share KV blocks of equal prefixes."
    )
    encoder_cache_bytes: int = Field(
        default=256 * MIB, ge=0, description="Size of the image feature cache."
    )
    num_threads: int = Field(
        default=0,
        ge=0,
        description="CPU threads of the engine; 0: one for a small model, else torch's choice.",
    )
    disabled_gpu_kernels: Annotated[tuple[GpuKernel, ...], NoDecode] = Field(
        default=(), description="What a GPU is to compute in a slower way, comma separated."
    )
    cpu_kernels: Literal["fast", "exact", "off"] = Field(
        default="fast",
        description="C++ kernels, compiled at first use; fast: int8 and int4 weights meet activations of "
        "8 bits, exact: of 16.",
    )
    mock: MockSettings = MockSettings()

    @field_validator("disabled_gpu_kernels", mode="before")
    @classmethod
    def split_names(cls, value: Any) -> Any:
        """Accept a comma-separated string, as environments hold it."""
        return split_items(value)
