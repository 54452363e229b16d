"""What the tests of every op run inside the ranks of a group."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import every_op
import torch
import torch.distributed as dist
from every_op import Call, Sizes
from rank_work import group_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import agmm
from agmm.integrations import async_tp
from agmm.nn import (
    ColumnParallelLinear,
    GatedMLP,
    GatherColwiseParallel,
    RowParallelLinear,
    RowwiseScatterParallel,
)
from agmm.runtime import groups

Result = list[str] | None


def gradients(world_size: int, device: str = "cpu") -> Result:
    """Faults, in words: operands that require gradients and get none, though nothing refuses."""
    group = group_of(world_size)
    return None if group is None else gradient_faults(group, device)


def gradient_faults(group: dist.ProcessGroup, device: str) -> list[str]:
    torch.manual_seed(0)
    faults: list[str] = []
    with warnings.catch_warnings(), async_tp.enable():
        warnings.simplefilter("ignore")
        for call in every_op.calls(group.size(), device=device):
            for name, operand in call.tensors():
                operand.requires_grad_()
                fault = _gradient_fault(call, name, operand, group)
                operand.requires_grad_(False)
                operand.grad = None
                if fault is not None:
                    faults.append(f"{call} with {name} on rank {group.rank()}: {fault}")
            if device == "cpu" or call.op not in every_op.SERVED:  # which may be torch's on GPUs
                call(group)  # as always after what was refused
    return faults


def _gradient_fault(
    call: Call, name: str, operand: torch.Tensor, group: dist.ProcessGroup
) -> str | None:
    try:
        outs = call(group)
    except agmm.InvalidArgument as error:
        said = str(error)
        if call.has_backward:
            return f"refused, wanted a gradient: {said}"
        is_named = "requires_grad=True" in said and said.split(":")[0] in _NAMES.get(name, {name})
        return None if is_named else f"refused by {said!r}"
    except RuntimeError as error:
        return f"failed: {error}"
    if not call.has_backward:
        return f"served, wanted a refusal; requires_grad={[out.requires_grad for out in outs]}"
    of_interest = [out.float().sum() for out in outs if out.requires_grad]
    if not of_interest:
        return "served, and no result requires a gradient"
    torch.stack(of_interest).sum().backward()
    if operand.grad is None or not operand.grad.abs().sum().item() > 0:
        return f"gradient {operand.grad}"
    return None


_NAMES = {
    "out": {"out", "x"},
    "residual_out": {"x"},
    "residual": {"residual", "x"},
    "weight": {"weight", "weights", "x"},
    "a": {"a, b"},
    "b": {"a, b"},
    **{name: {name, name.removesuffix("s")} for name in ("As", "Bs", "scale_as", "scale_bs")},
    "biases": {"biases", "bias"},
    "result_scales": {"result_scales", "result_scale"},
    "packed": {"packed", "B"},
    "up": {"up", "a, b"},
}
"""What messages may call an operand whose argument has another name."""


def refused_before_the_scales_are_agreed() -> list[str]:
    """What messages blame on each rank, while the other ranks make no call: one that began to
    agree on scales would wait for them."""
    op: Callable[..., Any] = agmm.all_gather_matmul
    found = []
    for operand in ("A_shard", "B"):
        given = {"A_shard": torch.ones(2, 32), "B": torch.ones(32, 16)}
        given[operand].requires_grad_()
        rank = dist.get_rank()
        if rank == 0:
            try:
                op(**given, quantize="tensorwise", reduce_amax=True)
            except agmm.InvalidArgument as error:
                found.append(str(error).split(":")[0])
        else:
            found.append(operand)
        dist.barrier()
    return found


def views(world_size: int, paths: str, all_sizes: list[Sizes], device: str = "cpu") -> Result:
    """Faults, in words: results that cannot be changed in place, or lie in another's memory.

    Args:
        paths: "as planned", or "unfused": the ranks take themselves to be on hosts of their own.
    """
    group = group_of(world_size)
    if paths == "as planned":
        served = device == "cpu"  # torch's on GPUs, where that is faster
        return None if group is None else view_faults(group, all_sizes, device, served=served)
    # A group of its own, in which nothing is known yet.
    members = None if group is None else dist.get_process_group_ranks(group)
    group = dist.new_group(list(range(dist.get_world_size() - world_size, dist.get_world_size())))
    if members is None:
        return None
    with mock.patch.object(groups, "host_id", return_value=f"host {dist.get_rank()}"):
        faults = view_faults(group, all_sizes, device, served=False)
        ones = torch.ones(world_size, world_size)
        with contextlib.suppress(agmm.Unsupported):
            agmm.all_gather_matmul(ones, ones, group, strict=True)
            faults += ["the calls were fused"] if world_size > 1 else []
    dist.destroy_process_group(group)
    return faults


def view_faults(
    group: dist.ProcessGroup, all_sizes: list[Sizes], device: str, *, served: bool = True
) -> list[str]:
    """``served``: also of torch's ops, whose results are agmm's as long as they are not left to
    torch."""
    torch.manual_seed(0)
    faults: list[str] = []
    with warnings.catch_warnings(), async_tp.enable():
        warnings.simplefilter("ignore")
        for sizes in all_sizes:
            for call in every_op.calls(group.size(), sizes, device):
                if call.op in every_op.SERVED and not served:
                    continue
                label = f"{call} of {sizes} on rank {group.rank()}"
                faults += [f"{label}: {fault}" for fault in _view_faults(call, group)]
    return faults


def _view_faults(call: Call, group: dist.ProcessGroup) -> list[str]:
    faults = []
    given = {tensor.untyped_storage().data_ptr() for _, tensor in call.tensors()}
    given -= {call.operands[name].untyped_storage().data_ptr() for name in _written_to(call)}
    with torch.no_grad():
        outs = call(group)
    storages = [out.untyped_storage().data_ptr() for out in outs]
    if len(set(storages)) != len(storages) or given & set(storages):
        faults.append("results share memory")
    if any(out._is_view() for out in outs):
        faults.append("under no_grad() a view")
    if not call.has_backward:
        return faults
    for _, operand in call.tensors():
        operand.requires_grad_()
    outs = call(group)
    try:
        torch.stack([out.mul_(2).sum() for out in outs]).sum().backward()
    except RuntimeError as error:
        said = str(error).partition("\n")[0]
        # What the backward wants is the one thing that may not be changed.
        if not (call.saves_results and "needed for gradient computation" in said):
            faults.append(said)
    return faults


def _written_to(call: Call) -> list[str]:
    return [name for name in ("out", "residual_out") if name in call.operands]


def flops(world_size: int, device: str = "cpu") -> Result:
    """Faults, in words: calls of which torch's counter finds other FLOPs than they have."""
    group = group_of(world_size)
    return None if group is None else flop_faults(group, device)


