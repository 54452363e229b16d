from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from at_hand import RANKS

from agmm import _core
from agmm.testing.ranks import RankPool

HERE = Path(__file__).parent
FAULT_TESTS = "test_faults.py"


def _reason() -> str | None:
    if not _core.cuda_built:
        return "agmm is built without CUDA"
    if not torch.cuda.is_available():
        return "no CUDA GPU"
    if torch.cuda.get_device_capability() != (9, 0):
        return "the GPU is no Hopper (compute capability 9.0)"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if HERE in item.path.parents]
    reason = _reason() if here else None
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish(session: pytest.Session) -> None:
    """With a deliberate fault the ordinary tests would fail, or wait, one after the other."""
    others = [i for i in session.items if HERE in i.path.parents and i.path.name != FAULT_TESTS]
    if _core.fault and others and not session.config.option.collectonly:
        raise pytest.UsageError(
            f"agmm is built with the deliberate fault {_core.fault}: of the GPU tests run "
            f"tests/gpu/{FAULT_TESTS} alone, or reinstall agmm"
        )


@pytest.fixture
def gpu_pool(rank_pools: Callable[..., RankPool]) -> RankPool:
    """Eight ranks at most; smaller world sizes are groups of the last ones."""
    if RANKS < 2:
        pytest.skip("needs 2 GPUs")
    return rank_pools(min(8, RANKS), "cuda")
