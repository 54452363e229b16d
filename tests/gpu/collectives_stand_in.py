"""Ranks of the collectives on one GPU: workspaces of one process that are each other's peers, on a
stream each.

As a program it makes calls of every op, method and element type and compares the results (for
compute-sanitizer, with --short fewer of them); if asked for, it then times rank 0 of 4, whose peers
have sent before:
    python collectives_stand_in.py [--short] [--time]
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median

import torch

from agmm import _core

SLOT_BYTES = 4 << 20
LIMIT_S = "10"
"""The limit of every wait, in AGMM_TIMEOUT_S: nothing here takes as long, but under a sanitizer."""
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
        """The input of each rank, with NaN around it."""
        is_scatter = self.op == _core.CollectiveOp.reduce_scatter
        size = self.count * (world_size if is_scatter else 1)
        return [_inside(torch.randn(size, device="cuda"), self) for _ in range(world_size)]

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


def run_all(
    wrong: Callable[[int, int, int, torch.dtype], list[str]],
    calls: int,
    arguments: Sequence[str],
) -> None:
    """Prints what is wrong with ten times so many calls of 2 to 8 ranks and every dtype, or with so
    many of 2 and 3 ranks where the arguments have ``--short``."""
    is_short = "--short" in arguments
    for world_size in (2, 3) if is_short else (2, 3, 4, 8):
        for dtype in (torch.bfloat16, torch.float16, torch.float32)[: 1 if is_short else 3]:
            faults = wrong(world_size, calls if is_short else 10 * calls, world_size, dtype)
            if faults:
                print(*faults[:10], sep="\n")
                raise SystemExit(1)
    print("all equal")


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


@cache
def _streams() -> list[torch.cuda.Stream]:
    """Made one after the other, so that each has a hardware queue of its own: a rank's second call,
    which awaits its first, would keep those of a rank behind it in the same queue."""
    return [torch.cuda.Stream() for _ in range(_core.MAX_COLLECTIVE_RANKS)]


class StandIn:
    """All ranks, each with its part of the multiprocessors where they share them, so that all their
    CTAs are on the GPU together."""

    def __init__(
        self, world_size: int, slot_bytes: int = SLOT_BYTES, *, shared: bool = True
    ) -> None:
        size = _core.CudaCollectives.workspace_bytes(slot_bytes, world_size)
        first = _core.CudaCollectives.words_offset(slot_bytes, world_size)
        self.memory = [
            torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda") for _ in range(world_size)
        ]
        for memory in self.memory:
            memory[first:].zero_()
        torch.cuda.synchronize()
        places = [memory.data_ptr() for memory in self.memory]
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        self.cores = [
            _core.CudaCollectives(
                rank, places, slot_bytes, sms - sms // world_size if shared else 0
            )
            for rank in range(world_size)
        ]
        self.streams = _streams()[:world_size]
        # A kernel's first launch loads it, which may wait for all that runs: for ranks that wait
        # for one that comes behind it. So those between the ranks' calls are launched before.
        for stream in self.streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1)
                torch.zeros(1, device="cuda").zero_()
        torch.cuda.synchronize()

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
            ctas,
        )

    def call(
        self,
        kind: Kind,
        inputs: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        ctas: int = 0,
    ) -> None:
        """One call of every rank, behind the current stream, whose results come with `wait`."""
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream())
        for rank, (given, out) in enumerate(zip(inputs, outs, strict=True)):
            self.enqueue(rank, kind, given, out, ctas)

    def wait(self) -> None:
        for stream in self.streams:
            torch.cuda.current_stream().wait_stream(stream)

    def unclean_words(self) -> int:
        """Signals and flags that a call has left behind; the turns are not counted."""
        slot_bytes = self.cores[0].slot_bytes
        first = _core.CudaCollectives.words_offset(slot_bytes, len(self.cores))
        packets = 2 * _core.COLLECTIVE_PACKET_BYTES
        found = 0
        for memory in self.memory:
            flags = memory[first : first + packets].view(torch.int32).view(-1, 4)[:, 3]
            signals = memory[first + packets :].view(torch.int32)[: -_core.COLLECTIVE_KEPT_WORDS]
            found += int((flags != 0).sum()) + int((signals != 0).sum())
        return found


def wrong_calls(world_size: int, counts: Sequence[int], turns: int) -> list[str]:
    """What was wrong with calls of every kind, some back to back."""
    ranks = StandIn(world_size)
    found = []
    for kind in kinds(counts):
        inputs = [kind.inputs(world_size) for _ in range(turns)]
        outs = [kind.empty_outs(world_size) for _ in range(turns)]
        wanted = [kind.wanted(each) for each in inputs]
        for given, out in zip(inputs, outs, strict=True):
            ranks.call(kind, given, out)
        if kind.op == _core.CollectiveOp.all_reduce:  # in place too
            inputs.append([each.clone() for each in inputs[0]])
            outs.append(inputs[-1])
            wanted.append(wanted[0])
            ranks.call(kind, inputs[-1], outs[-1])
        torch.cuda.synchronize()
        for turn, (out, want) in enumerate(zip(outs, wanted, strict=True)):
            for rank in range(world_size):
                if not torch.equal(out[rank], want[rank]):
                    found.append(f"{kind}, turn {turn}, rank {rank}")
    left = ranks.unclean_words()
    return [*found, *([f"{left} words left behind"] if left else [])]


def wrong_in_turn(
    world_size: int,
    calls: int,
    seed: int,
    methods: Sequence[_core.CollectiveMethod] = METHODS,
) -> list[str]:
    """Calls of random kinds and grids, enqueued rank by rank without a pause, so that ranks get
    ahead of others: what was wrong."""
    draw = random.Random(seed)
    ranks = StandIn(world_size)
    most = torch.cuda.get_device_properties(0).multi_processor_count // world_size
    counts = (1, 7, 13, 60, 1001, 3000, 30_000, 200_000)
    every = [kind for kind in kinds(counts) if kind.method in methods]
    drawn = [(draw.choice(every), draw.choice((0, 1, 2, 5, most))) for _ in range(calls)]
    inputs = [kind.inputs(world_size) for kind, _ in drawn]
    outs = [kind.empty_outs(world_size) for kind, _ in drawn]
    wanted = [kind.wanted(each) for (kind, _), each in zip(drawn, inputs, strict=True)]
    torch.cuda.synchronize()
    for begin in range(0, calls, 10):  # as far ahead as the queues of launches allow
        order = draw.sample(range(world_size), world_size)
        for rank in order:
            for i in range(begin, min(begin + 10, calls)):
                kind, ctas = drawn[i]
                ranks.enqueue(rank, kind, inputs[i][rank], outs[i][rank], ctas)
    torch.cuda.synchronize()
    found = [
        f"call {i} of {calls}, {drawn[i]}, rank {rank}"
        for i in range(calls)
        for rank in range(world_size)
        if not torch.equal(outs[i][rank], wanted[i][rank])
    ]
    left = ranks.unclean_words()
    return [*found, *([f"{left} words left behind"] if left else [])]


def _words(ranks: StandIn, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Flags of the first slot, and signals of both."""
    first = _core.CudaCollectives.words_offset(ranks.cores[0].slot_bytes, len(ranks.cores))
    words = ranks.memory[rank][first:].view(torch.int32)
    packets = _core.COLLECTIVE_PACKET_BYTES // 4  # of a slot
    flags = words[:packets].view(-1, 4)[:, 3]
    return flags, words[2 * packets : words.numel() - _core.COLLECTIVE_KEPT_WORDS]


