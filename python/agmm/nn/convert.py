"""A plan of torch's styles, or of transformers' names of styles, made one of agmm's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from agmm.errors import InvalidArgument, Unsupported, warn_once
from agmm.nn._gated_plan import Entry, merge_gates, shared_style, take_packed_gates_apart
from agmm.nn._gathers import gather_of
from agmm.nn._laid_out import LaidOut, SummedGradients
from agmm.nn._ranks import group_of_mesh
from agmm.nn._targets import Target
from agmm.nn.packed_style import PackedColwiseParallel
from agmm.nn.replicated import ReplicatedColwiseParallel, RowwiseAllReduceParallel
from agmm.nn.styles import GatherColwiseParallel, RowwiseScatterParallel

_FEATURES = Shard(-1)

_NAMED: dict[str, Callable[[], ParallelStyle | None]] = {
    "all_reduce": lambda: PrepareModuleOutput(
        output_layouts=Partial(), desired_output_layouts=Replicate()
    ),
    "colwise": ColwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "embedding_colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "replicate": lambda: None,
    "replicated_with_grad_allreduce": SummedGradients,
    "rowwise": RowwiseParallel,
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "sequence_parallel": lambda: SequenceParallel(use_local_output=True),
}
"""transformers' names of styles, as its registry has them in 5.24, by what torch has for them. Its
other names have nothing: packed weights, experts, and a part of DeepSeek's attention."""

_INSTEAD = {
    "packed": "agmm.nn.PackedColwiseParallel",
    "moe": "agmm.nn.ExpertParallel in a plan of your own",
    "ep": "agmm.nn.ExpertParallel in a plan of your own",
}

_KEPT = (PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput, SequenceParallel)


def convert_plan(
    module: torch.nn.Module,
    device_mesh: DeviceMesh,
    plan: Mapping[str, ParallelStyle | str],
    *,
    strict: bool = False,
) -> dict[str, ParallelStyle]:
    """A plan of torch's styles, or of transformers' names of styles, whose linears agmm serves.

    For ``parallelize_module(module, device_mesh, convert_plan(module, device_mesh, plan))``. Each
    entry keeps the layouts that it gives. A ``PrepareModuleInput`` that gathers a module's first
    argument, and the column-wise linears in that module, become one `SharedGatherParallel`, so the
    module has to give its input to these linears alone. Styles of embeddings, norms and other
    inputs and outputs, which communicate for no linear, stay torch's, and those of agmm stay too.

    Args:
        module: that the plan is for, not sharded yet. Nothing is changed.
        device_mesh: 1-D mesh.
        plan: styles, or transformers' names of them, as ``model.tp_plan`` has, by names of modules,
            in which each part may be a pattern.
        strict: raise where an entry with a linear stays torch's, for which there is one warning
            else.

    Returns:
        Styles by names of modules, without patterns.

    Raises:
        InvalidArgument: names an entry that has no style of torch's or agmm's.
        Unsupported: names an entry that stays torch's, under ``strict`` only.
    """
    group_of_mesh(device_mesh)
    left: dict[str, str] = {}
    entries = _entries(module, plan, left)
    take_packed_gates_apart(module, entries, device_mesh)
    found: dict[str, ParallelStyle] = {entry.name: entry.style for entry in entries.values()}
    seen: set[str] = set()
    # A linear belongs to the innermost module that gathers.
    for name in sorted(entries, key=_depth, reverse=True):
        gather = gather_of(entries[name].style, entries[name].module)
        if gather is None:
            continue
        columns = [one for one in _columns_in(entries, name) if one.name not in seen]
        if not columns:
            continue
        seen |= {name, *(one.name for one in columns)}
        shared = shared_style(entries, entries[name], gather, columns, device_mesh)
        if isinstance(shared, str):
            left.setdefault(entries[name].key, shared)
            continue
        found[name] = shared
        for one in columns:
            del found[one.name]
    for name, entry in entries.items():
        if name in found and name not in seen:
            style = _converted(entry, device_mesh)
            if isinstance(style, str):
                left.setdefault(entry.key, style)
            else:
                found[name] = style
    merge_gates(module, found)
    if left:
        _say(left, strict)
    return found


def _depth(name: str) -> int:
    return name.count(".") + 1 if name else 0


def _say(left: dict[str, str], strict: bool) -> None:
    reasons = "; ".join(f"{key!r}: {why}" for key, why in left.items())
    if strict:
        raise Unsupported(f"plan: {reasons}; strict=True refuses what agmm leaves to torch")
    warn_once(f"agmm leaves entries of a plan to torch: {reasons}")


def _entries(
    module: torch.nn.Module, plan: Mapping[str, ParallelStyle | str], left: dict[str, str]
) -> dict[str, Entry]:
    """Each module that the plan names, once; what names none goes to ``left``."""
    found: dict[str, Entry] = {}
    for key, given in plan.items():
        style = _style(key, given)
        if style is None:
            continue
        matches = list(_matches(module, key.split(".") if key else [], ""))
        if not matches:
            left[key] = "found no such module"
        for name, one in matches:
            if name in found:
                raise InvalidArgument(
                    f"plan: {key!r}: found {name!r}, which {found[name].key!r} names too, wanted "
                    "one entry for each module"
                )
            found[name] = Entry(key, name, one, style)
    return found


