"""agmm's kernels of torch's async-TP ops: which calls it serves; the others are torch's."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.distributed.distributed_c10d import _resolve_process_group

from agmm.errors import InvalidArgument, Unsupported, warn_once
from agmm.integrations.scaled_async_tp import ServedGather, ServedScatter
from agmm.ops import portable
from agmm.ops.checks import check_no_backward, check_scatterable
from agmm.ops.gather import GatherSettings
from agmm.ops.kept import kind_of
from agmm.ops.pipeline import KERNEL, warn_of_batches
from agmm.ops.plain_gather import PlainGather, gather
from agmm.ops.plain_scatter import PlainScatter, scatter
from agmm.ops.scatter import ScatterSettings
from agmm.planning import call_plans
from agmm.runtime import nan_check
from agmm.runtime.results import strided

NAMESPACE = "symm_mem"

Kernel = Callable[..., Any]
KernelOver = Callable[[Kernel], Kernel]
_Outs = tuple[torch.Tensor | None, list[torch.Tensor]]
"""A, where it is wanted, and the products, as torch's op returns them."""
_Route = Callable[..., Any]
"""Computes calls of one kind."""


class _Ways(NamedTuple):
    """How calls of one kind can be served."""

    why_torch: Callable[[], str | None]
    """Says why torch has to serve them, or None."""
    why_unfused: Callable[[], str | None]
    """Says why agmm has no kernel for them, or None."""
    route: Callable[[bool], _Route]
    """Makes agmm's route; with False one that may take the unfused path."""

    def serve_apart(self, group: dist.ProcessGroup, device: torch.device) -> _Route | None:
        """The route of ranks that share no memory, which torch's ops want; None for others."""
        return self.route(False) if portable.shares_no_memory(group, device) else None


# --- which calls are served ---

# The routes by the op and the kind of call; None: torch serves it. They end with their group.
_routes: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, _Route | None]]
_routes = weakref.WeakKeyDictionary()

nan_check.on_change(_routes.clear)

MAX_ROUTES = 4096
"""Kept for a group at most: calls of so many kinds, as a server with changing batches has them."""


def _warn(op: str, reason: str) -> None:
    warn_once(f"agmm leaves {NAMESPACE}.{op} to torch: {reason}")


def _served(
    op: str,
    group: dist.ProcessGroup,
    device: torch.device,
    kind: tuple[Any, ...],
    ways: _Ways,
    call: Callable[[_Route], Any],
) -> Any:
    """What the route of such calls returns, which is decided once; None where torch serves them, of
    which it warns once for each reason. Where the ranks share no memory agmm serves what it has no
    kernel for, too: torch's ops exchange through symmetric memory."""
    routes = _routes.get(group)
    if routes is None:
        routes = _routes[group] = {}
    key = op, *kind
    if key not in routes:
        if len(routes) >= MAX_ROUTES:
            routes.clear()
        decided, reason = None, ways.why_torch()
        if reason is None:
            reason = ways.why_unfused()
            decided = ways.serve_apart(group, device) if reason else ways.route(True)
        if decided is None:
            _warn(op, str(reason))
        routes[key] = decided  # nothing is kept of a decision that raised
    route = routes[key]
    if route is None:
        return None
    try:
        return call(route)
    except InvalidArgument as error:
        reason, route = str(error), None
    except Unsupported as error:
        reason, route = str(error), ways.serve_apart(group, device)
    routes[key] = route
    if route is not None:
        return call(route)
    _warn(op, reason)
    return None


def _check_no_backward(**operands: Any) -> None:
    """Refuses operands of which autograd would lose the gradients: torch's dispatcher says so in
    the backward only, by a warning."""
    tensors = [
        (name, tensor)
        for name, given in operands.items()
        for tensor in (given if isinstance(given, list) else [given])
        if isinstance(tensor, torch.Tensor)
    ]
    check_no_backward(tensors, f"the ops of {NAMESPACE}")


