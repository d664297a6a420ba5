"""What the mock engine must answer: its published rule, written down a second time by a stranger.

Called by the checks of answers. The words are a SHAKE-128 stream of prompt and images, so that one lost,
doubled or foreign token, or another request's prompt, is noticed.
"""

import base64
from array import array
from hashlib import sha256, shake_128
from typing import Any

from loadtest.scenarios import Message

SLOT_ID = 257  # after the 256 bytes and the end token
SYLLABLES = tuple(a + b for a, b in zip("bdfghjklmnprstvz", "aeiouaeiouaeioua", strict=True))


def mock_answer(messages: list[Message], usage: dict[str, Any], num_words: int) -> str:
    """The first words of the greedy answer. The usage tells how many slots an image takes."""
    images = [part for message in messages for part in _parts(message) if "image_url" in part]
    num_slots = _num_image_tokens(usage) // max(1, len(images))
    token_ids: list[int] = []
    hashes: list[tuple[int, str]] = []
    for message in messages:
        token_ids += f"{message['role']}: ".encode()
        for part in _parts(message):
            if "image_url" in part:
                hashes.append((len(token_ids), _hash(part["image_url"]["url"])))
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


def _hash(data_url: str) -> str:
    return sha256(base64.b64decode(data_url.partition(",")[2])).hexdigest()


def _num_image_tokens(usage: dict[str, Any]) -> int:
    details = usage.get("prompt_tokens_details") or {}
    return details.get("image_tokens", 0)
