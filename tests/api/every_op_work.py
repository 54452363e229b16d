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

import agmm
from agmm.integrations import async_tp
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
    "residual": {"x"},
    "weight": {"x"},
    "a": {"a, b"},
    "b": {"a, b"},
    **{name: {name, name.removesuffix("s"), "bias"} for name in ("Bs", "scale_bs", "biases")},
    "result_scales": {"result_scales", "result_scale"},
    "packed": {"packed", "B"},
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
