"""Registers the torch ops and takes the fused or the unfused path."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeVar, cast, overload

import torch
import torch.autograd.forward_ad as forward_ad
import torch.autograd.profiler as profiler
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from agmm import _call_plan, _cpu, _cuda, _group, plan
from agmm._calls import Call
from agmm._checks import (
    FLOATS,
    check_async_input,
    check_gatherable,
    check_no_grad,
    check_operand,
)
from agmm._collectives import (
    group_of,
    group_of_size,
    group_or_default,
    name_of,
    start_all_gather,
    world_size_of,
)
from agmm.autograd import AllGatherMatmul
from agmm.errors import InvalidArgument, Unsupported
from agmm.plan import KernelConfig
from agmm.symmetric_memory import cpu_workspace, cuda_workspace

_AUTOCAST_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_library = torch.library.Library("agmm", "DEF")
_library.define(
    "_async_input_mm(Tensor a, Tensor b, Tensor a_chunk_signals, int a_chunk_pivot) -> Tensor"
)
_library.define(
    "_fused_all_gather_matmul_native(Tensor A_shard, Tensor B, str group_name) "
    "-> (Tensor A, Tensor out)"
)
# The world size is an argument, so that a graph that torch.compile keeps on disk serves groups of
# that size only: shapes follow from it, and a group's name says nothing of it.
_library.define(
    "_all_gather_matmul(Tensor A_shard, Tensor[] Bs, Tensor?[] biases, str group_name, "
    "int world_size, int gather_dim, bool return_A, str config, bool strict, "
    "bool save_gathered=False, bool prefer_fused=False) -> (Tensor A, Tensor[] outs)"
)


# --- _async_input_mm ---


def _async_input_mm_cpu(
    a: torch.Tensor, b: torch.Tensor, a_chunk_signals: torch.Tensor, a_chunk_pivot: int
) -> torch.Tensor:
    check_async_input(a, b, a_chunk_signals, a_chunk_pivot)
    return _cpu.async_input_mm(a, b, a_chunk_signals, a_chunk_pivot)


def _async_input_mm_cuda(
    a: torch.Tensor, b: torch.Tensor, a_chunk_signals: torch.Tensor, a_chunk_pivot: int
) -> torch.Tensor:
    check_async_input(a, b, a_chunk_signals, a_chunk_pivot)
    reason = (
        _cuda.why_unfused(a.device)
        or plan.why_unfused(str(a.dtype).removeprefix("torch."), b.shape[1], a.shape[1])
        or _cuda.why_b_unfused(b)
    )
    if reason is None and not a_chunk_signals.is_contiguous():
        reason = "a_chunk_signals: found a strided tensor, wanted a contiguous one"
    if reason is not None:
        raise InvalidArgument(reason)
    return _cuda.async_input_mm(a, b, a_chunk_signals, a_chunk_pivot)


def _async_input_mm_fake(
    a: torch.Tensor, b: torch.Tensor, a_chunk_signals: torch.Tensor, a_chunk_pivot: int
) -> torch.Tensor:
    check_async_input(a, b, a_chunk_signals, a_chunk_pivot)
    return a.new_empty(a.shape[0], b.shape[1])


def _async_input_mm_autograd(*arguments: Any) -> torch.Tensor:
    check_no_grad(arguments[:2])
    with torch._C._AutoDispatchBelowAutograd():
        out: torch.Tensor = torch.ops.agmm._async_input_mm.default(*arguments)
    return out


_library.impl("_async_input_mm", _async_input_mm_cpu, "CPU")
_library.impl("_async_input_mm", _async_input_mm_cuda, "CUDA")
_library.impl("_async_input_mm", _async_input_mm_fake, "Meta")
_library.impl("_async_input_mm", _async_input_mm_autograd, "Autograd")


# --- all_gather_matmul ---


_warned: set[str] = set()


def _fall_back(reason: str, strict: bool) -> None:
    if strict:
        raise Unsupported(f"{reason}; strict=True refuses the unfused path")
    if reason not in _warned:
        _warned.add(reason)
        # The caller of all_gather_matmul, over _run, _run_anew and this function.
        warnings.warn(f"agmm takes the unfused path: {reason}", stacklevel=5)


def _why_unfused(
    A_shard: torch.Tensor, Bs: Sequence[torch.Tensor], gather_dim: int, config: str
) -> str | None:
    """The reason why the fused path cannot serve this call, or None. The same on all ranks, as long
    as they call with the same shapes, dtypes and layouts."""
    if config == "unfused":
        return "config: unfused was asked for"
    if gather_dim % A_shard.dim() != 0:
        return f"gather_dim: {gather_dim}, the fused path wants 0"
    if A_shard.numel() == 0:
        return f"A_shard: shape {tuple(A_shard.shape)} has no elements"
    if not A_shard.is_contiguous():
        return f"A_shard: strides {tuple(A_shard.stride())} are not contiguous"
    if A_shard.device.type == "cpu":
        if A_shard.dtype not in FLOATS:
            return f"A_shard: dtype={A_shard.dtype}, the CPU backend wants a floating-point type"
        return None
    if A_shard.device.type != "cuda":
        return f"A_shard: device {A_shard.device}, the fused path wants cuda or cpu"
    reason = _cuda.why_unfused(A_shard.device)
    dtype = str(A_shard.dtype).removeprefix("torch.")
    for B in Bs:
        reason = (
            reason
            or plan.why_unfused(dtype, B.shape[1], A_shard.shape[-1])
            or _cuda.why_b_unfused(B)
        )
    return reason


def _unfused(
    A_shard: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    group: dist.ProcessGroup,
    gather_dim: int,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    call = Call("all_gather_matmul", A_shard=A_shard, B=Bs, gather_dim=gather_dim)
    A = start_all_gather(A_shard, group.group_name, gather_dim, call=call)()
    outs = []
    rows = A.flatten(0, -2)
    for B, bias in zip(Bs, biases, strict=True):
        # One rounding, of product and bias together, as the fused path has it.
        out = torch.mm(rows, B) if bias is None else torch.addmm(bias, rows, B)
        outs.append(torch.ops.aten._unsafe_view(out, (*A.shape[:-1], B.shape[1])))
    return A, outs


_Outs = tuple[torch.Tensor | None, list[torch.Tensor]]


class _CpuCall(NamedTuple):
    """What `_cuda.FusedCall` is on CUDA."""

    group: weakref.ReferenceType[dist.ProcessGroup]  # else a kept call would keep its group
    return_A: bool

    def __call__(
        self,
        A_shard: torch.Tensor,
        Bs: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
    ) -> _Outs:
        group = self.group()
        assert group is not None
        _group.check_alive(group)
        return _fused_cpu(A_shard, Bs, biases, group, self.return_A)


# The calls that were found to be legal for the fused path; they end with their group.
_fused_calls: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, _CpuCall | _cuda.FusedCall]]
_fused_calls = weakref.WeakKeyDictionary()

_MAX_FUSED_CALLS = 4096  # per group


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _run(
    A_shard: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    group: dist.ProcessGroup,
    gather_dim: int,
    return_A: bool,
    config: str,
    strict: bool,
    prefer_fused: bool = False,
    kinds: Sequence[Any] | None = None,
) -> _Outs:
    if kinds is None:
        kinds = [None if t is None else _kind(t) for t in (A_shard, *Bs, *biases)]
    may_choose = not (config or strict or prefer_fused)
    key = (gather_dim, return_A, config, may_choose, len(Bs), *kinds)
    calls = _fused_calls.get(group)
    call = None if calls is None else calls.get(key)
    if calls is not None and call is not None:
        try:
            return call(A_shard, Bs, biases)
        except Unsupported:  # a workspace that cannot grow any more; nothing was begun
            del calls[key]
    with _group.of(group).lock:
        return _run_anew(
            A_shard, Bs, biases, group, gather_dim, return_A, config, strict, may_choose, key
        )


def _run_anew(
    A_shard: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    group: dist.ProcessGroup,
    gather_dim: int,
    return_A: bool,
    config: str,
    strict: bool,
    may_choose: bool,
    key: Any,
) -> _Outs:
    """A call of a kind that is not kept."""
    _group.check_alive(group)
    check_gatherable(A_shard, Bs, biases, gather_dim, group.size())
    try:
        kernel, transport = plan.parse_config("" if config == "unfused" else config)
    except ValueError as error:
        raise InvalidArgument(str(error)) from None
    reason = _why_unfused(A_shard, Bs, gather_dim, config)
    if (
        reason is None
        and may_choose
        and _call_plan.prefers_unfused(A_shard, Bs, group, return_A=return_A)
    ):
        reason, config = "plan: the unfused path is faster", "unfused"
    if reason is None:
        try:
            if A_shard.device.type == "cpu":
                call: _CpuCall | _cuda.FusedCall = _CpuCall(weakref.ref(group), return_A)
            else:
                call = cuda_workspace(group, A_shard.device).prepare(
                    A_shard, Bs, return_A=return_A, config=kernel, transport=transport
                )
            found = call(A_shard, Bs, biases)
        except Unsupported as error:
            reason = str(error)
        else:
            calls = _fused_calls.setdefault(group, {})
            if len(calls) >= _MAX_FUSED_CALLS:
                calls.clear()
            calls[key] = call
            return found
    if config != "unfused":
        _fall_back(reason, strict)
    A, outs = _unfused(A_shard, Bs, biases, group, gather_dim)
    return (A if return_A else None), outs


def _fused_cpu(
    A_shard: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    group: dist.ProcessGroup,
    return_A: bool,
) -> _Outs:
    k = A_shard.shape[-1]
    shard = A_shard.view(-1, k)
    workspace = cpu_workspace(group)
    chunks = _call_plan.call_plan(A_shard, Bs, group, return_A=return_A).chunks_per_shard
    A, outs = workspace.all_gather_matmul(
        shard, list(Bs), list(biases), return_A=return_A, chunks_per_shard=chunks
    )
    leading = (dist.get_world_size(group) * A_shard.shape[0], *A_shard.shape[1:-1])
    # Not views of the workspace's tensors: autograd refuses in-place ops on a Function's views.
    outs = [torch.ops.aten._unsafe_view(out, (*leading, out.shape[-1])) for out in outs]
    return (None if A is None else torch.ops.aten._unsafe_view(A, (*leading, k))), outs


def _all_gather_matmul_impl(
    A_shard: torch.Tensor,
    Bs: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    group_name: str,
    world_size: int,
    gather_dim: int,
    return_A: bool,
    config: str,
    strict: bool,
    save_gathered: bool = False,
    prefer_fused: bool = False,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    group = group_of_size(group_name, world_size)
    A, outs = _run(A_shard, Bs, biases, group, gather_dim, return_A, config, strict, prefer_fused)
    return (A_shard.new_empty(0) if A is None else A), outs


def _all_gather_matmul_fake(
    A_shard: torch.Tensor,
    Bs: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    group_name: str,
    world_size: int,
    gather_dim: int,
    return_A: bool,
    config: str,
    strict: bool,
    save_gathered: bool = False,
    prefer_fused: bool = False,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    check_gatherable(A_shard, Bs, biases, gather_dim, world_size)
    shape = list(A_shard.shape)
    shape[gather_dim] = shape[gather_dim] * world_size
    A = A_shard.new_empty(shape if return_A else 0)
    return A, [A_shard.new_empty(*shape[:-1], B.shape[1]) for B in Bs]


def _all_gather_matmul_autograd(
    A_shard: torch.Tensor,
    Bs: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    *settings: Any,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    given = A_shard, *Bs, *biases
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given):
        A, *outs = AllGatherMatmul.apply(len(Bs), settings, *given)
        return A, outs
    with torch._C._AutoDispatchBelowAutograd():
        A, outs = torch.ops.agmm._all_gather_matmul.default(A_shard, Bs, biases, *settings)
    return A, outs


def _check_operands(A_shard: Any, Bs: Sequence[Any], biases: Sequence[torch.Tensor | None]) -> None:
    check_operand("A_shard", A_shard)
    for B in Bs:
        check_operand("B", B)
    for bias in biases:
        if bias is not None:
            check_operand("bias", bias)


def _dispatched(
    A_shard: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    group_name: str,
    *settings: Any,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A call that the dispatcher sees."""
    _check_operands(A_shard, Bs, biases)
    world_size = world_size_of(group_name)
    A, outs = torch.ops.agmm._all_gather_matmul.default(
        A_shard, list(Bs), list(biases), group_name, world_size, *settings
    )
    return A, outs


