"""Ranks of matmul + reduce-scatter, or + all-reduce, on one GPU: either several workspaces of one
process that are each other's peers, each with its part of the multiprocessors, or one rank that is
all its own peers, with all of them.

As a program it makes calls of every kernel and compares the results (for compute-sanitizer), or
calls back to back with ranks late at random, until one is wrong:
    python scatter_stand_in.py [--only-pingpong]
    python scatter_stand_in.py stress CALLS SEED
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from agmm import _core
from agmm.planning.legality import legal_scatter_splits
from agmm.planning.problems import MATMUL_ALL_REDUCE, MATMUL_REDUCE_SCATTER, KernelConfig, Problem
from agmm.runtime.kernels import built

DTYPES = {torch.bfloat16: _core.DType.bfloat16, torch.float16: _core.DType.float16}
PART_BYTES = 64 << 20


def kernels() -> list[KernelConfig]:
    """The kernels of this build to choose from."""
    return [KernelConfig.of(kernel) for kernel in built(MATMUL_REDUCE_SCATTER)]


def all_reduce_kernels() -> list[KernelConfig]:
    """The kernels of an all-reduce."""
    return [KernelConfig.of(kernel) for kernel in built(MATMUL_ALL_REDUCE)]


@dataclass
class Products:
    """A list of products to be summed: ``As`` are [rows, k], ``Bs`` are [k, n]."""

    As: list[torch.Tensor]
    Bs: list[torch.Tensor]
    bias: torch.Tensor | None = None
    is_average: bool = False
    residual: torch.Tensor | None = None
    """This rank's rows."""

    @property
    def rows(self) -> int:
        return self.As[0].shape[0]

    @property
    def n(self) -> int:
        return self.Bs[0].shape[1]

    def sum(self) -> torch.Tensor:
        """The sum of the products in float64."""
        return sum(
            (A.double() @ B.double() for A, B in zip(self.As, self.Bs, strict=True)),
            torch.zeros((), dtype=torch.float64, device=self.As[0].device),
        )


