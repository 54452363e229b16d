"""Which of torch's styles of a module's input gathers it, and what else that style does."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
)


class Gather(NamedTuple):
    """A style that gathers arguments of a module.

    Attributes:
        dim: along which the first argument is gathered.
        beside: styles that do what else it does.
        why_not: why it gathers otherwise than the linears of the module would.
    """

    dim: int = 0
    beside: Sequence[ParallelStyle] = ()
    why_not: str | None = None


def gather_of(style: ParallelStyle, module: torch.nn.Module) -> Gather | None:
    """The gather of a style; None where it has none."""
    inputs: Any = style
    behind: list[ParallelStyle] = []
    if type(style) is PrepareModuleInputOutput:
        inputs, behind = style.prepare_module_input, [style.prepare_module_output]
    if type(inputs) is not PrepareModuleInput:
        return None
    layouts = list(inputs.input_layouts or ())
    given: dict[Any, Any] = dict(enumerate(layouts)) | dict(inputs.input_kwarg_layouts)
    wanted: dict[Any, Any] = dict(enumerate(inputs.desired_input_layouts or ()))
    wanted |= inputs.desired_input_kwarg_layouts
    changed = [
        place
        for place, layout in given.items()
        if layout is not None and wanted.get(place) not in (None, layout)
    ]
    if not any(isinstance(given[place], Shard) for place in changed):
        return None
    first = next(iter(inspect.signature(module.forward).parameters), "")
    if len(changed) > 1 or changed[0] not in (0, first):
        return Gather(why_not="found a gather of other arguments, wanted one of the first alone")
    layout = given.pop(changed[0])
    if type(layout) is not Shard or layout.dim == -1 or wanted[changed[0]] != Replicate():
        found = f"{layout!r} to {wanted[changed[0]]!r}"
        return Gather(why_not=f"found {found}, wanted a Shard of rows to Replicate()")
    return Gather(layout.dim, [*_rest(inputs, given, wanted, len(layouts)), *behind])


def _rest(
    inputs: Any, given: Mapping[Any, Any], wanted: Mapping[Any, Any], arguments: int
) -> list[ParallelStyle]:
    """The style of the other arguments, where they have one."""
    layouts = [given.get(i) for i in range(arguments)]
    named = {name: layout for name, layout in given.items() if isinstance(name, str)}
    if not named and not any(layouts):
        return []
    desired: Any = tuple(wanted.get(i) for i in range(arguments)) or None
    return [
        PrepareModuleInput(
            input_layouts=tuple(layouts) or None,
            desired_input_layouts=desired,
            input_kwarg_layouts=named or None,
            desired_input_kwarg_layouts={name: wanted[name] for name in named} or None,
            use_local_output=inputs.use_local_output,
        )
    ]
