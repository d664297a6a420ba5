"""How a worker calls the claim script, and what it answers, as a claim."""

from secrets import token_hex
from typing import Any

from shared.protocol import ErrorCode, Failed, encode
from shared.queue.keys import GROUP, RedisKeys
from shared.queue.publication import CLEARED_AFTER_TOKENS, Claim, Publication
from shared.queue.scripts import CLAIM, named
from shared.redis.link import Command

_FAILURES = {
    b"expired": (ErrorCode.DEADLINE_EXCEEDED, "the request's deadline passed while it waited"),
    b"exhausted": (ErrorCode.TOO_MANY_ATTEMPTS, "every worker that tried the request ended early"),
    b"kills_workers": (
        ErrorCode.REQUEST_KILLS_WORKERS,
        "every worker that ran the request by itself ended early",
    ),
}


#: A request is given up after so many lost workers for each that counts against it: it is innocent as far as is known.
LOSSES_PER_ATTEMPT = 4


class ClaimCalls:
    """Keys and arguments of one worker's calls for one model."""

    def __init__(self, keys: RedisKeys, model: str, worker_id: str, max_attempts: int) -> None:
        self._keys = keys
        self._model = model
        self._worker_id = worker_id
        self._max_attempts = max_attempts
        self._read_nonce = token_hex(8)  # a request comes by a read once, so one is enough

    def of_one(self, entry_id: bytes, request_id: str) -> tuple[list[str], tuple[bytes, ...]]:
        """Claim the request of an entry."""
        keys = [
            self._keys.queue(self._model),
            self._keys.request(self._model, request_id),
            self._keys.log(self._model, request_id),
        ]
        return keys, self._arguments(entry_id, token_hex(8), read_nonce=self._read_nonce)

    def of_read(self, last_id: bytes, count: int) -> Command:
        """Claim up to `count` requests that the read before this command brings; `last_id` came before.

        Answered by triples of entry, request id and reply, or by an error if Redis has forgotten the script.
        """
        arguments = self._arguments(
            last_id,
            self._read_nonce,
            count=count,
            requests=self._keys.requests(self._model),
            logs=self._keys.log(self._model, ""),
        )
        return ("EVALSHA", CLAIM.sha, 1, self._keys.queue(self._model), *arguments)

    def _arguments(self, entry_id: bytes, nonce: str, **others: Any) -> tuple[bytes, ...]:
        return named(
            entry=entry_id.decode(),
            group=GROUP,
            worker=self._worker_id,
            nonce=nonce,
            max_attempts=self._max_attempts,
            max_losses=LOSSES_PER_ATTEMPT * self._max_attempts,
            cleared_after=CLEARED_AFTER_TOKENS,
            **others,
        )


def read_claim(
    reply: list[Any], entry_id: bytes, request_id: str, max_attempts: int
) -> tuple[bytes, Claim]:
    """The verdict and the claim of a reply. Verdicts: ok, expired, kills_workers or exhausted."""
    verdict, attempt, failures, payload, reply_to, log, waited_ms, remaining_ms = reply
    claim = Claim(
        id=request_id,
        reply_to=reply_to.decode(),
        payload=payload,
        log=tuple(log),
        entry_id=entry_id,
        attempt=attempt,
        failures=failures,
        is_last_chance=failures > 0 and failures == max_attempts - 1,
        waited_s=waited_ms / 1000,
        remaining_s=remaining_ms / 1000,
    )
    return verdict, claim


def giving_up(claim: Claim, verdict: bytes) -> Publication:
    """The end of a call that cannot run any more."""
    code, message = _FAILURES[verdict]
    failed = encode(Failed(claim.id, claim.attempt, code, message))
    reason = "" if verdict == b"expired" else verdict.decode()
    return Publication(claim, 1, 0, 0, failed, "failed", reason)
