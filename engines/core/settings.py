"""Settings of engines with continuous batching over a paged KV cache."""

from typing import Literal

from pydantic import Field

from engines.settings import UNLISTED, EngineSettings

MIB = 1024 * 1024


class BatchingSettings(EngineSettings):
    """Limits of one engine. Units: tokens, sequences, bytes."""

    max_num_batched_tokens: int = Field(default=1024, ge=1)
    """Maximum number of new tokens per step."""
    max_mixed_prefill_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of prompt tokens per step while other requests decode; empty: measured, so that prompts make
    a step less than twice as long."""
    #: Launch a step before the tokens of the previous step are known; None: only on a GPU.
    overlap_steps: bool | None = Field(default=None, json_schema_extra=UNLISTED)
    speculation: Literal["auto", "ngram", "off"] = "auto"
    """Speculative decoding, used while it saves time; it does not change answers. `auto`: drafts from
    grammars; `ngram`: also from n-grams of prompt and answer; `off`: none."""
    tools: Literal["auto", "any"] = "auto"
    """Models that get the functions of a request in the prompt. `auto`: models whose chat template lists
    functions; `any`: all. Required calls work with every model."""
    #: Tokens per KV block.
    block_size: int = Field(default=16, ge=1, le=256, json_schema_extra=UNLISTED)
    kv_cache_bytes: int | None = Field(default=None, ge=1)
    """Size of the KV cache; empty: computed from the free memory."""
    enable_prefix_cache: bool = True
    """Share KV blocks of equal prefixes."""
    encoder_cache_bytes: int = Field(default=256 * MIB, ge=0)
    """Size of the image feature cache."""
    #: Number of KV blocks; None: as many as fit into `kv_cache_bytes`.
    num_kv_blocks: int | None = Field(default=None, ge=1, le=1 << 24, json_schema_extra=UNLISTED)
    max_images_per_step: int = Field(default=8, ge=1)
    """Maximum number of images encoded per step."""
