"""What a child process of a node is told: its own groups of the settings, and no secret of others."""

import os

from shared.settings.load import to_environment
from shared.settings.tree import PREFIX, Settings

SHARED_GROUPS = frozenset({"redis", "limits", "logs", "traces"})
GATEWAY_GROUPS = SHARED_GROUPS | {"gateway", "search", "deploy"}
SEARCH_GROUPS = frozenset({"search", "limits", "logs"})
WORKER_GROUPS = SHARED_GROUPS | {"worker", "engine"}
#: Variables that only a worker reads, and that only a client on this machine does.
HUB_SECRETS = frozenset({"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN"})
CLIENT_SECRETS = frozenset({"API_KEY", "OPENAI_API_KEY", "DEPLOY_KEY"})


def child_environment(
    settings: Settings, groups: frozenset[str], secrets: frozenset[str] = frozenset()
) -> dict[str, str]:
    """The environment of a child: ours without `secrets`, applications' secrets and clients' keys, and its
    groups of the settings.

    A child reads no other source: `.env` and the file of `VLM_CONFIG` hold what is not its own.
    """
    inherited = plain_environment(secrets.union(settings.node.secrets))
    own = settings.model_copy(
        update={
            name: field.default
            for name, field in type(settings).model_fields.items()
            if name not in groups
        }
    )
    return inherited | to_environment(own)


def plain_environment(secrets: frozenset[str] = frozenset()) -> dict[str, str]:
    """Our environment without settings, `secrets` and clients' keys."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.upper().startswith(PREFIX) and name not in secrets | CLIENT_SECRETS
    }
