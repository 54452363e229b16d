"""agmm as the backend of PyTorch's async tensor parallelism.

After `enable` agmm computes ``torch.ops.symm_mem.fused_all_gather_matmul`` and
``fused_matmul_reduce_scatter``, which torch's compiler pass
(``torch._inductor.config._micro_pipeline_tp``), torchtitan and vLLM call, and on CPU tensors those
of fp8 operands (`scaled_async_tp`). What agmm does not support goes to torch's own kernel,
unchanged. Importing this module changes nothing.

Only kernels of the CUDA and CPU dispatch keys are put over torch's. The Meta kernels stay, so
tracing and compiled graphs are the same with and without agmm, and a graph that was compiled before
`enable` uses agmm after it.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.distributed.distributed_c10d import _resolve_process_group

from agmm.errors import AgmmError, InvalidArgument, Unsupported
from agmm.integrations.scaled_async_tp import GatherCall, ScatterCall
from agmm.ops import paths, scatter_cuda, scatter_paths, scatter_plan
from agmm.ops.checks import check_gatherable, check_scatterable
from agmm.ops.prepare import prepare
from agmm.ops.scatter_paths import native_cpu
from agmm.planning import call_plans
from agmm.runtime import nan_check
from agmm.runtime.workspaces import cuda_workspace

_NAMESPACE = "symm_mem"

_Kernel = Callable[..., Any]
_KernelOver = Callable[[_Kernel], _Kernel]
_Route = Callable[..., Any]
"""Computes calls of one kind."""


# --- which calls agmm serves ---

# By the op and the kind of call; None: torch serves it. They end with their group.
_routes: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, _Route | None]]
_routes = weakref.WeakKeyDictionary()

nan_check.on_change(_routes.clear)

_MAX_ROUTES = 4096  # per group

_warned: set[str] = set()


def _warn(op: str, reason: str) -> None:
    message = f"agmm leaves {_NAMESPACE}.{op} to torch: {reason}"
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=paths.levels_to_caller())


def _served(
    op: str,
    group: dist.ProcessGroup,
    kind: tuple[Any, ...],
    why_torch: Callable[[], str | None],
    new_route: Callable[[], _Route],
    call: Callable[[_Route], Any],
) -> Any:
    """What the route of such calls returns, which is decided once; None where torch serves them, of
    which it warns once for each reason."""
    routes = _routes.get(group)
    if routes is None:
        routes = _routes[group] = {}
    key = op, *kind
    if key not in routes:
        if len(routes) >= _MAX_ROUTES:
            routes.clear()
        reason = why_torch()
        if reason is None:
            routes[key] = new_route()
        else:
            _warn(op, reason)
            routes[key] = None
    route = routes[key]
    if route is None:
        return None
    try:
        return call(route)
    except (Unsupported, InvalidArgument) as error:
        _warn(op, str(error))
        routes[key] = None
        return None


def _why_group(group: dist.ProcessGroup) -> str | None:
    if dist.get_backend(group) == "fake":
        return "group: backend fake, agmm wants one that communicates"
    return None


# --- fused_all_gather_matmul ---


def _why_torch(
    A_shard: torch.Tensor, Bs: list[torch.Tensor], gather_dim: int, group: dist.ProcessGroup
) -> str | None:
    """The reason why torch has to serve such calls, or None. The same on all ranks, as long as they
    call with the same shapes and dtypes, and with weights of the same layout."""
    reason = _why_group(group)
    if reason is not None:
        return reason
    if not 0 <= gather_dim < A_shard.dim() - 1:
        return (
            f"gather_dim: {gather_dim} with {A_shard.dim()} dimensions, "
            "agmm gathers along any but the last"
        )
    shard = A_shard.new_empty(A_shard.movedim(gather_dim, 0).shape)  # as the kernel will make it
    try:
        check_gatherable(shard, Bs, [None] * len(Bs), 0, group.size())
    except InvalidArgument as error:
        return str(error)  # torch refuses it in its own words
    return paths.why_unfused(shard, Bs, 0, "")


def _new_route(
    A_shard: torch.Tensor,
    Bs: list[torch.Tensor],
    gather_dim: int,
    group: dist.ProcessGroup,
    return_A: bool,
) -> _Route:
    biases = (None,) * len(Bs)
    if A_shard.device.type == "cpu":
        return lambda shard, Bs, group: paths.fused_cpu(shard, Bs, biases, group, return_A)
    shard = A_shard.movedim(gather_dim, 0)
    if call_plans.prefers_unfused(shard, Bs, group, return_A=return_A):
        return lambda shard, Bs, group: _unfused(shard, Bs, biases, group, return_A)
    workspace = cuda_workspace(group, A_shard.device)
    call = paths.looking(prepare(workspace, shard, Bs, return_A=return_A), group)
    return lambda shard, Bs, group: call(shard, Bs, biases)


def _unfused(
    shard: torch.Tensor,
    Bs: list[torch.Tensor],
    biases: tuple[None, ...],
    group: dist.ProcessGroup,
    return_A: bool,
) -> paths.Outs:
    A, outs = paths.unfused(shard, Bs, biases, group, 0)
    return (A if return_A else None), outs


def _gather_over(torch_kernel: _Kernel) -> _Kernel:
    """The kernel of ``fused_all_gather_matmul``: agmm where it can, else ``torch_kernel``."""

    def kernel(
        A_shard: torch.Tensor,
        Bs: list[torch.Tensor],
        gather_dim: int,
        group_name: str,
        *,
        return_A: bool = True,
    ) -> paths.Outs:
        found = None
        if not symm_mem._is_test_mode:
            group = _resolve_process_group(group_name)  # type: ignore[arg-type]  # a NewType of str

            def call(route: _Route) -> paths.Outs:
                # torch copies every shard into symmetric memory; agmm one that is not contiguous.
                shard = (A_shard.movedim(gather_dim, 0) if gather_dim else A_shard).contiguous()
                A, outs = route(shard, Bs, group)
                if gather_dim:
                    A = None if A is None else A.movedim(0, gather_dim)
                    outs = [out.movedim(0, gather_dim) for out in outs]
                return A, outs

            found = _served(
                "fused_all_gather_matmul",
                group,
                (gather_dim, return_A, *map(paths.kind_of, (A_shard, *Bs))),
                lambda: _why_torch(A_shard, Bs, gather_dim, group),
                lambda: _new_route(A_shard, Bs, gather_dim, group, return_A),
                call,
            )
        if found is None:
            found = torch_kernel(A_shard, Bs, gather_dim, group_name, return_A=return_A)
        served: paths.Outs = found
        return served

    return kernel


# --- fused_matmul_reduce_scatter ---


def _why_torch_scatters(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group: dist.ProcessGroup
) -> str | None:
    """As `_why_torch`."""
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
    if A.device.type == "cpu":
        return scatter_plan.why_not_on_cpu([A], [B], scatter_dim)
    reason = scatter_plan.why_not_native([A], [B], scatter_dim)
    if reason is None and group.size() == 1:
        reason = "group: 1 rank, which has nothing to scatter"
    if reason is None and scatter_plan.kernel_plan([A], [B], group) is None:
        reason = "plan: torch's op is faster"
    return reason


def _scatter_route(device: torch.device) -> _Route:
    if device.type == "cpu":
        return native_cpu
    return partial(scatter_cuda.run, strict=False)


def _scatter_over(torch_kernel: _Kernel) -> _Kernel:
    """The kernel of ``fused_matmul_reduce_scatter``: agmm where it can, else ``torch_kernel``."""

    def kernel(
        A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
    ) -> torch.Tensor:
        found = None
        if not symm_mem._is_test_mode:
            group = _resolve_process_group(group_name)  # type: ignore[arg-type]  # a NewType of str
            found = _served(
                "fused_matmul_reduce_scatter",
                group,
                (reduce_op, scatter_dim, *map(paths.kind_of, (A, B))),
                lambda: _why_torch_scatters(A, B, reduce_op, scatter_dim, group),
                lambda: _scatter_route(A.device),
                lambda route: route([A], [B], None, group, scatter_dim, reduce_op),
            )
        if found is None:
            found = torch_kernel(A, B, reduce_op, scatter_dim, group_name)
        served: torch.Tensor = found
        return served

    return kernel


# --- the same of fp8 operands ---


def _scaled_over(op: str, call_type: type[GatherCall | ScatterCall]) -> _KernelOver:
    """Makes a kernel of one of both: agmm where it can, else ``torch_kernel``."""

    def over(torch_kernel: _Kernel) -> _Kernel:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            found = None
            if not symm_mem._is_test_mode:
                given = call_type(*args, **kwargs)
                group = _resolve_process_group(given.group_name)  # type: ignore[arg-type]
                found = _served(
                    op,
                    group,
                    given.kind(),
                    lambda: _why_group(group) or given.why_torch(group),
                    lambda: call_type.run,
                    lambda route: route(given, group),
                )
            return torch_kernel(*args, **kwargs) if found is None else found

        return kernel

    return over


# --- registration: all that depends on torch's version ---


class _Op(NamedTuple):
    """An op of torch, and where agmm puts a kernel over torch's."""

    schema: str
    keys: tuple[str, ...]
    kernel_over: _KernelOver

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]


