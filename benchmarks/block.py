"""One Llama-shaped transformer block, end to end: agmm's layers beside NCCL and torch's async TP.

RMSNorm, attention with grouped heads and rotary positions, SwiGLU; tensor parallel over all ranks,
activations [tokens / ranks, 1, hidden] sharded along the sequence, one causal sequence. All ways
have the same weights and input. Each is checked against a whole block in float32 before it is
timed; a way that fails stays in the table with its reason.

    python benchmarks/block.py
    python benchmarks/block.py --quick --tokens 4096 --json block.json
    torchrun --nproc-per-node 4 benchmarks/block.py
    python benchmarks/block.py --device cpu --world-size 2
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn
from torch.nn import functional

from agmm._installation import one_line
from agmm.bench.exchange import of_all_ranks
from agmm.bench.launcher import is_rank_0, ranks, torchrun_world_size
from agmm.bench.measure import release_memory
from agmm.bench.options import DEFAULT_WORLD_SIZE, Options
from agmm.bench.reports import new_report, write_json
from agmm.bench.timer import time_ways
from agmm.cli.report_tables import number
from agmm.cli.terminal import console, plain_table
from agmm.errors import InvalidArgument
from agmm.integrations import async_tp
from agmm.nn import ColumnParallelLinear, RowParallelLinear, load_full_state_dict
from agmm.nn._held import local_part, local_values
from agmm.nn._sharded import ShardedLinear
from agmm.runtime.groups import group_of
from agmm.testing.reference import allowed_error, poison, relative_error

SAMPLES = 8
WARMUP = 2
SPIN_US = 2000.0
"""Longer than the timer's: a block is some hundred launches."""

COMPILE_LIMIT_S = 75.0
"""Beyond it, fewer token counts are compiled for; the largest come first."""

ERROR_FACTOR = 3.0
"""A result may have this many times the error of the whole block in the same dtype: the ranks'
partial sums are rounded before they are added up."""

FORWARD, STEP = "forward", "forward + backward"
_MIB = 2**20
_ROPE_BASE = 500000.0

Tensors = tuple[torch.Tensor, ...]
Call = Callable[[], Tensors]
"""One pass. Returns the output, and after it the gradients of the input and of the weights."""


@dataclass(frozen=True)
class Sizes:
    """Of the whole block."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    def check(self, world_size: int) -> None:
        """Raises InvalidArgument for sizes that the ranks cannot share."""
        for name in ("ffn", "heads", "kv_heads"):
            if getattr(self, name) % world_size:
                raise InvalidArgument(
                    f"{name}: found {getattr(self, name)}, wanted a multiple of {world_size} ranks"
                )
        if self.hidden % (2 * self.heads):
            raise InvalidArgument(
                f"hidden: found {self.hidden}, wanted a multiple of twice the {self.heads} heads"
            )
        if self.heads % self.kv_heads:
            raise InvalidArgument(
                f"heads: found {self.heads}, wanted a multiple of {self.kv_heads} key-value heads"
            )


DEFAULTS = {
    "cuda": (Sizes(8192, 28672, 64, 8), (2048, 4096, 8192, 16384)),
    "cpu": (Sizes(128, 352, 8, 4), (32, 64)),
}
"""Sizes and token counts by device: those of Llama 3 70B, and some that take milliseconds."""


# --- plain tensor parallelism ---


def _gather(shard: torch.Tensor, group_name: str, world_size: int) -> torch.Tensor:
    if torch.compiler.is_compiling():  # what torch's async TP looks for
        functional_ops = torch.ops._c10d_functional
        started = functional_ops.all_gather_into_tensor(shard, world_size, group_name)
        traced: torch.Tensor = functional_ops.wait_tensor(started)
        return traced
    gathered = shard.new_empty(world_size * shard.shape[0], *shard.shape[1:])
    # The same functions: torch 2.13 renamed them.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    all_gather(gathered, shard, group=group_of(group_name))
    return gathered


def _scatter(partial: torch.Tensor, group_name: str, world_size: int) -> torch.Tensor:
    if torch.compiler.is_compiling():
        functional_ops = torch.ops._c10d_functional
        started = functional_ops.reduce_scatter_tensor(partial, "sum", world_size, group_name)
        traced: torch.Tensor = functional_ops.wait_tensor(started)
        return traced
    part = partial.new_empty(partial.shape[0] // world_size, *partial.shape[1:])
    reduce_scatter: Callable[..., Any] = (
        getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    )
    reduce_scatter(part, partial, group=group_of(group_name))
    return part


class GatherRows(torch.autograd.Function):
    """All-gather along dimension 0; its backward is a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, group_name: str, world_size: int) -> torch.Tensor:
        ctx.group_name, ctx.world_size = group_name, world_size
        return _gather(shard, group_name, world_size)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _scatter(grad.contiguous(), ctx.group_name, ctx.world_size), None, None


