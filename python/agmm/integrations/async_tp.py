"""agmm as the backend of PyTorch's async tensor parallelism.

After `enable` agmm computes ``torch.ops.symm_mem.fused_all_gather_matmul`` and
``fused_matmul_reduce_scatter``, which torch's compiler pass
(``torch._inductor.config._micro_pipeline_tp``), torchtitan and vLLM call, and those of fp8 operands
(`scaled_async_tp`). What agmm does not support goes to torch's own kernel,
unchanged. Importing this module changes nothing.

Only kernels of the CUDA and CPU dispatch keys are put over torch's. The Meta kernels stay, so
tracing and compiled graphs are the same with and without agmm, and a graph that was compiled before
`enable` uses agmm after it.
"""

from __future__ import annotations

import threading
import warnings
from types import TracebackType
from typing import NamedTuple

import torch

from agmm.errors import AgmmError
from agmm.integrations.async_tp_kernels import (
    NAMESPACE,
    Kernel,
    KernelOver,
    gather_over,
    scaled_over,
    scatter_over,
)
from agmm.integrations.scaled_async_tp import ServedGather, ServedScatter
from agmm.ops import plain_scatter

# --- registration: all that depends on torch's version ---


class _Op(NamedTuple):
    """An op of torch, and where agmm puts a kernel over torch's."""

    schema: str
    keys: tuple[str, ...]
    kernel_over: KernelOver

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]


OPS = (
    _Op(
        f"{NAMESPACE}::fused_all_gather_matmul(Tensor A, Tensor[] Bs, int gather_dim, "
        "str group_name, *, bool return_A=True) -> (Tensor?, Tensor[])",
        ("CUDA", "CPU"),
        gather_over,
    ),
    _Op(
        f"{NAMESPACE}::fused_matmul_reduce_scatter(Tensor A, Tensor B, str reduce_op, "
        "int scatter_dim, str group_name) -> Tensor",
        ("CUDA", "CPU"),
        scatter_over,
    ),
    _Op(
        f"{NAMESPACE}::fused_all_gather_scaled_matmul(Tensor A, Tensor[] Bs, Tensor A_scale, "
        "Tensor[] B_scales, int gather_dim, str group_name, Tensor?[] biases, "
        "Tensor?[] result_scales, ScalarType?[] out_dtypes, bool[] use_fast_accum) "
        "-> (Tensor, Tensor[])",
        ("CUDA", "CPU"),
        scaled_over("fused_all_gather_scaled_matmul", ServedGather),
    ),
    _Op(
        f"{NAMESPACE}::fused_scaled_matmul_reduce_scatter(Tensor A, Tensor B, Tensor A_scale, "
        "Tensor B_scale, str reduce_op, int orig_scatter_dim, "
        "int scatter_dim_after_maybe_reshape, str group_name, SymInt[]? output_shape, "
        "Tensor? bias=None, Tensor? result_scale=None, ScalarType? out_dtype=None, "
        "bool use_fast_accum=False) -> Tensor",
        ("CUDA", "CPU"),
        scaled_over("fused_scaled_matmul_reduce_scatter", ServedScatter),
    ),
)


class _Override:
    """agmm's kernels over torch's, until `end`."""

    def __init__(self) -> None:
        """Raises AgmmError where this torch lacks an op or has another schema of it."""
        for op in OPS:
            _check_schema(op)
        self._library = torch.library.Library(NAMESPACE, "IMPL")
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", r"(?s).*Overriding a previously registered")
                for op in OPS:
                    for key in op.keys:
                        self._put_over(op, key)
        except BaseException:
            self.end()
            raise

    def _put_over(self, op: _Op, key: str) -> None:
        torchs = torch_kernel(op.name, key)
        if op.kernel_over is scatter_over and key == "CUDA":
            plain_scatter.kernel_of_torch = torchs  # which agmm's own op takes where it cannot
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
        plain_scatter.kernel_of_torch = None


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


def torch_kernel(op: str, key: str) -> Kernel:
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
    """A context manager that puts back at its end what was there before `enable`."""

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
    scales that torch's ops have and scales of blocks, and on CUDA those that
    agmm has kernels for. All other calls go to torch's kernel, with one
    warning for each reason; those on CPU tensors, for which torch has no kernel, to the
    decomposition that torch traces with. None of the ops has a backward, in torch or here; the
    pass puts them into graphs that have one. A call whose operands require gradients raises
    `InvalidArgument`, where torch computes and warns in the backward that the gradients are lost.

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
