"""Ranks of the collectives on one GPU: workspaces of one process that are each other's peers, on a
stream each. All CTAs of all ranks have to be on the GPU together, so calls say how many they take.

As a program it makes calls of every op, method and element type and compares the results, then, if
asked for, times rank 0 of 4 whose peers have sent before:
    python collectives_stand_in.py [calls per kind] [--time]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from agmm import _core

SLOT_BYTES = 4 << 20
OPS = (
    _core.CollectiveOp.all_gather,
    _core.CollectiveOp.reduce_scatter,
    _core.CollectiveOp.all_reduce,
)
METHODS = (
    _core.CollectiveMethod.one_shot,
    _core.CollectiveMethod.two_shot,
    _core.CollectiveMethod.blocks,
)
ELEMENTS = {
    torch.bfloat16: _core.CollectiveElement.bfloat16,
    torch.float16: _core.CollectiveElement.float16,
    torch.float32: _core.CollectiveElement.float32,
}
GPU_CTAS = 128
"""That are on a GPU together, however many registers a kernel takes."""


@dataclass(frozen=True)
class Kind:
    """A call but for its data. ``count`` is of elements of a rank's input, of reduce_scatter of its
    output; ``offset`` is how far both begin inside their memory."""

    op: _core.CollectiveOp
    method: _core.CollectiveMethod
    dtype: torch.dtype
    count: int
    offset: int = 0
    is_average: bool = False

    def inputs(self, world_size: int) -> list[torch.Tensor]:
        """Of each rank, NaN around it."""
        is_scatter = self.op == _core.CollectiveOp.reduce_scatter
        return [
            _inside(torch.randn(self.count * (world_size if is_scatter else 1)), self)
            for _ in range(world_size)
        ]

    def empty_outs(self, world_size: int) -> list[torch.Tensor]:
        is_gather = self.op == _core.CollectiveOp.all_gather
        size = self.count * (world_size if is_gather else 1)
        return [_inside(torch.full((size,), torch.nan), self) for _ in range(world_size)]

    def wanted(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Bit for bit: sums in float32, in the order of the ranks, rounded once."""
        ranks = len(inputs)
        if self.op == _core.CollectiveOp.all_gather:
            return [torch.cat(list(inputs))] * ranks
        total = inputs[0].float()
        for each in inputs[1:]:
            total = total + each.float()
        if self.is_average:
            total = total * (1.0 / ranks)
        result = total.to(self.dtype)
        if self.op == _core.CollectiveOp.all_reduce:
            return [result] * ranks
        return list(result.chunk(ranks))


def _inside(values: torch.Tensor, kind: Kind) -> torch.Tensor:
    """``values`` on the GPU as ``kind`` wants them to lie."""
    memory = torch.full((kind.offset + values.numel() + 16,), torch.nan, device="cuda")
    memory = memory.to(kind.dtype)
    found = memory[kind.offset : kind.offset + values.numel()]
    found.copy_(values)
    return found


def kinds(counts: Sequence[int]) -> Iterator[Kind]:
    for op in OPS:
        for method in METHODS:
            if method == _core.CollectiveMethod.two_shot and op != _core.CollectiveOp.all_reduce:
                continue
            for dtype in ELEMENTS:
                for i, count in enumerate(counts):
                    is_sum = op != _core.CollectiveOp.all_gather
                    yield Kind(op, method, dtype, count, i % 3, is_sum and i % 2 == 1)


class StandIn:
    def __init__(self, world_size: int, slot_bytes: int = SLOT_BYTES) -> None:
        size = _core.CudaCollectives.workspace_bytes(slot_bytes, world_size)
        first = _core.CudaCollectives.words_offset(slot_bytes, world_size)
        self.memory = [
            torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda") for _ in range(world_size)
        ]
        for memory in self.memory:
            memory[first:].zero_()
        torch.cuda.synchronize()
        places = [memory.data_ptr() for memory in self.memory]
        self.cores = [_core.CudaCollectives(r, places, slot_bytes) for r in range(world_size)]
        self.streams = [torch.cuda.Stream() for _ in range(world_size)]

    def enqueue(
        self, rank: int, kind: Kind, given: torch.Tensor, out: torch.Tensor, ctas: int = 0
    ) -> None:
        self.cores[rank].call(
            kind.op,
            kind.method,
            ELEMENTS[kind.dtype],
            given.data_ptr(),
            out.data_ptr(),
            kind.count,
            kind.is_average,
            self.streams[rank].cuda_stream,
            ctas or GPU_CTAS // len(self.cores),
        )

    def call(
        self, kind: Kind, inputs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]
    ) -> None:
        """One call of every rank. The caller synchronizes before."""
        for rank, (given, out) in enumerate(zip(inputs, outs, strict=True)):
            self.enqueue(rank, kind, given, out)
        torch.cuda.synchronize()

    def unclean_words(self) -> int:
        """Signals and flags that a call has left behind; the turns are not counted."""
        slot_bytes = self.cores[0].slot_bytes
        first = _core.CudaCollectives.words_offset(slot_bytes, len(self.cores))
        packets = 2 * _core.COLLECTIVE_PACKET_BYTES
        found = 0
        for memory in self.memory:
            flags = memory[first : first + packets].view(torch.int32).view(-1, 4)[:, 3]
            signals = memory[first + packets :].view(torch.int32)[: -_core.MAX_COLLECTIVE_CTAS]
            found += int((flags != 0).sum()) + int((signals != 0).sum())
        return found


