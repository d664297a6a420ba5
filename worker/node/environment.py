"""The environment of a node's child processes: inherited variables by allow-list, and each child's settings."""

import os
from urllib.parse import urlsplit

from shared.settings.load import to_environment
from shared.settings.tree import Settings

SHARED_GROUPS = frozenset({"redis", "limits", "logs", "traces"})
GATEWAY_GROUPS = SHARED_GROUPS | {"gateway", "search", "deploy", "blobs"}
SEARCH_GROUPS = frozenset({"search", "limits", "logs"})
WORKER_GROUPS = SHARED_GROUPS | {"worker", "engine"}
#: Credentials of the hub, for workers that load models from it.
HUB_SECRETS = frozenset({"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN"})
#: Inherited by every child: the system, the terminal, proxies and certificates.
_NAMES = HUB_SECRETS.union(
    ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "VIRTUAL_ENV", "HOSTNAME"),
    ("LANG", "LANGUAGE", "TZ", "TERM", "COLORTERM", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"),
    ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
    ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    ("LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_LIBRARY_PATH", "TOKENIZERS_PARALLELISM"),
    ("CC", "CXX", "CPATH", "LIBRARY_PATH"),
)
#: Inherited by every child, by prefix: locale, folders, Python, devices and numeric libraries, tracing.
_PREFIXES = (
    *("LC_", "XDG_", "PYTHON", "HF_", "TRANSFORMERS_", "OTEL_", "COVERAGE_", "MALLOC_"),
    *("CUDA_", "NVIDIA_", "NCCL_", "CUBLAS_", "CUDNN_", "ROCR_", "HIP_", "HSA_", "GLOO_"),
    *("TORCH", "PYTORCH_", "ATEN_", "TRITON_", "OMP_", "MKL_", "KMP_", "GOMP_"),
    *("OPENBLAS_", "NUMEXPR_", "ONEDNN_", "DNNL_"),
)
#: Credentials of a bucket, for the process that opens the package store, by the URL's scheme.
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
    """The inherited variables of any child, without `secrets`; with those of `prefixes` too."""
    return {
        name: value
        for name, value in os.environ.items()
        if (name.upper() in _NAMES or name.startswith(_PREFIXES + prefixes)) and name not in secrets
    }
