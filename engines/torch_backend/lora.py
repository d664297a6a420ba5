"""LoRA adapters, and steps in which each sequence can use a different adapter.

Deltas are attached for one step, so steps without adapters have no overhead. A step fails unless each adapted linear
layer adds its delta exactly once. This check detects models that compute a layer without its `LinearGroup`.

Source: Hu et al. 2021 (LoRA); Kalajdzievski 2023 (rsLoRA); peft's `LoraConfig`.

Shape letters: M tokens, K inputs, N outputs, r rank.
"""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from engines.base import Adapter, AdapterLimits, BadAdapter, UnsupportedCheckpoint
from engines.core.runner import SequenceFailure
from engines.packages.adapter_files import CONFIG_FILE, MAX_ALPHA, WEIGHTS_FILE, read_adapter
from engines.packages.checkpoint_json import Fields, name_some, shown
from engines.torch_backend.layers.linear import Linear
from engines.torch_backend.layers.linear_group import LinearGroup
from engines.torch_backend.step import StepInputs

if TYPE_CHECKING:
    from engines.torch_backend.models.registry import FamilyModel

#: Components of the decoder's path in checkpoints. Any other component leads to a tower, a projector or a head.
_DECODER_WORDS = frozenset({"model", "language_model", "text_model", "decoder", "transformer"})
_WEIGHT = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<part>[AB])\.weight")


@dataclass(frozen=True, slots=True)
class LowRank:
    """The delta of a linear layer: up @ down. Shapes: down (r, K), up float32 (N, r), times the adapter's scale."""

    down: Tensor
    up: Tensor


def read_peft(directory: Path, limits: AdapterLimits) -> tuple[str, dict[str, LowRank]]:
    """The digest of an adapter's directory, and its deltas by names of transformers' modules. Raises: BadAdapter."""
    files = read_adapter(directory, limits)
    try:
        weights = safetensors.torch.load(files.weights)
        return files.digest, _pair(weights, files.config, limits)
    except UnsupportedCheckpoint as error:  # its message names the field
        raise BadAdapter(str(error)) from None
    except (SafetensorError, KeyError, ValueError) as error:
        raise BadAdapter(f"{WEIGHTS_FILE} is damaged: {error}") from None


def _pair(weights: dict[str, Tensor], config: Fields, limits: AdapterLimits) -> dict[str, LowRank]:
    """Raises: BadAdapter for tensors that are not pairs of matrices."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights.items():
        found = _WEIGHT.fullmatch(name)
        if found is None:
            raise BadAdapter(
                f"the weight {shown(name)} is neither lora_A nor lora_B of a linear layer"
            )
        if tensor.dim() != 2 or not tensor.is_floating_point():
            raise BadAdapter(f"the weight {shown(name)} is not a matrix of numbers")
        parts.setdefault(found["module"], {})[found["part"]] = tensor
    if not parts:
        raise BadAdapter(f"{WEIGHTS_FILE} holds no weights")
    changes = {}
    for module, pair in parts.items():
        if len(pair) < 2 or pair["A"].shape[0] != pair["B"].shape[1]:
            raise BadAdapter(f"{shown(module)} does not have lora_A and lora_B of the same rank")
        rank = pair["A"].shape[0]
        expected = _pattern(config, "rank_pattern", module) or config.get("r", rank)
        if rank != expected or rank > limits.max_rank:
            raise BadAdapter(
                f"{shown(module)} has rank {rank}; it must be the rank in {CONFIG_FILE}, {shown(expected)}, "
                f"and at most {limits.max_rank} (VLM_LIMITS__MAX_LORA_RANK)"
            )
        alpha = _pattern(config, "alpha_pattern", module) or config.get("lora_alpha", 8)
        alpha = config.check_number("lora_alpha", alpha, 0, MAX_ALPHA)
        divisor = math.sqrt(rank) if config.flag("use_rslora", False) else rank
        changes[module] = LowRank(pair["A"], pair["B"].float() * (alpha / divisor))
    return changes


def _pattern(config: Fields, name: str, module: str) -> object:
    """The value for a module; None if no key matches. As in peft, keys are regular expressions or name suffixes."""
    for key, value in config.section(name).values.items():
        try:
            matches = re.fullmatch(rf"(.*\.)?({key})", module)
        except re.error:
            raise config.refuse(name, f"has the invalid pattern {shown(key)} as a key") from None
        if matches:
            return value
    return None


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a `Change` for one linear layer. Shapes: up (r, N), scaled."""

    outputs: slice
    ranks: slice
    up: Tensor


