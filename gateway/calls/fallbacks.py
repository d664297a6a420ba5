"""Fallbacks: another model answers while a model's queue is full or no worker serves it."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from gateway.calls.models import ModelDirectory
from gateway.calls.recorder import Recorder
from gateway.calls.surface import Reply
from gateway.http.errors import ApiError, Overloaded
from shared.telemetry.metrics import GatewayMetrics

_FULL = ("queue_full", "open_tokens")  #: reasons for which a model's queue refuses a request

#: Queues the request to a model. None: the request was answered at once.
Ask = Callable[[str], Awaitable[Reply | None]]


@dataclass
class Fallbacks:
    """The fallback model of each model. Fallbacks are not chained."""

    _names: Mapping[str, str]
    _models: ModelDirectory
    _metrics: GatewayMetrics

    async def ask(self, ask: Ask, asked: str, recorder: Recorder) -> Reply | None:
        """Queue a request to a model, or to its fallback.

        Only generated text falls back, as vectors, scores and token counts of another model would be wrong. If the
        fallback refuses the request, this error is ignored, and the original model decides. Raises: as `ask`.
        """
        models, context = self._models, recorder.context
        name = asked if asked in self._names else models.target(asked)
        other = self._names.get(name, "")
        is_possible = (
            other
            and recorder.surface.task == "generate"
            and context.route  # lines of a batch wait
            and models.may_use(context.tenant, other)
            and models.num_ready(other) > 0
        )
        if not is_possible:
            return await ask(asked)
        models.check_use(context.tenant, asked)
        refused = None
        if models.num_ready(asked) or models.is_at_rest(asked):
            try:
                return await ask(asked)
            except Overloaded as error:
                if error.reason not in _FULL:
                    raise
                refused = error.with_traceback(None)  # frames would retain the body
        model = recorder.model
        context.fallback_from = asked
        try:
            reply = await ask(other)
        except ApiError:
            recorder.model, context.fallback_from = model, ""
            if refused is not None:
                raise refused from None
            return await ask(asked)
        self._metrics.count("fallbacks", name, other)
        return reply
