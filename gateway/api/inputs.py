"""Shared by APIs that return numbers for inputs: parts and usage."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, TypeVar

import msgspec

from gateway.calls.resume import KEY_HEADER
from gateway.calls.surface import Totals
from gateway.http.errors import InvalidRequest
from shared.protocol import Truncate
from shared.settings.limits import LimitSettings

#: TEI's values: the end to truncate. True is END; false and NONE refuse long inputs.
Truncation = bool | Literal["NONE", "START", "END"]
Item = TypeVar("Item")

#: Largest call: requests beyond it are split, so that several workers share them. Estimated tokens; inputs.
MAX_CALL_TOKENS = 8192
MAX_CALL_INPUTS = 256
CHARS_PER_TOKEN = 4


class InputUsage(msgspec.Struct):
    """Token counts with OpenAI's names, without output tokens."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]

    @classmethod
    def of(cls, totals: Totals) -> "InputUsage":
        prompt = totals.prompt
        details = {
            "cached_tokens": prompt.num_cached_tokens,
            "image_tokens": prompt.num_image_tokens,
        }
        return cls(prompt.num_prompt_tokens, prompt.num_prompt_tokens, details)


def to_truncate(value: bool | str | None) -> Truncate:
    names: dict[object, Truncate] = {"START": "start", "END": "end", True: "end"}
    return names.get(value, "none")


def check_chars(num_chars: int, param: str, limits: LimitSettings) -> None:
    """Raises: InvalidRequest if all texts together are too long."""
    if num_chars > limits.max_input_chars:
        raise InvalidRequest(
            f"The texts are too long: send at most {limits.max_input_chars} characters.",
            param=param,
            status=413,
            code="text_too_long",
        )


def split(
    items: Sequence[Item],
    num_tokens: Callable[[Item], int],
    headers: Mapping[bytes, bytes],
) -> Iterator[tuple[int, Sequence[Item]]]:
    """Parts that become one call each, with the index of their first item.

    With an idempotency key, which names one call, there is one part.
    """
    if KEY_HEADER in headers:
        yield 0, items
        return
    begin, total = 0, 0
    for index, item in enumerate(items):
        count = num_tokens(item)
        if index > begin and (total + count > MAX_CALL_TOKENS or index - begin >= MAX_CALL_INPUTS):
            yield begin, items[begin:index]
            begin, total = index, 0
        total += count
    yield begin, items[begin:]
