"""What an installed agmm has to compute, under torchrun, on CPU ranks: see check_wheels.py."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist

import agmm
from agmm.nn import ColumnParallelLinear, RowParallelLinear

warnings.simplefilter("error")  # an unfused path warns
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
A = torch.randn(world_size * 32, 64, dtype=torch.float64)
B = torch.randn(64, 48, dtype=torch.float64)

# The op, with the gathered A, and its backward.
A_shard = A.chunk(world_size)[rank].clone().requires_grad_()
gathered, out = agmm.all_gather_matmul(A_shard, B, return_A=True)
assert torch.equal(gathered, A)
torch.testing.assert_close(out, A @ B)
out.sum().backward()
assert A_shard.grad is not None
torch.testing.assert_close(A_shard.grad, world_size * B.sum(1).expand(32, 64))

# The layers.
up, down = ColumnParallelLinear(64, 256), RowParallelLinear(256, 64)
result = down(torch.nn.functional.silu(up(torch.randn(16, 64))))
assert result.shape == (16, 64) and bool(result.isfinite().all())

dist.barrier()
dist.destroy_process_group()
if rank == 0:
    print("smoke test passed")
