"""What the queue carries as bytes, read and written for the worker: calls, logs, events."""

import logging
from collections.abc import Sequence

import msgspec

from shared.protocol import (
    Call,
    CallEvent,
    ErrorCode,
    Failed,
    Finished,
    Tokens,
    UnsupportedVersion,
    decode_call,
    decode_log,
    encode_events,
)
from shared.queue.api import Claim, Ending, Publication

logger = logging.getLogger(__name__)


class Unreadable(Exception):
    """A call that cannot be read here; `refusal` is its end."""

    def __init__(self, refusal: Publication) -> None:
        super().__init__(refusal.dead_reason)
        self.refusal = refusal


def read_claim(claim: Claim) -> tuple[Call, tuple[int, ...]]:
    """The call, and the output tokens that earlier attempts have published. Raises: Unreadable."""
    try:
        call, log = decode_call(claim.payload), decode_log(claim.log)
    except UnsupportedVersion as error:
        raise _refuse(claim, ErrorCode.UNSUPPORTED_VERSION, str(error)) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        logger.error("cannot read request %s: %s", claim.id, error)
        message = "the worker cannot read the request"
        raise _refuse(claim, ErrorCode.INVALID_REQUEST, message, "unreadable") from error
    return call, tuple([token for e in log if isinstance(e, Tokens) for token in e.token_ids])


def _refuse(claim: Claim, code: ErrorCode, message: str, dead_reason: str = "") -> Unreadable:
    failed = Failed(claim.id, claim.attempt, code, message)
    return Unreadable(to_publication(claim, 1, 0, (failed,), dead_reason or code.value))


def to_publication(
    claim: Claim, number: int, num_tokens: int, events: Sequence[CallEvent], dead_reason: str = ""
) -> Publication:
    """Events for the queue; `num_tokens` output tokens came before them."""
    last = events[-1]
    ending: Ending | None = None
    if isinstance(last, Finished | Failed):
        ending = "finished" if isinstance(last, Finished) else "failed"
    num_new_tokens = sum(len(event.token_ids) for event in events if isinstance(event, Tokens))
    return Publication(
        claim, number, num_tokens, num_new_tokens, encode_events(events), ending, dead_reason
    )
