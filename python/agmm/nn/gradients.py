"""The gradients of a model of which some parameters are sharded: their sum and their norm."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from agmm.errors import InvalidArgument
from agmm.nn._held import local_values
from agmm.nn._parameters import ShardedModule
from agmm.nn._ranks import resolved
from agmm.runtime import groups, identity
from agmm.runtime.backends import check_movable


@torch.no_grad()
def sum_replicated_gradients(
    module: torch.nn.Module,
    group: dist.ProcessGroup | DeviceMesh | str | None = None,
    *,
    exclude: Iterable[str] = (),
) -> None:
    """Add up over the ranks the gradients of parameters that all ranks hold whole. Collective.

    For parameters that were applied to this rank's rows only, as those of norms under sequence
    parallelism. One that several modules share counts once. Those of agmm's layers are left alone,
    and so are DTensors over a mesh with other ranks of the group: they are right already. Of
    DTensors over other ranks, as FSDP2 makes of norms on a 2-D mesh, this rank's shard is summed.
    A gradient that is missing on some ranks counts as zero there, and these get the sum too; one
    that is missing on all stays so. Call it after the backward, before `clip_grad_norm_` and the
    optimizer's step, on all ranks of the group.

    Args:
        group: the tensor-parallel ranks: a process group, its name or a 1-D mesh; the default
            group when None.
        exclude: names of parameters, or of modules with all that they hold, whose gradients stay
            as they are, e.g. of a layer that every rank gave all rows.

    Raises:
        InvalidArgument: a name in ``exclude`` that the module has not, no group of this rank, a
            gradient that is not dense, or parameters whose names, shapes, dtypes or kinds of
            devices differ between the ranks. All ranks raise, except for the group.
    """
    ranks = resolved(group)
    fault, summed = "", []
    try:
        summed = _to_sum(module, exclude, ranks)
    except InvalidArgument as error:  # raised once the other ranks know of it
        fault = str(error)
    if ranks.size() > 1:
        summed = _agreed(ranks, summed, fault)
    if fault:
        raise InvalidArgument(fault)
    if ranks.size() > 1:
        _sum([one.values() for one in summed], ranks)


class _Summed(NamedTuple):
    """A parameter whose gradient is to be summed."""

    name: str
    parameter: torch.nn.Parameter

    @property
    def is_missing(self) -> bool:
        return self.parameter.grad is None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the gradient, which may be another one than the parameter's."""
        if self.parameter.grad is not None:
            return self.parameter.grad.dtype
        found: torch.dtype | None = getattr(self.parameter, "grad_dtype", None)
        return found or self.parameter.dtype

    def values(self) -> torch.Tensor:
        """The memory of the gradient on this rank, which is zero where there was none."""
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter, dtype=self.dtype)
        return local_values(self.parameter.grad)


def _to_sum(
    module: torch.nn.Module, exclude: Iterable[str], ranks: dist.ProcessGroup
) -> list[_Summed]:
    """All that may have a gradient, so that they do not depend on what this rank's rows needed."""
    left_alone = {id(p) for p in _named(module, exclude)}
    for layer in _sharded_layers(module):
        left_alone |= {id(p) for p in layer.parameters(recurse=False)}
    members = set(dist.get_process_group_ranks(ranks))
    found = []
    for name, parameter in module.named_parameters():  # each once
        grad = parameter.grad
        if id(parameter) in left_alone or (grad is None and not parameter.requires_grad):
            continue
        placed = grad if isinstance(grad, DTensor) else parameter
        if isinstance(placed, DTensor):
            over = set(placed.device_mesh.mesh.flatten().tolist())
            if len(members & over) > 1:
                continue
        if grad is not None and grad.layout != torch.strided:
            raise InvalidArgument(
                f"module: found a gradient of {name!r} of layout {grad.layout}, wanted "
                "torch.strided"
            )
        found.append(_Summed(name, parameter))
    return found


