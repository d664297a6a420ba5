"""Log lines as text or JSON, with the request id if there is one.

Configured once by the `main` of each process. Prompts, answers, keys and images are never logged.
"""

import json
import logging
import sys
import time
from contextvars import ContextVar

from shared.settings.tree import LogSettings

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def setup_logging(settings: LogSettings, process: str) -> None:
    """Send all log records to stderr in the configured form. `process`: name of this process in each line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter(process) if settings.format == "json" else TextFormatter(process)
    )
    logging.basicConfig(level=(settings.level or "info").upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)  # clients can trigger warnings: format them as log lines
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.access").setLevel(logging.WARNING)


def _extra(record: logging.LogRecord) -> dict[str, object]:
    fields = {key: value for key, value in vars(record).items() if key not in _STANDARD}
    current = request_id.get()
    if current is not None:
        fields.setdefault("request_id", current)
    return fields


class JsonFormatter(logging.Formatter):
    """One JSON object per line; `extra=` fields become keys."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))  # noqa: TID251
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self.process,
            "logger": record.name,
            "message": record.getMessage(),
            **_extra(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """A line of text: time, level, process, message, then `key=value` of the extra fields."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))  # noqa: TID251
        fields = "".join(f" {key}={value}" for key, value in _extra(record).items())
        # Escape line breaks: a message must not forge another line.
        message = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        line = f"{clock} {record.levelname.lower():7} {self.process:8} {message}{fields}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line
