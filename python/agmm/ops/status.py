"""`agmm.status`: who serves the calls of this process, and why."""

from __future__ import annotations

import os
from dataclasses import dataclass

from agmm import _env
from agmm.ops import learning, recordings, seen
from agmm.planning.studies import Study


@dataclass(frozen=True)
class Served:
    """Calls that one path has served."""

    op: str
    m: int
    """The rows of all ranks."""
    n: tuple[int, ...]
    """The columns of each weight."""
    k: int
    """The columns of A on a rank."""
    dtype: str
    world_size: int
    by: str
    """Who has served them, in words."""
    reason: str | None
    """Why agmm itself could not; None where it did, or where a plan or the caller has chosen."""
    count: int
    """How many were noted."""
    activation: str | None = None
    """What becomes of the products."""
    residual: bool = False
    """Whether a residual is added."""
    b_layout: str = ""
    """How B lies in memory: ``"column"`` as ``weight.t()`` does, ``"row"`` as the weight itself
    does in a backward, or ``"packed"``."""
    returns_A: bool = False
    """Whether the gathered A is returned, too."""
    scaling: str | None = None
    """The kind of scales; None without."""
    dim: int = 0
    """The dimension that is gathered or scattered."""
    products: int = 1
    """How many products are summed."""
    device: str = ""
    """The type of the device."""

    @property
    def what(self) -> str:
        """The op, with what it does beside and behind the product."""
        behind = [
            self.activation or "",
            "residual" * self.residual,
            "A returned" * self.returns_A,
            f"{self.products} products" * (self.products > 1),
            f"dimension {self.dim}" * (self.dim > 0),
        ]
        return " + ".join([self.op, *filter(None, behind)])

    @property
    def is_by_agmm(self) -> bool:
        """Whether agmm's kernel or CPU backend has computed them."""
        return self.by in seen.BY_AGMM


@dataclass(frozen=True)
class Learnt:
    """What a group has learnt of one kind of calls (`agmm.learn_plans`). Times are the largest over
    the ranks, of the median call."""

    op: str
    m: int
    """The rows of all ranks."""
    n: int
    """The columns of all weights."""
    k: int
    format: str
    world_size: int
    tried: tuple[str, ...]
    """The plans that were tried, by their names, the model's own first."""
    calls: int
    """How many calls the ranks made before they agreed."""
    kept: str | None
    """The plan that is kept; None while the group still learns."""
    us: float | None
    """The time of the plan that is kept, in µs."""
    model_us: float | None
    """The time of the model's plan, in µs."""
    reason: str
    """Why the model's plan stays without a comparison; else empty."""

    def __str__(self) -> str:
        head = f"{self.op} {self.m} x {self.n} x {self.k} {self.format} on {self.world_size} ranks"
        tried = f"{head}: {len(self.tried)} plans tried in {self.calls} calls"
        if self.kept is None:
            return f"{tried}, none kept yet"
        if self.us is None:
            return f"{tried}, the model's stays: {self.reason}"
        model = "" if self.model_us is None else f", {self.model_us:.1f} by the model's"
        return f"{tried}, kept {self.kept}: {self.us:.1f} µs{model} ({self.tried[0]})"


def _learnt(study: Study) -> Learnt:
    problem, times = study.problem, study.times
    sizes = problem.m, problem.n, problem.k
    return Learnt(
        *(problem.op, *sizes, problem.format, problem.world_size),
        tried=tuple(plan.name for plan in study.plans),
        calls=study.calls,
        kept=None if study.kept is None else study.kept.name,
        us=study.us,
        model_us=times[0] if times else None,
        reason=study.reason,
    )


@dataclass(frozen=True)
class Status:
    """Who has served the calls of this process; as a string a table."""

    calls: tuple[Served, ...]
    others: int
    """How many calls were of further kinds, which are not told apart."""
    counts_all: bool
    """Whether the counts are exact; else they are lower bounds."""
    learnt: tuple[Learnt, ...] = ()
    """What groups have learnt about plans, by kind of call, in the order of their first calls."""

    def __str__(self) -> str:
        if not self.calls:
            return "agmm has served no calls in this process"
        rows = [("op", "m x n x k", "B", "dtype", "ranks", "calls", "by", "why")]
        rows += [
            (
                one.what,
                f"{one.m} x {'+'.join(map(str, one.n))} x {one.k}",
                one.b_layout,
                " ".join(filter(None, (one.dtype, one.scaling))),
                str(one.world_size),
                str(one.count),
                one.by,
                one.reason or ("" if one.is_by_agmm else "its plan, or the caller, wants it so"),
            )
            for one in self.calls
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        if self.others:
            lines.append(f"and {self.others} calls of further kinds")
        if not self.counts_all:
            lines.append(
                "the counts are lower bounds, because most repeated calls skip the count; to count "
                f"all, set {_env.REPORT.name} or {_env.RECORD.name}, or use agmm.record"
            )
        if self.learnt:
            lines += ["learnt while running:", *map(str, self.learnt)]
        return "\n".join(lines)


def status() -> Status:
    """Who has served the calls of the ops in this process, and why, by op and shape.

    Shows whether agmm is on: which calls its kernels or its CPU backend computed, which only its
    gather, and which were left to torch or to the group's backend. ``print(agmm.status())`` prints
    a table. Without ``AGMM_REPORT``, ``AGMM_RECORD`` or `record` every kind of call is there, but
    its count is a lower bound: most calls that repeat an earlier one skip the count. Calls of the
    backward are among them: column B says ``row`` there, and ``column`` where a layer's forward
    gives ``weight.t()``. Calls in a CUDA graph count when they are captured. The functions of
    `agmm.collectives` and what `agmm.integrations` leave to torch are not noted. With logging of
    level INFO, the logger ``agmm`` says the sums in one line after the first steps (512 calls), or
    at the end. ``learnt`` has what `agmm.learn_plans` has led to.
    """
    found, others = seen.counts()
    calls = [
        Served(
            *(*kind[:5], kind.world_size, seen.who(kind), kind.reason, count),
            *(kind.activation, kind.residual, kind.b_layout, kind.return_A, kind.scaling),
            *(kind.dim, kind.products, kind.device.type),
        )
        for kind, count in sorted(found.items(), key=lambda pair: -pair[1])
    ]
    learnt = tuple(_learnt(study) for study in learning.reported.values())
    return Status(tuple(calls), others, seen.is_counting(), learnt)


def _write_report() -> None:
    wanted = os.environ.get(_env.REPORT.name)
    if wanted:
        recordings.write_at_end(_env.REPORT.name, wanted, f"{status()}\n")


seen.at_end(_write_report)
