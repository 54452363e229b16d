"""The ways to compute each op that are timed beside each other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from difflib import get_close_matches

import torch
import torch.distributed as dist

import agmm
from agmm.bench.collective_ways import COLLECTIVE_WAYS
from agmm.bench.moe_ways import MOE_WAYS
from agmm.bench.norm_ways import NORM_WAYS
from agmm.bench.way import ROOF, Result, Way, Workload, as_graph, by_name, matmul_roof
from agmm.errors import InvalidArgument
from agmm.planning.problems import (
    ALL_GATHER_MATMUL,
    MATMUL_ALL_REDUCE,
    MATMUL_REDUCE_SCATTER,
    MOE,
    NORMED,
)
from agmm.runtime.collectives import by_newer_name


def _unfused(p: Workload) -> Callable[[], Result]:
    A = torch.empty_like(p.operands.A)
    out = torch.empty(p.shape.M, p.shape.N, dtype=A.dtype, device=p.device)
    A_shard, B, group = p.operands.A_shard, p.operands.B, p.group
    all_gather = by_newer_name("all_gather_single", "all_gather_into_tensor")

    def call() -> Result:
        all_gather(A, A_shard, group=group)
        return A, torch.mm(A, B, out=out)

    return call


def _torch_decomposed(return_A: bool) -> Callable[[Workload], Callable[[], Result]]:
    def prepare(p: Workload) -> Callable[[], Result]:
        import torch.distributed._symmetric_memory

        # The op takes torch's native path where this variable is set.
        os.environ.pop("TORCH_SYMM_MEM_ENABLE_NATIVE_ASYNC_TP", None)
        A_shard, Bs, name = p.operands.A_shard, [p.operands.B], p.group_name

        def call() -> Result:
            A, outs = torch.ops.symm_mem.fused_all_gather_matmul(
                A_shard, Bs, gather_dim=0, group_name=name, return_A=return_A
            )
            return A, outs[0]

        return call

    return prepare


# The shards of torch's native op, which are never freed: in torch 2.11 the process aborted when one
# was freed after a run; why is not known.
_native_shards: list[torch.Tensor] = []


def _torch_native(p: Workload) -> Callable[[], Result]:
    import torch.distributed._symmetric_memory as symm_mem
    from torch._C._distributed_c10d import _SymmetricMemory

    M_local, K = p.operands.A_shard.shape
    if M_local % 128 or p.shape.M % 256:
        raise InvalidArgument(
            f"M_local: found {M_local}, wanted a multiple of 128 (and M one of 256): torch's "
            "native op can hang on other sizes"
        )
    A_shard = _SymmetricMemory.empty_strided_p2p(
        (M_local, K), (K, 1), p.operands.A_shard.dtype, p.device
    )
    _native_shards.append(A_shard)
    A_shard.copy_(p.operands.A_shard)
    symm_mem.rendezvous(A_shard, p.group_name)
    B, name = p.operands.B, p.group_name
    op = symm_mem._fused_all_gather_matmul_native

    def call() -> Result:
        A, out = op(A_shard, B, name)
        return A, out

    return call


def _agmm(return_A: bool, config: str | None = None) -> Callable[[Workload], Callable[[], Result]]:
    def prepare(p: Workload) -> Callable[[], Result]:
        A_shard, B, group = p.operands.A_shard, p.operands.B, p.group
        op = agmm.all_gather_matmul

        def with_A() -> Result:
            A, out = op(A_shard, B, group, return_A=True, config=config)
            return A, out

        def without_A() -> Result:
            return None, op(A_shard, B, group, config=config)

        return with_A if return_A else without_A

    return prepare


def _scatter_unfused(p: Workload) -> Callable[[], Result]:
    A, B, group = p.operands.A, p.operands.B, p.group
    partial = torch.empty(p.shape.M, p.shape.N, dtype=A.dtype, device=p.device)
    rows = p.shape.M // dist.get_world_size(group)
    out = torch.empty(rows, p.shape.N, dtype=A.dtype, device=p.device)
    reduce_scatter = by_newer_name("reduce_scatter_single", "reduce_scatter_tensor")

    def call() -> Result:
        reduce_scatter(out, torch.mm(A, B, out=partial), group=group)
        return None, out

    return call


def _torch_fused(p: Workload) -> Callable[[], Result]:
    import torch.distributed._symmetric_memory

    A, B, name = p.operands.A, p.operands.B, p.group_name
    op = torch.ops.symm_mem.fused_matmul_reduce_scatter

    def call() -> Result:
        return None, op(A, B, "sum", 0, name)

    return call


def _summed_by_agmm(
    op: Callable[..., torch.Tensor], strict: bool, config: str | None = None
) -> Callable[[Workload], Callable[[], Result]]:
    """The way that calls an op of agmm which sums the products of all ranks."""

    def prepare(p: Workload) -> Callable[[], Result]:
        A, B, group = p.operands.A, p.operands.B, p.group

        def call() -> Result:
            return None, op(A, B, group, strict=strict, config=config)

        return call

    return prepare


def _all_reduce_unfused(p: Workload) -> Callable[[], Result]:
    A, B, group = p.operands.A, p.operands.B, p.group
    out = torch.empty(p.shape.M, p.shape.N, dtype=A.dtype, device=p.device)

    def call() -> Result:
        dist.all_reduce(torch.mm(A, B, out=out), group=group)
        return None, out

    return call


_PORTABLE = "portable"
"""The config of the ways that multiply by the library, beside copies."""
_STREAMED = "streamed"
"""The config of the ways of few rows that exchange packets beside a streaming kernel."""


def _named_ways(
    config: str,
    prepare: Callable[[Workload], Callable[[], Result]],
    prepare_with_A: Callable[[Workload], Callable[[], Result]] | None = None,
) -> tuple[Way, ...]:
    """The ways on GPUs that name a config: on CPU ranks the path is that of the others."""
    made = [(config, f"agmm, {config}", prepare)]
    if prepare_with_A is not None:
        made.append((f"{config}-A", f"agmm, {config}, returns A", prepare_with_A))
    return tuple(
        way
        for name, title, one in made
        for way in (
            Way(name, title, one, is_agmm=True, host_time=True),
            Way(f"{name}-graph", f"{title}, graph", as_graph(one), is_agmm=True),
        )
    )


_TITLE_OF_ROOF = "matmul alone (roof)"


def _gather_ways() -> dict[str, Way]:
    return by_name(
        Way(ROOF, _TITLE_OF_ROOF, matmul_roof, on_cpu=True),
        Way("unfused", "all-gather, then matmul", _unfused, on_cpu=True),
        Way("unfused-graph", "all-gather, then matmul, graph", as_graph(_unfused)),
        Way("torch-decomposed", "torch decomposed", _torch_decomposed(False)),
        Way(
            "torch-decomposed-graph",
            "torch decomposed, graph",
            as_graph(_torch_decomposed(False)),
        ),
        Way("torch-decomposed-A", "torch decomposed, returns A", _torch_decomposed(True)),
        Way(
            "torch-decomposed-A-graph",
            "torch decomposed, returns A, graph",
            as_graph(_torch_decomposed(True)),
        ),
        Way("torch-native", "torch native, returns A", _torch_native),
        Way("torch-native-graph", "torch native, returns A, graph", as_graph(_torch_native)),
        Way("agmm", "agmm", _agmm(False), on_cpu=True, is_agmm=True, host_time=True),
        Way("agmm-graph", "agmm, graph", as_graph(_agmm(False)), is_agmm=True),
        Way("agmm-A", "agmm, returns A", _agmm(True), on_cpu=True, is_agmm=True, host_time=True),
        Way("agmm-A-graph", "agmm, returns A, graph", as_graph(_agmm(True)), is_agmm=True),
        *_named_ways(_PORTABLE, _agmm(False, _PORTABLE), _agmm(True, _PORTABLE)),
        *_named_ways(_STREAMED, _agmm(False, _STREAMED)),
    )


def _scatter_ways() -> dict[str, Way]:
    op = agmm.matmul_reduce_scatter
    planned, own = (_summed_by_agmm(op, strict) for strict in (False, True))
    return by_name(
        Way(ROOF, _TITLE_OF_ROOF, matmul_roof, on_cpu=True),
        Way("unfused", "matmul, then reduce-scatter", _scatter_unfused, on_cpu=True),
        Way("unfused-graph", "matmul, then reduce-scatter, graph", as_graph(_scatter_unfused)),
        Way("torch-fused", "torch fused", _torch_fused),
        Way("torch-fused-graph", "torch fused, graph", as_graph(_torch_fused)),
        Way("agmm", "agmm", planned, on_cpu=True, is_agmm=True, host_time=True),
        Way("agmm-graph", "agmm, graph", as_graph(planned), is_agmm=True),
        Way("agmm-fused", "agmm, never unfused", own, on_cpu=True, is_agmm=True, host_time=True),
        Way("agmm-fused-graph", "agmm, never unfused, graph", as_graph(own), is_agmm=True),
        *_named_ways(_PORTABLE, _summed_by_agmm(op, False, _PORTABLE)),
        *_named_ways(_STREAMED, _summed_by_agmm(op, False, _STREAMED)),
    )


def _all_reduce_ways() -> dict[str, Way]:
    op = agmm.matmul_all_reduce
    planned, own = (_summed_by_agmm(op, strict) for strict in (False, True))
    return by_name(
        Way(ROOF, _TITLE_OF_ROOF, matmul_roof, on_cpu=True),
        Way("unfused", "matmul, then all-reduce", _all_reduce_unfused, on_cpu=True),
        Way("unfused-graph", "matmul, then all-reduce, graph", as_graph(_all_reduce_unfused)),
        Way("agmm", "agmm", planned, on_cpu=True, is_agmm=True, host_time=True),
        Way("agmm-graph", "agmm, graph", as_graph(planned), is_agmm=True),
        Way("agmm-fused", "agmm, never unfused", own, on_cpu=True, is_agmm=True, host_time=True),
        *_named_ways(_PORTABLE, _summed_by_agmm(op, False, _PORTABLE)),
        *_named_ways(_STREAMED, _summed_by_agmm(op, False, _STREAMED)),
    )


WAYS = _gather_ways()
"""The ways of `ALL_GATHER_MATMUL` by name. Collectives are NCCL's on GPUs and gloo's on the CPU;
the matmul is torch.mm."""
SCATTER_WAYS = _scatter_ways()
"""The ways of `MATMUL_REDUCE_SCATTER` by name."""
ALL_REDUCE_WAYS = _all_reduce_ways()
"""The ways of `MATMUL_ALL_REDUCE` by name."""
_WAYS_OF = {
    ALL_GATHER_MATMUL: WAYS,
    MATMUL_REDUCE_SCATTER: SCATTER_WAYS,
    MATMUL_ALL_REDUCE: ALL_REDUCE_WAYS,
    NORMED: NORM_WAYS,
    MOE: MOE_WAYS,
    **COLLECTIVE_WAYS,
}
TIMED_OPS = tuple(_WAYS_OF)
"""The ops that `agmm bench` times."""


def ways_of(op: str) -> dict[str, Way]:
    """The ways of an op by name."""
    return _WAYS_OF[op]


def select_ways(
    names: Iterable[str] | None,
    device_type: str,
    op: str = ALL_GATHER_MATMUL,
    known: dict[str, Way] | None = None,
) -> list[str]:
    """The ways of an op, or of ``known`` ones, to run on 'cuda' or 'cpu': those named, or all that
    exist there; always the roof.

    Raises InvalidArgument that names an unknown way and the nearest known one.
    """
    known = ways_of(op) if known is None else known
    there = [way.name for way in known.values() if device_type == "cuda" or way.on_cpu]
    if names is None:
        return there
    chosen = [ROOF]
    for name in names:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise InvalidArgument(f"way: found {name!r}, wanted one of {', '.join(known)}{hint}")
        if name not in there:
            raise InvalidArgument(
                f"way: found {name!r}, which needs GPUs, wanted one of {', '.join(there)}"
            )
        if name not in chosen:
            chosen.append(name)
    return chosen
