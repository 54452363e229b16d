"""What the tests of every op run inside the ranks of a group."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import every_op
import torch
import torch.distributed as dist
from every_op import Call
from rank_work import group_of

import agmm
from agmm.integrations import async_tp

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
