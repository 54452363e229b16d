"""What the tests of dispatched rows run inside the ranks of a pool. Nothing here goes through the
group's backend on a GPU, so ranks may share one."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from gpu_work import Faults, group_of, last_ranks, poison_freed_memory
from moe_work import Case, Operands, ids_of, moe, placed, whole_of

from agmm.ops.grouped_products import products
from agmm.ops.routing import rows_of
from agmm.runtime.epilogues import named

Pair = tuple[list[torch.Tensor], torch.Tensor]


def _ways_in(case: Case, given: Operands, group: dist.ProcessGroup, **options: Any) -> Pair:
    """The results of the first half, and the gathered tokens, [0] where they are not wanted."""
    y, _, *gathered = moe.all_gather_grouped_matmul(
        given.x,
        given.up if len(given.up) > 1 else given.up[0],
        given.ids,
        group,
        tokens_per_rank=list(case.tokens),
        bias=given.up_bias if len(given.up) > 1 else given.up_bias[0],
        activation=case.activation,
        strict=True,
        **options,
    )
    return (y if isinstance(y, list) else [y]), (gathered or [given.x[:0]])[0]


def _expected(case: Case, whole: list[Operands], rank: int, group: dist.ProcessGroup) -> Pair:
    """The results of rows that are there already, bit for bit, and all tokens."""
    x = torch.cat([one.x for one in whole]).cuda()
    ids = ids_of(case).cuda()
    tokens, _, _, offsets, _ = rows_of(ids, rank * case.experts, case.experts, ids.numel())
    given = placed(whole[rank], "cuda")
    epilogue = named(case.activation or "")
    outs = products(x[tokens], given.up, given.up_bias, offsets, epilogue)
    return outs, x


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
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    draw, found = random.Random(seed), []
    for _ in range(cases):
        case = drawn_case(draw, world_size, dtype)
        gathers, whole = draw.random() < 0.3, whole_of(case)
        given = placed(whole[group.rank()], "cuda")
        poison_freed_memory(1 << 20)
        outs, gathered = _ways_in(case, given, group, return_gathered=gathers)
        exact, x = _expected(case, whole, group.rank(), group)
        if not all(map(torch.equal, outs, exact)):
            found.append(f"{case}: wrong products")
        if gathers and not torch.equal(gathered, x):
            found.append(f"{case}: wrong gathered tokens")
    return found


def captured(world_size: int, replays: int) -> Faults:
    """Faults of two graphs that are replayed in turn, with eager calls between, whose tokens and
    ids change."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    rank, draw = group.rank(), random.Random(7)
    skews = ("even", "zipf", "one", "none", "drops")
    cases = [
        Case((48,) * world_size, 2, 4, skew, torch.bfloat16, hidden=256, inner=64, seed=i)
        for i, skew in enumerate(skews)
    ]
    wholes = [whole_of(case) for case in cases]
    exact = [
        _expected(case, whole, rank, group)[0] for case, whole in zip(cases, wholes, strict=True)
    ]
    operands = [placed(whole[rank], "cuda") for whole in wholes]
    held = [placed(wholes[0][rank], "cuda") for _ in range(2)]
    _ways_in(cases[0], held[0], group)
    torch.cuda.synchronize()
    graphs, results = [], []
    for one in held:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append(_ways_in(cases[0], one, group)[0])
        graphs.append(graph)
    found = []
    for number in range(replays):
        which, at = number % 2, draw.randrange(len(cases))
        for mine, other in zip(_leaves(held[which]), _leaves(operands[at]), strict=True):
            mine.copy_(other)
        results[which][0].fill_(torch.nan)
        graphs[which].replay()
        if not torch.equal(results[which][0], exact[at][0]):
            found.append(f"replay {number} of {cases[at].skew}: wrong products")
        if number % 5 == 0:
            outs, _ = _ways_in(cases[at], operands[at], group)
            if not torch.equal(outs[0], exact[at][0]):
                found.append(f"eager call behind replay {number}: wrong products")
    return found


def _leaves(given: Operands) -> list[torch.Tensor]:
    return [given.x, given.ids, *given.up, *(b for b in given.up_bias if b is not None)]


def waits(world_size: int) -> Faults:
    """What in the way in waits for the GPU on the host."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    case = Case((64,) * world_size, 2, 4, "zipf", torch.bfloat16, hidden=256, inner=64)
    given = placed(whole_of(case)[group.rank()], "cuda")
    for _ in range(2):
        _ways_in(case, given, group)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _ways_in(case, given, group)
    except RuntimeError as error:
        return [str(error)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return []
