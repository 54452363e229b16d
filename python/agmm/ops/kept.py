"""Calls that were served before, of all ops: tensors of the same kinds need no checks again, no
plan and no dispatcher. Kept calls are looked up here and nowhere else, so that each of them asks
whether its group is still in use."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist

from agmm.errors import Unsupported
from agmm.ops import seen
from agmm.ops.operands import PLAIN_TYPES, is_watched
from agmm.runtime import groups, nan_check

kept_calls: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, Any]]
kept_calls = weakref.WeakKeyDictionary()
"""The kept calls of each group, by what an op says of their kind, such as `kind_of_call`; they
end with the group."""

nan_check.on_change(kept_calls.clear)
seen.on_change(kept_calls.clear)

MAX_KEPT = 4096
"""Calls that are kept for a group at most."""


def kind_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What tensors have in common that one kept call may serve."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()


def kind_of_call(settings: tuple[Any, ...], *given: Any) -> tuple[Any, ...] | None:
    """What all calls have in common that one kept call may serve: ``settings``, and the kinds of
    what was ``given``, each a tensor, None or a list of these. None for what is no tensor in memory
    that a pointer and strides describe (`operands.is_plain`, which is written out here, since every
    call comes this way). The kind of settings of other types cannot be hashed, see `call_kept`."""
    kind: list[Any] = [settings]
    try:
        hash(settings)
        for one in given:
            if one is None:
                kind.append(None)
                continue
            if type(one) is list:
                of_list = kind_of_call((len(one),), *one)
                if of_list is None:
                    return None
                kind.append(of_list)
                continue
            if (
                type(one) not in PLAIN_TYPES
                or (one.requires_grad and torch.is_grad_enabled())
                or one.is_neg()
                or one._is_zerotensor()
            ):
                return None
            index = one.get_device()
            if index < 0 and one.is_meta:
                return None
            kind += (one.shape, one.stride(), one.dtype, index)
    except (AttributeError, RuntimeError, TypeError):  # not strided, or settings of another type
        return None
    return tuple(kind)


def kind_of_product(settings: tuple[Any, ...], A: Any, B: Any) -> tuple[Any, ...] | None:
    """`kind_of_call` of two tensors, which is written out for the calls that take the host the
    least time."""
    try:
        if (
            type(A) not in PLAIN_TYPES
            or type(B) not in PLAIN_TYPES
            or ((A.requires_grad or B.requires_grad) and torch.is_grad_enabled())
            or A.is_neg()
            or B.is_neg()
            or A._is_zerotensor()
            or B._is_zerotensor()
        ):
            return None
        index, other = A.get_device(), B.get_device()
        if (index < 0 and A.is_meta) or (other < 0 and B.is_meta):
            return None
        hash(settings)
        return (
            *(settings, A.shape, A.stride(), A.dtype, index),
            *(B.shape, B.stride(), B.dtype, other),
        )
    except (AttributeError, RuntimeError, TypeError):
        return None


def kind_on_gpu(settings: tuple[Any, ...], strict: Any, *given: Any) -> Any:
    """`kind_of_call` of a call whose first operand is on a GPU and that the dispatcher need not
    see; None of others."""
    if getattr(given[0], "is_cuda", False) is not True or is_watched():
        return None
    if strict is not True and strict is not False:  # 1 would be the key of True
        return None
    return kind_of_call((*settings, strict), *given)


def call_kept(group: dist.ProcessGroup, kind: Any, *operands: Any) -> Any:
    """What the call returns that served that kind before; None where there was none, or it cannot
    serve these operands. Collective.

    Raises:
        InvalidArgument: the group has been destroyed, and so the memory that the call would use.
    """
    calls = kept_calls.get(group)
    if calls is None or kind is None:
        return None
    call = calls.get(kind)
    if call is None:
        return None
    groups.check_alive(group)
    try:
        return call(*operands)
    except Unsupported:  # a workspace that cannot grow any more; nothing was begun
        forget(group, kind)
        return None


def forget(group: dist.ProcessGroup, kind: Any) -> None:
    """Later calls of that kind are decided anew."""
    kept_calls[group].pop(kind, None)


def keep(group: dist.ProcessGroup, kind: Any, call: Any) -> None:
    """What serves calls of that kind from now on; nothing is kept where either is None, or while
    NaNs are looked for."""
    if kind is None or call is None or nan_check.active:
        return
    calls = kept_calls.setdefault(group, {})
    if len(calls) >= MAX_KEPT:
        calls.clear()
    calls[kind] = call
