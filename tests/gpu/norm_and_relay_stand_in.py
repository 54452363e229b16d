"""All-reduce with a norm behind it, and collectives over relays, of ranks on one GPU
(collectives_stand_in.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from collectives_stand_in import ELEMENTS, METHODS, OPS, Kind, StandIn, kinds

from agmm import _core
from agmm.runtime.topology import Link, schedule_of

EPS = 1e-5
_SHAPES = ((1, 1), (1, 8192), (3, 5), (5, 7), (7, 4096), (130, 64), (40, 6151))
"""Rows and their length: one thread, a row for each rank or for some, more rows than CTAs, odd
lengths."""
_CUBE_MESH = (
    *((a, b) for a in range(4) for b in range(a)),
    *((a + 4, b + 4) for a in range(4) for b in range(a)),
    *((a, a + 4) for a in range(4)),
)
"""The pairs of a DGX-1V that have an NVLink."""


def cube_mesh() -> list[list[Link]]:
    linked = {*_CUBE_MESH, *((b, a) for a, b in _CUBE_MESH)}
    return [[Link(nvlinks=int((a, b) in linked)) for b in range(8)] for a in range(8)]


def cube_mesh_moves() -> list[tuple[int, int, int]]:
    """The owner, source and target of each move between its 8 ranks."""
    schedule = schedule_of(cube_mesh())
    assert schedule is not None
    return [(move.owner, move.source, move.target) for move in (*schedule.first, *schedule.second)]


def relayed_kinds(counts: Sequence[int]) -> Iterator[Kind]:
    for kind in kinds(counts):
        if kind.method == METHODS[0] and kind.op != OPS[1]:
            yield replace(kind, method=_core.CollectiveMethod.relayed)


def relayed() -> StandIn:
    ranks = StandIn(8)
    for core in ranks.cores:
        core.relay_over(cube_mesh_moves())
    return ranks


def wrong_relayed(counts: Sequence[int], turns: int) -> list[str]:
    """In turn with calls that cross every pair: what was wrong."""
    ranks, found = relayed(), []
    for kind in relayed_kinds(counts):
        for each in (kind, replace(kind, method=METHODS[0])):
            for turn in range(turns):
                inputs, outs = each.inputs(8), each.empty_outs(8)
                wanted = each.wanted(inputs)
                torch.cuda.synchronize()
                ranks.call(each, inputs, outs)
                torch.cuda.synchronize()
                for rank in range(8):
                    if not torch.equal(outs[rank], wanted[rank]):
                        found.append(f"{each}, turn {turn}, rank {rank}")
    left = ranks.unclean_words()
    return [*found, *([f"{left} words left behind"] if left else [])]


def crossed_pairs() -> list[str]:
    """Pairs without a link whose memory a call has crossed, by what it left in stretches of packets
    there: data is kept when its flag is taken back."""
    ranks = relayed()
    kind = Kind(OPS[2], _core.CollectiveMethod.relayed, torch.float32, 3000)
    outs = kind.empty_outs(8)
    torch.cuda.synchronize()
    ranks.call(kind, kind.inputs(8), outs)
    torch.cuda.synchronize()
    linked = {*_CUBE_MESH, *((b, a) for a, b in _CUBE_MESH)}
    slot_bytes = ranks.cores[0].slot_bytes
    first = _core.CudaCollectives.words_offset(slot_bytes, 8)
    stretch = _core.COLLECTIVE_PACKET_BYTES // 16
    found = []
    for rank, memory in enumerate(ranks.memory):
        for source in range(8):
            direct, over = (
                bool(memory[first + (step * 8 + source) * stretch :][:stretch].any())
                for step in (0, 1)
            )
            if source != rank and (direct, over) != (
                (rank, source) in linked,
                (rank, source) not in linked,
            ):
                found.append(f"{source} to {rank}: direct {direct}, over another {over}")
    return found


def _normed(
    ranks: StandIn,
    method: _core.CollectiveMethod,
    inputs: Sequence[torch.Tensor],
    residual: torch.Tensor,
    weight: torch.Tensor,
    ctas: int,
    in_place: bool,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The norm and the new residual of each rank."""
    dtype, row = weight.dtype, weight.numel()
    found = []
    for given in inputs:
        found.append(
            (given.clone(), residual.clone())
            if in_place
            else (torch.full_like(given, torch.nan), torch.full_like(given, torch.nan))
        )
    torch.cuda.synchronize()
    for rank, (given, (normed, out)) in enumerate(zip(inputs, found, strict=True)):
        ranks.cores[rank].all_reduce_rms_norm(
            method,
            ELEMENTS[dtype],
            (normed if in_place else given).data_ptr(),
            (out if in_place else residual).data_ptr(),
            weight.data_ptr(),
            normed.data_ptr(),
            out.data_ptr(),
            given.numel(),
            row,
            EPS,
            ranks.streams[rank].cuda_stream,
            ctas,
        )
    torch.cuda.synchronize()
    return found


def wrong_norms(world_size: int) -> list[str]:
    """What was wrong: bits of the residual, the norm beyond its rounding, bits that differ between
    ranks, calls or methods."""
    ranks, wrong = StandIn(world_size), []
    for dtype in ELEMENTS:
        for i, (rows, row) in enumerate(_SHAPES):
            offset = i % 3  # odd addresses too
            kind = Kind(OPS[2], METHODS[0], dtype, rows * row, offset)
            inputs = kind.inputs(world_size)
            residual, weight = kind.inputs(1)[0], replace(kind, count=row).inputs(1)[0]
            summed = kind.wanted(inputs)[0]
            new = (summed.float() + residual.float()).to(dtype)
            exact = new.double().view(rows, row)
            scale = (exact.square().mean(-1, keepdim=True) + EPS).rsqrt()
            exact = (exact * scale * weight.double()).view(-1)
            first: tuple[torch.Tensor, torch.Tensor] | None = None
            for method in METHODS[:2]:
                for ctas, in_place in ((0, False), (2, True)):
                    name = f"{world_size} ranks, {dtype}, {rows} x {row}, {method}, {ctas} CTAs"
                    for normed, out in _normed(
                        ranks, method, inputs, residual, weight, ctas, in_place
                    ):
                        if first is None:
                            first = normed, out
                            if not torch.equal(out, new):
                                wrong.append(f"{name}: residual")
                            error = (normed.double() - exact).abs()
                            # Half of the last bit, and in float32 some of sums of thousands.
                            bound = exact.abs() * max(torch.finfo(dtype).eps, 2e-6) + 1e-6
                            if not bool((error <= bound).all()):
                                wrong.append(f"{name}: norm by {float(error.max())}")
                        elif not (torch.equal(normed, first[0]) and torch.equal(out, first[1])):
                            wrong.append(f"{name}: other bits")
    left = ranks.unclean_words()
    return [*wrong, *([f"{left} words left behind"] if left else [])]
