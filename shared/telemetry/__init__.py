"""Metrics, logs and spans."""

import os
from typing import TYPE_CHECKING

from shared.settings.tree import SettingsError, TraceSettings
from shared.version import package_version

if TYPE_CHECKING:
    from shared.telemetry.spans import Tracer


def create_tracer(settings: TraceSettings, process: str, instance: str) -> "Tracer | None":
    """Create the tracer of this process; None if traces are disabled. Raises: SettingsError."""
    is_disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if settings.export == "none" or is_disabled:
        return None
    try:
        from shared.telemetry.spans import Tracer  # noqa: PLC0415 - an optional extra
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"VLM_TRACES__EXPORT: {error.name} is missing; pip install '.[traces]'"
        ) from None
    return Tracer(process, instance, package_version())
