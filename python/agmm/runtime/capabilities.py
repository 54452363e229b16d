"""What a GPU has to be for each of the things that agmm does there.

What GPUs can do to each other is asked where they are known: peer memory in `sharing`, native
atomics over links in `links` and `group_gpus`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from agmm import _core
from agmm.errors import AgmmError

_Version = tuple[int, int]
"""A compute capability: the major and the minor number."""


@dataclass(frozen=True, eq=False)
class Feature:
    """Something that agmm does on GPUs of some compute capabilities."""

    name: str
    """What a refusal calls it."""
    least: _Version
    most: _Version | None = None
    """None: later GPUs do it too."""

    @property
    def wanted(self) -> str:
        """The compute capabilities, in words."""
        least = _words(self.least)
        if self.most is None:
            return f"at least {least}"
        return least if self.most == self.least else f"{least} to {_words(self.most)}"


_KERNELS_OF_MATMULS = divmod(_core.CAPABILITY, 10)
_OTHER_KERNELS = divmod(_core.LEAST_CAPABILITY, 10)

MATMULS = Feature("matmuls", _KERNELS_OF_MATMULS, _KERNELS_OF_MATMULS)
"""Their kernels are compiled for one architecture: they use its TMA, clusters and WGMMA."""
COLLECTIVES = Feature("collectives", _OTHER_KERNELS)
QUANTISERS = Feature("quantisers", _OTHER_KERNELS)
GRADIENTS = Feature("gradients of activations", _OTHER_KERNELS)
ROUTING = Feature("routing", _OTHER_KERNELS)
FEATURES = (MATMULS, COLLECTIVES, QUANTISERS, GRADIENTS, ROUTING)


def _words(version: _Version) -> str:
    return f"{version[0]}.{version[1]}"


@cache
def of(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU; remembered, since each call asks."""
    return torch.cuda.get_device_capability(device)


@cache
def why_not(feature: Feature, device: torch.device) -> str | None:
    """The reason why agmm does not do that on this device, or None."""
    if not _core.cuda_built:
        return (
            f"device: found {device}, wanted cpu: this build of agmm has no CUDA kernels "
            "(AGMM_CUDA=ON builds them)"
        )
    found = of(device)
    if found < feature.least or (feature.most is not None and found > feature.most):
        return (
            f"device: found {device} of compute capability {_words(found)}, wanted "
            f"{feature.wanted} for agmm's {feature.name}"
        )
    return None


def by_feature(told: Sequence[str]) -> list[tuple[str, ...]]:
    """The reasons of all ranks, feature by feature.

    Args:
        told: what each rank says of `FEATURES`, as JSON.

    Raises:
        AgmmError: the ranks' builds know several numbers of features.
    """
    by_rank = [json.loads(one) for one in told]
    counts = [len(reasons) for reasons in by_rank]
    if len(set(counts)) > 1:
        raise AgmmError(
            f"build of agmm: found ranks whose builds know {counts} features, wanted the same "
            "build on all ranks"
        )
    return list(zip(*by_rank, strict=True))
