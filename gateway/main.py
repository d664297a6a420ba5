"""The gateway process.

Called by the command line with all settings, after logging is configured.
"""

import asyncio
import logging
import resource

from gateway.app import create_app
from gateway.http.auth import check_exposure
from gateway.http.server import RESERVED_FILES
from gateway.services import Services
from shared.process import end_startup
from shared.queue.shards import check_shards
from shared.settings.tree import Settings

logger = logging.getLogger(__name__)


def raise_file_limit(num_needed: int) -> None:
    """Raise the limit on file descriptors, and warn if it is less than needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    except (ValueError, OSError):  # some systems allow less than they report
        pass
    if soft != resource.RLIM_INFINITY and soft < num_needed:
        logger.warning(
            "%d file descriptors are too few for limits.max_open_requests: raise the limit "
            "(ulimit -n, LimitNOFILE) to %d, or lower limits.max_open_requests; connections beyond "
            "it are refused",
            soft,
            num_needed,
        )


def run_gateway(settings: Settings) -> int:
    """Serve until a signal. Returns the exit code. Raises: SettingsError."""
    check_exposure(settings.gateway)
    raise_file_limit(settings.limits.max_open_requests + RESERVED_FILES)
    for name in ("uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).setLevel(logging.WARNING)
    asyncio.run(check_shards(settings.redis))
    services = Services(settings)
    server = services.create_server(create_app(services))
    end_startup()
    try:
        server.run()
    except SystemExit as stop:  # uvicorn exits if it cannot listen
        return stop.code if isinstance(stop.code, int) else 1
    return 0
