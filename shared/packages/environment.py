"""Environment variables of a deployment. A record has the names of secrets; nodes have their values.

Decoding a record does not validate it. Variables are validated when a client sends them, and before use.
"""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase

import msgspec

from shared.packages.manifest import digest_of
from shared.settings.limits import MAX_ENVIRONMENT_BYTES, MAX_VARIABLES, MAX_VARIABLES_BYTES

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
#: The name of a secret: a file name, or the name of an environment variable of the node.
_SECRET = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,62}")
#: Prefixes of the API keys of well-known services, and generated identifiers such as UUIDs.
_KEY = re.compile(
    r"(?:sk|pk|rk|hf|gh[a-z]|github_pat|glpat|npm|xox[a-z])[_-][\w.-]*[A-Za-z0-9]{16}"
    r"|AKIA[A-Z0-9]{16}|AIza|eyJ|[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
)
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|[0-9]+")
#: At least this many letters and digits in a row look random if their words (runs of one kind) are shorter on average.
_LEAST_RANDOM, _LONGEST_RANDOM_WORD = 16, 3
#: Variables that applications may not set, by the reason; a trailing * matches any suffix. The process that
#: sets up the sandbox (bubblewrap, Python, `launch.py`) already has the application's variables, so they must
#: not change it. Variables of the application's own interpreter (`NODE_OPTIONS`) are allowed, and so is `ENV`,
#: which only interactive shells read.
_RESERVED = {
    "the node sets it": ("PATH", "HOME", "TMPDIR", "CUDA_VISIBLE_DEVICES", "VLM_*"),
    "the dynamic loader or the C library reads it outside of the sandbox": (
        *("LD_*", "DYLD_*", "GLIBC_*", "GCONV_PATH", "LOCPATH", "NLSPATH"),
    ),
    "Python reads it outside of the sandbox": ("PYTHON*", "__PYVENV_LAUNCHER__"),
    "a shell that starts bubblewrap or Python reads it outside of the sandbox": (
        *("BASH_*", "SHELLOPTS", "BASHOPTS", "PS4"),
    ),
}


class BadEnvironment(ValueError):
    """An invalid variable or secret; the message names it, without its value."""


class Environment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Variables of an application's process."""

    variables: dict[str, str] = {}
    secrets: dict[str, str] = {}  #: by variable, the secret's name on the node


def check_environment(environment: Environment) -> None:
    """Raises: BadEnvironment for variables that are not allowed."""
    variables, secrets = environment.variables, environment.secrets
    if (count := len(variables) + len(secrets)) > MAX_VARIABLES:
        raise BadEnvironment(
            f"variables, secrets: {count} of at most {MAX_VARIABLES}; move some into files of the package"
        )
    for group, names in (("variables", variables), ("secrets", secrets)):
        for name in names:
            _check_name(group, name)
    for name, value in variables.items():
        if "\0" in value or value.encode(errors="ignore").decode() != value:
            raise BadEnvironment(f"variables.{name}: send UTF-8 text without NUL")
        if name in secrets:
            raise BadEnvironment(f"secrets.{name}: variables has the same name; remove one")
    for name, secret in secrets.items():
        if not is_secret_name(secret):
            where = "secrets" if name == secret or is_random(name) else f"secrets.{name}"
            raise BadEnvironment(
                f"{where}: invalid name of a secret (not shown, because it may be the secret's value); "
                "put the value into a file in VLM_NODE__SECRETS_DIR, and send the file's name: 1 to 63 "
                "letters, digits, dots, dashes and underscores, no dot or dash first, and nothing that "
                "reads like a key"
            )
    _check_size(variables, MAX_VARIABLES_BYTES, "variables: they", "use files of the package")


def check_values(values: Mapping[str, str]) -> None:
    """Check all values of a process, secrets included. Raises: BadEnvironment."""
    whose = "secrets: with the variables they"
    _check_size(values, MAX_ENVIRONMENT_BYTES, whose, "deploy with fewer or shorter ones")


def _check_size(values: Mapping[str, str], most: int, whose: str, advice: str) -> None:
    size = sum(len(name) + len(value.encode()) for name, value in values.items())
    if size > most:
        raise BadEnvironment(f"{whose} have {size} bytes of at most {most}; {advice}")


def is_secret_name(text: str) -> bool:
    """Whether the name of a secret is valid. A name that looks like a key is invalid."""
    return _SECRET.fullmatch(text) is not None and not is_random(text)


def is_random(text: str) -> bool:
    """Whether a text looks like a random key or token."""
    rows = re.split(r"[^A-Za-z0-9]", text)
    return _KEY.match(text) is not None or any(
        len(row) >= _LEAST_RANDOM and len(row) < _LONGEST_RANDOM_WORD * len(_WORD.findall(row))
        for row in rows
    )


def why_reserved(name: str) -> str:
    """The reason why a variable name is reserved; empty if it is not."""
    for reason, patterns in _RESERVED.items():
        if any(fnmatchcase(name.upper(), pattern) for pattern in patterns):
            return reason
    return ""


def _check_name(group: str, name: str) -> None:
    if not _VARIABLE.fullmatch(name):
        raise BadEnvironment(
            f"{group}: name each by 1 to 128 letters, digits and underscores, no digit first"
        )
    if reason := why_reserved(name):
        raise BadEnvironment(f"{group}.{name}: {reason}; use another name")


def version_digest(package: str, environment: Environment) -> str:
    """The digest of a package and its environment; without variables, the digest of the package."""
    if environment == Environment():
        return package
    return digest_of(msgspec.json.encode((package, environment), order="sorted"))
