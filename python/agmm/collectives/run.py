"""How a collective is carried out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from agmm.collectives.checks import check_dim, check_op, check_out, shape_of_result
from agmm.collectives.paths import (
    COPY_ENGINES,
    SHARED_MEMORY,
    SYMMETRIC_MEMORY,
    TORCH,
    Path,
    choose,
    leave_to_torch,
)
from agmm.collectives.work import Work
from agmm.errors import Unsupported
from agmm.ops import kept, small_collectives
from agmm.planning.cost_model.collectives import Kind
from agmm.runtime import backends, cpu_collectives, groups, nan_check
from agmm.runtime.background import Task
from agmm.runtime.callers import calling
from agmm.runtime.calls import Call
from agmm.runtime.collectives import by_newer_name
from agmm.runtime.cuda_background import CudaBackground
from agmm.runtime.workspaces import (
    cpu_workspace,
    gather_copies,
    meet,
    scatter_copies,
    take_turn,
)

Found = torch.Tensor | Work


class Settings(NamedTuple):
    """What a caller says of a collective beside its tensors and its group."""

    op: str
    """"sum" or "avg"; "sum" for an all-gather."""
    dim: int
    """The dimension that is gathered or cut; 0 for an all-reduce."""
    async_op: bool = False
    strict: bool = False
    low_contention: bool = False
    """Whether copy engines move it on GPUs; False for an all-reduce."""


@torch.no_grad()
def start(
    kind: Kind,
    x: torch.Tensor,
    group: dist.ProcessGroup,
    out: torch.Tensor | None,
    settings: Settings,
    keep_as: Any = None,
) -> Found:
    """A collective of tensors of plain memory. Collective.

    Args:
        keep_as: see `kept.keep`; None with ``async_op``.

    Returns:
        The result, or with ``async_op`` the handle.
    """
    op, dim, async_op, strict, low_contention = settings
    groups.check_alive(group)
    world_size, rank = group.size(), groups.of(group).rank
    dim = check_dim(x, dim)
    check_op(op, x)
    shape = shape_of_result(kind, x, world_size, dim)
    if out is not None:
        check_out(out, x, shape)
    sent, target, finish = _memory(kind, x, rank, dim, shape, out)
    if world_size == 1:
        target.copy_(sent)
        found = finish()
        return Work(lambda: found, lambda: True) if async_op else found
    call, what = _described(kind, x, op, dim)
    if nan_check.active:
        nan_check.look_through(call.op, "x", x, rank)
    path = choose(kind, x, group, strict=strict, low_contention=low_contention)
    if backends.is_fake(group):
        path = Path(TORCH, "", is_choice=True)
    elif x.numel() == 0 and path.by != SHARED_MEMORY:
        return _without_elements(x, finish, group, call, what, async_op)
    if path.by == SYMMETRIC_MEMORY:
        reason = small_collectives.why_not_captured(x, group)
        if reason is not None:
            path = Path(TORCH, reason)
    if path.by == SYMMETRIC_MEMORY:
        try:
            result = _by_kernel(kind, path, sent, target, finish, group, op, async_op)
        except Unsupported as error:  # nothing was begun, on no rank
            path = Path(TORCH, str(error))
        else:
            if sent.data_ptr() == x.data_ptr() and dim == 0 and not x.is_complex():
                kept.keep(group, keep_as, KeptCollective(kind, path, sent, group, op, shape))
            return result
    if path.by == COPY_ENGINES:
        try:
            return _by_copies(kind, sent, target, finish, group, op, async_op)
        except Unsupported as error:  # the same
            path = Path(TORCH, str(error))
    if path.by == SHARED_MEMORY:
        jobs = {
            "all_gather": lambda: cpu_collectives.AllGather(rank, world_size, sent, target),
            "reduce_scatter": lambda: cpu_collectives.ReduceScatter(
                rank, world_size, sent, target, op == "avg"
            ),
            "all_reduce": lambda: cpu_collectives.AllReduce(
                rank, world_size, sent, target, op == "avg"
            ),
        }
        try:
            with calling(call, empty="" if x.numel() else what):
                done = cpu_workspace(group).collective(
                    jobs[kind](), call, finish, agreed=what, in_background=async_op
                )
            return Work(done.wait, done.is_done) if isinstance(done, Task) else done
        except Unsupported as error:
            path = Path(TORCH, str(error))
    if not backends.is_fake(group):
        leave_to_torch(kind, path, strict)
    if kind != "all_reduce":  # which gloo makes on GPUs too
        backends.check_backend(group, x.device)
    with groups.of(group).lock:
        if x.device.type == "cpu":
            meet(group, f"torch's {what}", call)
        begun, last = _by_torch(kind, sent, target, group, op)

    def wait() -> torch.Tensor:
        begun.wait()
        with torch.no_grad():
            last()
            return finish()

    return Work(wait, begun.is_completed) if async_op else wait()


def _described(kind: Kind, x: torch.Tensor, op: str, dim: int) -> tuple[Call, str]:
    """The call in words, and what the ranks have to agree on."""
    arguments: dict[str, str | int] = {} if kind == "all_gather" else {"op": op}
    if kind != "all_reduce":
        arguments["dim"] = dim
    what = f"{kind} of {list(x.shape)} {x.dtype}, {arguments}"
    return Call(kind, x=x, **arguments), what


def _without_elements(
    x: torch.Tensor,
    finish: Callable[[], torch.Tensor],
    group: dist.ProcessGroup,
    call: Call,
    what: str,
    async_op: bool,
) -> Found:
    """A call that moves nothing and takes its turn."""
    take_turn(group, x.device, what, call)
    found = finish()
    return Work(lambda: found, lambda: True) if async_op else found


def _by_kernel(
    kind: Kind,
    path: Path,
    sent: torch.Tensor,
    target: torch.Tensor,
    finish: Callable[[], torch.Tensor],
    group: dist.ProcessGroup,
    op: str,
    async_op: bool,
) -> Found:
    assert path.method is not None
    if not async_op:
        small_collectives.call(kind, path.method, sent, target, group, is_average=op == "avg")
        return finish()
    begun = small_collectives.start(kind, path.method, sent, target, group, is_average=op == "avg")
    return _work_of(begun, finish)


class KeptCollective:
    """Calls like one that a kernel has served."""

    def __init__(
        self,
        kind: Kind,
        path: Path,
        sent: torch.Tensor,
        group: dist.ProcessGroup,
        op: str,
        shape: list[int],
    ) -> None:
        assert path.method is not None
        self._call = small_collectives.prepare(
            kind, path.method, sent, group, is_average=op == "avg"
        )
        self._kind, self._rank, self._shape = kind, groups.of(group).rank, shape

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor | None:
        """None where ``out`` cannot be written to while ``x`` is read, or the memory has been
        released."""
        if not self._call.is_ready:
            return None
        if out is None:
            out = x.new_empty(self._shape)
        elif not _may_receive(self._kind, x, out, self._rank):
            return None
        self._call(x, out)
        return out


def _by_copies(
    kind: Kind,
    sent: torch.Tensor,
    target: torch.Tensor,
    finish: Callable[[], torch.Tensor],
    group: dist.ProcessGroup,
    op: str,
    async_op: bool,
) -> Found:
    assert kind != "all_reduce"
    if kind == "all_gather":
        gathers = gather_copies(group, sent.device)
        if async_op:
            return _work_of(gathers.start_all_gather(target, sent), finish)
        gathers.all_gather(target, sent, in_turn=True)
        return finish()
    scatters, average = scatter_copies(group, sent.device), op == "avg"
    if async_op:
        return _work_of(scatters.start_reduce_scatter(target, sent, average=average), finish)
    scatters.reduce_scatter(target, sent, average=average, in_turn=True)
    return finish()


def _work_of(begun: CudaBackground, finish: Callable[[], torch.Tensor]) -> Work:
    def wait() -> torch.Tensor:
        begun.wait()
        with torch.no_grad():
            return finish()

    return Work(wait, begun.is_done)


def _memory(
    kind: Kind, x: torch.Tensor, rank: int, dim: int, shape: list[int], out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, Callable[[], torch.Tensor]]:
    """What is sent and what receives, 1-D and contiguous, the ranks' parts one after the other; and
    what makes the result of it."""
    x = x.resolve_conj().resolve_neg()
    moved = x.movedim(dim, 0) if dim else x
    sent = _flat(moved.contiguous())
    first = [shape[dim], *shape[:dim], *shape[dim + 1 :]] if shape else []
    if out is not None and dim == 0 and _may_receive(kind, sent, out, rank):
        return sent, _flat(out), lambda: out
    whole = x.new_empty(first)

    def finish() -> torch.Tensor:
        if out is None and dim == 0:
            return whole
        receiver = x.new_empty(shape) if out is None else out
        return receiver.copy_(whole.movedim(0, dim) if dim else whole)

    return sent, _flat(whole), finish


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous memory as one dimension; a view may keep the odd stride of a single number."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _may_receive(kind: Kind, sent: torch.Tensor, out: torch.Tensor, rank: int) -> bool:
    """Whether ``out`` can be written to while what is sent is still read: it has other memory, or
    this rank's part lies at its place."""
    if not out.is_contiguous() or out.is_conj() or out.is_neg():
        return False
    begin, at = sent.data_ptr(), out.data_ptr()
    if at + out.nbytes <= begin or begin + sent.nbytes <= at:
        return True
    if kind == "all_gather":
        return begin == at + rank * sent.nbytes
    return at == begin + (rank * out.nbytes if kind == "reduce_scatter" else 0)