def drawn(
    rows: int,
    n: int,
    ks: Sequence[int],
    dtype: torch.dtype,
    *,
    column_major: bool = True,
    bias: bool = False,
    is_average: bool = False,
    residual_of: int = 0,
) -> Products:
    """Whole numbers, whose products are exact in float32.

    Args:
        residual_of: the number of ranks, of which one has its rows of a residual; 0: it has none.
    """

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-3, 4, shape, device="cuda").to(dtype)

    As = [whole(rows, k) for k in ks]
    Bs = [whole(n, k).t() if column_major else whole(k, n) for k in ks]
    residual = whole(rows // residual_of, n) if residual_of else None
    return Products(As, Bs, whole(n) if bias else None, is_average, residual)


def enqueue(
    core: _core.CudaScatterWorkspace,
    what: Products,
    out: torch.Tensor,
    config: KernelConfig,
    stream: torch.cuda.Stream,
    tile_times: torch.Tensor | None = None,
    *,
    all_reduce_sms: int = 0,
) -> None:
    """One call of one rank; with ``all_reduce_sms`` of an all-reduce."""
    column_major = what.Bs[0].stride(0) == 1
    pairs = list(zip(what.As, what.Bs, strict=True))
    problem = _core.ScatterProblem(
        what.rows,
        what.n,
        _core.Format(DTYPES[out.dtype]),
        [(A.stride(0), B.stride(int(column_major)), A.shape[1]) for A, B in pairs],
        config.core,
        b_column_major=column_major,
        is_average=what.is_average,
        all_reduce_sms=all_reduce_sms,
    )
    addresses = [address for A, B in pairs for address in (A.data_ptr(), B.data_ptr(), 0, 0)]
    beside = what.bias, what.residual, out
    addresses += [0 if tensor is None else tensor.data_ptr() for tensor in beside]
    times = 0 if tile_times is None else tile_times.data_ptr()
    core.matmul_reduce_scatter(problem, addresses, stream.cuda_stream, times)


def symmetric_memory(world_size: int, part_bytes: int) -> torch.Tensor:
    """One rank's memory: NaN in all parts, every credit given."""
    size = _core.CudaScatterWorkspace.workspace_bytes(part_bytes, world_size)
    memory = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")
    words = memory[_core.CudaScatterWorkspace.words_offset(part_bytes, world_size) :]
    words = words.view(torch.int32)
    words.zero_()
    words[torch.tensor(_core.CudaScatterWorkspace.credit_words(world_size))] = 1
    return memory


def empty_out(what: Products, world_size: int) -> torch.Tensor:
    """A result full of NaN; an all-reduce has a world size of 1 here."""
    rows, n = what.rows // world_size, what.n
    return torch.full((rows, n), torch.nan, dtype=what.As[0].dtype, device="cuda")


def finish(own: torch.Tensor, others: Sequence[torch.Tensor], what: Products) -> torch.Tensor:
    """What a rank makes of its own sum and the others', in the order in which they are given."""
    dtype = what.As[0].dtype
    sum_ = own.float()
    for other in others:
        sum_ += other.to(dtype).float()
    if what.is_average:
        sum_ *= 1 / (len(others) + 1)
    if what.residual is not None:
        sum_ += what.residual.float()
    if what.bias is not None:
        sum_ += what.bias.float()
    return sum_.to(dtype)


class Alone:
    """A rank that sends to itself what it would send to the others."""

    def __init__(self, world_size: int, rank: int, part_bytes: int = PART_BYTES) -> None:
        self.world_size, self.rank = world_size, rank
        self.memory = symmetric_memory(world_size, part_bytes)
        torch.cuda.synchronize()
        places = [self.memory.data_ptr()] * world_size
        self.core = _core.CudaScatterWorkspace(rank, places, part_bytes)

    def call(
        self, what: Products, config: KernelConfig, *, all_reduce_sms: int = 0
    ) -> torch.Tensor:
        out = empty_out(what, 1 if all_reduce_sms else self.world_size)
        stream = torch.cuda.current_stream()
        enqueue(self.core, what, out, config, stream, all_reduce_sms=all_reduce_sms)
        return out

    def expected(self, what: Products) -> torch.Tensor:
        """The chunk for the peer at distance d ahead lies where that from the rank at distance d
        behind would."""
        chunks = what.sum().chunk(self.world_size)
        w, me = self.world_size, self.rank
        others = [chunks[(2 * me - source) % w] for source in range(w) if source != me]
        return finish(chunks[me], others, what)


class Together:
    """All ranks, each with its part of the multiprocessors, so that all their kernels fit."""

    def __init__(self, world_size: int, part_bytes: int = PART_BYTES) -> None:
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        self.memory = [symmetric_memory(world_size, part_bytes) for _ in range(world_size)]
        torch.cuda.synchronize()
        places = [memory.data_ptr() for memory in self.memory]
        # Clusters of two need pairs, of which each part of the GPU may lack one.
        self.sms = (sms - 10) // world_size // 2 * 2
        self.cores = [
            _core.CudaScatterWorkspace(rank, places, part_bytes, sms - self.sms)
            for rank in range(world_size)
        ]
        self.streams = [torch.cuda.Stream() for _ in range(world_size)]
        # Loading a kernel may wait for all that runs: for a rank that waits for one to be called.
        for stream in self.streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1)
                torch.zeros(1, device="cuda").fill_(torch.nan)
        torch.cuda.synchronize()

    def enqueue(
        self, whats: Sequence[Products], config: KernelConfig, *, is_all_reduce: bool = False
    ) -> list[torch.Tensor]:
        """A call of every rank, whose results come with the streams."""
        sms = self.sms if is_all_reduce else 0
        outs = [empty_out(what, 1 if is_all_reduce else len(self.cores)) for what in whats]
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream())
        for core, what, out, stream in zip(self.cores, whats, outs, self.streams, strict=True):
            enqueue(core, what, out, config, stream, all_reduce_sms=sms)
        return outs

    def wait(self) -> None:
        for stream in self.streams:
            torch.cuda.current_stream().wait_stream(stream)

    @staticmethod
    def expected(whats: Sequence[Products]) -> list[torch.Tensor]:
        w = len(whats)
        sums = [what.sum().chunk(w) for what in whats]
        return [
            finish(
                sums[owner][owner],
                [sums[source][owner] for source in range(w) if source != owner],
                whats[owner],
            )
            for owner in range(w)
        ]