def _tag(ranks: StandIn) -> int:
    """What rank 0 has been sent carries; 0: nothing has come."""
    return next(
        (x for part in _words(ranks, 0) for x in (int(part.min()), int(part.max())) if x), 0
    )


def _fill(ranks: StandIn, rank: int, tag: int) -> None:
    """Fills in what a call finds when all has come in the first slot that it awaits."""
    for part in _words(ranks, rank):
        part.fill_(tag)


def _as_if_sent(ranks: StandIn, kind: Kind, ctas: int) -> int:
    """The tag of a call of `kind` in one launch, by which rank 0 is to be told that all has come.
    Rank 1 calls alone, since the CTAs of all ranks would not find room together, and is told the
    same."""
    inputs, outs = kind.inputs(len(ranks.cores)), kind.empty_outs(len(ranks.cores))
    probe = torch.cuda.Stream()
    with torch.cuda.stream(probe):  # loads the kernels and takes memory, which waits for what runs
        assert _tag(ranks) == 0
        _fill(ranks, 1, 0)
    torch.cuda.synchronize()
    ranks.enqueue(1, kind, inputs[1], outs[1], ctas)
    with torch.cuda.stream(probe):
        torch.cuda._sleep(10_000_000)
        tag = _tag(ranks)
        assert tag != 0
        _fill(ranks, 1, tag)
    torch.cuda.synchronize()
    return tag


