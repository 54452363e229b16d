"""The parts of a converted plan that several modules have in common: shared gathers, gates that are
computed with their products, and packed linears."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from agmm.errors import InvalidArgument
from agmm.nn._gated_form import GatedForm, gated_form
from agmm.nn._gathers import Gather
from agmm.nn._laid_out import GatherOfInput, Several, UnpackedParts
from agmm.nn._targets import Target
from agmm.nn.gated_style import GatedGatherParallel
from agmm.nn.packed_style import PackedColwiseParallel
from agmm.nn.replicated import RowwiseAllReduceParallel
from agmm.nn.styles import GatherColwiseParallel, RowwiseScatterParallel, SharedGatherParallel

FEATURES = Shard(-1)


class Entry(NamedTuple):
    """A module, by its name, with the style that the entry ``key`` of a plan gives it."""

    key: str
    name: str
    module: torch.nn.Module
    style: ParallelStyle


def _gated_modules(
    module: torch.nn.Module, names: list[str]
) -> Iterator[tuple[str, str, GatedForm]]:
    """Each gated feed-forward that holds one of these modules: its name, what its modules' names
    begin with, and its form."""
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in names if name):
        form = gated_form(module.get_submodule(parent))
        if form is not None:
            yield parent, f"{parent}." if parent else "", form


def take_packed_gates_apart(
    module: torch.nn.Module, entries: dict[str, Entry], mesh: DeviceMesh
) -> None:
    """Changes the entries of gated modules in which one linear computes gate and up and gathers
    its outputs, to be halved by the module: each rank then keeps its columns of both."""
    for _, prefix, form in _gated_modules(module, list(entries)):
        both, down = entries.get(prefix + form.gate), entries.get(prefix + form.down)
        if not form.is_packed or both is None or down is None:
            continue
        by_columns, by_rows = both.style, down.style
        if type(by_columns) is not ColwiseParallel or type(by_rows) is not RowwiseParallel:
            continue
        given: Any = by_columns.input_layouts[0]
        is_gathered = (by_columns.output_layouts, by_rows.input_layouts) == ((Replicate(),),) * 2
        if not is_gathered or type(given) not in (Replicate, Shard) or given == FEATURES:
            continue
        packed = PackedColwiseParallel(sequence_dim=getattr(given, "dim", None))
        try:
            packed.checked(both.module, mesh)
        except InvalidArgument:  # it keeps gathering
            continue
        entries[both.name] = both._replace(style=packed)
        wanted = by_rows.output_layouts[0], by_rows.use_local_output
        style = RowwiseParallel(output_layouts=wanted[0], use_local_output=wanted[1])
        entries[down.name] = down._replace(style=style)


def merge_gates(module: torch.nn.Module, found: dict[str, ParallelStyle]) -> None:
    """Has gated modules gather once whose linears would each do."""
    for parent, prefix, form in _gated_modules(module, list(found)):
        styles = [found.get(prefix + name) for name in (form.gate, form.up)]
        options = _options_of_gather(styles[0])
        if parent in found or options is None or options != _options_of_gather(styles[1]):
            continue
        if form.is_packed == isinstance(styles[0], PackedColwiseParallel):
            for name in {form.gate, form.up}:
                del found[prefix + name]
            found[parent] = GatedGatherParallel(**options)


def _options_of_gather(style: Any) -> dict[str, Any] | None:
    if type(style) is PackedColwiseParallel and style.sequence_dim is not None:
        return {"sequence_dim": style.sequence_dim, **style.options}
    if type(style) is not GatherColwiseParallel:
        return None
    names = "sequence_dim", "use_local_output", "save_gathered", "strict", "fp8"
    return {name: getattr(style, name) for name in names}


def shared_style(
    entries: dict[str, Entry],
    holder: Entry,
    gather: Gather,
    columns: list[Entry],
    mesh: DeviceMesh,
) -> ParallelStyle | str:
    """The style by which the linears of a module share a gather, or why there is none."""
    if gather.why_not is not None:
        return gather.why_not
    packed: dict[str, Any] = {
        one.name: one.style for one in columns if type(one.style) is PackedColwiseParallel
    }
    plain = [one for one in columns if one.name not in packed]
    styles: list[Any] = [one.style for one in plain]
    local = {style.use_local_output for style in styles} | {True for _ in packed}
    if len(local) > 1 or any(style.output_layouts != (FEATURES,) for style in styles):
        return "found column-wise linears with several layouts of outputs in it"
    linears: list[Any] = [one.module for one in columns]
    features = {linear.in_features for linear in linears}
    if len(features) > 1:
        return f"found column-wise linears of {sorted(features)} features in it, wanted one number"
    own = len(holder.name) + 1 if holder.name else 0
    options: dict[str, Any] = {"sequence_dim": gather.dim, "use_local_output": local.pop()}
    form = gated_form(holder.module)
    shared: SharedGatherParallel
    before: list[ParallelStyle] = []
    if form is not None and {one.name[own:] for one in columns} == {form.gate, form.up}:
        shared = GatedGatherParallel(**options)
    else:
        inner = {one.name: one.name[own:] for one in columns}
        names = [
            part
            for name, short in inner.items()
            for part in (packed[name].names_in(short) if name in packed else [short])
        ]
        shared = GatherOfInput(*names, **options)
        before += [UnpackedParts(inner[name], style) for name, style in packed.items()]
    try:
        targets = [
            Target(shared, one.module, one.name).checked(mesh, "out_features", None)
            for one in plain
        ]
        for one in columns:
            if one.name in packed:
                packed[one.name].checked(one.module, mesh, one.name)
    except InvalidArgument as error:
        return str(error)
    recipes = [target.fp8 for target in targets] + [None for _ in packed]
    if any(recipe != recipes[0] for recipe in recipes):
        return "found column-wise linears of several fp8 recipes in it"
    other = _other_taker(entries, holder, columns, features.pop())
    if other is not None:
        return f"found {other!r} in it, which may take the gathered input too"
    every = [*gather.beside, *before, shared]
    return Several(every) if len(every) > 1 else shared


def _other_taker(
    entries: dict[str, Entry], holder: Entry, columns: list[Entry], features: int
) -> str | None:
    """A module beside the column-wise linears that may take what they take, by its parameters'
    sizes, as a router, or a norm that a module begins with."""
    known = {one.name for one in columns}
    prefix = f"{holder.name}." if holder.name else ""
    for inner, module in holder.module.named_modules():
        name = f"{prefix}{inner}".rstrip(".") if inner else holder.name
        entry = entries.get(name)
        if name in known or (entry is not None and _takes_features(entry.style)):
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.dim() and parameter.shape[-1] == features:
                return name
    return None


def _takes_features(style: ParallelStyle) -> bool:
    """Whether the style's input is sharded along its features, so that it is no gathered one."""
    if type(style) is RowwiseParallel:
        return style.input_layouts == (FEATURES,)
    return isinstance(style, (RowwiseScatterParallel, RowwiseAllReduceParallel))
