"""A decode step that the device is still at: its tokens are on their way to the host.

Launched by `cuda_graph`; the engine waits for it.
"""

import torch
from torch import Tensor

from engines.core.runner import SequenceFailure, StepResult, TokenChoice
from engines.core.sequence import ScheduledSequence
from engines.torch_backend.sampling.sampler import NOT_FINITE

NO_TOKEN = -1  #: where the scores are no numbers


class DecodeStep:
    """One new token of each sequence; another step may read them on the device before the host has them."""

    can_be_followed = True

    def __init__(
        self, items: list[ScheduledSequence], token_ids: Tensor, arrival: torch.cuda.Event | None
    ) -> None:
        """`token_ids` are the host's, and right from `arrival` on. Shapes: (B,) with rows for all items."""
        self._request_ids = [item.sequence.request_id for item in items]
        self._token_ids = token_ids
        self._arrival = arrival

    def wait(self) -> StepResult:
        """The tokens. Raises: SequenceFailure for scores that are no numbers."""
        if self._arrival is not None:
            self._arrival.synchronize()
        token_ids = self._token_ids[: len(self._request_ids)].tolist()
        for request_id, token_id in zip(self._request_ids, token_ids, strict=True):
            if token_id == NO_TOKEN:
                raise SequenceFailure(request_id, NOT_FINITE)
        return StepResult([TokenChoice(token_id) for token_id in token_ids])
