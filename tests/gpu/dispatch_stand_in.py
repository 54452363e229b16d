"""Ranks of a dispatch of rows on one GPU: workspaces of one process that are each other's peers, on
a stream each.

As a program it makes calls that differ and compares what they bring with the tokens of all ranks,
and the products with those of rows that were there before (with --short fewer, for
compute-sanitizer):
    python dispatch_stand_in.py [--short]
"""

from __future__ import annotations

import os
import random
import sys
from typing import Any, NamedTuple

import torch
from collectives_stand_in import _streams, run_all

from agmm import _core
from agmm.ops import grouped_kernel
from agmm.ops.grouped_products import Multiplied
from agmm.ops.routing import rows_of
from agmm.runtime.epilogues import Epilogue

SLOT_BYTES = 1 << 20
LIMIT_S = "10"
TURN = 64
"""The word that says which slot is next, behind a cache line of tags for each slot."""
IN_A_ROW = 6
"""Calls of a rank with nothing between, enqueued rank by rank, so that ranks get ahead."""


class Call(NamedTuple):
    """A call: its sizes, and what all ranks hold."""

    counts: list[int]
    columns: int
    choices: int
    experts: int
    """How many each rank has."""
    gathers: bool
    multiplies: str
    """"" for a dispatch alone, "one", "gate", or "two" for products one after the other."""
    tokens: list[torch.Tensor]
    """Each rank's."""
    wanted: list[tuple[torch.Tensor, ...]]
    """The tokens, offsets and positions of each rank's routing."""
    made: list[Multiplied]
    expected: list[list[torch.Tensor]]
    """The products of each rank."""


class Found(NamedTuple):
    """What a call brings to a rank."""

    rows: torch.Tensor
    gathered: torch.Tensor
    words: torch.Tensor
    outs: list[torch.Tensor]


def drawn(draw: random.Random, world_size: int, dtype: torch.dtype) -> Call:
    """A call whose ranks hold different numbers of tokens, perhaps none, whose ids are skewed and
    partly dropped, and may name one expert twice."""
    counts = [draw.choice([0, 1, 7, 40, 130]) for _ in range(world_size)]
    if not any(counts):
        counts[0] = 3
    columns = draw.choice([8, 72, 264, 1160])
    choices, experts = draw.choice([1, 2, 4, 8]), draw.choice([1, 3, 16])
    every = list(range(experts * world_size))
    odds = [1 / (1 + e) for e in every]
    ids = [
        [e if draw.random() < 0.8 else -1 for e in draw.choices(every, odds, k=choices)]
        for _ in range(sum(counts))
    ]
    capacity = sum(counts) * choices
    given = torch.tensor(ids, device="cuda").view(-1, choices)
    wanted: list[tuple[torch.Tensor, ...]] = []
    for rank in range(world_size):
        sources, _, _, offsets, positions = rows_of(given, rank * experts, experts, capacity)
        wanted.append((sources, offsets, positions))
    tokens = [torch.randn(count, columns, device="cuda").to(dtype) for count in counts]
    whole = torch.cat(tokens)
    multiplies = draw.choice(["", "one", "gate", "two"])
    made, expected = [], []
    for sources, offsets, _ in wanted:
        found = _made(multiplies, experts, columns, draw.choice([8, 136, 520]), dtype)
        made.append(found)
        if multiplies:
            plan = found.matmuls(whole[sources])
            if plan is None:
                multiplies = ""
            else:
                expected.append(_alone(whole[sources], offsets, found))
    if not multiplies:
        expected = [[] for _ in range(world_size)]
    gathers = draw.random() < 0.3
    sizes = counts, columns, choices, experts, gathers, multiplies
    return Call(*sizes, tokens, wanted, made, expected)


def _made(kind: str, experts: int, k: int, n: int, dtype: torch.dtype) -> Multiplied:
    count = 2 if kind in ("gate", "two") else 1
    weights = [torch.randn(experts, n, k, device="cuda").to(dtype).mT for _ in range(count)]
    biases = [torch.randn(experts, n, device="cuda").to(dtype), *[None] * (count - 1)]
    return Multiplied(weights, biases, Epilogue("silu_mul") if kind == "gate" else None)


def _alone(rows: torch.Tensor, offsets: torch.Tensor, made: Multiplied) -> list[torch.Tensor]:
    """The products of rows that are there."""
    weights, biases, epilogue = made
    config = grouped_kernel.gated_config(rows, weights, epilogue)
    if config is not None:
        return [grouped_kernel.run(config, rows, weights, biases, offsets, epilogue)]
    outs = []
    for weight, bias in zip(weights, biases, strict=True):
        config = grouped_kernel.config_of(rows, [weight])
        assert config is not None
        outs.append(grouped_kernel.run(config, rows, [weight], [bias], offsets))
    return outs


