"""``agmm.all_gather_matmul`` and its torch ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast, overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from agmm.errors import InvalidArgument
from agmm.ops.autograd import AllGatherMatmul
from agmm.ops.checks import check_gatherable, config_name, needs_gradient
from agmm.ops.gather import GatherSettings
from agmm.ops.gather_packed import gather_packed
from agmm.ops.kept import kind_of
from agmm.ops.library import define, library
from agmm.ops.operands import autocast, check_operands, is_plain, is_watched
from agmm.ops.plain_gather import gather
from agmm.ops.quantize import gather_quantised
from agmm.planning.problems import KernelConfig
from agmm.runtime.groups import group_of, group_of_size, group_or_default, name_of, world_size_of
from agmm.runtime.packed import Packed4BitWeight

_Weights = (
    list[torch.Tensor]
    | tuple[torch.Tensor, ...]
    | list[Packed4BitWeight]
    | tuple[Packed4BitWeight, ...]
)


class _Arguments(NamedTuple):
    """The arguments of the torch op."""

    A_shard: torch.Tensor
    Bs: list[torch.Tensor]
    biases: list[torch.Tensor | None]
    group_name: str
    world_size: int
    gather_dim: int
    return_A: bool
    config: str
    strict: bool
    save_gathered: bool = False
    """Whether the backward uses the gathered A; the forward has no use for it."""
    prefer_fused: bool = False


def _impl(call: _Arguments) -> tuple[torch.Tensor, list[torch.Tensor]]:
    group = group_of_size(call.group_name, call.world_size)
    settings = GatherSettings(
        call.gather_dim, call.return_A, call.config, call.strict, call.prefer_fused
    )
    A, _, outs = gather(call.A_shard, call.Bs, call.biases, group, settings)
    return (call.A_shard.new_empty(0) if A is None else A), outs


def _fake(call: _Arguments) -> tuple[torch.Tensor, list[torch.Tensor]]:
    A_shard, dim = call.A_shard, call.gather_dim
    check_gatherable(A_shard, call.Bs, call.biases, dim, call.world_size)
    shape = list(A_shard.shape)
    shape[dim] = shape[dim] * call.world_size
    A = A_shard.new_empty(shape if call.return_A else 0)
    return A, [A_shard.new_empty(*shape[:-1], B.shape[1]) for B in call.Bs]


def _autograd(
    A_shard: torch.Tensor,
    Bs: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    *settings: Any,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    given = A_shard, *Bs, *biases
    if needs_gradient(*given):
        A, *outs = AllGatherMatmul.apply(len(Bs), settings, *given)
        return A, outs
    with torch._C._AutoDispatchBelowAutograd():
        A, outs = torch.ops.agmm._all_gather_matmul.default(A_shard, Bs, biases, *settings)
    return A, outs


def _dispatched(
    A_shard: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    group_name: str,
    *settings: Any,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A call that the dispatcher sees."""
    check_operands(A_shard, Bs, biases)
    world_size = world_size_of(group_name)
    A, outs = torch.ops.agmm._all_gather_matmul.default(
        A_shard, list(Bs), list(biases), group_name, world_size, *settings
    )
    return A, outs


