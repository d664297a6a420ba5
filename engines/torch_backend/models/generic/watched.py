"""Records the calls of a model's modules in one forward pass."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Call:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    #: A copy of the output hidden states, because later modules can change the originals in place.
    copied: Tensor | None

    @property
    def input(self) -> Any:
        """The input hidden states, passed by position or by name."""
        return self.args[0] if self.args else self.kwargs.get("hidden_states")


@contextmanager
def watching(model: nn.Module) -> Iterator[dict[nn.Module, list[Call]]]:
    """Record the calls of each module inside the block, in the order of their returns; [] for modules without calls."""
    calls: defaultdict[nn.Module, list[Call]] = defaultdict(list)

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given = first_of(output)
        copied = given.clone() if isinstance(given, Tensor) else None
        calls[module].append(Call(args, kwargs, output, copied))

    handles = [m.register_forward_hook(note, with_kwargs=True) for m in model.modules()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def first_of(output: Any) -> Any:
    """The hidden states of a module's output."""
    return output[0] if isinstance(output, tuple) else output
