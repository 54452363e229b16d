"""Styles for ``torch.distributed.tensor.parallel.parallelize_module``, with sequence parallelism.

They turn the parameters of ``torch.nn.Linear`` into DTensors, as torch's own styles do, and its
forward into agmm's ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from agmm.errors import InvalidArgument
from agmm.nn import fp8_recipe
from agmm.nn._divided import Divided, note
from agmm.nn._fp8 import gather_products, scatter_product
from agmm.nn._ranks import Ranks, ascending, group_of_mesh
from agmm.nn._shared import SharedOutputs
from agmm.nn.fp8_recipe import Fp8Recipe
from agmm.ops.all_gather_matmul import all_gather_matmul
from agmm.ops.checks import check_operand
from agmm.ops.matmul_reduce_scatter import matmul_reduce_scatter
from agmm.runtime.scaling import K_MULTIPLE

_Placements = tuple[Placement, ...]
_ROWS, _COLUMNS, _WHOLE = (Shard(0),), (Shard(1),), (Replicate(),)


class _Target(NamedTuple):
    """A module that a style was applied to, for the style's messages."""

    style: ParallelStyle
    module: torch.nn.Module
    name: str = ""
    fp8: Fp8Recipe | None = None

    def fault(self, found: str) -> InvalidArgument:
        """In front of what was found: the style and the module, by its name where that is known."""
        what = f"{self.name!r}, " if self.name else ""
        module = f"{type(self.module).__name__}({self.module.extra_repr()})"  # in one line
        return InvalidArgument(f"{type(self.style).__name__} on {what}{module}: {found}")

    def checked(self, mesh: DeviceMesh, divided: str, fp8: Fp8Recipe | None) -> _Target:
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
        if own is not None and fp8 not in (None, own):
            raise self.fault(
                f"fp8: found {_named(fp8)}, wanted None or the module's own {_named(own)}"
            )
        group_of_mesh(mesh)
        size = int(getattr(self.module, divided))
        if size % mesh.size():
            raise self.fault(f"{divided}: found {size}, wanted a multiple of {mesh.size()} ranks")
        target = self._replace(fp8=own or fp8)
        if target.fp8 is not None:
            for name in ("in_features", "out_features"):
                parts = mesh.size() if name == divided else 1
                size = int(getattr(self.module, name))
                if size % (parts * K_MULTIPLE):
                    raise self.fault(
                        f"{name}: found {size} with fp8, wanted a multiple of {parts * K_MULTIPLE}"
                    )
        return target

    def check_operand(self, x: Any) -> None:
        """Checks that the input is a tensor that the ops take. They are given a DTensor's part."""
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
        if x.shape[-1] != features:
            raise self.fault(
                f"x: found {x.shape[-1]} features in its last dimension, wanted {features}"
            )
        if x.device != weight.device:
            raise self.fault(f"x: found device {x.device}, wanted {weight.device} as the weight")
        if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise self.fault(f"x: found dtype {x.dtype}, wanted {weight.dtype} as the weight")


def _distribute(
    module: torch.nn.Module, mesh: DeviceMesh, placements: dict[str, Placement], source: int | None
) -> None:
    mesh = ascending(mesh)
    for name, parameter in list(module.named_parameters(recurse=False)):
        distributed = distribute_tensor(parameter, mesh, [placements[name]], src_data_rank=source)
        module.register_parameter(
            name, torch.nn.Parameter(distributed, requires_grad=parameter.requires_grad)
        )


def _local(tensor: torch.Tensor, placement: Placement) -> torch.Tensor:
    """This rank's part of a DTensor; another tensor is that part already."""
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.placements != (placement,):
        tensor = tensor.redistribute(placements=[placement])
    return tensor.to_local()


def _local_parameters(
    target: _Target, of_weight: _Placements, of_bias: _Placements
) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight, bias = target.module.weight, target.module.bias
    part = _part(target, "weight", weight, of_weight)
    return part.t(), None if bias is None else _part(target, "bias", bias, of_bias)


def _part(target: _Target, name: str, parameter: Any, wanted: _Placements) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        raise target.fault(f"{name}: found {type(parameter).__name__}, wanted a DTensor")
    if parameter.placements != wanted:  # a parametrization may make it another one
        raise target.fault(f"{name}: found {parameter.placements}, wanted {wanted}")
    return parameter.to_local()


