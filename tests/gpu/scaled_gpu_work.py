"""What the tests of the fp8 kernels run, in one process and inside the ranks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from gpu_work import (
    Faults,
    config_of,
    device,
    everyone,
    group_of,
    last_ranks,
    poison,
    poison_freed_memory,
    wait_for_the_end,
)
from scatter_gpu_work import expected

import agmm
from agmm.ops import fp8_operands, scaled_products
from agmm.planning import call_plans, formats
from agmm.planning.built_kernels import kernels_of
from agmm.planning.problems import ALL_GATHER_MATMUL
from agmm.planning.shapes import LocalShape
from agmm.runtime.scaling import BLOCK
from agmm.testing.reference import allowed_error, relative_error

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Operands(NamedTuple):
    """In the order of the ops."""

    A: torch.Tensor
    B: torch.Tensor
    scale_a: torch.Tensor
    scale_b: torch.Tensor

    def dequantised(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B in float64."""
        return _scaled(self.A, self.scale_a), _scaled(self.B, self.scale_b)

    def product(self, bias: torch.Tensor | None = None) -> torch.Tensor:
        """In float64, of the dequantised operands."""
        a, b = self.dequantised()
        out = a @ b
        return out if bias is None else out + bias.double()

    def rows(self, rows: slice) -> Operands:
        one = self.scale_a.numel() == 1
        return self._replace(A=self.A[rows], scale_a=self.scale_a if one else self.scale_a[rows])


