"""Registers the torch ops; checks arguments and takes the fused or the unfused path."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar, cast, overload

import torch
import torch.distributed as dist

from agmm import _call_plan, _cpu, _cuda, _group, plan
from agmm._calls import Call
from agmm._collectives import (
    group_of,
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
_CPU_DTYPES = (*_AUTOCAST_DTYPES, torch.float64)

_library = torch.library.Library("agmm", "DEF")
_library.define(
    "_async_input_mm(Tensor a, Tensor b, Tensor a_chunk_signals, int a_chunk_pivot) -> Tensor"
)
_library.define(
    "_fused_all_gather_matmul_native(Tensor A_shard, Tensor B, str group_name) "
    "-> (Tensor A, Tensor out)"
)
_library.define(
    "_all_gather_matmul(Tensor A_shard, Tensor[] Bs, Tensor?[] biases, str group_name, "
    "int gather_dim, bool return_A, str config, bool strict, bool save_gathered=False) "
    "-> (Tensor A, Tensor[] outs)"
)


# --- checks: what no path can serve ---


def check_matrix(name: str, tensor: torch.Tensor) -> None:
    if tensor.dim() != 2:
        raise InvalidArgument(f"{name}: found {tensor.dim()} dimensions, wanted 2")


def check_same(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    if tensor.dtype != other.dtype:
        raise InvalidArgument(
            f"{name}: found dtype {tensor.dtype}, wanted {other.dtype} as {other_name}"
        )
    if tensor.device != other.device:
        raise InvalidArgument(
            f"{name}: found device {tensor.device}, wanted {other.device} as {other_name}"
        )


def _refuse_grad(tensors: Iterable[torch.Tensor | None]) -> None:
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise InvalidArgument(
            "A_shard, B: found requires_grad=True, wanted a call under torch.no_grad(): this op "
            "has no backward, agmm.all_gather_matmul has one"
        )


def _check_gatherable(
    A_shard: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    gather_dim: int,
) -> None:
    if A_shard.dim() < 2:
        raise InvalidArgument(f"A_shard: found {A_shard.dim()} dimensions, wanted at least 2")
    if not -A_shard.dim() <= gather_dim < A_shard.dim():
        raise InvalidArgument(
            f"gather_dim: found {gather_dim}, wanted {-A_shard.dim()} to {A_shard.dim() - 1}"
        )
    if not Bs:
        raise InvalidArgument("B: found an empty list, wanted at least one weight")
    if len(biases) != len(Bs):
        raise InvalidArgument(f"bias: found {len(biases)} for {len(Bs)} weights, wanted one each")
    k = A_shard.shape[-1]
    for B, bias in zip(Bs, biases, strict=True):
        check_matrix("B", B)
        check_same("B", B, "A_shard", A_shard)
        if gather_dim % A_shard.dim() != A_shard.dim() - 1 and B.shape[0] != k:
            raise InvalidArgument(f"B: found K={B.shape[0]}, wanted {k} as the columns of A_shard")
        if bias is not None:
            check_same("bias", bias, "A_shard", A_shard)
            if bias.shape != (B.shape[1],):
                raise InvalidArgument(
                    f"bias: found shape {tuple(bias.shape)}, wanted ({B.shape[1]},) as B's columns"
                )


def _check_async_input(a: torch.Tensor, b: torch.Tensor, signals: torch.Tensor, pivot: int) -> None:
    check_matrix("a", a)
    check_matrix("b", b)
    check_same("b", b, "a", a)
    wanted = (torch.bfloat16, torch.float16) if a.device.type == "cuda" else _CPU_DTYPES
    if a.dtype not in wanted:
        names = ", ".join(str(dtype) for dtype in wanted)
        raise InvalidArgument(f"a: found dtype {a.dtype}, wanted one of {names}")
    if b.shape[0] != a.shape[1]:
        raise InvalidArgument(f"b: found K={b.shape[0]}, wanted {a.shape[1]} as the columns of a")
    if not a.is_contiguous():
        raise InvalidArgument(f"a: found strides {tuple(a.stride())}, wanted contiguous rows")
    if signals.dtype != torch.uint32:
        raise InvalidArgument(f"a_chunk_signals: found dtype {signals.dtype}, wanted torch.uint32")
    if signals.device != a.device:
        raise InvalidArgument(
            f"a_chunk_signals: found device {signals.device}, wanted {a.device} as a"
        )
    if signals.dim() != 1:
        raise InvalidArgument(f"a_chunk_signals: found {signals.dim()} dimensions, wanted 1")
    chunks = signals.shape[0]
    if chunks == 0 or a.shape[0] % chunks != 0:
        raise InvalidArgument(
            f"a_chunk_signals: found {chunks} signals, wanted a divisor of M={a.shape[0]}"
        )
    if not 0 <= pivot < chunks:
        raise InvalidArgument(f"a_chunk_pivot: found {pivot}, wanted 0 to {chunks - 1}")


# --- _async_input_mm ---


def _async_input_mm_cpu(
    a: torch.Tensor, b: torch.Tensor, a_chunk_signals: torch.Tensor, a_chunk_pivot: int
) -> torch.Tensor:
    _check_async_input(a, b, a_chunk_signals, a_chunk_pivot)
    return _cpu.async_input_mm(a, b, a_chunk_signals, a_chunk_pivot)


def _async_input_mm_cuda(
    a: torch.Tensor, b: torch.Tensor, a_chunk_signals: torch.Tensor, a_chunk_pivot: int
) -> torch.Tensor:
    _check_async_input(a, b, a_chunk_signals, a_chunk_pivot)
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
    _check_async_input(a, b, a_chunk_signals, a_chunk_pivot)
    return a.new_empty(a.shape[0], b.shape[1])


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
        if A_shard.dtype not in _CPU_DTYPES:
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
    for B, bias in zip(Bs, biases, strict=True):
        if B.shape[0] != A.shape[-1]:
            raise InvalidArgument(
                f"B: found K={B.shape[0]}, wanted {A.shape[-1]} as the columns of the gathered A"
            )
        out = torch.matmul(A, B)
        outs.append(out if bias is None else out.add_(bias))
    return A, outs


_Outs = tuple[torch.Tensor | None, list[torch.Tensor]]

# The calls that were found to be legal for the fused CUDA path; they end with their group.
_fused_calls: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, _cuda.FusedCall]]
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
    *,
    prefer_fused: bool = False,
    kinds: Sequence[Any] | None = None,
) -> _Outs:
    if kinds is None:
        kinds = [None if t is None else _kind(t) for t in (A_shard, *Bs, *biases)]
    key = (gather_dim, return_A, config, len(Bs), *kinds)
    calls = _fused_calls.get(group)
    call = None if calls is None else calls.get(key)
    if call is not None:
        return call(A_shard, Bs, biases)
    with _group.of(group).lock:
        return _run_anew(
            A_shard, Bs, biases, group, gather_dim, return_A, config, strict, prefer_fused, key
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
    prefer_fused: bool,
    key: Any,
) -> _Outs:
    """A call of a kind that is not kept: always so on the CPU and on the unfused path."""
    _group.check_alive(group)
    _check_gatherable(A_shard, Bs, biases, gather_dim)
    try:
        kernel, transport = plan.parse_config("" if config == "unfused" else config)
    except ValueError as error:
        raise InvalidArgument(str(error)) from None
    reason = _why_unfused(A_shard, Bs, gather_dim, config)
    may_choose = reason is None and not (config or strict or prefer_fused)
    if may_choose and _call_plan.prefers_unfused(A_shard, Bs, group, return_A=return_A):
        reason, config = "plan: the unfused path is faster", "unfused"
    if reason is None:
        try:
            if A_shard.device.type == "cpu":
                return _fused_cpu(A_shard, Bs, biases, group, return_A)
            workspace = cuda_workspace(group, A_shard.device)
            call = workspace.prepare(
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
    outs = [out.view(*leading, out.shape[-1]) for out in outs]
    return (None if A is None else A.view(*leading, k)), outs


def _all_gather_matmul_impl(
    A_shard: torch.Tensor,
    Bs: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    group_name: str,
    gather_dim: int,
    return_A: bool,
    config: str,
    strict: bool,
    save_gathered: bool = False,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    group = group_of(group_name)
    A, outs = _run(A_shard, Bs, biases, group, gather_dim, return_A, config, strict)
    return (A_shard.new_empty(0) if A is None else A), outs


def _gathered_shape(A_shard: torch.Tensor, group_name: str, gather_dim: int) -> list[int]:
    shape = list(A_shard.shape)
    shape[gather_dim] = shape[gather_dim] * world_size_of(group_name)
    return shape


def _all_gather_matmul_fake(
    A_shard: torch.Tensor,
    Bs: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    group_name: str,
    gather_dim: int,
    return_A: bool,
    config: str,
    strict: bool,
    save_gathered: bool = False,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    _check_gatherable(A_shard, Bs, biases, gather_dim)
    shape = _gathered_shape(A_shard, group_name, gather_dim)
    A = A_shard.new_empty(shape if return_A else 0)
    return A, [A_shard.new_empty(*shape[:-1], B.shape[1]) for B in Bs]


def _native_impl(
    A_shard: torch.Tensor, B: torch.Tensor, group_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    A, outs = _run(
        A_shard, [B], [None], group_of(group_name), 0, True, "", False, prefer_fused=True
    )
    assert A is not None
    return A, outs[0]


def _native_fake(
    A_shard: torch.Tensor, B: torch.Tensor, group_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    A, outs = _all_gather_matmul_fake(A_shard, [B], [None], group_name, 0, True, "", False)
    return A, outs[0]


def _flat(arguments: Iterable[Any]) -> Iterable[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _flat(argument)


def _all_gather_matmul_autograd(
    A_shard: torch.Tensor,
    Bs: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    group_name: str,
    gather_dim: int,
    return_A: bool,
    config: str,
    strict: bool,
    save_gathered: bool = False,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    settings = group_name, gather_dim, return_A, config, strict, save_gathered
    given = A_shard, *Bs, *biases
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given):
        A, *outs = AllGatherMatmul.apply(len(Bs), settings, *given)
        return A, outs
    with torch._C._AutoDispatchBelowAutograd():
        A, outs = torch.ops.agmm._all_gather_matmul.default(A_shard, Bs, biases, *settings)
    return A, outs


def _below_autograd(name: str) -> Callable[..., Any]:
    """The op's autograd kernel: there is no backward, and that is said at once."""
    op = getattr(torch.ops.agmm, name).default

    def call(*arguments: Any) -> Any:
        _refuse_grad(_flat(arguments))
        with torch._C._AutoDispatchBelowAutograd():
            return op(*arguments)

    return call


