"""A Llama-shaped transformer block: whole, of plain tensor-parallel layers, or of agmm's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from agmm.errors import InvalidArgument
from agmm.nn import ColumnParallelLinear, RowParallelLinear
from agmm.runtime.groups import group_of
from benchmarks.block import fp8


@dataclass(frozen=True)
class Sizes:
    """The sizes of the whole block."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    def check(self, world_size: int) -> None:
        """Raises InvalidArgument for sizes that the ranks cannot share."""
        for name in ("ffn", "heads", "kv_heads"):
            if getattr(self, name) % world_size:
                raise InvalidArgument(
                    f"{name}: found {getattr(self, name)}, wanted a multiple of {world_size} ranks"
                )
        if self.hidden % (2 * self.heads):
            raise InvalidArgument(
                f"hidden: found {self.hidden}, wanted a multiple of twice the {self.heads} heads"
            )
        if self.heads % self.kv_heads:
            raise InvalidArgument(
                f"heads: found {self.heads}, wanted a multiple of {self.kv_heads} key-value heads"
            )


DEFAULTS = {
    "cuda": (Sizes(8192, 28672, 64, 8), (2048, 4096, 8192, 16384)),
    "cpu": (Sizes(128, 384, 8, 4), (32, 64)),
}
"""Sizes and token counts by device: those of Llama 3 70B, and some that take milliseconds."""


# --- plain tensor parallelism ---


def _gather(shard: torch.Tensor, group_name: str, world_size: int) -> torch.Tensor:
    if torch.compiler.is_compiling():  # what torch's async TP looks for
        functional_ops = torch.ops._c10d_functional
        started = functional_ops.all_gather_into_tensor(shard, world_size, group_name)
        traced: torch.Tensor = functional_ops.wait_tensor(started)
        return traced
    gathered = shard.new_empty(world_size * shard.shape[0], *shard.shape[1:])
    # torch 2.13 renamed this function.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    all_gather(gathered, shard, group=group_of(group_name))
    return gathered


def _scatter(partial: torch.Tensor, group_name: str, world_size: int) -> torch.Tensor:
    if torch.compiler.is_compiling():
        functional_ops = torch.ops._c10d_functional
        started = functional_ops.reduce_scatter_tensor(partial, "sum", world_size, group_name)
        traced: torch.Tensor = functional_ops.wait_tensor(started)
        return traced
    part = partial.new_empty(partial.shape[0] // world_size, *partial.shape[1:])
    reduce_scatter: Callable[..., Any] = (
        getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    )
    reduce_scatter(part, partial, group=group_of(group_name))
    return part


class GatherRows(torch.autograd.Function):
    """All-gather along dimension 0; its backward is a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, group_name: str, world_size: int) -> torch.Tensor:
        ctx.group_name, ctx.world_size = group_name, world_size
        return _gather(shard, group_name, world_size)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _scatter(grad.contiguous(), ctx.group_name, ctx.world_size), None, None


class ScatterRows(torch.autograd.Function):
    """Reduce-scatter along dimension 0; its backward is an all-gather."""

    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, group_name: str, world_size: int) -> torch.Tensor:
        ctx.group_name, ctx.world_size = group_name, world_size
        return _scatter(partial, group_name, world_size)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _gather(grad.contiguous(), ctx.group_name, ctx.world_size), None, None


class PlainColumnParallel(ColumnParallelLinear):
    """The layer by an all-gather, then a matmul. The gathered rows are kept for the backward. In
    fp8 rows are gathered as they are, then quantised, as torchao's row-wise recipes have it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = GatherRows.apply(x, self.group_name, self.world_size)
        (weight,), _ = self.operands()
        return fp8.product(self.fp8, rows, weight)


class PlainRowParallel(RowParallelLinear):
    """The layer by a matmul, then a reduce-scatter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (weight,), _ = self.operands()
        partial = fp8.product(self.fp8, x, weight)
        part: torch.Tensor = ScatterRows.apply(partial, self.group_name, self.world_size)
        return part


# --- the block ---


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions of x [1, heads, tokens, size]; the tables are [tokens, size]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Block(nn.Module):
    """`layers` is "whole", "plain" or "agmm"; the state dicts of the last two have the same names
    and shapes, that of "whole" is what `load_full_state_dict` takes. `recipe`: of fp8, or None."""

    def __init__(
        self,
        sizes: Sizes,
        layers: str,
        *,
        save_gathered: bool = False,
        recipe: str | None = None,
        **place: Any,
    ) -> None:
        super().__init__()
        hidden, ffn = sizes.hidden, sizes.ffn
        kv_width = sizes.kv_heads * sizes.head_size
        self.head_size = sizes.head_size
        self.groups = sizes.heads // sizes.kv_heads
        self.is_whole = layers == "whole"
        parts = 1 if self.is_whole else dist.get_world_size()

        def column(widths: Sequence[int]) -> nn.Module:
            if layers == "whole":
                return fp8.Linear(hidden, sum(widths), recipe, **place)
            of_ranks = {"bias": False, "fp8": recipe, **place}
            if layers == "plain":
                return PlainColumnParallel(hidden, widths, **of_ranks)
            return ColumnParallelLinear(hidden, widths, save_gathered=save_gathered, **of_ranks)

        def row(width: int) -> nn.Module:
            if layers == "whole":
                return fp8.Linear(width, hidden, recipe, **place)
            kind = PlainRowParallel if layers == "plain" else RowParallelLinear
            return kind(width, hidden, bias=False, fp8=recipe, **place)

        self.qkv = column([hidden, kv_width, kv_width])
        self.qkv_widths = [hidden // parts, kv_width // parts, kv_width // parts]
        self.out = row(hidden)
        self.gate_up = column([ffn, ffn])
        self.down = row(ffn)
        self.attention_norm = nn.RMSNorm(hidden, eps=1e-5, **place)
        self.ffn_norm = nn.RMSNorm(hidden, eps=1e-5, **place)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.attention_norm(x))
        parts = qkv if isinstance(qkv, tuple) else qkv.split(self.qkv_widths, dim=-1)
        # [tokens, 1, heads * size] -> [1, heads, tokens, size]
        q, k, v = (part.unflatten(-1, (-1, self.head_size)).permute(1, 2, 0, 3) for part in parts)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        wide = q.dtype in (torch.float32, torch.float64)
        if wide:  # on CUDA no kernel but the quadratic one has grouped heads in float32
            k, v = (t.repeat_interleave(self.groups, dim=1) for t in (k, v))
        attended = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=not wide
        )
        x = x + self.out(attended.permute(2, 0, 1, 3).flatten(2))
        gate_up = self.gate_up(self.ffn_norm(x))
        gate, up = gate_up if isinstance(gate_up, tuple) else gate_up.chunk(2, dim=-1)
        result: torch.Tensor = x + self.down(functional.silu(gate) * up)
        return result