def _gathered_products(
    targets: Sequence[_Target], style: _GatherStyle, ranks: Ranks, x: torch.Tensor
) -> list[torch.Tensor]:
    dim = style.sequence_dim
    targets[0].check_operand(x)
    operands = [_local_parameters(target, _ROWS, _ROWS) for target in targets]
    weights, biases = zip(*operands, strict=True)
    for target, weight in zip(targets, weights, strict=True):
        target.check_input(x, weight, dim, weight.shape[0])
    # The fused path gathers along dimension 0.
    shard = _local(x, Shard(dim)).movedim(dim, 0).contiguous()
    if targets[0].fp8 is not None:
        outs = gather_products(targets[0].fp8, shard, weights, biases, ranks.own_name)
    else:
        outs = all_gather_matmul(
            shard,
            list(weights),
            ranks.for_ops,
            bias=list(biases),
            save_gathered=style.save_gathered,
        )
    outs = [out.movedim(0, dim) for out in outs]
    if style.use_local_output:
        return outs
    mesh = ranks.mesh(x.device)
    return [DTensor.from_local(out, mesh, [Shard(out.dim() - 1)], run_check=False) for out in outs]


def _named(recipe: Fp8Recipe | None) -> str:
    return "no fp8" if recipe is None else recipe.name


class _GatherStyle(ParallelStyle):
    def __init__(
        self,
        *,
        sequence_dim: int = 1,
        use_local_output: bool = True,
        save_gathered: bool = False,
        fp8: str | Fp8Recipe | None = None,
    ) -> None:
        super().__init__()
        self.sequence_dim = sequence_dim
        self.use_local_output = use_local_output
        self.save_gathered = save_gathered
        self.fp8 = fp8_recipe.resolved(fp8)

    def _checked(self, target: _Target, mesh: DeviceMesh) -> _Target:
        target = target.checked(mesh, "out_features", self.fp8)
        if target.fp8 is not None and self.save_gathered:
            raise target.fault(fp8_recipe.WHY_NOT_SAVED)
        return target

    def _shard(self, target: _Target, mesh: DeviceMesh) -> None:
        placements: dict[str, Placement] = {"weight": Shard(0), "bias": Shard(0)}
        _distribute(target.module, mesh, placements, self.src_data_rank)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(sequence_dim={self.sequence_dim})"


class GatherColwiseParallel(_GatherStyle):
    """``torch.nn.Linear`` whose input is gathered along the sequence while it is multiplied.

    Takes the place of ``ColwiseParallel(input_layouts=Shard(sequence_dim))``.

    Args:
        sequence_dim: the dimension of the input that is sharded.
        use_local_output: return a tensor, not a DTensor sharded along its last dimension.
        save_gathered: see `agmm.all_gather_matmul`; not with fp8.
        fp8: see `ColumnParallelLinear`; a ``Float8Linear`` of torchao keeps its own recipe.
    """

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        target = self._checked(_Target(self, module), device_mesh)
        self._shard(target, device_mesh)
        ranks = Ranks(device_mesh, None)
        module.forward = partial(_gathered_product, target, self, ranks)
        note(module, Divided(ranks, True, self.sequence_dim))
        return module


def _gathered_product(
    target: _Target, style: _GatherStyle, ranks: Ranks, x: torch.Tensor
) -> torch.Tensor:
    return _gathered_products([target], style, ranks, x)[0]


