"""What answers of several APIs have in common: OpenAI's usage, and events made fewer."""

from collections.abc import Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from gateway.calls.open_call import ChoiceEvent
from gateway.calls.surface import Totals
from shared.protocol import Tokens, Usage, join_calls
from shared.version import package_version

SYSTEM_FINGERPRINT = f"vlm-fleet-{package_version()}"

encode = msgspec.json.Encoder().encode


class PromptTokensDetails(msgspec.Struct):
    """Of which kinds the prompt's tokens are; cached ones are of any kind."""

    cached_tokens: int
    image_tokens: int
    text_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """Of which kinds the answer's tokens are."""

    reasoning_tokens: int


class CompletionUsage(msgspec.Struct):
    """Token counts as OpenAI names them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = (
        UNSET  #: of a model that thinks
    )


def to_usage(totals: Totals) -> CompletionUsage:
    """The `usage` object: a prompt counts once, whatever the number of choices."""
    usage = usage_of(totals.prompt, totals.num_output_tokens)
    if count := num_reasoning_tokens(totals):
        usage.completion_tokens_details = CompletionTokensDetails(count)
    return usage


def num_reasoning_tokens(totals: Totals) -> int:
    """Of all choices: what came before their answers."""
    return sum(event.usage.num_reasoning_tokens for event in totals.finished)


def usage_of(prompt: Usage, num_output: int) -> CompletionUsage:
    """The `usage` object of counts."""
    return CompletionUsage(
        prompt_tokens=prompt.num_prompt_tokens,
        completion_tokens=num_output,
        total_tokens=prompt.num_prompt_tokens + num_output,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=prompt.num_cached_tokens,
            image_tokens=prompt.num_image_tokens,
            text_tokens=prompt.num_prompt_tokens - prompt.num_image_tokens,
        ),
    )


def merge_tokens(events: Sequence[ChoiceEvent]) -> Iterator[ChoiceEvent]:
    """The same events with adjacent tokens of one choice made one."""
    held: tuple[int, Tokens] | None = None
    for index, event in events:
        if held is not None and isinstance(event, Tokens) and held[0] == index:
            held = (index, _merge(held[1], event))
            continue
        if held is not None:
            yield held
        held = None
        if isinstance(event, Tokens):
            held = (index, event)
        else:
            yield index, event
    if held is not None:
        yield held


def _merge(first: Tokens, second: Tokens) -> Tokens:
    return Tokens(
        first.request_id,
        first.attempt,
        first.index,
        first.token_ids + second.token_ids,
        first.text + second.text,
        first.logprobs + second.logprobs,
        first.num_without_id + second.num_without_id,
        first.reasoning + second.reasoning,
        join_calls((*first.calls, *second.calls)) if second.calls else first.calls,
    )