def _by_torch(
    kind: Kind, sent: torch.Tensor, target: torch.Tensor, group: dist.ProcessGroup, op: str
) -> tuple[dist.Work, Callable[[], object]]:
    """What was begun, and what is left to do when it is done."""

    def nothing() -> None:
        return None

    if kind == "all_gather":
        if sent.dtype not in _BACKENDS_MOVE:
            sent, target = sent.view(torch.uint8), target.view(torch.uint8)
        gather = by_newer_name("all_gather_single", "all_gather_into_tensor")
        return gather(target, sent, group, async_op=True), nothing
    has_avg = sent.is_cuda and "nccl" in dist.get_backend_config(group)
    reduce_op = dist.ReduceOp.AVG if op == "avg" and has_avg else dist.ReduceOp.SUM
    if kind == "reduce_scatter":
        scatter = by_newer_name("reduce_scatter_single", "reduce_scatter_tensor")
        begun = scatter(target, sent, reduce_op, group, async_op=True)
    else:
        if target.data_ptr() != sent.data_ptr():
            target.copy_(sent)
        begun = dist.all_reduce(target, reduce_op, group, async_op=True)
    if op == "avg" and not has_avg:
        world_size = group.size()
        return begun, lambda: target.div_(world_size)
    return begun, nothing


_BACKENDS_MOVE = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.int8, torch.uint8, torch.int32, torch.int64),
)
"""Other types are moved as bytes."""
