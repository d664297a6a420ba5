"""Rate limits: estimate a request's tokens, reserve them for its key, and create 429 and 503 errors.

The estimate is four characters per token, the tokens of images, and the longest answer that the request allows.
Redis checks the limits when it queues the request, so that they apply to all gateways together. `Refunds` returns
unused tokens. A key over its limit gets 429; a full queue causes 503.
"""

import asyncio
import fnmatch
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from gateway.calls.open_call import OpenCall
from gateway.http.errors import AuthenticationError, Overloaded, RateLimited
from gateway.http.exchange import Rate, RequestContext
from gateway.keys.directory import KeyRecord, Period
from gateway.keys.usage import NANO, period_of
from shared.protocol import (
    Call,
    Embed,
    Generate,
    ModelCard,
    Priority,
    Rerank,
    Run,
    Task,
    Tokenize,
    TokensPart,
    encode,
)
from shared.queue.api import (
    Budget,
    Charge,
    GatewayQueue,
    Limits,
    QueueRefused,
    QueueUnavailable,
    Reservation,
    shard_of,
)
from shared.settings.limits import LimitSettings
from shared.settings.tree import Prices

CHARS_PER_TOKEN = 4
TOKENS_PER_IMAGE = 576  #: as in LLaVA-1.5; for models without a fixed number of tokens per image
#: Tokens reserved for an answer without `max_tokens`, until its actual length is known.
OPEN_ANSWER_TOKENS = 512
#: Maximum tokens that a chat template or an embedding prompt adds to each prompt; for budgets.
TOKENS_PER_PROMPT = 256
#: Logprobs that take as much memory in Redis as one output token.
LOGPROBS_PER_TOKEN = 5
#: Output tokens that take as much memory in Redis as one vector.
TOKENS_PER_VECTOR = 16
MAX_REFUSED = 10_000  #: maximum number of cached refusals
NO_LIMITS = Limits()
_REFUND_PAUSE_S = 0.25
#: How long Redis retains a budget after its month or day.
_BUDGET_GRACE_S = 3 * 86400.0

logger = logging.getLogger(__name__)


class BudgetExceeded(Overloaded):
    status = 429
    type = "insufficient_quota"

    def __init__(self, budget: float, period: Period) -> None:
        _, ends_at = period_of(period, now := time.time())  # noqa: TID251
        message = f"This key has spent its budget of ${budget:g} per {period}. Wait, or ask the operator for a larger one."
        super().__init__(
            "key_budget", message, code="insufficient_quota", retry_after_s=math.ceil(ends_at - now)
        )


