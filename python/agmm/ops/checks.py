"""What no path can serve: found before the first step of a call that another rank sees."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad

from agmm.errors import InvalidArgument
from agmm.planning.problems import KernelConfig

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""The floating-point dtypes that torch multiplies; fp8 is not among them, since its products need
scales."""

_COMPLEX = (torch.complex64, torch.complex128)
_INTS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
_DTYPES = {"cuda": (*FLOATS, *_COMPLEX)}
_OTHER_DTYPES = (*FLOATS, *_COMPLEX, *_INTS)


def _is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a DTensor. Their module takes 0.4 s to import, so it is not imported
    for this: until it is, there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return isinstance(tensor, getattr(module, "DTensor", ()))


def check_operand(name: str, tensor: Any) -> None:
    """Refuses what is no tensor of plain memory, or stands for more than itself."""
    if not isinstance(tensor, torch.Tensor):
        found = None if tensor is None else type(tensor).__name__
        raise InvalidArgument(f"{name}: found {found}, wanted a tensor")
    if torch.compiler.is_compiling():
        return
    if _is_dtensor(tensor):
        raise InvalidArgument(f"{name}: found a DTensor, wanted this rank's part, to_local()")
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
        raise InvalidArgument(f"{name}: found {kind}, wanted layout torch.strided")
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise InvalidArgument(
            f"{name}: found a tensor inside torch.func (vmap, grad, jvp), wanted one outside: "
            "the op has a backward, but none of these rules"
        )
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        raise InvalidArgument(
            f"{name}: found a tangent, wanted none: the op has no forward-mode derivative"
        )


def config_name(config: Any) -> str:
    """The name of what a caller gave as ``config``: a `KernelConfig`, a name, or None for "".

    Raises:
        InvalidArgument: it is none of these.
    """
    if config is None:
        return ""
    if isinstance(config, str):
        return config
    if isinstance(config, KernelConfig):
        return config.name
    raise InvalidArgument(
        f"config: found {config!r}, wanted a KernelConfig, the name of one, or None"
    )


def check_matrix(name: str, tensor: torch.Tensor) -> None:
    if tensor.dim() != 2:
        raise InvalidArgument(f"{name}: found {tensor.dim()} dimensions, wanted 2")


def check_rows(name: str, tensor: torch.Tensor) -> None:
    """Refuses what is neither a matrix nor one that is folded, [..., K]."""
    if tensor.dim() < 2:
        raise InvalidArgument(f"{name}: found {tensor.dim()} dimensions, wanted at least 2")


