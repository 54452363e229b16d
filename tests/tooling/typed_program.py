"""A small program as a user writes it, whose types a type checker has to find: it is not run."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import agmm
import agmm.async_tp
from agmm.integrations import fsdp
from agmm.nn import (
    ColumnParallelLinear,
    GatedMLP,
    MoE,
    RowParallelLinear,
    RowwiseScatterParallel,
    SharedGatherParallel,
    clip_grad_norm_,
    full_state_dict,
    load_full_state_dict,
    parameter_groups,
    sum_replicated_gradients,
)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = ColumnParallelLinear(64, [64, 64, 64])
        self.out = RowParallelLinear(64, 64)
        self.mlp = GatedMLP(64, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x)
        y: torch.Tensor = self.mlp(self.out(q + k + v))
        return y


def calls(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    one: torch.Tensor = agmm.all_gather_matmul(x, weight.t())
    several: list[torch.Tensor] = agmm.all_gather_matmul(x, [weight.t(), weight.t()])
    A, with_A = agmm.all_gather_matmul(x, weight.t(), return_A=True)
    gathered: torch.Tensor = A
    product: torch.Tensor = with_A
    gated: torch.Tensor = agmm.all_gather_matmul(x, [weight.t(), weight.t()], activation="silu_mul")
    part: torch.Tensor = agmm.matmul_reduce_scatter(one, weight, reduce_op="sum")
    whole: torch.Tensor = agmm.matmul_all_reduce(one, weight, bias=None)
    total: torch.Tensor = agmm.collectives.all_reduce(whole)
    work: agmm.collectives.Work = agmm.collectives.all_gather(part, async_op=True)
    normed, residual = agmm.collectives.all_reduce_rms_norm(whole, total, weight[0])
    normed, residual = agmm.matmul_all_reduce_rms_norm(normed, weight, residual, weight[0])
    try:
        agmm.all_gather_matmul(x, weight.t(), strict=True)
    except agmm.Unsupported as error:
        print(str(error))
    return several[0] + gathered.sum() + product + gated + work.wait().sum() + normed + residual


def experts(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    ids, scores = torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2)
    routing: agmm.moe.Routing = agmm.moe.route(ids, num_experts=4, capacity=16)
    rows, same = agmm.all_gather_grouped_matmul(x, [weights, weights], routing)
    out: torch.Tensor = agmm.grouped_matmul_reduce_scatter(rows[0], weights, same, scores)
    mixed: torch.Tensor = MoE(64, 256, 8, 2)(x)
    return out + mixed


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    block = Block()
    load_full_state_dict(block, full_state_dict(block))
    parallelize_module(
        torch.nn.Sequential(),
        mesh,
        {"0": SharedGatherParallel("wq", "wk"), "1": RowwiseScatterParallel()},
    )
    optimizer = torch.optim.AdamW(parameter_groups(block))
    sum_replicated_gradients(block)
    norm: torch.Tensor = clip_grad_norm_(block, max_norm=1.0)
    optimizer.step()
    nbytes: int = agmm.workspace_bytes((64, 64), torch.bfloat16, 2)
    agmm.reserve(None, nbytes)
    report: agmm.Status = agmm.status()
    print(report, norm)
    with agmm.record("calls.json"):
        experts(torch.randn(4, 64), torch.randn(4, 64, 64))
    with agmm.async_tp.enable():
        calls(torch.randn(4, 64), torch.randn(64, 64))
    fsdp.enable(block)