class ScatterRows(torch.autograd.Function):
    """Reduce-scatter along dimension 0; its backward is an all-gather."""

    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, group_name: str, world_size: int) -> torch.Tensor:
        ctx.group_name, ctx.world_size = group_name, world_size
        return _scatter(partial, group_name, world_size)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _gather(grad.contiguous(), ctx.group_name, ctx.world_size), None, None


class PlainColumnParallel(ColumnParallelLinear):
    """The layer by an all-gather, then a matmul. The gathered rows are kept for the backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = GatherRows.apply(x, self.group_name, self.world_size)
        (weight,), _ = self.operands()
        return functional.linear(rows, weight.t())


class PlainRowParallel(RowParallelLinear):
    """The layer by a matmul, then a reduce-scatter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (weight,), _ = self.operands()
        partial = functional.linear(x, weight.t())
        part: torch.Tensor = ScatterRows.apply(partial, self.group_name, self.world_size)
        return part


# --- the block ---


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions of x [1, heads, tokens, size]; the tables are [tokens, size]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Block(nn.Module):
    """`layers` is "whole", "plain" or "agmm"; the state dicts of the last two have the same names
    and shapes, that of "whole" is what `load_full_state_dict` takes."""

    def __init__(
        self, sizes: Sizes, layers: str, *, save_gathered: bool = False, **place: Any
    ) -> None:
        super().__init__()
        hidden, ffn = sizes.hidden, sizes.ffn
        kv_width = sizes.kv_heads * sizes.head_size
        self.head_size = sizes.head_size
        self.groups = sizes.heads // sizes.kv_heads
        self.is_whole = layers == "whole"
        parts = 1 if self.is_whole else dist.get_world_size()

        def column(widths: Sequence[int]) -> nn.Module:
            if layers == "whole":
                return nn.Linear(hidden, sum(widths), bias=False, **place)
            if layers == "plain":
                return PlainColumnParallel(hidden, widths, bias=False, **place)
            return ColumnParallelLinear(
                hidden, widths, bias=False, save_gathered=save_gathered, **place
            )

        def row(width: int) -> nn.Module:
            kinds = {"whole": nn.Linear, "plain": PlainRowParallel, "agmm": RowParallelLinear}
            layer: nn.Module = kinds[layers](width, hidden, bias=False, **place)
            return layer

        self.qkv = column([hidden, kv_width, kv_width])
        self.qkv_widths = [hidden // parts, kv_width // parts, kv_width // parts]
        self.out = row(hidden)
        self.gate_up = column([ffn, ffn])
        self.down = row(ffn)
        self.attention_norm = nn.RMSNorm(hidden, eps=1e-5, **place)
        self.ffn_norm = nn.RMSNorm(hidden, eps=1e-5, **place)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.attention_norm(x))
        parts = qkv if isinstance(qkv, tuple) else qkv.split(self.qkv_widths, dim=-1)
        # [tokens, 1, heads * size] -> [1, heads, tokens, size]
        q, k, v = (part.unflatten(-1, (-1, self.head_size)).permute(1, 2, 0, 3) for part in parts)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        wide = q.dtype in (torch.float32, torch.float64)
        if wide:  # on CUDA no kernel but the quadratic one has grouped heads in float32
            k, v = (t.repeat_interleave(self.groups, dim=1) for t in (k, v))
        attended = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=not wide
        )
        x = x + self.out(attended.permute(2, 0, 1, 3).flatten(2))
        gate_up = self.gate_up(self.ffn_norm(x))
        gate, up = gate_up if isinstance(gate_up, tuple) else gate_up.chunk(2, dim=-1)
        result: torch.Tensor = x + self.down(functional.silu(gate) * up)
        return result


