"""The ways to compute a mixture of experts that are timed beside each other, and their operands.

Both halves are one call of a way: gate and up with their activation, and down with the sum over
the choices. The roof is the grouped matmuls alone, of rows that lie sorted. The ways of others are
told on the host how many rows there are, which costs them nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional

import agmm
from agmm.bench.way import ROOF, Result, Way, Workload, as_graph, by_name
from agmm.moe import Routing
from agmm.planning.problems import MOE
from agmm.planning.shapes import MoEShape
from agmm.runtime.collectives import by_newer_name
from agmm.testing.cases import Operands


class Experts(NamedTuple):
    """The operands of one rank, beside the tokens of all."""

    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    all_weights: torch.Tensor
    """The router's weights of all ranks' tokens."""
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    routing: Routing
    counts: list[int]
    """How many rows each expert of this rank has."""
    capacity: int
    """The most rows of any rank."""

    @property
    def rows(self) -> int:
        return sum(self.counts)

    @property
    def sources(self) -> torch.Tensor:
        """The token of each row."""
        return self.routing.tokens[: self.rows]

    @property
    def row_weights(self) -> torch.Tensor:
        """The router's weight of each row."""
        return self.all_weights[self.sources, self.routing.choices[: self.rows]]


@dataclass
class MoEWorkload(Workload):
    """The operands of one mixture on one rank; of `operands` the tokens alone mean something."""

    experts: Any = None


