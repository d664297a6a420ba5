"""The base of groups of settings."""

from pydantic import BaseModel, ConfigDict

MIB = 1024 * 1024


class Group(BaseModel):
    """Base of the sub-trees: frozen, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")
