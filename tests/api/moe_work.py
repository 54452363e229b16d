"""Mixtures of experts on the ranks of a group, against an unfused model in float64."""

from __future__ import annotations

import random
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from activation_work import GATED, activated
from rank_work import group_of
from torch.utils._pytree import tree_map

import agmm

moe: Any = agmm


class Case(NamedTuple):
    """A mixture of experts: sizes, routing and options. All ranks make the same from it."""

    tokens: tuple[int, ...]
    """How many each rank holds."""
    k: int
    experts: int
    """How many each rank has."""
    skew: str = "even"
    dtype: torch.dtype = torch.float32
    hidden: int = 6
    inner: int = 5
    activation: str | None = "silu_mul"
    bias: bool = True
    column_major: bool = False
    sliced: bool = False
    """Whether each rank has a slice of all experts."""
    seed: int = 0

    @property
    def all_experts(self) -> int:
        return self.experts if self.sliced else self.experts * len(self.tokens)


@cache
def ids_of(case: Case) -> torch.Tensor:
    """The experts of all ranks' tokens."""
    rng = random.Random(case.seed)
    every = range(case.all_experts)
    weights = [1.0 / (e + 1) for e in every]
    rows = []
    for _ in range(sum(case.tokens)):
        if case.skew == "one":
            row = [case.all_experts - 1] * case.k
        elif case.skew == "none":
            row = [-1] * case.k
        elif case.skew == "even":
            row = [rng.randrange(case.all_experts) for _ in range(case.k)]
        else:
            row = rng.choices(every, weights, k=case.k)
            if case.skew == "drops":
                row = [e if rng.random() < 0.6 else -1 - e for e in row]
        rows.append(row)
    return torch.tensor(rows, dtype=torch.int64).view(-1, case.k)


class Operands(NamedTuple):
    """The operands of one rank; of `whole` those of all."""

    x: torch.Tensor
    ids: torch.Tensor
    topk: torch.Tensor
    up: list[torch.Tensor]
    up_bias: list[torch.Tensor | None]
    down: torch.Tensor
    down_bias: torch.Tensor | None

    def leaves(self) -> dict[str, torch.Tensor]:
        """The operands that have gradients."""
        named = {"x": self.x, "topk": self.topk, "down": self.down, "down_bias": self.down_bias}
        named |= {f"up{i}": one for i, one in enumerate(self.up)}
        named |= {f"up_bias{i}": one for i, one in enumerate(self.up_bias)}
        return {name: one for name, one in named.items() if one is not None}


