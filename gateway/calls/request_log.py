"""One line in the log for each chat request that has ended: what was asked of whom, how it ended, where the time went.

Never the prompt, the answer, a key or a image. The tenant is a short hash of its key; of the client's own labels
there is a short hash of `user`, by which one user's requests are found without naming them. It must not know how a request is served.
"""

import hashlib
import logging

from gateway.calls.recorder import AnswerRecorder
from gateway.calls.timings import StageClock, body_timings
from gateway.http.context import RequestContext
from shared.telemetry.trace_context import trace_id_of

logger = logging.getLogger(__name__)


def log_request(
    context: RequestContext,
    *,
    model: str,
    outcome: str,
    status: int | None,
    clock: StageClock,
    user: str | None,
    recorder: AnswerRecorder | None,
) -> None:
    """Log a request's end. `status`: what the client was told, if anything. Units: seconds, tokens."""
    if not logger.isEnabledFor(logging.INFO):
        return
    fields: dict[str, object] = {
        "request_id": context.id, "model": model, "outcome": outcome, "status": status,
    }  # fmt: skip
    if context.client_id is not None:
        fields["client_request_id"] = context.client_id
    if context.trace_parent is not None:
        fields["trace_id"] = trace_id_of(context.trace_parent)
    if context.tenant:
        fields["tenant"] = short_hash(context.tenant)
    if user:
        fields["user"] = short_hash(user)
    e2e_s = clock.elapsed_s()
    if recorder is not None and recorder.is_complete:
        prompt = recorder.totals.prompt
        fields["prompt_tokens"] = prompt.num_prompt_tokens
        fields["image_tokens"] = prompt.num_image_tokens
        fields["cached_tokens"] = prompt.num_cached_tokens
        fields["output_tokens"] = recorder.totals.num_output_tokens
        fields.update(body_timings(recorder.stages(e2e_s), e2e_s))
    else:
        fields["e2e_s"] = round(e2e_s, 6)
    logger.info("request ended", extra=fields)


def short_hash(name: str) -> str:
    """A short name for a user or a tenant: a pseudonym, not a secret."""
    return hashlib.blake2b(name.encode(), digest_size=6).hexdigest()
