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
from agmm.testing.reference import relative_error


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


# --- the ways ---


class Kind(NamedTuple):
    """What differs between the ways of operands in 16 bits or more and those in fp8."""

    sent: Callable[[MoEWorkload], list[torch.Tensor]]
    """What ranks send of their tokens: [tokens of this rank, ...] each."""
    gathered: Callable[[MoEWorkload], list[torch.Tensor]]
    """What ranks hold when each has sent all others its tokens."""
    multiplied: Callable[[MoEWorkload, list[torch.Tensor], torch.Tensor], torch.Tensor]
    """The grouped matmuls of rows, which lie as they are sent, with all three weights.

    Its last argument has where the rows of each expert end."""
    fused: Callable[[MoEWorkload, Any, dict[str, Any]], torch.Tensor]
    """Both calls of agmm, given ids or a routing, and settings of the first one."""
    of_expert: Callable[[MoEWorkload, int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    """The products of some tokens with an expert's weights: in float64, and rounded each time."""


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


def _multiplied(p: MoEWorkload, rows: list[torch.Tensor], ends: torch.Tensor) -> torch.Tensor:
    given: Experts = p.experts
    gate, up = (_grouped(rows[0], weight, ends, given.counts) for weight in (given.gate, given.up))
    return _grouped(functional.silu(gate).mul_(up), given.down, ends, given.counts)


def _fused(p: MoEWorkload, ids: Any, settings: dict[str, Any]) -> torch.Tensor:
    given: Experts = p.experts
    x, weights = p.operands.A_shard, [given.gate, given.up]
    y, routing = agmm.all_gather_grouped_matmul(
        x, weights, ids, p.group, activation="silu_mul", **settings
    )
    return agmm.grouped_matmul_reduce_scatter(y, given.down, routing, given.topk_weights, p.group)


def _of_expert(
    p: MoEWorkload, expert: int, sources: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    given, tokens, wide = p.experts, p.operands.A, torch.float64
    rows = tokens[sources].to(wide)
    gate, up, down = (one[expert].to(wide) for one in (given.gate, given.up, given.down))
    gate, up = rows @ gate, rows @ up
    hidden = functional.silu(gate.to(tokens.dtype)).mul_(up.to(tokens.dtype))
    return (functional.silu(gate) * up) @ down, (hidden.to(wide) @ down).to(tokens.dtype)


PLAIN = Kind(
    lambda p: [p.operands.A_shard], lambda p: [p.operands.A], _multiplied, _fused, _of_expert
)
"""Operands in 16 bits or more."""


# --- what a right result is ---


def references(problem: MoEWorkload, kind: Kind) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The results in float64 of the roof and of the others, and the error of a computation that
    rounds after each step, as separate calls do. Collective."""
    given, group = problem.experts, problem.group
    shape, wide = problem.operands.A.shape, torch.float64
    exact = torch.zeros(shape, dtype=wide, device=problem.device)
    products, rounded, begin = [], [], 0
    for expert, count in enumerate(given.counts):
        at = slice(begin, begin + count)
        begin += count
        product, usual = kind.of_expert(problem, expert, given.sources[at])
        products.append(product)
        rounded.append(usual)
    roof, usual = torch.cat(products), torch.cat(rounded)
    error_of_roof = relative_error(usual, roof)
    weights = given.row_weights[:, None]
    exact.index_add_(0, given.sources, weights.to(wide) * roof)
    dist.all_reduce(exact, group=group)
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    wanted = exact.chunk(ranks)[rank].clone()
    summed = torch.zeros_like(exact, dtype=usual.dtype)
    summed.index_add_(0, given.sources, usual.mul_(weights.to(usual.dtype)))
    partials = [torch.empty_like(summed) for _ in range(ranks)]
    dist.all_gather(partials, summed, group=group)
    found = sum((one.chunk(ranks)[rank] for one in partials[1:]), partials[0].chunk(ranks)[rank])
    worst = max(error_of_roof, relative_error(found, wanted))
    error = torch.tensor(worst, dtype=wide, device=problem.device)
    dist.all_reduce(error, dist.ReduceOp.MAX, group=group)
    return roof, wanted, error.item()


# --- all ways ---


def _roof(kind: Kind) -> Callable[[Workload], Callable[[], Result]]:
    def prepare(p: Workload) -> Callable[[], Result]:
        assert isinstance(p, MoEWorkload)
        given: Experts = p.experts
        rows, ends = [one[given.sources] for one in kind.gathered(p)], given.routing.offsets[1:]
        return lambda: (None, kind.multiplied(p, rows, ends))

    return prepare


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


def _unfused(kind: Kind, sorts: bool) -> Callable[[Workload], Callable[[], Result]]:
    """The collectives of the group's backend around the grouped matmuls.

    Args:
        sorts: whether the rows are sorted in the call, from the gathered ids.
    """

    def prepare(p: Workload) -> Callable[[], Result]:
        assert isinstance(p, MoEWorkload)
        given, group = p.experts, p.group
        sent, tokens = kind.sent(p), [torch.empty_like(one) for one in kind.gathered(p)]
        (m, columns), here = p.operands.A.shape, len(given.counts)
        ids = given.topk_ids.new_empty(m, given.topk_ids.shape[1])
        weights = torch.empty_like(given.all_weights)
        first, rows = dist.get_rank(group) * here, given.rows
        all_gather = by_newer_name("all_gather_single", "all_gather_into_tensor")
        reduce_scatter = by_newer_name("reduce_scatter_single", "reduce_scatter_tensor")
        known = given.sources, given.routing.choices[:rows], given.routing.offsets[1:]

        def call() -> Result:
            for whole, shard in zip(tokens, sent, strict=True):
                all_gather(whole, shard, group=group)
            all_gather(weights, given.topk_weights, group=group)
            if sorts:
                all_gather(ids, given.topk_ids, group=group)
                sources, choices, ends = _sorted_rows(ids, first, here, rows)
            else:
                sources, choices, ends = known
            products = kind.multiplied(p, [one[sources] for one in tokens], ends)
            products *= weights[sources, choices, None].to(products.dtype)
            partial = products.new_zeros(m, columns).index_add_(0, sources, products)
            out = products.new_empty(len(given.topk_ids), columns)
            reduce_scatter(out, partial, group=group)
            return None, out

        return call

    return prepare


def _agmm(kind: Kind, sorts: bool) -> Callable[[Workload], Callable[[], Result]]:
    def prepare(p: Workload) -> Callable[[], Result]:
        assert isinstance(p, MoEWorkload)
        given: Experts = p.experts
        settings: dict[str, Any] = {}
        if sorts:
            experts = len(given.counts) * dist.get_world_size(p.group)
            settings = {"num_experts": experts, "capacity": given.capacity}
        ids = given.topk_ids if sorts else given.routing
        return lambda: (None, kind.fused(p, ids, settings))

    return prepare


def _pair(name: str, title: str, prepare: Any, **kind: bool) -> list[Way]:
    """A way, and the same in a CUDA graph."""
    eager = Way(name, title, prepare, on_cpu=True, host_time=kind.get("is_agmm", False), **kind)
    return [eager, Way(f"{name}-graph", f"{title}, graph", as_graph(prepare), **kind)]


_UNFUSED_TITLE = "all-gather, grouped matmuls, reduce-scatter"


def ways_of_kind(kind: Kind) -> dict[str, Way]:
    """The ways by name. Collectives are NCCL's on GPUs and gloo's on the CPU."""
    return by_name(
        Way(ROOF, "grouped matmuls alone (roof)", _roof(kind), on_cpu=True),
        *_pair("unfused", _UNFUSED_TITLE, _unfused(kind, True)),
        *_pair("unfused-sorted", f"{_UNFUSED_TITLE}, rows sorted before", _unfused(kind, False)),
        *_pair("agmm", "agmm", _agmm(kind, True), is_agmm=True),
        *_pair("agmm-sorted", "agmm, rows sorted before", _agmm(kind, False), is_agmm=True),
    )


MOE_WAYS = ways_of_kind(PLAIN)
"""The ways of `MOE` by name. The matmuls of the others are torch's grouped ones in bfloat16 on GPUs
and one for each expert elsewhere."""
