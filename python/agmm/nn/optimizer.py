"""What an optimizer is given of a model of which some parameters are DTensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from agmm.nn._held import local_values


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


_UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


def _unscale(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What ``torch.amp.GradScaler`` does to the gradients of a device and dtype, of which some are
    DTensors.

    torch's own takes no plain tensors beside them and no two meshes, and asks the ranks of the
    first gradient only whether another found a value that is not finite: none where that gradient
    is replicated.
    """
    grads, found_inf, scale = (*args, *kwargs.values())
    operation([local_values(grad) for grad in grads], local_values(found_inf), local_values(scale))
    groups = {}
    for grad in grads:
        if isinstance(grad, DTensor):
            for dim, placement in enumerate(grad.placements):
                if not placement.is_replicate():
                    group = grad.device_mesh.get_group(dim)
                    groups[group.group_name] = group
    for group in groups.values():
        dist.all_reduce(local_values(found_inf), dist.ReduceOp.MAX, group=group)


_handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
_handlers[_UNSCALE] = _unscale
