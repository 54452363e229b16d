"""The ways to run a pass: collectives and matmuls, torch's async TP, agmm."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from agmm.bench.measure import release_memory
from agmm.errors import InvalidArgument
from agmm.integrations import async_tp
from benchmarks.block.problem import Prepared, Problem, Tensors, make_call


def _eager(layers: str) -> Callable[[Problem, str], Prepared]:
    def prepare(p: Problem, which: str) -> Prepared:
        return Prepared(make_call(p.block(layers), p.x, p.dout, p.tables, which))

    return prepare


def _graph(layers: str) -> Callable[[Problem, str], Prepared]:
    def prepare(p: Problem, which: str) -> Prepared:
        call = _eager(layers)(p, which).call
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(side)
        release_memory(p.device)
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog thread may touch CUDA during the capture.
        captured = torch.cuda.graph(graph, capture_error_mode="thread_local")
        with peak_memory(p.device) as peak, captured:
            kept = call, call()  # the call holds what the graph reads beside the problem's tensors

        def replay() -> Tensors:
            graph.replay()
            return kept[1]

        return Prepared(replay, peak[0])

    return prepare


def _compiled(layers: str, **options: Any) -> Callable[[Problem, str], Prepared]:
    def prepare(p: Problem, which: str) -> Prepared:
        block = p.block(layers)
        run = torch.compile(block, dynamic=False, fullgraph=True, options=options)
        return Prepared(make_call(block, p.x, p.dout, p.tables, which, run=run))

    return prepare


def _torch_async_tp(p: Problem, which: str) -> Prepared:
    if which not in p.async_tp_calls:
        import torch._inductor.config as inductor_config
        import torch.distributed._symmetric_memory as symm_mem

        with warnings.catch_warnings():
            # Deprecated, but the compiler pass asks for it in all of torch 2.11 to 2.13.
            warnings.simplefilter("ignore", FutureWarning)
            symm_mem.enable_symm_mem_for_group(p.group.group_name)
        # A cached graph would not go through the pass, whose work is counted. The option holds for
        # the backward too, which may be compiled in another thread.
        prepare = _compiled("plain", _micro_pipeline_tp=True, fx_graph_cache=False)
        prepared = prepare(p, which)
        with inductor_config.patch(force_disable_caches=True), _fused_collectives() as count:
            prepared.call()
        if count["fused"] == 0:
            raise RuntimeError(f"torch's pass fused none of {count['left']} collectives")
        prepared.note = f"{count['fused']} of {count['fused'] + count['left']} collectives fused"
        p.async_tp_calls[which] = prepared
    return p.async_tp_calls[which]


def _agmm_async_tp(p: Problem, which: str) -> Prepared:
    prepared = _torch_async_tp(p, which)

    def call() -> Tensors:
        with async_tp.enable():
            return prepared.call()

    return replace(prepared, call=call)


@contextmanager
def _fused_collectives() -> Iterator[dict[str, int]]:
    """Counts what torch's async TP pass fuses and leaves in the graphs that are compiled."""
    from torch._inductor.fx_passes import post_grad

    count = {"fused": 0, "left": 0}
    torch_pass: Callable[[torch.fx.Graph], None] = post_grad.micro_pipeline_tp_pass

    def counting(graph: torch.fx.Graph) -> None:
        torch_pass(graph)
        for node in graph.nodes:
            target = str(node.target)
            if "symm_mem.fused_" in target:
                count["fused"] += 1
            elif "all_gather_into_tensor" in target or "reduce_scatter_tensor" in target:
                count["left"] += 1

    with mock.patch.object(post_grad, "micro_pipeline_tp_pass", counting):
        yield count


@contextmanager
def peak_memory(device: torch.device) -> Iterator[list[int | None]]:
    """The most memory at a time beyond what was allocated at the start, as the one element."""
    peak: list[int | None] = [None]
    if device.type != "cuda":
        yield peak
        return
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    yield peak
    torch.cuda.synchronize(device)
    peak[0] = torch.cuda.max_memory_allocated(device) - before


@dataclass(frozen=True)
class Way:
    """`prepare` builds one pass of the way; it may raise."""

    name: str
    title: str
    prepare: Callable[[Problem, str], Prepared]
    on_cpu: bool = False
    is_agmm: bool = False
    is_graph: bool = False
    is_compiled: bool = False


WAYS = {
    way.name: way
    for way in (
        Way("nccl", "collectives and matmuls", _eager("plain"), on_cpu=True),
        Way("nccl-graph", "the same, CUDA graph", _graph("plain"), is_graph=True),
        Way("nccl-compiled", "the same, compiled", _compiled("plain"), is_compiled=True),
        Way("torch-async-tp", "compiled async TP", _torch_async_tp, is_compiled=True),
        Way("agmm", "agmm layers", _eager("agmm"), on_cpu=True, is_agmm=True),
        Way("agmm-graph", "agmm layers, CUDA graph", _graph("agmm"), is_agmm=True, is_graph=True),
        Way(
            "agmm-compiled",
            "agmm layers, compiled",
            _compiled("agmm"),
            is_agmm=True,
            is_compiled=True,
        ),
        Way(
            "agmm-async-tp",
            "compiled async TP over agmm",
            _agmm_async_tp,
            is_agmm=True,
            is_compiled=True,
        ),
    )
}
"""Every way by name. The first is what the others are compared with."""
BASE = "nccl"


def select_ways(names: Sequence[str] | None, device: str, quick: bool) -> tuple[str, ...]:
    """The ways to run, in the order of `WAYS`: those named, or all that exist on the device.

    Raises InvalidArgument that names an unknown way, or one that needs GPUs.
    """
    there = [way.name for way in WAYS.values() if device == "cuda" or way.on_cpu]
    for name in names or ():
        if name not in there:
            raise InvalidArgument(f"way: found {name!r}, wanted one of {', '.join(there)}")
    chosen = [name for name in there if names is None or name in names]
    return tuple(name for name in chosen if not (quick and WAYS[name].is_compiled))
