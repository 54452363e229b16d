"""The table of promises of tests/api/test_contract.py, on GPUs and with captures."""

from __future__ import annotations

from collections.abc import Callable

import contract_work as work
import pytest
from at_hand import RANKS, needs_nccl, needs_two
from test_contract import BY_COPIES, Refused, not_refused, unexpected

from agmm.testing.ranks import RankPool

REFUSED = {
    "strict": (
        (
            "scaled_matmul|gather_scaled",
            r"out_dtype: found torch\.float8_e4m3fn, wanted torch\.bfloat16; strict",
        ),
        (
            "scaled_matmul_reduce_scatter",
            r"A: found 2 products, wanted at most 1 of fp8 in one kernel; strict",
        ),
    )
}
"""The calls that a feature refuses on GPUs, besides those that it refuses on every device."""


@needs_two
@needs_nccl  # the unfused path is what the calls are compared with
@pytest.mark.parametrize(("feature", "run"), work.RUNS)
def test_every_op_keeps_its_promise(
    rank_pools: Callable[..., RankPool], feature: str, run: int
) -> None:
    pool = rank_pools(min(4, RANKS), "cuda")
    for found in pool.run(work.broken, feature, run, "cuda"):
        assert unexpected(found, feature, REFUSED) == []
        assert not_refused(found, feature, REFUSED) == []


ON_GPUS: Refused = {
    "strict": (
        *BY_COPIES["strict"],
        ("scaled.*fp8|out_dtype=.*float8", r"out_dtype: found .*; strict"),
    )
}
"""What a feature refuses on GPUs where all calls name the portable path."""
LEFT_OUT = ("NaN look", "no rows")
"""The features that are not the path's."""


@needs_two
@needs_nccl
@pytest.mark.parametrize("hosts", ["", "abab"])
@pytest.mark.parametrize(
    "feature", ["right", "strict", "kept", "compiled", "activation", "captured"]
)
def test_the_portable_path_keeps_its_promise(
    rank_pools: Callable[..., RankPool], feature: str, hosts: str
) -> None:
    """By copies, and by messages between two hosts, which are told apart by their names alone."""
    pool = rank_pools(min(4, RANKS), "cuda")
    for found in pool.run(work.broken, feature, None, "cuda", hosts):
        assert unexpected(found, feature, ON_GPUS) == []
