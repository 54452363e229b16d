"""Tensor-parallel linear layers: what the layers by columns and by rows have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from agmm.errors import InvalidArgument
from agmm.nn import fp8_recipe
from agmm.nn._checked import CheckedLinear
from agmm.nn._held import LocalParts, OperandPlan, TracedWhole, local_shard, local_values
from agmm.nn.fp8_recipe import Fp8Recipe
from agmm.ops.checks import check_flag, needs_gradient


class ShardedLinear(CheckedLinear):
    """What the two layers share: their sizes, their first values and what they compute with.

    Attributes:
        fp8: how operands are quantised, or None.
        sequence_parallel: whether each rank has its own rows of the activations, or all of them.
    """

    weight: DTensor
    bias: DTensor | None
    out_features: int | tuple[int, ...]
    sequence_parallel = True

    def __init__(
        self,
        in_features: int,
        group: dist.ProcessGroup | DeviceMesh | str | None,
        device_mesh: DeviceMesh | None,
        fp8: str | Fp8Recipe | None,
        sequence_parallel: bool,
    ) -> None:
        super().__init__(group, device_mesh)
        self.in_features = in_features
        self.fp8 = fp8_recipe.resolved(fp8)
        name = type(self).__name__
        check_flag(f"{name}: sequence_parallel", sequence_parallel)
        self.sequence_parallel = sequence_parallel
        if self.fp8 is not None and not sequence_parallel:
            raise InvalidArgument(
                f"{name}: fp8: found {self.fp8.name} with sequence_parallel=False, wanted None: a "
                "sum of fp8 products on every rank has no backward (agmm.scaled_matmul_all_reduce "
                "serves inference)"
            )

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
                self._register(piece, shard, held.placement)
        names = tuple(piece for held in self.held.values() for piece in held.names)
        weight = self.held["weight"]
        self._plan = OperandPlan(names, tuple(weight.rows(self._world_size)))
        self._settle()
        self.reset_parameters()

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
            f"{'' if self.sequence_parallel else ', sequence_parallel=False'}"
        )
