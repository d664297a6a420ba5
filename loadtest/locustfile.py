"""Locust users who ask about text, new pictures and one repeated picture; whole and streamed.

    locust -f loadtest/locustfile.py --headless -u 8 -t 30s --host http://127.0.0.1:8000

Each scenario has entries of its own: E2E, and for streams TTFT (first text, not the role) and ITL (per
token). Locust rounds what it shows; with `--samples FILE` every single value is written down.
"""

import json
import random
import time
from itertools import count
from typing import Any, ClassVar, TextIO

from locust import User, between, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.exception import StopUser

from loadtest.client import Answer, AnswerError, ChatClient
from loadtest.scenarios import Picture, RepeatedPicture, Scenario, Text, to_body

PICTURE_SEED = 7
user_numbers = count()


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    """Options of these users, beside Locust's own."""
    parser.add_argument("--seed", type=int, default=0, help="Seed of all questions and pictures.")
    parser.add_argument("--max-tokens", type=int, default=16, help="Output tokens of an answer.")
    parser.add_argument("--picture-bytes", type=int, default=60_000, help="Size of a picture.")
    parser.add_argument("--model", default="", help="Model to ask; empty: the server's first.")
    parser.add_argument("--api-key", default="", env_var="OPENAI_API_KEY", help="API key.")
    parser.add_argument(
        "--samples", default="", help="File for every measured value, JSON by line."
    )


class Samples:
    """Every measured value, and at the end how long it took, written to a file if one is named."""

    file: ClassVar[TextIO | None] = None
    started_at: ClassVar[float] = 0.0

    @classmethod
    def write(cls, scenario: str, metric: str, values_s: list[float]) -> None:
        """Write down values. Units: seconds."""
        if cls.file is not None and values_s:
            cls.file.write(json.dumps([scenario, metric, values_s]) + "\n")


@events.spawning_complete.add_listener
def start_clock(**_: Any) -> None:
    """All users are there."""
    Samples.started_at = time.perf_counter()


@events.test_start.add_listener
def open_samples(environment: Environment, **_: Any) -> None:
    """Begin the file of samples."""
    path = environment.parsed_options and environment.parsed_options.samples
    Samples.file = open(path, "w") if path else None  # noqa: SIM115 - closed by close_samples


@events.test_stop.add_listener
def close_samples(**_: Any) -> None:
    """End the file of samples."""
    Samples.write("", "run", [time.perf_counter() - Samples.started_at])
    if Samples.file is not None:
        Samples.file.close()
        Samples.file = None


class ChatUser(User):
    """Asks, reads the answer to its end, waits a little, asks again."""

    abstract = True
    wait_time = between(0.0, 0.1)
    scenario: Scenario
    is_streamed = False

    def on_start(self) -> None:
        """Connect, and learn the model's name."""
        options = self.environment.parsed_options
        assert options is not None
        assert self.host is not None
        self.options = options
        self.draw = random.Random(f"{options.seed} {next(user_numbers)}")
        self.scenario = self.create_scenario()
        self.chat = ChatClient(self.host, options.api_key)
        try:
            self.model = options.model or self.chat.models()[0]
        except (AnswerError, IndexError) as error:
            self.report("GET", "models", 0.0, error=error)
            raise StopUser from error

    def on_stop(self) -> None:
        """Disconnect."""
        self.chat.close()

    def create_scenario(self) -> Scenario:
        """What this user asks."""
        raise NotImplementedError

    @task
    def ask_next(self) -> None:
        """One question; its answer comes in one piece and as it is made, in turns."""
        self.is_streamed = not self.is_streamed
        self.ask(f"{self.scenario.name}, {'streamed' if self.is_streamed else 'whole'}")

    def ask(self, name: str) -> None:
        """Ask one question; tell Locust of each latency, or of the fault."""
        content = self.scenario.content(self.draw)
        body = to_body(self.model, content, self.options.max_tokens, self.is_streamed)
        try:
            answer = self.chat.ask(body)
        except AnswerError as error:
            self.report("E2E", name, 0.0, error=error)
            return
        self.report_answer(name, answer)

    def report_answer(self, name: str, answer: Answer) -> None:
        """One E2E, and for a stream one TTFT and the ITL of every token."""
        latencies = {
            "E2E": [answer.e2e_s],
            "TTFT": [] if answer.ttft_s is None else [answer.ttft_s],
            "ITL": answer.itl_s,
        }
        for metric, values_s in latencies.items():
            Samples.write(name, metric, values_s)
            for value_s in values_s:
                self.report(metric, name, value_s, num_chars=len(answer.text))

    def report(
        self,
        metric: str,
        name: str,
        value_s: float,
        num_chars: int = 0,
        error: Exception | None = None,
    ) -> None:
        """Tell Locust. Its times are milliseconds."""
        self.environment.events.request.fire(
            request_type=metric,
            name=name,
            response_time=value_s * 1000,
            response_length=num_chars if metric == "E2E" else 0,
            exception=error,
            context={},
        )


class TextUser(ChatUser):
    """Text alone."""

    def create_scenario(self) -> Scenario:
        """Sentences."""
        return Text()


class PictureUser(ChatUser):
    """A new picture with every question."""

    def create_scenario(self) -> Scenario:
        """New pictures."""
        return Picture(self.options.picture_bytes, PICTURE_SEED)


class RepeatedPictureUser(ChatUser):
    """Many questions about the one picture."""

    def create_scenario(self) -> Scenario:
        """The picture."""
        return RepeatedPicture(self.options.picture_bytes, PICTURE_SEED + 1)
