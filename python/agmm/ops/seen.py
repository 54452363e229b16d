"""Which calls this process has made, and who served them, for `agmm.status` and `agmm.record`.

Every call that is not kept is noted here. Kept calls go past the flow of the ops and are noted only
while somebody counts; otherwise nothing is added to their way.
"""

from __future__ import annotations

import logging
import math
import multiprocessing.util
import os
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from agmm import _env
from agmm.runtime.calls import Call
from agmm.runtime.packed import Packed4BitWeight
from agmm.runtime.scaling import BLOCK

logger = logging.getLogger("agmm")

MAX_KINDS = 1024
"""How many kinds of calls a process tells apart; calls of further ones are counted together."""

LINE_AFTER = 512
"""The calls of a process before the line in the log: the first steps of a model of usual depth."""


class Kind(NamedTuple):
    """What calls have in common that are counted together."""

    op: str
    m: int
    """The rows of all ranks."""
    n: tuple[int, ...]
    """The columns of each weight; of one where products are summed."""
    k: int
    """The columns of A on a rank, of all products that are summed."""
    dtype: str
    b_layout: str
    return_A: bool
    scaling: str | None
    dim: int
    """The dimension that is gathered or scattered."""
    products: int
    """How many products are summed."""
    world_size: int
    device: torch.device
    activation: str | None
    residual: bool
    by: str
    reason: str | None


class Served(Protocol):
    """What is asked of a call that was served."""

    group: dist.ProcessGroup
    device: torch.device

    @property
    def returns_A(self) -> bool: ...


class Counts:
    """How many calls of each kind were made.

    Args:
        ops: the ops whose calls count; all where None.

    Attributes:
        of: the number of calls of each kind.
        others: how many calls were of kinds beyond `MAX_KINDS`.
    """

    def __init__(self, ops: Container[str] | None = None) -> None:
        self._ops = ops
        self.of: Counter[Kind] = Counter()
        self.others = 0

    def add(self, kind: Kind) -> None:
        if self._ops is not None and kind.op not in self._ops:
            return
        if kind in self.of or len(self.of) < MAX_KINDS:
            self.of[kind] += 1
        else:
            self.others += 1

    def clear(self) -> None:
        self.of.clear()
        self.others = 0


_counts = Counts()
"""The calls since the process began."""
_meanwhile: list[Counts] = []
"""The calls since each `counting` began, which has room for kinds of its own."""
_kinds: dict[Any, Kind] = {}
"""The kinds of calls that come often, by what they are kept under: a kind takes long to find."""
_total = 0
_counting = 0
_told = False
_pid = 0
rank = 0
"""The rank of this process among all, as of its last call."""
_lock = threading.Lock()
_forget: list[Callable[[], None]] = []
_at_end: list[Callable[[], None]] = []


def on_change(forget: Callable[[], None]) -> None:
    """``forget`` is called when counting begins or ends: it drops calls that are kept with or
    without a counter."""
    _forget.append(forget)


def at_end(write: Callable[[], None]) -> None:
    """``write`` is called when a process ends that has noted calls."""
    _at_end.append(write)


def is_counting() -> bool:
    """Whether kept calls are counted, too."""
    return _counting > 0


@contextmanager
def counting(ops: Container[str] | None = None) -> Iterator[Counts]:
    """The calls of ``ops``, or of all, that are made meanwhile; kept ones are counted, too."""
    counts = count_from_now(ops)
    _count(1)
    try:
        yield counts
    finally:
        _meanwhile.remove(counts)
        _count(-1)


def count_from_now(ops: Container[str] | None) -> Counts:
    """The calls of ``ops``, or of all, that this process makes from now on."""
    counts = Counts(ops)
    _meanwhile.append(counts)
    return counts


def _count(step: int) -> None:
    global _counting
    with _lock:
        before, _counting = _counting, _counting + step
        changed = (before == 0) != (_counting == 0)
    if changed:
        for forget in _forget:
            forget()


def counts() -> tuple[dict[Kind, int], int]:
    """How many calls of each kind were noted, and how many of kinds beyond `MAX_KINDS`."""
    with _lock:
        _begin()
        return dict(_counts.of), _counts.others


def served(call: Served, words: Call, by: str, reason: str | None, keep_as: Any = None) -> Kind:
    """Takes note of a call that was served, and by whom; returns what it counts as. Calls that
    share ``keep_as``, where that is not None, are of one kind."""
    global rank
    key = None if keep_as is None else (keep_as, type(call), call.group.size(), by, reason)
    kind = _kinds.get(key)
    if kind is None:
        kind = _kind(call, words, by, reason)
        if key is not None:
            if len(_kinds) >= MAX_KINDS:
                _kinds.clear()
            _kinds[key] = kind
    if dist.is_initialized():
        rank = dist.get_rank()
    _note(kind)
    return kind


def noting(call: Any, kind: Kind) -> Any:
    """The call, to be kept; while somebody counts, or the line in the log is still to come, one
    that is noted each time."""
    if call is None or not (_counting or _awaits_line()):
        return call

    def noted(*operands: Any) -> Any:
        found = call(*operands)
        _note(kind)
        return found

    return noted


