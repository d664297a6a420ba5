"""Default sampling parameters from `generation_config.json`, read as in vLLM: `do_sample` is ignored."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from engines.base import EngineStartError, UnsupportedCheckpoint
from engines.packages.checkpoint_json import read_json
from shared.protocol import SamplingDefaults

_FILE = "generation_config.json"
_MAX_TOKENS = 2**31 - 1
_NEAR = 1e-9  #: makes an exclusive lower limit inclusive

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
                "set it to a folder with this file, to auto or to none"
            )
    fields = read_json(directory / _FILE)
    defaults = SamplingDefaults(
        temperature=_try(fields.number, "temperature", above=-_NEAR, at_most=2),
        top_p=_try(fields.number, "top_p", above=-_NEAR, at_most=1),
        top_k=_try(fields.whole, "top_k", at_least=0, at_most=_MAX_TOKENS),
        min_p=_try(fields.number, "min_p", above=-_NEAR, at_most=1),
        repetition_penalty=_try(fields.number, "repetition_penalty", above=0.1 - _NEAR, at_most=10),
        max_tokens=_try(fields.whole, "max_new_tokens", at_least=1, at_most=_MAX_TOKENS),
    )
    if given := [f"{name}={x}" for name, x in asdict(defaults).items() if x is not None]:
        logger.info(
            "%s: requests default to %s (VLM_ENGINE__GENERATION_CONFIG=none for OpenAI's defaults)",
            _FILE,
            ", ".join(given),
        )
    return defaults


def _try(read: Callable[..., Any], name: str, **limits: float) -> Any:
    """A number within the limits of requests, else None."""
    try:
        return read(name, **limits)
    except UnsupportedCheckpoint as problem:
        logger.warning("ignoring a default of generation_config.json: %s", problem)
        return None
