"""agmm as the backend of PyTorch's async tensor parallelism.

After `enable` agmm computes ``torch.ops.symm_mem.fused_all_gather_matmul``, which torch's compiler
pass (``torch._inductor.config._micro_pipeline_tp``), torchtitan and vLLM call. What agmm does not
support goes to torch's own kernel, unchanged. Importing this module changes nothing.

Only the kernels of the CUDA and CPU dispatch keys are put over torch's. The Meta kernel stays, so
tracing and compiled graphs are the same with and without agmm, and a graph that was compiled before
`enable` uses agmm after it.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.distributed.distributed_c10d import _resolve_process_group

from agmm.errors import AgmmError, InvalidArgument, Unsupported
from agmm.ops import paths
from agmm.ops.checks import check_gatherable
from agmm.ops.prepare import prepare
from agmm.planning import call_plans
from agmm.runtime.workspaces import cuda_workspace

_OP = "symm_mem::fused_all_gather_matmul"
_SCHEMA = (
    f"{_OP}(Tensor A, Tensor[] Bs, int gather_dim, str group_name, *, bool return_A=True)"
    " -> (Tensor?, Tensor[])"
)
_KEYS = ("CUDA", "CPU")

_Kernel = Callable[..., paths.Outs]
_Route = Callable[[torch.Tensor, list[torch.Tensor], dist.ProcessGroup], paths.Outs]
"""Computes calls of one kind from A_shard [M_local, ..., K], contiguous, gathered along dim 0."""


# --- which calls agmm serves ---

# By the kind of call; None: torch serves it. They end with their group.
_routes: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, _Route | None]]
_routes = weakref.WeakKeyDictionary()

_MAX_ROUTES = 4096  # per group

_warned: set[str] = set()


def _why_torch(
    A_shard: torch.Tensor, Bs: list[torch.Tensor], gather_dim: int, group: dist.ProcessGroup
) -> str | None:
    """The reason why torch has to serve such calls, or None. The same on all ranks, as long as they
    call with the same shapes and dtypes, and with weights of the same layout."""
    if dist.get_backend(group) == "fake":
        return "group: backend fake, agmm wants one that communicates"
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
    call = prepare(workspace, shard, Bs, return_A=return_A)
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


def _warn(reason: str) -> None:
    if reason not in _warned:
        _warned.add(reason)
        # The caller of the op, over torch's call of the kernel, the kernel and this function.
        message = f"agmm leaves symm_mem.fused_all_gather_matmul to torch: {reason}"
        warnings.warn(message, stacklevel=4)


def _kernel_over(torch_kernel: _Kernel) -> _Kernel:
    """The op's kernel: agmm where it can, else ``torch_kernel``."""

    def kernel(
        A_shard: torch.Tensor,
        Bs: list[torch.Tensor],
        gather_dim: int,
        group_name: str,
        *,
        return_A: bool = True,
    ) -> paths.Outs:
        if symm_mem._is_test_mode:
            return torch_kernel(A_shard, Bs, gather_dim, group_name, return_A=return_A)
        group = _resolve_process_group(group_name)  # type: ignore[arg-type]  # a NewType of str
        routes = _routes.get(group)
        if routes is None:
            routes = _routes[group] = {}
        kinds = [(B.shape, B.stride(), B.dtype, B.device) for B in Bs]
        shape, stride = A_shard.shape, A_shard.stride()
        key = (gather_dim, return_A, shape, stride, A_shard.dtype, A_shard.device, *kinds)
        if key not in routes:
            if len(routes) >= _MAX_ROUTES:
                routes.clear()
            reason = _why_torch(A_shard, Bs, gather_dim, group)
            if reason is None:
                routes[key] = _new_route(A_shard, Bs, gather_dim, group, return_A)
            else:
                _warn(reason)
                routes[key] = None
        route = routes[key]
        if route is not None:
            # torch copies every shard into symmetric memory; agmm one that is not contiguous.
            shard = (A_shard.movedim(gather_dim, 0) if gather_dim else A_shard).contiguous()
            try:
                A, outs = route(shard, Bs, group)
            except (Unsupported, InvalidArgument) as error:
                _warn(str(error))
                routes[key] = None
            else:
                if gather_dim:
                    A = None if A is None else A.movedim(0, gather_dim)
                    outs = [out.movedim(0, gather_dim) for out in outs]
                return A, outs
        return torch_kernel(A_shard, Bs, gather_dim, group_name, return_A=return_A)

    return kernel


# --- registration: all that depends on torch's version ---


class _Override:
    """agmm's kernels over torch's, until `end`."""

    def __init__(self) -> None:
        """Raises AgmmError where this torch lacks the op or has another schema."""
        try:
            schema = str(torch._C._get_schema(_OP, ""))
        except RuntimeError:
            schema = "none"
        if schema != _SCHEMA:
            raise AgmmError(
                f"async_tp: found schema {schema} in torch {torch.__version__}, wanted {_SCHEMA} "
                "(torch 2.11 or later)"
            )
        kernels = {key: _kernel_over(_torch_kernel(key)) for key in _KEYS}
        namespace, name = _OP.split("::")
        torchs = {f"{namespace}/{name}/{key}" for key in _KEYS} & torch.library._impls
        self._library = torch.library.Library(namespace, "IMPL")
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", r"(?s).*Overriding a previously registered")
                for key, kernel in kernels.items():
                    # allow_override became the default in torch 2.13.
                    self._library.impl(name, kernel, key, allow_override=True)
                    # The end of a library takes its kernels off torch's list of those registered
                    # from Python; torch's own are on it under the same names, and have to stay.
                    self._library._op_impls.difference_update(torchs)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Uncover torch's kernels."""
        self._library._destroy()


def _torch_kernel(key: str) -> _Kernel:
    """torch's kernel for this dispatch key; where it has none its Meta kernel, which is the
    decomposition into all_gather and matmul, for any device."""
    source = key if torch._C._dispatch_has_kernel_for_dispatch_key(_OP, key) else "Meta"
    kernel = torch.library.get_kernel(_OP, source)
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
    """Let agmm serve ``torch.ops.symm_mem.fused_all_gather_matmul``, in this whole process.

    May be used as ``with agmm.async_tp.enable(): ...``, which puts back at its end, also after an
    exception, what was there before; such blocks may be nested. Enabling twice is enabling once.
    All ranks of a group have to enable and disable between the same calls.

    agmm serves tensors [..., K] gathered along any dimension but the last, with one or several
    weights and with or without A, on the devices, dtypes and sizes of `agmm.all_gather_matmul`.
    A shard that is not contiguous once gather_dim is moved to the front is copied. Results have the
    strides of torch's own. A call may be captured in a CUDA graph after one eager call with the
    same shape. All other calls go to torch's kernel, with one warning for each reason; those on CPU
    tensors, for which torch has no kernel, to the decomposition that torch traces with.

    Raises:
        AgmmError: this torch lacks the op, or its schema is another one.
    """
    return _Restore(_switch(True))


def disable() -> None:
    """Give the op back to torch. Does nothing where agmm is not enabled."""
    _switch(False)


def is_enabled() -> bool:
    """Whether agmm serves the op in this process."""
    return _override is not None
