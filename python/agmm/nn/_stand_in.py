"""What a module is handed whose linears gather its input: a shard that has the shape of the whole.

Modules take lengths from their input, to give heads a dimension of their own in what the linears
return, which has the rows of all ranks. So the input's sizes are those of all rows, and what is
computed with its values is computed with this rank's shard. What the two together would get wrong
without a word is refused.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch._guards import CompileContext

from agmm.errors import InvalidArgument

_SIZES = {"shape", "size", "numel", "nelement", "__len__", "dim", "ndim", "ndimension"}
_KINDS = {"device", "dtype", "is_cpu", "is_cuda", "is_floating_point", "is_meta", "layout"} | {
    "requires_grad"
}
_CASTS = {"to", "type", "type_as", "float", "double", "half", "bfloat16", "contiguous"}
_AT_NUMBERS = {"__getitem__", "__setitem__", "narrow", "select", "split", "split_with_sizes"} | {
    "tensor_split"
}
_JOINS = {"cat", "concat", "concatenate", "stack", "repeat", "tile", "pad"}
_TAKES = "_agmm_takes_stand_in"
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class StandIn(torch.Tensor):
    """A shard in the place of the whole.

    Attributes:
        shard: this rank's.
        whole: the shape that the module sees.
        sequence_dim: the dimension of `whole` along which the ranks share it.
        ranks: the number of shards; of 0 the shard is laid out otherwise, and only sizes are told.
        refusal: what is said of an op, before its name and behind it, where all are refused.
        asked: whether the module has asked for sizes.
    """

    shard: torch.Tensor
    whole: torch.Size
    sequence_dim: int
    ranks: int
    refusal: tuple[str, str] | None
    asked: bool

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given: dict[str, Any] = dict(kwargs or {})
        if not args and "input" in given:
            args = (given.pop("input"),)
        name: str = func.__name__
        if name == "__get__":
            name = func.__self__.__name__
        first = args[0] if args else None
        if isinstance(first, StandIn):
            if name in _SIZES and not _is_compiler():
                return _size(first, name, *args[1:], **given)
            if first.ranks and name in ("view", "reshape"):
                return _viewed(first, name, args, given)
            # A kernel that asks for sizes as well would leave the shard's memory.
            if first.ranks and name == "data_ptr" and not _is_compiler():
                raise first.refused(name)
            if first.ranks and name in _AT_NUMBERS and _is_at_numbers(first, name, args, given):
                raise first.refused(name)
        seen: list[StandIn] = []
        args = _with_shards(args, seen)
        if given:
            given = {key: _with_shards(value, seen) for key, value in given.items()}
        for one in seen:
            if not one.ranks and name not in _KINDS and not _is_compiler():
                raise one.refused(name)
        found = func(*args, **given)
        if not isinstance(found, torch.Tensor):
            return found
        for one in seen:
            if found is one.shard:
                return one
            if name not in _JOINS and one.is_spread_to(found):
                raise one.refused(name)
        if name in _CASTS and isinstance(first, StandIn):
            return _made(found, first.whole, first.sequence_dim, first.ranks, first.asked)
        return found

    def refused(self, name: str) -> InvalidArgument:
        """What to raise where the module calls an op of that name."""
        if self.refusal is not None:
            before, behind = self.refusal
            return InvalidArgument(f"{before}{name}{behind}")
        return InvalidArgument(
            f"SharedGatherParallel: found a module that calls {name} on its input, where the sizes "
            f"of all rows, {tuple(self.whole)}, and this rank's shard of them along dimension "
            f"{self.sequence_dim} are at odds: wanted rows from what its linears return, or "
            "whole_shape=False, with which the module sees the shard's own sizes"
        )

    def is_spread_to(self, found: torch.Tensor) -> bool:
        """Whether a shard of one row has been repeated to the rows of all ranks."""
        dim, shard = self.sequence_dim, self.shard
        return (
            self.ranks > 1
            and found.dim() == shard.dim()
            and shard.shape[dim] == 1
            and found.shape[dim] == self.whole[dim]
        )


def stand_in(shard: torch.Tensor, whole: Sequence[int], refusal: tuple[str, str]) -> StandIn:
    """A tensor that tells the sizes of the whole, and refuses all else."""
    return _made(shard, whole, 0, 0, False, refusal)


def _made(
    shard: torch.Tensor,
    whole: Sequence[int],
    dim: int,
    ranks: int,
    asked: bool,
    refusal: tuple[str, str] | None = None,
) -> StandIn:
    with torch.enable_grad():  # What knows nothing of the class, as autograd.Function, has a graph.
        found: StandIn = shard.as_subclass(StandIn)
    found.shard, found.whole = shard, torch.Size(whole)
    found.sequence_dim, found.ranks, found.asked = dim, ranks, asked
    found.refusal = refusal
    return found


def _is_compiler() -> bool:
    """Whether torch.compile asks for itself, not a module that it traces."""
    return not torch.compiler.is_dynamo_compiling() and CompileContext.try_get() is not None


def _size(x: StandIn, name: str, dim: int | None = None) -> Any:
    if name in ("dim", "ndim", "ndimension"):
        return len(x.whole)
    if name in ("numel", "nelement"):
        return math.prod(x.whole)
    if name == "__len__":
        dim = 0
    if dim is None:
        x.asked = True
        return x.whole
    if dim % len(x.whole) == x.sequence_dim:
        x.asked = True
    return x.whole[dim]


def _with_shards(value: Any, seen: list[StandIn]) -> Any:
    if isinstance(value, StandIn):
        seen.append(value)
        return value.shard
    if type(value) in (list, tuple):
        return type(value)([_with_shards(one, seen) for one in value])
    return value


def _viewed(x: StandIn, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The shard in other sizes, which are those of all rows where they say how many there are."""
    sizes = args[1:] or tuple(kwargs.values())
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = tuple(sizes[0])
    view: Any = x.shard.view if name == "view" else x.shard.reshape
    total, dim = math.prod(x.whole), x.sequence_dim
    if not sizes or not isinstance(sizes[0], (int, torch.SymInt)) or not total:
        return view(*sizes)
    known = math.prod([size for size in sizes if size != -1])
    if total % known if -1 in sizes and known else total != known:
        return view(*sizes)  # They are the shard's own, or wrong.
    whole = tuple(total // known if size == -1 else size for size in sizes)
    outer, before = math.prod(x.whole[:dim]), 1
    for i, size in enumerate(whole):
        if before == outer and size % x.ranks == 0:
            if sizes[i] == -1:
                return view(*sizes)
            shard = view(*sizes[:i], size // x.ranks, *sizes[i + 1 :])
            return _made(shard, whole, i, x.ranks, True)
        before *= size
    if -1 in sizes:
        i = sizes.index(-1)
        inner, behind = math.prod(x.whole[dim + 1 :]), math.prod(whole[i + 1 :])
        if inner % behind == 0 and (behind * whole[i]) % (inner * x.whole[dim]) == 0:
            return view(*sizes)  # All sizes that are told are beside the sequence.
    raise x.refused(f"{name}({', '.join(str(size) for size in sizes)})")


def _is_at_numbers(x: StandIn, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an op takes rows by numbers, which are those of all rows or of the shard."""
    dims = len(x.whole)
    if name in ("__getitem__", "__setitem__"):
        return _index_at(args[1], x.sequence_dim, dims, x.whole[x.sequence_dim])
    is_second = name in ("split", "split_with_sizes", "tensor_split")
    position = 2 if is_second else 1
    dim = kwargs.get("dim", args[position] if len(args) > position else 0)
    return isinstance(dim, int) and dim % dims == x.sequence_dim


def _index_at(index: Any, dim: int, dims: int, length: int) -> bool:
    items = index if type(index) is tuple else (index,)
    position = 0
    for i, item in enumerate(items):
        if item is None:
            continue
        if item is Ellipsis:
            position = dims - sum(other is not None for other in items[i + 1 :])
            continue
        if not isinstance(item, (int, slice)) or isinstance(item, bool):
            return False  # A mask or a list of rows is of the shard, or too long for it.
        if position == dim:
            if isinstance(item, int):
                return True
            stop_is_beyond = item.stop is None or item.stop >= length
            return not (item.start in (None, 0) and stop_is_beyond and item.step in (None, 1))
        position += 1
    return False


def _can_stand_in(x: Any, features: int, dim: int) -> bool:
    if type(x) not in _PLAIN or x.is_nested or not x.is_floating_point():
        return False
    if x.dim() < 2 or not -x.dim() <= dim < x.dim() or x.shape[-1] != features:
        return False
    if dim % x.dim() == x.dim() - 1:
        return False
    return torch.compiler.is_compiling() or not torch._C._functorch.is_functorch_wrapped_tensor(x)


def _shards_in(value: Any) -> Any:
    """A module's results, with shards where it returns its input."""
    if isinstance(value, StandIn):
        return value.shard
    if type(value) in (list, tuple):
        if any(isinstance(one, (StandIn, list, tuple, dict)) for one in value):
            return type(value)([_shards_in(one) for one in value])
    elif isinstance(value, dict):
        for key, one in value.items():
            if isinstance(one, StandIn):
                value[key] = one.shard
    return value


def _with_whole_shape(
    forward: Callable[..., Any],
    name: str,
    where: tuple[int, int, int],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The module's forward, whose first argument, of that name, has the shape of all rows."""
    features, dim, ranks = where
    x: Any = args[0] if args else kwargs.get(name)
    if not _can_stand_in(x, features, dim):
        return forward(*args, **kwargs)
    dim %= x.dim()
    whole = [size * ranks if i == dim else size for i, size in enumerate(x.shape)]
    found = _made(x, whole, dim, ranks, False)
    if args:
        args = (found, *args[1:])
    else:
        kwargs = {**kwargs, name: found}
    return _shards_in(forward(*args, **kwargs))


def _given_shards(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if hasattr(module, _TAKES):  # since another style on the module that holds it
        return None
    if not any(isinstance(one, StandIn) for one in (*args, *kwargs.values())):
        return None
    seen: list[StandIn] = []
    return _with_shards(args, seen), {k: _with_shards(v, seen) for k, v in kwargs.items()}


def show_whole_shape(
    module: torch.nn.Module, linears: Sequence[torch.nn.Module], dim: int, ranks: int
) -> None:
    """Lets a module's forward see the shape of all rows in its first argument, of which it gets
    this rank's shard along a dimension, and which its linears gather. The modules in it that hold
    none of the linears are given the shard."""
    if ranks == 1:
        return
    names = list(inspect.signature(module.forward).parameters)
    features: Any = linears[0].in_features
    where = (features, dim, ranks)
    first = names[0] if names else ""
    module.forward = partial(_with_whole_shape, module.forward, first, where)
    for inner in module.modules():
        if any(linear in inner.modules() for linear in linears):
            setattr(inner, _TAKES, True)
        else:
            inner.register_forward_pre_hook(_given_shards, with_kwargs=True, prepend=True)
