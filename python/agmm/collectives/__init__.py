"""All-gather, reduce-scatter and all-reduce on agmm's symmetric memory."""

from __future__ import annotations

from agmm.collectives.functions import all_gather, all_reduce, reduce_scatter
from agmm.collectives.norm import all_reduce_rms_norm
from agmm.collectives.work import Work

__all__ = ["Work", "all_gather", "all_reduce", "all_reduce_rms_norm", "reduce_scatter"]