@dataclass(frozen=True, slots=True)
class Change:
    """The delta of linear layers that run as one. Shapes: down (K, r of all parts)."""

    down: Tensor
    parts: tuple[Part, ...]

    def add(self, y: Tensor, x: Tensor) -> None:
        """Shapes: y (M, N of all layers), x (M, K)."""
        inner = x @ self.down
        for part in self.parts:
            y[:, part.outputs].addmm_(inner[:, part.ranks], part.up)


@dataclass(frozen=True, eq=False, kw_only=True)
class LoraAdapter(Adapter):
    names: frozenset[str]  #: adapted linear layers, relative to the decoder's layers
    changes: dict[tuple[str, ...], Change]  #: by the names of linear layers that run as one


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """A group of linear layers that runs as one."""

    names: tuple[str, ...]
    layers: tuple[Linear, ...]
    group: LinearGroup


class Loras:
    def __init__(self, model: "FamilyModel", dtype: torch.dtype, device: torch.device) -> None:
        """`dtype`: element type of the adapters' matrices."""
        self._dtype, self._device = dtype, device
        path, layers = model.decoder_layers()
        self._path = path.split(".")
        self._stored_rows = model.stored_rows
        self._decoder = model.language_model  #: None in generic models
        self._sites = list(_find_sites(layers))
        #: outputs and inputs of each linear layer
        self._shapes = {
            name: (layer.out_features, layer.in_features)
            for site in self._sites
            for name, layer in zip(site.names, site.layers, strict=True)
        }

    # -- loading
    def load(self, directory: Path, limits: AdapterLimits) -> LoraAdapter:
        digest, deltas = read_peft(directory, limits)
        places = {m: self._stored_rows(self._name(m)) for m in deltas}
        if unknown := sorted(
            m for m, rows in places.items() if not rows.keys() <= self._shapes.keys()
        ):
            raise BadAdapter(
                f"the adapter changes {name_some(unknown, 3)}, but only linear layers of the decoder can be "
                "adapted; train with such target_modules only, or merge the adapter into the model"
            )
        stored: dict[str, LowRank] = {}
        for module, rows in places.items():
            if rows.keys() & stored.keys():
                raise BadAdapter(
                    "the adapter changes a linear layer twice: under two names, or alone and in a joined layer"
                )
            change = deltas[module]
            self._check(module, list(rows), change)
            stored |= {
                name: change if own is None else replace(change, up=change.up[own])
                for name, own in rows.items()
            }
        try:
            pairs = {name: self._place(change) for name, change in stored.items()}
            changes = self._join(pairs)
        except RuntimeError as error:
            raise BadAdapter(f"the adapter does not fit into {self._device}'s memory") from error
        num_bytes = sum(matrix.nbytes for pair in pairs.values() for matrix in pair)
        rank = max(len(up) for _, up in pairs.values())
        return LoraAdapter(digest, rank, num_bytes, names=frozenset(pairs), changes=changes)

    def _name(self, module: str) -> str:
        """The module's name relative to the decoder's layers; empty if the module is not in the decoder."""
        head, _, name = module.partition(f".{self._path[-1]}.")
        is_decoder = set(head.split(".")) <= _DECODER_WORDS | set(self._path)
        return name if is_decoder else ""

    def _check(self, module: str, names: Sequence[str], stored: LowRank) -> None:
        """Raises: BadAdapter for matrices of another model, or with numbers beyond the range of the dtype."""
        found = stored.up.shape[0], stored.down.shape[1]
        shape = sum(self._shapes[name][0] for name in names), self._shapes[names[0]][1]
        if found != shape:
            raise BadAdapter(
                f"the adapter's {module} has shape {found}, but the model's has {shape}; use the adapter's base model"
            )
        for matrix in (stored.down, stored.up):
            if not matrix.to(self._dtype).isfinite().all():
                raise BadAdapter(
                    f"the adapter's {module} has numbers beyond the range of {self._dtype}"
                )

    def _place(self, stored: LowRank) -> tuple[Tensor, Tensor]:
        """Both matrices on the device. Shapes: returns (K, r), (r, N)."""
        down, up = (x.to(self._device, self._dtype).t() for x in (stored.down, stored.up))
        return down.contiguous(), up.contiguous()

    def _join(self, pairs: dict[str, tuple[Tensor, Tensor]]) -> dict[tuple[str, ...], Change]:
        """The changes of all sites. The `down` matrices of layers that run as one are joined, for one product."""
        changes: dict[tuple[str, ...], Change] = {}
        for site in self._sites:
            parts: dict[str, Part] = {}
            start = rank = 0
            for name, layer in zip(site.names, site.layers, strict=True):
                stop = start + layer.out_features
                if name in pairs:
                    up = pairs[name][1]
                    parts[name] = Part(slice(start, stop), slice(rank, rank + len(up)), up)
                    rank += len(up)
                start = stop
            if parts:
                downs = [pairs[name][0] for name in parts]
                joined = downs[0] if len(downs) == 1 else torch.cat(downs, dim=1)
                changes[site.names] = Change(joined, tuple(parts.values()))
        return changes

    # -- in steps
    @contextmanager
    def applied(self, inputs: StepInputs) -> Iterator[None]:
        """Add the deltas of a step. Raises: SequenceFailure afterwards unless each layer added its delta once."""
        step = _AdaptedRows(inputs, self._device)
        sites = [site for site in self._sites if site.names in step.places]
        if self._decoder is not None:
            self._decoder.is_adapted = True
        for site in sites:
            site.group.delta = partial(step.add, site)
        try:
            yield
        finally:
            for site in sites:
                site.group.delta = None
            if self._decoder is not None:
                self._decoder.is_adapted = False
        step.check()


