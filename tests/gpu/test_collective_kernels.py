"""The kernels of the collectives, on one GPU (collectives_stand_in.py)."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import collectives_stand_in
import gather_two_stand_in
import norm_and_relay_stand_in
import pytest
import torch
from collectives_stand_in import METHODS, OPS, Kind, StandIn

from agmm import _core

PROGRAM = Path(__file__).parent / "collectives_stand_in.py"
# One element, parts of a group, whole groups, more than a block, several launches.
COUNTS = (1, 5, 6, 4096, 40_001, 1_500_007)


@pytest.fixture(autouse=True)
def _limit_of_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that wait for each other end the process, and say so."""
    monkeypatch.setenv("AGMM_TIMEOUT_S", collectives_stand_in.LIMIT_S)


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
def test_every_kind(world_size: int) -> None:
    assert collectives_stand_in.wrong_calls(world_size, COUNTS, 3) == []


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_ranks_that_get_ahead(world_size: int) -> None:
    for seed in range(5):
        assert collectives_stand_in.wrong_in_turn(world_size, 100, seed) == []


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_the_norm_behind_an_all_reduce(world_size: int) -> None:
    assert norm_and_relay_stand_in.wrong_norms(world_size) == []


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_gathers_of_two_tensors(world_size: int) -> None:
    sizes = (*gather_two_stand_in.SIZES, gather_two_stand_in.TOO_LARGE)
    assert gather_two_stand_in.wrong_pairs(StandIn(world_size), sizes) == []


def test_gathers_of_two_tensors_over_relays() -> None:
    ranks = norm_and_relay_stand_in.relayed()
    methods = (_core.CollectiveMethod.relayed,)
    assert gather_two_stand_in.wrong_pairs(ranks, gather_two_stand_in.SIZES[:4], methods) == []


def test_over_relays() -> None:
    assert norm_and_relay_stand_in.wrong_relayed((1, 5, 4096, 40_001, 200_000), 2) == []


def test_relays_leave_out_pairs_without_a_link() -> None:
    assert norm_and_relay_stand_in.crossed_pairs() == []


def test_all_methods_have_the_same_bits() -> None:
    found = []
    for method in METHODS:
        torch.manual_seed(1)
        kind = Kind(OPS[2], method, torch.bfloat16, 5000)
        ranks = StandIn(4)
        inputs, outs = kind.inputs(4), kind.empty_outs(4)
        ranks.call(kind, inputs, outs)
        torch.cuda.synchronize()
        found += outs
    assert all(torch.equal(out, found[0]) for out in found)


def test_a_sum_of_negative_zeros_stays_negative() -> None:
    for method in METHODS:
        kind = Kind(OPS[2], method, torch.float32, 100)
        ranks = StandIn(3)
        inputs, outs = (
            [torch.full((100,), -0.0, device="cuda") for _ in range(3)],
            kind.empty_outs(3),
        )
        ranks.call(kind, inputs, outs)
        torch.cuda.synchronize()
        assert all(torch.signbit(out).all() and (out == 0).all() for out in outs)


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_back_to_back(world_size: int) -> None:
    """2000 calls of all kinds in turn, every eighth by a graph, with a pause at the graphs alone:
    a graph's calls and eager ones are ordered by who enqueues them."""
    torch.manual_seed(world_size)
    ranks = StandIn(world_size)
    drawn = [
        (kind, kind.inputs(world_size)) for kind in collectives_stand_in.kinds((3, 2500, 60_000))
    ]
    wanted = [kind.wanted(inputs) for kind, inputs in drawn]
    kind, inputs = drawn[-2]
    graph_outs = kind.empty_outs(world_size)
    ranks.call(kind, inputs, graph_outs)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for _ in range(3):  # an odd number: the next call takes the other slot
            ranks.call(kind, inputs, graph_outs)
        ranks.wait()
    wrong, unfinished = 0, []
    for i in range(2000):
        if i % 8 == 5:
            ranks.wait()
            for out in graph_outs:
                out.fill_(torch.nan)
            captured.replay()
            torch.cuda.synchronize()
            outs, which = graph_outs, len(drawn) - 2
        else:
            which = i * 7 % len(drawn)
            kind, inputs = drawn[which]
            outs = kind.empty_outs(world_size)
            ranks.call(kind, inputs, outs)
            unfinished.append(outs)  # so that no other call gets its memory meanwhile
        if i % 50 < 20 or outs is graph_outs:
            ranks.wait()
            unfinished.clear()
            pairs = zip(outs, wanted[which], strict=True)
            wrong += sum(not torch.equal(out, want) for out, want in pairs)
    torch.cuda.synchronize()
    assert wrong == 0
    assert ranks.unclean_words() == 0


