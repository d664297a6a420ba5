"""Locust users that ask questions about text and images.

    locust -f loadtest/locustfile.py --host http://127.0.0.1:8000

This command opens Locust's own page. `vlm loadtest` runs the same users without it. Each kind of question has separate
entries: E2E and, for streams, TTFT (first text, not the role), TPOT and ITL.
"""

import random
from itertools import count
from typing import Any, ClassVar

import gevent
from locust import User, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.exception import StopUser

from loadtest.asking import CUT, Asker, first_model
from loadtest.client import AnswerError
from loadtest.record import LATENCIES, Order, Plan, Record, Target, Workload
from loadtest.result import kind_of
from loadtest.scenarios import PROFILES


class ChatUser(User):
    """Sends a question of the profile, reads the whole answer, pauses, and repeats."""

    asker: ClassVar[Asker | None] = None  #: shared by all users; created when the test starts
    numbers: ClassVar[count] = count()
    is_leaving = False

    def on_start(self) -> None:
        """Create the user's random generator. Raises: StopUser if the server cannot be reached."""
        if ChatUser.asker is None:
            raise StopUser
        self.draw = random.Random(f"{ChatUser.asker.order.workload.seed} {next(self.numbers)}")

    def wait_time(self) -> float:
        """The user's pause: uniform, with the configured mean."""
        assert ChatUser.asker is not None
        return self.draw.uniform(0.0, 2 * ChatUser.asker.order.workload.think_s)

    def stop(self, force: bool = False) -> bool:
        """Overrides `User.stop`: a user whose pause ends before it is killed sends no further question."""
        self.is_leaving = True
        return super().stop(force)

    @task
    def ask_next(self) -> None:
        """Send one question and read the answer. Raises: StopUser at the end of the run."""
        if self.is_leaving:
            raise StopUser
        asker = ChatUser.asker
        assert asker is not None
        asker.ask(asker.choose_scenario(self.draw), self.draw)


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    """Add the options of these users to Locust's command line and page."""
    usual = Workload()
    parser.add_argument("--mix", choices=list(PROFILES), default=usual.profile, help="Questions.")
    for name, default, text in (
        ("--seed", usual.seed, "Seed of all questions."),
        ("--max-tokens", usual.max_tokens, "Maximum tokens of an answer."),
        ("--image-bytes", usual.image_bytes, "Bytes of an image."),
        ("--stream-ratio", usual.stream_ratio, "Fraction of streamed answers."),
        ("--think-time", usual.think_s, "Mean pause of a user, seconds."),
    ):
        parser.add_argument(name, type=type(default), default=default, help=text)
    parser.add_argument("--model", default="", help="Model to ask; empty: the server's first.")
    parser.add_argument(
        "--api-key",
        default="",
        env_var="VLM_API_KEY",
        include_in_web_ui=False,
        help="API key, if the server requires one.",
    )


@events.test_start.add_listener
def create_asker(environment: Environment, **_: Any) -> None:
    """Create the state that users share. An unreachable server is reported as a failed request."""
    options, url = environment.parsed_options, environment.host or ""
    assert options is not None
    names = ("seed", "max_tokens", "image_bytes", "stream_ratio")
    given = {name: getattr(options, name) for name in names}
    workload = Workload(profile=options.mix, think_s=options.think_time, **given)
    ChatUser.asker = None
    try:
        model = options.model or first_model(url, options.api_key)
    except (AnswerError, ValueError) as error:
        fire(environment, "GET", "models", 0.0, error=error)
        if environment.web_ui is None and environment.runner is not None:
            gevent.spawn(environment.runner.quit)  # deferred, because the runner is still starting
        return
    target = Target(url=url, model=model, api_key=options.api_key)
    order = Order(target=target, workload=workload, plan=Plan(warmup_s=0.0))
    ChatUser.asker = Asker(order, lambda record: report_to_locust(environment, record))


def report_to_locust(environment: Environment, record: Record) -> None:
    """Report a request's latencies or its error to Locust, unless the end of the run interrupted it."""
    if record.error == CUT:
        return
    name = kind_of(record)
    if record.error:
        fire(environment, "E2E", name, record.e2e_s, error=AnswerError(record.error))
        return
    for latency in LATENCIES:
        for value_s in record.values_s(latency):
            fire(environment, latency, name, value_s)


def fire(
    environment: Environment, kind: str, name: str, value_s: float, error: Exception | None = None
) -> None:
    """Report one entry. Locust expects milliseconds."""
    environment.events.request.fire(
        request_type=kind,
        name=name,
        response_time=value_s * 1000,
        response_length=0,
        exception=error,
        context={},
    )