def _scaled(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Each scale spread over its row, column or block."""
    scale = scale.double()
    for dim in range(scale.dim()):
        if scale.shape[dim] not in (1, values.shape[dim]):
            scale = scale.repeat_interleave(BLOCK, dim).narrow(dim, 0, values.shape[dim])
    return values.double() * scale


def operands(
    scaling: str, m: int, n: int, k: int, dtypes: tuple[torch.dtype, torch.dtype], seed: int
) -> Operands:
    """Operands on the current GPU; B is column-major."""
    generator = torch.Generator(device()).manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device())

    def scales(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device=device()) + 0.5

    of_k, of_n = -(-k // BLOCK), -(-n // BLOCK)
    of_a, of_b = {
        "tensorwise": ((), ()),
        "rowwise": ((m, 1), (1, n)),
        "block": ((m, of_k), (of_k, of_n)),
        "block 1x128": ((m, of_k), (of_k, n)),
    }[scaling]
    return Operands(
        numbers(m, k).to(dtypes[0]), numbers(n, k).to(dtypes[1]).t(), scales(*of_a), scales(*of_b)
    )


def whole(given: Operands, seed: int) -> Operands:
    """Others whose products are exact: small whole numbers, scales that are powers of two."""
    generator = torch.Generator(device()).manual_seed(seed)

    def drawn(like: torch.Tensor, most: int) -> torch.Tensor:
        shape = like.shape
        found = torch.randint(-most, most + 1, shape, generator=generator, device=device())
        return found.to(torch.float32)

    return Operands(
        drawn(given.A, 1).to(given.A.dtype),
        drawn(given.B.t(), 1).to(given.B.dtype).t(),
        torch.exp2(drawn(given.scale_a, 2)),
        torch.exp2(drawn(given.scale_b, 2)),
    )


def by_torch(given: Operands, fast_accum: bool, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The product by ``torch._scaled_mm``; where it has no such kernel, rounded once."""
    weights = fp8_operands.Fp8Weights(
        [given.B], [given.scale_b], [bias], [None], [torch.bfloat16], [fast_accum]
    )
    tile, (weight,) = weights.described(given.A, given.scale_a)
    A = fp8_operands.rows_of(given.A, given.scale_a, tile, 0)
    out = torch.empty(
        given.A.shape[0], given.B.shape[1], dtype=torch.bfloat16, device=given.A.device
    )
    try:
        return scaled_products.by_torch(A, weight, out)
    except (RuntimeError, ValueError):
        return given.product(bias).to(torch.bfloat16)


def _fault(
    label: str, out: torch.Tensor, given: Operands, bias: torch.Tensor | None, fast_accum: bool
) -> list[str]:
    reference = given.product(bias)
    error = relative_error(out, reference)
    allowed = allowed_error(relative_error(by_torch(given, fast_accum, bias), reference))
    return [] if error <= allowed else [f"{label}: error {error:.3g}, allowed {allowed:.3g}"]


def config_by(transport: str, scaling: str, fast_accum: bool, return_A: bool) -> str:
    """A kernel of the build for the scales, which can store A if it is returned, by a transport."""
    usual = "fast" if fast_accum else "slow"
    accumulation = {"block": "block", "block 1x128": "block_1x128"}.get(scaling, usual)
    operands = "float8_e4m3fn_float8_e4m3fn"
    built = kernels_of(ALL_GATHER_MATMUL, formats.fp8_name(operands, accumulation))
    for kernel in built:
        if kernel.can_push and not kernel.swapped and (not return_A or "column" in kernel.stores_A):
            return f"{kernel.name}/{transport}"
    raise LookupError(f"found no kernel for {scaling} among {len(built)}")


def gathered(
    world_size: int,
    shapes: list[LocalShape],
    scaling: str,
    dtypes: tuple[torch.dtype, torch.dtype],
    fast_accum: bool,
    weights: int,
    return_A: bool,
    config: str | None = None,
    transport: str | None = None,
) -> Faults:
    """Faults of `agmm.all_gather_scaled_matmul`, in words."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    if transport is not None:
        config = config_by(transport, scaling, fast_accum, return_A)
    rank = dist.get_rank(group)
    faults: list[str] = []
    op: Callable[..., Any] = agmm.all_gather_scaled_matmul
    for seed, shape in enumerate(shapes):
        label = f"{shape} {scaling} {dtypes} {fast_accum=} rank {rank}/{world_size}"
        m = world_size * shape.M_local
        everything = operands(scaling, m, shape.N, shape.K, dtypes, seed)
        rows = slice(rank * shape.M_local, (rank + 1) * shape.M_local)
        own = everything.rows(rows)
        Bs, biases = [], []
        for i in range(weights):
            other = operands(
                scaling, 1, shape.N + 16 * i, shape.K, dtypes, 1000 + 10 * seed + rank + i
            )
            Bs.append((other.B, other.scale_b))
            bias = torch.randn(shape.N + 16 * i, device=device(), dtype=torch.bfloat16)
            biases.append(bias if i == 0 else None)
        poison(group)
        for _ in range(2):  # both slots
            poison_freed_memory(m * (shape.N * 2 + shape.K) * (weights + 1))
            found = op(
                own.A.clone(),
                [B for B, _ in Bs],
                own.scale_a.clone(),
                [scale for _, scale in Bs],
                group,
                return_A=return_A,
                bias=biases,
                use_fast_accum=fast_accum,
                config=config,
                strict=True,
            )
            outs = found
            if return_A:
                A, scale_A, outs = found
                if not torch.equal(A.view(torch.uint8), everything.A.view(torch.uint8)):
                    faults.append(f"{label}: A differs")
                wanted = everything.scale_a
                if wanted.numel() == 1:
                    wanted = wanted.reshape(1, 1).expand(world_size, 1)
                if not torch.equal(scale_A.reshape(-1), wanted.reshape(-1)):
                    faults.append(f"{label}: scale_A differs")
            for (B, scale_b), addend, out in zip(Bs, biases, outs, strict=True):
                given = everything._replace(B=B, scale_b=scale_b)
                faults += _fault(label, out, given, addend, fast_accum)
    return faults


def gathered_as_tuned(world_size: int, cases: list[tuple[Any, ...]]) -> Faults:
    """Faults of calls with one weight, each of which should get the kernel of a tuned row."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    faults: list[str] = []
    for problem, config, shape, scaling, dtypes, fast_accum in cases:
        plan = call_plans.planner(group, device()).choose(problem).plan
        if plan.kernel != config:
            faults.append(f"{shape} {scaling}: found {plan.name}, wanted {config.name}")
        found = gathered(world_size, [shape], scaling, dtypes, fast_accum, 1, problem.return_A)
        faults += [f"{config.name} {fault}" for fault in found or []]
    return faults


def back_to_back(world_size: int, scaling: str, count: int, transport: str | None) -> Faults:
    """Calls whose data changes every time, in fp8 and bfloat16, eager and replayed in turn; those
    in fp8 by the transport."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    config = None if transport is None else config_by(transport, scaling, False, False)
    rank = dist.get_rank(group)
    rows = 200  # tiles are shared by two ranks
    everything = operands(scaling, world_size * rows, 272, 528, (E4M3, E4M3), 0)
    own = everything.rows(slice(rank * rows, (rank + 1) * rows))
    A, scale_a = own.A.clone(), own.scale_a.clone()
    weight = torch.randn(528, 272, device=device(), dtype=torch.bfloat16)
    op: Callable[..., Any] = agmm.all_gather_scaled_matmul
    other: Callable[..., Any] = agmm.all_gather_matmul
    push = config_of("push")

    def call() -> torch.Tensor:
        out: torch.Tensor = op(A, own.B, scale_a, own.scale_b, group, config=config, strict=True)
        return out

    wanted = call().clone()  # by the same kernel, since another one may round otherwise
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            replayed = call()
    torch.cuda.current_stream().wait_stream(stream)
    draw = random.Random(rank)
    wrong = torch.zeros((), dtype=torch.int64, device=device())
    for step in range(count):
        factor = 2.0 ** (step % 5 - 2)  # of all ranks alike: exact in the result
        torch.mul(own.scale_a, factor, out=scale_a)
        if draw.random() < 0.3:
            torch.cuda._sleep(draw.randrange(100_000))
        kind = step % 3
        if kind == 0:
            out = call()
        elif kind == 1:
            graph.replay()
            out = replayed
        else:
            other(A.view(torch.uint8).to(torch.bfloat16), weight, group, config=push, strict=True)
            out = call()
        wrong += (out != wanted * factor).sum()
    count_wrong = int(wrong)
    return [] if count_wrong == 0 else [f"rank {rank}: {count_wrong} elements differ"]


def _own(
    rank: int,
    rows: tuple[int, ...],
    n: int,
    k: int,
    scaling: str,
    dtypes: tuple[torch.dtype, torch.dtype],
    seed: int,
) -> Operands:
    """A rank's operands for a sum over the ranks; the scales are the rank's own."""
    m = torch.Size(rows).numel()
    seed = 1000 * seed + rank
    return whole(operands(scaling, m, n, k, dtypes, seed), seed)


def _sums(
    world_size: int,
    rank: int,
    every: list[Operands],
    rows: tuple[int, ...],
    scatter_dim: int,
    is_average: bool,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """What the rank gets. Small whole numbers times powers of two are exact in bfloat16."""
    products = []
    for given in every:
        a, b = (operand.to(torch.bfloat16) for operand in given.dequantised())
        products.append(([a.view(*rows, a.shape[1])], [b]))
    return expected(world_size, rank, products, scatter_dim, is_average, bias)


def scattered(
    world_size: int,
    shapes: list[LocalShape],
    scaling: str,
    dtypes: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3),
    *,
    fast_accum: bool = False,
    leading: tuple[int, ...] = (),
    scatter_dim: int = 0,
    reduce_op: str = "sum",
    bias: bool = False,
) -> Faults:
    """Faults of `agmm.scaled_matmul_reduce_scatter`, in words; a result is exact."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    rank, faults = dist.get_rank(group), []
    op: Callable[..., Any] = agmm.scaled_matmul_reduce_scatter
    for seed, shape in enumerate(shapes):
        rows = list(leading)
        rows.insert(scatter_dim, world_size * shape.M_local)
        size = tuple(rows)
        for turn in range(3):
            every = [
                _own(r, size, shape.N, shape.K, scaling, dtypes, 10 * seed + turn)
                for r in range(world_size)
            ]
            addend = torch.full((shape.N,), seed + 1, device=device(), dtype=torch.bfloat16)
            own = every[rank]
            of_a = own.scale_a if scaling == "tensorwise" else own.scale_a.view(*size, -1)
            poison_freed_memory(2 * shape.M_local * shape.N * 4)
            with mock.patch.object(scaled_products, "product", side_effect=AssertionError):
                out = op(
                    own.A.view(*size, shape.K),
                    own.B,
                    of_a,
                    own.scale_b,
                    group,
                    scatter_dim=scatter_dim,
                    reduce_op=reduce_op,
                    bias=addend if bias else None,
                    use_fast_accum=fast_accum,
                    strict=True,
                )
            wanted = _sums(
                world_size,
                rank,
                every,
                size,
                scatter_dim,
                reduce_op == "avg",
                addend if bias else None,
            )
            wrong = (out != wanted) | out.isnan()
            if out.shape != wanted.shape or wrong.any():
                faults.append(f"rank {rank}: {shape} call {turn}: {int(wrong.sum())} wrong")
    return faults


def summed(
    world_size: int, shapes: list[LocalShape], scaling: str, *, bias: bool = False
) -> Faults:
    """Faults of `agmm.scaled_matmul_all_reduce`, by a kernel that scatters and as planned, of rows
    that the ranks can share equally and of one more. All ranks have the same bits."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    rank, faults = dist.get_rank(group), []
    for seed, shape in enumerate(shapes):
        for more in (0, 1):
            rows = (world_size * shape.M_local + more,)
            every = [
                _own(r, rows, shape.N, shape.K, scaling, (E4M3, E4M3), seed)
                for r in range(world_size)
            ]
            own = every[rank]
            addend = torch.full((shape.N,), seed + 1, device=device(), dtype=torch.bfloat16)
            wanted = torch.stack([one.product() for one in every]).sum(0)
            wanted = wanted + addend if bias else wanted
            # Parts and sums are rounded on the way.
            allowed = 2**-6 * float(wanted.abs().max())
            for strict in (True, False, False):  # the last is the call that is kept
                out = agmm.scaled_matmul_all_reduce(
                    *(own.A, own.B, own.scale_a, own.scale_b, group),
                    bias=addend if bias else None,
                    strict=strict,
                )
                wrong = ~torch.isclose(out.double(), wanted, rtol=0, atol=allowed)
                label = f"rank {rank}: {shape} {more} more, strict {strict}"
                if out.shape != wanted.shape or wrong.any():
                    faults.append(f"{label}: {int(wrong.sum())} wrong")
                of_all = [torch.empty_like(out) for _ in range(world_size)]
                dist.all_gather(of_all, out, group=group)
                if strict and not all(torch.equal(one, out) for one in of_all):
                    faults.append(f"{label}: the ranks have other bits")
    return faults


def scattered_back_to_back(world_size: int, scaling: str, count: int) -> Faults:
    """Calls whose data changes every time, eager and replayed in turn; ranks are delayed."""
    group = group_of(last_ranks(world_size))
    if group is None:
        return None
    rank, rows = dist.get_rank(group), (world_size * 200,)
    every = [_own(r, rows, 528, 272, scaling, (E4M3, E4M3), 5) for r in range(world_size)]
    own, wanted = every[rank], _sums(world_size, rank, every, rows, 0, False, None)
    scale_a = own.scale_a.clone()
    op: Callable[..., Any] = agmm.scaled_matmul_reduce_scatter

    def call() -> torch.Tensor:
        out: torch.Tensor = op(own.A, own.B, scale_a, own.scale_b, group, strict=True)
        return out

    call()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            replayed = call()
    torch.cuda.current_stream().wait_stream(stream)
    draw = random.Random(rank)
    wrong = torch.zeros((), dtype=torch.int64, device=device())
    for step in range(count):
        factor = 2.0 ** (step % 5 - 2)  # of all ranks alike: exact in the result
        torch.mul(own.scale_a, factor, out=scale_a)
        if draw.random() < 0.3:
            torch.cuda._sleep(draw.randrange(100_000))
        if step % 2:
            graph.replay()
            out = replayed
        else:
            out = call()
        wrong += (out != wanted * factor).sum()  # NaN too
    count_wrong = int(wrong)
    return [] if count_wrong == 0 else [f"rank {rank}: {count_wrong} elements differ"]


def _small(group: dist.ProcessGroup, op_name: str, scaling: str) -> torch.Tensor:
    """How many elements of a small call are wrong."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    rows = (world_size * 64,)
    every = [_own(r, rows, 144, 272, scaling, (E4M3, E4M3), 7) for r in range(world_size)]
    own = every[rank]
    op: Callable[..., torch.Tensor] = getattr(agmm, op_name)
    if op_name == "scaled_matmul_reduce_scatter":
        out = op(own.A, own.B, own.scale_a, own.scale_b, group, strict=True)
        return (out != _sums(world_size, rank, every, rows, 0, False, None)).sum()
    every_A = every[0]._replace(B=own.B, scale_b=own.scale_b)
    shard = every_A.rows(slice(rank * 64, (rank + 1) * 64))
    out = op(*shard, group, use_fast_accum=False, strict=True)
    return (out != every_A.product().to(torch.bfloat16)).sum()


def one_rank_missing(op_name: str, scaling: str) -> None:
    """Rank 1 stays away from the second call."""
    group = everyone()
    _small(group, op_name, scaling)
    if dist.get_rank() != 1:
        _small(group, op_name, scaling)
    wait_for_the_end()


def one_rank_late(op_name: str, scaling: str, late_s: float) -> list[str]:
    """Faults of a call to which rank 1 comes late."""
    group = everyone()
    wrong = 0
    for turn in range(2):
        if turn == 1 and dist.get_rank() == 1:
            time.sleep(late_s)
        wrong += int(_small(group, op_name, scaling))
        dist.barrier(group, device_ids=[device().index])
    return [f"{op_name}: {wrong} wrong"] if wrong else []