def _native(
    A_shard: torch.Tensor, B: torch.Tensor, group_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    settings = 0, True, "", False
    if _is_watched() or not (_is_plain(A_shard) and _is_plain(B)):
        A, outs = _dispatched(A_shard, [B], [None], group_name, *settings, False, True)
        return A, outs[0]
    kept, outs = _run(A_shard, [B], [None], group_of(group_name), *settings, True)
    assert kept is not None
    return kept, outs[0]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a call without the dispatcher computes what the tensor stands for."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and not (tensor.requires_grad and torch.is_grad_enabled())
        and not (tensor.is_neg() or tensor.is_meta)
        and tensor.layout == torch.strided
    )


_library.impl("_all_gather_matmul", _all_gather_matmul_impl, "CPU")
_library.impl("_all_gather_matmul", _all_gather_matmul_impl, "CUDA")
_library.impl("_all_gather_matmul", _all_gather_matmul_fake, "Meta")
_library.impl("_all_gather_matmul", _all_gather_matmul_autograd, "Autograd")
# A composite, so that what is traced is the op above, with the world size.
_library.impl("_fused_all_gather_matmul_native", _native, "CompositeImplicitAutograd")


_transforms = torch._C._functorch.peek_interpreter_stack


def _is_watched() -> bool:
    """Whether the dispatcher has to see the call: compilation, fake tensors, other modes,
    transforms of torch.func, forward-mode derivatives, and profilers, which name ops."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._is_torch_function_mode_enabled()
        or profiler._is_profiler_enabled
        or forward_ad._current_level >= 0
        or _transforms() is not None
    )


_T = TypeVar("_T", bound=tuple[torch.Tensor | None, ...])


def autocast(tensors: _T, device: torch.device) -> _T:
    """The tensors as ``torch.nn.functional.linear`` would take them: cast where autocast is on."""
    kind = device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)

    def cast_one(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None or tensor.dtype not in _AUTOCAST_DTYPES:
            return tensor
        return tensor.to(dtype)

    return cast(_T, tuple(cast_one(tensor) for tensor in tensors))


@overload
def all_gather_matmul(
    A_shard: torch.Tensor,
    B: torch.Tensor,
    group: dist.ProcessGroup | DeviceMesh | str | None = ...,
    *,
    gather_dim: int = ...,
    return_A: Literal[False] = ...,
    bias: torch.Tensor | None = ...,
    config: KernelConfig | str | None = ...,
    strict: bool = ...,
    save_gathered: bool = ...,
) -> torch.Tensor: ...
@overload
def all_gather_matmul(
    A_shard: torch.Tensor,
    B: torch.Tensor,
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
    B: list[torch.Tensor] | tuple[torch.Tensor, ...],
    group: dist.ProcessGroup | DeviceMesh | str | None = ...,
    *,
    gather_dim: int = ...,
    return_A: Literal[False] = ...,
    bias: Sequence[torch.Tensor | None] | None = ...,
    config: KernelConfig | str | None = ...,
    strict: bool = ...,
    save_gathered: bool = ...,
) -> list[torch.Tensor]: ...
@overload
def all_gather_matmul(
    A_shard: torch.Tensor,
    B: list[torch.Tensor] | tuple[torch.Tensor, ...],
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
    B: torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor, ...],
    group: dist.ProcessGroup | DeviceMesh | str | None = None,
    *,
    gather_dim: int = 0,
    return_A: bool = False,
    bias: Sequence[torch.Tensor | None] | torch.Tensor | None = None,
    config: KernelConfig | str | None = None,
    strict: bool = False,
    save_gathered: bool = False,
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
        A_shard: [M_local, ..., K]. Fused: contiguous, bf16 or fp16 on CUDA (any floating-point
            type on the CPU), K a multiple of 8 on CUDA.
        B: weight [K, N], row-major or column-major (``weight.t()``), or a list of weights that
            share one gather; N a multiple of 8 on CUDA.
        group: process group, its name or a 1-D DeviceMesh; the default group when None.
        gather_dim: dimension of A_shard along which it is gathered. Fused: 0.
        return_A: also return the gathered A, in a tensor of its own.
        bias: [N], added to the product before it is rounded; for a list of weights one each (or
            None).
        config: a `KernelConfig` or its name to use instead of the chosen one, perhaps with a
            transport (``KERNEL/pull``), or ``"unfused"``.
        strict: raise `Unsupported` instead of taking the unfused path
            (``all_gather_into_tensor`` + ``matmul``) with one warning.
        save_gathered: keep the gathered A for the backward of B, instead of A_shard, which takes
            1 / world_size of the memory and is gathered again.

    Returns:
        ``out`` [world_size * M_local, ..., N], or ``(A, out)`` with ``return_A``. For a list of
        weights ``out`` is a list.

    Raises:
        InvalidArgument: an argument that no path can serve; names it, the value found and wanted.
        Unsupported: under ``strict`` only.
    """
    several = not isinstance(B, torch.Tensor)
    Bs: Sequence[torch.Tensor] = B if isinstance(B, (list, tuple)) else (B,)
    if isinstance(bias, (list, tuple)):
        biases: Sequence[torch.Tensor | None] = bias
    elif bias is None or len(Bs) == 1:
        biases = (cast("torch.Tensor | None", bias),) * len(Bs)
    else:
        raise InvalidArgument(f"bias: found one for {len(Bs)} weights, wanted a list of one each")
    if config is None:
        config = ""
    elif not isinstance(config, str):
        if not isinstance(config, KernelConfig):
            raise InvalidArgument(
                f"config: found {config!r}, wanted a KernelConfig, the name of one, or None"
            )
        config = config.name
    if type(gather_dim) is not int:
        raise InvalidArgument(f"gather_dim: found {gather_dim!r}, wanted an int")
    # By identity, which takes no call.
    if return_A is not True and return_A is not False:
        raise InvalidArgument(f"return_A: found {return_A!r}, wanted True or False")
    if strict is not True and strict is not False:
        raise InvalidArgument(f"strict: found {strict!r}, wanted True or False")
    if save_gathered is not True and save_gathered is not False:
        raise InvalidArgument(f"save_gathered: found {save_gathered!r}, wanted True or False")
    if torch._C._is_any_autocast_enabled():
        _check_operands(A_shard, Bs, biases)
        count = len(Bs)
        cast_shard, *others = autocast((A_shard, *Bs, *biases), A_shard.device)
        A_shard = cast(torch.Tensor, cast_shard)
        Bs, biases = cast("list[torch.Tensor]", others[:count]), others[count:]
    plain = not _is_watched()  # memory that a pointer and strides describe
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
                kinds.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.device))
            needs_grad = needs_grad or tensor.requires_grad
    except (AttributeError, RuntimeError):  # no tensors, or not strided
        _check_operands(A_shard, Bs, biases)
        raise
    group = group_or_default(group)
    needs_grad = needs_grad and torch.is_grad_enabled()
    if plain and not (needs_grad or A_shard.is_meta):
        resolved = group_of(group) if isinstance(group, str) else group
        A, outs = _run(
            A_shard,
            Bs,
            biases,
            resolved,
            gather_dim,
            return_A,
            config,
            strict,
            False,
            kinds,
        )
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
