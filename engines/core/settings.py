"""The settings of engines that batch sequences over a paged KV cache."""

from typing import Literal

from pydantic import Field

from engines.settings import UNLISTED, EngineSettings

MIB = 1024 * 1024


class BatchingSettings(EngineSettings):
    """Limits of one engine. Units: tokens, sequences, bytes."""

    max_num_batched_tokens: int = Field(
        default=1024, ge=1, description="New tokens that one step computes."
    )
    max_mixed_prefill_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Prompt tokens of a step beside running streams; none: measured, so that it takes less than twice as long.",
    )
    #: Launch a step before the tokens of the one before it are known; none: on a GPU.
    overlap_steps: bool | None = Field(default=None, json_schema_extra=UNLISTED)
    speculation: Literal["auto", "ngram", "off"] = Field(
        default="auto",
        description="Compute tokens ahead that will probably come, as far as it saves time; auto: in answers held to a grammar; `ngram`: in all, what stood in prompt or answer before. Answers stay the same.",
    )
    tools: Literal["auto", "any"] = Field(
        default="auto",
        description="Whom functions are shown that may be called: models whose chat template has a place for them, or any; a call that must be is made by any.",
    )
    #: Tokens in a KV block.
    block_size: int = Field(default=16, ge=1, le=256, json_schema_extra=UNLISTED)
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
    #: None: as many as `kv_cache_bytes` holds.
    num_kv_blocks: int | None = Field(default=None, ge=1, le=1 << 24, json_schema_extra=UNLISTED)
    max_images_per_step: int = Field(
        default=8, ge=1, description="Images that one step encodes at most."
    )
