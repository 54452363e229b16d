"""The kernels of matmul + reduce-scatter, on one GPU (scatter_stand_in.py)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import scatter_stand_in
import torch
from scatter_stand_in import Alone, Products, Together, drawn, empty_out, enqueue

from agmm import _core
from agmm.bench import record
from agmm.planning.problems import KernelConfig

PROGRAM = Path(__file__).parent / "scatter_stand_in.py"
# Rows of a chunk, N, K of each product.
UGLY = [
    (1, 8, (8,)),
    (17, 40, (72,)),
    (127, 264, (136,)),
    (130, 520, (64, 8)),
    (257, 128, (8, 200, 64)),
    (2300, 136, (72,)),  # two bands with four ranks
]
DEFAULT = KernelConfig.parse("128x128x64_1x1_pingpong")


def config_names() -> list[str]:
    return [config.name for config in scatter_stand_in.configs()]


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    wrong = (found != expected) | found.isnan()
    assert not wrong.any(), f"{int(wrong.sum())} wrong, first at {wrong.nonzero()[0].tolist()}"


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("shape", UGLY, ids=str)
def test_every_kernel(world_size: int, shape: tuple[int, int, tuple[int, ...]]) -> None:
    rows, n, ks = shape
    rank = Alone(world_size, world_size // 2)
    for name in config_names():
        for dtype in (torch.bfloat16, torch.float16):
            for column_major in (True, False):
                what = drawn(world_size * rows, n, ks, dtype, column_major=column_major)
                check(rank.call(what, KernelConfig.parse(name)), rank.expected(what))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("shape", scatter_stand_in.FEW_TILES, ids=str)
def test_parts_of_k(world_size: int, shape: tuple[int, int, tuple[int, ...]]) -> None:
    """One rank has the whole GPU, then all ranks run at once; data that is not exact has the same
    bits every time, whichever part is done last."""
    rows, n, ks = shape
    rank, ranks = Alone(world_size, world_size // 2), Together(world_size, 4 << 20)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    alone = list(scatter_stand_in.split_configs(rows, n, ks, world_size, sms))
    if not alone:
        pytest.skip("this build has no kernel that splits K")
    for config in alone:
        for column_major in (True, False):
            what = drawn(world_size * rows, n, ks, torch.float16, column_major=column_major)
            check(rank.call(what, config), rank.expected(what))
    for config in scatter_stand_in.split_configs(rows, n, ks, world_size, ranks.sms):
        whats = [
            drawn(world_size * rows, n, ks, torch.bfloat16, bias=True, residual_of=world_size)
            for _ in range(world_size)
        ]
        outs = ranks.enqueue(whats, config)
        torch.cuda.synchronize()
        for out, expected in zip(outs, ranks.expected(whats), strict=True):
            check(out, expected)
        for what in whats:
            what.As[0] *= torch.rand((), device="cuda").bfloat16()
        first = ranks.enqueue(whats, config)
        again = [ranks.enqueue(whats, config) for _ in range(20)]
        torch.cuda.synchronize()
        for found in again:
            for out, before in zip(found, first, strict=True):
                check(out, before)


@pytest.mark.parametrize("is_average", [False, True], ids=["sum", "avg"])
def test_bias_residual_and_average(is_average: bool) -> None:
    rank = Alone(4, 1)
    for name in config_names():
        for (rows, n, ks), dtype in product(UGLY, (torch.bfloat16, torch.float16)):
            for has_bias in (True, False):
                settings: Any = {"bias": has_bias, "is_average": is_average, "residual_of": 4}
                what = drawn(4 * rows, n, ks, dtype, **settings)
                check(rank.call(what, KernelConfig.parse(name)), rank.expected(what))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_special_numbers_of_a_residual(dtype: torch.dtype) -> None:
    """What is added to a product of 0 is the result, but for the sign of a 0."""
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 0.0, 1.0, -3.5, 1e-5])
    rank, rows = Alone(2, 1), 130
    residual = special.to("cuda", dtype).repeat(rows, 33)
    A, B = torch.zeros(2 * rows, 8), torch.ones(264, 8).t()
    what = Products([A.to("cuda", dtype)], [B.to("cuda", dtype)], residual=residual)
    for name in config_names():
        out = rank.call(what, KernelConfig.parse(name))
        assert torch.equal(out.isnan(), residual.isnan())
        there = ~residual.isnan()
        assert torch.equal(out[there], residual[there])


@pytest.mark.parametrize("is_all_reduce", [False, True], ids=["scatter", "all-reduce"])
def test_a_residual_is_rounded_with_the_sum(is_all_reduce: bool) -> None:
    """The sum of the own product, the other's as it came and the residual is rounded once."""
    world_size, rows, n, k = 2, 257, 520, 512
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    rank = Alone(world_size, 1)
    what = Products(
        [torch.randn(world_size * rows, k, device="cuda").bfloat16()],
        [torch.randn(n, k, device="cuda").bfloat16().t()],
        residual=(k**0.5 * torch.randn(rows, n, device="cuda")).bfloat16(),
    )
    assert what.residual is not None
    other, own = what.sum().chunk(world_size)
    exact = own + other.bfloat16().double() + what.residual.double()
    allowed = 1.01 * (exact.bfloat16().double() - exact).norm()
    kernels = ALL_REDUCES if is_all_reduce else scatter_stand_in.kernels()
    for kernel in kernels:
        out = rank.call(what, kernel, all_reduce_sms=sms if is_all_reduce else 0)
        own_rows = out.chunk(world_size)[1] if is_all_reduce else out
        assert (own_rows.double() - exact).norm() <= allowed, kernel.name


