"""Reads untrusted JSON files of a checkpoint, limited in size and depth, with types and limits of each field.

Errors are `UnsupportedCheckpoint`s that name file and field.
"""

import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.base import UnsupportedCheckpoint

MAX_FILE_BYTES = 128 * 1024 * 1024  # the largest known tokenizer.json has 33 MB

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80


def shown(value: Any) -> str:
    """A short representation of any value for messages."""
    return _repr.repr(value)


def one_line(error: BaseException | str) -> str:
    """An error's message on one line, at most 300 characters."""
    return " ".join(str(error).split())[:300]


def name_some(names: list[str], most: int) -> str:
    """The first `most` names, and the number of further names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def read_json(file: Path) -> "Fields":
    """The object in a file, empty if there is no file. Raises: UnsupportedCheckpoint."""
    content = load_json(file, {})
    if not isinstance(content, dict):
        raise UnsupportedCheckpoint(f"{file.name} is not a JSON object")
    return Fields(file.name, content)


def load_json(file: Path, default: Any) -> Any:
    """The content of a file, `default` if there is none. Raises: UnsupportedCheckpoint."""
    if not file.is_file():
        return default
    try:
        return json.loads(load_text(file))
    except RecursionError:
        raise UnsupportedCheckpoint(f"{file.name} is nested too deeply") from None
    except ValueError as error:
        raise UnsupportedCheckpoint(f"{file.name} is not JSON: {error}") from None


def load_text(file: Path) -> str:
    """The content of a file. Raises: UnsupportedCheckpoint."""
    if file.stat().st_size > MAX_FILE_BYTES:
        raise UnsupportedCheckpoint(f"{file.name} is larger than {MAX_FILE_BYTES} bytes")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UnsupportedCheckpoint(f"{file.name} is not UTF-8") from None


def quantization_section(config: "Fields") -> "Fields":
    """The `quantization_config` of a `config.json` or of its `text_config`, empty if absent."""
    section = config.section("quantization_config")
    return (
        section if section.values else config.section("text_config").section("quantization_config")
    )


@dataclass(frozen=True, slots=True)
class Fields:
    """An object of a JSON file. An absent field is null. Methods raise UnsupportedCheckpoint for an invalid field."""

    file: str
    values: Mapping[str, Any]
    path: str = ""  #: path of the object in the file, with a trailing dot

    def refuse(self, name: str, why: str) -> UnsupportedCheckpoint:
        """The error of a field; `why` continues the sentence."""
        return UnsupportedCheckpoint(f"{self.file}: {self.path}{name} {why}")

    def get(self, name: str, default: Any = None) -> Any:
        """The value without a check."""
        value = self.values.get(name)
        return default if value is None else value

    def section(self, name: str) -> "Fields":
        """A nested object, empty if absent."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise self.refuse(name, f"is {shown(value)}, not an object")
        return Fields(self.file, value, f"{self.path}{name}.")

    def whole(self, name: str, default: Any = None, *, at_least: int = 1, at_most: int) -> Any:
        value = self.get(name, default)
        if value is not None:
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if not is_whole or not at_least <= value <= at_most:
                limits = f"from {at_least} to {at_most}"
                raise self.refuse(name, f"is {shown(value)}, not an integer {limits}")
        return value

    def number(self, name: str, default: Any = None, *, above: float, at_most: float) -> Any:
        """A finite number within limits, as a float."""
        value = self.get(name, default)
        return None if value is None else self.check_number(name, value, above, at_most)

    def check_number(self, name: str, value: Any, above: float, at_most: float) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not above < value <= at_most:
            limits = f"above {above:g} and up to {at_most:g}"
            raise self.refuse(name, f"is {shown(value)}, not a number {limits}")
        return float(value)

    def flag(self, name: str, default: Any = None) -> Any:
        value = self.get(name, default)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(name, f"is {shown(value)}, neither true nor false")
        return value

    def one_of(self, name: str, known: tuple[str, ...], default: Any = None) -> Any:
        value = self.get(name, default)
        if value is not None and value not in known:
            raise self.refuse(name, f"{shown(value)} cannot be run; known: {', '.join(known)}")
        return value
