"""Sends one question on a free connection, checks the answer, and reports a record.

Used by the users of the closed loop and by the open loop, from many greenlets.
"""

import random
import time
from collections.abc import Callable

from loadtest.albums import NUM_RUNS, create_album
from loadtest.checks import fault_of
from loadtest.client import Answer, AnswerError, ChatClient
from loadtest.record import Order, Record
from loadtest.scenarios import PROFILES, SCENARIOS, Question, to_chat_body

#: The error of a request whose user was stopped before the answer.
CUT = "no answer before the end of the run"


class Asker:
    """The questions of one run. Its clock is 0 at the end of the warm-up."""

    def __init__(self, order: Order, report: Callable[[Record], None]) -> None:
        self.order = order
        self._report = report
        self._run = random.SystemRandom().randrange(NUM_RUNS)
        album = create_album(order.target.model, self._run, order.workload.image_bytes)
        self._scenarios = {name: create(album) for name, create in SCENARIOS.items()}
        self._idle: list[ChatClient] = []
        self._zero_at = time.perf_counter() + order.plan.warmup_s

    def choose_scenario(self, draw: random.Random) -> str:
        weights = PROFILES[self.order.workload.profile]
        return draw.choices(list(weights), list(weights.values()))[0]

    def now(self) -> float:
        return time.perf_counter() - self._zero_at

    def ask(self, scenario: str, draw: random.Random, intended_at: float | None = None) -> None:
        """Send a question and report. `intended_at`: when it was due; None: now."""
        question = self._scenarios[scenario](draw)
        is_streamed = draw.random() < self.order.workload.stream_ratio
        now = self.now()
        record = Record(scenario, now, now, now, is_streamed)
        target, max_tokens = self.order.target, self.order.workload.max_tokens
        body = to_chat_body(target.model, question.messages, max_tokens, is_streamed)
        if self._idle:
            client = self._idle.pop()
        else:
            client = ChatClient(target.url, target.api_key, target.timeout_s)
        try:
            self._note_answer(record, question, client.ask(body))
            self._idle.append(client)
        except AnswerError as error:
            record.error, record.ended_at = str(error), self.now()
            self._idle.append(client)
        except BaseException:  # the user is stopped at the end of the run
            record.error, record.ended_at = CUT, self.now()
            client.close()
            raise
        finally:
            record.intended_at = record.sent_at if intended_at is None else intended_at
            self._report(record)

    def _note_answer(self, record: Record, question: Question, answer: Answer) -> None:
        record.sent_at = answer.sent_at - self._zero_at
        record.ended_at = record.sent_at + answer.e2e_s
        if answer.ttft_s is not None:
            record.first_text_at = record.sent_at + answer.ttft_s
        record.itl_s = answer.itl_s
        record.stages_s = answer.stages_s
        record.num_output_tokens = answer.num_tokens
        record.num_prompt_tokens = answer.usage["prompt_tokens"]
        details = answer.usage.get("prompt_tokens_details") or {}
        record.num_cached_tokens = details.get("cached_tokens") or 0
        target, max_tokens = self.order.target, self.order.workload.max_tokens
        record.error = fault_of(answer, question, target.model, max_tokens, bool(target.api_key))
        if not record.error:
            question.on_answer(answer.text)


def first_model(url: str, api_key: str) -> str:
    """The first model of a server. Raises: AnswerError."""
    try:
        with ChatClient(url, api_key) as client:
            models = client.models()
    except AnswerError as error:
        if str(error).startswith("status 401"):
            raise AnswerError(
                f"{url} requires an API key: set it with --api-key or VLM_API_KEY"
            ) from error
        raise AnswerError(f"{url} does not list its models ({error}): is it running?") from error
    if not models:
        raise AnswerError(f"{url} has no chat model: start one")
    return models[0]