def test_error_is_that_of_rounded_parts() -> None:
    """No larger than of the parts rounded to bf16 and summed in float32."""
    world_size, rows, n, k = 4, 256, 512, 2048
    rank = Alone(world_size, 2)
    what = Products(
        [torch.randn(world_size * rows, k, device="cuda").bfloat16()],
        [torch.randn(n, k, device="cuda").bfloat16().t()],
    )
    exact = what.sum().chunk(world_size)
    order = [(4 - source) % 4 for source in (0, 1, 3)]
    reference = exact[2] + sum(exact[i] for i in order)
    parts = sum((exact[i].bfloat16().float() for i in (2, *order)), torch.zeros_like(exact[2]))
    allowed = (parts.bfloat16().double() - reference).norm()
    for name in config_names():
        error = (rank.call(what, KernelConfig.parse(name)).double() - reference).norm()
        assert error <= 1.001 * allowed


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_ranks_together(world_size: int) -> None:
    ranks = Together(world_size)
    for rows, n, ks in UGLY:
        for kernel in scatter_stand_in.kernels():
            whats = [
                drawn(world_size * rows, n, ks, torch.bfloat16, bias=True, residual_of=world_size)
                for _ in range(world_size)
            ]
            outs = ranks.enqueue(whats, kernel)
            torch.cuda.synchronize()
            for out, expected in zip(outs, ranks.expected(whats), strict=True):
                check(out, expected)


@pytest.mark.parametrize("config", [DEFAULT, None], ids=["one kernel", "kernels in turn"])
def test_back_to_back(config: KernelConfig | None) -> None:
    """2000 calls with new data, every eighth by a graph, without a pause. Calls with the data of an
    earlier one have its bits."""
    world_size, rows, n, k = 4, 130, 392, 136
    ranks = Together(world_size, 4 << 20)
    kernels = [config] if config is not None else scatter_stand_in.kernels()
    sets = [
        [drawn(world_size * rows, n, (k,), torch.bfloat16) for _ in range(world_size)]
        for _ in range(5)
    ]
    for whats in sets:
        for what in whats:
            what.As[0] *= torch.rand((), device="cuda").bfloat16()  # not exact any more
    first: dict[tuple[int, int], list[torch.Tensor]] = {}
    captured = torch.cuda.CUDAGraph()
    ranks.enqueue(sets[0], kernels[0])
    torch.cuda.synchronize()
    with torch.cuda.graph(captured):
        graph_outs = ranks.enqueue(sets[0], kernels[0])
        ranks.wait()
    for i in range(2000):
        which, kernel = i % len(sets), i % len(kernels)
        if i % 8 == 5:
            for out in graph_outs:
                out.fill_(torch.nan)
            captured.replay()
            outs, key = graph_outs, (0, 0)
            torch.cuda.synchronize()
        else:
            outs, key = ranks.enqueue(sets[which], kernels[kernel]), (which, kernel)
        if i % 50 < 20 or outs is graph_outs:
            ranks.wait()
            if key in first:
                for out, before in zip(outs, first[key], strict=True):
                    check(out, before)
            else:
                first[key] = [out.clone() for out in outs]
    torch.cuda.synchronize()