def compare(world_size: int, counts: Sequence[int], calls: int) -> tuple[int, int]:
    """Calls made, and those that were wrong."""
    ranks = StandIn(world_size)
    made = wrong = 0
    for kind in kinds(counts):
        for _ in range(calls):
            inputs = kind.inputs(world_size)
            outs = kind.empty_outs(world_size)
            wanted = kind.wanted(inputs)
            torch.cuda.synchronize()
            ranks.call(kind, inputs, outs)
            made += 1
            if not all(torch.equal(out, want) for out, want in zip(outs, wanted, strict=True)):
                wrong += 1
                print("wrong:", world_size, kind)
            in_place = kind.op == _core.CollectiveOp.all_reduce
            if in_place:
                ranks.call(kind, inputs, inputs)
                made += 1
                if not all(torch.equal(a, b) for a, b in zip(inputs, wanted, strict=True)):
                    wrong += 1
                    print("wrong in place:", world_size, kind)
    left = ranks.unclean_words()
    if left:
        print("words left behind:", left)
        wrong += 1
    return made, wrong


def time_us(world_size: int, kind: Kind, samples: int = 200, ctas: int = 0) -> tuple[float, float]:
    """Medians: of rank 0's call, whose peers have sent what it waits for, and of an empty kernel
    between the same two events."""
    ranks = StandIn(world_size, 32 << 20)
    inputs = kind.inputs(world_size)
    outs = kind.empty_outs(world_size)
    stream = ranks.streams[0]
    empty = torch.zeros(1, device="cuda")
    calls, nothing = [], []
    torch.cuda.synchronize()
    for _ in range(samples):
        for rank in range(1, world_size):
            ranks.enqueue(rank, kind, inputs[rank], outs[rank], ctas)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000)  # the others have sent, and this rank's launches are queued
            events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            events[0].record()
            ranks.enqueue(0, kind, inputs[0], outs[0], ctas)
            events[1].record()
            empty.zero_()
            events[2].record()
        torch.cuda.synchronize()
        calls.append(1e3 * events[0].elapsed_time(events[1]))
        nothing.append(1e3 * events[1].elapsed_time(events[2]))
    return median(calls), median(nothing)


def main() -> None:
    calls = int(sys.argv[1]) if len(sys.argv) > 1 and sys.argv[1].isdigit() else 2
    counts = (1, 7, 4096, 100_003, 1_500_000)
    for world_size in (2, 3, 4, 8):
        made, wrong = compare(world_size, counts, calls)
        print(f"{world_size} ranks: {made} calls, {wrong} wrong", flush=True)
        if wrong:
            sys.exit(1)
    if "--time" in sys.argv:
        for name, op, method, size in (
            ("all_reduce", OPS[2], METHODS[0], 8 << 10),
            ("all_reduce", OPS[2], METHODS[0], 64 << 10),
            ("all_reduce", OPS[2], METHODS[1], 64 << 10),
            ("all_reduce", OPS[2], METHODS[1], 256 << 10),
            ("all_reduce", OPS[2], METHODS[1], 1 << 20),
            ("all_reduce", OPS[2], METHODS[2], 1 << 20),
            ("all_reduce", OPS[2], METHODS[2], 8 << 20),
            ("all_gather", OPS[0], METHODS[0], 8 << 10),
            ("all_gather", OPS[0], METHODS[2], 4 << 20),
            ("reduce_scatter", OPS[1], METHODS[0], 8 << 10),
        ):
            kind = Kind(op, method, torch.bfloat16, size // 2)
            for ctas in (4, 16, 32):
                took, empty = time_us(4, kind, ctas=ctas)
                print(
                    f"{name:15} {method!s:28} {size:9} bytes {ctas:3} CTAs "
                    f"{took:7.2f} us, empty {empty:5.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
