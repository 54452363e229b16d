"""What the commands take of a recording: its calls, by the runs that can measure them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from agmm.bench.presets import ShapeOptions
from agmm.errors import InvalidArgument
from agmm.ops import recordings
from agmm.ops.pipeline import KERNEL
from agmm.ops.recordings import RecordedCall
from agmm.planning.problems import ALL_GATHER_MATMUL, MATMUL_ALL_REDUCE
from agmm.planning.shapes import Shape


class Run(NamedTuple):
    """Calls that are measured together, since they differ in their shapes alone."""

    op: str
    dtype: str
    scaling: str | None
    b_layout: str
    return_A: bool

    def __str__(self) -> str:
        scales = f" with {self.scaling} scales" if self.scaling else ""
        returned = ", A returned" if self.return_A else ""
        return f"{self.op}, {self.dtype}{scales}, B by {self.b_layout}{returned}"


class Wanted(NamedTuple):
    """The calls of a recording that a command is to take; None: all."""

    op: str | None = None
    dtype: str | None = None
    scaling: str | None = None

    def has(self, call: RecordedCall) -> bool:
        kind = call.kind
        pairs = (
            (self.op, call.planned_op),
            (self.dtype, kind.dtype),
            (self.scaling, kind.scaling),
        )
        return all(one is None or one == other for one, other in pairs)


def read(shapes: ShapeOptions, wanted: Wanted) -> list[RecordedCall] | None:
    """The calls of the file that the options name, where it is a recording, else None.

    Raises:
        InvalidArgument: it cannot be read, has no such call, or shapes are named otherwise, too.
    """
    if shapes.file is None:
        return None
    try:
        is_one = recordings.is_recording(shapes.file.read_text())
    except (OSError, UnicodeDecodeError):
        return None  # whoever reads shapes says so
    if not is_one:
        return None
    shapes.check_one()
    found = [call for call in recordings.read(shapes.file) if wanted.has(call)]
    if not found:
        raise InvalidArgument(f"file: found no such calls in {shapes.file}, wanted some")
    return found


def ranks_of(calls: Sequence[RecordedCall], given: int | None) -> int:
    """How many ranks a run of these calls has: as many as are given, or as all of them have.

    Raises:
        InvalidArgument: the calls have several numbers of ranks, and none is given.
    """
    if given is not None:
        return given
    found = sorted({call.kind.world_size for call in calls})
    if len(found) > 1:
        numbers = ", ".join(map(str, found))
        raise InvalidArgument(f"tp: found none with calls of {numbers} ranks, wanted one of these")
    return found[0]


def runs(
    calls: Sequence[RecordedCall], ranks: int, *, each_weight: bool
) -> tuple[dict[Run, list[Shape]], list[str]]:
    """The calls that can be measured with so many ranks, each shape once, and a line for each of
    the others.

    Args:
        each_weight: of calls with several weights also the shape of each, which has a kernel of its
            own.
    """
    found: dict[Run, dict[Shape, None]] = {}
    left_out = []
    for call in calls:
        reason = _why_not(call, ranks)
        if reason is not None:
            left_out.append(f"left out {described(call)}: {reason}")
            continue
        kind = call.kind
        run = Run(call.planned_op, kind.dtype, kind.scaling, kind.b_layout, kind.return_A)
        columns = [sum(kind.n), *(kind.n if each_weight else ())]
        found.setdefault(run, {}).update({Shape(kind.m, n, kind.k): None for n in columns})
    return {run: list(shapes) for run, shapes in found.items()}, left_out


def described(call: RecordedCall) -> str:
    """The call in a few words."""
    kind = call.kind
    columns = "+".join(map(str, kind.n))
    return f"{kind.op} {kind.m}x{columns}x{kind.k} {kind.dtype}"


def _why_not(call: RecordedCall, ranks: int) -> str | None:
    kind = call.kind
    if kind.world_size != ranks:
        return f"call: found {kind.world_size} ranks, this run has {ranks}"
    if call.planned_op == MATMUL_ALL_REDUCE and kind.scaling is not None:
        return "call: nothing measures this op with scales"
    if 0 in (kind.m, sum(kind.n), kind.k):
        return "call: no elements"
    if kind.b_layout == "packed":
        return "call: agmm has one way for weights of 4 bits"
    if kind.activation is not None and kind.by == KERNEL:
        return "call: AGMM_LEARN=on alone tries plans of kernels with an activation"
    if kind.op == ALL_GATHER_MATMUL and kind.dim != 0:
        return f"call: dimension {kind.dim} is gathered, for which there are no plans"
    return None
