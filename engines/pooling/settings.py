"""Settings of engines for embeddings and scores."""

from typing import Literal

from pydantic import Field

from engines.settings import EngineSettings


class PoolingSettings(EngineSettings):
    """Limits of one engine. Units: tokens, calls."""

    max_calls: int = Field(default=256, ge=1, le=4096)
    """Maximum number of concurrent calls of an embedding engine."""
    max_batch_tokens: int = Field(default=8192, ge=1)
    """Maximum number of tokens per step of an embedding engine."""
    result_cache_bytes: int = Field(default=64 * 1024 * 1024, ge=0)
    """Maximum bytes of an embedding engine's cache of vectors and scores, which serves all tenants; 0: no cache."""
    result_cache_s: float = Field(default=3600.0, gt=0)
    """Lifetime of a cached result."""


class EncoderSettings(PoolingSettings):
    """A model on a device of this machine."""

    model: str = "shapes-clip"
    """Built-in name, directory, or Hugging Face id (`org/name[@revision]`)."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the computation; auto: bfloat16 where the device is fast at it, else float32."""
    quantization: Literal["none", "int8"] = "none"
    """Type of the linear layers' weights."""
    num_threads: int = Field(default=0, ge=0)
    """CPU threads of each process of the engine; 0: one for a small model, else one per processor that the
    container can use."""
