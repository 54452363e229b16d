"""Styles for ``torch.distributed.tensor.parallel.parallelize_module``, with sequence parallelism.

They turn the parameters of ``torch.nn.Linear`` into DTensors, as torch's own styles do, and its
forward into agmm's ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ParallelStyle

from agmm.errors import InvalidArgument
from agmm.nn import fp8_recipe
from agmm.nn._divided import Divided, note
from agmm.nn._filled import filled_up, own_rows_of
from agmm.nn._fp8 import scatter_product
from agmm.nn._ranks import Ranks
from agmm.nn._shared import SharedOutputs
from agmm.nn._stand_in import show_whole_shape
from agmm.nn._targets import BY_INPUTS, BY_OUTPUTS, Target, local, named, wanted_output
from agmm.nn.fp8_recipe import Fp8Recipe
from agmm.nn.gathered import gathered_products
from agmm.ops.matmul_reduce_scatter import matmul_reduce_scatter


class _GatherStyle(ParallelStyle):
    def __init__(
        self,
        *,
        sequence_dim: int = 1,
        use_local_output: bool = True,
        save_gathered: bool = False,
        strict: bool = False,
        fp8: str | Fp8Recipe | None = None,
    ) -> None:
        super().__init__()
        self.sequence_dim = sequence_dim
        self.use_local_output = use_local_output
        self.save_gathered = save_gathered
        self.strict = strict
        self.fp8 = fp8_recipe.resolved(fp8)

    def _checked(self, target: Target, mesh: DeviceMesh) -> Target:
        target = target.checked(mesh, "out_features", self.fp8)
        if target.fp8 is not None and self.save_gathered:
            raise target.fault(fp8_recipe.WHY_NOT_SAVED)
        return target

    def __repr__(self) -> str:
        return f"{type(self).__name__}(sequence_dim={self.sequence_dim})"


class GatherColwiseParallel(_GatherStyle):
    """``torch.nn.Linear`` whose input is gathered along the sequence while it is multiplied.

    Takes the place of ``ColwiseParallel(input_layouts=Shard(sequence_dim))``.

    Args:
        sequence_dim: the dimension of the input that is sharded.
        use_local_output: return a tensor, not a DTensor sharded along its last dimension.
        save_gathered: see `agmm.all_gather_matmul`; not with fp8.
        strict: refuse a DTensor whose rows the ranks do not share evenly, for which zeros are
            gathered else, and the unfused path, as `agmm.all_gather_matmul` does.
        fp8: see `ColumnParallelLinear`; a ``Float8Linear`` of torchao keeps its own recipe.
    """

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        target = self._checked(Target(self, module), device_mesh)
        return target.serve(device_mesh, BY_OUTPUTS, _gathered_product, self.sequence_dim)


def _gathered_product(
    target: Target, style: _GatherStyle, ranks: Ranks, x: torch.Tensor
) -> torch.Tensor:
    return gathered_products([target], style, ranks, x)[0]


class SharedGatherParallel(_GatherStyle):
    """Several ``torch.nn.Linear`` of one module that take the same input: one gather for all.

    Applied to the module that holds them: ``{"attention": SharedGatherParallel("wq", "wk")}``. The
    first of them that is called with an input computes the others' outputs too. They return these
    when they are called with the same tensor before the module's forward ends, as long as neither
    the tensor, their parameters, the grad mode nor autocast has changed; else they compute anew.
    Tensors made under ``torch.inference_mode`` keep no count of their changes, so there each linear
    gathers by itself, with one warning; ``torch.no_grad`` lets them share.

    In the module the first argument has the shape of all rows, since modules take lengths from it.
    Ops on it take this rank's shard, or are refused where that would be at odds with its shape.

    Args:
        names: the linear modules, by their names in the module.
        whole_shape: False lets the module see the shape of the shard.
        **options: ``sequence_dim``, ``use_local_output``, ``save_gathered``, ``strict`` and
            ``fp8``, as of `GatherColwiseParallel`. All modules have the same recipe for fp8, or
            none.
    """

    def __init__(self, *names: str, whole_shape: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.whole_shape = whole_shape
        if not names:
            raise InvalidArgument("names: found none, wanted the names of torch.nn.Linear modules")
        self.names = names

    def __repr__(self) -> str:
        named = "".join(f"{name!r}, " for name in self.names)
        return f"{type(self).__name__}({named}sequence_dim={self.sequence_dim})"

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        self._share(module, self._targets_in(module, self.names, device_mesh), device_mesh)
        return module

    def _targets_in(
        self, module: torch.nn.Module, names: Sequence[str], mesh: DeviceMesh
    ) -> list[Target]:
        """The linears of these names, none of which is changed yet."""
        targets: list[Target] = []
        for name in names:
            try:
                linear = module.get_submodule(name)
            except AttributeError:
                raise InvalidArgument(
                    f"{type(self).__name__} on {type(module).__name__}: found no {name!r} in it, "
                    "wanted the names of its torch.nn.Linear modules"
                ) from None
            target = Target(self, linear, f"{type(module).__name__}.{name}")
            targets.append(self._checked(target, mesh))
            if targets[-1].fp8 != targets[0].fp8:
                raise target.fault(
                    f"fp8: found {named(targets[-1].fp8)}, wanted {named(targets[0].fp8)} as "
                    f"{targets[0].name!r}: one gather has one recipe"
                )
        return targets

    def _share(self, module: torch.nn.Module, targets: list[Target], mesh: DeviceMesh) -> Ranks:
        """Has the linears share one gather in each forward of the module."""
        for target in targets:
            target.distribute(mesh, BY_OUTPUTS)
        ranks = Ranks(mesh, None)
        shared = SharedOutputs(
            [target.module for target in targets], partial(_products_of, targets, self, ranks)
        )
        for i, target in enumerate(targets):
            target.module.forward = partial(shared.output, i)
            note(target.module, Divided(ranks, True, self.sequence_dim))
        if self.whole_shape:
            show_whole_shape(module, shared.linears, self.sequence_dim, ranks.size)
        module.register_forward_pre_hook(shared.begin)
        module.register_forward_hook(shared.end, always_call=True)
        return ranks


def _products_of(
    targets: list[Target],
    style: _GatherStyle,
    ranks: Ranks,
    x: torch.Tensor,
    indices: Sequence[int],
) -> list[torch.Tensor]:
    return gathered_products([targets[i] for i in indices], style, ranks, x)


class RowwiseScatterParallel(ParallelStyle):
    """``torch.nn.Linear`` whose output is summed over the ranks and scattered along the sequence.

    Takes the place of ``RowwiseParallel(output_layouts=Shard(sequence_dim))``. Where the ranks
    cannot share the rows evenly, as those of a single token, zeros are added to them, and each rank
    gets the shard that a DTensor has there: the last ranks have fewer rows, or none.

    Args:
        sequence_dim: the dimension of the output that is sharded.
        use_local_output: return a tensor, not a DTensor sharded along ``sequence_dim``.
        strict: refuse rows that the ranks cannot share evenly and, without fp8, the unfused path,
            as `agmm.matmul_reduce_scatter` does.
        fp8: see `ColumnParallelLinear`; a ``Float8Linear`` of torchao keeps its own recipe.
    """

    def __init__(
        self,
        *,
        sequence_dim: int = 1,
        use_local_output: bool = True,
        strict: bool = False,
        fp8: str | Fp8Recipe | None = None,
    ) -> None:
        super().__init__()
        self.sequence_dim = sequence_dim
        self.use_local_output = use_local_output
        self.strict = strict
        self.fp8 = fp8_recipe.resolved(fp8)

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        target = Target(self, module).checked(device_mesh, "in_features", self.fp8)
        return target.serve(device_mesh, BY_INPUTS, _scattered_product, self.sequence_dim)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(sequence_dim={self.sequence_dim})"


def _scattered_product(
    target: Target, style: RowwiseScatterParallel, ranks: Ranks, x: torch.Tensor
) -> torch.Tensor:
    dim = style.sequence_dim
    target.check_operand(x)
    weight, bias = target.local_parameters(BY_INPUTS)
    x = local(x, Shard(x.dim() - 1))
    target.check_input(x, weight, dim, weight.shape[0])
    rows, length, shape = x.movedim(dim, 0), x.shape[dim], None
    if length % ranks.size:
        if style.use_local_output:  # Whoever takes plain shards of several sizes cannot know of it.
            raise target.fault(
                f"x: found {length} in dimension {dim}, wanted a multiple of the {ranks.size} "
                "ranks, or the style with use_local_output=False: only a DTensor knows the whole"
            )
        target.fill_up(length, dim, ranks.size, style.strict)
        rows = filled_up(rows, ranks.size)
        shape = (*x.shape[:-1], weight.shape[1])
    if target.fp8 is not None:
        out = scatter_product(target.fp8, rows.contiguous(), weight, bias, ranks.own_name)
    else:
        out = matmul_reduce_scatter(rows, weight, ranks.for_ops, bias=bias, strict=style.strict)
    if shape is None:
        return wanted_output(style, ranks, out.movedim(0, dim), Shard(dim))
    own = own_rows_of(out, length, ranks).movedim(0, dim).contiguous()
    return wanted_output(style, ranks, own, Shard(dim), shape)
