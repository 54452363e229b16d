"""A module that has this rank's shards of parameters: DTensors that stay what they are while they
are loaded, moved, copied and pickled.

Where one of the whole module's parameters is held by several, their shards lie one below another in
memory, so that one matmul serves them all.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from agmm.errors import InvalidArgument
from agmm.nn._held import (
    Held,
    Joined,
    Place,
    can_be_joined,
    local_values,
    pieces,
    without_offset,
)
from agmm.nn._ranks import Ranks
from agmm.runtime.backends import check_movable, whole_of


class ShardedModule(torch.nn.Module):
    """The ranks that share a module, and its parameters.

    Attributes:
        group_name: of the module's ranks.
        held: the parameters of the whole module by name, and the module's own that hold them.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | str | None,
        device_mesh: DeviceMesh | None,
    ) -> None:
        super().__init__()
        self.ranks = Ranks(group, device_mesh)
        self.group_name = self.ranks.group_name
        self.held: dict[str, Held] = {}
        self._world_size = self.ranks.size
        self._joined: dict[str, Joined] = {}

    def _register(self, name: str, shard: torch.Tensor, placement: Placement) -> None:
        """Makes this rank's shard a parameter."""
        self.register_parameter(name, torch.nn.Parameter(self._over_ranks(shard, placement)))

    @property
    def rank(self) -> int:
        """This process's rank among the layer's."""
        return self.ranks.rank

    @property
    def world_size(self) -> int:
        return self.ranks.size

    def as_dtensor(self, tensor: torch.Tensor, held: Held) -> DTensor:
        """One of the layer's tensors, which may have been replaced by a plain one, as this
        rank's shard of the whole; of the same memory."""
        if isinstance(tensor, DTensor):
            return tensor
        return self._over_ranks(tensor.detach(), held.placement)

    def _over_ranks(
        self, shard: torch.Tensor, placement: Placement, like: DTensor | None = None
    ) -> DTensor:
        """The whole of which this rank holds that shard; over the layer's ranks only, by the mesh
        of another of its DTensors where that is given."""
        shape = list(shard.shape)
        if isinstance(placement, Shard):
            shape[placement.dim] *= self._world_size
        stride = torch.empty(shape, device="meta").stride()
        meta = TensorMeta(torch.Size(shape), stride, shard.dtype)
        mesh = self.ranks.mesh(shard.device) if like is None else like.device_mesh
        spec = DTensorSpec(mesh, (placement,), tensor_meta=meta)
        return DTensor(shard, spec, requires_grad=False)

    def _is_own(self, parameter: Any) -> bool:
        """Whether that is laid over the layer's ranks and no others, as it was made."""
        return isinstance(parameter, DTensor) and parameter.device_mesh.ndim == 1

    @torch.inference_mode(False)
    @torch.no_grad()
    def _settle(self, *, join: bool = True) -> None:
        """Describe the parameters by the present ranks, and bring those of several outputs together
        in memory; without ``join`` only where they are there already."""
        before, self._joined = self._joined, {}
        for name, held in self.held.items():
            parameters: list[Any] = [self._parameters.get(piece) for piece in held.names]
            if not all(self._is_own(parameter) for parameter in parameters):
                continue
            shards = [parameter._local_tensor for parameter in parameters]
            joined = before.get(name)
            if joined is None or joined.filled_by(shards) is None:
                joined = None
                if join and can_be_joined(shards):
                    whole = torch.cat(shards)
                    shards = pieces(whole, shards)
                    joined = Joined(weakref.ref(whole), tuple(Place() for _ in shards))
            for parameter, shard in zip(parameters, shards, strict=True):
                self._place(parameter, shard)
            if joined is not None:
                for parameter, place in zip(parameters, joined.places, strict=True):
                    parameter._agmm_place = place
                self._joined[name] = joined

    def _place(self, parameter: Any, shard: torch.Tensor) -> None:
        """Have a parameter, which stays the same object, hold that shard over the present ranks."""
        spec, mesh = parameter._spec, self.ranks.mesh(shard.device)
        if spec.mesh is not mesh:
            spec = DTensorSpec(mesh, spec.placements, tensor_meta=spec.tensor_meta)
        shard = without_offset(shard)
        if parameter.storage_offset() != shard.storage_offset():
            parameter.data = DTensor(shard, spec, requires_grad=False)
        parameter._local_tensor, parameter._spec = shard, spec

    def _refuse_placement(self, parameter: DTensor) -> NoReturn:
        raise InvalidArgument(
            f"{type(self).__name__}: found a parameter over {parameter.device_mesh}, wanted the "
            "layer's ranks only; after fully_shard call the module that it was given, which "
            "gathers the parameters of those in it"
        )

    def _addresses(self) -> list[int]:
        """Where the shards are in memory."""
        shards = [local_values(parameter) for parameter in self.parameters(recurse=False)]
        return [shard.data_ptr() for shard in shards if type(shard) is torch.Tensor]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = self._addresses()
        super()._apply(fn, recurse)
        self._settle(join=self._addresses() != before)
        return self

    def __copy__(self) -> Any:
        made = self.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_joined": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        found = self.ranks.size
        if found != self._world_size:
            raise InvalidArgument(
                f"group: found {self.group_name!r} with {found} ranks, wanted "
                f"{self._world_size} as the {type(self).__name__} was made for"
            )
        self._settle()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *others: Any
    ) -> None:
        *_, errors = others
        before = self._addresses()
        hooks, self._load_state_dict_pre_hooks = self._load_state_dict_pre_hooks, OrderedDict()
        try:
            for hook in hooks.values():  # which are to see the values as they were given
                hook(state_dict, prefix, local_metadata, *others)
            self._describe(state_dict, prefix, local_metadata, errors)
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)
        finally:
            self._load_state_dict_pre_hooks = hooks
            self._settle(join=self._addresses() != before)

    def _describe(self, state_dict: Any, prefix: str, metadata: Any, errors: list[str]) -> None:
        """Make of the values in a state dict what the parameters are: DTensors, one of each output.
        A value that fits none of them is left, for torch to refuse."""
        assign = bool(metadata.get("assign_to_params_buffers", False))
        shards: dict[str, tuple[torch.Tensor, Held]] = {}
        for name, held in self.held.items():
            if len(held.names) > 1:
                self._split(state_dict, prefix, name, errors)
            for piece in held.names:
                key, value = prefix + piece, state_dict.get(prefix + piece)
                parameter: Any = self._parameters.get(piece)
                if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor):
                    continue
                if isinstance(value, DTensor):
                    if self._is_own(parameter) and value.shape == parameter.shape:
                        state_dict[key] = self._as_own(value, parameter)
                elif value.shape == parameter.shape:
                    state_dict[key] = self._cut(value, parameter, assign)
                elif self._is_own(parameter) and value.shape == parameter._local_tensor.shape:
                    shards[key] = value, held
        if not shards:
            return
        # Each could be the whole of a narrower layer: a module's own state dict has its version.
        found = wanted = ""
        if "version" in metadata:
            found = "beside a module's metadata"
            wanted = " in a plain dict, as load_state_dict(dict(state_dict))"
        elif self.ranks.hold_the_same([value for value, _ in shards.values()]):
            found = "with the same values on all ranks"
        if found:
            errors += [
                f"{key}: found {tuple(value.shape)} {found}, wanted the layer's whole, or this "
                f"rank's part of it{wanted}."
                for key, (value, _) in shards.items()
            ]
            return
        for key, (value, held) in shards.items():
            state_dict[key] = self._over_ranks(value.detach(), held.placement)

    def _split(self, state_dict: Any, prefix: str, name: str, errors: list[str]) -> None:
        """Make of one value for all outputs a value for each of them."""
        held, value = self.held[name], state_dict.get(prefix + name)
        first: Any = self._parameters.get(held.names[0])
        if not isinstance(value, torch.Tensor) or first is None:
            return
        del state_dict[prefix + name]
        for rows in (list(held.sizes), held.rows(self._world_size)):
            if value.shape == (sum(rows), *first.shape[1:]):
                whole = whole_of(value) if isinstance(value, DTensor) else value
                for piece, shard in zip(held.names, whole.detach().split(rows), strict=True):
                    state_dict.setdefault(prefix + piece, shard)
                return
        wanted = (sum(held.sizes), *first.shape[1:])
        errors.append(
            f"size mismatch for {prefix}{name}: copying a param with shape {value.shape} from "
            f"checkpoint, the shape in current model is {torch.Size(wanted)}, in "
            f"{', '.join(held.names)}."
        )

    def _cut(self, whole: torch.Tensor, parameter: DTensor, assign: bool) -> DTensor:
        """This rank's shard of a plain tensor, laid out like the parameter."""
        whole, (placement, *_) = whole.detach(), parameter.placements
        if not self._is_own(parameter):
            mesh, placements = parameter.device_mesh, parameter.placements
            return distribute_tensor(whole, mesh, placements, src_data_rank=None)
        shard = whole
        if isinstance(placement, Shard):
            shard = whole.chunk(self._world_size, placement.dim)[self.rank]
            if assign:  # which keeps it, and is not to keep the whole alive
                shard = shard.clone(memory_format=torch.contiguous_format)
        return self._over_ranks(shard, placement, None if assign else parameter)

    def _as_own(self, value: DTensor, parameter: DTensor) -> DTensor:
        """A DTensor of the parameter's shape over any mesh, laid out like the parameter."""
        mesh, placements = value.device_mesh, parameter.placements
        is_like = mesh == parameter.device_mesh and value.placements == placements
        if is_like or mesh.get_coordinate() is None:
            return value
        if mesh.mesh.tolist() != parameter.device_mesh.mesh.tolist():
            return self._cut(whole_of(value), parameter, True)
        if value.placements != placements:
            check_movable(value)
            value = value.redistribute(placements=placements)
        return self._over_ranks(local_values(value).detach(), placements[0], parameter)
