"""``agmm.all_gather_scaled_matmul``; `gather_scaled_op` has its torch op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from agmm.errors import InvalidArgument
from agmm.ops import quantized_gates, quantized_outs
from agmm.ops.checks import check_flag, config_name
from agmm.ops.gather_scaled_op import gather
from agmm.ops.quantized_gates import Asked
from agmm.planning.problems import KernelConfig
from agmm.runtime.epilogues import GatedActivation, named

_Maybes = Sequence[torch.Tensor | None]
_Quantised = tuple[torch.Tensor, torch.Tensor]
"""The values of a result in fp8, and their scales."""


def _one_each(name: str, given: Any, count: int) -> list[torch.Tensor | None]:
    if isinstance(given, (list, tuple)):
        return list(given)
    if given is None or count == 1:
        return [given] * count
    raise InvalidArgument(f"{name}: found one for {count} weights, wanted a list of one each")


@overload
def all_gather_scaled_matmul(  # type: ignore[overload-overlap]
    A_shard: torch.Tensor,
    B: Sequence[torch.Tensor],
    scale_a: torch.Tensor,
    scale_b: Sequence[torch.Tensor],
    group: dist.ProcessGroup | DeviceMesh | str | None = ...,
    *,
    gather_dim: int = ...,
    bias: _Maybes | None = ...,
    out_dtype: torch.dtype = ...,
    use_fast_accum: bool = ...,
    activation: GatedActivation,
    config: KernelConfig | str | None = ...,
    strict: bool = ...,
    quantize_out: str,
    scale_out: torch.Tensor | None = ...,
) -> _Quantised: ...
@overload
def all_gather_scaled_matmul(
    A_shard: torch.Tensor,
    B: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    group: dist.ProcessGroup | DeviceMesh | str | None = ...,
    *,
    gather_dim: int = ...,
    bias: torch.Tensor | None = ...,
    out_dtype: torch.dtype = ...,
    use_fast_accum: bool = ...,
    activation: str | None = ...,
    config: KernelConfig | str | None = ...,
    strict: bool = ...,
    quantize_out: str,
    scale_out: torch.Tensor | None = ...,
) -> _Quantised: ...
@overload
def all_gather_scaled_matmul(
    A_shard: torch.Tensor,
    B: Sequence[torch.Tensor],
    scale_a: torch.Tensor,
    scale_b: Sequence[torch.Tensor],
    group: dist.ProcessGroup | DeviceMesh | str | None = ...,
    *,
    gather_dim: int = ...,
    bias: _Maybes | None = ...,
    out_dtype: torch.dtype = ...,
    use_fast_accum: bool = ...,
    activation: str | None = ...,
    config: KernelConfig | str | None = ...,
    strict: bool = ...,
    quantize_out: str,
    scale_out: torch.Tensor | None = ...,
) -> list[_Quantised]: ...
@overload
def all_gather_scaled_matmul(  # type: ignore[overload-overlap]
    A_shard: torch.Tensor,
    B: Sequence[torch.Tensor],
    scale_a: torch.Tensor,
    scale_b: Sequence[torch.Tensor],
    group: dist.ProcessGroup | DeviceMesh | str | None = ...,
    *,
    gather_dim: int = ...,
    return_A: Literal[False] = ...,
    bias: _Maybes | None = ...,
    result_scale: torch.Tensor | None = ...,
    out_dtype: torch.dtype = ...,
    use_fast_accum: bool = ...,
    activation: GatedActivation,
    config: KernelConfig | str | None = ...,
    strict: bool = ...,
) -> torch.Tensor: ...
@overload
def all_gather_scaled_matmul(  # type: ignore[overload-overlap]
    A_shard: torch.Tensor,
    B: Sequence[torch.Tensor],
    scale_a: torch.Tensor,
    scale_b: Sequence[torch.Tensor],
    group: dist.ProcessGroup | DeviceMesh | str | None = ...,
    *,
    gather_dim: int = ...,
    return_A: Literal[True],
    bias: _Maybes | None = ...,
    result_scale: torch.Tensor | None = ...,
    out_dtype: torch.dtype = ...,
    use_fast_accum: bool = ...,
    activation: GatedActivation,
    config: KernelConfig | str | None = ...,
    strict: bool = ...,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
@overload
def all_gather_scaled_matmul(
    A_shard: torch.Tensor,
    B: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    group: dist.ProcessGroup | DeviceMesh | str | None = ...,
    *,
    gather_dim: int = ...,
    return_A: Literal[False] = ...,
    bias: torch.Tensor | None = ...,
    result_scale: torch.Tensor | None = ...,
    out_dtype: torch.dtype = ...,
    use_fast_accum: bool = ...,
    activation: str | None = ...,
    config: KernelConfig | str | None = ...,
    strict: bool = ...,
) -> torch.Tensor: ...
@overload
def all_gather_scaled_matmul(
    A_shard: torch.Tensor,
    B: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    group: dist.ProcessGroup | DeviceMesh | str | None = ...,
    *,
    gather_dim: int = ...,
    return_A: Literal[True],
    bias: torch.Tensor | None = ...,
    result_scale: torch.Tensor | None = ...,
    out_dtype: torch.dtype = ...,
    use_fast_accum: bool = ...,
    activation: str | None = ...,
    config: KernelConfig | str | None = ...,
    strict: bool = ...,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
@overload
def all_gather_scaled_matmul(
    A_shard: torch.Tensor,
    B: Sequence[torch.Tensor],
    scale_a: torch.Tensor,
    scale_b: Sequence[torch.Tensor],
    group: dist.ProcessGroup | DeviceMesh | str | None = ...,
    *,
    gather_dim: int = ...,
    return_A: Literal[False] = ...,
    bias: _Maybes | None = ...,
    result_scale: _Maybes | None = ...,
    out_dtype: torch.dtype = ...,
    use_fast_accum: bool = ...,
    activation: str | None = ...,
    config: KernelConfig | str | None = ...,
    strict: bool = ...,
) -> list[torch.Tensor]: ...
@overload
def all_gather_scaled_matmul(
    A_shard: torch.Tensor,
    B: Sequence[torch.Tensor],
    scale_a: torch.Tensor,
    scale_b: Sequence[torch.Tensor],
    group: dist.ProcessGroup | DeviceMesh | str | None = ...,
    *,
    gather_dim: int = ...,
    return_A: Literal[True],
    bias: _Maybes | None = ...,
    result_scale: _Maybes | None = ...,
    out_dtype: torch.dtype = ...,
    use_fast_accum: bool = ...,
    activation: str | None = ...,
    config: KernelConfig | str | None = ...,
    strict: bool = ...,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]: ...
def all_gather_scaled_matmul(
    A_shard: torch.Tensor,
    B: torch.Tensor | Sequence[torch.Tensor],
    scale_a: torch.Tensor,
    scale_b: torch.Tensor | Sequence[torch.Tensor],
    group: dist.ProcessGroup | DeviceMesh | str | None = None,
    *,
    gather_dim: int = 0,
    return_A: bool = False,
    bias: _Maybes | torch.Tensor | None = None,
    result_scale: _Maybes | torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
    activation: str | None = None,
    config: KernelConfig | str | None = None,
    strict: bool = False,
    quantize_out: str | None = None,
    scale_out: torch.Tensor | None = None,
) -> (
    torch.Tensor
    | list[torch.Tensor]
    | tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    | tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]
    | _Quantised
    | list[_Quantised]
):
    """``activation(all_gather(A_shard * scale_a) @ (B * scale_b) (+ bias))`` of fp8 operands.
    Collective.

    The result is that of the dequantised operands, multiplied and summed in float32 and rounded
    once. The scales travel with the chunks of A_shard. On the CPU, and on Hopper with all scales
    but block 1x128, agmm overlaps the gather with the products; else bytes and scales are gathered
    by the backend, and ``torch._scaled_mm`` multiplies where it has the scales, else float32. Of
    both agmm warns once. The op has no backward.

    The shapes of the scales say which kind they are; a scale is what a value is multiplied with:

    ============= ============================ ==================== ============================
    kind          scale_a                      scale_b              covers
    ============= ============================ ==================== ============================
    tensorwise    one number                   one number           A_shard; B
    rowwise       [M_local, ..., 1]            [1, N]               a row of A; a column of B
    block         [M_local, ..., ceil(K/128)]  [ceil(K/128),        1 × 128 of A; 128 × 128 of B
                                               ceil(N/128)]
    block 1x128   [M_local, ..., ceil(K/128)]  [ceil(K/128), N]     1 × 128 of A; 128 × 1 of B
    ============= ============================ ==================== ============================

    A tensorwise scale_a is that of this rank's shard and counts for its rows; ranks that agreed on
    one pass the same. It may differ from rank to rank, which ``torch._scaled_mm`` of a gathered A
    does not know.

    Args:
        A_shard: [M_local, ..., K], float8_e4m3fn or float8_e5m2, K a multiple of 16; the same on
            all ranks.
        B: weight [K, N], float8_e4m3fn or float8_e5m2 (not both float8_e5m2), best column-major
            (``weight.t()``); or a list of weights that share one gather.
        scale_a: float32, of A_shard; one for all weights.
        scale_b: float32, of B; for a list of weights a list of one each.
        group: process group, its name or a 1-D DeviceMesh; the default group when None.
        gather_dim: dimension of A_shard along which it is gathered, any but the last.
        return_A: also return the gathered A and its scales, in tensors of their own.
        bias: [N], bf16, fp16 or float32, added before the result is rounded; for a list of weights
            one each (or None).
        result_scale: one float32 with which a result in fp8 is multiplied before it is rounded; for
            a list of weights one each (or None), for a gated activation one.
        out_dtype: bf16, fp16, float32, or an fp8 dtype. fp8 results are cut at the largest number.
        use_fast_accum: let a GPU accumulate with less precision. No difference on the CPU.
        activation: as `all_gather_matmul` takes it, before the result scale. On CUDA, where it is
            computed behind the kernel, the products of a result in fp8 are bf16.
        config: as `all_gather_matmul` takes it: a kernel for operands of this kind, perhaps with a
            transport; ``"gather"``; or ``"unfused"``.
        strict: raise `Unsupported` instead of taking the unfused path, or of computing an
            activation behind the kernel.
        quantize_out: as `all_gather_matmul` takes it, of a result in bf16, fp16 or float32; without
            ``result_scale``.
        scale_out: as `all_gather_matmul` takes it.

    Returns:
        ``out`` [world_size * M_local, ..., N], or ``(A, scale_A, out)`` with ``return_A``: scale_A
        is [world_size, 1] where A_shard has one scale, else [world_size * M_local, ..., as
        scale_a]. For a list of weights ``out`` is a list, but for a gated activation.

    Raises:
        InvalidArgument: names the argument, the value found and the value wanted.
        Unsupported: under ``strict`` only.
    """
    if quantize_out is not None or scale_out is not None:
        is_list = isinstance(result_scale, (list, tuple))
        given_scales: Any = result_scale if is_list else [result_scale]
        is_scaled = any(scale is not None for scale in given_scales)
        quantise = quantized_outs.checked(
            *(quantize_out, scale_out),
            dtype=("out_dtype", out_dtype),
            others={"return_A": return_A, "result_scale": is_scaled},
        )
        if out_dtype == torch.bfloat16:
            asked = Asked(
                *(activation, quantize_out, scale_out, config, strict, group, gather_dim),
                fast_accum=use_fast_accum,
            )
            by_kernel = quantized_gates.scaled_gather(asked, (A_shard, B, scale_a, scale_b), bias)
            if by_kernel is not None:
                return by_kernel  # type: ignore[no-any-return]
        op: Any = (
            all_gather_scaled_matmul  # a function of many forms, which takes what it was given
        )
        found = op(
            *(A_shard, B, scale_a, scale_b, group),
            gather_dim=gather_dim,
            bias=bias,
            out_dtype=out_dtype,
            use_fast_accum=use_fast_accum,
            activation=activation,
            config=config,
            strict=strict,
        )
        return quantise(found)  # type: ignore[no-any-return]
    epilogue = named(activation)
    is_gated = epilogue is not None and epilogue.is_gated
    several = not (is_gated or isinstance(B, torch.Tensor))
    Bs: list[Any] = list(B) if isinstance(B, (list, tuple)) else [B]
    scale_bs: list[Any] = list(scale_b) if isinstance(scale_b, (list, tuple)) else [scale_b]
    if type(gather_dim) is not int:
        raise InvalidArgument(f"gather_dim: found {gather_dim!r}, wanted an int")
    flags = (("return_A", return_A), ("use_fast_accum", use_fast_accum), ("strict", strict))
    for name, flag in flags:
        check_flag(name, flag)
    biases = _one_each("bias", bias, len(Bs))
    if is_gated and isinstance(result_scale, torch.Tensor):
        result_scale = [result_scale, *[None] * (len(Bs) - 1)]
    result_scales = _one_each("result_scale", result_scale, len(Bs))
    given = A_shard, scale_a, Bs, scale_bs, biases, result_scales
    A, scale_A, outs = gather(
        *(given, group, gather_dim, return_A, out_dtype, use_fast_accum, strict),
        *("", config_name(config), activation or ""),
    )
    out: Any = outs if several else outs[0]
    return (A, scale_A, out) if return_A else out  # type: ignore[return-value]
