"""What the tests of weights of 4 bits run inside the ranks of a pool."""

from __future__ import annotations

import torch
import torch.distributed as dist
from gpu_work import Faults, group_of, last_ranks

import agmm
from agmm.testing.reference import allowed_error, relative_error

K, N = 264, 520


def gathered(world_size: int, rows: int, is_captured: bool) -> Faults:
    """Faults of a gather for two such weights, with and without a bias, in words."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    rank, generator = dist.get_rank(group), torch.Generator("cuda").manual_seed(rows)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

    A, bias = drawn(world_size * rows, K), drawn(N)
    values = torch.randint(-8, 8, (2, N, K), generator=generator, device="cuda")
    stored = (values + 8).to(torch.uint8)
    packed = stored[..., ::2] | stored[..., 1::2] << 4
    scales = torch.rand(2, N, 1, generator=generator, device="cuda") + 0.5
    Bs = [agmm.Packed4BitWeight.pack(*one) for one in zip(packed, scales, strict=True)]
    shard = A[rank * rows : (rank + 1) * rows].clone()

    def call() -> tuple[torch.Tensor, list[torch.Tensor]]:
        with torch.no_grad():
            return agmm.all_gather_matmul(
                shard, Bs, group, bias=[bias, None], return_A=True, strict=world_size > 1
            )

    whole, outs = call()
    if is_captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            whole, outs = call()
        for one in (whole, *outs):
            one.fill_(torch.nan)
        graph.replay()
    faults = [] if torch.equal(whole, A) else ["A differs"]
    for i, out in enumerate(outs):
        exact = A.double() @ (values[i] * scales[i].double()).t()
        exact = exact if i else exact + bias.double()
        allowed = allowed_error(relative_error(exact.bfloat16(), exact))
        if out.dtype != torch.bfloat16 or not relative_error(out, exact) <= allowed:
            faults.append(f"rank {rank}: weight {i}: error {relative_error(out, exact)}")
    return faults
