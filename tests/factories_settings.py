"""Groups of settings for tests, with constants changed to short times."""

import os
from typing import Any, TypeVar

from shared.settings.limits import Group

G = TypeVar("G", bound=Group)


def make_group(group: type[G], **values: Any) -> G:
    """Returns a group with these validated fields, and with these constants."""
    constants = {name: value for name, value in values.items() if name not in group.model_fields}
    assert all(hasattr(group, name) for name in constants), constants
    fields = {name: value for name, value in values.items() if name not in constants}
    return group(**fields).model_copy(update=constants)


#: The gateway's constants for a process that runs this file instead of `vlm`: `name=seconds`, comma-separated.
VARIABLE = "TEST_GATEWAY_CONSTANTS"


def main() -> None:
    """Runs `vlm` with changed constants: `python -m tests.factories_settings gateway ...`."""
    import vlm  # noqa: PLC0415
    from shared.settings.tree import GatewaySettings  # noqa: PLC0415

    for assignment in os.environ[VARIABLE].split(","):
        name, _, value = assignment.partition("=")
        assert name in GatewaySettings.__class_vars__, name
        setattr(GatewaySettings, name, float(value))
    vlm.main()


if __name__ == "__main__":
    main()
