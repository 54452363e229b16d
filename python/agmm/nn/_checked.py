"""What a layer refuses, in words that name the layer and the argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import Shard

from agmm.errors import InvalidArgument
from agmm.nn._held import OperandPlan
from agmm.nn._parameters import ShardedModule
from agmm.nn.fp8_recipe import Fp8Recipe
from agmm.ops.checks import check_operand
from agmm.runtime.scaling import K_MULTIPLE


class CheckedLinear(ShardedModule):
    """The checks of the layers that hold this rank's shard of a weight."""

    in_features: int
    fp8: Fp8Recipe | None
    _plan: OperandPlan

    def _check_operand(self, x: Any) -> None:
        """Before the parameters are looked at."""
        check_operand(f"{type(self).__name__}: x", x)

    def _check_weights(self, weights: Sequence[torch.Tensor]) -> None:
        """Checks that they are this rank's shards, transposed: a parametrization may make them
        others."""
        placement, rows = self.held["weight"].placement, self._plan.rows
        features = self.in_features // (self._world_size if placement == Shard(1) else 1)
        for weight, wanted in zip(weights, rows if len(weights) > 1 else [sum(rows)], strict=True):
            if weight.shape[0] != features or weight.shape[1] != wanted:
                raise InvalidArgument(
                    f"{type(self).__name__}: weight: found {list(weight.t().shape)} on this rank, "
                    f"wanted {[wanted, features]} ({placement} over the {self._world_size} ranks)"
                )

    def _check_input(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        features = weight.shape[0]
        if x.dim() < 2:
            self._refuse_input(f"{x.dim()} dimensions", "at least 2, rows and features")
        if x.shape[-1] != features:
            self._refuse_input(f"{x.shape[-1]} features in its last dimension", f"{features}")
        if x.device != weight.device:
            self._refuse_input(f"device {x.device}", f"{weight.device} as the layer's weight")
        if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            self._refuse_input(f"dtype {x.dtype}", f"{weight.dtype} as the layer's weight")

    def _refuse_input(self, found: str, wanted: str) -> NoReturn:
        raise InvalidArgument(f"{type(self).__name__}: x: found {found}, wanted {wanted}")

    def _check_divides(self, name: str, size: int) -> None:
        if size % self._world_size:
            raise InvalidArgument(
                f"{type(self).__name__}: {name}: found {size}, wanted a multiple of "
                f"{self._world_size} ranks"
            )

    def _check_fp8_size(self, name: str, size: int, *, ranks: int) -> None:
        if self.fp8 is not None and size % (ranks * K_MULTIPLE):
            raise InvalidArgument(
                f"{type(self).__name__}: {name}: found {size} with fp8, wanted a multiple of "
                f"{K_MULTIPLE}" + (f" on each of {ranks} ranks" if ranks > 1 else "")
            )
