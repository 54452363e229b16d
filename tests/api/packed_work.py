"""What the tests of 4-bit weights run inside the ranks of a pool of five."""

from __future__ import annotations

from typing import Any

import op_work
import torch
import torch.distributed as dist

import agmm
from agmm.testing.reference import relative_error

# torch quantises each row of A to 8 bits by its own range: an error of a 255th of it at most, some
# half per cent of the norm of a normal row, whose range is 6 times its deviation.
LIMIT = 0.02


def weight(n: int, k: int, group_size: int, seed: int, bias: bool) -> tuple[Any, torch.Tensor]:
    """A packed weight, and what it stands for [K, N] in float64."""
    whole = op_work._random((n, k // group_size, group_size), torch.float32, seed)
    scales = (whole.abs().amax(-1) / 7).bfloat16().float()
    values = (whole / scales.unsqueeze(-1)).round().clamp(-8, 7)
    stored = (values + 8).to(torch.uint8).view(n, k)
    pairs = stored[:, ::2] | stored[:, 1::2] << 4
    packed_bias = op_work._random((n,), torch.float32, seed + 1) if bias else None
    packed = agmm.Packed4BitWeight.pack(pairs, scales, group_size, packed_bias)
    dense = (values.double() * scales.double().unsqueeze(-1)).view(n, k).t()
    if packed_bias is not None:
        dense = torch.cat([dense, packed_bias.double().unsqueeze(0)])
    return packed, dense


def gathered(
    world_size: int,
    group_size: int,
    *,
    rows: int = 5,
    weights: int | None = None,
    bias: bool = False,
    leading: tuple[int, ...] = (),
    gather_dim: int = 0,
    return_A: bool = False,
    compiled: bool = False,
) -> op_work.Result:
    """Faults of products with a 64 x N weight of 4 bits."""
    group = op_work._prepare(world_size)
    if group is None:
        return None
    rank, k = dist.get_rank(group), 64
    shape = [rows, *leading, k]
    shape[gather_dim] *= world_size
    whole = op_work._random(tuple(shape), torch.float32, 1)
    shard = whole.tensor_split(world_size, gather_dim)[rank].clone()
    made = [weight(24 + 8 * i, k, group_size, 7 * i + rank, bias) for i in range(weights or 1)]
    Bs = [one for one, _ in made]
    torch.compiler.reset()

    op: Any = agmm.all_gather_matmul

    def call(x: torch.Tensor) -> Any:
        return op(
            x,
            Bs[0] if weights is None else Bs,
            group,
            gather_dim=gather_dim,
            return_A=return_A,
            strict=rows > 0,
        )

    found = (torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call)(shard)
    shard.fill_(torch.nan)
    faults = []
    if return_A:
        A, found = found
        if not torch.equal(A, whole):
            faults.append("A differs")
    outs = [found] if weights is None else found
    for out, (_, dense) in zip(outs, made, strict=True):
        wanted = whole.double() @ dense[:k] + (dense[k] if bias else 0)
        if out.shape != wanted.shape or out.dtype != torch.float32:
            faults.append(f"found {out.dtype} {tuple(out.shape)}, wanted {tuple(wanted.shape)}")
        elif rows and not relative_error(out, wanted) < LIMIT:
            faults.append(f"error {relative_error(out, wanted)}")
    return faults


def same_as_unfused(world_size: int) -> op_work.Result:
    """Faults of a fused product against one of all rows at once, bit for bit."""
    group = op_work._prepare(world_size)
    if group is None:
        return None
    rank = dist.get_rank(group)
    whole = op_work._random((world_size * 7, 64), torch.float32, 1)
    B, _ = weight(24, 64, 32, 2, False)
    out = agmm.all_gather_matmul(whole[rank * 7 : rank * 7 + 7], B, group, strict=True)
    return [] if torch.equal(out, B.product(whole)) else ["differs"]


def refused(kind: str) -> str:
    group = op_work._prepare(2)
    if group is None:
        return ""
    B, _ = weight(24, 64, 32, 2, False)
    shard = torch.ones(4, 64)
    calls: dict[str, Any] = {
        "dtype": lambda: agmm.all_gather_matmul(shard.bfloat16(), B, group),
        "device": lambda: agmm.all_gather_matmul(shard.to("meta"), B, group),
        "k": lambda: agmm.all_gather_matmul(torch.ones(4, 32), B, group),
        "mixed": lambda: agmm.all_gather_matmul(shard, [torch.ones(64, 8), B], group),
        "config": lambda: agmm.all_gather_matmul(shard, B, group, config="unfused"),
        "gradient": lambda: agmm.all_gather_matmul(shard.requires_grad_(), B, group),
        "dim": lambda: agmm.all_gather_matmul(shard, B, group, gather_dim=1),
    }
    try:
        calls[kind]()
    except agmm.InvalidArgument as error:
        return str(error)
    return "no error"
