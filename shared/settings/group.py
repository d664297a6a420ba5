"""What all groups of settings have in common."""

from typing import Any

from pydantic import BaseModel, ConfigDict

MIB = 1024 * 1024


class Group(BaseModel):
    """Base of the sub-trees: frozen, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def split_items(value: Any) -> Any:
    """The items of a comma-separated string, as environments hold it; other values as they are."""
    if isinstance(value, str):
        return tuple(item.strip() for item in value.split(",") if item.strip())
    return value
