"""The torch library of agmm and the schemas of its ops.

The world size is an argument of every op with a group, so that a graph that torch.compile keeps on
disk serves groups of that size only: shapes follow from it, and a group's name says nothing of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

import torch

_EVAL_FRAME = torch._C._dynamo.eval_frame
# It is None in a torch without it, where TorchDynamo may look into kernels.
_set_strategy = getattr(_EVAL_FRAME, "set_code_exec_strategy", None)


class _Library(torch.library.Library):
    """Registers kernels that TorchDynamo leaves alone. A call that a graph break has left outside
    of the graphs runs them beside frames that are compiled, and what they do with locks, memory and
    streams is not to be traced."""

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
        if _set_strategy is not None and dispatch_key in ("CPU", "CUDA", "Autograd"):
            skip = _EVAL_FRAME._FrameAction.SKIP
            _set_strategy(fn.__code__, _EVAL_FRAME._FrameExecStrategy(skip, skip))
        super().impl(op_name, fn, dispatch_key, **options)


library = _Library("agmm", "DEF")

_WORDS = {
    torch.Tensor: "Tensor",
    torch.Tensor | None: "Tensor?",
    list[torch.Tensor]: "Tensor[]",
    list[torch.Tensor | None]: "Tensor?[]",
    list[int]: "int[]",
    torch.dtype: "ScalarType",
    bool: "bool",
    float: "float",
    int: "int",
    str: "str",
}
"""The types of arguments in the words of a schema."""


def schema_of(name: str, arguments: Any, results: str) -> str:
    """The schema of an op that takes the fields of a named tuple, in order.

    Args:
        name: the op's name.
        arguments: the class of the named tuple; a field's default is the argument's.
        results: what the op returns, in the words of a schema.
    """
    hints = get_type_hints(arguments)
    words = []
    for field in arguments._fields:
        words.append(f"{_WORDS[hints[field]]} {field}")
        if field in arguments._field_defaults:
            default = arguments._field_defaults[field]
            words[-1] += f"={json.dumps(default) if isinstance(default, str) else default}"
    return f"{name}({', '.join(words)}) -> {results}"


def define(
    name: str,
    arguments: Any,
    results: str,
    *,
    run: Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]],
    fake: Callable[[Any], Any],
    check_grad: Callable[[Any], None] | None = None,
) -> None:
    """Define an op from the named tuple of its arguments.

    Args:
        name, arguments, results: as for `schema_of`.
        run: what the op does with the arguments, on CPUs and GPUs; or that by dispatch key.
        fake: what it returns on tensors without memory.
        check_grad: refuses operands that require gradients, for an op that has no backward; None
            for an op whose module registers one.
    """
    library.define(schema_of(name, arguments, results))
    by_key = {"CPU": run, "CUDA": run} if callable(run) else run
    for key, function in {**by_key, "Meta": fake}.items():
        library.impl(name, lambda *given, run=function: run(arguments(*given)), key)
    if check_grad is None:
        return
    op = getattr(torch.ops.agmm, name).default

    def refuse_or_run(*given: Any) -> Any:
        check_grad(arguments(*given))
        with torch._C._AutoDispatchBelowAutograd():
            return op(*given)

    library.impl(name, refuse_or_run, "Autograd")


library.define(
    "_async_input_mm(Tensor a, Tensor b, Tensor a_chunk_signals, int a_chunk_pivot, "
    'str activation="", Tensor? up=None) -> Tensor'
)
library.define(
    "_fused_all_gather_matmul_native(Tensor A_shard, Tensor B, str group_name) "
    "-> (Tensor A, Tensor out)"
)
library.define(
    "_fused_matmul_reduce_scatter_native(Tensor A, Tensor B, str reduce_op, str group_name) "
    "-> Tensor"
)
library.define(
    "_matmul_reduce_scatter(Tensor[] As, Tensor[] Bs, Tensor? bias, str group_name, "
    "int world_size, int scatter_dim, str reduce_op, bool strict=False, Tensor? residual=None, "
    'str config="", bool batch_invariant=False) -> Tensor'
)
library.define(
    "_matmul_all_reduce(Tensor A, Tensor B, Tensor? bias, str group_name, int world_size, "
    'bool strict=False, Tensor? residual=None, str config="", bool batch_invariant=False) -> Tensor'
)
library.define(
    "_all_gather(Tensor x, str group_name, int world_size, int dim, bool strict=False, "
    "bool low_contention=False) -> Tensor"
)
library.define(
    "_reduce_scatter(Tensor x, str group_name, int world_size, str op, int dim, "
    "bool strict=False, bool low_contention=False) -> Tensor"
)
library.define(
    "_all_reduce(Tensor x, str group_name, int world_size, str op, bool strict=False) -> Tensor"
)
library.define(
    "_all_reduce_rms_norm(Tensor x, Tensor residual, Tensor weight, str group_name, "
    "int world_size, float eps, bool strict=False) -> (Tensor normed, Tensor residual)"
)
library.define(
    "_scaled_matmul(Tensor A, Tensor scale_a, Tensor B, Tensor scale_b, ScalarType out_dtype, "
    "bool use_fast_accum) -> Tensor"
)