class KeyLimits:
    """The limits of keys and queues. `overloaded`: creates the error for a full queue."""

    def __init__(
        self,
        limits: LimitSettings,
        overloaded: Callable[[str], Overloaded],
        clock: Callable[[], float] = time.monotonic,
        find_key: Callable[[str], KeyRecord | None] | None = None,
        prices: Mapping[str, Prices] | None = None,
    ) -> None:
        """`find_key` returns the stored key of a tenant. `prices`: by model name pattern; the first match applies."""
        self._prices = prices or {}
        self._find_key = find_key or (lambda tenant: None)
        self._limits = limits
        self._overloaded = overloaded
        self._clock = clock
        # by model and tenant: end of the refusal, and the limit in requests per minute
        self._refused: dict[tuple[str, str], tuple[float, int]] = {}
        self._quotas = {priority: to_quota(limits, priority) for priority in Priority}

    def key_name(self, tenant: str) -> str:
        """The name of a tenant's stored key, without a guest's name; empty if it has none."""
        key = self._find_key(tenant)
        return "" if key is None else key.name.partition(":")[0]

    def max_waiting(self, priority: Priority) -> int:
        """Maximum number of waiting calls that no worker has claimed."""
        is_batch = priority is Priority.BATCH
        return self._limits.max_batch_queue_depth if is_batch else self._limits.max_queue_depth

    def restrict(self, context: RequestContext) -> None:
        if (key := self._find_key(context.tenant)) is not None:
            context.max_output_tokens = key.max_output_tokens
            context.max_priority = key.max_priority

    def limits(self, priority: Priority, tenant: str) -> Limits | None:
        """The limits of a tenant's requests; None: no limits. Raises: AuthenticationError if its key is not active."""
        quota = self._quotas[priority]
        if (key := self._find_key(tenant)) is not None:
            if not key.is_active(time.time()):  # noqa: TID251
                raise AuthenticationError("The key was revoked or expired.", code="invalid_api_key")
            own = {
                "max_tenant_requests": _part(priority, key.open_requests),
                "max_tenant_requests_per_minute": key.requests_per_minute,
                "max_tenant_tokens_per_minute": key.tokens_per_minute,
            }
            own = {name: most for name, most in own.items() if most}
            quota = replace(quota, has_budget=key.budget > 0, **own)
        return None if quota == NO_LIMITS else quota

    def reservation(
        self, calls: Sequence[Call], card: ModelCard, quota: Limits | None
    ) -> Reservation | None:
        """The reservation of a request's calls. None if nothing is limited."""
        if quota is None:
            return None
        first = calls[0]
        if _finds_segments(first.task):  # the requests for its segments are counted instead
            quota = replace(quota, max_tenant_requests_per_minute=0)
        each = [possible_tokens(call.task, card) for call in calls]
        possible = max(each, key=lambda tokens: tokens.total)
        return Reservation(
            model=first.model,
            tenant=first.tenant,
            request_ids=tuple([call.id for call in calls]),
            num_tokens=possible.total,
            num_answer_tokens=possible.num_answer_tokens,
            num_open_tokens=open_tokens(first.task, possible.total),
            limits=quota,
        )

    def charge(self, calls: Sequence[Call], card: ModelCard, num_prompts: int = 1) -> Charge:
        """The charge for a request, which is billed when it ends. `num_prompts`: see `surface.Plan`."""
        first, prices = calls[0], (0.0, 0.0, 0.0, 0.0)
        own = calls[:: len(calls) // num_prompts]  # the first call of each prompt
        name, _, _ = first.model.partition("@")  # without the version of a deployment
        for pattern, found in self._prices.items():
            if fnmatch.fnmatchcase(name, pattern):
                prices = found.in_nano_dollars()
                break
        budget, key = None, self._find_key(first.tenant)
        if key is not None and key.budget:
            cost = max(most_nano_dollars(call, card, prices) for call in own)
            period, ends_at = period_of(key.period, now := time.time())  # noqa: TID251
            most, ttl_s = round(key.budget * NANO), ends_at - now + _BUDGET_GRACE_S
            budget = Budget(period, most, max(1, math.ceil(cost)), ttl_s)
        num_images = tuple([_num_billed_images(call.task) for call in own])
        counts = "output" if _finds_segments(first.task) else "request"
        return Charge(num_images, prices, budget, counts)

    def check(self, model: str, tenant: str) -> None:
        """Refuse a request while the key's request limit cannot have recovered. Raises: RateLimited."""
        until, most = self._refused.get((model, tenant), (0.0, 0))
        wait_s = until - self._clock()
        if wait_s > 0 and most == self._requests_per_minute(tenant):
            raise self._key_limit_exceeded("key_requests", wait_s, tenant)

    def _requests_per_minute(self, tenant: str) -> int:
        quota = self.limits(Priority.INTERACTIVE, tenant) or NO_LIMITS
        return quota.max_tenant_requests_per_minute

    def to_error(self, refused: QueueRefused, model: str, tenant: str) -> Overloaded:
        if not refused.reason.startswith("key_"):
            return self._overloaded(refused.reason)
        if refused.reason == "key_budget" and (key := self._find_key(tenant)) is not None:
            return BudgetExceeded(key.budget, key.period)
        # Other refusals are not cached: the end of a request or a refund may lift them at any moment.
        if refused.reason == "key_requests":
            if len(self._refused) >= MAX_REFUSED:
                del self._refused[next(iter(self._refused))]  # the oldest entry
            until = self._clock() + refused.wait_s
            self._refused[(model, tenant)] = until, self._requests_per_minute(tenant)
        return self._key_limit_exceeded(refused.reason, refused.wait_s, tenant)

    def _key_limit_exceeded(self, reason: str, wait_s: float, tenant: str) -> RateLimited:
        limits = self.limits(Priority.INTERACTIVE, tenant) or NO_LIMITS
        what = {
            "key_open": f"{limits.max_tenant_requests} open requests",
            "key_share": "its share of the tokens in use",
            "key_requests": f"{limits.max_tenant_requests_per_minute} requests per minute",
            "key_budget": "its budget",
            "key_tokens": f"{limits.max_tenant_tokens_per_minute} tokens per minute",
        }[reason]
        retry_after_s = math.ceil(wait_s) or self._overloaded(reason).retry_after_s or 1
        message = f"Rate limit reached for this key: {what}. Retry later."
        return RateLimited(reason, message, retry_after_s)


def to_quota(limits: LimitSettings, priority: Priority) -> Limits:
    """The limits of the settings. Batch calls may use half of the open tokens and requests."""
    return Limits(
        max_tokens=_part(priority, limits.max_open_tokens),
        max_tenant_requests=_part(priority, limits.max_key_open_requests),
        max_tenant_requests_per_minute=limits.max_key_requests_per_minute,
        max_tenant_tokens_per_minute=limits.max_key_tokens_per_minute,
    )


def _part(priority: Priority, most: int) -> int:
    """The share of a limit that calls of a priority may use."""
    return max(1, most // 2) if priority is Priority.BATCH and most > 0 else most


def to_rates(limits: Limits, full_in_s: tuple[float, float]) -> list[Rate]:
    """The limits per minute, for headers. `full_in_s`: see `shared.queue.api.Submitted`."""
    per_minute = (limits.max_tenant_requests_per_minute, limits.max_tenant_tokens_per_minute)
    return [
        Rate(name, most, max(0, int(most * (1 - s / 60))), s)
        for name, most, s in zip(("requests", "tokens"), per_minute, full_in_s, strict=True)
        if most > 0
    ]


class PossibleTokens(Struct, frozen=True):
    """Estimated tokens of a prompt and of its longest answer. The total is at least 1."""

    num_prompt_tokens: int
    num_answer_tokens: int

    @property
    def total(self) -> int:
        return self.num_prompt_tokens + self.num_answer_tokens


def possible_tokens(task: Task, card: ModelCard) -> PossibleTokens:
    """Estimate the tokens of a task. The total of a generation is within the model's context."""
    if isinstance(task, Tokenize):
        return PossibleTokens(1, 0)
    num_chars = sum([len(text) for text in task.texts()])
    per_image = card.image_tokens or TOKENS_PER_IMAGE
    num_prompt = num_chars // CHARS_PER_TOKEN + per_image * len(task.images)
    if not isinstance(task, Generate):
        inputs = task.inputs if isinstance(task, Embed) else ()
        num_prompt += sum(len(part.token_ids) for part in inputs if isinstance(part, TokensPart))
        return PossibleTokens(max(1, num_prompt), 0)
    if isinstance(task.prompt, TokensPart):
        num_prompt = len(task.prompt.token_ids)
    max_tokens = task.sampling.max_tokens
    answer = OPEN_ANSWER_TOKENS if max_tokens is None else max_tokens
    num_prompt = min(num_prompt, card.max_model_len - 1)
    return PossibleTokens(num_prompt, min(answer, card.max_model_len - num_prompt))


def most_nano_dollars(call: Call, card: ModelCard, prices: tuple[float, ...]) -> float:
    """The maximum cost of a call in nano-dollars. Each byte of its encoding is counted as a token."""
    price_in, price_cached, price_out, price_image = prices
    price_in = max(price_in, price_cached)
    task = call.task
    cost = _num_billed_images(task) * price_image
    if isinstance(task, Tokenize):
        return cost
    num_prompt = len(encode(call)) + len(task.images) * (card.image_tokens or TOKENS_PER_IMAGE)
    if not isinstance(task, Generate):
        parts = task.inputs if isinstance(task, Embed) else ()
        if isinstance(task, Rerank):
            parts = task.documents
            num_prompt += len(task.queries[0].encode()) * len(parts)
        return cost + (num_prompt + TOKENS_PER_PROMPT * len(parts)) * price_in
    longest = card.max_model_len
    num_prompt = min(num_prompt + TOKENS_PER_PROMPT, longest)
    max_tokens = task.sampling.max_tokens
    num_answer = longest if max_tokens is None else min(max_tokens, longest)
    num_over = max(0, num_prompt + num_answer - longest)
    cost += num_prompt * price_in + num_answer * price_out
    return cost - num_over * min(price_in, price_out)


def _num_billed_images(task: Task) -> int:
    """Number of images to bill. Audio that is cut into segments is billed once, with its first segment."""
    if _finds_segments(task):
        return 0
    return len([image for image in task.images if not image.start_s])


def _finds_segments(task: Task) -> bool:
    return isinstance(task, Tokenize) and task.finds_segments


def open_tokens(task: Task, num_tokens: int) -> int:
    """Tokens to reserve while a request is open, according to the memory that its answer may need in Redis."""
    if isinstance(task, Embed):
        return num_tokens + TOKENS_PER_VECTOR * len(task.inputs)
    if isinstance(task, Rerank | Tokenize | Run):
        return num_tokens
    sampling, num_logprobs = task.sampling, 0
    if sampling.num_logprobs is not None:
        num_answer_tokens = num_tokens
        if sampling.max_tokens is not None:
            num_answer_tokens = min(sampling.max_tokens, num_tokens)
        num_logprobs += num_answer_tokens * (1 + sampling.num_logprobs)
    if sampling.num_prompt_logprobs is not None:
        num_logprobs += num_tokens * (1 + sampling.num_prompt_logprobs)
    return num_tokens + -(-num_logprobs // LOGPROBS_PER_TOKEN)


class Refunds:
    """Returns unused tokens of rate-limit reservations to Redis, in the background.

    A token limit reserves the most tokens that a request can use. Redis has the actual number, even if the worker died.
    A request that outlives its client is polled until it ends. If this gateway dies first, nothing is refunded.
    """

    def __init__(self, queue: GatewayQueue) -> None:
        self._queue = queue
        self.open: set[Reservation] = set()  #: requests that are closed, but not refunded yet

    def add(self, reservation: Reservation, call: OpenCall) -> None:
        """Refund a closed request once its answer has ended. A resubmitted call is charged only its new tokens."""
        self.open.add(reservation)
        for call_id, num_earlier in call.resubmitted:
            again = replace(reservation, request_ids=(call_id,), num_answer_tokens=num_earlier)
            self.open.add(again)

    async def keep_refunding(self) -> None:
        while True:
            await asyncio.sleep(_REFUND_PAUSE_S)
            try:
                await self.refund()
            except Exception:
                logger.exception("cannot refund answers")

    async def refund(self) -> None:
        down: set[str] = set()  # unreachable shards
        for reservation in list(self.open):
            shard = shard_of(reservation.request_ids[0])
            if shard in down:
                continue
            try:
                if await self._queue.refund(reservation):
                    self.open.discard(reservation)
            except QueueUnavailable:
                down.add(shard)