_OPS = (
    _Op(
        f"{_NAMESPACE}::fused_all_gather_matmul(Tensor A, Tensor[] Bs, int gather_dim, "
        "str group_name, *, bool return_A=True) -> (Tensor?, Tensor[])",
        ("CUDA", "CPU"),
        _gather_over,
    ),
    _Op(
        f"{_NAMESPACE}::fused_matmul_reduce_scatter(Tensor A, Tensor B, str reduce_op, "
        "int scatter_dim, str group_name) -> Tensor",
        ("CUDA", "CPU"),
        _scatter_over,
    ),
    _Op(
        f"{_NAMESPACE}::fused_all_gather_scaled_matmul(Tensor A, Tensor[] Bs, Tensor A_scale, "
        "Tensor[] B_scales, int gather_dim, str group_name, Tensor?[] biases, "
        "Tensor?[] result_scales, ScalarType?[] out_dtypes, bool[] use_fast_accum) "
        "-> (Tensor, Tensor[])",
        ("CUDA", "CPU"),
        _scaled_over("fused_all_gather_scaled_matmul", GatherCall),
    ),
    _Op(
        f"{_NAMESPACE}::fused_scaled_matmul_reduce_scatter(Tensor A, Tensor B, Tensor A_scale, "
        "Tensor B_scale, str reduce_op, int orig_scatter_dim, "
        "int scatter_dim_after_maybe_reshape, str group_name, SymInt[]? output_shape, "
        "Tensor? bias=None, Tensor? result_scale=None, ScalarType? out_dtype=None, "
        "bool use_fast_accum=False) -> Tensor",
        ("CUDA", "CPU"),
        _scaled_over("fused_scaled_matmul_reduce_scatter", ScatterCall),
    ),
)


