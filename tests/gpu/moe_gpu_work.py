"""What the tests of mixtures of experts on GPUs run inside the ranks of a pool."""

from __future__ import annotations

from typing import Any

import moe_work
import torch
import torch.distributed as dist
from gpu_work import Faults, group_of, last_ranks, never_waits
from moe_layer_work import Kind, training_faults
from moe_work import Case, both_halves, moe, placed, whole_of
from torch.utils._pytree import tree_leaves

import agmm
from agmm.errors import forget_warnings


def faults(world_size: int, cases: list[Case]) -> Faults:
    """Faults, in words, of calls without gradients."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    return moe_work.forward_faults(world_size, cases, group, strict=False, device="cuda")


def gradient_faults(world_size: int, cases: list[Case], options: dict[str, Any]) -> Faults:
    """Faults, in words, of gradients in float64."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    return moe_work.gradient_faults(world_size, cases, options, group, "cuda")


def refused(world_size: int) -> list[str] | None:
    """What is said of calls under ``strict``."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    forget_warnings()
    case = Case((4,) * world_size, 2, 2)
    given = placed(whole_of(case)[group.rank()], "cuda")
    routing = moe.moe.route(given.ids, group, num_experts=case.all_experts)
    said = []
    for call in (
        lambda: moe.moe.route(given.ids, group, num_experts=case.all_experts, strict=True),
        lambda: moe.all_gather_grouped_matmul(given.x, given.up, routing, group, strict=True),
        lambda: moe.grouped_matmul_reduce_scatter(
            *(given.x.new_zeros(len(routing.tokens), case.inner), given.down, routing, given.topk),
            group,
            strict=True,
        ),
    ):
        try:
            call()
            said.append("nothing")
        except agmm.Unsupported as error:
            said.append(str(error))
    return said


def captured_faults(world_size: int, dtype: torch.dtype) -> Faults:
    """Faults, in words, of a graph of both halves whose ids, tokens and weights change between the
    replays."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    cases = [
        Case((16,) * world_size, 2, 4, skew, dtype, hidden=64, inner=32, seed=3 * i + 1)
        for i, skew in enumerate(("even", "one", "drops", "none"))
    ]
    operands = [placed(whole_of(case)[group.rank()], "cuda") for case in cases]
    held = placed(operands[0], "cuda")
    wanted = []
    for case, given in zip(cases, operands, strict=True):
        ys, _, _, out = both_halves(case, given, group, strict=False)
        wanted.append([*ys, out])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ys, _, _, out = both_halves(cases[0], held, group, strict=False)
    faults = []
    for case, given, exact in zip(cases, operands, wanted, strict=True):
        for leaf, value in zip(_tensors(held), _tensors(given), strict=True):
            leaf.copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        if not all(map(torch.equal, [*ys, out], exact)):
            faults.append(f"{case}: found other bits than in an eager call")
    return faults


def _tensors(given: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(given) if leaf is not None]


def overflow(captured: bool) -> None:
    """A call with too little room, whose device ends the process; in a graph ids that fit come
    first."""
    ids = torch.full((4, 2), -1 if captured else 0, dtype=torch.int64, device="cuda")
    sizes: dict[str, int] = {"num_experts": dist.get_world_size(), "capacity": 3}
    moe.moe.route(ids, **sizes)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        moe.moe.route(ids, **sizes)
    graph.replay()
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return  # of ids that fit, which the test wants no error of
    ids.zero_()
    graph.replay()
    torch.cuda.synchronize()


def waits(world_size: int, with_gradients: bool) -> Faults:
    """What in the calls waits for the GPU on the host, of operands that torch's grouped matmul
    takes."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    case = Case((16,) * world_size, 2, 4, "zipf", torch.bfloat16, hidden=64, inner=32)
    given = placed(whole_of(case)[group.rank()], "cuda")
    if with_gradients:
        for leaf in given.leaves().values():
            leaf.requires_grad_()

    def call() -> None:
        *_, out = both_halves(case, given, group, strict=False, capacity=32 * world_size)
        if with_gradients:
            out.sum().backward()

    for _ in range(2):  # the first call makes communicators
        call()
    torch.cuda.synchronize()
    try:
        with never_waits():
            call()
    except RuntimeError as error:
        return [str(error)]
    return []


def trained(world_size: int, kind: Kind, dtype: torch.dtype) -> Faults:
    """Faults of steps of training, beside the unsharded model."""
    group = group_of(last_ranks(world_size))
    return None if group is None else training_faults(group, kind, dtype, "cuda")