# --- one problem on one rank ---


@dataclass(frozen=True)
class Settings:
    """What every rank is told."""

    device: str
    sizes: Sizes
    ways: tuple[str, ...]
    samples: int
    backward: bool
    save_gathered: bool
    compile_left_s: float

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    @property
    def passes(self) -> tuple[str, ...]:
        return (FORWARD, STEP) if self.backward else (FORWARD,)


@dataclass
class Problem:
    """One rank's tensors at one token count, and what its results should be."""

    settings: Settings
    group: dist.ProcessGroup
    device: torch.device
    x: torch.Tensor
    dout: torch.Tensor
    tables: tuple[torch.Tensor, torch.Tensor]
    weights: dict[str, torch.Tensor]
    wanted: dict[str, torch.Tensor]
    allowed: dict[str, float]
    async_tp_calls: dict[str, Prepared] = field(default_factory=dict)

    def block(self, layers: str) -> Block:
        """A block with parameters of its own over the one storage of the weights."""
        made = Block(
            self.settings.sizes,
            layers,
            save_gathered=self.settings.save_gathered,
            device="meta",
            dtype=self.settings.dtype,
        )
        made.load_state_dict(self.weights, assign=True)
        return made


@dataclass
class Prepared:
    """`peak_bytes` where it was measured while preparing."""

    call: Call
    peak_bytes: int | None = None
    note: str = ""


def make_call(
    block: Block,
    x: torch.Tensor,
    dout: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    which: str,
    *,
    run: Callable[..., torch.Tensor] | None = None,
) -> Call:
    """One pass through the block, or through what `run` made of it."""
    run = block if run is None else run
    leaf = x.detach().requires_grad_()
    leaves = [leaf, *block.parameters()]

    def forward() -> Tensors:
        with torch.no_grad():
            return (run(leaf, *tables),)

    def step() -> Tensors:
        out = run(leaf, *tables)
        # The graph must end here: a capture on another stream must find no AccumulateGrad of it.
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    return forward if which == FORWARD else step


