"""What single calls of mixtures of experts lead to: refusals, other paths, graphs of a compiler,
ends of ranks that differ, gradients. Run inside the ranks of a group."""

from __future__ import annotations

import time
import warnings
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from autograd_work import _AllParts as AllParts
from autograd_work import _in_step as in_step
from autograd_work import _OwnPart as OwnPart
from moe_work import Case, both_halves, forward_faults, moe, whole_of
from rank_groups import fresh_group
from rank_work import group_of

import agmm
from agmm.errors import forget_warnings
from agmm.runtime import groups


def unfused_faults(cases: list[Case]) -> list[str]:
    """Faults, in words, of calls of ranks that take themselves to be on hosts of their own."""
    group = fresh_group()
    with mock.patch.object(groups, "host_id", return_value=f"host {dist.get_rank()}"):
        forget_warnings()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            faults = forward_faults(group.size(), cases, group, strict=False)
        said = [str(warning.message) for warning in caught]
        if len(said) != 1 or "agmm takes the unfused path: group: found ranks on" not in said[0]:
            faults = [*(faults or []), f"found the warnings {said}"]
        try:
            both_halves(cases[0], whole_of(cases[0])[group.rank()], group)
            return [*(faults or []), "found no refusal under strict"]
        except agmm.Unsupported:
            return faults or []


