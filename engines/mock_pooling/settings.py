"""Settings of the mock embedding engine."""

from pydantic import BaseModel, ConfigDict, Field

from engines.pooling.settings import PoolingSettings


class MockPooling(BaseModel):
    """Parameters of the simulation. Units: seconds, tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dimensions: int = Field(default=64, ge=1, le=4096)
    """Length of the embeddings."""
    step_s: float = Field(default=0.002, ge=0)
    """Simulated time of one step."""
    s_per_token: float = Field(default=0.00002, ge=0)
    """Simulated time per token of a step."""
    tokens_per_image: int = Field(default=64, ge=1)
    """Tokens of one image."""


class MockPoolingSettings(PoolingSettings):
    """Real batches with simulated computation."""

    mock: MockPooling = MockPooling()
