"""The modules of sentence-transformers behind the pooling.

Shape letters: n rows, V numbers of a vector.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from engines.base import UnsupportedCheckpoint
from engines.pooling.checkpoint import DenseConfig, Normalize
from engines.torch_backend.loading.stored_tensors import finite

#: Activations of torch.nn by name.
_ACTIVATIONS: dict[str, type[nn.Module]] = {
    kind.__name__: kind
    for kind in (
        nn.ELU, nn.GELU, nn.Hardtanh, nn.Identity, nn.LeakyReLU, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU,
        nn.Sigmoid, nn.Softplus, nn.Tanh,
    )
}  # fmt: skip


class Dense(nn.Module):
    """A linear layer with activation, in float32."""

    def __init__(self, config: DenseConfig, directory: Path) -> None:
        """Raises: UnsupportedCheckpoint."""
        super().__init__()
        where = f"{config.folder}/config.json"
        module, _, name = config.activation.rpartition(".")
        if not module.startswith("torch.nn") or name not in _ACTIVATIONS:
            raise UnsupportedCheckpoint(
                f"{where}: the activation {config.activation!r} is not supported; supported are "
                f"{', '.join(_ACTIVATIONS)} of torch.nn"
            )
        self.activation = _ACTIVATIONS[name]()
        self.linear = nn.Linear(config.num_inputs, config.num_outputs, config.has_bias)
        self.residual: Any = None
        if config.is_residual:
            is_same = config.num_inputs == config.num_outputs
            shape = (config.num_inputs, config.num_outputs)
            self.residual = nn.Identity() if is_same else nn.Linear(*shape, bias=False)
        self._load(directory / config.folder)
        self.requires_grad_(False).eval()

    def _load(self, folder: Path) -> None:
        file = folder / "model.safetensors"
        if not file.is_file():
            raise UnsupportedCheckpoint(
                f"{folder.name} has no model.safetensors; pickled weights (.bin) are not read, because "
                "unpickling can run any code"
            )
        try:
            weights = {name: finite(name, x.float()) for name, x in load_file(file).items()}
            self.load_state_dict(weights)
        except (RuntimeError, SafetensorError, OSError) as error:
            raise UnsupportedCheckpoint(f"{folder.name}/model.safetensors: {error}") from error

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (n, V) to (n, V)."""
        y = self.activation(self.linear(x))
        return y if self.residual is None else y + self.residual(x)


class _Unit(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1)


def build_head(modules: Sequence[DenseConfig | Normalize], directory: Path) -> nn.Sequential:
    """The modules in order. Raises: UnsupportedCheckpoint."""
    return nn.Sequential(
        *(Dense(each, directory) if isinstance(each, DenseConfig) else _Unit() for each in modules)
    )


def num_outputs(modules: Sequence[DenseConfig | Normalize], num_inputs: int) -> int:
    """Size of the output vectors. Raises: UnsupportedCheckpoint if the sizes do not match."""
    for each in modules:
        if isinstance(each, DenseConfig):
            if each.num_inputs != num_inputs:
                raise UnsupportedCheckpoint(
                    f"{each.folder}/config.json: it takes {each.num_inputs} numbers, and is given {num_inputs}"
                )
            num_inputs = each.num_outputs
    return num_inputs
