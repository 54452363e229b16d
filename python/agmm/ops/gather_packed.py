"""``all_gather_matmul`` with weights of 4 bits, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from agmm.errors import InvalidArgument, Unsupported
from agmm.ops.checks import check_bias, check_operand
from agmm.ops.library import library
from agmm.ops.paths import fall_back
from agmm.ops.scaled_checks import check_no_backward
from agmm.planning import call_plans
from agmm.runtime import backends, groups
from agmm.runtime.callers import calling
from agmm.runtime.calls import Call
from agmm.runtime.collectives import start_all_gather
from agmm.runtime.packed import Packed4BitWeight
from agmm.runtime.results import moved, reshaped
from agmm.runtime.workspaces import cpu_workspace, take_turn

Outs = tuple[torch.Tensor, list[torch.Tensor]]


def gather_packed(
    A_shard: torch.Tensor,
    Bs: Sequence[Any],
    biases: Sequence[torch.Tensor | None],
    group: Any,
    gather_dim: int,
    return_A: bool,
    strict: bool,
) -> Outs:
    """A, of no meaning without ``return_A``, and the products, in float32. Collective."""
    for B in Bs:
        if not isinstance(B, Packed4BitWeight):
            raise InvalidArgument(
                f"B: found {type(B).__name__} beside a Packed4BitWeight, wanted weights of one kind"
            )
    _check(A_shard, Bs, biases, gather_dim)
    _check_no_backward(A_shard, [("B", B.packed) for B in Bs], biases)
    name = groups.name_of(group)
    A, outs = torch.ops.agmm._all_gather_packed_matmul.default(
        A_shard,
        [B.packed for B in Bs],
        [B.N for B in Bs],
        [B.group_size for B in Bs],
        list(biases),
        name,
        groups.world_size_of(name),
        gather_dim,
        return_A,
        strict,
    )
    return A, outs


def _check_no_backward(
    A_shard: torch.Tensor,
    weights: Sequence[tuple[str, torch.Tensor]],
    biases: Sequence[torch.Tensor | None],
) -> None:
    check_no_backward(
        [("A_shard", A_shard), *weights, *(("bias", bias) for bias in biases)],
        "products with 4-bit weights",
    )


def _check(
    A_shard: torch.Tensor,
    Bs: Sequence[Packed4BitWeight],
    biases: Sequence[torch.Tensor | None],
    gather_dim: int,
) -> None:
    check_operand("A_shard", A_shard)
    if A_shard.device.type != "cpu":
        raise InvalidArgument(
            f"A_shard: found device {A_shard.device} with a Packed4BitWeight, wanted cpu: there is "
            "no kernel for other devices"
        )
    if A_shard.dtype != torch.float32:
        raise InvalidArgument(
            f"A_shard: found dtype {A_shard.dtype} with a Packed4BitWeight, wanted torch.float32"
        )
    if A_shard.dim() < 2:
        raise InvalidArgument(f"A_shard: found {A_shard.dim()} dimensions, wanted at least 2")
    last = A_shard.dim() - 1
    if not -A_shard.dim() <= gather_dim < last or gather_dim == -1:
        raise InvalidArgument(
            f"gather_dim: found {gather_dim} with a Packed4BitWeight, wanted 0 to {last - 1}"
        )
    if len(biases) != len(Bs):
        raise InvalidArgument(f"bias: found {len(biases)} for {len(Bs)} weights, wanted one each")
    for B, bias in zip(Bs, biases, strict=True):
        if A_shard.shape[-1] != B.K:
            raise InvalidArgument(
                f"B: found K={B.K}, wanted {A_shard.shape[-1]} as the columns of A_shard"
            )
        if bias is not None:
            check_bias(bias, B.N, "A_shard", A_shard)


def _impl(
    A_shard: torch.Tensor,
    packed: list[torch.Tensor],
    ns: list[int],
    group_sizes: list[int],
    biases: list[torch.Tensor | None],
    group_name: str,
    world_size: int,
    gather_dim: int,
    return_A: bool,
    strict: bool,
) -> Outs:
    group = groups.group_of_size(group_name, world_size)
    front = A_shard.movedim(gather_dim, 0)
    k = A_shard.shape[-1]
    Bs = [Packed4BitWeight(p, k, n, g) for p, n, g in zip(packed, ns, group_sizes, strict=True)]
    shard = front.flatten(0, -2).contiguous()
    A, outs = _run(shard, Bs, biases, group, return_A, strict)
    leading = (world_size * front.shape[0], *front.shape[1:-1])

    def unfolded(rows: torch.Tensor) -> torch.Tensor:
        return moved(reshaped(rows, (*leading, rows.shape[-1])), 0, gather_dim)

    return A_shard.new_empty(0) if A is None else unfolded(A), [unfolded(out) for out in outs]


def _run(
    shard: torch.Tensor,
    Bs: list[Packed4BitWeight],
    biases: list[torch.Tensor | None],
    group: dist.ProcessGroup,
    return_A: bool,
    strict: bool,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    m_local, k = shard.shape
    call = Call("all_gather_matmul", A_shard=shard, B=Bs)
    if not m_local:
        what = f"all_gather_matmul of {list(shard.shape)} {shard.dtype}, packed, {return_A}"
        take_turn(group, shard.device, what, call, agree=call_plans.agree)
        outs = [shard.new_empty(0, B.N) for B in Bs]
        return (shard.new_empty(0, k) if return_A else None), outs
    if not backends.is_fake(group):
        try:
            with calling(call):
                return _run_fused(shard, Bs, biases, group, return_A)
        except Unsupported as error:
            fall_back(str(error), strict)
    A = start_all_gather(shard, group.group_name, 0, call=call)()
    outs = [B.product(A) for B in Bs]
    for out, bias in zip(outs, biases, strict=True):
        if bias is not None:
            out.add_(bias)
    return A if return_A else None, outs


def _run_fused(
    shard: torch.Tensor,
    Bs: list[Packed4BitWeight],
    biases: Sequence[torch.Tensor | None],
    group: dist.ProcessGroup,
    return_A: bool,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    m_local, k = shard.shape
    asked = call_plans.problem_of(
        (group.size() * m_local, sum(B.N for B in Bs), k),
        shard.dtype,
        shard.device,
        group=group,
        return_A=return_A,
    )
    chunks = call_plans.planner(group, shard.device).plan(asked).chunks_per_shard
    return cpu_workspace(group).all_gather_matmul(
        shard, Bs, list(biases), return_A=return_A, chunks_per_shard=chunks
    )


def _fake(
    A_shard: torch.Tensor,
    packed: list[torch.Tensor],
    ns: list[int],
    group_sizes: list[int],
    biases: list[torch.Tensor | None],
    group_name: str,
    world_size: int,
    gather_dim: int,
    return_A: bool,
    strict: bool,
) -> Outs:
    shape = list(A_shard.shape)
    shape[gather_dim] = shape[gather_dim] * world_size
    A = A_shard.new_empty(shape if return_A else 0)
    return A, [A_shard.new_empty(*shape[:-1], n) for n in ns]


def _autograd(
    A_shard: torch.Tensor,
    packed: list[torch.Tensor],
    ns: list[int],
    group_sizes: list[int],
    biases: list[torch.Tensor | None],
    *settings: Any,
) -> Any:
    _check_no_backward(A_shard, [("packed", one) for one in packed], biases)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.agmm._all_gather_packed_matmul.default(
            A_shard, packed, ns, group_sizes, biases, *settings
        )


library.impl("_all_gather_packed_matmul", _impl, "CPU")
library.impl("_all_gather_packed_matmul", _fake, "Meta")
library.impl("_all_gather_packed_matmul", _autograd, "Autograd")