class SharedGatherParallel(_GatherStyle):
    """Several ``torch.nn.Linear`` of one module that take the same input: one gather for all.

    Applied to the module that holds them: ``{"attention": SharedGatherParallel("wq", "wk")}``. The
    first of them that is called with an input computes the others' outputs too. They return these
    when they are called with the same tensor before the module's forward ends, as long as neither
    the tensor, their parameters, the grad mode nor autocast has changed; else they compute anew.
    Tensors made under ``torch.inference_mode`` keep no count of their changes, so there each linear
    gathers by itself, with one warning; ``torch.no_grad`` lets them share.

    Args:
        names: the linear modules, by their names in the module.
        **options: ``sequence_dim``, ``use_local_output``, ``save_gathered`` and ``fp8``, as of
            `GatherColwiseParallel`. All modules have the same recipe for fp8, or none.
    """

    def __init__(self, *names: str, **options: Any) -> None:
        super().__init__(**options)
        if not names:
            raise InvalidArgument("names: found none, wanted the names of torch.nn.Linear modules")
        self.names = names

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        targets = []
        for name in self.names:
            try:
                linear = module.get_submodule(name)
            except AttributeError:
                raise InvalidArgument(
                    f"SharedGatherParallel on {type(module).__name__}: found no {name!r} in it, "
                    "wanted the names of its torch.nn.Linear modules"
                ) from None
            target = _Target(self, linear, f"{type(module).__name__}.{name}")
            targets.append(self._checked(target, device_mesh))
            if targets[-1].fp8 != targets[0].fp8:
                raise target.fault(
                    f"fp8: found {_named(targets[-1].fp8)}, wanted {_named(targets[0].fp8)} as "
                    f"{targets[0].name!r}: one gather has one recipe"
                )
        for target in targets:  # none is changed where one can't be
            self._shard(target, device_mesh)
        ranks = Ranks(device_mesh, None)
        shared = SharedOutputs(
            [target.module for target in targets], partial(_products_of, targets, self, ranks)
        )
        for i, target in enumerate(targets):
            target.module.forward = partial(shared.output, i)
            note(target.module, Divided(ranks, True, self.sequence_dim))
        module.register_forward_pre_hook(shared.begin)
        module.register_forward_hook(shared.end, always_call=True)
        return module


def _products_of(
    targets: list[_Target],
    style: _GatherStyle,
    ranks: Ranks,
    x: torch.Tensor,
    indices: Sequence[int],
) -> list[torch.Tensor]:
    return _gathered_products([targets[i] for i in indices], style, ranks, x)


class RowwiseScatterParallel(ParallelStyle):
    """``torch.nn.Linear`` whose output is summed over the ranks and scattered along the sequence.

    Takes the place of ``RowwiseParallel(output_layouts=Shard(sequence_dim))``.

    Args:
        sequence_dim: the dimension of the output that is sharded.
        use_local_output: return a tensor, not a DTensor sharded along ``sequence_dim``.
        fp8: see `ColumnParallelLinear`; a ``Float8Linear`` of torchao keeps its own recipe.
    """

    def __init__(
        self,
        *,
        sequence_dim: int = 1,
        use_local_output: bool = True,
        fp8: str | Fp8Recipe | None = None,
    ) -> None:
        super().__init__()
        self.sequence_dim = sequence_dim
        self.use_local_output = use_local_output
        self.fp8 = fp8_recipe.resolved(fp8)

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        target = _Target(self, module).checked(device_mesh, "in_features", self.fp8)
        _distribute(
            module, device_mesh, {"weight": Shard(1), "bias": Replicate()}, self.src_data_rank
        )
        ranks = Ranks(device_mesh, None)
        module.forward = partial(_scattered_product, target, self, ranks)
        note(module, Divided(ranks, False, self.sequence_dim))
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}(sequence_dim={self.sequence_dim})"


def _scattered_product(
    target: _Target, style: RowwiseScatterParallel, ranks: Ranks, x: torch.Tensor
) -> torch.Tensor:
    dim = style.sequence_dim
    target.check_operand(x)
    weight, bias = _local_parameters(target, _COLUMNS, _WHOLE)
    x = _local(x, Shard(x.dim() - 1))
    target.check_input(x, weight, dim, weight.shape[0])
    if x.shape[dim] % ranks.size:
        raise target.fault(
            f"x: found {x.shape[dim]} in dimension {dim}, wanted a multiple of {ranks.size} ranks"
        )
    rows = x.movedim(dim, 0)
    if target.fp8 is not None:
        out = scatter_product(target.fp8, rows.contiguous(), weight, bias, ranks.own_name)
    else:
        out = matmul_reduce_scatter(rows, weight, ranks.for_ops, bias=bias)
    out = out.movedim(0, dim)
    if style.use_local_output:
        return out
    return DTensor.from_local(out, ranks.mesh(out.device), [Shard(dim)], run_check=False)
