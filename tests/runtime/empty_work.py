"""Calls without elements, on some ranks or on all, inside the ranks of a pool."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from op_work import _random
from packed_work import weight
from rank_groups import fresh_group

import agmm
from agmm import async_tp
from agmm.nn import ColumnParallelLinear, RowParallelLinear
from agmm.runtime import groups

K, N = 64, 32
FP8 = torch.float8_e4m3fn

Op = Callable[[int, Any], Any]
"""Calls with so many rows of `A_shard`, or of the result of a sum, in a group."""


def _numbers(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).remainder(5).view(shape)


def _gather(rows: int, group: Any, **options: Any) -> Any:
    return agmm.all_gather_matmul(_numbers(rows, K), _numbers(K, N), group, **options)


def _gather_of_fp8(rows: int, group: Any, *, by_rows: bool, **options: Any) -> Any:
    A, B = _numbers(rows, K).to(FP8), _numbers(N, K).to(FP8).t()
    of_a, of_b = ((rows, 1), (1, N)) if by_rows else ((), ())
    return agmm.all_gather_scaled_matmul(A, B, torch.ones(of_a), torch.ones(of_b), group, **options)


def _scatter(rows: int, group: Any, *, n: int = N, **options: Any) -> Any:
    A = _numbers(rows * group.size(), K)
    return agmm.matmul_reduce_scatter(A, _numbers(K, n), group, **options)


def _scatter_along(dim: int, rows: int, group: Any) -> Any:
    shape = [3, 4 * group.size(), K]
    shape[dim] = rows * group.size()
    return agmm.matmul_reduce_scatter(_numbers(*shape), _numbers(K, N), group, scatter_dim=dim)


def _scatter_of_fp8(rows: int, group: Any) -> Any:
    A, B = _numbers(rows * group.size(), K).to(FP8), _numbers(N, K).to(FP8).t()
    ones = torch.ones(())
    return agmm.scaled_matmul_reduce_scatter([A, A], [B, B], [ones] * 2, [ones] * 2, group)


def _all_reduce_of_fp8(rows: int, group: Any) -> Any:
    A, B, ones = _numbers(rows, K).to(FP8), _numbers(N, K).to(FP8).t(), torch.ones(())
    return agmm.scaled_matmul_all_reduce(A, B, ones, ones, group, bias=_numbers(N))


def _with_gradients(op: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], rows: int) -> Any:
    A, B = _numbers(rows, K).requires_grad_(), _numbers(K, N).requires_grad_()
    out = op(A, B)
    out.sum().backward()
    return out, A.grad, B.grad


def _compiled(rows: int, group: Any) -> Any:
    torch.compiler.reset()
    B = _numbers(K, N)
    op = torch.compile(lambda A: agmm.all_gather_matmul(A, B, group) + 0, backend="aot_eager")
    return op(_numbers(rows, K))


def _layers(rows: int, group: Any) -> Any:
    torch.manual_seed(0)
    first = ColumnParallelLinear(K, N * group.size(), group=group)
    second = RowParallelLinear(N * group.size(), K, group=group)
    x = _numbers(rows, K).requires_grad_()
    out = second(first(x))
    out.sum().backward()
    return out, x.grad


def _torchs_gather(rows: int, group: Any) -> Any:
    with async_tp.enable():
        A, (out,) = torch.ops.symm_mem.fused_all_gather_matmul(
            _numbers(rows, K), [_numbers(K, N)], 0, group.group_name
        )
    return A, out


def _torchs_scatter(rows: int, group: Any) -> Any:
    with async_tp.enable():
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(
            _numbers(rows * group.size(), K), _numbers(K, N), "sum", 0, group.group_name
        )


def _norm(rows: int, group: Any) -> Any:
    x = _numbers(rows, K)
    return agmm.collectives.all_reduce_rms_norm(x, 0 * x, torch.ones(K), group=group)


OPS: dict[str, Op] = {
    "gather": _gather,
    "gather, strict": lambda rows, group: _gather(rows, group, strict=True),
    "gather, A": lambda rows, group: _gather(rows, group, return_A=True),
    "gather, unfused": lambda rows, group: _gather(rows, group, config="unfused"),
    "gather, bias": lambda rows, group: _gather(rows, group, bias=_numbers(N)),
    "gather, quantize": lambda rows, group: _gather(rows, group, quantize="rowwise"),
    "gather, several": lambda rows, group: agmm.all_gather_matmul(
        _numbers(rows, K), [_numbers(K, N), _numbers(K, 8)], group
    ),
    "gather, dimension": lambda rows, group: agmm.all_gather_matmul(
        _numbers(3, rows, K), _numbers(K, N), group, gather_dim=1
    ),
    "gather, integers": lambda rows, group: agmm.all_gather_matmul(
        _numbers(rows, K).int(), _numbers(K, N).int(), group
    ),
    "gather, 4 bits": lambda rows, group: agmm.all_gather_matmul(
        _random((rows, K), torch.float32, 1), weight(24, K, 32, 1, False)[0], group
    ),
    "gather, gradients": lambda rows, group: _with_gradients(
        lambda A, B: agmm.all_gather_matmul(A, B, group), rows
    ),
    "gather, compiled": _compiled,
    "gather, fp8": lambda rows, group: _gather_of_fp8(rows, group, by_rows=False, strict=True),
    "gather, fp8 rows": lambda rows, group: _gather_of_fp8(
        rows, group, by_rows=True, return_A=True
    ),
    "scatter": _scatter,
    "scatter, strict": lambda rows, group: _scatter(rows, group, strict=True),
    "scatter, avg": lambda rows, group: _scatter(rows, group, reduce_op="avg", bias=_numbers(N)),
    "scatter, columns": lambda columns, group: _scatter(4, group, n=columns),
    "scatter, dimension 0": lambda rows, group: _scatter_along(0, rows, group),
    "scatter, dimension 1": lambda rows, group: _scatter_along(1, rows, group),
    "scatter, last dimension": lambda columns, group: _scatter(
        4, group, n=columns * group.size(), scatter_dim=1
    ),
    "scatter, gradients": lambda rows, group: _with_gradients(
        lambda A, B: agmm.matmul_reduce_scatter(A, B, group), rows * group.size()
    ),
    "scatter, several": lambda rows, group: agmm.matmul_reduce_scatter(
        [_numbers(rows * group.size(), k) for k in (8, 16)],
        [_numbers(k, N) for k in (8, 16)],
        group,
    ),
    "scatter, fp8": _scatter_of_fp8,
    "all-reduce": lambda rows, group: agmm.matmul_all_reduce(
        _numbers(rows, K), _numbers(K, N), group, bias=_numbers(N)
    ),
    "all-reduce, norm": lambda rows, group: agmm.matmul_all_reduce_rms_norm(
        *(_numbers(rows, K), _numbers(K, N), _numbers(rows, N), _numbers(N)), group=group
    ),
    "all-reduce, fp8": _all_reduce_of_fp8,
    "all-reduce, columns": lambda columns, group: agmm.matmul_all_reduce(
        _numbers(3, K), _numbers(K, columns), group, strict=True
    ),
    "all-reduce, integers": lambda rows, group: agmm.matmul_all_reduce(
        _numbers(rows, K).int(), _numbers(K, N).int(), group
    ),
    "gather, torch's": _torchs_gather,
    "scatter, torch's": _torchs_scatter,
    "layers": _layers,
    "all_gather": lambda rows, group: agmm.collectives.all_gather(_numbers(rows, K), group),
    "all_gather, dimension": lambda rows, group: agmm.collectives.all_gather(
        _numbers(3, rows), group, dim=1
    ),
    "all_gather, later": lambda rows, group: agmm.collectives.all_gather(
        _numbers(rows, K), group, async_op=True
    ).wait(),
    "reduce_scatter": lambda rows, group: agmm.collectives.reduce_scatter(
        _numbers(rows * group.size(), K), group, op="avg"
    ),
    "all_reduce": lambda rows, group: agmm.collectives.all_reduce(_numbers(rows, K), group),
    "all_reduce, in place": lambda rows, group: agmm.collectives.all_reduce(
        x := _numbers(rows, K), group, out=x, async_op=True
    ).wait(),
    "all_reduce, integers": lambda rows, group: agmm.collectives.all_reduce(
        _numbers(rows, K).int(), group
    ),
    "all_reduce_rms_norm": _norm,
}


def first_calls(name: str) -> str:
    """What a rank is told in a group's first call, in which rank 1 has no rows."""
    group = fresh_group()
    try:
        OPS[name](0 if dist.get_rank() == 1 else 4, group)
    except agmm.AgmmError as error:
        return str(error)
    return "nothing"


