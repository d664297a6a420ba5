"""A request body of text at the size limit: other requests are answered while the gateway reads it."""

import http.client
import threading
import time
from asyncio import gather, to_thread
from contextlib import closing

from shared.settings.limits import LimitSettings
from tests.factories_gateway import CHAT, RunningGateway
from tests.rounds import in_one_round

HEAD = b'{"model": "tiny", "messages": [{"role": "user", "content": "'
ESCAPE, TAIL = b"\\u00e9", b'"}]}'
TYPE = {"content-type": "application/json"}
LONGEST_S = 5.0  #: ten times the usual duration


def connect(gateway: RunningGateway) -> closing[http.client.HTTPConnection]:
    address = gateway.url.removeprefix("http://").rstrip("/")
    return closing(http.client.HTTPConnection(address, timeout=30))


def status_of(connection: http.client.HTTPConnection, *request) -> int:
    connection.request(*request)
    response = connection.getresponse()
    response.read()
    return response.status


@in_one_round
async def test_other_requests_are_answered_while_a_large_text_is_read(gateway):
    """The clients run in threads, so the measured time is that during which the gateway's event loop is blocked."""
    max_bytes = LimitSettings().max_body_bytes
    body = HEAD + ESCAPE * ((max_bytes - len(HEAD) - len(TAIL)) // len(ESCAPE)) + TAIL
    is_answered = threading.Event()

    def send_large() -> int:
        with connect(gateway) as connection:
            try:
                return status_of(connection, "POST", CHAT, body, TYPE)
            finally:
                is_answered.set()

    def ask_small() -> list[float]:
        waits_s: list[float] = []
        with connect(gateway) as connection:
            while not is_answered.is_set():
                started_at = time.monotonic()
                assert status_of(connection, "GET", "/v1/models") == 200
                waits_s.append(time.monotonic() - started_at)
        return waits_s

    waits_s, status = await gather(to_thread(ask_small), to_thread(send_large))
    assert status == 400
    assert max(waits_s) < LONGEST_S
