"""Default sampling parameters from `generation_config.json`, read as in vLLM: `do_sample` is ignored."""

import logging
from pathlib import Path

from msgspec.structs import asdict

from engines.base import EngineStartError, UnsupportedCheckpoint
from engines.packages.checkpoint_json import Fields, read_json
from shared.protocol import SamplingDefaults

_FILE = "generation_config.json"
_MAX_TOKENS = 2**31 - 1

logger = logging.getLogger(__name__)


def read_sampling_defaults(directory: Path, choice: str) -> SamplingDefaults:
    """Defaults for parameters that a request does not set.

    `choice`: `auto` for the checkpoint's file, `none`, or a folder with another file. Raises: EngineStartError if the
    folder has no such file.
    """
    if choice == "none":
        return SamplingDefaults()
    if choice != "auto":
        directory = Path(choice).expanduser()
        if not (directory / _FILE).is_file():
            raise EngineStartError(
                f"VLM_ENGINE__GENERATION_CONFIG: {directory} has no {_FILE}; "
                "name a folder that has one, auto or none"
            )
    fields = read_json(directory / _FILE)
    defaults = SamplingDefaults(
        temperature=_number(fields, "temperature", 0, 2),
        top_p=_number(fields, "top_p", 0, 1),
        top_k=_whole(fields, "top_k", 0, _MAX_TOKENS),
        min_p=_number(fields, "min_p", 0, 1),
        repetition_penalty=_number(fields, "repetition_penalty", 0.1, 10),
        max_tokens=_whole(fields, "max_new_tokens", 1, _MAX_TOKENS),
    )
    if given := [f"{name}={x}" for name, x in asdict(defaults).items() if x is not None]:
        logger.info(
            "%s: requests default to %s (VLM_ENGINE__GENERATION_CONFIG=none for OpenAI's defaults)",
            _FILE,
            ", ".join(given),
        )
    return defaults


def _number(fields: Fields, name: str, least: float, most: float) -> float | None:
    """A number within the limits of requests, else None."""
    try:
        return fields.number(name, above=least - 1e-9, at_most=most)
    except UnsupportedCheckpoint as problem:
        logger.warning("ignoring a default of generation_config.json: %s", problem)
        return None


def _whole(fields: Fields, name: str, least: int, most: int) -> int | None:
    try:
        return fields.whole(name, at_least=least, at_most=most)
    except UnsupportedCheckpoint as problem:
        logger.warning("ignoring a default of generation_config.json: %s", problem)
        return None
