"""Groups of settings for tests, whose constants may differ: nobody waits for 30 seconds."""

import os
from typing import Any, TypeVar

from shared.settings.limits import Group

G = TypeVar("G", bound=Group)


def make_group(group: type[G], **values: Any) -> G:
    """A group with these fields, which are validated, and constants."""
    constants = {name: value for name, value in values.items() if name not in group.model_fields}
    assert all(hasattr(group, name) for name in constants), constants
    fields = {name: value for name, value in values.items() if name not in constants}
    return group(**fields).model_copy(update=constants)


#: Of a process that runs this file in place of `vlm`: the gateway's constants, as `name=seconds`, comma separated.
VARIABLE = "TEST_GATEWAY_CONSTANTS"


def main() -> None:
    """`python -m tests.factories_settings gateway ...`: `vlm` with other constants."""
    import vlm  # noqa: PLC0415
    from shared.settings.tree import GatewaySettings  # noqa: PLC0415

    for assignment in os.environ[VARIABLE].split(","):
        name, _, value = assignment.partition("=")
        assert name in GatewaySettings.__class_vars__, name
        setattr(GatewaySettings, name, float(value))
    vlm.main()


if __name__ == "__main__":
    main()