def _numbers(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def _weight(given: Case, generator: torch.Generator, *shape: int) -> torch.Tensor:
    found = _numbers(generator, given.dtype, *shape) / 4
    return found.mT.contiguous().mT if given.column_major else found


def whole_of(case: Case) -> list[Operands]:
    """The operands of each rank."""
    generator = torch.Generator().manual_seed(case.seed)
    total, ids = sum(case.tokens), ids_of(case)
    x = _numbers(generator, case.dtype, total, case.hidden)
    router = torch.float64 if case.dtype == torch.float64 else torch.float32
    topk = torch.rand((total, case.k), generator=generator, dtype=torch.float64).to(router)
    count = 2 if case.activation in GATED or case.activation is None else 1
    found, begin = [], 0
    for tokens in case.tokens:
        rows = slice(begin, begin + tokens)
        begin += tokens
        e, h, n = case.experts, case.hidden, case.inner
        up = [_weight(case, generator, e, h, n) for _ in range(count)]
        biases: list[torch.Tensor | None] = [None] * count
        down_bias = None
        if case.bias:
            biases = [_numbers(generator, case.dtype, e, n), *biases[1:]]
            down_bias = _numbers(generator, case.dtype, e, h)
        down = _weight(case, generator, e, n, h)
        given = x[rows].clone(), ids[rows].clone(), topk[rows].clone()
        found.append(Operands(*given, up, biases, down, down_bias))
    return found


@cache
def routing_of(case: Case, rank: int) -> list[tuple[int, int, int]]:
    """Expert, token and choice of each row of a rank."""
    first = 0 if case.sliced else rank * case.experts
    ids = ids_of(case).tolist()
    return sorted(
        (e - first, t, j)
        for t, row in enumerate(ids)
        for j, e in enumerate(row)
        if first <= e < first + case.experts
    )


def _by_row(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, experts: torch.Tensor
) -> torch.Tensor:
    """Each row times its expert's matrix, in float64."""
    found = torch.einsum("rk,rkn->rn", rows.double(), weight.double()[experts])
    return found if bias is None else found + bias.double()[experts]


def exact(case: Case, ranks: list[Operands]) -> tuple[list[list[torch.Tensor]], torch.Tensor]:
    """The results of the first half on each rank, and of both halves for all tokens, by the unfused
    model."""
    x = torch.cat([one.x for one in ranks])
    first = []
    for rank, given in enumerate(ranks):
        experts, tokens, _ = rows_of(case, rank)
        weights = zip(given.up, given.up_bias, strict=True)
        rows = [_by_row(x[tokens], weight, bias, experts) for weight, bias in weights]
        first.append(activated(case.activation, rows) if case.activation else rows)
    return first, exact_sums(case, ranks, [ys[0] for ys in first])


def rows_of(case: Case, rank: int) -> tuple[torch.Tensor, ...]:
    """Expert, token and choice of the rows of a rank, a tensor each."""
    return torch.tensor(routing_of(case, rank), dtype=torch.int64).view(-1, 3).unbind(1)


def exact_sums(case: Case, ranks: list[Operands], ys: list[torch.Tensor]) -> torch.Tensor:
    """The results of the second half for all tokens, of the rows of each rank."""
    topk = torch.cat([one.topk for one in ranks]).double()
    whole = torch.zeros(len(topk), case.hidden, dtype=torch.float64)
    for rank, (given, y) in enumerate(zip(ranks, ys, strict=True)):
        experts, tokens, choices = rows_of(case, rank)
        products = _by_row(y, given.down, given.down_bias, experts)
        whole = whole.index_add(0, tokens, topk[tokens, choices, None] * products)
    return whole


def placed(given: Any, device: str) -> Any:
    """Tensors and structures of them on a device."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, given)


def both_halves(
    case: Case,
    given: Operands,
    group: dist.ProcessGroup,
    *,
    strict: bool = True,
    **options: Any,
) -> tuple[list[torch.Tensor], agmm.moe.Routing, torch.Tensor | None, torch.Tensor]:
    """The results of the first half, the routing, the gathered tokens, and the result of both."""
    even = len(set(case.tokens)) == 1
    y, routing, *gathered = moe.all_gather_grouped_matmul(
        given.x,
        given.up if len(given.up) > 1 else given.up[0],
        given.ids if case.seed % 2 else given.ids.int(),
        group,
        num_experts=case.all_experts if case.sliced else None,
        tokens_per_rank=None if even and case.seed % 3 else list(case.tokens),
        bias=given.up_bias if len(given.up) > 1 else given.up_bias[0],
        activation=case.activation,
        strict=strict,
        **options,
    )
    ys = y if isinstance(y, list) else [y]
    out = moe.grouped_matmul_reduce_scatter(
        ys[0], given.down, routing, given.topk, group, bias=given.down_bias, strict=strict
    )
    return ys, routing, gathered[0] if gathered else None, out


def absolute(given: Operands) -> Operands:
    """The operands with absolute values, of which the model makes the largest sums that there can
    be: errors of rounding are as large as these, and not as what is left of them."""
    values = [one if isinstance(one, list) else [one] for one in given]
    found = [[None if t is None else t.abs() for t in some] for some in values]
    both = zip(given, found, strict=True)
    made: list[Any] = [some if isinstance(one, list) else some[0] for one, some in both]
    return Operands(*made)


def magnitudes(case: Case) -> Case:
    """The case without a function that makes numbers smaller."""
    name = case.activation
    if name in GATED:
        return case._replace(activation="silu_mul")
    return case if name in (None, "relu2") else case._replace(activation="relu")


def differs(found: torch.Tensor, wanted: torch.Tensor, largest: torch.Tensor) -> str | None:
    """What is wrong, in words.

    Args:
        largest: the sums of absolute values of which `wanted` is the sum.
    """
    if found.shape != wanted.shape:
        return f"found {tuple(found.shape)}, wanted {tuple(wanted.shape)}"
    error = (found.double() - wanted).norm().item()
    info = torch.finfo(found.dtype)
    limit = 4.0 * info.eps * largest.norm().item()
    limit += 16.0 * info.eps * info.smallest_normal * found.numel() ** 0.5  # as float16 underflows
    return None if error <= limit else f"found an error of {error:.3g}, wanted {limit:.3g}"


def forward_faults(
    world_size: int,
    cases: list[Case],
    group: dist.ProcessGroup | None = None,
    *,
    strict: bool = True,
    device: str = "cpu",
) -> list[str] | None:
    """Faults, in words, of calls without gradients."""
    group = group or group_of(world_size)
    if group is None:
        return None
    rank = group.rank()
    faults = []
    for case in cases:
        ranks = whole_of(case)
        given = placed(ranks[rank], device)
        first, whole = exact(case, ranks)
        ys, routing, _, out = placed(both_halves(case, given, group, strict=strict), "cpu")
        largest, largest_out = exact(magnitudes(case), [absolute(one) for one in ranks])
        tokens = list(case.tokens)
        found = {"out": differs(out, whole.split(tokens)[rank], largest_out.split(tokens)[rank])}
        rows = len(routing_of(case, rank))
        for i, (y, wanted) in enumerate(zip(ys, first[rank], strict=True)):
            found[f"y{i}"] = differs(y[:rows], wanted, largest[rank][i])
            if y[rows:].any():
                found["behind"] = "found numbers behind the last row, wanted zeros"
        found["routing"] = _routing_fault(case, rank, routing)
        again = placed(both_halves(case, given, group, strict=strict), "cpu")
        if not all(map(torch.equal, [*ys, out], [*again[0], again[-1]])):
            found["again"] = "found other bits in the second call"
        faults += [f"{case} rank {rank}: {n}: {fault}" for n, fault in found.items() if fault]
    return faults


def _routing_fault(case: Case, rank: int, routing: agmm.moe.Routing) -> str | None:
    wanted = routing_of(case, rank)
    rows = int(routing.offsets[-1])
    experts = torch.repeat_interleave(torch.arange(case.experts), routing.counts)
    triples = zip(
        experts.tolist(),
        routing.tokens[:rows].tolist(),
        routing.choices[:rows].tolist(),
        strict=True,
    )
    if list(triples) != wanted:
        return "found other rows"
    if routing.tokens[rows:].any() or routing.choices[rows:].any():
        return "found numbers behind the last row, wanted zeros"
    positions = torch.full((sum(case.tokens), case.k), -1, dtype=torch.int32)
    for row, (_, token, choice) in enumerate(wanted):
        positions[token, choice] = row
    if not torch.equal(routing.positions, positions):
        return "found other positions"
    return None


def random_cases(world_size: int, seed: int, count: int) -> list[Case]:
    """Cases drawn from the seed, the same on all ranks."""
    rng = random.Random(seed)
    found = []
    for i in range(count):
        even = rng.random() < 0.4
        most = rng.choice((1, 3, 9))
        tokens = [rng.randint(0, most)] * world_size
        if not even:
            tokens = [rng.randint(0, most) for _ in range(world_size)]
        found.append(
            Case(
                tuple(tokens),
                rng.choice((1, 2, 4, 8, 16)),
                rng.choice((1, 2, 3, 16)),
                rng.choice(("even", "zipf", "one", "none", "drops")),
                rng.choice((torch.bfloat16, torch.float16, torch.float32, torch.float64)),
                hidden=rng.choice((1, 3, 8, 33)),
                inner=rng.choice((1, 4, 17)),
                activation=rng.choice((None, "relu", "silu", "silu_mul", "gelu_tanh_mul")),
                bias=rng.random() < 0.5,
                column_major=rng.random() < 0.5,
                sliced=rng.random() < 0.3,
                seed=seed * 1000 + i,
            )
        )
    return found


def random_faults(world_size: int, seed: int, count: int) -> list[str] | None:
    """`forward_faults` of random cases."""
    return forward_faults(world_size, random_cases(world_size, seed, count))


def gradient_faults(
    world_size: int,
    cases: list[Case],
    options: dict[str, Any],
    group: dist.ProcessGroup | None = None,
    device: str = "cpu",
) -> list[str] | None:
    """Faults, in words, of gradients in float64, beside those of the unfused model."""
    group = group or group_of(world_size)
    if group is None:
        return None
    rank, faults = group.rank(), []
    for case in cases:
        case = case._replace(dtype=torch.float64)
        ranks = whole_of(case)
        for one in ranks:
            for leaf in one.leaves().values():
                leaf.requires_grad_()
        first, whole = exact(case, ranks)
        generator = torch.Generator().manual_seed(1)
        cot = [[_numbers(generator, torch.float64, *y.shape) for y in ys] for ys in first]
        cot_out = _numbers(generator, torch.float64, *whole.shape)
        cot_gathered = _numbers(generator, torch.float64, sum(case.tokens), case.hidden)
        loss = (whole * cot_out).sum()
        for ys, of_ys in zip(first, cot, strict=True):
            for y, of_y in zip(ys, of_ys, strict=True):
                loss = loss + (y * of_y).sum()
        if options.get("return_gathered"):
            loss = loss + world_size * (torch.cat([one.x for one in ranks]) * cot_gathered).sum()
        own = ranks[rank].leaves()
        wanted = torch.autograd.grad(loss, list(own.values()), allow_unused=True)
        given = cot[rank], cot_out.split(list(case.tokens))[rank], cot_gathered
        made = {**options, "strict": device == "cpu"}
        found = _own_gradients(case, ranks[rank], group, given, made, device)
        for name, grad, other in zip(own, found, wanted, strict=True):
            fault = _gradient_fault(own[name], grad, other)
            if fault is not None:
                faults.append(f"{case} rank {rank}: {name}: {fault}")
    return faults


def _gradient_fault(
    leaf: torch.Tensor, found: torch.Tensor | None, wanted: torch.Tensor | None
) -> str | None:
    zeros = torch.zeros_like(leaf)
    grad = zeros if found is None else found
    if not torch.allclose(grad, zeros if wanted is None else wanted, rtol=1e-10, atol=1e-12):
        return f"found {found}, wanted {wanted}"
    if grad.numel() > 1 and grad.stride() != leaf.stride():
        return f"found strides {grad.stride()}, wanted {leaf.stride()}"
    return None


def _own_gradients(
    case: Case,
    given: Operands,
    group: dist.ProcessGroup,
    gradients: tuple[list[torch.Tensor], torch.Tensor, torch.Tensor],
    options: dict[str, Any],
    device: str,
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of this rank's operands, for those of its results."""
    of_ys, of_out, of_gathered = gradients
    found = both_halves(case, placed(given, device), group, **options)
    ys, _, gathered, out = placed(found, "cpu")
    loss = (out * of_out).sum()
    for y, of_y in zip(ys, of_ys, strict=True):
        loss = loss + (y[: len(of_y)] * of_y).sum()
    if gathered is not None:
        loss = loss + (gathered * of_gathered).sum()
    return torch.autograd.grad(loss, list(given.leaves().values()), allow_unused=True)
