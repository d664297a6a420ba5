"""What the claim script answers, as a claim. It must not know Redis's commands."""

import logging
from typing import Any

import msgspec

from shared.protocol import (
    Delta,
    ErrorCode,
    Failed,
    GenerateRequest,
    SamplingParams,
    decode_events,
    decode_request,
)
from shared.publication import Claim, Publication

logger = logging.getLogger(__name__)

_FAILURES = {
    b"expired": (ErrorCode.DEADLINE_EXCEEDED, "the request's deadline passed while it waited"),
    b"exhausted": (ErrorCode.TOO_MANY_ATTEMPTS, "every worker that tried the request ended early"),
    b"unreadable": (ErrorCode.INVALID_REQUEST, "the worker cannot read the request"),
}


def read_claim(
    reply: list[Any], *, entry_id: bytes, request_id: str, model: str, max_attempts: int
) -> tuple[bytes, Claim]:
    """The verdict and the claim of a reply. Verdicts: ok, expired, exhausted or unreadable."""
    verdict, attempt, failures, payload, reply_to, log, waited_ms, remaining_ms = reply
    try:
        request = decode_request(payload)
        events = decode_events(b"[" + b",".join(log) + b"]")
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        logger.error("cannot read request %s: %s", request_id, error)
        request = GenerateRequest(request_id, reply_to.decode(), model, (), SamplingParams())
        events, verdict = (), b"unreadable"
    claim = Claim(
        request=request,
        entry_id=entry_id,
        attempt=attempt,
        failures=failures,
        is_last_chance=failures > 0 and failures == max_attempts - 1,
        output_token_ids=tuple(
            token for event in events if isinstance(event, Delta) for token in event.token_ids
        ),
        waited_s=waited_ms / 1000,
        remaining_s=remaining_ms / 1000,
    )
    return verdict, claim


def giving_up(claim: Claim, verdict: bytes) -> Publication:
    """The end of a request that cannot run any more."""
    code, message = _FAILURES[verdict]
    failed = Failed(claim.request.request_id, claim.attempt, code, message)
    reason = "" if verdict == b"expired" else verdict.decode()
    return Publication(claim, 1, len(claim.output_token_ids), (failed,), reason)