def drawn_ids(shape: MoEShape, seed: int) -> torch.Tensor:
    """The experts of all ranks' tokens, k different ones each; the same on all ranks.

    Which experts are wanted most is drawn too, so that they do not lie on one rank.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.zeros(shape.experts)
    if shape.routing == "zipf":
        order = torch.randperm(shape.experts, generator=generator)
        logits[order] = -torch.arange(1.0, shape.experts + 1).log()
    noise = torch.rand((shape.tokens, shape.experts), generator=generator)
    gumbel = -(-noise.clamp(min=1e-20).log()).log()
    return (logits + gumbel).topk(shape.k, dim=-1).indices


def make_problem(
    shape: MoEShape, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype, seed: int
) -> MoEWorkload:
    """The operands of this rank. Collective."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    ids = drawn_ids(shape, seed)
    generator = torch.Generator().manual_seed(seed)
    topk = torch.rand((shape.tokens, shape.k), generator=generator) / shape.k
    own = slice(rank * shape.tokens // ranks, (rank + 1) * shape.tokens // ranks)
    drawing = torch.Generator(device).manual_seed(seed)
    where: dict[str, Any] = {"generator": drawing, "device": device, "dtype": dtype}
    tokens = torch.randn(shape.tokens, shape.hidden, **where)  # the same on all ranks
    drawing.manual_seed(seed + 1 + rank)
    here = shape.experts // ranks
    sizes = [(shape.inner, shape.hidden)] * 2 + [(shape.hidden, shape.inner)]
    gate, up, down = (
        torch.randn(here, n, k, **where).mul_(k**-0.5).transpose(1, 2) for n, k in sizes
    )
    most = max(int((ids // here == one).sum()) for one in range(ranks))
    own_ids = ids[own].to(device)
    routing = agmm.moe.route(own_ids, group, num_experts=shape.experts, capacity=most)
    experts = Experts(
        *(own_ids, topk[own].to(device), topk.to(device), gate, up, down, routing),
        counts=routing.counts.tolist(),
        capacity=most,
    )
    operands = Operands(A_shard=tokens[own].clone(), A=tokens, B=gate[0])
    return MoEWorkload(shape, group, device, operands, MOE, experts=experts)


# --- what a right result is ---


def references(problem: MoEWorkload) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The results in float64 of the roof and of the others, and the error of a computation that
    rounds after each step, as separate calls do. Collective."""
    given, tokens, group = problem.experts, problem.operands.A, problem.group
    dtype, wide = tokens.dtype, torch.float64
    exact = torch.zeros(tokens.shape, dtype=wide, device=problem.device)
    usual = torch.zeros_like(tokens)
    products, begin = [], 0
    for expert, count in enumerate(given.counts):
        at = slice(begin, begin + count)
        begin += count
        sources = given.sources[at]
        rows = tokens[sources].to(wide)
        gate, up = (rows @ weight[expert].to(wide) for weight in (given.gate, given.up))
        down, weights = given.down[expert].to(wide), given.row_weights[at, None]
        products.append((functional.silu(gate) * up) @ down)
        exact.index_add_(0, sources, weights.to(wide) * products[-1])
        hidden = functional.silu(gate.to(dtype)).mul_(up.to(dtype))
        usual.index_add_(0, sources, (hidden.to(wide) @ down).to(dtype).mul_(weights.to(dtype)))
    dist.all_reduce(exact, group=group)
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    wanted = exact.chunk(ranks)[rank].clone()
    partials = [torch.empty_like(usual) for _ in range(ranks)]
    dist.all_gather(partials, usual, group=group)
    found = sum((one.chunk(ranks)[rank] for one in partials[1:]), partials[0].chunk(ranks)[rank])
    error = (found.to(wide) - wanted).norm() / wanted.norm()
    dist.all_reduce(error, dist.ReduceOp.MAX, group=group)
    return torch.cat(products), wanted, error.item()


# --- the ways ---


def _grouped(
    rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, counts: Sequence[int]
) -> torch.Tensor:
    """The products of each expert's rows: by torch's grouped matmul on GPUs, else one by one."""
    if rows.device.type == "cuda" and rows.dtype is torch.bfloat16:
        return torch._grouped_mm(rows, weight, offs=ends)
    out = rows.new_empty(rows.shape[0], weight.shape[2])
    for part, matrix, target in zip(
        rows.split(list(counts)), weight, out.split(list(counts)), strict=True
    ):
        torch.mm(part, matrix, out=target)
    return out


def _multiplied(given: Experts, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    gate, up = (_grouped(rows, weight, ends, given.counts) for weight in (given.gate, given.up))
    return _grouped(functional.silu(gate).mul_(up), given.down, ends, given.counts)


def _roof(p: Workload) -> Callable[[], Result]:
    assert isinstance(p, MoEWorkload)
    given: Experts = p.experts
    rows, ends = p.operands.A[given.sources], given.routing.offsets[1:]

    def call() -> Result:
        return None, _multiplied(given, rows, ends)

    return call


def _sorted_rows(
    ids: torch.Tensor, first: int, experts: int, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tokens and choices of the rows of some experts, and where each of them ends."""
    local = ids.flatten() - first
    keys = torch.where((local >= 0) & (local < experts), local, experts)
    order = keys.argsort(stable=True)[:rows]
    wanted = torch.arange(experts, device=ids.device)
    ends = torch.searchsorted(keys[order], wanted, right=True).to(torch.int32)
    return order // ids.shape[1], order % ids.shape[1], ends


def _unfused(sorts: bool) -> Callable[[Workload], Callable[[], Result]]:
    """The collectives of the group's backend around the grouped matmuls.

    Args:
        sorts: whether the rows are sorted in the call, from the gathered ids.
    """

    def prepare(p: Workload) -> Callable[[], Result]:
        assert isinstance(p, MoEWorkload)
        given, x, group = p.experts, p.operands.A_shard, p.group
        tokens, here = torch.empty_like(p.operands.A), len(given.counts)
        ids = given.topk_ids.new_empty(len(tokens), given.topk_ids.shape[1])
        weights = torch.empty_like(given.all_weights)
        out = torch.empty_like(x)
        first, rows = dist.get_rank(group) * here, given.rows
        all_gather = by_newer_name("all_gather_single", "all_gather_into_tensor")
        reduce_scatter = by_newer_name("reduce_scatter_single", "reduce_scatter_tensor")
        known = given.sources, given.routing.choices[:rows], given.routing.offsets[1:]

        def call() -> Result:
            all_gather(tokens, x, group=group)
            all_gather(weights, given.topk_weights, group=group)
            if sorts:
                all_gather(ids, given.topk_ids, group=group)
                sources, choices, ends = _sorted_rows(ids, first, here, rows)
            else:
                sources, choices, ends = known
            products = _multiplied(given, tokens[sources], ends)
            products *= weights[sources, choices, None].to(products.dtype)
            partial = torch.zeros_like(tokens).index_add_(0, sources, products)
            reduce_scatter(out, partial, group=group)
            return None, out

        return call

    return prepare


def _agmm(sorts: bool) -> Callable[[Workload], Callable[[], Result]]:
    def prepare(p: Workload) -> Callable[[], Result]:
        assert isinstance(p, MoEWorkload)
        given, x, group = p.experts, p.operands.A_shard, p.group
        weights = [given.gate, given.up]
        ranks = dist.get_world_size(group)
        sizes: dict[str, Any] = {}
        if sorts:
            sizes = {"num_experts": len(given.counts) * ranks, "capacity": given.capacity}

        def call() -> Result:
            y, routing = agmm.all_gather_grouped_matmul(
                x,
                weights,
                given.topk_ids if sorts else given.routing,
                group,
                activation="silu_mul",
                **sizes,
            )
            return None, agmm.grouped_matmul_reduce_scatter(
                y, given.down, routing, given.topk_weights, group
            )

        return call

    return prepare


def _pair(name: str, title: str, prepare: Any, **kind: bool) -> list[Way]:
    """A way, and the same in a CUDA graph."""
    eager = Way(name, title, prepare, on_cpu=True, host_time=kind.get("is_agmm", False), **kind)
    return [eager, Way(f"{name}-graph", f"{title}, graph", as_graph(prepare), **kind)]


_UNFUSED_TITLE = "all-gather, grouped matmuls, reduce-scatter"
MOE_WAYS = by_name(
    Way(ROOF, "grouped matmuls alone (roof)", _roof, on_cpu=True),
    *_pair("unfused", _UNFUSED_TITLE, _unfused(True)),
    *_pair("unfused-sorted", f"{_UNFUSED_TITLE}, rows sorted before", _unfused(False)),
    *_pair("agmm", "agmm", _agmm(True), is_agmm=True),
    *_pair("agmm-sorted", "agmm, rows sorted before", _agmm(False), is_agmm=True),
)
"""The ways of `MOE` by name. Collectives are NCCL's on GPUs and gloo's on the CPU, the matmuls
torch's grouped ones in bfloat16 on GPUs and one for each expert elsewhere."""
