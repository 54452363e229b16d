"""The style for modules with stacked experts, as those of transformers and torchtitan."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from agmm.errors import InvalidArgument
from agmm.nn._experts import Way, check_tokens, local_part, through_experts, why_not_shared
from agmm.nn._held import Held
from agmm.nn._ranks import Ranks, ascending, group_of_mesh
from agmm.nn._targets import Target, local, wanted_output
from agmm.ops.checks import check_operand
from agmm.runtime.epilogues import GatedActivation

_PACKED = "gate_up_proj"
_FORMS = (
    (_PACKED, "down_proj"),
    ("w1_EFD", "w3_EFD", "w2_EDF"),
    ("w1", "w3", "w2"),
    ("gate_proj", "up_proj", "down_proj"),
)
"""The names of the parameters that modules have, down last: transformers' gate and up in one,
torchtitan's of version 0.3 and of earlier ones, and those of `Experts`."""
_ACTIVATIONS: dict[str, GatedActivation] = {
    "SiLU": "silu_mul",
    "SiLUActivation": "silu_mul",
    "GELUActivation": "gelu_mul",
    "GELUTanh": "gelu_tanh_mul",
    "PytorchGELUTanh": "gelu_tanh_mul",
}
"""The activations by the class of a module's ``act_fn``: torch's, and those that transformers has
under ``silu``, ``gelu`` and ``gelu_pytorch_tanh``."""
_NOTE = "_agmm_unpacked"


class _Form(NamedTuple):
    """How a module stores its experts."""

    owner: torch.nn.Module
    """The module itself, or the one in it that has the parameters."""
    names: tuple[str, ...]
    """The parameters: gate and up, in one or in two, and down last."""
    transposed: bool
    """Whether each matrix is [K, N]; else it is [N, K], as the weight of a linear."""
    num_experts: int
    inner: int

    @property
    def dim_of_inner(self) -> int:
        """The dimension of gate and up that has the inner features; of down it is the other."""
        return 2 if self.transposed else 1


class ExpertParallel(ParallelStyle):
    """A module with stacked experts, each rank with some of them, or with a slice of each.

    For modules that have ``gate_up_proj`` and ``down_proj``, as the experts of transformers, or
    ``w1``, ``w3`` and ``w2``, as torchtitan's, or ``gate_proj``, ``up_proj`` and ``down_proj``, of
    three dimensions: experts first, then as in the weight of a linear. All may be those of one
    module inside, as in torchtitan's ``RoutedExperts``. Their forward is then called with this
    rank's tokens, the ids of their experts and the router's weights, these two in either order.
    The router stays as it is; its parameters, which each rank
    applies to its own tokens, are summed by `sum_replicated_gradients`.

    Args:
        sliced: give each rank a slice of the inner features of every expert, in place of some of
            the experts. ``gate_up_proj`` then becomes ``gate_proj`` and ``up_proj``;
            `full_state_dict` and `load_full_state_dict` keep its name.
        activation: ``"silu_mul"``, ``"gelu_mul"`` or ``"gelu_tanh_mul"``; that of the module's
            ``act_fn`` when None, and SwiGLU where it has none.
        capacity_factor: see `Experts`.
        use_local_output: return a tensor, not a DTensor sharded along the tokens.
        save_gathered: see `agmm.all_gather_grouped_matmul`.
        save_preactivation: see `agmm.all_gather_grouped_matmul`.
        fp8: see `Experts`.
    """

    def __init__(
        self,
        *,
        sliced: bool = False,
        activation: GatedActivation | None = None,
        capacity_factor: float | None = None,
        use_local_output: bool = True,
        save_gathered: bool = False,
        save_preactivation: bool = True,
        fp8: Literal["rowwise", "block"] | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.use_local_output = use_local_output
        self.way = Way(
            sliced,
            activation or "silu_mul",
            capacity_factor,
            save_gathered,
            save_preactivation,
            fp8=fp8,
        )
        fault = self.way.why_not()
        if fault is not None:
            raise InvalidArgument(f"{type(self).__name__}: {fault}")

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        target = Target(self, module)
        group_of_mesh(device_mesh)
        form = _form_of(target)
        way = self.way._replace(activation=self.activation or _activation_of(target, form.owner))
        fault = why_not_shared(way, form.num_experts, form.inner, device_mesh.size())
        if fault is not None:
            raise target.fault(fault)
        form = _divide(target, form, way, ascending(device_mesh))
        served = _Served(target, self, form, way, Ranks(device_mesh, None))
        module.forward = partial(_forward, served)
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}(sliced={self.way.sliced}, fp8={self.way.fp8})"


class _Served(NamedTuple):
    """A module that the style was applied to."""

    target: Target
    style: ExpertParallel
    form: _Form
    way: Way
    ranks: Ranks


