"""Collectives by agmm's kernels on CUDA: for `agmm.collectives`, and before or behind a matmul of
few rows, which is too short to hide one."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from agmm import _core
from agmm.errors import Unsupported
from agmm.planning.cost_model.collectives import Kind, Method, collective_method, is_by_kernel
from agmm.runtime import backends, capabilities, collectives, groups, nan_check, symmetric
from agmm.runtime.calls import Call
from agmm.runtime.cpu_summands import add_up, sum_dtype
from agmm.runtime.cuda_background import CudaBackground
from agmm.runtime.cuda_collectives import ELEMENTS, CollectivesWorkspace
from agmm.runtime.group_gpus import group_facts
from agmm.runtime.group_topology import relays_of
from agmm.runtime.scaled import FP8
from agmm.runtime.workspaces import collectives_workspace

SUMMED = tuple(ELEMENTS)
"""The dtypes that are summed. Any dtype is gathered."""

_OPS: dict[Kind, _core.CollectiveOp] = {
    "all_gather": _core.CollectiveOp.all_gather,
    "reduce_scatter": _core.CollectiveOp.reduce_scatter,
    "all_reduce": _core.CollectiveOp.all_reduce,
}
_METHODS: dict[Method, _core.CollectiveMethod] = {
    "one_shot": _core.CollectiveMethod.one_shot,
    "two_shot": _core.CollectiveMethod.two_shot,
    "blocks": _core.CollectiveMethod.blocks,
}


_RELAYED_BYTES = 256 << 10
"""The most bytes that every rank gets of a gather or a sum over relays: the limit of torch's
all-reduce over a hybrid cube mesh (pytorch pull request 114001)."""
_PCIE_BYTES = 1 << 20
"""The most bytes that kernels move without NVLink, an estimate. A kernel sends over PCIe as fast as
NCCL does, in fewer steps, which saves a µs or two; beyond this size that is less than a tenth of
the time at 25 GB/s."""


def _core_method(
    kind: Kind, method: Method, x: torch.Tensor, group: dist.ProcessGroup
) -> _core.CollectiveMethod:
    """The method that the links allow: a packet has to arrive as a whole, and only over NVLink it
    is known to do so.

    Raises:
        Unsupported: NCCL is taken for this call over the group's links; all ranks raise.
    """
    nbytes = _whole_bytes(kind, x, dist.get_world_size(group))
    if relays_of(group, x.device) is not None:
        if kind == "reduce_scatter" or nbytes > _RELAYED_BYTES:
            raise Unsupported(
                f"group: {kind} of {nbytes} bytes where some GPUs have no NVLink; agmm's kernels "
                f"go round that for all_gather and all_reduce of at most {_RELAYED_BYTES}"
            )
        return _core.CollectiveMethod.relayed
    if group_facts(group, x.device).peer_atomics:
        return _METHODS[method]
    if nbytes > _PCIE_BYTES:
        raise Unsupported(
            f"group: {kind} of {nbytes} bytes without NVLink, agmm's kernels serve at most "
            f"{_PCIE_BYTES}"
        )
    return _core.CollectiveMethod.blocks


class CollectiveCall(NamedTuple):
    """Makes any number of calls of one kind, on contiguous tensors of one size and dtype.
    Collective; errors are those of `CollectivesWorkspace.call`."""

    workspace: CollectivesWorkspace
    op: _core.CollectiveOp
    method: _core.CollectiveMethod
    is_average: bool = False

    @property
    def is_ready(self) -> bool:
        """See `CollectivesWorkspace.is_ready`."""
        return self.workspace.is_ready

    def __call__(self, sent: torch.Tensor, out: torch.Tensor) -> None:
        self.workspace.call(self.op, self.method, sent, out, is_average=self.is_average)

    def start(self, sent: torch.Tensor, out: torch.Tensor) -> CudaBackground:
        """Make the call on a stream of its own: see `CollectivesWorkspace.start`."""
        return self.workspace.start(self.op, self.method, sent, out, is_average=self.is_average)


def prepare(
    kind: Kind,
    method: Method,
    sent: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    is_average: bool = False,
) -> CollectiveCall:
    """What makes calls like that of ``sent``. Errors are those of `CollectivesWorkspace.call`."""
    core_method = _core_method(kind, method, sent, group)
    workspace = collectives_workspace(group, sent.device)
    return CollectiveCall(workspace, _OPS[kind], core_method, is_average)


def prepare_again(
    kind: Kind, sent: torch.Tensor, group: dist.ProcessGroup, *, strict: bool = False
) -> CollectiveCall | None:
    """What makes more calls like one that was a part of another op; None where the group's backend
    served it, or the workspace has no memory yet."""
    if why_not(kind, sent, group, strict=strict) is not None:
        return None
    method = collective_method(kind, _whole_bytes(kind, sent, group.size()), group.size())
    try:
        found = prepare(kind, method, sent, group)
    except Unsupported:  # over the group's links
        return None
    return found if found.is_ready else None


def call(
    kind: Kind,
    method: Method,
    sent: torch.Tensor,
    out: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    is_average: bool = False,
) -> None:
    """Enqueue one call. Collective; arguments and errors are those of
    `CollectivesWorkspace.call`."""
    prepare(kind, method, sent, group, is_average=is_average)(sent, out)


def start(
    kind: Kind,
    method: Method,
    sent: torch.Tensor,
    out: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    is_average: bool = False,
) -> CudaBackground:
    """Enqueue one call on a stream of its own. Collective; arguments and errors are those of
    `call`."""
    return prepare(kind, method, sent, group, is_average=is_average).start(sent, out)


def has_norm(method: Method, x: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Whether a residual and a norm behind an all-reduce by this method are a part of its kernel.
    The same on all ranks, as long as they call with the same shapes and dtypes."""
    if x.shape[-1] * x.element_size() > _core.MAX_NORM_ROW_BYTES:
        return False
    return _core_method("all_reduce", method, x, group) in _NORMED


