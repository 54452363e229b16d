"""What the tests of modules that take sizes from their input run inside the ranks of a pool."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rank_groups import dp_tp_mesh
from rank_work import group_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from agmm.errors import InvalidArgument
from agmm.nn import RowwiseScatterParallel, SharedGatherParallel
from agmm.testing.reference import relative_error

HIDDEN, HEAD, ROWS = 16, 4, 4
_LIMIT = 1e-10
Forward = Callable[["Attention", torch.Tensor], torch.Tensor]


class Attention(torch.nn.Module):
    """Attention whose forward is given."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.wq, self.wk, self.wv, self.wo = (
            torch.nn.Linear(HIDDEN, HIDDEN, bias=bias, dtype=torch.float64)
            for bias in (True, False, True, True)  # the gradient of a key's bias is 0
        )
        self.norm = torch.nn.RMSNorm(HIDDEN, dtype=torch.float64, elementwise_affine=False)
        self.way = WAYS[way]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.way(self, hidden_states)


def _attended(m: Attention, x: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Products as the linears return them, in sizes of [.., heads, HEAD]."""
    q, k, v = (w(x).view(*sizes).transpose(-3, -2) for w in (m.wq, m.wk, m.wv))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(-3, -2).contiguous()


def _shape(m: Attention, x: torch.Tensor) -> torch.Tensor:
    b, s, _ = x.shape
    found: torch.Tensor = m.wo(_attended(m, x, b, s, -1, HEAD).view(b, s, -1))
    return found


def _size(m: Attention, x: torch.Tensor) -> torch.Tensor:
    b, s = len(x), x.size(dim=1)
    found: torch.Tensor = m.wo(_attended(m, x, b, s, -1, HEAD).view(b, x.size(1), -1))
    return found


def _leading(m: Attention, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = m.wo(_attended(m, x, *x.shape[:-1], -1, HEAD).view(*x.shape[:-1], -1))
    return found


def _joined_rows(m: Attention, x: torch.Tensor) -> torch.Tensor:
    """The rows of the batch lie behind each other, as flash attention of packed rows wants them."""
    rows, sizes = x.shape[:-1].numel(), x.shape[:-1]
    gate = m.wq(x).view(rows, -1).relu() * m.wk(x).view(rows, -1) * m.wv(x).view(rows, -1)
    found: torch.Tensor = m.wo(gate.view(*sizes, -1))
    return found


def _same_view(m: Attention, x: torch.Tensor) -> torch.Tensor:
    sizes = x.shape[:-1]
    x = x.to(torch.float64).contiguous().view(*sizes, HIDDEN).reshape(*sizes, -1)
    found: torch.Tensor = m.wo(_attended(m, x, *sizes, -1, HEAD).view(*sizes, -1))
    return found


def _residual(m: Attention, x: torch.Tensor) -> torch.Tensor:
    """The norm and the sum have this rank's rows."""
    sizes = x.shape[:-1]
    out: torch.Tensor = m.wo(_attended(m, m.norm(x), *sizes, -1, HEAD).view(*sizes, -1))
    return x + out * torch.ones_like(x)


def _recomputed(use_reentrant: bool) -> Forward:
    def forward(m: Attention, x: torch.Tensor) -> torch.Tensor:
        sizes = x.shape[:-1]

        def attended(x: torch.Tensor) -> torch.Tensor:
            return _attended(m, x, *sizes, -1, HEAD)

        found = checkpoint(attended, x, use_reentrant=use_reentrant)
        out: torch.Tensor = m.wo(found.view(*sizes, -1))
        return out

    return forward


WAYS: dict[str, Forward] = {
    "shape": _shape,
    "size": _size,
    "leading": _leading,
    "joined rows": _joined_rows,
    "same view": _same_view,
    "residual": _residual,
    "recomputed": _recomputed(False),
    "recomputed anew": _recomputed(True),
}


def _styled(module: torch.nn.Module, mesh: DeviceMesh, dim: int, **options: Any) -> torch.nn.Module:
    options["sequence_dim"] = dim
    parallelize_module(module, mesh, {"wo": RowwiseScatterParallel(sequence_dim=dim)})
    for names in (("wq", "wk"), ("wv",)):
        parallelize_module(module, mesh, SharedGatherParallel(*names, **options))
    return module


def _x(dim: int, batch: int | None) -> torch.Tensor:
    shape = [2 * ROWS] if batch is None else [batch, batch]
    if batch is not None:
        shape[dim] = 2 * ROWS
    generator = torch.Generator().manual_seed(3)
    return torch.randn(*shape, HIDDEN, generator=generator, dtype=torch.float64)


def _full(gradient: Any) -> torch.Tensor:
    found: torch.Tensor = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return found


def against_whole(way: str, dim: int, batch: int | None, mode: str) -> list[str] | None:
    """Faults of a sharded module's output and gradients."""
    group = group_of(2)
    if group is None:
        return None
    mesh, rank = DeviceMesh.from_group(group, "cpu"), dist.get_rank(group)
    whole = Attention(way)
    sharded: Any = _styled(copy.deepcopy(whole), mesh, dim)
    if mode == "copied":
        sharded = copy.deepcopy(sharded)
    x = _x(dim, batch).requires_grad_()
    shard = x.detach().chunk(2, dim)[rank].clone().requires_grad_()
    wanted = whole(x)
    wanted.square().sum().backward()
    if mode in ("no_grad", "inference_mode"):
        with getattr(torch, mode)():
            found = sharded(shard.detach().clone())
        return _faults({"out": (found, wanted.chunk(2, dim)[rank])})
    torch.compiler.reset()
    run = sharded
    if mode in ("compiled", "dynamic"):
        dynamic = mode == "dynamic" or None
        run = torch.compile(sharded, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    found = run(hidden_states=shard) if mode == "keyword" else run(shard)
    if type(found) is not torch.Tensor:
        return [f"{type(found)}"]
    found.square().sum().backward()
    torch.compiler.reset()
    assert x.grad is not None
    pairs: dict[str, tuple[Any, Any]] = {"out": (found, wanted.chunk(2, dim)[rank])}
    pairs["x"] = (shard.grad, x.grad.chunk(2, dim)[rank])
    for (name, one), other in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        if other.grad is not None:
            pairs[name] = (_full(one.grad), other.grad)
    return _faults(pairs)


def _faults(pairs: dict[str, tuple[Any, Any]]) -> list[str]:
    return [
        name
        for name, (one, other) in pairs.items()
        if one is None or _is_off(one.detach(), other.detach())
    ]


def _is_off(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Attention to one row has no gradient of queries and keys, or one of roundings."""
    return relative_error(one, other) > _LIMIT and float((one - other).abs().max()) > _LIMIT / 100


def under_fsdp() -> list[str]:
    """Faults of a module that FSDP2 shards too, on a mesh of two and two ranks."""
    mesh = dp_tp_mesh(2, 2)
    whole = Attention("shape")
    sharded: Any = fully_shard(_styled(copy.deepcopy(whole), mesh["tp"], 1), mesh=mesh["dp"])
    x = _x(1, 2)
    wanted = whole(x)
    wanted.square().sum().backward()
    rank = mesh.get_local_rank("tp")
    found = sharded(x.chunk(2, 1)[rank])
    found.square().sum().backward()
    pairs = {"out": (found, wanted.chunk(2, 1)[rank])}
    for (name, one), other in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        pairs[name] = (_full(one.grad), other.grad)
    return _faults(pairs)


OPS: dict[str, tuple[Callable[[torch.Tensor], Any], bool]] = {
    "x + x": (lambda x: x + x, True),
    "zeros_like": (lambda x: torch.zeros_like(x), True),
    "new_ones": (lambda x: x.new_ones(3), True),
    "norm": (lambda x: torch.nn.functional.rms_norm(x, x.shape[-1:]), True),
    "cat": (lambda x: torch.cat([x, x], 1), True),
    "transpose": (lambda x: x.transpose(0, 1), True),
    "flatten": (lambda x: x.flatten(0, 1), True),
    "view rest": (lambda x: x.view(-1, HIDDEN), True),
    "view features": (lambda x: x.view(len(x), -1, 2, HIDDEN // 2), True),
    "view of all rows": (lambda x: x.view(len(x), x.shape[1], -1, 2) + 0, True),
    "windows": (lambda x: x.view(len(x), x.shape[1] // 2, 2, -1) + 0, True),
    "as other": (lambda x: torch.ones(2, ROWS, HIDDEN).view_as(x), True),
    "batch item": (lambda x: x[0], True),
    "features": (lambda x: x[..., :3], True),
    "all rows": (lambda x: x[:, : x.shape[1]], True),
    "mask": (lambda x: x[x > 0], True),
    "halves": (lambda x: x.chunk(2, 1)[0], True),
    "in place": (lambda x: x.mul_(2) + 0, True),
    "itself": (lambda x: x, True),
    "item set": (lambda x: x.__setitem__((0, slice(None), 1), 3.0), True),
    "rows": (lambda x: x[:, : x.shape[1] // 2], False),
    "last row": (lambda x: x[:, -1], False),
    "narrow": (lambda x: x.narrow(1, 0, 1), False),
    "address": (lambda x: x.data_ptr(), False),
    "split": (lambda x: x.split(2, dim=1), False),
    "rows across the batch": (lambda x: x.view(len(x) * x.shape[1], -1), False),
    "rows across the batch, all": (lambda x: x.view(len(x) * x.shape[1], HIDDEN), False),
}
"""What a module does with its input [2, rows, HIDDEN], and whether it gets the shard's; else it is
refused."""


class _Doing(torch.nn.Module):
    def __init__(self, do: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.do = do

    def forward(self, x: torch.Tensor) -> Any:
        return self.do(x)


def ops() -> list[str] | None:
    """Faults of what a module computes with its input, beside one that sees the shard itself."""
    group = group_of(2)
    if group is None:
        return None
    mesh = DeviceMesh.from_group(group, "cpu")
    faults = []
    x = torch.randn(2, ROWS, HIDDEN)
    for name, (do, is_served) in OPS.items():
        one, other = (
            _styled(_Doing(do), mesh, 1, whole_shape=whole_shape) for whole_shape in (True, False)
        )
        first, second = x.clone(), x.clone()
        try:
            found = one(first)
        except InvalidArgument as error:
            if is_served or "whole_shape=False" not in str(error):
                faults.append(f"{name}: {error}")
            continue
        if not is_served:
            faults.append(f"{name}: not refused")
        wanted = other(second)
        if not torch.equal(first, second) or type(found) is not type(wanted):
            faults.append(f"{name}: {type(found)} of {tuple(first.shape)}")
        elif found is not None and not torch.equal(found, wanted):
            faults.append(f"{name}: {tuple(found.shape)} for {tuple(wanted.shape)}")
    single = _styled(_Doing(lambda x: x + torch.ones(x.shape)), mesh, 1)
    try:
        single(x[:, :1])
        faults.append("one row was added to all")
    except InvalidArgument:
        pass
    return faults
