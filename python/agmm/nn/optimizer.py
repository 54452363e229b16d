"""What an optimizer is given of a model of which some parameters are DTensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor


def parameter_groups(
    module_or_parameters: torch.nn.Module | Iterable[torch.Tensor],
) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: DTensors, and plain parameters.

    torch's optimizers update all parameters of a group in one step (``foreach``, their default on
    GPUs, and ``fused``), which takes no plain tensors beside DTensors.

    Args:
        module_or_parameters: the module, or those of its parameters that are to be trained.

    Returns:
        ``{"params": [...]}`` for each of the two kinds that there is; a parameter that several
        modules share stands there once.
    """
    parameters = module_or_parameters
    if isinstance(parameters, torch.nn.Module):
        parameters = parameters.parameters()
    each_once = {id(parameter): parameter for parameter in parameters}.values()
    kinds = (
        [parameter for parameter in each_once if isinstance(parameter, DTensor) is of_kind]
        for of_kind in (True, False)
    )
    return [{"params": kind} for kind in kinds if kind]
