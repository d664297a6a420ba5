"""Sends one question on a free connection, checks that the answer is correct and complete, and reports a record.

A wrong answer counts as a failure, like a refused request. The closed loop and the open loop call this module from
many greenlets.
"""

import base64
import random
import time
from array import array
from collections.abc import Callable
from hashlib import sha256, shake_128
from typing import Any

from loadtest.albums import NUM_RUNS, create_album
from loadtest.client import Answer, AnswerError, ChatClient
from loadtest.record import Order, Record
from loadtest.scenarios import PROFILES, SCENARIOS, Message, Question, to_chat_body

SLOT_ID = 257  # id of image tokens, after the ids of the 256 bytes and the end token
SYLLABLES = tuple(a + b for a, b in zip("bdfghjklmnprstvz", "aeiouaeiouaeioua", strict=True))
#: The error of a request whose user was stopped before the answer.
CUT = "no answer before the end of the run"


def mock_answer(messages: list[Message], usage: dict[str, Any], num_words: int) -> str:
    """The first words of the mock engine's greedy answer: a SHAKE-128 stream of prompt and images, read as words.

    `usage`: the usage of the answer, which contains the number of image tokens.
    """
    images = [part for message in messages for part in _parts(message) if "image_url" in part]
    num_image_tokens = (usage.get("prompt_tokens_details") or {}).get("image_tokens", 0)
    num_slots = num_image_tokens // max(1, len(images))
    token_ids: list[int] = []
    hashes: list[tuple[int, str]] = []
    for message in messages:
        token_ids += f"{message['role']}: ".encode()
        for part in _parts(message):
            if "image_url" in part:
                data = base64.b64decode(part["image_url"]["url"].partition(",")[2])
                hashes.append((len(token_ids), sha256(data).hexdigest()))
                token_ids += [SLOT_ID] * num_slots
            else:
                token_ids += part["text"].encode()
        token_ids += b"\n"
    token_ids += b"assistant:"
    stream = shake_128(repr((None, len(token_ids), hashes)).encode())
    stream.update(array("q", token_ids))
    return " ".join(
        SYLLABLES[byte >> 4] + SYLLABLES[byte & 15] for byte in stream.digest(num_words)
    )


def _parts(message: Message) -> list[dict[str, Any]]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


MOCK = "mock"


def fault_of(
    answer: Answer, question: Question, model: str, max_tokens: int, is_salted: bool = False
) -> str:
    """The fault of an answer, or an empty string for a correct answer.

    `is_salted`: with an API key, image hashes depend on a secret of the server, so answers to images are not checked.
    """
    if answer.finish_reason not in ("stop", "length"):
        return f"the answer ended with {answer.finish_reason}"
    if answer.num_tokens > max_tokens:
        return "the answer has more tokens than max_tokens"
    if answer.finish_reason == "length" and answer.num_tokens < max_tokens:
        return "the answer has finish_reason length but fewer tokens than max_tokens"
    parts = (part for message in question.messages for part in message["content"])
    if model == MOCK and not (is_salted and any("image_url" in part for part in parts)):
        num_words = answer.num_tokens - (answer.finish_reason == "stop")  # without the end token
        is_right = answer.text == mock_answer(question.messages, answer.usage, num_words)
    else:
        is_right = question.expected in (None, answer.text.strip())
    return "" if is_right else "the answer is wrong"


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
        """Send a question and report its record. `intended_at`: when the question was due; None: now."""
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
    """The first chat model of a server. Raises: AnswerError."""
    try:
        with ChatClient(url, api_key) as client:
            models = client.models()
    except AnswerError as error:
        if str(error).startswith("status 401"):
            raise AnswerError(f"{url} requires a key: set --api-key or VLM_API_KEY") from error
        raise AnswerError(f"{url} does not list its models ({error}): is it running?") from error
    if not models:
        raise AnswerError(f"{url} has no chat model: start one")
    return models[0]
