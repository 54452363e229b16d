"""What collectives, quantisers and sums compute on one GPU, with no kernel of torch's beside them:
where the driver is told to compile PTX (CUDA_FORCE_PTX_JIT), torch has none that it could load.

As a program it saves the results in a file, or compares them with those of a file that is there:
    python small_kernels_stand_in.py FILE
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from collectives_stand_in import ELEMENTS, METHODS, OPS, SLOT_BYTES, Kind, StandIn, kinds
from norm_and_relay_stand_in import EPS, cube_mesh_moves, relayed_kinds

from agmm import _core
from agmm.runtime import cuda_quantize
from agmm.runtime.rank_sums import Total
from agmm.runtime.scaling import ALL, BLOCK, Tile

COUNTS = (5, 3000, 40_001)
TILES: tuple[Tile, ...] = ((1, ALL), (1, BLOCK), (ALL, ALL), (ALL, 1), (BLOCK, BLOCK))
SHAPES = ((3, 528), (65, 4096), (5, 16384))
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class CopiedStandIn(StandIn):
    """Ranks whose memory is set by copies."""

    def __init__(self, world_size: int) -> None:
        size = _core.CudaCollectives.workspace_bytes(SLOT_BYTES, world_size)
        memory = torch.full((size,), 0xFF, dtype=torch.uint8)
        memory[_core.CudaCollectives.words_offset(SLOT_BYTES, world_size) :] = 0
        self.memory = [memory.cuda() for _ in range(world_size)]
        places = [each.data_ptr() for each in self.memory]
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        self.cores = [
            _core.CudaCollectives(rank, places, SLOT_BYTES, sms - sms // world_size)
            for rank in range(world_size)
        ]
        self.streams = [torch.cuda.Stream() for _ in range(world_size)]
        torch.cuda.synchronize()


def _given(kind: Kind, world_size: int) -> list[torch.Tensor]:
    """The tensors of each rank, on the CPU."""
    is_scatter = kind.op == _core.CollectiveOp.reduce_scatter
    size = kind.count * (world_size if is_scatter else 1)
    return [torch.randn(size).to(kind.dtype) for _ in range(world_size)]


def _on_gpu(values: torch.Tensor, offset: int) -> torch.Tensor:
    memory = torch.full((offset + values.numel() + 16,), torch.nan).to(values.dtype)
    memory[offset : offset + values.numel()] = values
    return memory.cuda()[offset : offset + values.numel()]


def _collective(ranks: StandIn, kind: Kind) -> None:
    """Its results are the sums of the CPU, bit for bit."""
    world_size = len(ranks.cores)
    given = _given(kind, world_size)
    wanted = kind.wanted(given)
    inputs = [_on_gpu(each, kind.offset) for each in given]
    outs = [_on_gpu(torch.full_like(each, torch.nan), kind.offset) for each in wanted]
    torch.cuda.synchronize()
    ranks.call(kind, inputs, outs)
    torch.cuda.synchronize()
    for rank, (out, want) in enumerate(zip(outs, wanted, strict=True)):
        assert torch.equal(out.cpu(), want), f"{kind}, rank {rank}"


def _norm(ranks: StandIn, method: _core.CollectiveMethod, dtype: torch.dtype) -> None:
    rows, row = 7, 4096
    kind = Kind(OPS[2], method, dtype, rows * row)
    given = _given(kind, len(ranks.cores))
    residual, weight = torch.randn(rows * row).to(dtype), torch.randn(row).to(dtype)
    total = (kind.wanted(given)[0].float() + residual.float()).to(dtype)
    wanted = torch.nn.functional.rms_norm(total.double().view(rows, row), (row,), eps=EPS)
    wanted = (wanted * weight.double()).view(-1)
    beside = residual.cuda(), weight.cuda()
    inputs = [each.cuda() for each in given]
    outs = [(torch.empty_like(each), torch.empty_like(each)) for each in inputs]
    torch.cuda.synchronize()
    for rank, (x, (normed, summed)) in enumerate(zip(inputs, outs, strict=True)):
        ranks.cores[rank].all_reduce_rms_norm(
            method,
            ELEMENTS[dtype],
            x.data_ptr(),
            *(beside[0].data_ptr(), beside[1].data_ptr(), normed.data_ptr(), summed.data_ptr()),
            x.numel(),
            row,
            EPS,
            ranks.streams[rank].cuda_stream,
            0,
        )
    torch.cuda.synchronize()
    for normed, summed in outs:
        assert torch.equal(summed.cpu(), total), f"{method}, {dtype}: residual"
        torch.testing.assert_close(normed.cpu().double(), wanted, rtol=1e-2, atol=1e-5)


def check_collectives() -> None:
    for world_size in (2, 4, 8):
        ranks = CopiedStandIn(world_size)
        for kind in kinds(COUNTS):
            _collective(ranks, kind)
        for method in METHODS[:2]:
            for dtype in ELEMENTS:
                _norm(ranks, method, dtype)
    ranks = CopiedStandIn(8)
    for core in ranks.cores:
        core.relay_over(cube_mesh_moves())
    for kind in relayed_kinds(COUNTS):
        _collective(ranks, kind)


def check_sums() -> None:
    """Sums in the order of the ranks are those of the CPU, bit for bit: of matrices that are read
    16 bytes at a time, and element by element."""
    for dtype in (*ELEMENTS, torch.float64):
        for ranks, rows, n in ((1, 3, 8), (2, 130, 264), (3, 7, 33), (8, 65, 1024)):
            slots = torch.randn(ranks, 2 * rows, n).to(dtype)
            bias, residual = torch.randn(n).to(dtype), torch.randn(rows, n).to(dtype)
            on_gpu = slots.cuda()[:, :rows]  # other strides than those of one contiguous tensor
            for divisor in (1, 3):
                for some in ((None, None), (bias, None), (None, residual), (bias, residual)):
                    wanted = torch.empty(rows, n, dtype=dtype)
                    Total(divisor, *some)(slots[:, :rows], wanted)
                    out = torch.full_like(wanted, torch.nan).cuda()
                    Total(divisor, *(None if one is None else one.cuda() for one in some))(
                        on_gpu, out
                    )
                    where = f"{dtype}, {ranks} x {rows} x {n}, divided by {divisor}"
                    assert torch.equal(out.cpu(), wanted), where


def quantised() -> Iterator[tuple[str, torch.Tensor]]:
    """The bytes that quantisers make, by name."""
    for shape in SHAPES:
        for dtype in ELEMENTS:
            x = (torch.randn(shape) * torch.randn(shape[0], 1).mul(3).exp()).to(dtype).cuda()
            for to in FP8:
                for tile in TILES:
                    for power_of_2 in (False, True):
                        name = f"{shape} {dtype} {to} {tile} {power_of_2}"
                        found = cuda_quantize.quantised(x, tile, to, power_of_2=power_of_2)
                        assert found is not None, name
                        yield name, found[0].cpu().view(torch.uint8)
                        yield f"{name} scale", found[1].cpu()
                columns = cuda_quantize.quantised_columns(x, to, power_of_2=False)
                assert columns is not None
                transposed = cuda_quantize.transposed(columns[0])
                assert transposed is not None
                yield f"{shape} {dtype} {to} columns", columns[0].cpu().view(torch.uint8)
                yield f"{shape} {dtype} {to} back", transposed.cpu().view(torch.uint8)


def main() -> None:
    file = Path(sys.argv[1])
    torch.manual_seed(1)
    check_collectives()
    check_sums()
    torch.manual_seed(2)
    found = dict(quantised())
    if not file.is_file():
        torch.save(found, file)
        return
    wanted = torch.load(file)
    assert list(found) == list(wanted)
    others = [name for name, value in found.items() if not torch.equal(value, wanted[name])]
    assert others == []


if __name__ == "__main__":
    main()