def _look(op: str, group_name: str, **given: torch.Tensor) -> None:
    """Look through what a rank sends by torch's op, as agmm's own ops do."""
    if nan_check.active:
        rank = _resolve_process_group(group_name).rank()  # type: ignore[arg-type]  # a NewType
        for name, tensor in given.items():
            nan_check.look_through(op, name, tensor, rank)


def _why_group(group: dist.ProcessGroup) -> str | None:
    if dist.get_backend(group) == "fake":
        return "group: backend fake, agmm wants one that communicates"
    return None


# --- fused_all_gather_matmul ---


def _plain_call(
    A_shard: torch.Tensor,
    Bs: list[torch.Tensor],
    gather_dim: int,
    group: dist.ProcessGroup,
    return_A: bool = False,
) -> PlainGather:
    """The call of agmm's, of a shard as the kernel will make it: the gathered dimension first."""
    shard = A_shard.new_empty(A_shard.movedim(gather_dim, 0).shape)
    settings = GatherSettings(return_A=return_A)
    return PlainGather(shard, Bs, [None] * len(Bs), group, settings)


def _why_torch(
    A_shard: torch.Tensor, Bs: list[torch.Tensor], gather_dim: int, group: dist.ProcessGroup
) -> str | None:
    """The reason why torch has to serve such calls, or None. The same on all ranks, as long as they
    call with the same shapes and dtypes."""
    reason = _why_group(group)
    if reason is not None:
        return reason
    if not 0 <= gather_dim < A_shard.dim() - 1:
        return (
            f"gather_dim: {gather_dim} with {A_shard.dim()} dimensions, "
            "agmm gathers along any but the last"
        )
    try:
        _plain_call(A_shard, Bs, gather_dim, group).check()
    except InvalidArgument as error:
        return str(error)  # torch refuses it in its own words
    return None


def _new_route(call: PlainGather, fused: bool) -> _Route:
    call.learns = False  # it is asked for a route, and not made
    # What agmm's kernel turns out not to serve is torch's; what is planned unfused is agmm's.
    strict = fused and not call.is_empty()
    strict = strict and (call.device.type == "cpu" or call.route().by == KERNEL)
    settings = GatherSettings(return_A=call.settings.return_A, strict=strict)
    return lambda shard, Bs, group: gather(shard, Bs, (None,) * len(Bs), group, settings)


def gather_over(torch_kernel: Kernel) -> Kernel:
    """The kernel of ``fused_all_gather_matmul``: agmm where it can, else ``torch_kernel``."""

    def kernel(
        A_shard: torch.Tensor,
        Bs: list[torch.Tensor],
        gather_dim: int,
        group_name: str,
        *,
        return_A: bool = True,
    ) -> _Outs:
        found = None
        if not symm_mem._is_test_mode:
            if torch.is_grad_enabled():
                _check_no_backward(A=A_shard, Bs=Bs)
            group = _resolve_process_group(group_name)  # type: ignore[arg-type]  # a NewType of str

            def call(route: _Route) -> _Outs:
                # torch copies every shard into symmetric memory; agmm one that is not contiguous.
                shard = (A_shard.movedim(gather_dim, 0) if gather_dim else A_shard).contiguous()
                A, _, outs = route(shard, Bs, group)
                if gather_dim:
                    A = None if A is None else strided(A, 0, gather_dim)
                    outs = [strided(out, 0, gather_dim) for out in outs]
                return A, outs

            def own() -> PlainGather:
                return _plain_call(A_shard, Bs, gather_dim, group, return_A)

            found = _served(
                "fused_all_gather_matmul",
                group,
                A_shard.device,
                (gather_dim, return_A, *map(kind_of, (A_shard, *Bs))),
                _Ways(
                    lambda: _why_torch(A_shard, Bs, gather_dim, group),
                    lambda: own().why_not_fused(),
                    lambda fused: _new_route(own(), fused),
                ),
                call,
            )
        if found is None:
            _look("fused_all_gather_matmul", group_name, A=A_shard)
            found = torch_kernel(A_shard, Bs, gather_dim, group_name, return_A=return_A)
        served: _Outs = found
        return served

    return kernel


