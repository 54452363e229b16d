"""Fixtures for all tests: pools of rank processes, which are slow to start and so are shared, a
group of one process, and a compiler that remembers nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import compiles
import pytest
import torch
import torch.distributed as dist

from agmm.ops import seen
from agmm.planning import built_kernels
from agmm.testing import ranks
from agmm.testing.ranks import RankPool

# A shell that starts the tests in the background has SIGINT ignored; the processes that the tests
# of Ctrl-C start must not.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A developer's own tables must not steer the tests.
os.environ.setdefault("AGMM_CACHE", "off")

# Tests make more kinds of calls in a process than programs do.
seen.MAX_KINDS = 1 << 20

# What some ranks would import anew: seconds for each.
ranks.PRELOADED += [
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
]
# Else Inductor starts processes in every rank that import torch: one to compile in, and one for
# each kind of vector instructions, to try what a compiler makes of it. No test depends on that.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")


def _is_skipped(item: pytest.Item) -> bool:
    return any(bool(mark.args and mark.args[0]) for mark in item.iter_markers("skipif"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("compiles") is not None)


def pytest_configure(config: pytest.Config) -> None:
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        compiles.share(Path(worker["compiles"]), worker["workercount"])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """A hook of pytest-xdist, in the process that starts the others."""
    node.workerinput["compiles"] = str(compiles.open_folder())


def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.option.collectonly:
        wanted = [item for item in session.items if not _is_skipped(item)]
        marks = (mark for item in wanted for mark in item.iter_markers("compiles"))
        compiles.begin(job for mark in marks for job in mark.args)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    shared = hasattr(session.config, "workerinput")
    if shared and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        compiles.finish()


def pytest_unconfigure(config: pytest.Config) -> None:
    compiles.close()
    if not hasattr(config, "workerinput"):
        compiles.remove_folder()


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[Callable[..., RankPool]]:
    """`rank_pools(world_size, device="cpu")`: the session's pool of that kind, in working order."""
    pools: dict[tuple[int, str], RankPool] = {}

    def get(world_size: int, device: str = "cpu") -> RankPool:
        pool = pools.get((world_size, device))
        if pool is None or not pool.alive:
            if pool is not None:
                pool.close()
            pool = pools[world_size, device] = RankPool(world_size, device)
        return pool

    yield get
    for pool in pools.values():
        pool.close()


@pytest.fixture
def pool(rank_pools: Callable[..., RankPool]) -> RankPool:
    """Five CPU ranks; smaller world sizes are groups of the last ones (see rank_work.group_of)."""
    return rank_pools(5)


@pytest.fixture
def group() -> Iterator[str]:
    """The name of the default group, of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD.group_name
    finally:
        dist.destroy_process_group()


@pytest.fixture
def default_kernels_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are those of a default build, as where none has kernels, whichever this build is."""
    monkeypatch.setattr(built_kernels, "kernels_of", lambda op, name: ())


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()