def make_problem(tokens: int, settings: Settings) -> Problem:
    """The problem and its reference, on every rank of the default group."""
    group = dist.group.WORLD
    assert group is not None
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if settings.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    sizes, dtype = settings.sizes, settings.dtype
    place: dict[str, Any] = {"device": device, "dtype": dtype}
    generator = torch.Generator(device).manual_seed(tokens)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, **place)

    whole = Block(sizes, "whole", device="meta", dtype=dtype)
    state = {
        name: randn(*weight.shape) * weight.shape[1] ** -0.5
        if weight.dim() == 2
        else 1 + 0.1 * randn(*weight.shape)
        for name, weight in whole.state_dict().items()
    }
    x, dout = (randn(tokens, 1, sizes.hidden) for _ in range(2))
    half = sizes.head_size // 2
    frequencies = _ROPE_BASE ** (-torch.arange(half, dtype=torch.float64, device=device) / half)
    angles = torch.arange(tokens, dtype=torch.float64, device=device)[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    tables = angles.cos().to(dtype), angles.sin().to(dtype)

    sharded = Block(sizes, "agmm", **place)
    load_full_state_dict(sharded, state)
    rows = slice(rank * tokens // world_size, (rank + 1) * tokens // world_size)

    def own(results: Tensors) -> dict[str, torch.Tensor]:
        """What this rank should find of the whole block's results, by name."""
        found = {"out": results[0][rows]}
        if len(results) > 1:
            found["x"] = results[1][rows]
        for (name, _), grad in zip(whole.named_parameters(), results[2:], strict=False):
            path, _, leaf = name.rpartition(".")
            owner = sharded.get_submodule(path)
            if isinstance(owner, ShardedLinear):
                for piece, whole_grad in owner.held[leaf].split(grad).items():
                    part = local_part(whole_grad, owner.get_parameter(piece))
                    found[f"{path}.{piece}"] = part
            else:
                found[name] = grad
        return {name: tensor.clone() for name, tensor in found.items()}

    def whole_results(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        block = Block(sizes, "whole", device="meta")
        block.load_state_dict({name: t.to(dtype) for name, t in state.items()}, assign=True)
        cos, sin = (table.to(dtype) for table in tables)
        call = make_call(block, x.to(dtype), dout.to(dtype), (cos, sin), settings.passes[-1])
        return own(call())

    wanted = whole_results(torch.float32 if device.type == "cuda" else torch.float64)
    release_memory(device)
    same_dtype = whole_results(dtype)
    allowed = {
        name: allowed_error(relative_error(found, wanted[name]), ERROR_FACTOR)
        for name, found in same_dtype.items()
    }
    return Problem(
        settings=settings,
        group=group,
        device=device,
        x=x[rows].clone(),
        dout=dout[rows].clone(),
        tables=tables,
        weights={name: tensor.detach() for name, tensor in sharded.state_dict().items()},
        wanted=wanted,
        allowed=allowed,
    )


# --- the ways ---


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
        with _peak_memory(p.device) as peak, captured:
            results = call()

        def replay() -> Tensors:
            graph.replay()
            return results

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
def _peak_memory(device: torch.device) -> Iterator[list[int | None]]:
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


@dataclass
class Result:
    """What came of one pass of one way. `reason` says why it has no time."""

    median_us: float | None = None
    relative_error: float | None = None
    worst_tensor: str | None = None
    wrong: bool = False
    reason: str | None = None
    note: str = ""
    peak_mib: float | None = None
    prepare_s: float = 0.0
    samples_us: list[float] = field(default_factory=list)


def _agree(p: Problem, mine: Any) -> list[Any]:
    """The ranks' values, by rank."""
    return of_all_ranks("what came of a pass", mine, p.group)


def _first_failure(p: Problem, reason: str | None) -> str | None:
    """The same on every rank, so that all of them go on without the way."""
    for rank, failed in enumerate(_agree(p, reason)):
        if failed is not None:
            return f"rank {rank}: {failed}"
    return None


def _errors(p: Problem, results: Tensors) -> dict[str, float]:
    """Relative errors by name. Collective: the norms' gradients are those of this rank's rows."""
    found = dict(zip(p.wanted, results, strict=False))
    errors = {}
    for name, tensor in found.items():
        tensor = local_values(tensor)
        if "norm" in name:
            tensor = tensor.to(p.wanted[name].dtype, copy=True)
            dist.all_reduce(tensor, group=p.group)
        errors[name] = relative_error(tensor, p.wanted[name])
    return errors


def prepare_and_check(p: Problem, way: Way, which: str) -> tuple[Result, Call | None]:
    """Builds one pass of a way and compares it with the reference on every rank. Collective.

    Returns the ranks' common result, without a time, and the call where all ranks have a right one.
    """
    began = time.perf_counter()
    prepared: Prepared | None = None
    reason, peak, errors = None, None, {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            prepared = way.prepare(p, which)
        except Exception as error:
            reason = one_line(error)
        # Before the next call, in which the others would wait for a rank that has failed.
        reason = _first_failure(p, reason)
        if prepared is not None and reason is None:
            try:
                for tensor in prepared.call():
                    poison(tensor)
            except Exception as error:
                reason = one_line(error)
            reason = _first_failure(p, reason)
        if prepared is None or reason is not None:
            return Result(reason=reason, prepare_s=time.perf_counter() - began), None
        try:
            with _peak_memory(p.device) as measured:
                results = prepared.call()
            peak = measured[0] if prepared.peak_bytes is None else prepared.peak_bytes
        except Exception as error:
            reason = one_line(error)
        reason = _first_failure(p, reason)
        if reason is None:
            errors = _errors(p, results)
            del results
    prepare_s, peak_mib = time.perf_counter() - began, None if peak is None else peak / _MIB
    notes = {prepared.note, *(str(w.message) for w in caught if "agmm" in str(w.message))}
    result = Result(reason=reason, note="; ".join(sorted(notes - {""})))
    if reason is not None:
        return replace(result, prepare_s=prepare_s), None
    for rank, (their_errors, their_peak, their_s) in enumerate(
        _agree(p, (errors, peak_mib, prepare_s))
    ):
        result.prepare_s = max(result.prepare_s, their_s)
        if their_peak is not None:
            result.peak_mib = max(result.peak_mib or 0.0, their_peak)
        for name, found in their_errors.items():
            if result.relative_error is None or found > result.relative_error:
                result.relative_error, result.worst_tensor = found, name
            if found > p.allowed[name] and not result.wrong:
                result.wrong = True
                result.reason = (
                    f"{name} on rank {rank}: relative error {found:.3g}, "
                    f"allowed {p.allowed[name]:.3g}"
                )
        if result.relative_error is not None and not math.isfinite(result.relative_error):
            result.relative_error = None  # JSON has no infinity; the reason says it
    return result, None if result.wrong else prepared.call


def measure(tokens: int, settings: Settings) -> dict[str, Any]:
    """Checks and times the ways at one token count. Every rank of the default group calls this and
    gets the same report."""
    p = make_problem(tokens, settings)
    # Rank 0's, so that every rank judges by the same limits.
    p.allowed = _agree(p, p.allowed)[0]
    results: dict[str, dict[str, Result]] = {name: {} for name in settings.ways}
    calls: dict[str, dict[str, Call]] = {which: {} for which in settings.passes}
    compile_s = 0.0
    # The graphs last: the others may replace the shared workspace of torch's fused ops, of which a
    # graph would keep the old address.
    for name in sorted(settings.ways, key=lambda name: WAYS[name].is_graph):
        way = WAYS[name]
        for which in settings.passes:
            if way.is_compiled and settings.compile_left_s <= 0:
                results[name][which] = Result(reason="left out: the time to compile is used up")
                continue
            with torch._dynamo.config.patch(recompile_limit=64):
                result, call = prepare_and_check(p, way, which)
            if way.is_compiled:
                compile_s += max(_agree(p, result.prepare_s))
            results[name][which] = result
            if call is not None:
                calls[which][name] = call
            del call
            release_memory(p.device)
    for which in settings.passes:
        ordered = {name: calls[which][name] for name in settings.ways if name in calls[which]}
        timed = time_ways(
            ordered,
            group=p.group,
            samples=settings.samples,
            warmup=WARMUP,
            spin_us=SPIN_US,
            device=p.device,
        )
        for name, samples in timed.items():
            results[name][which].samples_us = [round(s, 3) for s in samples]
            results[name][which].median_us = statistics.median(samples)
        del ordered
        calls[which].clear()
    p.async_tp_calls.clear()
    torch.compiler.reset()
    device = p.device
    del p
    release_memory(device)
    return {
        "tokens": tokens,
        "compile_s": round(compile_s, 1),
        "ways": {
            name: {which: asdict(result) for which, result in by_pass.items()}
            for name, by_pass in results.items()
        },
    }


# --- the report ---


def _median(entry: dict[str, Any], name: str, which: str) -> float | None:
    found: float | None = entry["ways"].get(name, {}).get(which, {}).get("median_us")
    return found


def token_table(entry: dict[str, Any], passes: Sequence[str]) -> Table:
    """One token count's ways: µs, speed-up over the first, memory, worst error."""
    table = plain_table(f"{entry['tokens']} tokens")
    table.add_column("way", no_wrap=True)
    for which in passes:
        table.add_column(f"{which}, µs", justify="right")
        table.add_column(f"× {BASE}", justify="right", no_wrap=True)
    table.add_column("peak MiB", justify="right")
    table.add_column("error", justify="right", no_wrap=True)
    table.add_column("note", overflow="fold")
    for name, by_pass in entry["ways"].items():
        cells, notes = [], {}
        for which in passes:
            result = by_pass[which]
            median, base = result["median_us"], _median(entry, BASE, which)
            cells.append("WRONG" if result["wrong"] else number(median, ".1f"))
            cells.append(number(base / median if base and median else None, ".3f"))
            text = result["reason"] or result["note"]
            if text:
                notes[which] = text
        last = by_pass[passes[-1]]
        errors = [r["relative_error"] for r in by_pass.values() if r["relative_error"] is not None]
        same = len(set(notes.values())) == 1 and len(notes) == len(passes)
        shown = list(notes.values())[:1] if same else [f"{k}: {v}" for k, v in notes.items()]
        table.add_row(
            name,
            *cells,
            number(last["peak_mib"] if len(passes) > 1 else None, ".0f"),
            number(max(errors, default=None), ".1e"),
            escape("; ".join(shown)),
        )
    return table


def summary_table(entries: Sequence[dict[str, Any]], passes: Sequence[str]) -> Table:
    """One row per token count and pass: the first way, the best without agmm, the best with it."""
    table = plain_table("summary (µs)")
    table.add_column("tokens", justify="right")
    table.add_column("pass", no_wrap=True)
    table.add_column(BASE, justify="right")
    for heading in ("best other", "best agmm"):
        table.add_column(heading, justify="right")
        table.add_column("(way)", no_wrap=True)
    table.add_column(f"{BASE} ÷ agmm", justify="right")
    table.add_column("best other ÷ agmm", justify="right")
    for entry in entries:
        for which in passes:
            times = {n: t for n in entry["ways"] if (t := _median(entry, n, which)) is not None}
            base = times.get(BASE)
            best: dict[bool, tuple[float | None, str]] = {}
            for is_agmm in (False, True):
                some = [(t, n) for n, t in times.items() if WAYS[n].is_agmm == is_agmm]
                best[is_agmm] = min(some, default=(None, "-"))
            (other, other_name), (ours, our_name) = best[False], best[True]
            table.add_row(
                str(entry["tokens"]),
                which,
                number(base, ".1f"),
                number(other, ".1f"),
                other_name,
                number(ours, ".1f"),
                our_name,
                number(base / ours if base and ours else None, ".3f"),
                number(other / ours if other and ours else None, ".3f"),
            )
    return table


def render(report: dict[str, Any], out: Console) -> None:
    """Prints a table per token count and the summary of them all."""
    machine, settings = report["machine"], report["settings"]
    block, kept = settings["block"], settings["save_gathered"]
    out.print(
        f"{settings['world_size']} ranks on {machine['device_name']}, {settings['dtype']}; "
        f"torch {machine['torch']}, CUDA {machine['cuda'] or '-'}, NCCL {machine['nccl'] or '-'}, "
        f"driver {machine['driver'] or '-'}, agmm {machine['agmm']}, commit {report['commit']}"
    )
    out.print(
        f"hidden {block['hidden']}, ffn {block['ffn']}, heads {block['heads']}, "
        f"key-value heads {block['kv_heads']}; median of {settings['samples']} interleaved "
        "samples, each the maximum over the ranks; peak: activations, gradients and temporaries "
        "of torch's allocator, without the weights and without symmetric memory; in the backward "
        f"agmm's layers {'have kept the gathered rows' if kept else 'gather the rows again'}"
    )
    for entry in report["tokens"]:
        out.print(token_table(entry, settings["passes"]))
    out.print(summary_table(report["tokens"], settings["passes"]))


def wrong_ways(report: dict[str, Any]) -> list[str]:
    """'way, pass, tokens' for every result that failed its check."""
    return [
        f"{name}, {which}, {entry['tokens']} tokens"
        for entry in report["tokens"]
        for name, by_pass in entry["ways"].items()
        for which, result in by_pass.items()
        if result["wrong"]
    ]


def run(
    settings: Settings, world_size: int, tokens: Sequence[int], progress: Callable[[str], None]
) -> dict[str, Any]:
    """Runs the benchmark and returns the report; under torchrun every rank returns it.

    Raises InvalidArgument for what cannot run.
    """
    settings.sizes.check(world_size)
    for count in tokens:
        if count < 1 or count % world_size:
            raise InvalidArgument(f"tokens: found {count}, wanted a multiple of {world_size} ranks")
    if settings.device == "cuda" and torch.cuda.device_count() < world_size:
        raise InvalidArgument(
            f"world size: found {world_size}, wanted at most {torch.cuda.device_count()}, the "
            "number of GPUs here (--device cpu needs none)"
        )
    # The ranks compile at the same time.
    threads = max(1, min(16, (os.cpu_count() or 1) // world_size))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    report = new_report(
        Options(
            device=settings.device,
            world_size=world_size,
            samples=settings.samples,
            warmup=WARMUP,
            spin_us=SPIN_US,
            dtype=settings.dtype,
        )
    )
    del report["shapes"]
    report["settings"] |= {
        "block": asdict(settings.sizes),
        "passes": list(settings.passes),
        "save_gathered": settings.save_gathered,
        "compile_limit_s": settings.compile_left_s,
    }
    entries = []
    with ranks(settings.device, world_size) as call:
        # The largest first: no later one makes the workspaces grow.
        for i, count in enumerate(sorted(set(tokens), reverse=True), 1):
            began = time.perf_counter()
            progress(f"[{i}/{len(set(tokens))}] {count} tokens: {len(settings.ways)} ways")
            entry = call(measure, count, settings)
            left = settings.compile_left_s - entry["compile_s"]
            settings = replace(settings, compile_left_s=left)
            entries.append(entry)
            progress(
                f"  {time.perf_counter() - began:.1f} s, of them {entry['compile_s']:.1f} in "
                "compiled ways before their timing"
            )
    report["tokens"] = sorted(entries, key=lambda entry: int(entry["tokens"]))
    return report


class Device(str, Enum):
    cuda = "cuda"
    cpu = "cpu"


def _token_counts(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidArgument(f"tokens: found {text!r}, wanted counts such as 2048,4096") from None


def main(
    tokens: Annotated[
        str | None, typer.Option(help="Tokens of all ranks together, comma-separated.")
    ] = None,
    ways: Annotated[
        str | None, typer.Option(help=f"Of {', '.join(WAYS)}; comma-separated. Default: all.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples per way and pass.")] = SAMPLES,
    hidden: Annotated[int | None, typer.Option(min=1)] = None,
    ffn: Annotated[int | None, typer.Option(min=1)] = None,
    heads: Annotated[int | None, typer.Option(min=1)] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1)] = None,
    world_size: Annotated[int, typer.Option(min=1)] = DEFAULT_WORLD_SIZE,
    device: Annotated[Device, typer.Option()] = Device.cuda,
    backward: Annotated[
        bool, typer.Option(help="Also forward + backward, beside the forward alone.")
    ] = True,
    save_gathered: Annotated[
        bool,
        typer.Option(
            help="agmm's layers keep the gathered rows for the backward, as the other ways do; "
            "else they gather again and need less memory."
        ),
    ] = False,
    quick: Annotated[bool, typer.Option(help="Leave out the compiled ways.")] = False,
    compile_limit: Annotated[
        float,
        typer.Option(min=0, help="Seconds of compiling after which other token counts do without."),
    ] = COMPILE_LIMIT_S,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", dir_okay=False, help="Write the report with every sample here."),
    ] = None,
) -> None:
    """Time one tensor-parallel transformer block by agmm, NCCL and torch's async TP, in one run."""
    stdout, stderr = console(), console(stderr=True)
    torchrun_size = torchrun_world_size()
    default, default_tokens = DEFAULTS[device.value]

    def progress(line: str) -> None:
        if is_rank_0():
            stderr.print(line, markup=False)

    try:
        settings = Settings(
            device=device.value,
            sizes=Sizes(
                hidden or default.hidden,
                ffn or default.ffn,
                heads or default.heads,
                kv_heads or default.kv_heads,
            ),
            ways=select_ways(ways.split(",") if ways else None, device.value, quick),
            samples=samples,
            backward=backward,
            save_gathered=save_gathered,
            compile_left_s=compile_limit,
        )
        counts = default_tokens if tokens is None else _token_counts(tokens)
        report = run(settings, torchrun_size or world_size, counts, progress)
    except InvalidArgument as error:
        print(f"block.py: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if not is_rank_0():
        return
    render(report, stdout)
    if json_path is not None:
        write_json(report, json_path)
        stderr.print(f"wrote {json_path}")
    wrong = wrong_ways(report)
    if wrong:
        print(f"block.py: wrong results: {'; '.join(wrong)}", file=sys.stderr)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
