"""Whole weights into sharded modules and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from agmm.errors import InvalidArgument
from agmm.nn._held import Held, local_shard, local_values
from agmm.nn._parameters import ShardedModule
from agmm.nn.expert_style import unpacked_by_style
from agmm.nn.packed import UnpackedLinear
from agmm.runtime.backends import whole_of


def _held_by(module: torch.nn.Module) -> dict[str, Held]:
    """The parameters of a whole module that others of this one hold, by name."""
    if isinstance(module, (ShardedModule, UnpackedLinear)):
        return module.held
    return unpacked_by_style(module)


def _whole_names(module: torch.nn.Module) -> dict[str, tuple[Held | None, list[torch.Tensor]]]:
    """By the name in the whole module: the tensors of the state dict that hold it, and how."""
    held_by_piece: dict[str, tuple[str, Held, torch.nn.Module]] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        for name, held in _held_by(owner).items():
            for piece in held.names:
                held_by_piece[start + piece] = start + name, held, owner
    found: dict[str, tuple[Held | None, list[torch.Tensor]]] = {}
    # The dict holds the parameters themselves: what an operator makes of one may name the mesh of
    # an earlier, equal group.
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            if name not in held_by_piece:
                found[name] = None, [tensor]
                continue
            whole, held, owner = held_by_piece[name]
            if isinstance(owner, ShardedModule):
                tensor = owner.as_dtensor(tensor, held)
            found.setdefault(whole, (held, []))[1].append(tensor)
    return found


@torch.no_grad()
def full_state_dict(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of the whole, unsharded module, on every rank. Collective.

    Under the names of the same module with ``torch.nn.Linear`` for agmm's linear layers and for
    `UnpackedLinear`. DTensors are
    gathered, those of FSDP2 too; the rest is taken from this rank.

    Raises:
        InvalidArgument: the ranks' group has been destroyed, or its backend takes no tensors of
            this device.
    """
    found = {}
    for name, (held, tensors) in _whole_names(module).items():
        wholes = [whole_of(t) if isinstance(t, DTensor) else t for t in tensors]
        found[name] = wholes[0].clone() if held is None else held.join(wholes).clone()
    return found


@torch.no_grad()
def load_full_state_dict(module: torch.nn.Module, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Copy the state dict of the whole module into a sharded one; each rank takes its shards.

    ``state_dict`` is that of the same module with ``torch.nn.Linear`` for agmm's linear layers and
    for `UnpackedLinear`. A layer with several outputs has one weight, those of its outputs one
    below the other. Every rank gives the same dict. Nothing is copied where an error is raised.

    Raises:
        InvalidArgument: a name is missing or unknown, a value is no tensor with values or has not
            the shape of the whole, or the module has no memory yet (device "meta").
    """
    targets = _whole_names(module)
    for name, (held, tensors) in targets.items():
        wanted = tuple(tensors[0].shape) if held is None else held.shape(tensors)
        value = state_dict.get(name)
        if value is None:
            raise InvalidArgument(f"state_dict: found no {name!r}, wanted one of shape {wanted}")
        if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or value.is_meta:
            kind = "a tensor on meta" if type(value) is torch.Tensor else type(value).__name__
            raise InvalidArgument(f"state_dict: found {kind} as {name!r}, wanted the whole tensor")
        if tuple(value.shape) != wanted:
            raise InvalidArgument(
                f"state_dict: found {name!r} of shape {tuple(value.shape)}, wanted {wanted}"
            )
        if any(tensor.is_meta for tensor in tensors):
            raise InvalidArgument(f"module: found {name!r} on meta, wanted memory (to_empty)")
    unknown = sorted(set(state_dict) - set(targets))
    if unknown:
        raise InvalidArgument(f"state_dict: found {unknown[0]!r}, wanted no such name")
    for name, (held, tensors) in targets.items():
        value = state_dict[name]
        wholes = [value] if held is None else held.split(value).values()
        for tensor, whole in zip(tensors, wholes, strict=True):
            local_values(tensor).copy_(local_shard(whole, tensor))