def refused(kind: str) -> list[str]:
    """What all ranks say of a call that they refuse alike, and then whether the next one works."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    ids = torch.arange(6).view(3, 2) % (2 * ranks)
    given: dict[str, Any] = {"num_experts": 2 * ranks}
    if kind == "capacity":
        ids, given["capacity"] = torch.full((3, 2), 2 * ranks - 1), 5
    elif kind == "sliced capacity":
        given |= {"num_local_experts": 2 * ranks, "capacity": 6 * ranks - 1}
    elif kind == "id" and rank == 1:
        ids[2, 1] = 2 * ranks
    elif kind == "tokens":
        given["tokens_per_rank"] = [2] * ranks
    try:
        moe.moe.route(ids, **given)
        said = "nothing"
    except agmm.InvalidArgument as error:
        said = str(error)
    again = moe.moe.route(torch.zeros(3, 2, dtype=torch.int32), num_experts=ranks)
    return [said, str(int(again.offsets[-1]))]


def differ(kind: str) -> None:
    """Calls in which ranks may differ."""
    rank = dist.get_rank()
    experts, columns, dtype = 2, 3, torch.float32
    for i in range(2):
        if i == 1:
            experts += rank * (kind == "experts")
            columns += rank * (kind == "columns")
            dtype = torch.float64 if kind == "dtype" and rank else dtype
        x, weight = torch.ones(4, 6, dtype=dtype), torch.ones(experts, 6, columns, dtype=dtype)
        ids = torch.zeros(4, 1, dtype=torch.int32)
        routing = moe.moe.route(ids, num_experts=4)
        if kind != "scattered columns":
            given = routing._replace(offsets=torch.zeros(experts + 1, dtype=torch.int32))
            moe.all_gather_grouped_matmul(x, weight, given)
            continue
        y = torch.zeros(8, 6)
        columns += rank * i
        moe.grouped_matmul_reduce_scatter(y, torch.ones(2, 6, columns), routing, torch.ones(4, 1))


def calls_of(case: Case, late: tuple[int, int], late_s: float) -> list[torch.Tensor]:
    """The results of routing and both halves, of which one call finds a rank late.

    Args:
        late: the rank, and the number of the call before which it sleeps.
    """
    rank, given = dist.get_rank(), whole_of(case)[dist.get_rank()]

    def come(call: int) -> None:
        if (rank, call) == late:
            time.sleep(late_s)

    come(0)
    routing = moe.moe.route(given.ids, num_experts=case.all_experts)
    come(1)
    y, _ = moe.all_gather_grouped_matmul(given.x, given.up, routing, activation=case.activation)
    come(2)
    out = moe.grouped_matmul_reduce_scatter(y, given.down, routing, given.topk)
    return [*routing[:5], y, out]


def faults_of_late_ranks(case: Case) -> list[str]:
    """Faults, in words, where each rank is late in turn, before each of the calls."""
    wanted = calls_of(case, (-1, 0), 0.0)
    return [
        f"rank {rank} is late for call {call}: found other bits"
        for rank in range(dist.get_world_size())
        for call in range(3)
        if not all(map(torch.equal, calls_of(case, (rank, call), 0.02), wanted))
    ]


def misses(case: Case, call: int) -> None:
    """Rank 1 does not come to a call, within the limit."""
    calls_of(case, (-1, 0), 0.0)
    calls_of(case, (1, call), 60.0)


def compiled_faults(world_size: int) -> list[str] | None:
    """Faults, in words, of a compiled step of training with different numbers of tokens, which one
    graph serves."""
    group = group_of(world_size)
    if group is None:
        return None
    faults = []
    torch.compiler.reset()

    def step(x: torch.Tensor, ids: torch.Tensor, topk: torch.Tensor, *weights: Any) -> Any:
        gate, up, down = weights
        given = [gate, up]
        y, routing = moe.all_gather_grouped_matmul(x, given, ids, group, activation="silu_mul")
        return moe.grouped_matmul_reduce_scatter(y, down, routing, topk, group), routing.counts

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for i, tokens in enumerate((4, 6, 9)):
        one = whole_of(Case((tokens,) * world_size, 2, 2, seed=1))[group.rank()]
        leaves = [one.x, one.topk, *one.up, one.down]
        found = []
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            for call in (step, compiled):
                x, topk, *weights = [leaf.clone().requires_grad_() for leaf in leaves]
                out, counts = call(x, one.ids, topk, *weights)
                grads = torch.autograd.grad(out.square().sum(), [x, topk, *weights])
                found.append([out, counts, *grads])
        if not all(map(torch.equal, *found)):
            faults.append(f"{tokens} tokens: found other numbers than without a compiler")
    torch.compiler.reset()
    return faults


def nan_is_found() -> list[str]:
    """What is said of a NaN in what this rank sends in each half."""
    said = []
    for is_first in (True, False):
        group = fresh_group()  # ranks that raise leave it out of step
        ids = torch.arange(dist.get_world_size())[:, None]
        routing = moe.moe.route(ids, group, num_experts=len(ids))
        rows, weight = torch.full((len(ids) ** 2, 3), float("nan")), torch.ones(1, 3, 2)
        agmm.check_nan("raise")
        try:
            if is_first:
                moe.all_gather_grouped_matmul(rows[: len(ids)], weight, routing, group)
            else:
                topk = torch.ones(len(ids), 1)
                moe.grouped_matmul_reduce_scatter(rows, weight, routing, topk, group)
            said.append("nothing")
        except agmm.AgmmError as error:
            said.append(str(error).split(" at ")[0])
        finally:
            agmm.check_nan("off")
    return said


def gradcheck(world_size: int, case: Case, options: dict[str, Any]) -> bool | None:
    """Whether `torch.autograd.gradcheck` finds the gradients of both halves right."""
    group = group_of(world_size)
    if group is None:
        return None
    ranks = whole_of(case._replace(dtype=torch.float64))
    names = list(ranks[0].leaves())
    inputs = [torch.stack([one.leaves()[name].contiguous() for one in ranks]) for name in names]

    def fn(*wholes: torch.Tensor) -> torch.Tensor:
        own = {n: OwnPart.apply(w, group) for n, w in zip(names, wholes, strict=True)}
        given = ranks[group.rank()]
        count = range(len(given.up))
        given = given._replace(
            x=own["x"],
            topk=own["topk"],
            up=[own[f"up{i}"] for i in count],
            up_bias=[own.get(f"up_bias{i}") for i in count],
            down=own["down"],
            down_bias=own.get("down_bias"),
        )
        *_, out = both_halves(case, given, group, **options)
        found: torch.Tensor = AllParts.apply(out, group)
        return found

    return in_step(fn, [whole.requires_grad_() for whole in inputs], is_linear=False)
