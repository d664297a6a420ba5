"""The gateway's span of a chat request, and those of its own stages: ingest, image_decode, relay.

The worker's stages hang below the same span, as its name travels with the request. Attributes are OpenTelemetry's
GenAI conventions and a few of our own (`vlm.`): numbers and names of ours; never text, images, stop strings or keys.
"""

import time
from typing import TYPE_CHECKING

from gateway.api.chat.schemas import ChatCompletionRequest
from gateway.calls.recorder import AnswerRecorder
from gateway.calls.timings import StageClock
from gateway.http.context import RequestContext
from shared.telemetry.tracing import NOT_FAILURES, Attributes, Stage, epoch_ns

if TYPE_CHECKING:
    from shared.telemetry.spans import Tracer

_LARGEST_INT = 2**63 - 1  #: of an attribute; what is beyond it is refused anyway


class RequestTrace:
    """Open from the request's start to its end. It tells the context who the parent of later spans is."""

    def __init__(self, tracer: "Tracer", context: RequestContext) -> None:
        begin_ns = epoch_ns(time.perf_counter() - context.received_at)
        self._context = context
        self._span = tracer.begin("chat", "server", context.trace_parent, begin_ns)
        context.trace_parent = self._span.trace_parent

    def describe(self, request: ChatCompletionRequest) -> None:
        """Note what was asked for."""
        max_tokens = request.max_completion_tokens or request.max_tokens
        numbers = {
            "max_tokens": max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "seed": request.seed,
            "frequency_penalty": request.frequency_penalty,
            "presence_penalty": request.presence_penalty,
            "choice.count": request.n,
        }
        self._span.add({"gen_ai.request.stream": bool(request.stream)})
        self._span.add(
            {
                f"gen_ai.request.{name}": number
                for name, number in numbers.items()
                if number is not None and abs(number) <= _LARGEST_INT
            }
        )

    def end(
        self,
        model: str,
        outcome: str,
        status: int | None,
        clock: StageClock,
        recorder: AnswerRecorder | None,
    ) -> None:
        """Close the span and add the stages. `status`: what the client was told, if anything."""
        if not self._span.is_recorded:
            return
        e2e_s = clock.elapsed_s()
        self._span.rename(f"chat {model}")
        self._span.add(
            {
                "gen_ai.operation.name": "chat",
                "gen_ai.provider.name": "vlm-fleet",
                "gen_ai.request.model": model,
                "vlm.request.id": self._context.id,
                "vlm.outcome": outcome,
            }
        )
        if status is not None:
            self._span.add({"http.response.status_code": status})
        if recorder is not None and recorder.is_complete:
            self._span.add(self._answer(recorder))
        is_ours = outcome not in NOT_FAILURES and (status is None or not 400 <= status < 500)
        self._span.end(e2e_s, _stages(clock, recorder, e2e_s), outcome if is_ours else None)

    def _answer(self, recorder: AnswerRecorder) -> Attributes:
        """What came of it. Units: tokens, seconds."""
        totals, ttft_s = recorder.totals, recorder.clock.ttft_s
        prompt = totals.prompt
        answer: Attributes = {
            "gen_ai.response.id": f"chatcmpl-{self._context.id}",
            "gen_ai.response.model": recorder.model,
            "gen_ai.response.finish_reasons": [e.finish_reason.value for e in totals.finished],
            "gen_ai.usage.input_tokens": prompt.num_prompt_tokens,
            "gen_ai.usage.output_tokens": totals.num_output_tokens,
            "gen_ai.usage.cache_read.input_tokens": prompt.num_cached_tokens,
            "vlm.usage.image_tokens": prompt.num_image_tokens,
        }
        if ttft_s is None:
            return answer
        return {**answer, "gen_ai.response.time_to_first_chunk": ttft_s}


def _stages(clock: StageClock, recorder: AnswerRecorder | None, e2e_s: float) -> list[Stage]:
    """The stages that this process measured; the relay lies where it ended."""
    if not clock.submitted_at:
        return []
    submitted_s = clock.submitted_at - clock.received_at
    stages = [Stage("ingest", 0.0, clock.ingest_s)]
    if clock.image_decode_s:
        begin_s = submitted_s - clock.image_decode_s
        stages.append(Stage("image_decode", begin_s, clock.image_decode_s))
    if recorder is not None and recorder.is_complete:
        relay_s = recorder.stages(e2e_s)["relay"]
        stages.append(Stage("relay", e2e_s - relay_s, relay_s))
    return stages
