"""All-gathers of two tensors in one call, of ranks on one GPU (collectives_stand_in.py)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from collectives_stand_in import METHODS, StandIn

from agmm import _core

NEVER_SENT = 0xA5
SIZES = ((1, 1), (16, 4), (12, 12), (4096, 128), (4095, 36), (5, 40_000), (600_000, 18_752))
"""The bytes of both tensors: parts of a group, whole groups, a second that is larger than the first
and that begins in the middle of a block."""
TOO_LARGE = (3_000_000, 400_000)
"""More than a slot of the stand-in holds for two ranks, so two kinds of launches follow."""


class _Memory:
    """Bytes of the GPU, with others around them that nobody may write."""

    def __init__(self, count: int, offset: int) -> None:
        self.whole = torch.full(
            (offset + count + 16,), NEVER_SENT, dtype=torch.uint8, device="cuda"
        )
        self.inside = self.whole[offset : offset + count]
        self.around = [self.whole[:offset], self.whole[offset + count :]]

    @property
    def is_clean(self) -> bool:
        return all(bool((each == NEVER_SENT).all()) for each in self.around)


def enqueue(
    ranks: StandIn,
    rank: int,
    method: _core.CollectiveMethod,
    given: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    ctas: int = 0,
) -> None:
    (x, second), (out, second_out) = given, outs
    ranks.cores[rank].all_gather_two(
        method,
        x.data_ptr(),
        out.data_ptr(),
        x.nbytes,
        second.data_ptr(),
        second_out.data_ptr(),
        second.nbytes,
        ranks.streams[rank].cuda_stream,
        ctas,
    )


def wrong_pairs(
    ranks: StandIn,
    sizes: Sequence[tuple[int, int]],
    methods: Sequence[_core.CollectiveMethod] = (METHODS[0], METHODS[2]),
    turns: int = 3,
) -> list[str]:
    """What was wrong with calls of all sizes, back to back and in turn with each other."""
    world_size, found = len(ranks.cores), []
    draw = random.Random(world_size)
    kinds = [(m, size) for m in methods for size in sizes for _ in range(turns)]
    draw.shuffle(kinds)
    calls = []
    for method, size in kinds:
        offsets = draw.choice(((0, 0), (0, 0), (16, 4), (1, 2)))
        given = [
            [torch.randint(0, 256, (n,), dtype=torch.uint8, device="cuda") for n in size]
            for _ in range(world_size)
        ]
        outs = [
            [_Memory(n * world_size, at) for n, at in zip(size, offsets, strict=True)]
            for _ in range(world_size)
        ]
        calls.append((method, size, given, outs))
    torch.cuda.synchronize()
    for method, _, given, outs in calls:
        for rank in draw.sample(range(world_size), world_size):
            enqueue(ranks, rank, method, given[rank], [out.inside for out in outs[rank]])
    torch.cuda.synchronize()
    for method, size, given, outs in calls:
        for which in range(2):
            wanted = torch.cat([each[which] for each in given])
            for rank in range(world_size):
                out = outs[rank][which]
                if not torch.equal(out.inside, wanted):
                    found.append(f"{method.name}, {size} bytes, tensor {which}, rank {rank}")
                if not out.is_clean:
                    found.append(f"{method.name}, {size} bytes: rank {rank} wrote outside")
    left = ranks.unclean_words()
    return [*found, *([f"{left} words left behind"] if left else [])]
