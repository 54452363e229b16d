"""FSDP2's all-gathers and reduce-scatters by copy engines, which leave the multiprocessors to the
matmuls beside them.

    from agmm.integrations import fsdp

    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    fsdp.enable(model)

Needs nothing else: training goes on as before. CPU tensors go through the group's backend.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_api as api
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from agmm.errors import InvalidArgument, Unsupported
from agmm.runtime import backends, groups, nan_check, workspaces
from agmm.runtime.calls import Call

__all__ = ["AllGather", "ReduceScatter", "disable", "enable"]

_REDUCED = (torch.float32, torch.bfloat16, torch.float16)


class _Comm:
    """What both collectives have in common.

    Args:
        strict: raise where copy engines cannot serve, instead of one warning and the group's
            backend.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self._unserved: set[str] = set()

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """The buffer that FSDP packs parameters or gradients into: ordinary memory.

        What ranks share are slots of agmm's own, so how long FSDP holds a buffer concerns no other
        rank, and the buffers of all layers share their memory by torch's allocator.
        """
        return torch.empty(*size, dtype=dtype, device=device)

    def _not_served(self, reason: str) -> None:
        """Raises Unsupported under ``strict``; else warns, once for each reason."""
        if self.strict:
            raise Unsupported(f"fsdp: {reason}")
        if reason not in self._unserved:
            self._unserved.add(reason)
            warnings.warn(f"agmm leaves FSDP to the group's backend: {reason}", stacklevel=4)


class AllGather(_Comm, api.AllGather):
    """The all-gather for `FSDPModule.set_custom_all_gather`; `enable` sets it on a whole model."""

    def __init__(self, *, strict: bool = False) -> None:
        super().__init__(strict=strict)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather the ranks' shards. Collective; ordered on the current stream.

        Args:
            output_tensor: [world_size * n], contiguous.
            input_tensor: [n] of the same dtype; it may be this rank's shard of ``output_tensor``.
            group: the ranks.
            async_op: copy on another stream, which the current one waits for in ``wait`` of what is
                returned.

        Raises:
            Unsupported: under ``strict``: the GPUs of the group cannot reach each other's memory;
                all ranks raise.
        """
        if nan_check.active:
            _look_through("all_gather", input_tensor, group)
        if goes_by_copies(output_tensor) and not backends.is_fake(group):
            try:
                return self._copy(output_tensor, input_tensor, group, async_op)
            except Unsupported as reason:
                self._not_served(str(reason))
        else:
            _meet(group, "all_gather", input_tensor)
        return by_backend_all_gather(output_tensor, input_tensor, group, async_op)

    def _copy(
        self, out: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup, async_op: bool
    ) -> dist.Work | None:
        workspace = workspaces.gather_copies(group, out.device)
        if not async_op:
            workspace.all_gather(out, shard)
            return None
        if out.device not in self._streams:
            self._streams[out.device] = torch.cuda.Stream(out.device)
        stream = self._streams[out.device]
        stream.wait_stream(torch.cuda.current_stream(out.device))
        with torch.cuda.stream(stream):
            workspace.all_gather(out, shard)
            return _Copied(out, shard)


class ReduceScatter(_Comm, api.ReduceScatter):
    """The reduce-scatter for `FSDPModule.set_custom_reduce_scatter`; `enable` sets it on a whole
    model."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Sum the ranks' gradients and keep this rank's shard. Collective; on the current stream.

        The sum is float32 inside and has the same bits in every call of the same sizes.

        Args:
            output_tensor: [n], contiguous.
            input_tensor: [world_size * n] of the same dtype.
            group: the ranks.
            op: SUM or AVG; other ones, and dtypes but float32, bfloat16 and float16, go to the
                group's backend.
            async_op: False, as FSDP calls it; True goes to the group's backend.

        Raises:
            Unsupported: under ``strict``: as `AllGather`, or for such an op or dtype.
        """
        if nan_check.active:
            _look_through("reduce_scatter", input_tensor, group)
        if goes_by_copies(output_tensor) and not backends.is_fake(group):
            try:
                self._copy(output_tensor, input_tensor, group, op, async_op)
                return None
            except Unsupported as reason:
                self._not_served(str(reason))
        else:
            _meet(group, f"reduce_scatter ({op})", input_tensor)
        return by_backend_reduce_scatter(output_tensor, input_tensor, group, op, async_op)

    def _copy(
        self, out: torch.Tensor, parts: torch.Tensor, group: dist.ProcessGroup, op: Any, asyn: bool
    ) -> None:
        averages = op == dist.ReduceOp.AVG
        if not averages and op != dist.ReduceOp.SUM:
            raise Unsupported("a reduce-scatter that neither sums nor takes the mean")
        if out.dtype not in _REDUCED:
            raise Unsupported(f"a reduce-scatter of {out.dtype}")
        if asyn:
            raise Unsupported("a reduce-scatter with async_op=True")
        workspaces.scatter_copies(group, out.device).reduce_scatter(out, parts, average=averages)


class _Copied(Work):
    """An all-gather on another stream. Holds its tensors until it has been waited for."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__()
        self._tensors = tensors
        self._done = torch.cuda.Event()
        self._done.record()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """The current stream waits for the copies."""
        self._done.wait()
        self._tensors = ()
        return True


