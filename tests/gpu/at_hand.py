"""How many ranks the GPU tests can start: one per GPU, or AGMM_TEST_RANKS that share the GPUs.

Ranks that share a GPU are run by it in turns of milliseconds, so every wait is met and nothing is
fast: for the order of things at world sizes that have no machine, not for speed. NCCL refuses such
groups; these ranks talk through gloo.
"""

from __future__ import annotations

import os

import pytest
import torch

from agmm._env import SHARED_GPUS

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
_given = os.environ.get("AGMM_TEST_RANKS") or str(GPUS)
if not _given.isdecimal():
    raise pytest.UsageError(f"AGMM_TEST_RANKS: found {_given!r}, wanted a number of ranks")
RANKS = int(_given) if GPUS else 0
if RANKS > GPUS:
    os.environ[SHARED_GPUS.name] = "on"
    # torch's rendezvous refuses them otherwise.
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"

needs_nccl = pytest.mark.skipif(
    RANKS > GPUS,
    reason="torch's functional collectives of GPU tensors end the process with gloo (torch 2.11)",
)
needs_two = pytest.mark.skipif(RANKS < 2, reason="needs 2 GPUs")


def world_sizes(*sizes: int) -> list[object]:
    """Parameters; those with more ranks than can be started are skipped."""
    return [
        pytest.param(
            size,
            marks=pytest.mark.skipif(max(size, 2) > RANKS, reason=f"needs {max(size, 2)} GPUs"),
        )
        for size in sizes
    ]
