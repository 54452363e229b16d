"""``agmm.all_gather_matmul``; `gather_op` has its torch ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast, overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from agmm.errors import InvalidArgument
from agmm.ops import quantized_gates, quantized_outs
from agmm.ops.checks import config_name
from agmm.ops.gather import GatherSettings
from agmm.ops.gather_op import dispatched
from agmm.ops.gather_packed import gather_packed
from agmm.ops.kept import kind_of
from agmm.ops.operands import autocast, check_operands, is_watched
from agmm.ops.plain_gather import gather, gather_kept
from agmm.ops.quantize import gather_quantised
from agmm.ops.quantized_gates import Asked
from agmm.planning.problems import KernelConfig
from agmm.runtime.epilogues import GatedActivation, named
from agmm.runtime.groups import group_of, group_or_default, name_of
from agmm.runtime.packed import Packed4BitWeight

_Weights = (
    list[torch.Tensor]
    | tuple[torch.Tensor, ...]
    | list[Packed4BitWeight]
    | tuple[Packed4BitWeight, ...]
)
_Quantised = tuple[torch.Tensor, torch.Tensor]
"""The values of a result in fp8, and their scales."""


@overload
def all_gather_matmul(  # type: ignore[overload-overlap]
    A_shard: torch.Tensor,
    B: list[torch.Tensor] | tuple[torch.Tensor, ...],
    group: dist.ProcessGroup | DeviceMesh | str | None = ...,
    *,
    gather_dim: int = ...,
    bias: Sequence[torch.Tensor | None] | None = ...,
    config: KernelConfig | str | None = ...,
    activation: GatedActivation,
    strict: bool = ...,
    quantize: str | None = ...,
    reduce_amax: bool = ...,
    quantize_out: str,
    scale_out: torch.Tensor | None = ...,
) -> _Quantised: ...
@overload
def all_gather_matmul(
    A_shard: torch.Tensor,
    B: torch.Tensor,
    group: dist.ProcessGroup | DeviceMesh | str | None = ...,
    *,
    gather_dim: int = ...,
    bias: torch.Tensor | None = ...,
    config: KernelConfig | str | None = ...,
    activation: str | None = ...,
    strict: bool = ...,
    quantize: str | None = ...,
    reduce_amax: bool = ...,
    quantize_out: str,
    scale_out: torch.Tensor | None = ...,
) -> _Quantised: ...
@overload
def all_gather_matmul(
    A_shard: torch.Tensor,
    B: list[torch.Tensor] | tuple[torch.Tensor, ...],
    group: dist.ProcessGroup | DeviceMesh | str | None = ...,
    *,
    gather_dim: int = ...,
    bias: Sequence[torch.Tensor | None] | None = ...,
    config: KernelConfig | str | None = ...,
    activation: str | None = ...,
    strict: bool = ...,
    quantize: str | None = ...,
    reduce_amax: bool = ...,
    quantize_out: str,
    scale_out: torch.Tensor | None = ...,
) -> list[_Quantised]: ...
@overload
def all_gather_matmul(  # type: ignore[overload-overlap]
    A_shard: torch.Tensor,
    B: list[torch.Tensor] | tuple[torch.Tensor, ...],
    group: dist.ProcessGroup | DeviceMesh | str | None = ...,
    *,
    gather_dim: int = ...,
    return_A: Literal[False] = ...,
    bias: Sequence[torch.Tensor | None] | None = ...,
    config: KernelConfig | str | None = ...,
    activation: GatedActivation,
    strict: bool = ...,
    save_gathered: bool = ...,
    save_preactivation: bool = ...,
    quantize: str | None = ...,
    reduce_amax: bool = ...,
) -> torch.Tensor: ...
@overload
def all_gather_matmul(  # type: ignore[overload-overlap]
    A_shard: torch.Tensor,
    B: list[torch.Tensor] | tuple[torch.Tensor, ...],
    group: dist.ProcessGroup | DeviceMesh | str | None = ...,
    *,
    gather_dim: int = ...,
    return_A: Literal[True],
    bias: Sequence[torch.Tensor | None] | None = ...,
    config: KernelConfig | str | None = ...,
    activation: GatedActivation,
    strict: bool = ...,
    save_gathered: bool = ...,
    save_preactivation: bool = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...
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
    activation: str | None = ...,
    strict: bool = ...,
    save_gathered: bool = ...,
    save_preactivation: bool = ...,
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
    activation: str | None = ...,
    strict: bool = ...,
    save_gathered: bool = ...,
    save_preactivation: bool = ...,
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
    activation: str | None = ...,
    strict: bool = ...,
    save_gathered: bool = ...,
    save_preactivation: bool = ...,
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
    activation: str | None = ...,
    strict: bool = ...,
    save_gathered: bool = ...,
    save_preactivation: bool = ...,
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
    activation: str | None = None,
    strict: bool = False,
    save_gathered: bool = False,
    save_preactivation: bool = True,
    quantize: str | None = None,
    reduce_amax: bool = False,
    quantize_out: str | None = None,
    scale_out: torch.Tensor | None = None,
) -> (
    torch.Tensor
    | list[torch.Tensor]
    | _Quantised
    | tuple[torch.Tensor, list[torch.Tensor]]
    | list[_Quantised]
):
    """``activation(all_gather(A_shard) @ B (+ bias))``, the gather overlapped with the product.
    Collective.

    Every rank of the group calls with the same shapes, dtypes and layouts, in the same order, as
    with any collective. Differentiable once, with respect to A_shard, B and bias; the backward of
    A_shard is a matmul and a reduce-scatter (`matmul_reduce_scatter`). Under autocast the operands
    are cast as ``torch.nn.functional.linear`` casts them. May be captured in a CUDA graph after one
    eager call with the same shape.

    Args:
        A_shard: [M_local, ..., K]. Fused: contiguous, bf16 or fp16 (on the CPU float32 and float64
            too), K a multiple of 8 on CUDA.
        B: weight [K, N], row-major or column-major (``weight.t()``), or a list of weights that
            share one gather; N a multiple of 8 on CUDA. Also `Packed4BitWeight`, for an A_shard
            in float32 on the CPU, in bfloat16 on Hopper GPUs; without backward.
        group: process group, its name or a 1-D DeviceMesh; the default group when None.
        gather_dim: dimension of A_shard along which it is gathered. Fused: 0.
        return_A: also return the gathered A, in a tensor of its own.
        bias: [N], added to the product before it is rounded; one or None for each of several B.
        config: a `KernelConfig` or its name to use, perhaps with ``/gather`` (agmm's gather comes
            first) or another transport; on CUDA ``"gather"``: agmm's gather of at most 16 MiB, then
            the library's matmul; ``"streamed"``: that gather and a kernel of few rows, which reads
            the weight meanwhile; or ``"portable"``: copies beside products of the library; or
            ``"unfused"``, which ``strict`` refuses.
        activation: ``"relu"``, ``"relu2"`` (the square of relu), ``"gelu"``, ``"gelu_tanh"`` or
            ``"silu"``, of each product with its bias; or a gated one, ``"silu_mul"``,
            ``"gelu_mul"`` or ``"gelu_tanh_mul"``, of two weights of one shape, gate and up:
            ``silu(A @ gate) * (A @ up)``, one result. Computed in float32 (float64 for float64),
            before the one rounding to the dtype of A_shard: by the CPU backend, and on CUDA by the
            kernel. Where no kernel can, as with ``save_preactivation`` and gradients, torch's ops
            compute it behind the kernel, of rounded products, which one warning and `status` say.
            Real floating-point types only.
        strict: raise `Unsupported` instead of taking the unfused path
            (``all_gather_into_tensor`` + ``matmul``) with one warning, or of computing an
            activation behind the kernel.
        save_gathered: keep the gathered A for the backward of B, instead of A_shard, which takes
            1 / world_size of the memory and is gathered again.
        save_preactivation: with an activation, keep the products with their biases for the
            backward, [world_size * M_local, ..., N] for each weight; else the backward gathers and
            multiplies again.
        quantize: ``"tensorwise"``, ``"rowwise"`` or ``"block"``: quantise A_shard before the gather
            and B to float8_e4m3fn, with dynamic scales of that kind (`all_gather_scaled_matmul`),
            tensorwise of each rank's shard; K a multiple of 16. The result has the dtype of
            A_shard. A weight that stays the same is better quantised once. Without backward, and
            not with ``return_A``, ``config`` or ``save_gathered``.
        reduce_amax: with ``quantize="tensorwise"``: one scale for the shards of all ranks, by the
            largest absolute value of all, as if A were quantised whole. Its exchange, a gather of a
            float32 per rank, precedes the quantisation.
        quantize_out: ``"tensorwise"``, ``"rowwise"`` or ``"block"`` (1 × 128): return each result
            as float8_e4m3fn and its scales, as ``quantize`` would make them of it and as an op on
            fp8 operands takes its A: by a pass behind the product, or by the kernel of a gated
            activation, where the build has such. Without backward, and not with ``return_A`` or
            ``save_gathered``.
        scale_out: float32, what every value of a tensor-wise result is to be multiplied with; its
            values are cut at the largest number.

    Returns:
        ``out`` [world_size * M_local, ..., N], or ``(A, out)`` with ``return_A``. For a list of
        weights ``out`` is a list, but for a gated activation. With ``quantize_out`` each ``out`` is
        ``(values, scale)``.

    Raises:
        InvalidArgument: an argument that no path can serve; names it, the value found and wanted.
        Unsupported: under ``strict`` only.
    """
    if quantize_out is not None or scale_out is not None:
        quantise = quantized_outs.checked(
            *(quantize_out, scale_out),
            dtype=("A_shard", getattr(A_shard, "dtype", torch.float32)),
            others={"return_A": return_A, "save_gathered": save_gathered},
            operands={"A_shard": A_shard, "B": B, "bias": bias},
        )
        if quantize is None and not reduce_amax:
            asked = Asked(activation, quantize_out, scale_out, config, strict, group, gather_dim)
            by_kernel = quantized_gates.gather(asked, A_shard, B, bias)
            if by_kernel is not None:
                return by_kernel  # type: ignore[no-any-return]
        op: Any = all_gather_matmul  # a function of many forms, which takes what it was given
        same = {"gather_dim": gather_dim, "bias": bias, "config": config, "strict": strict}
        same |= {"activation": activation, "quantize": quantize, "reduce_amax": reduce_amax}
        found = op(A_shard, B, group, **same)
        return quantise(found)  # type: ignore[no-any-return]
    several, epilogue = isinstance(B, (list, tuple)), None
    if activation is not None:
        epilogue = named(activation)
        several = several and not (epilogue and epilogue.is_gated)
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
    if save_preactivation is not True and save_preactivation is not False:
        raise InvalidArgument(
            f"save_preactivation: found {save_preactivation!r}, wanted True or False"
        )
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
            ("activation", activation),
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
            *(A_shard, Bs, biases, group, gather_dim, quantize, reduce_amax, strict),
            activation or "",
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
        of_call = gather_dim, return_A, config, strict
        gathered = None
        if epilogue is None:
            gathered = gather_kept(A_shard, Bs, biases, resolved, kinds, *of_call)
        if gathered is None:
            settings = GatherSettings(*of_call, epilogue=epilogue)
            gathered = gather(A_shard, Bs, biases, resolved, settings, kinds)
        A, _, outs = gathered
    else:
        save_gathered = save_gathered and needs_grad and any(B.requires_grad for B in Bs)
        A, outs = dispatched(
            A_shard,
            Bs,
            biases,
            name_of(group),
            gather_dim,
            return_A or save_gathered,
            config,
            strict,
            save_gathered,
            False,
            activation or "",
            bool(activation and save_preactivation and needs_grad),
        )
        if epilogue is not None:
            outs = outs[: epilogue.results_of(len(Bs))]
    out = outs if several else outs[0]
    return (A, out) if return_A else out  # type: ignore[return-value]
