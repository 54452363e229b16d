"""What the tests of dispatched rows run inside the ranks of a pool. Nothing here goes through the
group's backend on a GPU, so ranks may share one."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import moe_scaled_work
import torch
import torch.distributed as dist
from gpu_work import Faults, group_of, last_ranks, poison_freed_memory
from moe_work import Case, Operands, both_halves, ids_of, placed, whole_of

from agmm.ops.grouped_products import products, wide_sums
from agmm.ops.grouped_scatter import by_token
from agmm.ops.routing import rows_of
from agmm.runtime.epilogues import named


def _group(world_size: int) -> dist.ProcessGroup | None:
    """The group of the last ranks; None in the other ranks. Collective over all ranks."""
    return group_of(last_ranks(world_size))


class Results(NamedTuple):
    """What both halves find."""

    ys: list[torch.Tensor]
    out: torch.Tensor
    gathered: torch.Tensor
    """[0] where it is not wanted."""


def _both(case: Case, given: Operands, group: dist.ProcessGroup, **options: Any) -> Results:
    ys, _, gathered, out = both_halves(case, given, group, strict=True, **options)
    return Results(ys, out, given.x[:0] if gathered is None else gathered)


def _expected(case: Case, whole: list[Operands], rank: int) -> Results:
    """The results of operations one by one on the tokens of all ranks, which have the same bits."""
    x = torch.cat([one.x for one in whole]).cuda()
    topk = torch.cat([one.topk for one in whole]).cuda()
    ids, epilogue = ids_of(case).cuda(), named(case.activation or "")
    total = torch.zeros(len(x), case.hidden, device="cuda")
    own: list[torch.Tensor] = []
    for number, cpu in enumerate(whole):
        first, given = number * case.experts, placed(cpu, "cuda")
        tokens, _, _, offsets, positions = rows_of(ids, first, case.experts, ids.numel())
        ys = products(x[tokens], given.up, given.up_bias, offsets, epilogue)
        sums = wide_sums(ys[:1], [given.down], given.down_bias, offsets)
        total = total + by_token(sums, positions, topk)
        own = ys if number == rank else own
    first = sum(case.tokens[:rank])
    return Results(own, total[first : first + case.tokens[rank]].to(x.dtype), x)


def drawn_case(draw: random.Random, world_size: int, dtype: torch.dtype) -> Case:
    counts = tuple(draw.choice([0, 1, 9, 64, 200]) for _ in range(world_size))
    if not any(counts):
        counts = (5, *counts[1:])
    return Case(
        counts,
        draw.choice([1, 2, 8]),
        draw.choice([1, 4, 16]),
        draw.choice(["even", "zipf", "one", "none", "drops"]),
        dtype,
        hidden=draw.choice([64, 136, 512]),
        inner=draw.choice([8, 72]),
        activation=draw.choice([None, "silu_mul", "gelu"]),
        column_major=draw.random() < 0.5,
        seed=draw.randrange(1000),
    )


def faults(world_size: int, cases: int, seed: int, dtype: torch.dtype) -> Faults:
    """Faults, in words, of calls that differ, one behind the other."""
    group = _group(world_size)
    if group is None:
        return None
    draw, found = random.Random(seed), []
    for _ in range(cases):
        case = drawn_case(draw, world_size, dtype)
        gathers, whole = draw.random() < 0.3, whole_of(case)
        given = placed(whole[group.rank()], "cuda")
        exact = _expected(case, whole, group.rank())
        poison_freed_memory(1 << 20)
        results = _both(case, given, group, return_gathered=gathers)
        if not all(map(torch.equal, results.ys, exact.ys)):
            found.append(f"{case}: wrong products")
        if not torch.equal(results.out, exact.out):
            found.append(f"{case}: wrong sums")
        if gathers and not torch.equal(results.gathered, exact.gathered):
            found.append(f"{case}: wrong gathered tokens")
    return found


def scaled_faults(world_size: int, scales: str) -> Faults:
    """Faults, in words, of calls on fp8 rows, beside a model in float64."""
    group = _group(world_size)
    if group is None:
        return None
    even, uneven = (64,) * world_size, tuple((37 * rank + 5) % 90 for rank in range(world_size))
    wide: dict[str, Any] = {"column_major": True, "hidden": 528, "inner": 272}
    cases = [
        Case(even, 2, 4, "zipf", **wide),
        Case(uneven, 4, 2, "drops", activation=None, seed=1, **wide),
        Case(uneven, 1, 2, "one", bias=False, seed=2, **wide),
        Case(even, 2, 2, "none", **wide),
        # Row-major weights, which no kernel takes.
        Case(even, 2, 2, "even", hidden=528, inner=272, seed=3),
    ]
    kind = moe_scaled_work.Kind(scales)
    given = [(case, kind) for case in cases]
    return moe_scaled_work.faults(world_size, given, group, strict=True, device="cuda")


def captured(world_size: int, replays: int) -> Faults:
    """Faults of two graphs that are replayed in turn, with eager calls between, whose tokens and
    ids change."""
    group = _group(world_size)
    if group is None:
        return None
    rank, draw = group.rank(), random.Random(7)
    skews = ("even", "zipf", "one", "none", "drops")
    cases = [
        Case((48,) * world_size, 2, 4, skew, torch.bfloat16, hidden=256, inner=64, seed=i)
        for i, skew in enumerate(skews)
    ]
    wholes = [whole_of(case) for case in cases]
    exact = [_expected(case, whole, rank) for case, whole in zip(cases, wholes, strict=True)]
    operands = [placed(whole[rank], "cuda") for whole in wholes]
    held = [placed(wholes[0][rank], "cuda") for _ in range(2)]
    _both(cases[0], held[0], group)
    torch.cuda.synchronize()
    graphs, results = [], []
    for one in held:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append(_both(cases[0], one, group))
        graphs.append(graph)
    found = []
    for number in range(replays):
        which, at = number % 2, draw.randrange(len(cases))
        for mine, other in zip(_leaves(held[which]), _leaves(operands[at]), strict=True):
            mine.copy_(other)
        results[which].out.fill_(torch.nan)
        graphs[which].replay()
        faults_of = _differing(results[which], exact[at])
        found += [f"replay {number} of {cases[at].skew}: wrong {one}" for one in faults_of]
        if number % 5 == 0:
            faults_of = _differing(_both(cases[at], operands[at], group), exact[at])
            found += [f"eager call behind replay {number}: wrong {one}" for one in faults_of]
    return found


def _leaves(given: Operands) -> list[torch.Tensor]:
    return [given.ids, *given.leaves().values()]


def _differing(found: Results, exact: Results) -> list[str]:
    """What has other bits."""
    is_same = {
        "products": all(map(torch.equal, found.ys, exact.ys)),
        "sums": torch.equal(found.out, exact.out),
    }
    return [name for name, same in is_same.items() if not same]


def waits(world_size: int) -> Faults:
    """What in both halves waits for the GPU on the host."""
    group = _group(world_size)
    if group is None:
        return None
    case = Case((64,) * world_size, 2, 4, "zipf", torch.bfloat16, hidden=256, inner=64)
    given = placed(whole_of(case)[group.rank()], "cuda")
    for _ in range(2):
        _both(case, given, group)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _both(case, given, group)
    except RuntimeError as error:
        return [str(error)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return []
