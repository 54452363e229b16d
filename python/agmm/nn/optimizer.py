"""What an optimizer is given of a model of which some parameters are DTensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def parameter_groups(
    module_or_parameters: torch.nn.Module | Iterable[torch.Tensor],
) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: plain parameters, and the DTensors of each mesh.

    Optimizers of torch update the parameters of a group in one step (``foreach``, their default on
    GPUs, and ``fused``), which takes no plain tensors beside DTensors, nor DTensors of several
    meshes.

    Args:
        module_or_parameters: the module, or those of its parameters that are to be trained.

    Returns:
        ``{"params": [...]}`` for each kind that there is, in the order of their first parameters;
        one that several modules share stands there once.
    """
    parameters = module_or_parameters
    if isinstance(parameters, torch.nn.Module):
        parameters = parameters.parameters()
    groups: dict[DeviceMesh | None, dict[int, torch.Tensor]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, {})[id(parameter)] = parameter
    return [{"params": list(group.values())} for group in groups.values()]
