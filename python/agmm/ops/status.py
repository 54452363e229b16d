"""`agmm.status`: who serves the calls of this process, and why."""

from __future__ import annotations

import os
from dataclasses import dataclass

from agmm import _env
from agmm.ops import recordings, seen


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

    @property
    def what(self) -> str:
        """The op, with what it does behind the product."""
        behind = [self.activation or "", "residual" * self.residual]
        return " + ".join([self.op, *filter(None, behind)])

    @property
    def is_by_agmm(self) -> bool:
        """Whether agmm's kernel or CPU backend has computed them."""
        return self.by in seen.BY_AGMM


@dataclass(frozen=True)
class Status:
    """Who has served the calls of this process; as a string a table."""

    calls: tuple[Served, ...]
    others: int
    """How many calls were of further kinds, which are not told apart."""
    counts_all: bool
    """Whether calls that were made again in a short way are counted, too."""

    def __str__(self) -> str:
        if not self.calls:
            return "agmm has served no calls in this process"
        rows = [("op", "m x n x k", "dtype", "ranks", "calls", "by", "why")]
        rows += [
            (
                one.what,
                f"{one.m} x {'+'.join(map(str, one.n))} x {one.k}",
                one.dtype,
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
                "calls that are made again in a short way are not counted: "
                f"{_env.REPORT.name}, {_env.RECORD.name} or agmm.record counts them"
            )
        return "\n".join(lines)


def status() -> Status:
    """Who has served the calls of the ops in this process, and why, by op and shape.

    Shows whether agmm is on: which calls its kernels or its CPU backend computed, which only its
    gather, and which were left to torch or to the group's backend. ``print(agmm.status())`` prints
    a table. Without ``AGMM_REPORT``, ``AGMM_RECORD`` or `record` every kind of call is there, but
    calls that are made again in a short way are not counted. Calls in a CUDA graph count when they
    are captured. The functions of `agmm.collectives` and what `agmm.integrations` leave
    to torch are not noted. With logging of level INFO, the logger ``agmm`` says the sums in one
    line after the first steps (512 calls), or at the end.
    """
    found, others = seen.counts()
    calls = [
        Served(
            *(*kind[:5], kind.world_size, seen.who(kind), kind.reason, count),
            *(kind.activation, kind.residual),
        )
        for kind, count in sorted(found.items(), key=lambda pair: -pair[1])
    ]
    return Status(tuple(calls), others, seen.is_counting())


def _write_report() -> None:
    wanted = os.environ.get(_env.REPORT.name)
    if wanted:
        recordings.write_at_end(_env.REPORT.name, wanted, f"{status()}\n")


seen.at_end(_write_report)
