"""Settings from their sources to the processes: read once in `main`, handed to child processes as
variables.

Called by the command line and by what starts processes.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr, ValidationError

from shared.settings.tree import CONFIG_VARIABLE, PREFIX, Settings, SettingsError


def load_settings(**overrides: dict[str, Any]) -> Settings:
    """Read all sources. `overrides` are sub-trees by name, as in `gateway={"port": 0}`.

    Raises: SettingsError, naming every bad or unknown field.
    """
    path = os.environ.get(CONFIG_VARIABLE)
    if path and not Path(path).is_file():
        raise SettingsError(f"{CONFIG_VARIABLE}: there is no file {path!r}")
    unknown = _unknown_variables()
    if unknown:
        raise SettingsError(f"unknown settings in the environment: {', '.join(unknown)}")
    try:
        settings = Settings(**overrides)  # pyright: ignore[reportArgumentType]
    except ValidationError as error:
        raise SettingsError(_describe(error)) from None
    if settings.redis_url and not settings.redis.url:
        redis = settings.redis.model_copy(update={"url": settings.redis_url})
        return settings.model_copy(update={"redis": redis})
    return settings


def _unknown_variables() -> list[str]:
    known = {CONFIG_VARIABLE, *(PREFIX + name.upper() for name in Settings.model_fields)}
    return sorted(
        name
        for name in os.environ
        if name.upper().startswith(PREFIX) and name.upper().split("__")[0] not in known
    )


def _describe(error: ValidationError) -> str:
    """One line a fault, without the value: it may be a secret."""
    lines = [
        f"{PREFIX}{'__'.join(str(part) for part in fault['loc']).upper()}: {fault['msg']}"
        for fault in error.errors(include_input=False, include_url=False)
    ]
    return "invalid settings\n  " + "\n  ".join(lines)


def to_environment(settings: BaseModel, prefix: str = PREFIX) -> dict[str, str]:
    """The variables that make a child process load the same settings; defaults are left out."""
    variables: dict[str, str] = {}
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if isinstance(value, BaseModel):
            variables |= to_environment(value, f"{prefix}{name.upper()}__")
        elif value != field.default:
            variables[prefix + name.upper()] = _to_text(value)
    return variables | _to_variables(settings.model_extra or {}, prefix)


def _to_variables(values: Mapping[str, Any], prefix: str) -> dict[str, str]:
    variables: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            variables |= _to_variables(value, f"{prefix}{name.upper()}__")
        elif value is not None:
            variables[prefix + name.upper()] = _to_text(value)
    return variables


def _to_text(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ",".join(_to_text(item) for item in value)
    return value.get_secret_value() if isinstance(value, SecretStr) else str(value)