def later_calls(before: str, name: str, rows: int) -> str:
    """What a rank is told in a call in which rank 1 has no rows, behind one in which all have some;
    the process may end there. One with rows on all ranks follows."""
    group = fresh_group()
    OPS[before](4, group)
    try:
        OPS[name](0 if dist.get_rank() == 1 else rows, group)
    except agmm.AgmmError as error:
        return str(error)
    OPS[name](rows, group)
    return "nothing"


def _tensors(found: Any) -> list[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else list(found)


def _alone(name: str, rows: int, groups: list[Any]) -> list[torch.Tensor]:
    """What a group of one rank computes."""
    return _tensors(OPS[name](rows, groups[dist.get_rank()]))


@cache
def _groups_of_one() -> list[Any]:
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())]


def all_empty(names: list[str], calls: int) -> list[str]:
    """Faults of calls without elements on all ranks, between calls that have some."""
    group = fresh_group()
    alone = _groups_of_one()
    faults = []
    for name in names:
        before = _tensors(OPS[name](4, group))
        for _ in range(calls):
            for found, one in zip(
                _tensors(OPS[name](0, group)), _alone(name, 0, alone), strict=True
            ):
                if found.dtype != one.dtype or found.dim() != one.dim():
                    faults.append(f"{name}: found {found.dtype} {found.shape}")
                if found.numel() and found.count_nonzero():  # a gradient of a weight
                    faults.append(f"{name}: found numbers where there are no rows")
        after = _tensors(OPS[name](4, group))
        if not all(map(torch.equal, before, after)):
            faults.append(f"{name}: differs after calls without elements")
    return faults


