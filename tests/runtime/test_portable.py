"""The portable path: its protocol between ranks that are threads, and the products that it makes,
with copies that are late."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from slot_threads import Rank, Slots, Threads, is_found, run, values

from agmm.ops import portable as ready
from agmm.planning.problems import portable_pieces
from agmm.runtime import portable, rank_sums
from agmm.runtime.scaled import Scaled

SHAPES = [(1, 1), (5, 3), (8, 16), (33, 7)]


def orders_of(calls: int) -> list[bool]:
    """Which calls are captured: some, in no order."""
    order = random.Random(1)
    return [order.random() < 0.4 for _ in range(calls)]


def gather_is_right(own: Rank, call: int) -> bool:
    """Whether the rows of all ranks come, the own ones first."""
    ranks, (rows, k) = range(own.world_size), SHAPES[call % len(SHAPES)]
    shards = [values(each, call, rows * k, torch.float32).view(rows, k) for each in ranks]
    scales = [torch.full((1, 1), float(each)) for each in ranks]
    wholes = [torch.full((own.world_size, *one[0].shape), 77.0) for one in (shards, scales)]
    come, seen = torch.full((own.world_size, rows, k), 77.0), []

    def consume(source: int, cut: slice, parts: list[torch.Tensor]) -> None:
        seen.append(source)
        come[source, cut] = parts[0] + parts[1]

    sent = [shards[own.rank], scales[own.rank]]
    own.gather(sent, wholes, consume, pieces=3, keeps_own=True)
    wanted = torch.stack([a + b for a, b in zip(shards, scales, strict=True)])
    is_right = torch.equal(come, wanted) and torch.equal(wholes[0], torch.stack(shards))
    return is_right and seen[0] == own.rank and seen.count(own.rank) == 1


def scatter_is_right(own: Rank, call: int) -> bool:
    """Whether the products of all ranks come in their order, the own ones made last."""
    size, (rows, n) = own.world_size, SHAPES[call % len(SHAPES)]
    given = [values(each, call, size * rows * n, torch.float32) for each in range(size)]
    parts = torch.stack(given).view(size, size, rows, n)
    made: list[int] = []
    found: list[torch.Tensor] = []

    def product(owner: int, into: torch.Tensor) -> None:
        made.append(owner)
        into.copy_(parts[own.rank, owner])

    own.scatter(
        torch.empty(rows, n), product, lambda come: found.append(come.clone()), what="", words=""
    )
    is_right = torch.equal(found[0], parts[:, own.rank])
    return is_right and made[-1] == own.rank and sorted(made) == list(range(size))


KINDS = {"gather": (gather_is_right, 1), "scatter": (scatter_is_right, 0)}
"""What checks a call, and the slots that each rank has for one call; 0: as many as ranks."""


def wrong_calls(
    kind: str,
    world_size: int,
    calls: int,
    *,
    skipped: int = 0,
    captured: bool = False,
    half: bool = False,
) -> int:
    """The wrong ones of calls. A fault is a barrier that is left out, or one half of the slots that
    all calls take."""
    is_right, slots = KINDS[kind]
    threads = Threads(world_size, 2 * (slots or world_size), 4096, skipped)

    def work(rank: int) -> int:
        wrong, own = 0, Rank(threads, rank)
        for call, is_captured in enumerate(orders_of(calls)):
            own.is_captured = captured and is_captured
            own.turn = 0 if half else own.turn
            wrong += not is_right(own, call)
        return wrong

    return run(world_size, work)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("captured", [False, True])
def test_all_that_is_sent_comes_in_order(kind: str, captured: bool) -> None:
    for world_size in (2, 3, 5):
        assert wrong_calls(kind, world_size, 40, captured=captured) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_faults_of_the_protocol_are_found(kind: str) -> None:
    assert is_found(lambda: wrong_calls(kind, 4, 60, skipped=1))
    assert is_found(lambda: wrong_calls(kind, 4, 200, half=True))


def test_pieces_are_equal_and_none_is_empty() -> None:
    assert [portable_pieces(rows) for rows in (1, 1024, 2048, 3000, 1 << 20)] == [1, 1, 2, 2, 4]
    for rows in range(1, 40):
        for pieces in range(1, 9):
            cuts = portable.cuts_of(rows, pieces)
            assert [i for cut in cuts for i in range(cut.start, cut.stop)] == list(range(rows))
            assert 0 < len(cuts) <= pieces
            assert all(cut.stop > cut.start for cut in cuts)


def outs_of(world_size: int, work: Callable[[Rank], Any], slots: int) -> list[Any]:
    """What the ranks return."""
    threads, found = Threads(world_size, slots, 1 << 16), [None] * world_size

    def one(rank: int) -> int:
        found[rank] = work(Rank(threads, rank))
        return 0

    run(world_size, one)
    return found


@pytest.mark.parametrize("return_A", [False, True])
def test_products_of_a_gather(return_A: bool) -> None:
    """Several weights, a bias, leading dimensions and strides."""
    shards = [torch.randn(5, 8, 3).mT for _ in range(3)]  # [5, 3, 8]
    bias = torch.randn(6)
    Bs, biases = [torch.randn(8, 4), torch.randn(6, 8).t()], [None, bias]

    def work(rank: Rank) -> Any:
        call = ready.ReadyGather(rank, 2, return_A, "")  # type: ignore[arg-type]
        return call(shards[rank.rank], Bs, biases)

    A = torch.cat(shards)
    for whole, _, outs in outs_of(3, work, 2):
        assert whole is None if not return_A else torch.equal(whole, A)
        torch.testing.assert_close(outs[0], A @ Bs[0])
        torch.testing.assert_close(outs[1], A @ Bs[1] + bias)


def test_products_of_a_scaled_gather() -> None:
    """Shards with one scale each, and with scales of their rows."""
    values_of = [torch.randint(-4, 5, (5, 8)).float() for _ in range(3)]
    B = torch.randn(8, 4)
    for rows in (1, 5):
        scales = [torch.rand(rows, 1) for _ in range(3)]

        def work(rank: Rank, scales: list[torch.Tensor] = scales, rows: int = rows) -> Any:
            tile = (1, -1) if rows > 1 else (-1, -1)
            call = ready.ReadyScaledGather(
                *(rank, 2, True, "", [(4, torch.float32)]),  # type: ignore[arg-type]
                lambda part: [(part.values * part.scale) @ B],
            )
            return call(Scaled(values_of[rank.rank], scales[rank.rank], tile))

        wanted = torch.cat([v * s for v, s in zip(values_of, scales, strict=True)]) @ B
        for A, scale, (out,) in outs_of(3, work, 2):
            torch.testing.assert_close(out, wanted)
            assert torch.equal(A, torch.cat(values_of))
            assert torch.equal(scale, torch.cat(scales))


@pytest.mark.parametrize(
    ("dim", "divisor", "has_bias", "has_residual"),
    [(0, 1, False, False), (0, 3, True, False), (1, 1, True, True), (1, 3, False, True)],
)
def test_products_of_a_scatter(dim: int, divisor: int, has_bias: bool, has_residual: bool) -> None:
    shape = [6, 3, 8] if dim == 1 else [6, 2, 8]
    ks = 8, 5
    As = [[torch.randn(*shape[:-1], k) for k in ks] for _ in range(3)]
    Bs = [[torch.randn(k, 4) for k in ks] for _ in range(3)]
    bias = torch.randn(4) if has_bias else None
    each = [A @ B for own in range(3) for A, B in zip(As[own], Bs[own], strict=True)]
    total = torch.stack(each).sum(0) / divisor
    wanted = [part + (0 if bias is None else bias) for part in total.chunk(3, dim)]
    residuals = [torch.randn_like(part) for part in wanted]

    def work(rank: Rank) -> Any:
        call = ready.ReadyScatter(rank, dim, divisor, "")  # type: ignore[arg-type]
        residual = residuals[rank.rank] if has_residual else None
        return call(As[rank.rank], Bs[rank.rank], bias, residual)

    for out, part, residual in zip(outs_of(3, work, 6), wanted, residuals, strict=True):
        torch.testing.assert_close(out, part + residual if has_residual else part)


def test_a_sum_is_rounded_once() -> None:
    """256 + 1 + ... + 1 in bfloat16 would stay 256."""
    come = torch.ones(8, 1, 1, dtype=torch.bfloat16)
    come[0] = 256
    for bias in (None, torch.ones(1, dtype=torch.bfloat16)):
        out = torch.empty(1, 1, dtype=torch.bfloat16)
        rank_sums.Total(bias=bias)(come, out)
        assert float(out) == 264.0


def test_a_sum_is_made_in_the_order_of_the_ranks() -> None:
    """The sum of these three has other bits in any other order."""
    come = torch.tensor([1e8, 1.0, -1e8]).view(3, 1, 1)
    for order, wanted in (((0, 1, 2), 0.0), ((0, 2, 1), 1.0), ((1, 0, 2), 0.0), ((2, 0, 1), 1.0)):
        for dtype in (torch.float32, torch.bfloat16):
            out = torch.empty(1, 1, dtype=dtype)
            rank_sums.Total()(come[list(order)].to(dtype), out)
            assert float(out) == wanted
    out = torch.empty(1, 1)
    rank_sums.Total()(torch.full((2, 1, 1), -0.0), out)
    assert torch.signbit(out).all()


def test_a_product_that_fails_leaves_no_copy_behind() -> None:
    """Copies are awaited, since memory that they write may go to others."""
    beside = mock.Mock()
    threads = Threads(1, 2, 64)
    with pytest.raises(ZeroDivisionError):
        portable.gather(
            *(Slots(threads, 0, 0), [torch.ones(2, 2)], [torch.ones(1, 2, 2)]),
            lambda *_: 1 // 0,  # type: ignore[arg-type]
            *(0,),
            pieces=1,
            beside=beside,
        )
    assert beside.join.called