def _agreed(ranks: dist.ProcessGroup, summed: list[_Summed], fault: str) -> list[_Summed]:
    """The parameters that some rank has a gradient of. Raises InvalidArgument on all ranks where
    they are not about to sum the same. A step in which no rank misses any takes one reduction of a
    few numbers."""
    devices: dict[torch.device, int] = {}
    words = []
    for one in summed:
        part = local_values(one.parameter)
        place = f"{part.device.type} {devices.setdefault(part.device, len(devices))}"
        words.append(f"{one.name!r} {list(part.shape)} {one.dtype} on {place}")
    digest = hashlib.blake2b("\n".join([fault, *words]).encode(), digest_size=14).digest()
    halves = [int.from_bytes(digest[i : i + 7], "big") for i in (0, 7)]
    is_missing = any(one.is_missing for one in summed)
    *found, is_any_missing = _largest(ranks, [*halves, *(-half for half in halves), is_missing])
    if found[:2] != [-half for half in found[2:]]:
        _refuse_differences(ranks, words, fault)
    if not is_any_missing:
        return summed
    present = _largest(ranks, [not one.is_missing for one in summed])
    return [one for one, is_there in zip(summed, present, strict=True) if is_there]


def _largest(ranks: dist.ProcessGroup, values: Sequence[int]) -> list[int]:
    """The largest of the ranks' values, of each by itself."""
    kinds = {device.type for device in ranks._device_types}
    # The numbers are on the CPU where the group can take them there: a look at a GPU's memory waits
    # for all that it has to do.
    device = "cpu" if "cpu" in kinds else min(kinds)
    found = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=ranks)
    return [int(value) for value in found.tolist()]


def _refuse_differences(ranks: dist.ProcessGroup, words: list[str], fault: str) -> NoReturn:
    topic = "the parameters whose gradients they sum"
    told = [json.loads(one) for one in groups.of(ranks).exchange(topic, json.dumps([fault, words]))]
    for rank, (theirs, _) in enumerate(told):
        if theirs:
            raise InvalidArgument(theirs if theirs == fault else f"rank {rank}: {theirs}")
    first, none = told[0][1], "no other parameter"
    for rank, (_, others) in enumerate(told):
        for one, other in zip_longest(first, others, fillvalue=none):
            if one != other:
                raise InvalidArgument(
                    f"module: found {one} on rank 0 and {other} on rank {rank}, wanted the same "
                    "parameters, by name, shape, dtype and device, on all ranks"
                )
    raise AssertionError("equal words have unequal digests")


_AT_ONCE_BYTES = 4 << 20
"""The most that one all-reduce sums, a choice: larger ones hardly take less for a byte."""


def _sum(parts: list[torch.Tensor], ranks: dist.ProcessGroup) -> None:
    """Adds up each over the ranks, in place: those that follow each other and are of a kind at
    once, up to a size. What is reduced depends on nothing but what the ranks have agreed on."""
    together: list[torch.Tensor] = []
    size = 0
    for part in parts:
        first = together[0] if together else part
        is_alike = part.dtype == first.dtype and part.device == first.device
        if not is_alike or size + part.nbytes > _AT_ONCE_BYTES:
            _sum_at_once(together, ranks)
            together, size = [], 0
        together.append(part)
        size += part.nbytes
    _sum_at_once(together, ranks)


def _sum_at_once(parts: list[torch.Tensor], ranks: dist.ProcessGroup) -> None:
    if not any(part.numel() for part in parts):
        return
    if len(parts) == 1 and parts[0].is_contiguous():
        dist.all_reduce(parts[0], group=ranks)
        return
    dense = torch.cat([part.reshape(-1) for part in parts])
    dist.all_reduce(dense, group=ranks)
    for part, summed in zip(parts, dense.split([part.numel() for part in parts]), strict=True):
        part.copy_(summed.view(part.shape))


def _sharded_layers(module: torch.nn.Module) -> Iterator[ShardedModule]:
    return (layer for layer in module.modules() if isinstance(layer, ShardedModule))


def _named(module: torch.nn.Module, names: Iterable[str]) -> Iterator[torch.nn.Parameter]:
    if isinstance(names, str):
        raise InvalidArgument(f"exclude: found the string {names!r}, wanted a list of names")
    modules = dict(module.named_modules(remove_duplicate=False))
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name in names:
        if name in parameters:
            yield parameters[name]
        elif name in modules:
            yield from modules[name].parameters()
        else:
            raise InvalidArgument(
                f"exclude: found {name!r}, wanted the name of a parameter or of a module in "
                f"{type(module).__name__}"
            )


