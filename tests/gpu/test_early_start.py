"""A matmul that may be set up before the kernel ahead has ended, which is late with its work."""

from __future__ import annotations

from collections.abc import Iterator

import early_start_work
import pytest
import streamed_sum_work

from agmm.testing.ranks import RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """A process of its own: the variable is read once."""
    with RankPool(1, "cuda", env={"AGMM_EARLY_START": "on"}) as pool:
        yield pool


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("what", ["a", "b", "bias", "out"])
def test_waits_for_the_kernel_ahead(pool: RankPool, what: str, captured: bool) -> None:
    """The kernel ahead writes an operand, or reads what lay in the memory of the result."""
    pool.run(early_start_work.behind_a_late_kernel, what, captured)


@pytest.fixture(scope="module")
def pool_of_weights() -> Iterator[RankPool]:
    with RankPool(1, "cuda", env={"AGMM_EARLY_START": "weights"}) as pool:
        yield pool


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("what", ["a", "bias", "out"])
def test_only_weights_are_ahead(pool_of_weights: RankPool, what: str, captured: bool) -> None:
    """Streaming kernels load B before the kernel ahead has ended, and nothing else."""
    pool_of_weights.run(early_start_work.behind_a_late_kernel, what, captured, True)


@pytest.mark.skipif(not streamed_sum_work.KERNELS, reason="found no streaming kernel, wanted one")
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
def test_sums_of_weights_that_are_ahead(pool_of_weights: RankPool, captured: bool) -> None:
    """The kernel that sums over the ranks loads B before the kernel ahead has ended, and neither
    loads A nor sends before."""
    pool_of_weights.run(streamed_sum_work.behind_a_late_kernel, captured)
