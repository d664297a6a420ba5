"""What APIs that take inputs and give numbers have in common: their inputs, parts and usage."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, TypeVar

import msgspec

from gateway.calls.resume import KEY_HEADER
from gateway.calls.surface import Totals
from gateway.http.errors import InvalidRequest
from shared.protocol import Truncate
from shared.settings.limits import LimitSettings

#: TEI's: which end to cut off of what is too long; true is END, false and NONE refuse it.
Truncation = bool | Literal["NONE", "START", "END"]
Item = TypeVar("Item")

#: A call beyond that is cut, so that several workers share a request. Estimated tokens; inputs.
MAX_CALL_TOKENS = 8192
MAX_CALL_INPUTS = 256
CHARS_PER_TOKEN = 4


class InputUsage(msgspec.Struct):
    """Token counts as OpenAI names them: there is no answer to count."""

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
    """What tasks call it."""
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
    """Parts that are a call each, with the index of their first item; all are one under an
    idempotency key, which names one call.
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
