"""One request's answer as it comes in: its totals, its latencies, and whether it is complete.

Whole answers and streams pass every event through the same recorder, so that both count and fail alike.
"""

import time
from collections.abc import Sequence

from gateway.api.chat.answer import AnswerTotals, check_finished
from gateway.calls.open_call import ChoiceEvent
from gateway.calls.timings import StageClock, slowest, stages_of, ttft_of
from gateway.http.errors import from_failed
from shared.protocol import Failed, Finished, Priority, Tokens
from shared.telemetry.metrics import GatewayMetrics, RequestRecord


class AnswerRecorder:
    """Notes events on their way to the client. Units: seconds.

    `metrics`: None for an answer that was queued by another request, which is the one that counts it.
    """

    def __init__(
        self,
        model: str,
        num_choices: int,
        clock: StageClock,
        metrics: GatewayMetrics | None,
        priority: Priority = Priority.INTERACTIVE,
        *,
        is_streamed: bool = False,
    ) -> None:
        self.model = model
        self.num_choices = num_choices
        self.clock = clock
        self.metrics = metrics
        self.priority = priority
        self.is_streamed = is_streamed
        self.totals = AnswerTotals()
        self._last_token_at: dict[int, float] = {}

    @property
    def is_complete(self) -> bool:
        """Whether every choice has finished."""
        return len(self.totals.finished) == self.num_choices

    def note(self, events: Sequence[ChoiceEvent]) -> None:
        """Take events that arrived together. Raises: ApiError if one of them is a failure."""
        now = time.perf_counter()
        for index, event in events:
            if isinstance(event, Tokens):
                self._note_tokens(index, event, now)
            elif isinstance(event, Finished):
                if failed := check_finished(event):
                    raise from_failed(failed)
                self.totals.finished.append(event)
            elif isinstance(event, Failed):
                raise from_failed(event)

    def _note_tokens(self, index: int, event: Tokens, now: float) -> None:
        if event.text and self.clock.first_text_at is None:
            self.clock.first_text_at = now
        last = self._last_token_at.get(index)
        if last is not None and event.token_ids and self.metrics is not None:
            self.metrics.record_tokens(self.model, now - last, len(event.token_ids))
        self._last_token_at[index] = now

    def stages(self, e2e_s: float) -> dict[str, float]:
        """Each stage of the slowest choice, once the answer is complete."""
        return stages_of(self.clock, slowest(self.totals.timings), e2e_s)

    def _ttft_s(self, stages: dict[str, float]) -> float | None:
        """Tokens of a whole answer come late and together: the worker knows when it had the first."""
        seen_s = self.clock.ttft_s
        return seen_s if self.is_streamed or seen_s is None else ttft_of(stages)

    def record(self) -> None:
        """Feed the metrics of an answer that is complete and with the socket, its clock stopped."""
        if self.metrics is None:
            return
        e2e_s = self.clock.elapsed_s()
        stages = self.stages(e2e_s)
        prompt = self.totals.prompt
        self.metrics.record_finished(
            RequestRecord(
                model=self.model,
                priority=self.priority.value,
                stages=stages,
                e2e_s=e2e_s,
                ttft_s=self._ttft_s(stages),
                num_prompt_tokens=prompt.num_prompt_tokens,
                num_image_tokens=prompt.num_image_tokens,
                num_cached_tokens=prompt.num_cached_tokens,
                num_output_tokens=self.totals.num_output_tokens,
                num_choices=self.num_choices,
            )
        )