def goes_by_packets(x: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Whether packets may pass over the group's links, for an all-reduce of ``x``. The same on all
    ranks, as long as they call with the same shapes and dtypes."""
    try:
        method = _core_method("all_reduce", "one_shot", x, group)
    except Unsupported:
        return False
    return method == _core.CollectiveMethod.one_shot


_NORMED = (_core.CollectiveMethod.one_shot, _core.CollectiveMethod.two_shot)


class NormCall(NamedTuple):
    """Makes any number of all-reduces with a residual and a norm, of contiguous tensors of one
    kind. Collective; errors are those of `CollectivesWorkspace.call`."""

    workspace: CollectivesWorkspace
    method: _core.CollectiveMethod

    @property
    def is_ready(self) -> bool:
        """See `CollectivesWorkspace.is_ready`."""
        return self.workspace.is_ready

    def __call__(self, *tensors_and_eps: Any) -> None:
        """Enqueue one call; its arguments are those of `CollectivesWorkspace.all_reduce_rms_norm`
        behind the method."""
        self.workspace.all_reduce_rms_norm(self.method, *tensors_and_eps)


def prepare_norm(method: Method, x: torch.Tensor, group: dist.ProcessGroup) -> NormCall:
    """What sums tensors like ``x``, adds a residual and norms, where `has_norm` is true. Errors are
    those of `CollectivesWorkspace.call`."""
    core_method = _core_method("all_reduce", method, x, group)
    return NormCall(collectives_workspace(group, x.device), core_method)


def why_not(
    kind: Kind, x: torch.Tensor, group: dist.ProcessGroup, *, strict: bool = False
) -> str | None:
    """The reason why no kernel serves a collective of ``x`` on a GPU as a part of another op, or
    None. The same on all ranks, as long as they call with the same shapes and dtypes.
    Collective at first use.

    Args:
        strict: a kernel is taken for any size.
    """
    if backends.is_fake(group):
        return f"group: backend {backends.FAKE}, which has no other ranks"
    world_size = dist.get_world_size(group)
    nbytes = _whole_bytes(kind, x, world_size)
    if not is_by_kernel(0 if strict else nbytes, world_size):
        return f"{kind}: {nbytes} bytes of {world_size} ranks, NCCL is taken for that"
    if kind != "all_gather" and x.dtype not in SUMMED:
        return f"{kind}: dtype={x.dtype}, which agmm's kernels do not sum"
    reason = symmetric.why_group_unfused(group, x.device, capabilities.COLLECTIVES)
    if reason is not None:
        return reason
    return why_not_captured(x, group)


def why_not_captured(x: torch.Tensor, group: dist.ProcessGroup) -> str | None:
    """The reason why a call cannot be captured now, or None; also where none is."""
    if not torch.cuda.is_current_stream_capturing():
        return None
    if collectives_workspace(group, x.device).is_ready:
        return None
    return "workspace: found none for collectives during CUDA graph capture"


def _whole_bytes(kind: Kind, x: torch.Tensor, world_size: int) -> int:
    return x.nbytes * world_size if kind == "all_gather" else x.nbytes


def all_reduced(
    partial: torch.Tensor, group: dist.ProcessGroup, for_call: Call, *, in_order: bool = False
) -> torch.Tensor:
    """The sum over the ranks of a product, which may be overwritten: by a kernel, or the group's
    backend.

    Args:
        in_order: sums of any size are made in the order of the ranks and rounded once. A kernel
            does that; where there is none the backend gathers what each rank adds up.
    """
    if in_order and group.size() == 1:
        return partial
    if _is_by_kernel("all_reduce", partial, group, strict=in_order):
        partial = partial.contiguous()
        _look_through(partial, group, for_call)
        method = collective_method("all_reduce", partial.nbytes, group.size())
        with contextlib.suppress(Unsupported):  # nothing was begun, on no rank
            call("all_reduce", method, partial, partial, group)
            return partial
    if in_order:
        parts = collectives.start_all_gather(partial, group.group_name, 0, call=for_call)()
        total = torch.empty_like(partial, dtype=sum_dtype(partial.dtype))
        add_up(parts.chunk(group.size()), 1, total)
        return total.to(partial.dtype)
    in_place = not collectives.is_traced(partial)
    return collectives.all_reduce(partial, group.group_name, in_place=in_place, call=for_call)


def reduce_scattered_in_order(
    partial: torch.Tensor, group: dist.ProcessGroup, for_call: Call
) -> torch.Tensor:
    """This rank's rows of the sum over the ranks of a product, whose first dimension is a multiple
    of their number. Sums of any size are made in the order of the ranks and rounded once: by a
    kernel, or of rows that the backend gathers."""
    size = group.size()
    partial = partial.contiguous()
    if size == 1:
        return partial
    if _is_by_kernel("reduce_scatter", partial, group, strict=True):
        _look_through(partial, group, for_call)
        method = collective_method("reduce_scatter", partial.nbytes, size)
        out = partial.new_empty(len(partial) // size, *partial.shape[1:])
        with contextlib.suppress(Unsupported):  # nothing was begun, on no rank
            call("reduce_scatter", method, partial, out, group)
            return out
    parts = collectives.start_all_gather(partial, group.group_name, 0, call=for_call)()
    own = [part.chunk(size)[group.rank()] for part in parts.chunk(size)]
    total = torch.empty_like(own[0], dtype=sum_dtype(partial.dtype))
    add_up(own, 1, total)
    return total.to(partial.dtype)


def all_gathered(
    shard: torch.Tensor, group: dist.ProcessGroup, for_call: Call, *, strict: bool = False
) -> torch.Tensor:
    """The shards of all ranks along dimension 0: gathered by a kernel, or the group's backend.
    ``shard`` is contiguous.

    Args:
        strict: a kernel gathers shards of any size, never the backend.

    Raises:
        Unsupported: under ``strict``: no kernel can; all ranks raise.
    """
    if strict and not backends.is_fake(group):
        if group.size() == 1:
            return shard.clone()
        reason = why_not("all_gather", shard, group, strict=True)
        if reason is not None:
            raise Unsupported(reason)
        _look_through(shard, group, for_call)
        return gather(shard, group)
    if _is_by_kernel("all_gather", shard, group):
        _look_through(shard, group, for_call)
        with contextlib.suppress(Unsupported):
            return gather(shard, group)
    # The group's backend may move no fp8.
    sent = shard.view(torch.uint8) if shard.dtype in FP8 else shard
    found = collectives.start_all_gather(sent, group.group_name, 0, call=for_call)()
    return found.view(shard.dtype)


def _is_by_kernel(
    kind: Kind, x: torch.Tensor, group: dist.ProcessGroup, *, strict: bool = False
) -> bool:
    is_eager = x.is_cuda and not collectives.is_traced(x)
    return is_eager and why_not(kind, x, group, strict=strict) is None


def _look_through(x: torch.Tensor, group: dist.ProcessGroup, for_call: Call) -> None:
    if nan_check.active:
        nan_check.look_through(for_call.op, "A @ B", x, groups.of(group).rank)


class GatherOfKind(NamedTuple):
    """Gathers any number of contiguous shards of one kind along dimension 0 by a kernel.
    Collective; errors are those of `CollectivesWorkspace.call`."""

    call: CollectiveCall
    world_size: int

    def __call__(self, shard: torch.Tensor) -> torch.Tensor:
        out = self.empty(shard)
        self.call(shard, out)
        return out

    def empty(self, shard: torch.Tensor) -> torch.Tensor:
        """Memory for the gathered shards."""
        return _empty(shard, self.world_size)


class GatherOfTwo(NamedTuple):
    """`GatherOfKind` with a second tensor of each rank that belongs to its shard, gathered by the
    same kernel where both are not too large for it."""

    workspace: CollectivesWorkspace
    method: _core.CollectiveMethod
    world_size: int

    def __call__(
        self, shard: torch.Tensor, second: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        outs = _empty(shard, self.world_size), _empty(second, self.world_size)
        self.workspace.all_gather_two(self.method, shard, outs[0], second, outs[1])
        return outs


def _empty(shard: torch.Tensor, world_size: int) -> torch.Tensor:
    return shard.new_empty(world_size * shard.shape[0], *shard.shape[1:])


def prepare_gather(shard: torch.Tensor, group: dist.ProcessGroup) -> GatherOfKind:
    """What gathers shards like this one, for which `why_not` has no reason. Collective.

    Raises:
        Unsupported: the GPUs of the group do not reach each other; all ranks raise.
    """
    world_size = dist.get_world_size(group)
    method = collective_method("all_gather", world_size * shard.nbytes, world_size)
    return GatherOfKind(prepare("all_gather", method, shard, group), world_size)


def prepare_gather_of_two(
    shard: torch.Tensor, second_bytes: int, group: dist.ProcessGroup
) -> GatherOfTwo:
    """`prepare_gather` of shards like this one, each with a second tensor of so many bytes."""
    world_size = dist.get_world_size(group)
    nbytes = world_size * (shard.nbytes + second_bytes)
    method = collective_method("all_gather", nbytes, world_size)
    core_method = _core_method("all_gather", method, shard, group)
    return GatherOfTwo(collectives_workspace(group, shard.device), core_method, world_size)


def gather(shard: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather the shards of all ranks along dimension 0 by a kernel: see `prepare_gather`."""
    return prepare_gather(shard, group)(shard)
