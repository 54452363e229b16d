"""Whether what a rank is about to send has a NaN in it: `agmm.check_nan`."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch

from agmm import _core, _env
from agmm.errors import AgmmError, InvalidArgument

active = (os.environ.get(_env.CHECK_NAN.name) or _env.CHECK_NAN.default) != "off"
"""Whether anything is to be looked through: what an op asks. A value that cannot be counts as one,
so that the first look refuses it."""

_mode: str | None = None
"""None: the environment says it, which is asked when it is first needed."""

_told: set[tuple[str, str, int]] = set()
_forget: list[Callable[[], None]] = []
_captures_told = False
_lock = threading.Lock()
"""Held while what was said, or what GPUs have still to say, is looked at and changed."""


class _Thread(threading.local):
    is_done = False


_thread = _Thread()

_Call = TypeVar("_Call")


def check_nan(mode: str) -> str:
    """Look for NaNs in what this rank is about to send, in every op of agmm from the next call on.

    A NaN spreads to all ranks with the first collective; here the rank is named that had it first.
    What is looked through is the rank's own part before it goes: ``A_shard`` and its scales, the
    partial products of a matmul + reduce-scatter or all-reduce, the tensor of a collective, and
    what a backward gathers or scatters. Where a CUDA kernel sends products as it computes them,
    they are nowhere to be looked at before, and the operands and their scales are looked through
    instead. What agmm quantises and then sends is looked through before it is quantised; in code
    that `torch.compile` has made, afterwards. What that has made of the backend's own collectives
    is not looked at, nor a call that is captured in a CUDA graph.

    Args:
        mode: "off"; "warn": a line on stderr for each op and tensor that had one, and the call goes
            on; "raise": `AgmmError`, and nothing of that tensor is sent. The other ranks then wait
            for this one until AGMM_TIMEOUT_S, so end the process. The default is AGMM_CHECK_NAN.

    Returns:
        The mode before.

    Raises:
        InvalidArgument: another mode.
    """
    global active, _mode, _captures_told
    if mode not in _env.NAN_MODES:
        raise InvalidArgument(f"mode: found {mode!r}, wanted one of {', '.join(_env.NAN_MODES)}")
    before = _current()
    _say_what_came()
    active, _mode = mode != "off", mode
    with _lock:
        _told.clear()
        _captures_told = False
    for forget in _forget:
        forget()
    return before


def _current() -> str:
    global _mode
    if _mode is None:
        _mode = _env.check_nan()
    return _mode


def on_change(forget: Callable[[], None]) -> None:
    """``forget`` is called when the mode changes: it drops calls that are kept with or without a
    look, so that those without need not ask."""
    _forget.append(forget)


def before(call: _Call, look: Callable[..., None]) -> _Call | Callable[..., Any]:
    """The call, to be kept; while the check is on one that looks first, at the same arguments."""
    if not active:
        return call

    def looking(*arguments: Any) -> Any:
        look(*arguments)
        return call(*arguments)  # type: ignore[operator]  # mypy has named tuples not callable

    return looking


@contextmanager
def done() -> Iterator[None]:
    """Nothing that this thread sends meanwhile is looked through: its origin has been, and what has
    become of it, as bytes or by a scale of all ranks, no longer says which rank had a NaN first."""
    before, _thread.is_done = _thread.is_done, True
    try:
        yield
    finally:
        _thread.is_done = before


def look_through(
    op: str, name: str, tensor: torch.Tensor, rank: int, *, rows: tuple[int, int] | None = None
) -> None:
    """Looks through a tensor before it goes; called only where `active`.

    On CUDA it looks on the current stream, for which the communication waits. "warn" does not wait
    for it: what was found is copied to the host behind it and said with a later call. "raise"
    waits, as nothing could be raised in time otherwise.

    Args:
        op, name: for the message.
        rank: of this process in the group.
        rows: where the tensor is some rows of a larger one: its first, and how many that one has.

    Raises:
        AgmmError: there is a NaN, in mode "raise".
        InvalidArgument: AGMM_CHECK_NAN is none of its values.
    """
    global _captures_told
    mode = _current()
    if mode == "off" or _thread.is_done or not (tensor.is_floating_point() or tensor.is_complex()):
        return
    if tensor.numel() == 0 or tensor.is_meta:
        return
    first_row, all_rows = (0, None) if rows is None else rows
    shape = list(tensor.shape)
    if all_rows is not None:
        shape[0] = all_rows
    first = first_row * (tensor[0].numel() if first_row else 0)
    seen = _Seen(op, name, rank, shape, tensor.dtype, first)
    with torch.no_grad():
        if not tensor.is_cuda:
            _found(seen, int(_first_nan(tensor)), mode)
            return
        if torch.cuda.is_current_stream_capturing():
            with _lock:
                is_new, _captures_told = not _captures_told, True
            if is_new:
                _core.write_line(
                    "agmm: check_nan: what is captured in a CUDA graph is not looked through"
                )
            return
        _say_what_came()
        where = _first_nan(tensor)
        if mode == "raise":
            _found(seen, int(where), mode)
            return
        # The allocator of pinned memory gives none out again before the copy is done.
        on_host = where.to("cpu", non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        with _lock:
            _coming.append((seen, on_host, arrived))


class _Seen(NamedTuple):
    op: str
    name: str
    rank: int
    shape: list[int]
    dtype: torch.dtype
    first: int
    """What the index among all numbers counts from."""

    def __str__(self) -> str:
        return f"{self.shape} {str(self.dtype).removeprefix('torch.')}"


_coming: deque[tuple[_Seen, torch.Tensor, torch.cuda.Event]] = deque()
"""What GPUs were told to look through, in this order."""


def _say_what_came() -> None:
    arrived = []
    with _lock:  # another thread may take the first one between the question and the answer
        while _coming and _coming[0][2].query():
            arrived.append(_coming.popleft())
    for seen, on_host, _ in arrived:
        _found(seen, int(on_host), "warn")


def _first_nan(tensor: torch.Tensor) -> torch.Tensor:
    """The index of the first NaN among all numbers, -1 for none; where the tensor is."""
    if tensor.is_floating_point() and tensor.itemsize == 1:
        tensor = tensor.float()  # torch looks for none in these
    flags = torch.isnan(tensor).reshape(-1)
    return torch.where(flags.any(), flags.to(torch.uint8).argmax(), -1)


def _found(seen: _Seen, at: int, mode: str) -> None:
    if at < 0:
        return
    at += seen.first
    index: list[int] = []
    for size in reversed(seen.shape):
        at, place = divmod(at, size)
        index.insert(0, place)
    if mode == "raise":
        raise AgmmError(
            f"{seen.name}: found a NaN at {index} of {seen}, which rank {seen.rank} was about to "
            f"send in {seen.op}; wanted none (agmm.check_nan)"
        )
    key = seen.op, seen.name, seen.rank
    with _lock:
        is_new = key not in _told
        _told.add(key)
    if is_new:
        _core.write_line(
            f"agmm: rank {seen.rank} sends a NaN in {seen.op}: {seen.name} at {index} of {seen}; "
            "further ones of this op and tensor are not reported"
        )