class StandIn:
    """All ranks, each with its part of the multiprocessors, so that all their CTAs are on the GPU
    together."""

    def __init__(self, world_size: int) -> None:
        self.core = _core.CudaRowDispatch
        size = self.core.workspace_bytes(SLOT_BYTES, world_size)
        self.first = self.core.words_offset(SLOT_BYTES, world_size)
        self.memory = [
            torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda") for _ in range(world_size)
        ]
        for memory in self.memory:
            memory[self.first :].zero_()
        torch.cuda.synchronize()
        places = [memory.data_ptr() for memory in self.memory]
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        self.cores = [
            self.core(rank, places, SLOT_BYTES, sms - sms // world_size)
            for rank in range(world_size)
        ]
        self.streams = _streams()[:world_size]

    def room(self, call: Call, rank: int) -> tuple[Found, list[Any], list[Any]]:
        """Memory for what a call brings, full of NaN, its matmuls, and what they hold."""
        dtype, ranks = call.tokens[0].dtype, len(call.counts)
        capacity = sum(call.counts) * call.choices
        where: dict[str, Any] = {"device": "cuda", "dtype": dtype}
        rows = torch.full((capacity, call.columns), torch.nan, **where)
        gathered = torch.full((sum(call.counts), call.columns), torch.nan, **where)
        words = torch.full((2, ranks * call.experts), -1, device="cuda", dtype=torch.int32)
        plan = call.made[rank].matmuls(rows) if call.multiplies else ([], False)
        assert plan is not None
        for one in plan[0]:
            one.out.fill_(torch.nan)
        found = Found(rows, gathered, words, [one.out for one in plan[0]])
        return found, [one.arguments for one in plan[0]], [one.held for one in plan[0]]

    def enqueue(self, call: Call, rank: int, room: Found, matmuls: list[Any]) -> None:
        x, (tokens, offsets, positions) = call.tokens[rank], call.wanted[rank]
        self.cores[rank].dispatch(
            (
                call.columns * x.element_size(),
                call.choices,
                call.experts,
                room.rows.shape[0],
            ),
            call.counts,
            (
                x.data_ptr(),
                tokens.data_ptr(),
                offsets.data_ptr(),
                positions.data_ptr(),
                room.rows.data_ptr(),
                room.gathered.data_ptr() if call.gathers else 0,
                room.words[0].data_ptr(),
                room.words[1].data_ptr(),
            ),
            matmuls,
            self.streams[rank].cuda_stream,
        )

    def left_words(self, calls: int) -> list[str]:
        """The words that calls left otherwise than they should, in words."""
        wanted = torch.zeros_like(self.memory[0][self.first :].view(torch.int32))
        wanted[TURN] = calls % 2
        found = []
        for rank, memory in enumerate(self.memory):
            words = memory[self.first :].view(torch.int32)
            if not torch.equal(words, wanted):
                places = (words != wanted).nonzero()[:, 0].tolist()
                found.append(f"rank {rank}: words {places[:5]} are not as before")
        return found


def faults_of(call: Call, rank: int, found: Found) -> list[str]:
    """What is wrong with what a call brought to a rank."""
    tokens, offsets, _ = call.wanted[rank]
    whole, end = torch.cat(call.tokens), int(offsets[-1])
    faults = []
    if not torch.equal(found.rows[:end], whole[tokens[:end]]):
        faults.append("wrong rows")
    if not bool(found.rows[end:].isnan().all()):
        faults.append("rows behind the last were written")
    if call.gathers and not torch.equal(found.gathered, whole):
        faults.append("wrong gathered tokens")
    ends = torch.tensor(call.counts).cumsum(0).tolist()
    firsts = [0, *ends[:-1]]
    of_experts = [
        tokens[begin:stop].tolist()
        for begin, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    ]
    sizes = [
        [sum(first <= t < stop for t in held) for held in of_experts]
        for first, stop in zip(firsts, ends, strict=True)
    ]
    if found.words[0].tolist() != [size for of_source in sizes for size in of_source]:
        faults.append("wrong counts")
    begins = [
        begin + sum(t < first for t in held)
        for begin, held in zip(offsets[:-1].tolist(), of_experts, strict=True)
        for first in firsts
    ]
    if found.words[1].tolist() != begins:
        faults.append("wrong first rows")
    for out, wanted in zip(found.outs, call.expected[rank], strict=True):
        if not torch.equal(out, wanted):
            faults.append("wrong products")
    sizes_of = f"{call.counts} x {call.columns}, {call.choices} of {call.experts} experts"
    return [f"{sizes_of}, {call.multiplies or 'alone'}, rank {rank}: {each}" for each in faults]


def wrong(world_size: int, calls: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> list[str]:
    """What is wrong with calls in rows, whose ranks begin in any order."""
    ranks, draw = StandIn(world_size), random.Random(seed)
    torch.manual_seed(seed)
    faults: list[str] = []
    made = 0
    while made < calls and not faults:
        turns = [drawn(draw, world_size, dtype) for _ in range(IN_A_ROW)]
        rooms = [[ranks.room(call, rank) for rank in range(world_size)] for call in turns]
        torch.cuda.synchronize()
        for rank in draw.sample(range(world_size), world_size):
            for call, of_ranks in zip(turns, rooms, strict=True):
                if draw.random() < 0.3:
                    with torch.cuda.stream(ranks.streams[rank]):
                        torch.cuda._sleep(draw.randrange(1, 400_000))
                ranks.enqueue(call, rank, *of_ranks[rank][:2])
        torch.cuda.synchronize()
        made += IN_A_ROW
        for call, of_ranks in zip(turns, rooms, strict=True):
            for rank, (found, *_) in enumerate(of_ranks):
                faults += faults_of(call, rank, found)
        faults += ranks.left_words(made)
    return faults


if __name__ == "__main__":
    os.environ.setdefault("AGMM_TIMEOUT_S", LIMIT_S)
    run_all(wrong, IN_A_ROW, sys.argv[1:])
