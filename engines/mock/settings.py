"""Settings of the mock engine."""

from pydantic import BaseModel, ConfigDict, Field

from engines.core.settings import BatchingSettings


class MockSettings(BaseModel):
    """What the mock simulates. Units: seconds, tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    vision_s: float = Field(default=0.02, ge=0)
    """Simulated time to encode one image."""
    prefill_s_per_token: float = Field(default=0.00002, ge=0)
    """Simulated time per prompt token."""
    decode_s: float = Field(default=0.005, ge=0)
    """Simulated time of one step."""
    tokens_per_image: int = Field(default=64, ge=1)
    """Tokens of one image."""
    num_reasoning_tokens: int = Field(default=0, ge=0)
    """Reasoning words before an answer, in `<think>`."""
    num_output_tokens: int = Field(default=24, ge=1)
    """Tokens of an answer that nothing else ends."""


class MockEngineSettings(BatchingSettings):
    """Real scheduling, simulated computation."""

    mock: MockSettings = MockSettings()
