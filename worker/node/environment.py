"""The environment of a node's child processes: inherited variables by allow-list, each child's settings, and secrets.

Secrets are files of a directory, and chosen variables of the node's environment. A deployment names them; their values
are passed only to the process of that deployment, through an unnamed file.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from urllib.parse import urlsplit

import msgspec

from engines.application.child import Variables
from shared.packages.deployments import Environment, check_environment, check_values, is_secret_name
from shared.settings.limits import MAX_SECRET_BYTES
from shared.settings.load import to_environment
from shared.settings.tree import NodeSettings, Settings, SettingsError

SHARED_GROUPS = frozenset({"redis", "limits", "logs", "traces"})
GATEWAY_GROUPS = SHARED_GROUPS | {"gateway", "search", "deploy", "blobs"}
SEARCH_GROUPS = frozenset({"search", "limits", "logs"})
WORKER_GROUPS = SHARED_GROUPS | {"worker", "engine"}
#: Credentials of the hub, for workers that load models from it.
HUB_SECRETS = frozenset({"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN"})
#: Variables that every child inherits: system, terminal, proxies and certificates.
_NAMES = HUB_SECRETS.union(
    ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "VIRTUAL_ENV", "HOSTNAME"),
    ("LANG", "LANGUAGE", "TZ", "TERM", "COLORTERM", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"),
    ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
    ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    ("LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_LIBRARY_PATH", "TOKENIZERS_PARALLELISM"),
    ("CC", "CXX", "CPATH", "LIBRARY_PATH"),
)
#: Prefixes of variables that every child inherits: locale, folders, Python, devices and numeric libraries, tracing.
_PREFIXES = (
    *("LC_", "XDG_", "PYTHON", "HF_", "TRANSFORMERS_", "OTEL_", "COVERAGE_", "MALLOC_"),
    *("CUDA_", "NVIDIA_", "NCCL_", "CUBLAS_", "CUDNN_", "ROCR_", "HIP_", "HSA_", "GLOO_"),
    *("TORCH", "PYTORCH_", "ATEN_", "TRITON_", "OMP_", "MKL_", "KMP_", "GOMP_"),
    *("OPENBLAS_", "NUMEXPR_", "ONEDNN_", "DNNL_"),
)
#: Scheme of a bucket's URL -> prefix of the variables with its credentials, which only gateways inherit.
_STORE_PREFIXES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}


def child_environment(
    settings: Settings, groups: frozenset[str], secrets: frozenset[str] = frozenset()
) -> dict[str, str]:
    """The environment of a child: inherited variables without `secrets`, and its groups of the settings.

    A child reads no other source: `.env` and the file of `VLM_CONFIG` hold other processes' secrets.
    """
    stores = settings.deploy.store, settings.gateway.files, settings.blobs.store
    schemes = {urlsplit(url).scheme for url in stores}.intersection(_STORE_PREFIXES)
    prefixes = tuple(_STORE_PREFIXES[each] for each in schemes) if "blobs" in groups else ()
    inherited = plain_environment(secrets.union(settings.node.secrets), prefixes)
    return inherited | settings_environment(settings, groups)


def settings_environment(settings: Settings, groups: frozenset[str]) -> dict[str, str]:
    """The variables of these groups of the settings."""
    return to_environment({name: getattr(settings, name) for name in groups})


def plain_environment(
    secrets: frozenset[str] = frozenset(), prefixes: tuple[str, ...] = ()
) -> dict[str, str]:
    """The variables that any child inherits, and variables with one of `prefixes`; without `secrets`."""
    return {
        name: value
        for name, value in os.environ.items()
        if (name.upper() in _NAMES or name.startswith(_PREFIXES + prefixes)) and name not in secrets
    }


class SecretMissing(Exception):
    """A secret is not available on this node. The message has its name, never its value."""


class Secrets:
    """The secrets of this node. Files are read at each use, as they may change."""

    def __init__(self, settings: NodeSettings) -> None:
        """Raises: SettingsError."""
        self._folder = Path(settings.secrets_dir).expanduser() if settings.secrets_dir else None
        if self._folder is not None and not os.access(self._folder / ".", os.R_OK | os.X_OK):
            raise SettingsError(
                f"VLM_NODE__SECRETS_DIR: {self._folder} is not a directory that the node can read"
            )
        self._variables = settings.secrets

    @property
    def names(self) -> tuple[str, ...]:
        files: list[str] = []
        if self._folder is not None:
            with suppress(OSError):  # deleted meanwhile, or not readable: no secrets
                files = [name for name in os.listdir(self._folder) if self._has(name)]
        found = {name for name in self._variables if name in os.environ}
        return tuple(sorted(found.union(filter(is_secret_name, files))))

    def _has(self, name: str) -> bool:
        return self._folder is not None and os.path.isfile(self._folder / name)

    def read(self, environment: Environment) -> Variables:
        """The variables and secrets for a process with this environment. Raises: BadEnvironment, SecretMissing."""
        check_environment(environment)
        secrets = {name: self._read(secret) for name, secret in environment.secrets.items()}
        given = Variables(environment.variables, secrets)
        check_values(given.all)
        return given

    def _read(self, name: str) -> str:
        """The value of a secret: its file without a trailing line break, or its variable. Raises: SecretMissing."""
        if self._folder is not None and self._has(name):
            try:
                data = (self._folder / name).read_bytes()
            except OSError as error:
                reason = f"the file of the secret {name} cannot be read ({error.strerror})"
                raise SecretMissing(reason) from None
            data = data.removesuffix(b"\n").removesuffix(b"\r")
        elif name in self._variables and name in os.environ:
            data = os.fsencode(os.environ[name])
        else:
            raise SecretMissing(f"this node has no secret {name}")
        if len(data) > MAX_SECRET_BYTES:
            raise SecretMissing(
                f"the secret {name} has {len(data)} bytes; store at most {MAX_SECRET_BYTES}"
            )
        if b"\0" in data:
            raise SecretMissing(f"the secret {name} contains a NUL; store text without NUL")
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise SecretMissing(f"the secret {name} is not UTF-8; store UTF-8 text") from None


def hand_over(variables: Variables) -> int:
    """Write variables to an unnamed file; returns its descriptor, for a child to read once. Raises: OSError."""
    is_linux = sys.platform == "linux"
    with os.fdopen(os.memfd_create("variables"), "w+b") if is_linux else TemporaryFile() as file:
        file.write(msgspec.json.encode(variables))
        file.seek(0)
        return os.dup(file.fileno())