# --- fused_matmul_reduce_scatter ---


def _why_torch_scatters(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group: dist.ProcessGroup
) -> str | None:
    """Why torch serves this scatter; None where agmm does."""
    reason = _why_group(group)
    if reason is not None:
        return reason
    if not 0 <= scatter_dim < A.dim() - 1:
        return (
            f"scatter_dim: {scatter_dim} with {A.dim()} dimensions, "
            "agmm scatters along any but the last"
        )
    try:
        check_scatterable([A], [B], None, group.size(), scatter_dim, reduce_op)
    except InvalidArgument as error:
        return str(error)  # torch refuses it in its own words
    return None


def _why_unfused_scatter(call: PlainScatter) -> str | None:
    reason = call.why_not_fused()
    if call.device.type == "cpu":
        return reason
    if reason is None and call.group.size() == 1:
        reason = "group: 1 rank, which has nothing to scatter"
    if reason is not None or call.is_empty():
        return reason
    if call_plans.planner(call.group, call.device).plan(call.problem()).kernel is None:
        reason = "plan: torch's op is faster"
    return reason


def _scatter_route(A: torch.Tensor, fused: bool) -> _Route:
    warn_of_batches("fused_matmul_reduce_scatter")
    # The backend of CPU ranks serves the call whatever is planned.
    strict = fused and A.device.type == "cpu"
    return lambda As, Bs, group, dim, op: scatter(
        As, Bs, None, group, ScatterSettings(dim, op, strict)
    )


def scatter_over(torch_kernel: Kernel) -> Kernel:
    """The kernel of ``fused_matmul_reduce_scatter``: agmm where it can, else ``torch_kernel``."""

    def kernel(
        A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
    ) -> torch.Tensor:
        found = None
        if not symm_mem._is_test_mode:
            if torch.is_grad_enabled():
                _check_no_backward(A=A, B=B)
            group = _resolve_process_group(group_name)  # type: ignore[arg-type]  # a NewType of str

            def own() -> PlainScatter:
                settings = ScatterSettings(scatter_dim, reduce_op)
                return PlainScatter([A], [B], None, group, settings)

            found = _served(
                "fused_matmul_reduce_scatter",
                group,
                A.device,
                (reduce_op, scatter_dim, *map(kind_of, (A, B))),
                _Ways(
                    lambda: _why_torch_scatters(A, B, reduce_op, scatter_dim, group),
                    lambda: _why_unfused_scatter(own()),
                    lambda fused: _scatter_route(A, fused),
                ),
                lambda route: route([A], [B], group, scatter_dim, reduce_op),
            )
        if found is None:
            _look("fused_matmul_reduce_scatter", group_name, A=A, B=B)
            found = torch_kernel(A, B, reduce_op, scatter_dim, group_name)
        served: torch.Tensor = found
        return served

    return kernel


# --- the same of fp8 operands ---


def scaled_over(op: str, call_type: type[ServedGather | ServedScatter]) -> KernelOver:
    """Makes a kernel of one of both: agmm where it can, else ``torch_kernel``."""

    def over(torch_kernel: Kernel) -> Kernel:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            found, given = None, call_type(*args, **kwargs)
            if not symm_mem._is_test_mode:
                if torch.is_grad_enabled():
                    _check_no_backward(**given._asdict())
                group = _resolve_process_group(given.group_name)  # type: ignore[arg-type]
                found = _served(
                    op,
                    group,
                    given.A.device,
                    given.kind(),
                    _Ways(
                        lambda: _why_group(group) or given.why_torch(group),
                        lambda: given.why_unfused(group),
                        lambda fused: call_type.run if fused else call_type.run_unfused,
                    ),
                    lambda route: route(given, group),
                )
            if found is None:
                names = ("A", "A_scale", *(("B", "B_scale") if "B" in given._fields else ()))
                _look(op, given.group_name, **{name: getattr(given, name) for name in names})
                found = torch_kernel(*args, **kwargs)
            return found

        return kernel

    return over
