"""Settings that all engines share, and their error messages.

Each engine defines a subclass in its folder. The worker passes the raw values of its `VLM_ENGINE__...` variables.
"""

from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engines.base import EngineStartError

PREFIX = "VLM_ENGINE__"
Spell = Callable[[str], str]  #: spelling of a setting's name in messages
#: `json_schema_extra` of a field that is not documented, because only tests, benchmarks and nodes set it.
UNLISTED: dict[str, Any] = {"is_listed": False}


def as_variable(name: str) -> str:
    return PREFIX + name.upper()


class BadEngineSettings(EngineStartError):
    """An invalid value or an unknown setting."""


class EngineSettings(BaseModel):
    """Settings of every engine."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    #: Removed settings by name, with their replacements.
    removed: ClassVar[Mapping[str, str]] = {}

    model: str = "shapes"
    """Built-in name, directory, or Hugging Face id (`org/name[@revision]`)."""
    served_name: str = ""
    """Name in the API; empty: the model's own."""
    max_num_seqs: int = Field(default=32, ge=1, le=4096)
    """Maximum number of sequences per step."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Context length; none: the model's own."""

    @classmethod
    def read(cls, kind: str, values: Mapping[str, object], spell: Spell = as_variable) -> Self:
        """Validate raw values, such as those of environment variables. Raises: BadEngineSettings."""
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            faults = error.errors(include_input=False, include_url=False)
            sentences = [_sentence(kind, fault, cls, spell) for fault in faults]
            raise BadEngineSettings("\n".join(sentences)) from None


def _sentence(kind: str, fault: Any, settings: type[EngineSettings], spell: Spell) -> str:
    """The error of one setting, without its value, which may be a secret."""
    name = "__".join(str(part) for part in fault["loc"])
    if fault["type"] != "extra_forbidden":
        return f"{spell(name)}: {fault['msg']}"
    if instead := settings.removed.get(name.lower()):
        return f"{spell(name)}: the {kind} engine has no such setting: {instead}"
    near = get_close_matches(name.lower(), _names(settings))
    hint = f"; did you mean {' or '.join(map(spell, near))}?" if near else ""
    return f"{spell(name)}: the {kind} engine has no such setting{hint}"


def _names(settings: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in settings.model_fields.items():
        if isinstance(field.default, BaseModel):
            yield from _names(type(field.default), f"{prefix}{name}__")
        else:
            yield prefix + name
