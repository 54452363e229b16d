"""What the ranks called, in words: for the message to ranks whose calls differ."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from agmm import _core
from agmm.runtime import groups
from agmm.runtime.groups import Group
from agmm.runtime.packed import Packed4BitWeight

_TOPIC = "call"
_PEER_S = 2.0
_OTHERS_S = 0.5
"""How long a rank that has its peer's answer stays for the other ranks to ask: it may be the one
that serves the store."""


class _Caller(threading.local):
    op: str | None = None


_caller = _Caller()


@contextmanager
def part_of(op: str) -> Iterator[None]:
    """The calls that this thread makes meanwhile have the name of an op that consists of them."""
    before, _caller.op = _caller.op, op
    try:
        yield
    finally:
        _caller.op = before


class Call:
    """One call of an op, by the names of its arguments. Holds its tensors, so for its time only."""

    __slots__ = ("arguments", "number", "op")

    def __init__(self, op: str, /, **arguments: Any) -> None:
        self.op = _caller.op or op
        self.number = 0
        """Among the calls of its group; those in the background end behind others that began."""
        self.arguments = arguments

    def __str__(self) -> str:
        words = [f"{name} {_in_words(value)}" for name, value in self.arguments.items()]
        return f"{self.op}({', '.join(words)})"


def _in_words(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{list(value.shape)} {dtype} {_layout(value)}"
    if isinstance(value, Packed4BitWeight):
        return f"[{value.K}, {value.N}] of 4 bits by {value.group_size}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_in_words(one) for one in value)}]"
    return f"= {value!r}"


def _layout(tensor: torch.Tensor) -> str:
    if tensor.is_contiguous():
        return "row-major"
    if tensor.dim() == 2 and tensor.t().is_contiguous():
        return "column-major"
    return f"strides {tuple(tensor.stride())}"


@cache
def be_asked() -> None:
    """From now on the message of ranks whose calls differ names both calls, and ranks on GPUs that
    wait look whether others wait in a call without elements."""
    _core.set_call_lookup(_look_up)
    _core.set_late_listener(_listen)


def _listen(rank: int, without_elements: bool) -> None:
    """The listener of `_core.set_late_listener`, which does not say in which group a rank waits."""
    for group in groups.all_known():
        if group.rank == rank and group.world_size > 1 and group.token and group.calls:
            differ = group.empty_calls.look(group, waits_in_one=without_elements)
            if differ:
                _core.end_process(f"agmm: {differ}; ending the process")


def _look_up(rank: int, source: int, tag: int, noted: str) -> tuple[str, str]:
    """What this rank and ``source`` called, for `_core.set_call_lookup`.

    The core does not say in which group. A rank tells its call in each that it may be, and only a
    rank whose calls differ from another's tells one.
    """
    known = [g for g in groups.all_known() if g.rank == rank and source < g.world_size]
    known = [g for g in known if g.call is not None and g.call[0] == tag] or known
    own = ""
    for group in known:
        own = _of_group(group, tag, noted)
        group.tell(_TOPIC, own)
    deadline = time.monotonic() + _PEER_S
    theirs = ""
    while not theirs and time.monotonic() < deadline:
        for group in known:
            theirs = theirs or group.told(_TOPIC, source, 0.02) or ""
    time.sleep(_OTHERS_S)
    return own or noted, theirs


def _of_group(group: Group, tag: int, noted: str) -> str:
    if group.call is not None and group.call[0] == tag:
        number = getattr(group.call[1], "number", 0) or group.calls
        return f"call {number} of the group, {group.call[1]}"
    what = noted or "unknown"
    return f"one of its first {group.calls} calls of the group, {what}"