def _note(kind: Kind) -> None:
    global _total
    with _lock:
        _begin()
        for counts in (_counts, *_meanwhile):
            counts.add(kind)
        _total += 1
        is_time = _total >= LINE_AFTER
    if is_time and _awaits_line():
        _say()
        if not _counting:
            for forget in _forget:  # calls that are kept from now on are not noted
                forget()


def _begin() -> None:
    """Begins the notes of a process, which may be a fork of one that has some."""
    global _pid, _total, _told
    if _pid == os.getpid():
        return
    for counts in (_counts, *_meanwhile):
        counts.clear()
    _pid, _total, _told = os.getpid(), 0, False
    # A process that multiprocessing has forked calls no function of atexit.
    multiprocessing.util.Finalize(None, _end, exitpriority=0)


def _end() -> None:
    if _counts.of and _awaits_line():
        _say()
    for write in _at_end:
        write()


def _awaits_line() -> bool:
    return not _told and logger.isEnabledFor(logging.INFO)


def _say() -> None:
    global _told
    with _lock:
        if _told:
            return
        _told = True
        by = Counter[str]()
        for kind, count in _counts.of.items():
            by[who(kind)] += count
        reasons = {kind.reason for kind in _counts.of if kind.reason is not None}
        kinds = len(_counts.of)
    parts = ", ".join(f"{count} by {name}" for name, count in by.most_common())
    why = f" ({'; '.join(sorted(reasons))})" if reasons else ""
    logger.info("calls of %d kinds so far: %s%s; agmm.status() lists them", kinds, parts, why)


BY_AGMM = ("agmm's kernel", "agmm's CPU backend")
"""What `who` says of calls that agmm computes as a whole."""

_WHO = {
    "kernel": BY_AGMM[0],
    "composed": "agmm's kernel, then torch's ops",
    "gather": "agmm's gather and the library's matmul",
    "portable": "agmm's copies and the library's matmul",
    "torch": "torch's fused op",
    "library": "the group's backend and the library",
    "nobody": "nobody, without elements",
    "dry run": "a dry run",
}


def who(kind: Kind) -> str:
    """Who has served calls of that kind, in words."""
    is_on_cpu = kind.by in ("kernel", "portable") and kind.device.type == "cpu"
    return BY_AGMM[1] if is_on_cpu else _WHO[kind.by]


def _kind(call: Served, words: Call, by: str, reason: str | None) -> Kind:
    given = words.arguments
    As = _listed(next(given[name] for name in _ROWS if name in given))
    # A routing has no weights: the ids stand for them.
    Bs = _listed(given.get("B", given.get("weights", As)))
    world_size = call.group.size()
    is_gather = any(name in given for name in _GATHERED)
    m = math.prod(As[0].shape[:-1])
    columns = tuple(B.N if isinstance(B, Packed4BitWeight) else B.shape[-1] for B in Bs)
    dim = given.get("gather_dim", given.get("scatter_dim", 0)) % As[0].dim()
    return Kind(
        op=words.op,
        m=sum(given.get("tokens_per_rank", [m] * world_size)) if is_gather else m,
        n=columns if is_gather else columns[:1],
        k=sum(A.shape[-1] for A in As),
        dtype=_dtype(As[0], Bs[0]),
        b_layout=_layout(Bs[0]),
        return_A=call.returns_A,
        scaling=_scaling(given, As[0], Bs[0]),
        dim=dim,
        products=len(As),
        world_size=world_size,
        device=call.device,
        activation=given.get("activation"),
        residual="residual" in given,
        by=by,
        reason=reason,
    )


_GATHERED = ("A_shard", "x", "topk_ids")
_ROWS = (*_GATHERED, "A", "y")
"""The arguments of which an op gathers or multiplies the rows."""


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _dtype(A: torch.Tensor, B: Any) -> str:
    """The dtype in which values travel; that of the weight where the op quantises A."""
    if isinstance(B, Packed4BitWeight):
        return f"{A.dtype}_4_bits".removeprefix("torch.")
    return str(B.dtype).removeprefix("torch.")


def _layout(B: Any) -> str:
    if isinstance(B, Packed4BitWeight):
        return "packed"
    return "column" if B.stride(-2) == 1 and B.stride(-1) != 1 else "row"


def _scaling(given: dict[str, Any], A: torch.Tensor, B: Any) -> str | None:
    if given.get("quantize"):
        return str(given["quantize"])
    if given.get("scale_a") is None:
        return None
    scale_a, scale_b = _listed(given["scale_a"])[0], _listed(given["scale_b"])[0]
    if scale_a.numel() == 1 and scale_b.numel() == 1:
        return "tensorwise"
    if scale_a.numel() * A.shape[-1] == A.numel():
        is_by_column = scale_b.numel() == B.shape[1]
        if is_by_column:
            return "rowwise"
    return "block" if scale_b.shape[-1] == -(-B.shape[1] // BLOCK) else "block 1x128"


if os.environ.get(_env.RECORD.name) or os.environ.get(_env.REPORT.name):
    _counting = 1