ALL_REDUCES = scatter_stand_in.all_reduce_kernels()
needs_all_reduces = pytest.mark.skipif(
    not ALL_REDUCES, reason="this build has no kernel that sends finished tiles"
)


@needs_all_reduces
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("bias", [False, True])
def test_all_reduces(world_size: int, bias: bool) -> None:
    """Several back to back, which share signals and credits."""
    ranks = Together(world_size)
    for rows, n, ks in [*UGLY, (900, 1160, (264,))]:
        for config in scatter_stand_in.configs(ALL_REDUCES):
            turns = [
                [
                    drawn(world_size * rows, n, ks, torch.bfloat16, bias=bias, residual_of=of)
                    for _ in range(world_size)
                ]
                for of in (0, world_size, world_size)
            ]
            for whats in turns:  # of an all-reduce it is that of all ranks
                for what in whats:
                    what.bias = whats[0].bias
            torch.cuda.synchronize()
            assert scatter_stand_in.wrong_on_all_ranks(ranks, turns, config) == []


@needs_all_reduces
def test_all_reduces_of_every_kind() -> None:
    """The rank's own tiles stand in for those of the others."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for world_size in (2, 4, 8):
        rank = Alone(world_size, world_size // 2)
        for dtype in (torch.bfloat16, torch.float16):
            for column_major in (True, False):
                what = drawn(world_size * 257, 1160, (264,), dtype, column_major=column_major)
                for config in ALL_REDUCES:
                    out = rank.call(what, config, all_reduce_sms=sms)
                    for part in out.chunk(world_size):
                        check(part, rank.expected(what))


@needs_all_reduces
def test_bits_of_all_reduces() -> None:
    """Data that is not exact has the same bits on all ranks, in every call, eager or replayed,
    among scatters of the same memory."""
    world_size, rows, n, k = 4, 130, 392, 136
    ranks, config = Together(world_size, 4 << 20), ALL_REDUCES[0]
    sets = [
        [drawn(world_size * rows, n, (k,), torch.bfloat16) for _ in range(world_size)]
        for _ in range(3)
    ]
    for whats in sets:
        for what in whats:
            what.As[0] *= torch.rand((), device="cuda").bfloat16()
    torch.cuda.synchronize()
    first = [ranks.enqueue(whats, config, is_all_reduce=True) for whats in sets]
    torch.cuda.synchronize()
    for outs in first:
        for out in outs[1:]:
            check(out, outs[0])
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        graph_outs = ranks.enqueue(sets[1], config, is_all_reduce=True)
        ranks.wait()
    for i in range(400):
        if i % 8 == 5:
            for out in graph_outs:
                out.fill_(torch.nan)
            captured.replay()
            torch.cuda.synchronize()
            outs, wanted = graph_outs, first[1]
        elif i % 8 == 6:
            ranks.enqueue(sets[i % 3], DEFAULT)
            continue
        else:
            outs, wanted = ranks.enqueue(sets[i % 3], config, is_all_reduce=True), first[i % 3]
        if i % 10 < 6:
            torch.cuda.synchronize()
            for out, before in zip(outs, wanted, strict=True):
                check(out, before)
    torch.cuda.synchronize()


@needs_all_reduces
@pytest.mark.parametrize("late", [0, 3])
def test_an_all_reduce_with_a_late_rank(late: int) -> None:
    ranks = Together(4, 4 << 20)
    for _ in range(20):
        whats = [drawn(4 * 130, 392, (136,), torch.bfloat16) for _ in range(4)]
        torch.cuda.synchronize()
        with torch.cuda.stream(ranks.streams[late]):
            torch.cuda._sleep(2_000_000)
        assert scatter_stand_in.wrong_on_all_ranks(ranks, [whats], ALL_REDUCES[0]) == []


@pytest.mark.parametrize("late", [0, 3])
def test_a_late_rank(late: int) -> None:
    ranks = Together(4, 4 << 20)
    for _ in range(20):
        whats = [drawn(4 * 130, 392, (136,), torch.bfloat16) for _ in range(4)]
        torch.cuda.synchronize()
        with torch.cuda.stream(ranks.streams[late]):
            torch.cuda._sleep(2_000_000)
        outs = ranks.enqueue(whats, DEFAULT)
        torch.cuda.synchronize()
        for out, expected in zip(outs, ranks.expected(whats), strict=True):
            check(out, expected)


def test_times_of_tiles() -> None:
    """In the order in which a tile goes: loaded, computed, sent or added."""
    config = record.timed_scatter_kernel()
    if config is None:
        pytest.skip("this build has no timed kernel")
    world_size, me, rows, n = 4, 1, 2300, 520  # two bands
    rank = Alone(world_size, me)
    what = drawn(world_size * rows, n, (136,), torch.bfloat16)
    launches = _core.scatter_steps(me, world_size, world_size * rows, n, config.core)
    tiles = sum(tile >= 0 for steps in launches for *_, tile in steps)
    times = torch.zeros(tiles, _core.SCATTER_TIMES_BYTES, dtype=torch.uint8, device="cuda")
    called = torch.zeros(1, dtype=torch.int64, device="cuda")
    stream = torch.cuda.current_stream()
    for _ in range(3):
        out = empty_out(what, world_size)
        times.zero_()
        _core.record_time(called.data_ptr(), stream.cuda_stream)
        enqueue(rank.core, what, out, config, stream, times)
    check(out, rank.expected(what))
    called_ns = int(called.item())
    found = record.decode_scatter_times(times, launches, world_size, config, called_ns)
    assert len(found) == tiles
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for tile in found:
        assert called_ns <= tile["start_ns"] <= tile["end_ns"] <= tile["done_ns"]
        assert tile["end_ns"] <= tile["computed_ns"] <= tile["done_ns"]
        assert tile["sm"] < sms
    # A launch's own tiles come after all that it sends, on each multiprocessor.
    band = found[: sum(tile >= 0 for *_, tile in launches[0])]
    for sm in {tile["sm"] for tile in band}:
        begins = [tile["start_ns"] for tile in band if tile["sm"] == sm and tile["chunk"] == me]
        sent = [tile["start_ns"] for tile in band if tile["sm"] == sm and tile["chunk"] != me]
        assert not begins or not sent or max(sent) < min(begins)


MISSING = """
import sys, threading, torch
from scatter_stand_in import *
missing, first = int(sys.argv[1]), int(sys.argv[2])
ranks = Together(4, 1 << 20)
config = kernels()[0]
whats = [drawn(4 * 130, 264, (136,), torch.bfloat16) for _ in range(4)]
for _ in range(first):
    ranks.enqueue(whats, config)
