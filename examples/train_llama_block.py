"""A Llama-shaped block, sharded over several ranks, trains as the whole block does.

RMSNorm, attention with grouped key and value heads and rotary positions, SwiGLU. Every rank also
trains the whole block, and the two loss curves are compared. Activations are
[sequence, batch, features], and each rank has its part of the sequence.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from agmm.nn import (
    ColumnParallelLinear,
    RowParallelLinear,
    load_full_state_dict,
    parameter_groups,
    sum_replicated_gradients,
)
from agmm.testing.ranks import RankPool

HIDDEN, FFN, HEAD_SIZE = 128, 352, 16
HEADS, KV_HEADS = 8, 4
SEQUENCE, BATCH = 48, 2
LARGEST_DIFFERENCE = {"cpu": 1e-5, "cuda": 2e-2}
"""The relative difference of the losses: float32 on the CPU, bfloat16 autocast on GPUs."""


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions of x [batch, heads, sequence, size]."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * frequencies
    turns = torch.polar(torch.ones_like(angles), angles)
    turned = torch.view_as_complex(x.float().unflatten(-1, (half, 2))) * turns
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


class LlamaBlock(nn.Module):
    """One block. `x` is this rank's part of the sequence when it is sharded."""

    def __init__(self, *, sharded: bool) -> None:
        super().__init__()
        q_width, kv_width = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE
        self.qkv_widths = q_width, kv_width, kv_width
        self.qkv: nn.Module
        self.out: nn.Module
        self.gate_up: nn.Module
        self.down: nn.Module
        if sharded:
            self.qkv = ColumnParallelLinear(HIDDEN, self.qkv_widths, bias=False)
            self.out = RowParallelLinear(q_width, HIDDEN, bias=False)
            self.gate_up = ColumnParallelLinear(HIDDEN, [FFN, FFN], bias=False)
            self.down = RowParallelLinear(FFN, HIDDEN, bias=False)
        else:
            self.qkv = nn.Linear(HIDDEN, sum(self.qkv_widths), bias=False)
            self.out = nn.Linear(q_width, HIDDEN, bias=False)
            self.gate_up = nn.Linear(HIDDEN, 2 * FFN, bias=False)
            self.down = nn.Linear(FFN, HIDDEN, bias=False)
        self.attention_norm = nn.RMSNorm(HIDDEN)
        self.ffn_norm = nn.RMSNorm(HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.attention_norm(x))
        parts = qkv if isinstance(qkv, tuple) else qkv.split(self.qkv_widths, dim=-1)
        # [sequence, batch, heads * size] -> [batch, heads, sequence, size]
        q, k, v = (part.unflatten(-1, (-1, HEAD_SIZE)).permute(1, 2, 0, 3) for part in parts)
        attended = functional.scaled_dot_product_attention(
            rotate(q), rotate(k), v, is_causal=True, enable_gqa=True
        )
        x = x + self.out(attended.permute(2, 0, 1, 3).flatten(2))
        gate_up = self.gate_up(self.ffn_norm(x))
        gate, up = gate_up if isinstance(gate_up, tuple) else gate_up.chunk(2, dim=-1)
        out: torch.Tensor = x + self.down(functional.silu(gate) * up)
        return out


def losses(device: str, steps: int) -> tuple[list[float], list[float]]:
    """The loss curves of the sharded and of the whole block. Runs in every rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    place = torch.device(device, torch.cuda.current_device()) if device == "cuda" else device
    torch.manual_seed(0)
    x, target = (torch.randn(SEQUENCE, BATCH, HIDDEN).to(place) for _ in range(2))
    whole = LlamaBlock(sharded=False).to(place)
    sharded = LlamaBlock(sharded=True).to(place)
    load_full_state_dict(sharded, whole.state_dict())
    curves: list[list[float]] = []
    for block in (sharded, whole):
        parts = world_size if block is sharded else 1
        own_x, own_target = (t.chunk(parts)[rank if parts > 1 else 0] for t in (x, target))
        optimizer = torch.optim.AdamW(parameter_groups(block), lr=2e-3)
        curve = []
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                out = block(own_x)
            # The mean over all rows: each rank has the sum over its own, divided by all.
            loss = (out.float() - own_target).square().sum() / target.numel()
            loss.backward()
            total = loss.detach().clone()
            if block is sharded:
                sum_replicated_gradients(block)  # of the norms, which saw this rank's rows only
                dist.all_reduce(total)
            optimizer.step()
            curve.append(float(total))
        curves.append(curve)
    return curves[0], curves[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=4, choices=(1, 2, 4))
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps: found {options.steps}, wanted at least 1")
    try:
        pool = RankPool(options.ranks, options.device)
    except ValueError as error:
        parser.error(str(error))
    with pool:
        sharded, whole = pool.run(losses, options.device, options.steps)[0]
    print(f"{'step':>4} {'sharded':>10} {'whole':>10}")
    for step, (one, other) in enumerate(zip(sharded, whole, strict=True)):
        print(f"{step:4} {one:10.6f} {other:10.6f}")
    difference = max(abs(a - b) / b for a, b in zip(sharded, whole, strict=True))
    print(f"largest relative difference {difference:.1e}")
    learned = options.steps < 2 or sharded[-1] < sharded[0]
    sys.exit(0 if difference <= LARGEST_DIFFERENCE[options.device] and learned else 1)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