class _Override:
    """agmm's kernels over torch's, until `end`."""

    def __init__(self) -> None:
        """Raises AgmmError where this torch lacks an op or has another schema of it."""
        for op in _OPS:
            _check_schema(op)
        self._library = torch.library.Library(_NAMESPACE, "IMPL")
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", r"(?s).*Overriding a previously registered")
                for op in _OPS:
                    for key in op.keys:
                        self._put_over(op, key)
        except BaseException:
            self.end()
            raise

    def _put_over(self, op: _Op, key: str) -> None:
        torchs = _torch_kernel(op.name, key)
        if op.kernel_over is _scatter_over and key == "CUDA":
            scatter_paths.kernel_of_torch = torchs  # which agmm's own op takes where it cannot
        kernel = op.kernel_over(torchs)
        impl = f"{op.name.replace('::', '/')}/{key}"
        is_torchs = impl in torch.library._impls
        # allow_override became the default in torch 2.13.
        self._library.impl(op.name.partition("::")[2], kernel, key, allow_override=True)
        # The end of a library takes its kernels off torch's list of those registered from Python;
        # torch's own are on it under the same names, and have to stay.
        if is_torchs:
            self._library._op_impls.discard(impl)

    def end(self) -> None:
        """Uncover torch's kernels."""
        self._library._destroy()
        scatter_paths.kernel_of_torch = None


