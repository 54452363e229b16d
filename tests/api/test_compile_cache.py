"""What torch.compile keeps on disk serves groups of the size it was compiled for only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import compile_cache_work
import pytest

from agmm.testing.ranks import RankPool

KINDS = ["gather", "gather with gradients", "sums", "layers"]
NATIVE = ["native", "native scatter"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], RankPool]]:
    """A pool of new processes, which share one folder of compiled graphs. The graphs' own checks
    of sizes are off (see the work), so that a graph of another world size is found by what it
    returns."""
    folder: Path = tmp_path_factory.mktemp("inductor")
    env = {"TORCHINDUCTOR_CACHE_DIR": str(folder)}
    pools: list[RankPool] = []

    def start(world_size: int) -> RankPool:
        for pool in pools:
            pool.close()
        pools.append(RankPool(world_size, env=env))
        return pools[-1]

    yield start
    for pool in pools:
        pool.close()


def test_graphs_of_two_ranks_and_of_three(run: Callable[[int], RankPool]) -> None:
    faults = []
    for world_size, is_second in ((2, False), (2, True), (3, False)):
        pool = run(world_size)
        for kind in KINDS + NATIVE:
            for fault, shape, hits in pool.run(compile_cache_work.compiled, kind):
                if kind in NATIVE and world_size == 3:
                    # Its schema has no world size, and so the key of what is kept has none.
                    wanted = "InvalidArgument: world_size: found 2 in the call, wanted 3, the size"
                    faults += [] if fault.startswith(wanted) else [f"{kind}: {fault} {shape}"]
                elif fault or (is_second and hits == 0):
                    faults.append(f"{kind}, {world_size} ranks: {fault}, {shape}, {hits} hits")
    assert faults == []