def no_columns_of_a() -> list[str]:
    """Faults of products that sum over nothing: zeros, or the bias."""
    group, faults = fresh_group(), []
    w, bias = group.size(), _numbers(N)
    for strict in (False, True):
        found = agmm.all_gather_matmul(
            torch.ones(4, 0), torch.ones(0, N), group, bias=bias, strict=strict
        )
        if not torch.equal(found, bias.expand(4 * w, N)):
            faults.append("gather")
        part = agmm.matmul_reduce_scatter(
            torch.ones(4 * w, 0), torch.ones(0, N), group, bias=bias, strict=strict
        )
        if not torch.equal(part, bias.expand(4, N)):
            faults.append("scatter")
        whole = agmm.matmul_all_reduce(
            torch.ones(4, 0), torch.ones(0, N), group, bias=bias, strict=strict
        )
        if not torch.equal(whole, bias.expand(4, N)):
            faults.append("all-reduce")
    return faults


def scales_of_nothing() -> list[float]:
    """The scales that come with a gathered A without rows: one of each rank."""
    own = torch.tensor(float(dist.get_rank() + 1))
    A, B = torch.ones(0, K).to(FP8), torch.ones(N, K).to(FP8).t()
    _, scale, _ = agmm.all_gather_scaled_matmul(
        A, B, own, torch.ones(()), fresh_group(), return_A=True
    )
    found: list[float] = scale.flatten().tolist()
    return found


def look_for_one(calls: str, *, late: bool = True) -> list[str]:
    """What ranks find whose calls on a GPU are those of ``calls`` in their order, each of them with
    elements on all ranks (.), on no rank (0), or on all but rank 1 (1); "|" ends what has begun on
    rank 0. Rank 0 waits, and rank 1 in a call without elements, unless ``late`` only at first."""
    known = groups.of(fresh_group())
    known.exchange("that they are there", "")
    of_rank = calls.split("|")[0] if dist.get_rank() == 0 else calls.replace("|", "")
    for i, kind in enumerate(of_rank):
        known.calls += 1
        if kind == "0" or (kind == "1" and known.rank == 1):
            known.empty_calls.note(known.eager_calls, f"the call of {i // 2}")
    found = []
    for turn in range(3):
        dist.barrier()
        if not late and turn == 1:
            time.sleep(3.0)  # rank 1 tells nothing any more
        if late or known.rank == 0 or turn == 0:
            found.append(known.empty_calls.look(known, waits_in_one=known.rank == 1))
    return found


def in_threads(threads: int, calls: int) -> list[str]:
    """Faults of threads that each have a group, in which calls with and without rows take turns,
    in the background too."""
    from concurrent.futures import ThreadPoolExecutor

    everyone = list(range(dist.get_world_size()))
    of_threads = [dist.new_group(everyone) for _ in range(threads)]
    rank, w = dist.get_rank(), dist.get_world_size()

    def work(group: Any) -> list[str]:
        faults = []
        for i in range(calls):
            rows = i % 3
            begun = agmm.collectives.all_gather(
                torch.full((rows, 2), float(rank)), group, async_op=True
            )
            out = agmm.all_gather_matmul(torch.ones(2 - rows, K), torch.ones(K, 3), group)
            wanted = torch.arange(float(w)).repeat_interleave(rows).unsqueeze(1).expand(-1, 2)
            if not torch.equal(begun.wait(), wanted):
                faults.append(f"call {i}: all_gather")
            if not torch.equal(out, torch.full((w * (2 - rows), 3), float(K))):
                faults.append(f"call {i}: all_gather_matmul")
        return faults

    with ThreadPoolExecutor(threads) as pool:
        return [fault for faults in pool.map(work, of_threads) for fault in faults]