torch.cuda.synchronize()
outs = [empty_out(what, 4) for what in whats]
for rank in range(4):
    if rank != missing:
        enqueue(ranks.cores[rank], whats[rank], outs[rank], config, ranks.streams[rank])
threading.Event().wait(30)
print("not ended")
"""


@pytest.mark.parametrize("first", [0, 2])
def test_a_missing_rank_ends_the_call(first: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MISSING, "2", str(first)],
        env={**os.environ, "AGMM_TIMEOUT_S": "2", "PYTHONPATH": _path()},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0, done.stdout
    assert re.search(r"\brank 2\b", done.stderr), done.stderr


def _path() -> str:
    return os.pathsep.join([str(PROGRAM.parent), *sys.path])


def run(*tool: str, arguments: Sequence[str] = ()) -> str:
    process = subprocess.run(
        [*tool, sys.executable, str(PROGRAM), *arguments],
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "AGMM_TIMEOUT_S": "60"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-2000:]
    return process.stdout


def test_results() -> None:
    assert "all equal" in run()


def test_stress_finds_nothing() -> None:
    """The stress of `test_faults.py` finds nothing in a build without a fault."""
    scatter_stand_in.stress(300, 1)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer", path="/usr/local/cuda/bin:" + os.environ["PATH"])
    if sanitizer is None:
        pytest.skip("no compute-sanitizer")
    # In cooperative kernels lanes of a warp read what a bulk copy brought, meet in __syncwarp, and
    # one of them arrives, after which the next copy may come. That is in order: the barrier orders
    # the lanes' accesses, and what one releases then includes them. Racecheck reports it as a race,
    # in a kernel of nothing else too, and is silent there where every lane arrives.
    arguments = ["--only-pingpong"] if tool == "racecheck" else []
    output = run(sanitizer, "--tool", tool, "--error-exitcode", "9", arguments=arguments)
    assert "all equal" in output
    assert re.search(r"\b0 errors", output)


def test_a_build_for_use_has_no_link_that_is_not_there() -> None:
    assert _core.virtual_link_gbs == 0
