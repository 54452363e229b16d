"""What a layer holds that has this rank's part of a weight: parameters, their places, their moves.

Each output has a parameter of its own, a DTensor over the layer's ranks: cut along one dimension it
says where each row belongs in the whole, which the parts of several outputs one below another do
not. In memory they do lie one below another, so that one matmul serves them all.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from agmm.errors import InvalidArgument
from agmm.nn import fp8_recipe
from agmm.nn._held import (
    Held,
    LocalParts,
    Plan,
    TracedWhole,
    copyable,
    local_part,
    local_values,
    one_below_another,
)
from agmm.nn._ranks import Ranks
from agmm.nn.fp8_recipe import Fp8Recipe
from agmm.ops.checks import check_operand, needs_gradient
from agmm.runtime.scaling import K_MULTIPLE


class _Joined(NamedTuple):
    """Where the parts of several parameters lie, for a trace, which can't compare addresses."""

    whole: weakref.ref[torch.Tensor]
    parameters: tuple[weakref.ref[torch.Tensor], ...]


class ShardedLinear(torch.nn.Module):
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
        self._parts = self.ranks.size
        self._joined: dict[str, _Joined] = {}

    @property
    def rank(self) -> int:
        """This process's rank among the layer's."""
        return self.ranks.rank

    @property
    def world_size(self) -> int:
        return self.ranks.size

    def _make_parameters(self, bias: bool, device: Any, dtype: torch.dtype | None) -> None:
        if not bias:
            del self.held["bias"]
            self.register_parameter("bias", None)
        for name, held in self.held.items():
            shape = (self.in_features,) if name == "weight" else ()
            if held.placement == Shard(1):
                shape = (self.in_features // self._parts,)
            for piece, rows in zip(held.names, held.rows(self._parts), strict=True):
                part = torch.empty((rows, *shape), device=device, dtype=dtype)
                parameter = torch.nn.Parameter(self._over_ranks(part, held.placement))
                self.register_parameter(piece, parameter)
        names = tuple(piece for held in self.held.values() for piece in held.names)
        weight = self.held["weight"]
        features = local_values(self.get_parameter(weight.names[0])).shape[1]
        self._plan = Plan(names, tuple(weight.rows(self._parts)), features)
        self._settle()
        self.reset_parameters()

    def as_dtensor(self, tensor: torch.Tensor, held: Held) -> DTensor:
        """One of the layer's tensors, which may have been replaced by a plain one, as this
        rank's part of the whole; of the same memory."""
        if isinstance(tensor, DTensor):
            return tensor
        return self._over_ranks(tensor.detach(), held.placement)

    def _over_ranks(self, part: torch.Tensor, placement: Placement) -> DTensor:
        """The whole of which this rank holds that part; over the layer's ranks only."""
        shape = list(part.shape)
        if isinstance(placement, Shard):
            shape[placement.dim] *= self._parts
        stride = torch.empty(shape, device="meta").stride()
        meta = TensorMeta(torch.Size(shape), stride, part.dtype)
        spec = DTensorSpec(self.ranks.mesh(part.device), (placement,), tensor_meta=meta)
        return DTensor(part, spec, requires_grad=False)

    def _is_own(self, parameter: Any) -> bool:
        """Whether that is laid over the layer's ranks and no others, as it was made."""
        return isinstance(parameter, DTensor) and parameter.device_mesh.ndim == 1

    @torch.no_grad()
    def _settle(self) -> None:
        """After the parameters have moved: describe them by the present ranks, and bring those of
        several outputs together in memory."""
        self._joined = {}
        for name, held in self.held.items():
            parameters: list[Any] = [self._parameters.get(piece) for piece in held.names]
            if not all(self._is_own(parameter) for parameter in parameters):
                continue
            parts = [parameter._local_tensor for parameter in parameters]
            whole = None
            if len(parts) > 1 and len({(part.dtype, part.device) for part in parts}) == 1:
                first = parts[0]
                if not first.is_meta and one_below_another(parts):
                    # Of the same memory but no view, so that the parts keep it alive.
                    size = (sum(part.shape[0] for part in parts), *first.shape[1:])
                    memory, begin = first.untyped_storage(), first.storage_offset()
                    whole = first.new_empty(0).set_(memory, begin, size, first.stride())
                else:
                    whole = torch.cat(parts)
            begin = 0
            for parameter, part in zip(parameters, parts, strict=True):
                if whole is not None:
                    # Views of one tensor: a change of one is known to whoever saved another.
                    part = whole.narrow(0, begin, part.shape[0])
                    begin += part.shape[0]
                self._place(parameter, part)
            if whole is not None:
                refs = tuple(weakref.ref(parameter) for parameter in parameters)
                self._joined[name] = _Joined(weakref.ref(whole), refs)

    def _place(self, parameter: Any, part: torch.Tensor) -> None:
        """Have a parameter, which stays the same object, hold that part over the present ranks."""
        spec, mesh = parameter._spec, self.ranks.mesh(part.device)
        if spec.mesh is mesh and parameter.storage_offset() == part.storage_offset():
            parameter._local_tensor = part
            return
        moved = DTensorSpec(mesh, spec.placements, tensor_meta=spec.tensor_meta)
        whole = DTensor(part, moved, requires_grad=False)
        fresh: Any = torch.nn.Parameter(whole, requires_grad=parameter.requires_grad)
        fresh._local_tensor = part
        fresh.grad = parameter.grad
        torch.utils.swap_tensors(parameter, fresh)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._joined = {}  # torch moves no parameter to which there are weak references
        super()._apply(fn, recurse)
        self._settle()
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for key in [] if keep_vars else [prefix + name for name in self._plan.names]:
            value = destination.get(key)
            if isinstance(value, DTensor):
                destination[key] = copyable(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        own: list[Any] = list(self._parameters.values())
        for parameter in own:
            if isinstance(parameter, DTensor) and id(parameter) not in memo:
                twin = torch.nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                if parameter.grad is not None:
                    twin.grad = parameter.grad.detach().clone()
                memo[id(parameter)] = twin
        made = memo[id(self)] = self.__new__(type(self))
        made.__setstate__(copy.deepcopy({**self.__dict__, "_joined": {}}, memo))
        return made

    def __copy__(self) -> Any:
        made = self.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __getstate__(self) -> dict[str, Any]:
        parameters: dict[str, Any] = dict(self._parameters)
        for name, parameter in parameters.items():
            if isinstance(parameter, DTensor) and parameter.storage_offset():
                parameters[name] = copyable(parameter, parameter.requires_grad)
        return {**self.__dict__, "_joined": {}, "_parameters": parameters}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        found = self.ranks.size
        if found != self._parts:
            raise InvalidArgument(
                f"group: found {self.group_name!r} with {found} ranks, wanted {self._parts} as "
                f"the {type(self).__name__} was made for"
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
                local_values(parameter).copy_(local_part(whole, parameter))

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *others: Any
    ) -> None:
        for name, held in self.held.items():
            value = state_dict.get(prefix + name)
            if len(held.names) > 1 and type(value) in (torch.Tensor, torch.nn.Parameter):
                rows = held.rows(self._parts)
                if value.shape[0] in (sum(rows), sum(held.sizes)):
                    rows = rows if value.shape[0] == sum(rows) else list(held.sizes)
                    for piece, part in zip(held.names, value.detach().split(rows), strict=True):
                        state_dict.setdefault(prefix + piece, part)
                    del state_dict[prefix + name]
            for piece in held.names:
                self._describe(state_dict, prefix + piece, self._parameters.get(piece), held)
        self._joined = {}
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)
        self._settle()

    def _describe(self, state_dict: Any, key: str, parameter: Any, held: Held) -> None:
        """Make a plain tensor, this rank's part or the whole, what the parameter is."""
        value = state_dict.get(key)
        if not isinstance(parameter, DTensor) or isinstance(value, DTensor):
            return
        if not isinstance(value, torch.Tensor):
            return
        value = value.detach()
        if self._is_own(parameter) and value.shape == parameter._local_tensor.shape:
            state_dict[key] = self._over_ranks(value, held.placement)
        elif value.shape == parameter.shape:
            mesh, placements = parameter.device_mesh, parameter.placements
            state_dict[key] = distribute_tensor(value, mesh, placements, src_data_rank=None)

    def operands(self) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor | None]]:
        """This rank's transposed weights and biases, of each product: of one for all outputs where
        their parts lie one below another, else (FSDP2 places each by itself) of one for each."""
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
            parts = [parameter._local_tensor for parameter in parameters]
            joined = outputs > 1 and one_below_another(parts[:outputs])
            if joined and len(parts) > outputs:
                joined = one_below_another(parts[outputs:])
            for parameter in parameters:
                if len(parameter._spec.placements) > 1:
                    self._refuse_placement(parameter)
            if needs_gradient(*parameters):
                found = LocalParts.apply(plan, joined, *parameters)
            else:
                found = plan.operands(parts, joined)
        products = 1 if joined else outputs
        return found[:products], found[products:] or (None,) * products

    def _refuse_placement(self, parameter: DTensor) -> NoReturn:
        raise InvalidArgument(
            f"{type(self).__name__}: found a parameter over {parameter.device_mesh}, wanted the "
            "layer's ranks only; after fully_shard call the module that it was given, which "
            "gathers the parameters of those in it"
        )

    def _traced_operands(self, parameters: list[Any]) -> tuple[Sequence[torch.Tensor], bool]:
        """Also where the parameters are no DTensors."""
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
        self, name: str, parameters: list[Any], parts: list[torch.Tensor]
    ) -> torch.Tensor | None:
        joined = self._joined.get(name)
        if joined is None:
            return None
        whole = joined.whole()
        if whole is None:
            return None
        for parameter, ref in zip(parameters, joined.parameters, strict=True):
            if ref() is not parameter:
                return None
        if not needs_gradient(*parts):  # then dynamo takes the first of two parts for the whole
            return whole.view_as(whole)
        found: torch.Tensor = TracedWhole.apply(whole, *parts)
        return found

    def _check_operand(self, x: Any) -> None:
        """Before the parameters are looked at."""
        check_operand(f"{type(self).__name__}: x", x)

    def _check_weights(self, weights: Sequence[torch.Tensor]) -> None:
        """That they are this rank's parts, transposed: a parametrization may make them others."""
        placement, rows = self.held["weight"].placement, self._plan.rows
        features = self.in_features // (self._parts if placement == Shard(1) else 1)
        for weight, wanted in zip(weights, rows if len(weights) > 1 else [sum(rows)], strict=True):
            if weight.shape[0] != features or weight.shape[1] != wanted:
                raise InvalidArgument(
                    f"{type(self).__name__}: weight: found {list(weight.t().shape)} on this rank, "
                    f"wanted {[wanted, features]} ({placement} over the {self._parts} ranks)"
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
        if size % self._parts:
            raise InvalidArgument(
                f"{type(self).__name__}: {name}: found {size}, wanted a multiple of {self._parts} "
                "ranks"
            )

    def _check_fp8_size(self, name: str, size: int, *, parts: int) -> None:
        if self.fp8 is not None and size % (parts * K_MULTIPLE):
            raise InvalidArgument(
                f"{type(self).__name__}: {name}: found {size} with fp8, wanted a multiple of "
                f"{K_MULTIPLE}" + (f" on each of {parts} ranks" if parts > 1 else "")
            )

    def extra_repr(self) -> str:
        fp8 = "" if self.fp8 is None else f", fp8={self.fp8.name}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={'bias' in self.held}, world_size={self._parts}{fp8}"
        )