def configs(found: Sequence[KernelConfig] | None = None) -> Iterator[KernelConfig]:
    for kernel in kernels() if found is None else found:
        yield kernel
        yield replace(kernel, max_swizzle=2, raster="along_n")


def kernels_that_split() -> list[KernelConfig]:
    return [kernel for kernel in kernels() if kernel.can_split]


def split_configs(
    rows: int, n: int, ks: Sequence[int], world_size: int, sms: int
) -> Iterator[KernelConfig]:
    """The kernels that split K, for so many rows of a rank, on so many multiprocessors."""
    for kernel in kernels():
        k = sum(-(-k // kernel.tile_k) for k in ks) * kernel.tile_k
        problem = Problem(
            world_size * rows,
            n,
            k,
            world_size=world_size,
            sm_count=sms,
            op=MATMUL_REDUCE_SCATTER,
        )
        for splits in legal_scatter_splits(problem, kernel)[1:]:
            yield replace(kernel, splits=splits)


FEW_TILES: list[tuple[int, int, tuple[int, ...]]] = [
    (1, 8, (136,)),
    (17, 264, (72, 2000)),
    (130, 136, (64, 8, 200)),
    (127, 392, (1000,)),
    (300, 128, (8, 8, 136)),
]
"""Rows of a rank, N, K of each product; a part of K may be in several products."""


def check(only_pingpong: bool) -> None:
    """Calls of every kernel, or of the pingpong ones, four back to back."""
    for world_size, rows, n, ks in ((2, 70, 136, (72, 8)), (3, 130, 264, (136,))):
        ranks = Together(world_size, 1 << 20)
        chosen = [k for k in kernels() if not only_pingpong or k.schedule == "pingpong"]
        assert chosen
        for config in configs(chosen):
            turns = [
                [
                    drawn(world_size * rows, n, ks, torch.bfloat16, residual_of=of)
                    for _ in range(world_size)
                ]
                for of in (0, world_size, world_size, 0)
            ]
            torch.cuda.synchronize()
            found = [ranks.enqueue(whats, config) for whats in turns]
            torch.cuda.synchronize()
            for whats, outs in zip(turns, found, strict=True):
                for rank, (out, wanted) in enumerate(zip(outs, ranks.expected(whats), strict=True)):
                    if not torch.equal(out, wanted):
                        raise SystemExit(f"{config.name} {world_size} {rows} {n} {ks}: {rank}")
    if not only_pingpong:
        check_parts_of_k()  # by cooperative kernels
    check_all_reduces()  # by pingpong ones
    print("all equal")


def wrong_on_all_ranks(
    ranks: Together, turns: Sequence[Sequence[Products]], config: KernelConfig
) -> list[str]:
    """Faults, in words, of all-reduces back to back: each rank is to have what the owners of the
    rows make of them, and the same bits."""
    outs = [ranks.enqueue(whats, config, is_all_reduce=True) for whats in turns]
    torch.cuda.synchronize()
    faults = []
    for turn, whats in enumerate(turns):
        wanted = torch.cat(ranks.expected(whats))
        for rank, out in enumerate(outs[turn]):
            wrong = int((out != wanted).sum())  # NaN too
            if wrong:
                faults.append(f"call {turn}, rank {rank}: {wrong} of {wanted.numel()}")
    return faults


def check_all_reduces() -> None:
    for world_size, rows, n, ks in (
        (2, 70, 136, (72, 8)),
        (3, 130, 264, (136,)),
        (4, 900, 520, (72,)),
    ):
        ranks = Together(world_size, 4 << 20)
        for config in configs(all_reduce_kernels()):
            turns = [
                [drawn(world_size * rows, n, ks, torch.bfloat16) for _ in range(world_size)]
                for _ in range(4)
            ]
            torch.cuda.synchronize()
            faults = wrong_on_all_ranks(ranks, turns, config)
            if faults:
                raise SystemExit(f"{config.name} {world_size} {rows} {n} {ks}: {faults}")


def check_parts_of_k() -> None:
    ranks = Together(2, 1 << 20)
    for rows, n, ks in FEW_TILES:
        for config in split_configs(rows, n, ks, 2, ranks.sms):
            whats = [drawn(2 * rows, n, ks, torch.bfloat16) for _ in range(2)]
            outs = ranks.enqueue(whats, config)
            torch.cuda.synchronize()
            for out, wanted in zip(outs, ranks.expected(whats), strict=True):
                if not torch.equal(out, wanted):
                    raise SystemExit(f"{config.name} {rows} {n} {ks}")


class _Work:
    """Calls of one shape: rows of a rank, N, K of each product."""

    def __init__(
        self,
        ranks: Together,
        shape: tuple[int, int, tuple[int, ...]],
        configs: list[KernelConfig],
        *,
        is_all_reduce: bool = False,
    ) -> None:
        rows, n, ks = shape
        world_size = len(ranks.cores)
        self.configs = configs
        self.all_reduce_sms = ranks.sms if is_all_reduce else 0
        self.sets = [
            [
                drawn(world_size * rows, n, ks, torch.bfloat16, residual_of=of)
                for _ in range(world_size)
            ]
            for of in (0, world_size, world_size)
        ]
        self.expected = [ranks.expected(whats) for whats in self.sets]
        if is_all_reduce:
            self.expected = [[torch.cat(parts)] * world_size for parts in self.expected]
        # They are in memory that is there: an allocation may wait for kernels that wait for a rank
        # to be called.
        self.outs = [
            [empty_out(what, 1 if is_all_reduce else world_size) for what in self.sets[0]]
            for _ in range(IN_A_ROW)
        ]
        self.which = 0

    def other_data(self, draw: random.Random) -> tuple[list[Products], list[torch.Tensor]]:
        """Than the call of this shape before, and what the ranks are to find."""
        self.which = (self.which + draw.randrange(1, len(self.sets))) % len(self.sets)
        return self.sets[self.which], self.expected[self.which]


WRONG = 3
"""The program's exit code where `stress` finds a wrong element."""
IN_A_ROW = 10
"""Calls of a rank with nothing between, enqueued rank by rank, so that ranks get ahead."""


def stress(calls: int, seed: int, world_size: int = 3) -> None:
    """Each call with other data than the one before; raises SystemExit(WRONG) at the first wrong
    element."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    ranks = Together(world_size, 4 << 20)
    rows, n, ks = FEW_TILES[1]
    whole = (400, 1048, (136,))
    works = [
        _Work(ranks, whole, list(configs())),
        _Work(ranks, (rows, n, ks), list(split_configs(rows, n, ks, world_size, ranks.sms))),
        _Work(ranks, whole, list(configs(all_reduce_kernels())), is_all_reduce=True),
    ]
    works = [work for work in works if work.configs]
    wrong = torch.zeros(world_size, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for rank, stream in enumerate(ranks.streams):  # what comparing takes is there as well
        with torch.cuda.stream(stream):
            for work in works:
                out = work.outs[0][rank].fill_(torch.nan)
                wrong[rank] += (out != work.expected[0][rank]).sum()
    torch.cuda.synchronize()
    wrong.zero_()
    torch.cuda.synchronize()
    for begin in range(0, calls, IN_A_ROW):
        turns = []
        for turn in range(min(IN_A_ROW, calls - begin)):
            work = draw.choice(works)
            turns.append((work, work.outs[turn], draw.choice(work.configs), *work.other_data(draw)))
        for rank in draw.sample(range(world_size), world_size):
            stream = ranks.streams[rank]
            with torch.cuda.stream(stream):
                for _, outs, *_ in turns:
                    outs[rank].fill_(torch.nan)
                for work, outs, config, whats, _ in turns:
                    if draw.random() < 0.3:
                        torch.cuda._sleep(draw.randrange(1, 400_000))
                    sms, core = work.all_reduce_sms, ranks.cores[rank]
                    enqueue(core, whats[rank], outs[rank], config, stream, all_reduce_sms=sms)
                for _, outs, _, _, expected in turns:
                    wrong[rank] += (outs[rank] != expected[rank]).sum()  # NaN too
        torch.cuda.synchronize()
        if int(wrong.sum()):
            made = f"{begin + len(turns)} of {calls} calls"
            print(f"{wrong.tolist()} wrong elements by rank in {made}", file=sys.stderr)
            raise SystemExit(WRONG)


if __name__ == "__main__":
    if sys.argv[1:2] == ["stress"]:
        stress(int(sys.argv[2]), int(sys.argv[3]))
    else:
        torch.manual_seed(0)
        check("--only-pingpong" in sys.argv)
