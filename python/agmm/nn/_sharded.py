"""What a layer holds that has this rank's shard of a weight: parameters, their places, their moves.

Each output has a parameter of its own, a DTensor over the layer's ranks: cut along one dimension it
says where each row belongs in the whole, which the shards of several outputs one below another do
not. In memory they do lie one below another, so that one matmul serves them all.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from agmm.errors import InvalidArgument
from agmm.nn import fp8_recipe
from agmm.nn._checked import CheckedLinear
from agmm.nn._held import (
    Held,
    Joined,
    LocalParts,
    OperandPlan,
    Place,
    TracedWhole,
    can_be_joined,
    local_shard,
    local_values,
    pieces,
    without_offset,
)
from agmm.nn._ranks import Ranks
from agmm.nn.fp8_recipe import Fp8Recipe
from agmm.ops.checks import needs_gradient


class ShardedLinear(CheckedLinear):
    """What the two layers share: the ranks, the parameters and their first values.

    Attributes:
        group_name: of the layer's ranks.
        held: the parameters of the whole layer by name, and the layer's own that hold them.
        fp8: how operands are quantised, or None.
    """

    weight: DTensor
    bias: DTensor | None
    out_features: int | tuple[int, ...]

    def __init__(
        self,
        in_features: int,
        group: dist.ProcessGroup | DeviceMesh | str | None,
        device_mesh: DeviceMesh | None,
        fp8: str | Fp8Recipe | None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.fp8 = fp8_recipe.resolved(fp8)
        self.ranks = Ranks(group, device_mesh)
        self.group_name = self.ranks.group_name
        self.held: dict[str, Held] = {}
        self._world_size = self.ranks.size
        self._joined: dict[str, Joined] = {}

    @property
    def rank(self) -> int:
        """This process's rank among the layer's."""
        return self.ranks.rank

    @property
    def world_size(self) -> int:
        return self.ranks.size

    @torch.inference_mode(False)  # else a layer that was made under it could not be trained
    def _make_parameters(self, bias: bool, device: Any, dtype: torch.dtype | None) -> None:
        if not bias:
            del self.held["bias"]
            self.register_parameter("bias", None)
        for name, held in self.held.items():
            shape = (self.in_features,) if name == "weight" else ()
            if held.placement == Shard(1):
                shape = (self.in_features // self._world_size,)
            for piece, rows in zip(held.names, held.rows(self._world_size), strict=True):
                shard = torch.empty((rows, *shape), device=device, dtype=dtype)
                parameter = torch.nn.Parameter(self._over_ranks(shard, held.placement))
                self.register_parameter(piece, parameter)
        names = tuple(piece for held in self.held.values() for piece in held.names)
        weight = self.held["weight"]
        self._plan = OperandPlan(names, tuple(weight.rows(self._world_size)))
        self._settle()
        self.reset_parameters()

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

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The values of ``torch.nn.Linear(in_features, sum(out_features))`` under the same seed.

        Every rank draws the whole weight, so that the ranks agree when their seeds do.
        """
        like = local_values(self.get_parameter(self.held["weight"].names[0]))
        if like.is_meta:
            return
        rows = sum(self.held["weight"].sizes)
        where: dict[str, Any] = {"device": like.device, "dtype": like.dtype}
        full = torch.nn.Linear(self.in_features, rows, "bias" in self.held, **where)
        for name, held in self.held.items():
            for piece, whole in held.split(full.get_parameter(name)).items():
                parameter = self.get_parameter(piece)
                local_values(parameter).copy_(local_shard(whole, parameter))

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
                whole = value.full_tensor() if isinstance(value, DTensor) else value
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
            return self._cut(value.full_tensor(), parameter, True)
        if value.placements != placements:
            value = value.redistribute(placements=placements)
        return self._over_ranks(local_values(value).detach(), placements[0], parameter)

    def operands(self) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor | None]]:
        """This rank's transposed weights and biases, of each product: of one for all outputs where
        their shards lie one below another, else (FSDP2 places each by itself) of one for each."""
        plan = self._plan
        own = self._parameters
        # A wrapper may have put tensors that are no parameters in their place.
        parameters: list[Any] = [own[n] if n in own else getattr(self, n) for n in plan.names]
        outputs = len(plan.rows)
        if (
            torch.compiler.is_compiling()
            or torch._C._len_torch_dispatch_stack() > 0
            or not all(isinstance(parameter, DTensor) for parameter in parameters)
        ):
            found, joined = self._traced_operands(parameters)
        else:
            shards = [parameter._local_tensor for parameter in parameters]
            wholes = self._wholes(shards) if outputs > 1 else None
            joined = wholes is not None
            for parameter in parameters:
                if len(parameter._spec.placements) > 1:
                    self._refuse_placement(parameter)
            if needs_gradient(*parameters):
                found = LocalParts.apply(plan, wholes, *parameters)
            else:
                found = plan.operands(shards, wholes)
        products = 1 if joined else outputs
        return found[:products], found[products:] or (None,) * products

    def _wholes(self, shards: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """The tensors in which the shards lie one below another: weights, then biases."""
        outputs, wholes = len(self._plan.rows), []
        for i, name in enumerate(self.held):
            joined = self._joined.get(name)
            if joined is None:
                return None
            whole = joined.filled_by(shards[i * outputs : (i + 1) * outputs])
            if whole is None:
                return None
            wholes.append(whole)
        return wholes

    def _refuse_placement(self, parameter: DTensor) -> NoReturn:
        raise InvalidArgument(
            f"{type(self).__name__}: found a parameter over {parameter.device_mesh}, wanted the "
            "layer's ranks only; after fully_shard call the module that it was given, which "
            "gathers the parameters of those in it"
        )

    def _traced_operands(self, parameters: list[Any]) -> tuple[Sequence[torch.Tensor], bool]:
        """The operands while a call is traced, also where the parameters are no DTensors."""
        plain = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
        outputs = len(self._plan.rows)
        wholes = []
        for i, name in enumerate(self.held):
            own = slice(i * outputs, (i + 1) * outputs)
            whole = self._traced_whole(name, parameters[own], plain[own])
            if whole is not None:
                wholes.append(whole)
        if len(wholes) == len(self.held):
            return [wholes[0].t(), *wholes[1:]], True
        return [weight.t() for weight in plain[:outputs]] + plain[outputs:], False

    def _traced_whole(
        self, name: str, parameters: list[Any], shards: list[torch.Tensor]
    ) -> torch.Tensor | None:
        joined = self._joined.get(name)
        if joined is None:
            return None
        whole = joined.whole()
        if whole is None:
            return None
        for parameter, place in zip(parameters, joined.places, strict=True):
            if getattr(parameter, "_agmm_place", None) is not place:
                return None
        if not needs_gradient(*shards):  # then dynamo takes the first of two shards for the whole
            return whole.view_as(whole)
        found: torch.Tensor = TracedWhole.apply(whole, *shards)
        return found

    def extra_repr(self) -> str:
        fp8 = "" if self.fp8 is None else f", fp8={self.fp8.name}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={'bias' in self.held}, world_size={self._world_size}{fp8}"
        )
