"""Ranks that add up rows on one GPU: workspaces of one process that are each other's peers, on a
stream each.

As a program it makes calls that differ and compares their sums, bit for bit, with those that
torch's operations make one by one (with --short fewer, for compute-sanitizer):
    python combine_stand_in.py [--short]
"""

from __future__ import annotations

import os
import random
import sys
from typing import Any, NamedTuple

import torch
from collectives_stand_in import ELEMENTS, _streams, run_all

from agmm import _core
from agmm.ops import grouped_kernel
from agmm.ops.grouped_scatter import by_token
from agmm.ops.routing import rows_of

SLOT_BYTES = 96 << 20
LIMIT_S = "10"
IN_A_ROW = 6
"""Calls of a rank with nothing between, enqueued rank by rank, so that ranks get ahead."""


class Call(NamedTuple):
    """A call: its sizes, and what all ranks hold."""

    counts: list[int]
    columns: int
    choices: int
    experts: int
    """How many each rank has."""
    routings: list[tuple[torch.Tensor, torch.Tensor]]
    """The offsets and positions of each rank."""
    weights: list[torch.Tensor] | None
    """Each rank's of its tokens."""
    rows: list[list[torch.Tensor]]
    """Each rank's, of each part."""
    operands: list[list[tuple[torch.Tensor, torch.Tensor, Any]]]
    """For each rank and part the operands and the kernel that make the rows, or nothing."""
    expected: list[torch.Tensor]


def drawn(draw: random.Random, world_size: int, dtype: torch.dtype) -> Call:
    """A call whose ranks hold different numbers of tokens, perhaps none, whose ids are skewed and
    partly dropped, and may name one expert twice."""
    counts = [draw.choice([0, 1, 7, 40, 130]) for _ in range(world_size)]
    if not any(counts):
        counts[0] = 3
    columns = draw.choice([8, 72, 264, 1160])
    choices, experts = draw.choice([1, 2, 4, 8]), draw.choice([1, 3, 16])
    every, capacity = list(range(experts * world_size)), sum(counts) * choices
    odds = [1 / (1 + e) for e in every]
    ids = [
        [e if draw.random() < 0.8 else -1 for e in draw.choices(every, odds, k=choices)]
        for _ in range(sum(counts))
    ]
    given = torch.tensor(ids, device="cuda").view(-1, choices)
    router = torch.rand(sum(counts), choices, device="cuda") if draw.random() < 0.7 else None
    parts, multiplies = draw.choice([1, 1, 2]), draw.random() < 0.5
    routings, rows, operands, total = [], [], [], None
    for rank in range(world_size):
        _, _, _, offsets, positions = rows_of(given, rank * experts, experts, capacity)
        routings.append((offsets, positions))
        made, held = [], []
        for _ in range(parts):
            y = torch.randn(capacity, 72, device="cuda").to(dtype)
            weight = torch.randn(experts, columns, 72, device="cuda").to(dtype).mT
            config = grouped_kernel.config_of(y, [weight])
            if config is not None and multiplies:
                held.append((y, weight, config))
                made.append(grouped_kernel.run(config, y, [weight], [None], offsets))
            else:
                made.append(torch.randn(capacity, columns, device="cuda").to(dtype))
        rows.append(made)
        operands.append(held)
        sums = made[0].float()
        for one in made[1:]:
            sums = sums + one.float()
        partial = by_token(sums, positions, router)
        total = partial if total is None else total + partial
    assert total is not None
    return Call(
        *(counts, columns, choices, experts, routings),
        None if router is None else list(router.split(counts)),
        *(rows, operands),
        list(total.to(dtype).split(counts)),
    )


class StandIn:
    """All ranks, each with its part of the multiprocessors, so that all their CTAs are on the GPU
    together."""

    def __init__(self, world_size: int) -> None:
        core = _core.CudaRowCombine
        size = core.workspace_bytes(SLOT_BYTES, world_size)
        first = core.words_offset(SLOT_BYTES, world_size)
        self.words = torch.zeros((size - first) // 4, dtype=torch.int32, device="cuda")
        self.words[torch.tensor(core.credit_words(world_size))] = 1
        self.memory = [
            torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda") for _ in range(world_size)
        ]
        for memory in self.memory:
            memory[first:].view(torch.int32).copy_(self.words)
        torch.cuda.synchronize()
        self.first = first
        places = [memory.data_ptr() for memory in self.memory]
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        self.cores = [
            core(rank, places, SLOT_BYTES, sms - sms // world_size) for rank in range(world_size)
        ]
        self.streams = _streams()[:world_size]

    def enqueue(self, call: Call, rank: int, out: torch.Tensor) -> list[Any]:
        """Returns what has to live until the call has ended."""
        offsets, positions = call.routings[rank]
        made = [
            grouped_kernel.described(config, y, [weight], [None], None, has_out=False)
            for y, weight, config in call.operands[rank]
        ]
        matmuls = [
            (one.arguments, y.data_ptr(), y.stride(0), (0, 0, 0))
            for one, (y, *_) in zip(made, call.operands[rank], strict=True)
        ]
        weights = None if call.weights is None else call.weights[rank].contiguous()
        self.cores[rank].combine(
            ELEMENTS[out.dtype],
            (call.columns, call.choices, call.experts, call.rows[rank][0].shape[0]),
            call.counts,
            (
                offsets.data_ptr(),
                positions.data_ptr(),
                0 if weights is None else weights.data_ptr(),
                out.data_ptr(),
            ),
            [] if matmuls else [one.data_ptr() for one in call.rows[rank]],
            matmuls,
            self.streams[rank].cuda_stream,
        )
        return [made, weights]

    def left_words(self) -> list[str]:
        """The ranks whose words calls left otherwise than they found them."""
        return [
            f"rank {rank}: words are not as before"
            for rank, memory in enumerate(self.memory)
            if not torch.equal(memory[self.first :].view(torch.int32), self.words)
        ]


def wrong(world_size: int, calls: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> list[str]:
    """What is wrong with calls in rows, whose ranks begin in any order."""
    ranks, draw = StandIn(world_size), random.Random(seed)
    torch.manual_seed(seed)
    faults: list[str] = []
    for _ in range(0, calls, IN_A_ROW):
        turns = [drawn(draw, world_size, dtype) for _ in range(IN_A_ROW)]
        outs = [[torch.full_like(one, torch.nan) for one in call.expected] for call in turns]
        held = []
        torch.cuda.synchronize()
        for rank in draw.sample(range(world_size), world_size):
            for call, of_ranks in zip(turns, outs, strict=True):
                if draw.random() < 0.3:
                    with torch.cuda.stream(ranks.streams[rank]):
                        torch.cuda._sleep(draw.randrange(1, 400_000))
                held.append(ranks.enqueue(call, rank, of_ranks[rank]))
        torch.cuda.synchronize()
        for call, of_ranks in zip(turns, outs, strict=True):
            for rank, out in enumerate(of_ranks):
                if not torch.equal(out, call.expected[rank]):
                    sizes = f"{call.counts} x {call.columns}, {call.choices} choices"
                    faults.append(f"{sizes}, {len(call.rows[rank])} parts, rank {rank}: wrong sums")
        faults += ranks.left_words()
        if faults:
            break
    return faults


if __name__ == "__main__":
    os.environ.setdefault("AGMM_TIMEOUT_S", LIMIT_S)
    run_all(wrong, IN_A_ROW, sys.argv[1:])
