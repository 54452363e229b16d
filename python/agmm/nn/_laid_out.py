"""Styles that a converted plan is made of beside agmm's own: other layouts at a linear's ends, a
shared gather that looks at what it is given, several styles on one module, and parameters that see
a part of an activation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.parallel import ParallelStyle

from agmm.nn import _divided
from agmm.nn._ranks import Ranks, ascending
from agmm.nn._summed_gradients import summed_gradients
from agmm.nn._targets import Target
from agmm.nn.packed_style import PackedColwiseParallel
from agmm.nn.styles import SharedGatherParallel


class LaidOut(ParallelStyle):
    """A style of agmm's whose linear is given another layout than its own, or returns another.

    Args:
        style: agmm's, which returns a DTensor where ``output_layout`` is given.
        input_layout: of an input that is no DTensor; None for the style's own.
        output_layout: of the output; None for the style's own.
        use_local_output: whether such an output is returned as this rank's tensor.
    """

    def __init__(
        self,
        style: ParallelStyle,
        input_layout: Placement | None,
        output_layout: Placement | None,
        use_local_output: bool,
    ) -> None:
        super().__init__()
        self.style = style
        self.input_layout = input_layout
        self.output_layout = output_layout
        self.use_local_output = use_local_output

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        self.style.src_data_rank = self.src_data_rank
        module = self.style._apply(module, device_mesh)
        _divided.forget(module)
        if self.input_layout is not None:
            mesh = ascending(device_mesh)
            module.register_forward_pre_hook(partial(_as_dtensor, mesh, self.input_layout))
        if self.output_layout is not None:
            wanted = self.output_layout, self.use_local_output
            module.register_forward_hook(partial(_redistributed, *wanted))
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.style}, {self.input_layout!r}, {self.output_layout!r})"


def _as_dtensor(
    mesh: DeviceMesh, placement: Placement, _: torch.nn.Module, args: tuple[Any, ...]
) -> tuple[Any, ...]:
    x = args[0]
    if isinstance(x, torch.Tensor) and not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [placement], run_check=False)
    return (x, *args[1:])


def _redistributed(
    placement: Placement, is_local: bool, _: torch.nn.Module, __: Any, out: DTensor
) -> torch.Tensor:
    out = out.redistribute(placements=[placement])
    return out.to_local() if is_local else out


class GatherOfInput(SharedGatherParallel):
    """The shared gather of a converted plan. The linears took a gathered input there, and take
    shards now; what is no shard, as the states of an encoder, is refused by its length."""

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        module = super()._apply(module, device_mesh)
        lengths: list[int] = []
        module.register_forward_pre_hook(
            partial(_note_length, lengths, self.sequence_dim), with_kwargs=True
        )
        module.register_forward_hook(partial(_forget_length, lengths), always_call=True)
        for name in self.names:
            target = Target(self, module.get_submodule(name), f"{type(module).__name__}.{name}")
            hook = partial(_check_length, target, lengths, self.sequence_dim)
            target.module.register_forward_pre_hook(hook)
        return module


def _is_shard(x: Any) -> bool:
    """Whether only its length tells a tensor that is a shard from one that is none."""
    return type(x) is torch.Tensor and x.dim() > 1


def _note_length(
    lengths: list[int], dim: int, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    x = next(iter((*args, *kwargs.values())), None)
    lengths[:] = [x.shape[dim]] if isinstance(x, torch.Tensor) and _is_shard(x) else []


def _forget_length(lengths: list[int], *_: Any) -> None:
    """A linear that is called outside of the module has no length to keep to."""
    lengths.clear()


def _check_length(
    target: Target, lengths: list[int], dim: int, _: torch.nn.Module, args: tuple[Any, ...]
) -> None:
    x = args[0]
    if lengths and _is_shard(x) and x.shape[dim] != lengths[0]:
        raise target.fault(
            f"x: found {x.shape[dim]} in dimension {dim}, wanted {lengths[0]} as in the input of "
            "the module: the linear of a converted plan takes shards of that alone"
        )


class Several(ParallelStyle):
    """Styles that are applied to one module, one after the other."""

    def __init__(self, styles: Sequence[ParallelStyle]) -> None:
        super().__init__()
        self.styles = tuple(styles)

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        for style in self.styles:
            style.src_data_rank = self.src_data_rank
            module = style._apply(module, device_mesh)
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.styles))})"


class UnpackedParts(ParallelStyle):
    """A module in which a packed linear is taken apart; another style shards what it is made of.

    Args:
        name: the linear's, in the module.
        style: how it is packed.
    """

    def __init__(self, name: str, style: PackedColwiseParallel) -> None:
        super().__init__()
        self.name = name
        self.style = style

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        self.style.unpack(module.get_submodule(self.name), device_mesh, self.name)
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.style.sizes!r})"


class SummedGradients(ParallelStyle):
    """A module whose parameters are whole on each rank, which has a part of its input, as norms of
    heads: their gradients are summed over the ranks."""

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        module.forward = partial(
            _with_summed_gradients, module, Ranks(device_mesh, None), module.forward
        )
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def _with_summed_gradients(
    module: torch.nn.Module, ranks: Ranks, forward: Any, *args: Any, **kwargs: Any
) -> Any:
    with summed_gradients(module, ranks):
        return forward(*args, **kwargs)
