"""What the users ask: bodies of chat requests, the same for the same seed.

Called by the Locust users and the gateway benchmark. Pure: no network, no clock, no Locust.
"""

import random
from typing import Any

from loadtest.pictures import NumberedUrls, noise_jpeg, to_data_url

QUESTIONS = (
    "Describe the image.",
    "How many shapes are there?",
    "What color is the star?",
    "What is at the top left?",
    "Is there a green square?",
    "What color is the background?",
)
SUBJECTS = ("a lighthouse", "the harbour", "a red bicycle", "two clouds", "an old map", "the clock")
WISHES = ("Tell me about", "Describe", "Compare with a stone", "Write one line on", "Explain")
MAX_NUMBER = 10**12


class Scenario:
    """A kind of question. Each user draws from a generator of its own, so that runs repeat."""

    name: str

    def content(self, draw: random.Random) -> list[dict[str, Any]]:
        """The parts of the next user message."""
        raise NotImplementedError


class Text(Scenario):
    """Text alone."""

    name = "text"

    def content(self, draw: random.Random) -> list[dict[str, Any]]:
        """A sentence put together at random."""
        return [text_part(f"{draw.choice(WISHES)} {draw.choice(SUBJECTS)}.")]


class Picture(Scenario):
    """One picture that nobody asked about before, and a question."""

    name = "picture"

    def __init__(self, num_bytes: int, seed: int) -> None:
        self._urls = NumberedUrls(noise_jpeg(num_bytes, seed))

    def content(self, draw: random.Random) -> list[dict[str, Any]]:
        """A new picture and one of the questions."""
        url = self._urls.url(draw.randrange(MAX_NUMBER))
        return [picture_part(url), text_part(draw.choice(QUESTIONS))]


class RepeatedPicture(Scenario):
    """The same picture for everybody, and many questions about it."""

    name = "repeated picture"

    def __init__(self, num_bytes: int, seed: int) -> None:
        self._url = to_data_url(noise_jpeg(num_bytes, seed))

    def content(self, draw: random.Random) -> list[dict[str, Any]]:
        """The picture and one of the questions."""
        return [picture_part(self._url), text_part(draw.choice(QUESTIONS))]


def text_part(text: str) -> dict[str, Any]:
    """A text part of a message."""
    return {"type": "text", "text": text}


def picture_part(url: str) -> dict[str, Any]:
    """A picture part of a message."""
    return {"type": "image_url", "image_url": {"url": url}}


def to_body(
    model: str, content: list[dict[str, Any]], max_tokens: int, stream: bool
) -> dict[str, Any]:
    """A greedy request with one user message; a stream ends with its usage."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body