def check_same(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    if tensor.dtype != other.dtype:
        raise InvalidArgument(
            f"{name}: found dtype {tensor.dtype}, wanted {other.dtype} as {other_name}"
        )
    check_device(name, tensor, other_name, other)


def check_device(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    if tensor.device != other.device:
        raise InvalidArgument(
            f"{name}: found device {tensor.device}, wanted {other.device} as {other_name}"
        )


def names_of(dtypes: Iterable[torch.dtype]) -> str:
    """The dtypes in a message."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def check_dtype(name: str, tensor: torch.Tensor, wanted: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in wanted:
        one_of = "one of " if len(wanted) > 1 else ""
        raise InvalidArgument(
            f"{name}: found dtype {tensor.dtype}, wanted {one_of}{names_of(wanted)}"
        )


def check_multipliable(name: str, tensor: torch.Tensor) -> None:
    """Refuses a dtype that torch.matmul does not have on this device."""
    check_dtype(name, tensor, _DTYPES.get(tensor.device.type, _OTHER_DTYPES))


def check_inner(name: str, k: int, columns: int, which: str, n: int | None = None) -> None:
    """Refuses a weight whose rows, ``k``, are not as many as the columns of ``which``. Where its
    own columns, ``n``, are, the message guesses that a transpose was forgotten."""
    if k != columns:
        guess = f"; did you mean {name}.t()?" if n == columns else ""
        raise InvalidArgument(
            f"{name}: found K={k}, wanted {columns} as the columns of {which}{guess}"
        )


def check_listed(name: str, given: Sequence[Any], what: str = "") -> None:
    if not given:
        raise InvalidArgument(f"{name}: found an empty list, wanted at least one{what}")


def check_count(name: str, given: Sequence[Any], count: int, of: str) -> None:
    if len(given) != count:
        raise InvalidArgument(f"{name}: found {len(given)} for {count} {of}, wanted one each")


def needs_gradient(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd records what is computed from the tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def check_no_grad(tensors: Iterable[torch.Tensor | None]) -> None:
    if needs_gradient(*tensors):
        raise InvalidArgument(
            "a, b: found requires_grad=True, wanted a call under torch.no_grad(): this op has no "
            "backward, agmm.all_gather_matmul has one"
        )


def check_flag(name: str, flag: Any) -> None:
    if flag is not True and flag is not False:
        raise InvalidArgument(f"{name}: found {flag!r}, wanted True or False")


def check_no_backward(
    given: Iterable[tuple[str, torch.Tensor | None]], what: str = "the ops on fp8 operands"
) -> None:
    """Refuses operands whose gradient autograd would want of ``what``."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in given:
        if tensor is not None and tensor.requires_grad:
            raise InvalidArgument(
                f"{name}: found requires_grad=True, wanted a call under torch.no_grad(): {what} "
                "have no backward"
            )


def check_bias(bias: torch.Tensor, columns: int, like_name: str, like: torch.Tensor) -> None:
    check_same("bias", bias, like_name, like)
    check_bias_shape(bias, columns)


def check_bias_shape(bias: torch.Tensor, columns: int) -> None:
    if bias.shape != (columns,):
        raise InvalidArgument(
            f"bias: found shape {tuple(bias.shape)}, wanted ({columns},) as B's columns"
        )


def check_dim(name: str, dim: int, tensor: torch.Tensor) -> None:
    if not -tensor.dim() <= dim < tensor.dim():
        raise InvalidArgument(f"{name}: found {dim}, wanted {-tensor.dim()} to {tensor.dim() - 1}")


def check_gatherable(
    A_shard: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    gather_dim: int,
    world_size: int,
) -> None:
    """Refuses all that is wrong in itself in a call of ``all_gather_matmul``."""
    for name, tensor in (
        ("A_shard", A_shard),
        *(("B", B) for B in Bs),
        *(("bias", bias) for bias in biases if bias is not None),
    ):
        check_operand(name, tensor)
    check_rows("A_shard", A_shard)
    check_multipliable("A_shard", A_shard)
    check_dim("gather_dim", gather_dim, A_shard)
    check_listed("B", Bs, " weight")
    check_count("bias", biases, len(Bs), "weights")
    is_gathered_columns = gather_dim % A_shard.dim() == A_shard.dim() - 1
    columns = A_shard.shape[-1] * (world_size if is_gathered_columns else 1)
    which = "the gathered A" if is_gathered_columns else "A_shard"
    for B, bias in zip(Bs, biases, strict=True):
        check_matrix("B", B)
        check_same("B", B, "A_shard", A_shard)
        check_inner("B", B.shape[0], columns, which, B.shape[1])
        if bias is not None:
            check_bias(bias, B.shape[1], "A_shard", A_shard)


def check_async_input(a: torch.Tensor, b: torch.Tensor, signals: torch.Tensor, pivot: int) -> None:
    """Refuses all that is wrong in itself in a call of ``_async_input_mm``."""
    check_matrix("a", a)
    check_matrix("b", b)
    check_same("b", b, "a", a)
    wanted = (torch.bfloat16, torch.float16) if a.device.type == "cuda" else FLOATS
    if a.dtype not in wanted:
        names = ", ".join(str(dtype) for dtype in wanted)
        raise InvalidArgument(f"a: found dtype {a.dtype}, wanted one of {names}")
    check_inner("b", b.shape[0], a.shape[1], "a", b.shape[1])
    check_chunk_signals("a", a, signals, pivot)


def check_chunk_signals(name: str, a: torch.Tensor, signals: torch.Tensor, pivot: int) -> None:
    """Refuses signals and a pivot that do not fit the row chunks of ``a`` [M, K], and rows that are
    not contiguous."""
    if not a.is_contiguous():
        raise InvalidArgument(f"{name}: found strides {tuple(a.stride())}, wanted contiguous rows")
    if signals.dtype != torch.uint32:
        raise InvalidArgument(f"a_chunk_signals: found dtype {signals.dtype}, wanted torch.uint32")
    if signals.device != a.device:
        raise InvalidArgument(
            f"a_chunk_signals: found device {signals.device}, wanted {a.device} as {name}"
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


def _check_products(As: Sequence[torch.Tensor], Bs: Sequence[torch.Tensor]) -> None:
    """Refuses products that cannot be computed and added up."""
    check_listed("A", As)
    check_count("B", Bs, len(As), "of A")
    first, weight = As[0], Bs[0]
    check_rows("A", first)
    check_multipliable("A", first)
    for A, B in zip(As, Bs, strict=True):
        check_leading(A, first)
        check_same("A", A, "the first of the list", first)
        check_matrix("B", B)
        check_same("B", B, "A", first)
        check_inner("B", B.shape[0], A.shape[-1], "A", B.shape[1])
        check_columns(B, weight)


def check_leading(A: torch.Tensor, first: torch.Tensor) -> None:
    """Refuses an A whose product has other rows than that of the first of the list."""
    if A.shape[:-1] != first.shape[:-1]:
        raise InvalidArgument(
            f"A: found leading sizes {tuple(A.shape[:-1])}, wanted {tuple(first.shape[:-1])} "
            "as the first of the list"
        )


def check_columns(B: torch.Tensor, first: torch.Tensor) -> None:
    """Refuses a B whose product has other columns than that of the first of the list."""
    if B.shape[1] != first.shape[1]:
        raise InvalidArgument(
            f"B: found {B.shape[1]} columns, wanted {first.shape[1]} as the first of the list"
        )


def check_scatterable(
    As: Sequence[torch.Tensor],
    Bs: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    world_size: int,
    scatter_dim: int,
    reduce_op: str,
) -> None:
    """Refuses all that is wrong in itself in a call of ``matmul_reduce_scatter``."""
    _check_products(As, Bs)
    first, weight = As[0], Bs[0]
    check_scatter(first, weight, bias, world_size, scatter_dim, reduce_op)
    if bias is not None:
        check_bias(bias, weight.shape[1], "A", first)


def check_scatter(
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None,
    world_size: int,
    scatter_dim: int,
    reduce_op: str,
) -> None:
    """Refuses a result of A and B that cannot be reduced and scattered as is asked."""
    check_dim("scatter_dim", scatter_dim, A)
    if reduce_op not in ("sum", "avg"):
        raise InvalidArgument(f"reduce_op: found {reduce_op!r}, wanted 'sum' or 'avg'")
    is_columns = scatter_dim % A.dim() == A.dim() - 1
    name, size = ("B", B.shape[1]) if is_columns else ("A", A.shape[scatter_dim])
    if size % world_size:
        what = "columns" if is_columns else f"in dimension {scatter_dim}"
        raise InvalidArgument(
            f"{name}: found {size} {what}, wanted a multiple of the world size {world_size}"
        )
    if bias is not None and is_columns:
        raise InvalidArgument(
            f"bias: found one with scatter_dim={scatter_dim}, wanted None: the result's columns "
            "are scattered"
        )


def check_residual(residual: torch.Tensor | None, shape: Sequence[int], like: torch.Tensor) -> None:
    """Refuses a residual that is not of the result's shape, and of A's dtype and device."""
    if residual is None:
        return
    check_operand("residual", residual)
    check_same("residual", residual, "A", like)
    if tuple(residual.shape) != tuple(shape):
        raise InvalidArgument(
            f"residual: found shape {tuple(residual.shape)}, wanted {tuple(shape)} as the result"
        )


def check_eps(eps: Any) -> None:
    """Refuses what cannot be added to a mean of squares."""
    if not isinstance(eps, (int, float)) or not 0 <= eps < math.inf:
        raise InvalidArgument(f"eps: found {eps!r}, wanted a finite number of at least 0")


def check_reducible(A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Refuses all that is wrong in itself in a call of ``matmul_all_reduce``."""
    _check_products([A], [B])
    if bias is not None:
        check_bias(bias, B.shape[1], "A", A)