@torch.no_grad()
def clip_grad_norm_(
    module_or_parameters: torch.nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_`` of the whole model. Collective.

    The norm is that of all gradients as one vector: parts that the ranks hold of a DTensor are
    summed over the ranks of its mesh, what every rank holds is counted once. Every rank of those
    meshes calls it, with the same parameters in the same order. Parameters that are no DTensors
    count as replicated: call `sum_replicated_gradients` before, where they saw this rank's rows.

    Args:
        module_or_parameters: the module, or its parameters.
        max_norm: the largest norm that the gradients keep.
        norm_type: p of the norm, larger than 0; ``float("inf")`` for the largest magnitude.
        error_if_nonfinite: raise where the norm is infinite or not a number.

    Returns:
        The norm before the clipping, a scalar of at least float32; the same on all ranks.

    Raises:
        InvalidArgument: norm_type is not larger than 0, or the ranks' group has been destroyed.
        RuntimeError: the norm is not finite, with ``error_if_nonfinite``; nothing was scaled.
    """
    p = float(norm_type)
    if not p > 0:
        raise InvalidArgument(f"norm_type: found {norm_type}, wanted a number larger than 0")
    parameters = list(_each_once(module_or_parameters))
    if not parameters:
        return torch.tensor(0.0)
    dtype = torch.float32
    parts: list[torch.Tensor] = []
    # Gradients by the groups whose ranks hold parts of them. They are ordered by the parameters,
    # not by what has a gradient, so that all ranks reduce the same.
    shared: dict[tuple[_Sharers, ...], list[torch.Tensor]] = {}
    for parameter, sharers in parameters:
        dtype = torch.promote_types(dtype, parameter.dtype)
        own = shared.setdefault(sharers, [])
        grad = parameter.grad
        if grad is None:
            continue
        parts.append(local_values(grad))
        whole = _own_part(grad, parameter)
        if whole.numel():
            own.append(whole)
    device = local_values(parameters[0][0]).device
    is_max = p == float("inf")
    found = []
    for sharers, own in shared.items():
        value = _power_of_norm(own, p, dtype, device)
        for group, kind in sharers:
            value = value.to(kind)
            dist.all_reduce(value, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=group)
        found.append(value.to(device))
    powers = torch.stack(found)
    total = powers.max() if is_max else powers.sum() ** (1 / p)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"the gradients' norm of order {norm_type} is {total.item()}")
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for part in parts:
        by_device.setdefault(part.device, []).append(part)
    for place, own in by_device.items():
        torch._foreach_mul_(own, scale.to(place))
    return total


# A group whose ranks hold parts, and the type of device on which it communicates.
_Sharers = tuple[dist.ProcessGroup, str]


def _each_once(
    given: torch.nn.Module | torch.Tensor | Iterable[torch.Tensor],
) -> Iterator[tuple[torch.Tensor, tuple[_Sharers, ...]]]:
    """Each parameter and who shares it."""
    # Layers whose parameters a wrapper has made plain.
    plain: dict[int, tuple[_Sharers, ...]] = {}
    if isinstance(given, torch.nn.Module):
        for layer in _sharded_layers(given):
            for held in layer.held.values():
                for own in (layer.get_parameter(name) for name in held.names):
                    plain[id(own)] = _sharers_of(layer.as_dtensor(own, held))
        given = given.parameters()
    elif isinstance(given, torch.Tensor):
        given = [given]
    seen = set()
    for parameter in given:
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield parameter, plain.get(id(parameter)) or _sharers_of(parameter)


def _sharers_of(tensor: torch.Tensor) -> tuple[_Sharers, ...]:
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    return tuple(
        (identity.group_of_mesh(mesh, dim), mesh.device_type)
        for dim, placement in enumerate(tensor.placements)
        if not placement.is_replicate()
    )


def _own_part(grad: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """This rank's share of the gradient, summed over the ranks where it is not yet, and cut as the
    parameter is where all ranks have the whole of it, as torch's row-wise embedding leaves it."""
    if isinstance(grad, DTensor):
        like = parameter.placements if isinstance(parameter, DTensor) else grad.placements
        placements = [
            (Replicate() if of_parameter.is_partial() else of_parameter)
            if of_grad.is_partial() or of_grad.is_replicate()
            else of_grad
            for of_grad, of_parameter in zip(grad.placements, like, strict=True)
        ]
        if placements != list(grad.placements):
            check_movable(grad)
            grad = grad.redistribute(placements=placements)
    return local_values(grad)


def _power_of_norm(
    tensors: list[torch.Tensor], p: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The sum of the absolute values' p-th powers; for infinity the largest of the values."""
    if not tensors:
        return torch.zeros((), dtype=dtype, device=device)
    norms = torch.stack([n.to(device) for n in torch._foreach_norm(tensors, p, dtype=dtype)])
    return norms.max() if p == float("inf") else (norms**p).sum()
