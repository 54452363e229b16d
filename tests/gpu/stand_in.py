"""Ranks of a fused call on one GPU: workspaces of one process that are each other's peers, on a
stream each. For tools that want one process (compute-sanitizer).

Their tiles have to fit on the GPU together, with room for the copies inside the GPU, which are
kernels: problems of a few tiles. CTAs that only push need nothing from the others, and end.

As a program it makes calls of every kernel and transport and compares the results:
    python stand_in.py [--in-turn]
With --in-turn each kernel has one of the transports, the next kernel the next.
Copies come with A returned, by the full variant of a kernel, and without, by the lean one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from agmm import _core
from agmm.planning.built_kernels import kernels_of
from agmm.planning.problems import ALL_GATHER_MATMUL, KernelConfig
from agmm.planning.transport_names import parse
from agmm.planning.transports import FusedGather

TRANSPORTS = ("push", "sm4x64", "sm8x64+1", "sm4x64h1")


class StandIn:
    """`world_size` ranks with slots of `slot_bytes` (a multiple of 128) each."""

    def __init__(self, world_size: int, slot_bytes: int) -> None:
        size = _core.CudaWorkspace.workspace_bytes(slot_bytes, world_size)
        self.memory = [
            torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda") for _ in range(world_size)
        ]
        first = _core.CudaWorkspace.words_offset(slot_bytes, world_size)
        for memory in self.memory:
            words = memory[first:].view(torch.int32)
            words.zero_()
            words[torch.tensor(_core.CudaWorkspace.credit_words(world_size))] = 1
        torch.cuda.synchronize()
        places = [memory.data_ptr() for memory in self.memory]
        self.cores = [_core.CudaWorkspace(r, places, slot_bytes) for r in range(world_size)]
        self.streams = [torch.cuda.Stream() for _ in range(world_size)]

    def call(
        self,
        A: torch.Tensor,
        Bs: Sequence[torch.Tensor],
        config: KernelConfig,
        transport: str,
        return_A: bool,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """One call of every rank: rank r has the r-th part of the rows of A and ``Bs[r]`` [K, N],
        column-major. Returns every rank's A, if it is asked for and the kernel can store it, and
        out."""
        ranks, found = len(self.cores), parse(transport)
        assert isinstance(found, FusedGather)
        shards = [shard.clone() for shard in A.chunk(ranks)]
        stores_A = return_A and "column" in config.stores_A
        gathered = [torch.full_like(A, torch.nan) for _ in range(ranks if stores_A else 0)]
        outs = [torch.full((A.shape[0], B.shape[1]), torch.nan).to(A) for B in Bs]
        plain = _core.Format(_core.DType.bfloat16)
        torch.cuda.synchronize()
        for r, core in enumerate(self.cores):
            B = Bs[r]
            weight = _core.GatherWeight(B.shape[1], (True, B.stride(1)), plain, config.core)
            problem = _core.GatherProblem(
                len(shards[r]), A.shape[1], [weight], found.core_arguments()
            )
            to = gathered[r].data_ptr() if stores_A else 0
            addresses = [shards[r].data_ptr(), 0, to, 0, B.data_ptr(), 0, 0, outs[r].data_ptr()]
            core.all_gather_matmul(problem, addresses, self.streams[r].cuda_stream)
        torch.cuda.synchronize()
        return gathered, outs


def check(in_turn: bool) -> None:
    for world_size, rows, n, k in ((2, 128, 128, 200), (3, 40, 72, 136)):
        ranks = StandIn(world_size, (world_size * rows * k * 2 + 127) // 128 * 128)
        kernels = kernels_of(ALL_GATHER_MATMUL, "bfloat16")
        configs = [*kernels, *(replace(c, splits=2) for c in kernels if c.can_split)]
        for i, config in enumerate(configs):
            cases = [("push", False), *((transport, True) for transport in TRANSPORTS)]
            if in_turn:
                cases = [cases[(i + world_size) % len(cases)]]
            for transport, return_A in cases:
                A = torch.randint(-2, 3, (world_size * rows, k), device="cuda").bfloat16()
                Bs = [
                    torch.randint(-2, 3, (n, k), device="cuda").bfloat16().t()
                    for _ in range(world_size)
                ]
                gathered, outs = ranks.call(A, Bs, config, transport, return_A)
                for found in gathered:
                    assert torch.equal(found, A), (config.name, transport)
                for out, B in zip(outs, Bs, strict=True):
                    wanted = (A.float() @ B.float()).bfloat16()
                    assert torch.equal(out, wanted), (config.name, transport)


if __name__ == "__main__":
    check("--in-turn" in sys.argv)
    print("all equal")
