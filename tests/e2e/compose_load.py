"""Clients of the compose stack, which ask without a pause and keep what became of each request."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import httpx

from loadtest.albums import NumberedUrls, noise_jpeg
from loadtest.client import ChatClient
from loadtest.scenarios import image_part, text_part, to_chat_body, user_message

NUM_CLIENTS = 8
NUM_TOKENS = 40


def question() -> list[dict[str, Any]]:
    return [image_part(NumberedUrls(noise_jpeg(4_000)).url(0)), text_part("What is it?")]


def ask(client: ChatClient, model: str, num_tokens: int = 8, *, stream: bool = True) -> int:
    """The length of an answer."""
    messages = [user_message(question())]
    body = {**to_chat_body(model, messages, num_tokens, stream), "ignore_eos": True}
    return client.ask(body).num_tokens


def num_tokens(client: httpx.Client, url: str) -> int | None:
    """The length of a streamed answer; None: refused, or the connection broke before anything of it came."""
    messages = [user_message(question())]
    body = to_chat_body("mock", messages, NUM_TOKENS, stream=True) | {"ignore_eos": True}
    request = client.build_request("POST", f"{url}/v1/chat/completions", json=body)
    try:
        response = client.send(request, stream=True)
    except (httpx.NetworkError, httpx.RemoteProtocolError):
        return None
    with closing(response):
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            return None
        response.raise_for_status()
        *_, last, done = [line for line in response.iter_lines() if line]
    if done != "data: [DONE]":
        raise ValueError(f"the stream ended with {done}")
    return json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"]


class Load:
    """Clients that ask without a pause, and what became of their requests.

    What one gateway refuses goes to the next. Nothing is asked again of which a part of the answer has come.
    """

    def __init__(self, urls: list[str]) -> None:
        self.num_answers = self.num_refused = 0
        self.failures: list[str] = []
        self._urls = urls
        self._stop = threading.Event()
        self._lock = threading.Lock()

    def _run(self, number: int) -> None:
        order = self._urls[number % len(self._urls) :] + self._urls[: number % len(self._urls)]
        with httpx.Client(timeout=60, trust_env=False) as client:
            while not self._stop.is_set():
                failure = self._ask_in_turn(client, order)
                with self._lock:
                    self.num_answers += not failure
                    self.failures += [failure] if failure else []

    def _ask_in_turn(self, client: httpx.Client, urls: list[str]) -> str:
        """Each gateway once, until one takes it; returns what failed."""
        for url in urls:
            try:
                tokens = num_tokens(client, url)
            except (httpx.HTTPError, ValueError, LookupError) as error:
                return repr(error)
            if tokens is not None:
                return "" if tokens == NUM_TOKENS else f"{tokens} tokens"
            with self._lock:
                self.num_refused += 1
        return "refused by all"

    @contextmanager
    def running(self) -> Iterator[None]:
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            clients = [pool.submit(self._run, number) for number in range(NUM_CLIENTS)]
            try:
                yield
            finally:
                self._stop.set()
            for client in clients:
                client.result()

    def wait_for_answers(self, count: int) -> None:
        """Return when so many more have come."""
        wanted = self.num_answers + count
        give_up_at = time.monotonic() + 60
        while self.num_answers < wanted and not self.failures:
            assert time.monotonic() < give_up_at
            time.sleep(0.05)