def _form_of(target: Target) -> _Form:
    """How the module stores its experts.

    Raises:
        InvalidArgument: it is no module of gated experts and nothing else.
    """
    given = dict(target.module.named_parameters())
    inside = {name.rpartition(".")[0] for name in given}
    prefix = inside.pop() if len(inside) == 1 else ""
    module = target.module.get_submodule(prefix)
    own: dict[str, Any] = {name.removeprefix(f"{prefix}."): one for name, one in given.items()}
    names = next((names for names in _FORMS if set(names) == set(own)), None)
    if names is None or any(parameter.dim() != 3 for parameter in own.values()):
        found = ", ".join(f"{name} {list(one.shape)}" for name, one in own.items()) or "none"
        wanted = " or ".join(", ".join(names) for names in _FORMS)
        raise target.fault(f"parameters: found {found}, wanted {wanted}, of 3 dimensions")
    for name, parameter in own.items():
        if isinstance(parameter, DTensor) or is_traceable_wrapper_subclass(parameter):
            raise target.fault(f"{name}: found {type(parameter).__name__}, wanted a plain tensor")
    apply_gate = getattr(module, "_apply_gate", None)
    is_own_gate = getattr(apply_gate, "__name__", "") not in ("", "_default_apply_gate")
    if is_own_gate or not getattr(module, "is_concatenated", True):
        raise target.fault(
            "gate and up: found a gate of the module's own, wanted activation(gate) * up with gate "
            "before up"
        )
    down = own[names[-1]]
    transposed = bool(getattr(module, "is_transposed", False))
    if names[0] == _PACKED:  # whose shape says it
        transposed = own[_PACKED].shape[1] != 2 * down.shape[2]
    experts, inner, hidden = down.shape if transposed else down.transpose(1, 2).shape
    count = 2 if names[0] == _PACKED else 1
    wide = (hidden, count * inner) if transposed else (count * inner, hidden)
    for name in names[:-1]:
        if tuple(own[name].shape) != (experts, *wide):
            raise target.fault(
                f"{name}: found {list(own[name].shape)} with {names[-1]} {list(down.shape)}, "
                f"wanted {[experts, *wide]}"
            )
    return _Form(module, names, transposed, experts, inner)


def _activation_of(target: Target, owner: torch.nn.Module) -> GatedActivation:
    function: Any = getattr(owner, "act_fn", None)
    if function is None:
        return "silu_mul"
    kind = type(function).__name__
    if isinstance(function, torch.nn.GELU):
        return "gelu_mul" if function.approximate == "none" else "gelu_tanh_mul"
    if function is torch.nn.functional.silu:
        return "silu_mul"
    if kind not in _ACTIVATIONS:
        raise target.fault(f"act_fn: found {kind}, wanted an activation= of the style")
    return _ACTIVATIONS[kind]


def _divide(target: Target, form: _Form, way: Way, mesh: DeviceMesh) -> _Form:
    """Makes the module's parameters DTensors, gate and up apart where each is sliced; and returns
    how it stores its experts then."""
    module, dim = form.owner, form.dim_of_inner
    whole: dict[str, torch.nn.Parameter] = {name: getattr(module, name) for name in form.names}
    pieces: dict[str, torch.Tensor] = {**whole}
    if way.sliced and form.names[0] == _PACKED:
        packed = pieces.pop(_PACKED)
        gate, up = packed.detach().chunk(2, dim)
        pieces = {"gate_proj": gate, "up_proj": up, **pieces}
        held = Held(("gate_proj", "up_proj"), (form.inner,) * 2, Shard(dim), dim)
        setattr(module, _NOTE, {_PACKED: held})
        delattr(module, _PACKED)
        form = form._replace(names=tuple(pieces))
    for name, values in pieces.items():
        of_slices = Shard(3 - dim if name == form.names[-1] else dim)
        placement: Placement = of_slices if way.sliced else Shard(0)
        source = target.style.src_data_rank
        distributed = distribute_tensor(values, mesh, [placement], src_data_rank=source)
        needs_grad = whole.get(name, whole.get(_PACKED, values)).requires_grad
        module.register_parameter(name, torch.nn.Parameter(distributed, needs_grad))
    return form


def unpacked_by_style(module: torch.nn.Module) -> dict[str, Held]:
    """The parameters that the style has taken apart, by the name that the module had for them."""
    found: dict[str, Held] = module.__dict__.get(_NOTE, {})
    return found


def _forward(
    served: _Served,
    x: torch.Tensor,
    *choices: torch.Tensor,
    tokens_per_rank: Sequence[int] | None = None,
    **by_name: torch.Tensor,
) -> torch.Tensor:
    """The forward of the module: of this rank's tokens [..., hidden], the router's ids and weights
    [..., k], and what else the module was called with, as torchtitan's counts."""
    target, style, form, way, ranks = served
    given = [one for one in (*choices, *by_name.values()) if isinstance(one, torch.Tensor)]
    alike = [one for one in given if one.dim() == x.dim()]
    ids = [one for one in alike if not one.is_floating_point()]
    weights = [one for one in alike if one.is_floating_point()]
    if len(ids) != 1 or len(weights) != 1 or x.dim() < 2:
        found = ", ".join(f"{one.dtype} {list(one.shape)}" for one in given) or "none"
        raise target.fault(
            f"arguments: found {found} behind x {list(x.shape)}, wanted the ids and the router's "
            "weights of each token's experts, [tokens, k] each"
        )
    placed: Any = Shard(0)
    if isinstance(x, DTensor):
        (own_placement,) = x.placements
        if isinstance(own_placement, Shard) and own_placement.dim < x.dim() - 1:
            placed = own_placement
    else:
        try:
            check_operand("x", x)
        except InvalidArgument as error:
            raise target.fault(str(error)) from None
    own = [local(one, placed) for one in (x, ids[0], weights[0])]
    shape, own = own[0].shape, [one.flatten(0, -2) for one in own]
    check_tokens(type(target.module).__name__, *own)
    *wide, down = (local_part(getattr(form.owner, name)) for name in form.names)
    if len(wide) == 1:
        wide = list(wide[0].chunk(2, form.dim_of_inner))
    parts = [one if form.transposed else one.transpose(1, 2) for one in (*wide, down)]
    out = through_experts(
        own[0],
        (own[1], own[2]),
        (parts[0], parts[1], parts[2]),
        (ranks.for_ops, ranks.size),
        way,
        form.num_experts,
        tokens_per_rank,
    )
    return wanted_output(style, ranks, out.view(shape), placed)
