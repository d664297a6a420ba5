"""Layers that keep a state of a sequence in place of its keys and values: linear attention, state spaces, convolutions.

Transformers' own mixers compute them, one sequence at a time, or all sequences with one new token together. A step
does not change the earlier states, so that it can be repeated after a failure.

Shape letters: N new tokens, C width.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engines.core.runner import SequenceFailure
from engines.torch_backend.step import SequenceRows

_LOST = "The recurrent state of this request is missing; retry the request."


class LayerState:
    """The state of one sequence, or of several, in one layer, with the interface of transformers' cache.

    Tensors are never modified in place if another state holds them. Shapes: the first dimension of all tensors
    counts sequences.
    """

    def __init__(self, tensors: Any = (), kernels: Any = ()) -> None:
        """Copies both mappings, so that updates do not change the given state."""
        self.tensors: dict[tuple[str, int], Tensor] = dict(tensors)  #: by kind and index
        self.kernels: dict[int, int] = dict(kernels)  #: tokens that a convolution reads

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The last tokens before a convolution; None at the start of a sequence."""
        return self.tensors.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """None at the start of a sequence."""
        return self.tensors.get(("recurrent", state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:  # fmt: skip
        """Append new tokens. Returns them after the earlier tokens that the convolution reads. Shapes: (..., n)."""
        kernel = self.kernels.setdefault(state_idx, conv_kernel_size or conv_states.shape[-1])
        before = self.tensors.get(("conv", state_idx))
        if before is not None:
            seen = torch.cat([before, conv_states], dim=-1)
        else:
            seen = F.pad(conv_states, (max(0, kernel - conv_states.shape[-1]), 0))
        self.tensors["conv", state_idx] = seen[..., -kernel:].clone()
        return seen

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Shapes: unchanged."""
        is_part = recurrent_states.untyped_storage().nbytes() > recurrent_states.nbytes
        # a view would keep the states of all chunks alive
        kept = recurrent_states.clone() if is_part else recurrent_states
        self.tensors["recurrent", state_idx] = kept
        return recurrent_states

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Whether there were earlier tokens."""
        return bool(self.tensors)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    @classmethod
    def join(cls, states: list["LayerState"]) -> "LayerState":
        """Join states of several sequences in new memory, because mixers can modify them in place for one token."""
        first = states[0]
        joined = {key: torch.cat([state.tensors[key] for state in states]) for key in first.tensors}
        return cls(joined, first.kernels)

    def split(self) -> Iterator["LayerState"]:
        for row in range(len(next(iter(self.tensors.values())))):
            own = {key: x[row : row + 1] for key, x in self.tensors.items()}
            yield LayerState(own, self.kernels)


#: by mixer: the state of one sequence after some number of tokens
_States = dict["Mixer", LayerState]


class SequenceStates:
    """States of every sequence in all mixers, before and after the sequence's last step."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[int, _States]] = {}  # by request and number of tokens
        self.sequences: Sequence[SequenceRows] | None = None  #: of the current step
        self.before: list[_States] = []  #: of the sequences of the current step
        self.after: list[_States] = []

    @contextmanager
    def step(self, sequences: Sequence[SequenceRows]) -> Iterator[None]:
        """Provide the states of a step's sequences to the mixers, and store the results. Raises: SequenceFailure."""
        self.before = []
        for each in sequences:
            kept = self._kept.get(each.request_id, {})
            if each.num_computed and each.num_computed not in kept:
                raise SequenceFailure(each.request_id, _LOST)
            self.before.append(kept[each.num_computed] if each.num_computed else {})
        self.after = [{} for _ in sequences]
        self.sequences = sequences
        try:
            yield
        finally:
            self.sequences = None
        for each, before, after in zip(sequences, self.before, self.after, strict=True):
            self._kept[each.request_id] = {each.num_computed: before, each.num_context: after}
        self.before, self.after = [], []

    @property
    def num_bytes(self) -> int:
        storages = {
            x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
            for by_count in self._kept.values()
            for kept in by_count.values()
            for state in kept.values()
            for x in state.tensors.values()
        }
        return sum(storages.values())

    def release(self, request_id: str) -> None:
        self._kept.pop(request_id, None)


def is_mixer(module: nn.Module) -> bool:
    """Whether a module keeps a state like transformers' linear attention layers."""
    if not hasattr(module, "layer_idx"):
        return False
    source = inspect.getsource(type(module).forward)
    return ".update_conv_state(" in source or ".update_recurrent_state(" in source


class Mixer:
    """Replacement for the forward pass of a layer that keeps a state."""

    def __init__(self, module: nn.Module, states: SequenceStates) -> None:
        self._forward: Any = module.forward
        parameters = inspect.signature(module.forward).parameters
        self._name = "cache_params" if "cache_params" in parameters else "past_key_values"
        self._states = states
        self.num_bytes = 0  #: size of one sequence's state, set by `measure`
        self._seen: Tensor | None = None

    def measure(self) -> None:
        """Compute the layer's last input again, to measure the size of a state."""
        if self._seen is not None:
            state = LayerState()
            self._forward(self._seen, **{self._name: state})
            self.num_bytes, self._seen = sum(x.nbytes for x in state.tensors.values()), None

    def __call__(self, hidden_states: Tensor, *others: Any, **options: Any) -> Any:
        """Shapes: (1, N, C), unchanged."""
        sequences = self._states.sequences
        if sequences is None:  # outside of steps: transformers' behaviour
            self._seen = hidden_states
            return self._forward(hidden_states, *others, **options)
        out = torch.empty_like(hidden_states)
        before, after = self._states.before, self._states.after
        together: list[int] = []
        for number, rows in enumerate(sequences):
            state = before[number].get(self)
            if rows.num_new == 1 and state is not None:
                together.append(number)
                continue
            state = LayerState() if state is None else LayerState(state.tensors, state.kernels)
            run = slice(rows.start, rows.stop)
            out[:, run] = self._forward(hidden_states[:, run], **{self._name: state})
            after[number][self] = state
        if together:
            places = [sequences[number].start for number in together]
            joined = LayerState.join([before[number][self] for number in together])
            mixed = self._forward(hidden_states[0, places, None], **{self._name: joined})
            out[0, places] = mixed[:, 0]
            for number, state in zip(together, joined.split(), strict=True):
                after[number][self] = state
        return out