def _matches(
    module: torch.nn.Module, tokens: list[str], prefix: str
) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules that ``parallelize_module`` finds for an entry."""
    if not tokens:
        yield prefix.rstrip("."), module
        return
    for name, child in module.named_children():
        if fnmatch(name, tokens[0]):
            yield from _matches(child, tokens[1:], f"{prefix}{name}.")


def _style(key: str, given: Any) -> ParallelStyle | None:
    if isinstance(given, ParallelStyle):
        return given
    if not isinstance(given, str):
        raise InvalidArgument(
            f"plan: {key!r}: found {type(given).__name__}, wanted a ParallelStyle or the name of a "
            "style of transformers"
        )
    if given not in _NAMED:
        instead = _INSTEAD.get(given.partition("_")[0], f"one of {sorted(_NAMED)}")
        raise InvalidArgument(f"plan: {key!r}: found {given!r}, wanted {instead}")
    return _NAMED[given]()


def _columns_in(entries: dict[str, Entry], name: str) -> list[Entry]:
    """The linears in a module whose input is the same on all ranks, and whose outputs are
    sharded."""
    prefix = f"{name}." if name else ""
    return [
        entry
        for entry in entries.values()
        if entry.name.startswith(prefix)
        and isinstance(entry.module, torch.nn.Linear)
        and _takes_all_rows(entry.style)
    ]


def _takes_all_rows(style: Any) -> bool:
    if type(style) is PackedColwiseParallel:
        return style.sequence_dim is None
    return type(style) is ColwiseParallel and style.input_layouts == (Replicate(),)


def _converted(entry: Entry, mesh: DeviceMesh) -> ParallelStyle | str:
    """The style in the place of an entry's, or why it is torch's still."""
    style, kind = entry.style, type(entry.style)
    if kind in _KEPT or kind.__module__.partition(".")[0] == "agmm":
        return style
    if kind is not ColwiseParallel and kind is not RowwiseParallel:
        return f"found {kind.__module__}.{kind.__qualname__}, which agmm does not know"
    if isinstance(entry.module, torch.nn.Embedding):
        return style
    if not isinstance(entry.module, torch.nn.Linear):
        raise InvalidArgument(
            f"plan: {entry.key!r}: found {kind.__name__} on {type(entry.module).__name__}, wanted "
            "it on torch.nn.Linear or torch.nn.Embedding"
        )
    by_columns = kind is ColwiseParallel
    made = _of_columns(style) if by_columns else _of_rows(style)
    if isinstance(made, str):
        return made
    target = Target(made.style if isinstance(made, LaidOut) else made, entry.module, entry.name)
    try:
        target = target.checked(mesh, "out_features" if by_columns else "in_features", None)
    except InvalidArgument as error:
        return str(error)
    without = ReplicatedColwiseParallel, RowwiseAllReduceParallel
    if target.fp8 is not None and isinstance(target.style, without):
        return f"found {target.fp8.name} fp8, which {type(target.style).__name__} has not"
    return made


def _of_columns(style: Any) -> ParallelStyle | str:
    given, wanted = style.input_layouts[0], style.output_layouts[0]
    is_own = wanted == _FEATURES
    options = {"use_local_output": style.use_local_output and is_own}
    made: ParallelStyle
    if _is_of_rows(given):
        made = GatherColwiseParallel(sequence_dim=given.dim, **options)
    else:
        made = ReplicatedColwiseParallel(**options)
    return _laid_out(made, style, given != _FEATURES, is_own)


def _of_rows(style: Any) -> ParallelStyle | str:
    given, wanted = style.input_layouts[0], style.output_layouts[0]
    is_own = wanted != _FEATURES
    options = {"use_local_output": style.use_local_output and is_own}
    made: ParallelStyle
    if _is_of_rows(wanted):
        made = RowwiseScatterParallel(sequence_dim=wanted.dim, **options)
    else:
        made = RowwiseAllReduceParallel(**options)
    return _laid_out(made, style, given == _FEATURES, is_own)


def _laid_out(
    made: ParallelStyle, style: Any, takes_input: bool, gives_output: bool
) -> ParallelStyle | str:
    """agmm's style with the layouts of torch's, or why it cannot have them. It takes an input, or
    gives an output, as torch's says, or another one."""
    given, wanted = style.input_layouts[0], style.output_layouts[0]
    for layout in (given, wanted):
        if type(layout) not in (Shard, Replicate):
            return f"found the layout {layout!r}, wanted Shard or Replicate"
    if takes_input and gives_output:
        return made
    first, last = None if takes_input else given, None if gives_output else wanted
    return LaidOut(made, first, last, style.use_local_output)


def _is_of_rows(layout: Placement) -> bool:
    return type(layout) is Shard and layout != _FEATURES