def _native(
    A_shard: torch.Tensor, B: torch.Tensor, group_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    if is_watched() or not (is_plain(A_shard) and is_plain(B)):
        A, outs = _dispatched(A_shard, [B], [None], group_name, 0, True, "", False, False, True)
        return A, outs[0]
    whole, _, outs = gather(A_shard, [B], [None], group_of(group_name), _NATIVE)
    assert whole is not None
    return whole, outs[0]


_NATIVE = GatherSettings(return_A=True, prefer_fused=True)
"""The settings of torch's own op."""


define("_all_gather_matmul", _Arguments, "(Tensor A, Tensor[] outs)", run=_impl, fake=_fake)
library.impl("_all_gather_matmul", _autograd, "Autograd")
# It is a composite, so that what is traced is the op above, with the world size.
library.impl("_fused_all_gather_matmul_native", _native, "CompositeImplicitAutograd")


@overload
def all_gather_matmul(
    A_shard: torch.Tensor,
    B: torch.Tensor | Packed4BitWeight,
    group: dist.ProcessGroup | DeviceMesh | str | None = ...,
    *,
    gather_dim: int = ...,
    return_A: Literal[False] = ...,
    bias: torch.Tensor | None = ...,
    config: KernelConfig | str | None = ...,
    strict: bool = ...,
    save_gathered: bool = ...,
    quantize: str | None = ...,
    reduce_amax: bool = ...,
) -> torch.Tensor: ...
@overload
def all_gather_matmul(
    A_shard: torch.Tensor,
    B: torch.Tensor | Packed4BitWeight,
    group: dist.ProcessGroup | DeviceMesh | str | None = ...,
    *,
    gather_dim: int = ...,
    return_A: Literal[True],
    bias: torch.Tensor | None = ...,
    config: KernelConfig | str | None = ...,
    strict: bool = ...,
    save_gathered: bool = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def all_gather_matmul(
    A_shard: torch.Tensor,
    B: _Weights,
    group: dist.ProcessGroup | DeviceMesh | str | None = ...,
    *,
    gather_dim: int = ...,
    return_A: Literal[False] = ...,
    bias: Sequence[torch.Tensor | None] | None = ...,
    config: KernelConfig | str | None = ...,
    strict: bool = ...,
    save_gathered: bool = ...,
    quantize: str | None = ...,
    reduce_amax: bool = ...,
) -> list[torch.Tensor]: ...
@overload
def all_gather_matmul(
    A_shard: torch.Tensor,
    B: _Weights,
    group: dist.ProcessGroup | DeviceMesh | str | None = ...,
    *,
    gather_dim: int = ...,
    return_A: Literal[True],
    bias: Sequence[torch.Tensor | None] | None = ...,
    config: KernelConfig | str | None = ...,
    strict: bool = ...,
    save_gathered: bool = ...,
) -> tuple[torch.Tensor, list[torch.Tensor]]: ...
def all_gather_matmul(
    A_shard: torch.Tensor,
    B: torch.Tensor | Packed4BitWeight | _Weights,
    group: dist.ProcessGroup | DeviceMesh | str | None = None,
    *,
    gather_dim: int = 0,
    return_A: bool = False,
    bias: Sequence[torch.Tensor | None] | torch.Tensor | None = None,
    config: KernelConfig | str | None = None,
    strict: bool = False,
    save_gathered: bool = False,
    quantize: str | None = None,
    reduce_amax: bool = False,
) -> (
    torch.Tensor
    | list[torch.Tensor]
    | tuple[torch.Tensor, torch.Tensor]
    | tuple[torch.Tensor, list[torch.Tensor]]
):
    """``all_gather(A_shard) @ B (+ bias)``, the gather overlapped with the product. Collective.

    Every rank of the group calls with the same shapes, dtypes and layouts, in the same order, as
    with any collective. Differentiable once, with respect to A_shard, B and bias; the backward of
    A_shard is a matmul and a reduce-scatter (`matmul_reduce_scatter`). Under autocast the operands
    are cast as ``torch.nn.functional.linear`` casts them. May be captured in a CUDA graph after one
    eager call with the same shape.

    Args:
        A_shard: [M_local, ..., K]. Fused: contiguous, bf16 or fp16 (on the CPU float32 and float64
            too), K a multiple of 8 on CUDA.
        B: weight [K, N], row-major or column-major (``weight.t()``), or a list of weights that
            share one gather; N a multiple of 8 on CUDA. On the CPU also `Packed4BitWeight`, for a
            float32 A_shard; without backward.
        group: process group, its name or a 1-D DeviceMesh; the default group when None.
        gather_dim: dimension of A_shard along which it is gathered. Fused: 0.
        return_A: also return the gathered A, in a tensor of its own.
        bias: [N], added to the product before it is rounded; for a list of weights one each (or
            None).
        config: a `KernelConfig` or its name to use instead of the chosen one, perhaps with a
            transport (``KERNEL/pull``); ``"gather"`` for agmm's gather and the library's matmul on
            CUDA, at most 16 MiB gathered; or ``"unfused"``, which ``strict`` refuses.
        strict: raise `Unsupported` instead of taking the unfused path
            (``all_gather_into_tensor`` + ``matmul``) with one warning.
        save_gathered: keep the gathered A for the backward of B, instead of A_shard, which takes
            1 / world_size of the memory and is gathered again.
        quantize: ``"tensorwise"``, ``"rowwise"`` or ``"block"``: quantise A_shard before the gather
            and B to float8_e4m3fn, with dynamic scales of that kind (`all_gather_scaled_matmul`),
            tensorwise of each rank's shard; K a multiple of 16. The result has the dtype of
            A_shard. A weight that stays the same is better quantised once. Without backward, and
            not with ``return_A``, ``config`` or ``save_gathered``.
        reduce_amax: with ``quantize="tensorwise"``: one scale for the shards of all ranks, by the
            largest absolute value of all, as if A were quantised whole. Its exchange, a gather of a
            float32 per rank, precedes the quantisation.

    Returns:
        ``out`` [world_size * M_local, ..., N], or ``(A, out)`` with ``return_A``. For a list of
        weights ``out`` is a list.

    Raises:
        InvalidArgument: an argument that no path can serve; names it, the value found and wanted.
        Unsupported: under ``strict`` only.
    """
    several = isinstance(B, (list, tuple))
    Bs: Sequence[Any] = B if isinstance(B, (list, tuple)) else (B,)
    if isinstance(bias, (list, tuple)):
        biases: Sequence[torch.Tensor | None] = bias
    elif bias is None or len(Bs) == 1:
        biases = (cast("torch.Tensor | None", bias),) * len(Bs)
    else:
        raise InvalidArgument(f"bias: found one for {len(Bs)} weights, wanted a list of one each")
    config = config_name(config)
    if type(gather_dim) is not int:
        raise InvalidArgument(f"gather_dim: found {gather_dim!r}, wanted an int")
    # Identity is compared, which takes no call.
    if return_A is not True and return_A is not False:
        raise InvalidArgument(f"return_A: found {return_A!r}, wanted True or False")
    if strict is not True and strict is not False:
        raise InvalidArgument(f"strict: found {strict!r}, wanted True or False")
    if save_gathered is not True and save_gathered is not False:
        raise InvalidArgument(f"save_gathered: found {save_gathered!r}, wanted True or False")
    if reduce_amax is not False:
        if reduce_amax is not True:
            raise InvalidArgument(f"reduce_amax: found {reduce_amax!r}, wanted True or False")
        if quantize is None:
            raise InvalidArgument(
                "reduce_amax: found True without quantize, wanted quantize='tensorwise'"
            )
    if Packed4BitWeight in map(type, Bs):
        for name, given in (
            ("config", config),
            ("quantize", quantize),
            ("save_gathered", save_gathered),
        ):
            if given:
                raise InvalidArgument(
                    f"{name}: found {given!r} with a Packed4BitWeight, wanted none"
                )
        whole, found = gather_packed(A_shard, Bs, biases, group, gather_dim, return_A, strict)
        products = found if several else found[0]
        return (whole, products) if return_A else products  # type: ignore[return-value]
    if torch._C._is_any_autocast_enabled():
        check_operands(A_shard, Bs, biases)
        count = len(Bs)
        cast_shard, *others = autocast((A_shard, *Bs, *biases), A_shard.device)
        A_shard = cast(torch.Tensor, cast_shard)
        Bs, biases = cast("list[torch.Tensor]", others[:count]), others[count:]
    if quantize is not None:
        for name, given in (("return_A", return_A), ("save_gathered", save_gathered)):
            if given:
                raise InvalidArgument(f"{name}: found True with quantize, wanted False")
        if config:
            raise InvalidArgument(f"config: found {config!r} with quantize, wanted None")
        outs = gather_quantised(
            A_shard, Bs, biases, group, gather_dim, quantize, reduce_amax, strict
        )
        return outs if several else outs[0]
    plain = not is_watched()  # memory that a pointer and strides describe
    needs_grad = False
    kinds: list[Any] = []
    try:
        for tensor in (A_shard, *Bs, *biases):
            if tensor is None:
                plain = plain and len(kinds) > len(Bs)
                kinds.append(None)
                continue
            if plain:
                kind = type(tensor)
                plain = kind is torch.Tensor or kind is torch.nn.Parameter
                plain = plain and not tensor.is_neg()
                kinds.append(kind_of(tensor))
            needs_grad = needs_grad or tensor.requires_grad
    except (AttributeError, RuntimeError):  # no tensors, or not strided
        check_operands(A_shard, Bs, biases)
        raise
    group = group_or_default(group)
    needs_grad = needs_grad and torch.is_grad_enabled()
    if plain and not (needs_grad or A_shard.is_meta):
        resolved = group_of(group) if isinstance(group, str) else group
        settings = GatherSettings(gather_dim, return_A, config, strict)
        A, _, outs = gather(A_shard, Bs, biases, resolved, settings, kinds)
    else:
        save_gathered = save_gathered and needs_grad and any(B.requires_grad for B in Bs)
        A, outs = _dispatched(
            A_shard,
            Bs,
            biases,
            name_of(group),
            gather_dim,
            return_A or save_gathered,
            config,
            strict,
            save_gathered,
        )
    out = outs if several else outs[0]
    return (A, out) if return_A else out  # type: ignore[return-value]