for _name in ("_async_input_mm", "_fused_all_gather_matmul_native"):
    _library.impl(_name, _below_autograd(_name), "Autograd")
_library.impl("_all_gather_matmul", _all_gather_matmul_autograd, "Autograd")
for _key, _async_impl in (("CPU", _async_input_mm_cpu), ("CUDA", _async_input_mm_cuda)):
    _library.impl("_async_input_mm", _async_impl, _key)
    _library.impl("_all_gather_matmul", _all_gather_matmul_impl, _key)
    _library.impl("_fused_all_gather_matmul_native", _native_impl, _key)
_library.impl("_async_input_mm", _async_input_mm_fake, "Meta")
_library.impl("_all_gather_matmul", _all_gather_matmul_fake, "Meta")
_library.impl("_fused_all_gather_matmul_native", _native_fake, "Meta")


def _is_traced() -> bool:
    """Whether the dispatcher has to see the call: compilation, fake tensors, other modes."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._is_torch_function_mode_enabled()
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
    group: dist.ProcessGroup | str | None = ...,
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
    group: dist.ProcessGroup | str | None = ...,
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
    group: dist.ProcessGroup | str | None = ...,
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
    group: dist.ProcessGroup | str | None = ...,
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
    group: dist.ProcessGroup | str | None = None,
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
        group: process group or its name; the default group when None.
        gather_dim: dimension of A_shard along which it is gathered. Fused: 0.
        return_A: also return the gathered A, in a tensor of its own.
        bias: [N], added to the product in float32; for a list of weights one each (or None).
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
    plain = True  # neither subclasses nor something that is no tensor
    needs_grad = False
    given: tuple[Any, ...] = (A_shard, *Bs, *biases)
    kinds: list[Any] = []
    for tensor in given:
        if tensor is None:
            if len(kinds) <= len(Bs):
                name = "B" if kinds else "A_shard"
                raise InvalidArgument(f"{name}: found None, wanted a tensor")
            kinds.append(None)
            continue
        if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
            if not isinstance(tensor, torch.Tensor):
                kind = type(tensor).__name__
                raise InvalidArgument(f"A_shard, B, bias: found {kind}, wanted tensors")
            plain = False
        needs_grad = needs_grad or tensor.requires_grad
        kinds.append(_kind(tensor))
    group = group_or_default(group)
    if not isinstance(gather_dim, int):
        raise InvalidArgument(f"gather_dim: found {gather_dim!r}, wanted an int")
    if isinstance(config, KernelConfig):
        config = config.name
    if torch._C._is_any_autocast_enabled():
        count = len(Bs)
        given = autocast(given, A_shard.device)
        A_shard, *others = given
        kinds = [None if t is None else _kind(t) for t in given]
        Bs, biases = others[:count], others[count:]
    needs_grad = needs_grad and torch.is_grad_enabled()
    if needs_grad or not plain or _is_traced():
        op = torch.ops.agmm._all_gather_matmul.default
        save_gathered = save_gathered and needs_grad and any(B.requires_grad for B in Bs)
        A, outs = op(
            A_shard,
            list(Bs),
            list(biases),
            name_of(group),
            gather_dim,
            return_A or save_gathered,
            config or "",
            strict,
            save_gathered,
        )
    else:
        resolved = group_of(group) if isinstance(group, str) else group
        A, outs = _run(
            A_shard,
            Bs,
            biases,
            resolved,
            gather_dim,
            return_A,
            config or "",
            strict,
            kinds=kinds,
        )
    out = outs if several else outs[0]
    return (A, out) if return_A else out
