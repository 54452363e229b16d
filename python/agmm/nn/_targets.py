"""The linears that parallel styles are applied to: how they are checked, divided among the ranks,
and read in the forwards that the styles give them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from operator import mul
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from agmm.errors import InvalidArgument, Unsupported, warn_once
from agmm.nn import fp8_recipe
from agmm.nn._divided import Divided, note
from agmm.nn._ranks import Ranks, ascending, group_of_mesh
from agmm.nn.fp8_recipe import Fp8Recipe
from agmm.ops.checks import check_operand
from agmm.runtime.scaling import K_MULTIPLE

_APPLIED = "_distribute_module_applied"
"""Torch's own name of the mark on a module that a style was applied to, which its styles refuse."""


class Placed(NamedTuple):
    """How the ranks hold a linear, whose weight is [outputs, inputs]."""

    weight: Placement
    bias: Placement


BY_OUTPUTS = Placed(Shard(0), Shard(0))
BY_INPUTS = Placed(Shard(1), Replicate())


class Target(NamedTuple):
    """A module that a style is applied to, with the style, for its messages."""

    style: ParallelStyle
    module: torch.nn.Module
    name: str = ""
    fp8: Fp8Recipe | None = None

    def fault(self, found: str) -> InvalidArgument:
        """In front of what was found: the style and the module, by its name where that is known."""
        what = f"{self.name!r}, " if self.name else ""
        module = f"{type(self.module).__name__}({self.module.extra_repr()})"  # in one line
        return InvalidArgument(f"{type(self.style).__name__} on {what}{module}: {found}")

    def checked(self, mesh: DeviceMesh, divided: str, fp8: Fp8Recipe | None) -> Target:
        """This target with its recipe. It is a plain module or one of torchao's, whose attribute
        ``divided`` the ranks can share. ``fp8`` is the style's own recipe."""
        try:
            own = fp8_recipe.of_module(self.module)
        except InvalidArgument as error:
            raise self.fault(str(error)) from None
        kind = type(self.module)
        if kind is not torch.nn.Linear and own is None:
            found = f"{kind.__module__}.{kind.__qualname__}"
            why = ""
            if isinstance(self.module, torch.nn.Linear):
                why = " itself: the style takes the place of forward, and a subclass has its own"
            raise self.fault(f"found {found}, wanted torch.nn.Linear{why}")
        if getattr(self.module, _APPLIED, False):
            raise self.fault("found a style on it already, wanted one style for each linear")
        for name, value in self.module.named_parameters(recurse=False):
            parameter: Any = value
            wrapper = type(parameter)
            if not isinstance(parameter, DTensor) and is_traceable_wrapper_subclass(parameter):
                raise self.fault(
                    f"{name}: found {wrapper.__module__}.{wrapper.__qualname__}, wanted a plain "
                    "tensor: no style divides weights that are quantised already"
                )
        if own is not None and fp8 not in (None, own):
            raise self.fault(
                f"fp8: found {named(fp8)}, wanted None or the module's own {named(own)}"
            )
        group_of_mesh(mesh)
        size = int(getattr(self.module, divided))
        if size % mesh.size():
            raise self.fault(f"{divided}: found {size}, wanted a multiple of {mesh.size()} ranks")
        target = self._replace(fp8=own or fp8)
        if target.fp8 is not None:
            for name in ("in_features", "out_features"):
                ranks = mesh.size() if name == divided else 1
                size = int(getattr(self.module, name))
                if size % (ranks * K_MULTIPLE):
                    raise self.fault(
                        f"{name}: found {size} with fp8, wanted a multiple of {ranks * K_MULTIPLE}"
                    )
        return target

    def check_operand(self, x: Any) -> None:
        """Checks that the input is a tensor that the ops take. They are given a DTensor's shard."""
        if isinstance(x, DTensor):
            return
        try:
            check_operand("x", x)
        except InvalidArgument as error:
            raise self.fault(str(error)) from None

    def check_input(self, x: torch.Tensor, weight: torch.Tensor, dim: int, features: int) -> None:
        """The input as the style's forward takes it, of `features` on all ranks together."""
        if x.dim() < 2 or not -x.dim() <= dim < x.dim():
            raise self.fault(
                f"sequence_dim: found {dim}, wanted one of the {x.dim()} dimensions of the input"
            )
        if dim % x.dim() == x.dim() - 1:
            raise self.fault(f"sequence_dim: found {dim}, the input's features, wanted another one")
        if x.shape[-1] != features:
            raise self.fault(
                f"x: found {x.shape[-1]} features in its last dimension, wanted {features}"
            )
        if x.device != weight.device:
            raise self.fault(f"x: found device {x.device}, wanted {weight.device} as the weight")
        if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise self.fault(f"x: found dtype {x.dtype}, wanted {weight.dtype} as the weight")

    def fill_up(self, length: int, dim: int, ranks: int, strict: bool) -> None:
        """Warns, once for each style, that the ranks' shards of an activation differ in size, and
        that the ops are given zeros in the place of what is missing.

        Raises:
            Unsupported: ``strict``.
        """
        if strict:
            fault = self.fault(f"x: found {length} in dimension {dim}, wanted a multiple of")
            raise Unsupported(f"{fault} {ranks} ranks; strict=True refuses rows that are filled up")
        if not torch.compiler.is_compiling():
            warn_once(
                f"agmm fills up rows: {type(self.style).__name__}: the {ranks} ranks cannot share "
                f"all lengths of dimension {dim} evenly"
            )

    def distribute(self, mesh: DeviceMesh, placed: Placed) -> None:
        """Makes the module's parameters DTensors."""
        mesh, source = ascending(mesh), self.style.src_data_rank
        setattr(self.module, _APPLIED, True)
        for name, parameter in list(self.module.named_parameters(recurse=False)):
            placement = getattr(placed, name)
            distributed = distribute_tensor(parameter, mesh, [placement], src_data_rank=source)
            self.module.register_parameter(
                name, torch.nn.Parameter(distributed, requires_grad=parameter.requires_grad)
            )

    def serve(
        self,
        mesh: DeviceMesh,
        placed: Placed,
        forward: Callable[..., torch.Tensor],
        sequence_dim: int | None = None,
    ) -> torch.nn.Module:
        """The module, distributed, whose forward is from now on ``forward`` of this target, its
        style, the ranks and the input. ``sequence_dim`` is that of `Divided`."""
        self.distribute(mesh, placed)
        ranks = Ranks(mesh, None)
        self.module.forward = partial(forward, self, self.style, ranks)
        note(self.module, Divided(ranks, placed is BY_OUTPUTS, sequence_dim))
        return self.module

    def local_parameters(self, placed: Placed) -> tuple[torch.Tensor, torch.Tensor | None]:
        """This rank's shard of the weight, transposed, and of the bias.

        Raises:
            InvalidArgument: a parameter is no DTensor, or one with another placement.
        """
        weight, bias = self.module.weight, self.module.bias
        shard = self._shard("weight", weight, placed.weight)
        return shard.t(), None if bias is None else self._shard("bias", bias, placed.bias)

    def _shard(self, name: str, parameter: Any, wanted: Placement) -> torch.Tensor:
        if not isinstance(parameter, DTensor):
            raise self.fault(f"{name}: found {type(parameter).__name__}, wanted a DTensor")
        if parameter.placements != (wanted,):  # a parametrization may make it another one
            raise self.fault(f"{name}: found {parameter.placements}, wanted {(wanted,)}")
        return parameter.to_local()


def named(recipe: Fp8Recipe | None) -> str:
    """The recipe in a message."""
    return "no fp8" if recipe is None else recipe.name


def local(tensor: torch.Tensor, placement: Placement) -> torch.Tensor:
    """This rank's shard of a DTensor; another tensor is that shard already."""
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.placements != (placement,):
        tensor = tensor.redistribute(placements=[placement])
    return tensor.to_local()


class _SaysOutput(Protocol):
    use_local_output: bool


def wanted_output(
    style: _SaysOutput,
    ranks: Ranks,
    out: torch.Tensor,
    placement: Placement,
    shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """This rank's output, or the DTensor of it where the style wants one. Where the ranks' shards
    differ in size, ``shape`` is that of the whole, and each shard is contiguous."""
    if style.use_local_output:
        return out
    sizes: dict[str, Any] = {}
    if shape is not None:
        strides = itertools.accumulate(reversed(shape[1:]), mul, initial=1)
        sizes = {"shape": torch.Size(shape), "stride": tuple(strides)[::-1]}
    return DTensor.from_local(out, ranks.mesh(out.device), [placement], run_check=False, **sizes)