def _look_through(kind: str, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Looks through the tensor on the stream that FSDP communicates on."""
    nan_check.look_through(f"fsdp.{kind}", "input_tensor", tensor, dist.get_rank(group))


def goes_by_copies(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def by_backend_all_gather(
    out: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    """The group's own collective, in the spelling of each version of torch."""
    backends.check_backend(group, out.device)
    return DefaultAllGather()(out, shard, group, async_op)


def by_backend_reduce_scatter(
    out: torch.Tensor, parts: torch.Tensor, group: dist.ProcessGroup, op: Any, async_op: bool
) -> dist.Work | None:
    """The group's own reduce-scatter, in the spelling of each version of torch."""
    backends.check_backend(group, out.device)
    return DefaultReduceScatter()(out, parts, group, op, async_op)


def _meet(group: dist.ProcessGroup, kind: str, tensor: torch.Tensor) -> None:
    """CPU ranks that come late or with other tensors are found with agmm's limit and words."""
    if dist.get_world_size(group) == 1:
        return
    with groups.of(group).lock:
        what = f"FSDP's {kind} of {tensor.numel()} {tensor.dtype}"
        workspaces.meet(group, what, Call(f"fsdp.{kind}", input=tensor))


def enable(model: torch.nn.Module, *, strict: bool = False) -> None:
    """Let agmm carry FSDP2's parameters and gradients, in all modules of ``model``.

    To be called on all ranks, at any time between steps; again changes nothing but ``strict``. The
    slots that ranks share are made in the first step and used again from then on: at most 64 MiB
    for gathers and 32 MiB per rank for reduce-scatters, in each group.

    Args:
        model: with modules that `torch.distributed.fsdp.fully_shard` was given.
        strict: raise Unsupported where copy engines cannot serve, instead of one warning and the
            group's backend. CPU tensors always go through the backend, without a warning.

    Raises:
        InvalidArgument: no module was sharded, or one has collectives of its own
            (`set_custom_all_gather`, `set_allocate_memory_from_process_group_for_comm`,
            `set_symm_mem_for_comm`); nothing is changed.
        Unsupported: under ``strict``: a module has parameters over several meshes; nothing is
            changed.
    """
    gather, scatter = AllGather(strict=strict), ReduceScatter(strict=strict)
    scatter._unserved = gather._unserved  # the same reason is said once for both
    chosen = []
    several = ""
    for name, module in _sharded(model):
        of_module = param_groups(module)
        for each in of_module:
            found = [each._all_gather_comm, each._reduce_scatter_comm]
            kinds = (DefaultAllGather, AllGather), (DefaultReduceScatter, ReduceScatter)
            for comm, wanted in zip(found, kinds, strict=True):
                if type(comm) not in wanted:
                    raise InvalidArgument(
                        f"model: found {type(comm).__name__} set on {name or 'the model'}, wanted "
                        "modules with torch's default collectives"
                    )
        if len(of_module) > 1:
            several = several or name or "the model"
        else:
            chosen.append(module)
    if several:
        gather._not_served(f"{several} has parameters over several meshes")
    for module in chosen:
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(scatter)


def disable(model: torch.nn.Module) -> None:
    """Torch's default collectives again, wherever `enable` set agmm's. To be called on all ranks.

    Raises:
        InvalidArgument: no module of ``model`` was sharded.
    """
    for _, module in _sharded(model):
        of_module = param_groups(module)
        if any(isinstance(each._all_gather_comm, AllGather) for each in of_module):
            module.set_custom_all_gather(DefaultAllGather())
        if any(isinstance(each._reduce_scatter_comm, ReduceScatter) for each in of_module):
            module.set_custom_reduce_scatter(DefaultReduceScatter())


def _sharded(model: torch.nn.Module) -> list[tuple[str, FSDPModule]]:
    found = [(name, each) for name, each in model.named_modules() if isinstance(each, FSDPModule)]
    if not found:
        raise InvalidArgument(
            f"model: found {type(model).__name__} without FSDP2, wanted one with modules that "
            "torch.distributed.fsdp.fully_shard was given"
        )
    return found


def param_groups(module: FSDPModule) -> list[Any]:
    """What of a module is gathered together; more than one where its parameters have several
    meshes, which torch knows from 2.12 on."""
    state: Any = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
