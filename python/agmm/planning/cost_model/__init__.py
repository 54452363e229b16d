"""The cost model: what a call should cost, in a few lines. It is pure Python and needs no GPU and
no torch.

Fused: tiles run in waves over the multiprocessors, each for the time that its kernel needs per
tile, in the order in which the persistent kernel takes them; the chunks of the ring come one after
the other, and no tile starts before its chunk has arrived; memory traffic is longer than that with
few rows. Unfused: a latency, the bytes over the rate of the collective, and the matmul alone. The
matmul alone: arithmetic at the library's rate, or a latency and the memory traffic where that is
longer. A matmul that computes for long loses its clock.

The constants of a GPU stand in ``tables/<gpu>.json``, with where they come from; operands of other
kinds than 16 bits have some of their own there. `matmul` serves every op, `gather` the fused
all-gather -> matmul, `scatter` the fused matmul -> reduce-scatter, `libraries` the calls that
agmm's replace, `collectives` those without a matmul.
"""

from __future__ import annotations

from agmm.planning.cost_model.collectives import (
    STEADY_GATHER_BYTES,
    before_kernel_us,
    behind_gather,
    choice_margin,
    gathered_bytes,
    gathered_margin,
    gathered_us,
    least_behind_us,
    margin_of,
    streamed_gather_us,
    streamed_scatter_us,
    why_no_streamed_scatter,
    why_not_gathered,
)
from agmm.planning.cost_model.gather import (
    At,
    arrival_us,
    clusters,
    free_sms,
    fused_us,
    push_rate_gb_per_s,
    sm_push_us,
    straddles,
)
from agmm.planning.cost_model.gpu_constants import (
    ELEMENT_BYTES,
    Constants,
    constants,
    constants_for,
    default_kernels,
    known_gpus,
)
from agmm.planning.cost_model.libraries import (
    all_gather_us,
    fused_matmul_reduce_scatter_us,
    is_gather_by_copies,
    is_reduce_scatter_fused,
    matmul_reduce_scatter_us,
    unfused_us,
)
from agmm.planning.cost_model.matmul import (
    Load,
    Tiling,
    arithmetic_us,
    clusters_at_once,
    is_b_in_l2,
    matmul_memory_us,
    matmul_us,
    pushed_us,
    roof_us,
    roofline_us,
    sms_of,
)
from agmm.planning.cost_model.scatter import (
    lagged_all_reduce_us,
    matmul_all_reduce_us,
    scatter_all_reduce_us,
    scatter_blocks,
    scatter_tiles,
    tile_push_scatter_us,
)

__all__ = [
    "ELEMENT_BYTES",
    "STEADY_GATHER_BYTES",
    "At",
    "Constants",
    "Load",
    "Tiling",
    "all_gather_us",
    "arithmetic_us",
    "arrival_us",
    "before_kernel_us",
    "behind_gather",
    "choice_margin",
    "clusters",
    "clusters_at_once",
    "constants",
    "constants_for",
    "default_kernels",
    "free_sms",
    "fused_matmul_reduce_scatter_us",
    "fused_us",
    "gathered_bytes",
    "gathered_margin",
    "gathered_us",
    "is_b_in_l2",
    "is_gather_by_copies",
    "is_reduce_scatter_fused",
    "known_gpus",
    "lagged_all_reduce_us",
    "least_behind_us",
    "margin_of",
    "matmul_all_reduce_us",
    "matmul_memory_us",
    "matmul_reduce_scatter_us",
    "matmul_us",
    "push_rate_gb_per_s",
    "pushed_us",
    "roof_us",
    "roofline_us",
    "scatter_all_reduce_us",
    "scatter_blocks",
    "scatter_tiles",
    "sm_push_us",
    "sms_of",
    "straddles",
    "streamed_gather_us",
    "streamed_scatter_us",
    "tile_push_scatter_us",
    "unfused_us",
    "why_no_streamed_scatter",
    "why_not_gathered",
]
