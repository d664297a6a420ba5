"""The gateway process. Called by the command line with the whole settings; logging is set up already."""

import gc
import logging

from gateway.app import create_app
from gateway.auth import check_exposure
from gateway.server import create_server
from gateway.services import Services
from shared.settings import Settings


def run_gateway(settings: Settings) -> int:
    """Serve until a signal. Returns the exit code. Raises: SettingsError."""
    check_exposure(settings.gateway)
    for name in ("uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).setLevel(logging.WARNING)
    services = Services(settings)
    server = create_server(services, create_app(services))
    # What was imported lives as long as the process: collections need not look at it again.
    gc.collect()
    gc.freeze()
    try:
        server.run()
    except SystemExit as stop:  # uvicorn's way to say that it cannot listen
        return stop.code if isinstance(stop.code, int) else 1
    finally:
        services.afterwards.run()  # a second signal ends the loop before the services are stopped
    return 0