@pytest.mark.parametrize("late", [0, 3])
def test_a_late_rank(late: int) -> None:
    ranks = StandIn(4)
    for kind in collectives_stand_in.kinds((9000,)):
        inputs, outs = kind.inputs(4), kind.empty_outs(4)
        torch.cuda.synchronize()
        with torch.cuda.stream(ranks.streams[late]):
            torch.cuda._sleep(2_000_000)
        ranks.call(kind, inputs, outs)
        torch.cuda.synchronize()
        for out, want in zip(outs, kind.wanted(inputs), strict=True):
            assert torch.equal(out, want)


ALONE = """
import sys, threading, torch
from dataclasses import replace
from collectives_stand_in import *
first, differs = int(sys.argv[1]), sys.argv[2]
ranks = StandIn(4)
kind = Kind(OPS[2], METHODS[int(sys.argv[3])], torch.bfloat16, 5000)
inputs, outs = kind.inputs(4), kind.empty_outs(4)
for _ in range(first):
    ranks.call(kind, inputs, outs)
torch.cuda.synchronize()
for rank in range(4):
    own = kind
    if rank == 2 and differs == "missing":
        continue
    if rank == 2 and differs == "count":
        own = replace(kind, count=10)
    if rank == 2 and differs == "method":
        own = replace(kind, method=METHODS[0 if kind.method == METHODS[2] else 2])
    if rank == 2 and differs == "avg":
        own = replace(kind, is_average=True)
    if differs == "second":
        from gather_two_stand_in import enqueue
        second = [inputs[rank][:100], inputs[rank][: 4 if rank == 2 else 8]]
        outs[rank] = [torch.empty(4 * each.numel(), device="cuda").bfloat16() for each in second]
        enqueue(ranks, rank, kind.method, second, outs[rank])
        continue
    ranks.enqueue(rank, own, inputs[rank], outs[rank])
threading.Event().wait(30)
print("not ended")
"""


@pytest.mark.parametrize(
    ("differs", "method"),
    [
        *itertools.product(["missing", "count", "method", "avg"], range(3)),
        ("second", 0),
        ("second", 2),
    ],
)
def test_ranks_that_do_not_call_alike_end(differs: str, method: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE, "3", differs, str(method)],
        env={**os.environ, "AGMM_TIMEOUT_S": "3", "PYTHONPATH": _path()},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 124, done.stdout + done.stderr
    assert re.search(r"\brank \d\b", done.stderr), done.stderr
    if differs == "missing":
        assert re.search(r"\brank 2\b", done.stderr), done.stderr
    else:
        assert "AGMM_TIMEOUT_S" not in done.stderr, done.stderr


def _path() -> str:
    return os.pathsep.join([str(PROGRAM.parent), *sys.path])


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer", path="/usr/local/cuda/bin:" + os.environ["PATH"])
    if sanitizer is None:
        pytest.skip("no compute-sanitizer")
    done = subprocess.run(
        [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, PROGRAM, "--short"],
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "AGMM_TIMEOUT_S": "60"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "all equal" in done.stdout
    assert re.search(r"\b0 errors", done.stdout)
