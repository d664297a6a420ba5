"""Variables of a deployment's instances. Of secrets it holds the names; the values are on the nodes."""

import re

import msgspec

from shared.packages.manifest import digest_of

MAX_VARIABLES = 100
MAX_BYTES = 32 * 1024  #: of the names and values of all variables
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
#: A secret's name: of a file, or of a node's variable.
SECRET = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
#: What the loader, Python and the node itself read, before the application's limits and sandbox are there.
_RESERVED = frozenset({"PATH", "HOME", "TMPDIR", "CUDA_VISIBLE_DEVICES", "GCONV_PATH", "LOCPATH"})
_RESERVED_PREFIXES = ("VLM_", "LD_", "PYTHON", "GLIBC_")


class Environment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the process of an application gets beside its package."""

    variables: dict[str, str] = {}
    secrets: dict[str, str] = {}  #: by variable, the secret's name on the node

    def __post_init__(self) -> None:
        """Raises: ValueError."""
        if len(self.variables) + len(self.secrets) > MAX_VARIABLES:
            raise ValueError(f"at most {MAX_VARIABLES} variables and secrets may be")
        for group, names in (("variables", self.variables), ("secrets", self.secrets)):
            for name in names:
                _check_name(group, name)
        for name, value in self.variables.items():
            if "\0" in value or not _is_utf8(value):
                raise ValueError(f"variables.{name}: send UTF-8 text without NUL")
            if name in self.secrets:
                raise ValueError(f"secrets.{name}: there is a variable of this name; leave one out")
        for name, secret in self.secrets.items():
            if not SECRET.fullmatch(secret):
                raise ValueError(
                    f"secrets.{name}: name a secret by 1 to 128 letters, digits, dots, dashes and "
                    "underscores, no dot or dash first"
                )
        size = sum(len(name) + len(value.encode()) for name, value in self.variables.items())
        if size > MAX_BYTES:
            raise ValueError(
                f"variables: they have {size} bytes of at most {MAX_BYTES}; put files into the package"
            )


def is_reserved(name: str) -> bool:
    """Whether a variable of that name is the node's own."""
    upper = name.upper()
    return upper in _RESERVED or upper.startswith(_RESERVED_PREFIXES)


def _check_name(group: str, name: str) -> None:
    if not _VARIABLE.fullmatch(name):
        raise ValueError(
            f"{group}: name each by 1 to 128 letters, digits and underscores, no digit first"
        )
    if is_reserved(name):
        raise ValueError(
            f"{group}.{name}: the node sets it; {', '.join(sorted(_RESERVED))} and names that begin "
            f"with {', '.join(_RESERVED_PREFIXES)} are reserved"
        )


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def version_digest(package: str, environment: Environment) -> str:
    """The identity of a package in an environment: without one, the package's own digest."""
    if environment == Environment():
        return package
    return digest_of(msgspec.json.encode((package, environment), order="sorted"))