def time_us(world_size: int, kind: Kind, samples: int = 100, ctas: int = 0) -> tuple[float, float]:
    """Medians: of rank 0's call alone on the GPU, to whom its peers have sent what it awaits, and
    of an empty kernel between the same two events."""
    ranks = StandIn(world_size, 32 << 20, shared=False)
    tag = _as_if_sent(ranks, kind, ctas)
    first = _core.CudaCollectives.words_offset(ranks.cores[0].slot_bytes, world_size)
    words = ranks.memory[0][first:].view(torch.int32)
    words.zero_()
    _fill(ranks, 0, tag)
    image = words.clone()
    given, out = kind.inputs(world_size)[0], kind.empty_outs(world_size)[0]
    empty = torch.zeros(1, device="cuda")
    calls, nothing = [], []
    torch.cuda.synchronize()
    with torch.cuda.stream(ranks.streams[0]):
        for _ in range(samples):
            words.copy_(image)
            torch.cuda._sleep(200_000)  # so that the launches are queued
            events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            events[0].record()
            ranks.enqueue(0, kind, given, out, ctas)
            events[1].record()
            empty.zero_()
            events[2].record()
            torch.cuda.synchronize()
            calls.append(1e3 * events[0].elapsed_time(events[1]))
            nothing.append(1e3 * events[1].elapsed_time(events[2]))
    return median(calls), median(nothing)


def main() -> None:
    # These take the ranks from here.
    from gather_two_stand_in import SIZES, wrong_pairs
    from norm_and_relay_stand_in import wrong_norms, wrong_relayed

    os.environ.setdefault("AGMM_TIMEOUT_S", LIMIT_S)
    torch.manual_seed(0)
    is_short = "--short" in sys.argv  # for tools under which a call takes a hundred times as long
    for world_size in (2, 3) if is_short else (2, 3, 8):
        wrong = wrong_calls(world_size, (7, 1003) if is_short else (1, 7, 1003, 40_001), 2)
        wrong += wrong_in_turn(world_size, 10 if is_short else 30, world_size)
        wrong += wrong_norms(world_size)
        wrong += wrong_pairs(StandIn(world_size), SIZES[: 5 if is_short else 7], turns=1)
        if wrong:
            raise SystemExit("\n".join([f"{world_size} ranks:", *wrong[:20]]))
    wrong = wrong_relayed((1, 1003), 1)
    if wrong:
        raise SystemExit("\n".join(wrong[:20]))
    print("all equal")
    if "--time" in sys.argv:
        print_times()


def print_times() -> None:
    (gather, scatter, reduce), (one_shot, two_shot, blocks) = OPS, METHODS
    for op, method, size in (
        (reduce, one_shot, 8 << 10),
        (reduce, one_shot, 64 << 10),
        (reduce, two_shot, 64 << 10),
        (reduce, two_shot, 256 << 10),
        (reduce, two_shot, 1 << 20),
        (reduce, blocks, 1 << 20),
        (reduce, blocks, 8 << 20),
        (gather, one_shot, 8 << 10),
        (gather, blocks, 4 << 20),
        (scatter, one_shot, 8 << 10),
    ):
        for ctas in (0, 4, 16, 32):
            took, empty = time_us(4, Kind(op, method, torch.bfloat16, size // 2), ctas=ctas)
            print(
                f"{op.name:14} {method.name:8} {size:8} bytes, {ctas:2} CTAs: {took:7.2f} us, "
                f"{took - empty:6.2f} more than an empty kernel",
                flush=True,
            )


if __name__ == "__main__":
    main()
