"""Records the calls of a model's modules in one forward pass."""

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
    #: The hidden states when it returned, which later modules may change in place.
    copied: Tensor | None

    @property
    def input(self) -> Any:
        """The hidden states, however they were passed."""
        return self.args[0] if self.args else self.kwargs.get("hidden_states")


class Watched:
    """The calls of all modules in one forward pass, in the order of their returns."""

    def __init__(self) -> None:
        self._calls: dict[nn.Module, list[Call]] = {}

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Record calls inside the block."""

        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = first_of(output)
            copied = given.clone() if isinstance(given, Tensor) else None
            self._calls.setdefault(module, []).append(Call(args, kwargs, output, copied))

        handles = [m.register_forward_hook(note, with_kwargs=True) for m in model.modules()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def calls(self, module: nn.Module) -> list[Call]:
        return self._calls.get(module, [])


def first_of(output: Any) -> Any:
    """The hidden states of a module's output."""
    return output[0] if isinstance(output, tuple) else output