class _AdaptedRows:
    """The rows of each adapter in a step, and how often each layer has added its delta."""

    def __init__(self, inputs: StepInputs, device: torch.device) -> None:
        runs: dict[LoraAdapter, list[Tensor]] = {}
        self._request_id = ""
        for sequence, adapter in zip(inputs.sequences, inputs.adapters, strict=True):
            if adapter is not None:
                self._request_id = self._request_id or sequence.request_id
                run = torch.arange(sequence.start, sequence.stop)
                runs.setdefault(adapter, []).append(run)
        self._num_rows = len(inputs.slots)
        #: each adapter, and the slice of its rows among all adapted rows
        self._slices: list[tuple[LoraAdapter, slice]] = []
        start = 0
        for adapter, own in runs.items():
            stop = start + sum(len(run) for run in own)
            self._slices.append((adapter, slice(start, stop)))
            start = stop
        is_simple = len(runs) == 1 and start == self._num_rows
        rows = torch.cat([run for own in runs.values() for run in own])
        self._rows = None if is_simple else rows.to(device)
        self._counts = dict.fromkeys([name for adapter in runs for name in adapter.names], 0)
        #: names of the sites that have a delta
        self.places = {names for adapter in runs for names in adapter.changes}

    def add(self, site: Site, y: Tensor, x: Tensor) -> None:
        """Add to the product of a site. Shapes: (M, N of all its layers), (M, K)."""
        if len(y) != self._num_rows:
            raise self._failure(site.names[0])
        for name in site.names:
            if name in self._counts:
                self._counts[name] += 1
        names = site.names
        slices = [(s.changes[names], place) for s, place in self._slices if names in s.changes]
        x = x.to(slices[0][0].down.dtype)
        if self._rows is None and y.dtype is x.dtype:
            slices[0][0].add(y, x)
            return
        added = x.new_zeros(len(x) if self._rows is None else len(self._rows), y.shape[1])
        inputs = x if self._rows is None else x[self._rows]
        for change, place in slices:
            change.add(added[place], inputs[place])
        if self._rows is None:
            y += added
        else:
            y.index_add_(0, self._rows, added.to(y.dtype))

    def check(self) -> None:
        """Raises: SequenceFailure unless every delta was added once."""
        for name, count in self._counts.items():
            if count != 1:
                raise self._failure(name)

    def _failure(self, name: str) -> SequenceFailure:
        return SequenceFailure(
            self._request_id,
            f"the adapter changes {name}, which this model does not compute once per token; merge it into the model",
        )


def _find_sites(layers: nn.Module) -> Iterator[Site]:
    """Adaptable groups. Experts get only some tokens, and stateful layers run once per sequence; both are skipped."""
    names = {module: name for name, module in layers.named_modules()}
    skipped: list[str] = []
    for module, name in names.items():
        groups = [each for each in vars(module).values() if isinstance(each, LinearGroup)]
        if "forward" in vars(module) or name.endswith("experts"):
            skipped.append(f"{name}.")
        if name.startswith(tuple(skipped)):
            continue
        for group in groups:
            linears = tuple(each for each in group.layers if isinstance(each, Linear))
            if len(linears) == len(group.layers):
                yield Site(tuple(names[each] for each in linears), linears, group)