def _check_schema(op: _Op) -> None:
    try:
        schema = str(torch._C._get_schema(op.name, ""))
    except RuntimeError:
        schema = "none"
    if schema != op.schema:
        raise AgmmError(
            f"async_tp: found schema {schema} in torch {torch.__version__}, wanted {op.schema} "
            "(torch 2.11 or later)"
        )


def _torch_kernel(op: str, key: str) -> _Kernel:
    """torch's kernel for this dispatch key; where it has none its Meta kernel, which is the
    decomposition into a collective and matmul, for any device."""
    source = key if torch._C._dispatch_has_kernel_for_dispatch_key(op, key) else "Meta"
    kernel = torch.library.get_kernel(op, source)
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.__members__[key])
    return lambda *args, **kwargs: kernel.call_boxed(keys, *args, **kwargs)


# --- the switch ---

_lock = threading.Lock()
_override: _Override | None = None


class _Restore:
    """As a context manager, puts back at its end what was there before `enable`."""

    def __init__(self, was_enabled: bool) -> None:
        self._was_enabled = was_enabled

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _switch(self._was_enabled)


def _switch(on: bool) -> bool:
    """Whether it was on before."""
    global _override
    with _lock:
        before = _override is not None
        if on and _override is None:
            _override = _Override()
        elif not on and _override is not None:
            _override.end()
            _override = None
        return before


def enable() -> _Restore:
    """Let agmm serve ``torch.ops.symm_mem.fused_all_gather_matmul``,
    ``fused_matmul_reduce_scatter``, ``fused_all_gather_scaled_matmul`` and
    ``fused_scaled_matmul_reduce_scatter`` in this whole process.

    May be used as ``with agmm.async_tp.enable(): ...``, which puts back at its end, also after an
    exception, what was there before; such blocks may be nested. Enabling twice is enabling once.
    All ranks of a group have to enable and disable between the same calls.

    agmm serves tensors [..., K] gathered along any dimension but the last, with one or several
    weights and with or without A, on the devices, dtypes and sizes of `agmm.all_gather_matmul`.
    A shard that is not contiguous once gather_dim is moved to the front is copied. Results have the
    strides of torch's own. A call may be captured in a CUDA graph after one eager call with the
    same shape. What is scattered has the sums, dtypes and sizes of `agmm.matmul_reduce_scatter`
    along any dimension but the last. Of fp8 operands agmm serves CPU tensors, with every kind of
    scales that torch's ops have and scales of blocks; on CUDA this build has no fused fp8 kernel.
    All other calls go to torch's kernel, with one warning for
    each reason; those on CPU tensors, for which torch has no kernel, to the decomposition that
    torch traces with. Neither op has a backward of its own: torchtitan's layers bring theirs.

    Raises:
        AgmmError: this torch lacks one of the ops, or its schema is another one.
    """
    return _Restore(_switch(True))


def disable() -> None:
    """Give the ops back to torch. Does nothing where agmm is not enabled."""
    _switch(False)


def is_enabled() -> bool:
    """Whether agmm serves the ops in this process."""
    return _override is not None
