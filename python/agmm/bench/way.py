"""A way to compute an op that `agmm bench` times beside others, and what it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from agmm.planning.problems import ALL_GATHER_MATMUL
from agmm.testing.cases import Operands

ROOF = "roof"
"""The way that all others are compared with: the matmul alone."""

Result = tuple[torch.Tensor | None, torch.Tensor]
"""The result of a call: the gathered A, where the way returns it, and what the op returns; for the
roof the product."""


@dataclass
class Workload:
    """The operands of one shape on one rank."""

    shape: Any
    """`Shape`, `MoEShape` where the operands are those of a mixture of experts, or `TensorShape`
    where they are those of a collective."""
    group: dist.ProcessGroup
    device: torch.device
    operands: Operands
    op: str = ALL_GATHER_MATMUL
    scaling: str | None = None
    """The kind of scales of fp8 operands."""
    scales: Any = None
    """The scales of the operands, `scaled_ways.Scales`."""

    @property
    def group_name(self) -> Any:
        return self.group.group_name


@dataclass(frozen=True)
class Way:
    """One way to compute an op.

    `prepare` builds whatever the way may keep between calls and returns the call that is timed.
    """

    name: str
    title: str
    prepare: Callable[[Workload], Callable[[], Result]]
    on_cpu: bool = False
    is_agmm: bool = False
    host_time: bool = False


def as_graph(
    prepare: Callable[[Workload], Callable[[], Result]],
) -> Callable[[Workload], Callable[[], Result]]:
    """The way's call, captured in a CUDA graph after two eager ones."""

    def prepare_graph(p: Workload) -> Callable[[], Result]:
        call = prepare(p)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog thread may touch CUDA during the capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            held = call, call()  # the call holds what the graph writes beside its results

        def replay() -> Result:
            graph.replay()
            return held[1]

        return replay

    return prepare_graph


def by_name(*ways: Way) -> dict[str, Way]:
    """The ways by their names."""
    return {way.name: way for way in ways}


def matmul_roof(p: Workload) -> Callable[[], Result]:
    """Prepare the matmul alone, into memory that is there."""
    out = torch.empty(p.shape.M, p.shape.N, dtype=p.operands.A.dtype, device=p.device)
    A, B = p.operands.A, p.operands.B

    def call() -> Result:
        return None, torch.mm(A, B, out=out)

    return call
