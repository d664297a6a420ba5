"""Transformers' plan of what devices share (`tp_plan`), carried out on a loaded model: each member keeps its part.

Only the decoder and its head are shared; rank 0 encodes images alone. Weights are cut where their files are mapped, so
that a member reads little beyond its part. Embeddings stay whole.

Source: transformers.distributed.tensor_parallel, whose styles these are.

Shape letters: K inputs, N outputs, E experts.
"""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from engines.torch_backend.layers.linear_group import adopt
from engines.torch_backend.models.config import UnsupportedCheckpoint
from engines.torch_backend.parallel.mesh import Mesh, Shard, advise_size, share_heads

if TYPE_CHECKING:  # a second of imports, which no model of ours needs
    from transformers import PreTrainedModel

#: Kinds of decoders without a plan, and those whose modules they have.
_KIN = {"qwen3_vl_text": "qwen3"}
#: Styles that matter for gradients alone, or for parameters that stay whole here.
_WHOLE = frozenset({
    "replicated_with_grad_allreduce", "mla_kv_a_proj", "replicate", "local_params", "embedding_rowwise",
    "embedding_colwise",
})  # fmt: skip
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


def share_model(model: "PreTrainedModel", mesh: Mesh) -> None:
    """Cut what members share down to this one's part. Raises: UnsupportedCheckpoint."""
    name = type(model).__name__
    plan = _plan_of(model, mesh)
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    for path, style in plan.items():
        if style in _WHOLE:
            continue
        try:
            if path in parameters:
                _share_parameter(modules[path.rpartition(".")[0]], path, style, mesh)
            elif style in _LINEAR_STYLES:
                _share_linear(model, path, style, mesh, heads)
            elif style in _OTHER_STYLES:
                _wrap(modules[path], _OTHER_STYLES[style], mesh)
            else:
                raise ValueError(f"its style {style!r} is unknown")
        except ValueError as error:
            kv_heads, channels = (
                count
                if isinstance(count := getattr(config, name, None), int) and count
                else default
                for name, default in (("num_key_value_heads", heads), ("intermediate_size", 0))
            )
            counts = (heads, kv_heads, channels)
            raise UnsupportedCheckpoint(
                f"{name} cannot be shared by {mesh.size} devices: {path}: {error}; {advise_size(*counts)}"
            ) from None


def _plan_of(model: Any, mesh: Mesh) -> dict[str, str]:
    """Styles by names of modules and parameters of the decoder and its head. Raises: UnsupportedCheckpoint."""
    decoder = model.get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    wild = dict(model.tp_plan)
    kin = _KIN.get(model.config.get_text_config(decoder=True).model_type)
    if kin is not None:
        plan: dict[str, str] = CONFIG_MAPPING[kin].base_model_tp_plan or {}
        wild |= {f"{prefix}.{name}": style for name, style in plan.items()}
    head = model.get_output_embeddings()
    found = {}
    for name, part in (*model.named_parameters(), *model.named_modules()):
        style = wild.get(_NUMBER.sub(".*", name))
        if style is not None and (name.startswith(f"{prefix}.") or part is head):
            found[name] = style
    if not any(".layers." in f".{name}" and style not in _WHOLE for name, style in found.items()):
        raise UnsupportedCheckpoint(
            f"{type(model).__name__} cannot be shared by {mesh.size} devices: transformers has no plan of that "
            "(tp_plan) for its layers; run several workers (--workers), each with all of it"
        )
    return found


# -- linear maps
_LINEAR_STYLES = frozenset({
    "colwise", "colwise_gather_output", "colwise_rep", "rowwise", "rowwise_split_input", "rowwise_rep",
})  # fmt: skip


def _share_linear(model: nn.Module, path: str, style: str, mesh: Mesh, num_heads: int) -> None:
    linear = model.get_submodule(path)
    if not isinstance(linear, nn.Linear):
        raise ValueError(f"{type(linear).__name__} is no linear layer")
    shard = Shard(mesh, "outputs", gathers=True)
    if style == "colwise":
        name = path.rpartition(".")[2]
        width = getattr(model.get_submodule(path.rpartition(".")[0]), "head_dim", None)
        shard = Shard(mesh, "outputs")
        if name in ("k_proj", "v_proj") and width:
            shard = share_heads(linear.out_features // width, mesh)
        elif name == "q_proj" and num_heads % mesh.size:
            raise ValueError(f"{num_heads} heads of queries do not divide")
    elif style.startswith("row"):
        shard = Shard(mesh, "inputs", splits=style != "rowwise")
    elif linear.out_features % mesh.size:
        return  # what is gathered may as well stay whole
    adopt(model, path, shard)


def _kept(x: Tensor) -> nn.Parameter:
    return nn.Parameter(x, requires_grad=False)


# -- experts, which are parameters
def _share_parameter(module: Any, path: str, style: str, mesh: Mesh) -> None:
    name = path.rpartition(".")[2]
    whole: Tensor = getattr(module, name).detach()
    if whole.dim() != 3:
        raise ValueError(f"a parameter of {whole.dim()} dimensions cannot be shared")
    dim, num_runs = {"packed_colwise": (1, 2), "colwise": (1, 1), "rowwise": (2, 1)}.get(
        style, (0, 0)
    )
    if not num_runs:
        raise ValueError(f"its style {style!r} is unknown")
    if whole.shape[dim] % (num_runs * mesh.size):
        raise ValueError(f"{whole.shape[dim]} channels of experts do not divide")
    runs = [run.tensor_split(mesh.size, dim)[mesh.rank] for run in whole.chunk(num_runs, dim)]
    setattr(module, name, _kept(torch.cat(runs, dim).contiguous()))


# -- modules that do more than a map
def _sum_outputs(forward: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    return lambda *args, **options: mesh.all_reduce(forward(*args, **options))


def _divide_inputs(forward: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    return lambda x, *args, **options: forward(x / mesh.size, *args, **options)


_OTHER_STYLES = {
    "moe_tp_experts": _sum_outputs,
    "all_reduce": _sum_outputs,
    "moe_identity_expert": _divide_inputs,
}


def _wrap(module: Any, change: Callable[..., Any], mesh: Mesh) -> None:
    module.forward = change(module.forward, mesh)