def flop_faults(group: dist.ProcessGroup, device: str) -> list[str]:
    torch.manual_seed(0)
    faults: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sizes in (Sizes(), Sizes(dim=1), Sizes(dim=2)):
            for call in every_op.calls(group.size(), sizes, device):
                if call.op in every_op.SERVED:
                    continue
                found, wanted = [_flops(lambda call=call: call(group))], [call.flops]
                if call.has_backward:
                    for _, operand in call.tensors():
                        operand.requires_grad_()
                    found.append(_flops(lambda call=call: _train(call, group)))
                    wanted.append(3 * call.flops)
                if found != wanted:
                    faults.append(f"{call} of {sizes}: found {found} FLOPs, wanted {wanted}")
    return faults


def _train(call: Call, group: dist.ProcessGroup) -> None:
    torch.stack([out.sum() for out in call(group)]).sum().backward()


def _flops(work: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    found: int = counter.get_total_flops()
    return found


Layers = dict[str, tuple[Any, tuple[int, ...], int]]


def _layers(group: dist.ProcessGroup) -> Layers:
    """For each layer or style a module, the shape of its input and the FLOPs of its product."""
    size, mesh = group.size(), DeviceMesh.from_group(group, "cpu")
    features, rows = 64 * size, 8 * size
    found: Layers = {}
    for fp8 in (None, "tensorwise", "rowwise_with_gw_hp"):
        column = ColumnParallelLinear(64, features, group=group, fp8=fp8)
        found[f"{column}"] = column, (8, 2, 64), 2 * 2 * rows * 64 * 64
        two = ColumnParallelLinear(64, [features, features], group=group, fp8=fp8)
        found[f"{two}"] = two, (8, 2, 64), 2 * 2 * 2 * rows * 64 * 64
        row = RowParallelLinear(features, 64, group=group, fp8=fp8)
        found[f"{row}"] = row, (rows, 2, 64), 2 * 2 * rows * 64 * 64
        mlp = GatedMLP(64, features, group=group, fp8=fp8)
        found[f"{mlp}"] = mlp, (8, 2, 64), 3 * 2 * 2 * rows * 64 * 64
    gathers = parallelize_module(
        torch.nn.Linear(64, features), mesh, GatherColwiseParallel(sequence_dim=0)
    )
    found["GatherColwiseParallel"] = gathers, (8, 2, 64), 2 * 2 * rows * 64 * 64
    scatters = parallelize_module(
        torch.nn.Linear(features, 64), mesh, RowwiseScatterParallel(sequence_dim=0)
    )
    found["RowwiseScatterParallel"] = scatters, (rows, 2, 64), 2 * 2 * rows * 64 * 64
    return found


def layer_faults(world_size: int) -> Result:
    """Faults, in words: layers whose FLOPs torch's counter does not find, or whose outputs cannot
    be changed in place."""
    group = group_of(world_size)
    if group is None:
        return None
    torch.manual_seed(0)
    faults = []
    for name, (layer, shape, wanted) in _layers(group).items():
        x = torch.randn(shape, requires_grad=True)

        def train(layer: Any = layer, x: torch.Tensor = x) -> None:
            torch.stack([out.mul_(2).sum() for out in tree_leaves(layer(x))]).sum().backward()

        with torch.no_grad():
            found = [_flops(lambda layer=layer, x=x: layer(x))]
        found.append(_flops(train))
        if found != [wanted, 3 * wanted]:
            faults.append(f"{name}: found {found} FLOPs, wanted {[wanted, 3 * wanted]}")
    return faults
