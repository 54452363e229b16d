"""Whole weights into sharded modules and back, and the gradients of what is not sharded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from agmm._collectives import group_of, name_of
from agmm.errors import InvalidArgument
from agmm.nn.linear import ShardedLinear, Sharding


def _owners(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, ShardedLinear | None]]:
    """The tensors of the state dict by name, with the layer that holds only a part of each."""
    for name, tensor in module.state_dict().items():
        if not isinstance(tensor, torch.Tensor):
            continue
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        is_part = isinstance(owner, ShardedLinear) and leaf in owner.shardings
        yield name, tensor, owner if is_part and isinstance(owner, ShardedLinear) else None


def _sharding(owner: ShardedLinear, name: str) -> Sharding:
    return owner.shardings[name.rpartition(".")[2]]


@torch.no_grad()
def full_state_dict(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of the whole, unsharded module, on every rank. Collective.

    What agmm's layers and DTensors hold in parts is gathered; the rest is taken from this rank.
    """
    found = {}
    for name, tensor, owner in _owners(module):
        if isinstance(tensor, DTensor):
            found[name] = tensor.full_tensor().clone()
        elif owner is None:
            found[name] = tensor.clone()
        else:
            parts = [torch.empty_like(tensor) for _ in range(owner.world_size)]
            dist.all_gather(parts, tensor.contiguous(), group=group_of(owner.group_name))
            found[name] = _sharding(owner, name).join(parts)
    return found


@torch.no_grad()
def load_full_state_dict(module: torch.nn.Module, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Copy the state dict of the whole module into a sharded one; each rank takes its parts.

    The dict is that of the same module with ``torch.nn.Linear`` for agmm's layers. A layer with
    several outputs has one weight, those of its outputs one below the other. Every rank gives the
    same dict. Nothing is copied where an error is raised.

    Raises:
        InvalidArgument: a name is missing or unknown, or a shape is not that of the whole.
    """
    targets = list(_owners(module))
    for name, tensor, owner in targets:
        wanted = tuple(tensor.shape)  # a DTensor's is that of the whole
        if owner is not None:
            wanted = _sharding(owner, name).full_shape(tensor)
        if name not in state_dict:
            raise InvalidArgument(f"state_dict: found no {name!r}, wanted one of shape {wanted}")
        shape = tuple(state_dict[name].shape)
        if shape != wanted:
            raise InvalidArgument(f"state_dict: found {name!r} of shape {shape}, wanted {wanted}")
    unknown = sorted(set(state_dict) - {name for name, _, _ in targets})
    if unknown:
        raise InvalidArgument(f"state_dict: found {unknown[0]!r}, wanted no such name")
    for name, tensor, owner in targets:
        full = state_dict[name]
        if isinstance(tensor, DTensor):
            full = full.to(tensor.device, tensor.dtype)
            tensor.copy_(
                distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)
            )
        elif owner is None:
            tensor.copy_(full)
        else:
            tensor.copy_(_sharding(owner, name).part(full, owner.rank, owner.world_size))


@torch.no_grad()
def sum_replicated_gradients(
    module: torch.nn.Module, group: dist.ProcessGroup | str | None = None
) -> None:
    """Add up over the ranks the gradients of parameters that all ranks hold whole. Collective.

    For parameters that were applied to this rank's rows only, as those of norms under sequence
    parallelism. Those of agmm's layers and DTensors are left alone: they are right already.
    Call it after the backward, before the optimizer's step.
    """
    resolved = group_of(name_of(group))
    for owner in module.modules():
        if isinstance(owner, ShardedLinear):
            continue
        for parameter in owner.parameters(recurse=False):
            if parameter.grad is not None and not isinstance(parameter, DTensor):
                dist.all_reduce(parameter.grad, group=resolved)
