"""Checks that an answer is correct and complete.

Called for every answer. A wrong answer is a failure like a refused request: a fast server that mixes up its
requests is not fast.
"""

import base64
from array import array
from hashlib import sha256, shake_128
from typing import Any

from loadtest.client import Answer
from loadtest.scenarios import Message, Question

SLOT_ID = 257  # after the 256 bytes and the end token
SYLLABLES = tuple(a + b for a, b in zip("bdfghjklmnprstvz", "aeiouaeiouaeioua", strict=True))


def mock_answer(messages: list[Message], usage: dict[str, Any], num_words: int) -> str:
    """The first words of the mock engine's greedy answer, by its published rule: a SHAKE-128 stream of prompt and images.

    The answer's usage has the number of image tokens.
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
    """The fault of an answer. Empty: none was found.

    `is_salted`: with an API key, image hashes depend on a secret of the server, so answers to images are not checked.
    """
    if answer.finish_reason not in ("stop", "length"):
        return f"the answer ended with {answer.finish_reason}"
    if answer.num_tokens > max_tokens:
        return "the answer is longer than was asked for"
    if answer.finish_reason == "length" and answer.num_tokens < max_tokens:
        return "the answer is cut"
    parts = (part for message in question.messages for part in message["content"])
    if model == MOCK and not (is_salted and any("image_url" in part for part in parts)):
        return _fault_of_mock(answer, question.messages)
    if question.expected is not None and answer.text.strip() != question.expected:
        return "the answer is wrong"
    return ""


def _fault_of_mock(answer: Answer, messages: list[Message]) -> str:
    num_words = answer.num_tokens - (answer.finish_reason == "stop")  # the end is a token, no word
    if answer.text != mock_answer(messages, answer.usage, num_words):
        return "the answer is wrong"
    return ""
