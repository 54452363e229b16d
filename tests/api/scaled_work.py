"""What the tests of the ops on fp8 operands run inside the ranks of a pool of five or eight."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import left_to_torch
import pytest
import rank_work
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from all_reduce_work import SumOfTheBackend
from steps_taken import noted, planned

import agmm
from agmm.errors import forget_warnings
from agmm.integrations import async_tp
from agmm.ops import (
    fp8_all_reduce,
    fp8_behind_gather,
    fp8_gather,
    fp8_scatter,
    fp8_sums,
    kept,
    portable,
    quantize,
    scaled_products,
    scatter_plan,
    small_collectives,
)
from agmm.ops.pipeline import serve
from agmm.ops.scatter import ScatterSettings
from agmm.ops.scatter_plan import AllReducePlan
from agmm.planning.plans import GATHERED
from agmm.planning.problems import KernelConfig, Problem
from agmm.planning.transport_names import parse
from agmm.runtime import collectives, cpu, scaling, workspaces
from agmm.runtime.scaled import Scaled, ScaledProducts, Weight
from agmm.testing.reference import relative_error

Result = list[str] | None

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
KINDS = ("tensorwise", "rowwise", "block", "block 1x128")
SHAPES = [(1, 16, 1), (3, 144, 7), (17, 128, 130), (5, 272, 40), (33, 16, 9)]
"""M_local, K, N"""

# The largest relative error of one rounding; for float32, what sums may add.
_ROUNDING = {
    torch.bfloat16: 2**-8,
    torch.float16: 2**-11,
    torch.float32: 2**-19,
    E4M3: 2**-4,
    E5M2: 2**-3,
}


def group_of(world_size: int) -> dist.ProcessGroup | None:
    """The group of the pool's last ranks, None in the others. Collective."""
    cpu.CpuWorkspace.poison = True
    torch.use_deterministic_algorithms(True)  # torch.empty fills with NaN
    return rank_work.group_of(world_size)


class Operands(NamedTuple):
    """The operands of all ranks, by rank, which are the same on all of them."""

    values: list[torch.Tensor]
    scales: list[torch.Tensor]

    def dequantised(self, rank: int) -> torch.Tensor:
        """In float64, by another way than the package's: each value times the scale at its index
        divided by how many values there are to a scale."""
        values, scale = self.values[rank].double(), self.scales[rank].double()
        if scale.numel() == 1:
            return values * scale.reshape(())
        rows, columns = values.shape[-2:]
        r = torch.arange(rows) // (1 if scale.shape[-2] == rows else 128)
        c = torch.arange(columns) // (1 if scale.shape[-1] == columns else 128)
        if scale.shape[-2] == 1:
            r = torch.zeros(rows, dtype=torch.long)
        if scale.shape[-1] == 1:
            c = torch.zeros(columns, dtype=torch.long)
        return values * scale[..., r[:, None], c[None, :]]


def _random(shape: Sequence[int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator)


def _scale(shape: Sequence[int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tuple(shape), generator=generator) + 0.5


def _blocks(size: int) -> int:
    return -(-size // 128)


def operands_a(
    kind: str, world_size: int, shape: Sequence[int], dtype: torch.dtype, seed: int
) -> Operands:
    """Shards [..., K] with scales."""
    columns = {"tensorwise": 0, "rowwise": 1}.get(kind, _blocks(shape[-1]))
    of_scale: tuple[int, ...] = (*shape[:-1], columns) if columns else ()
    return Operands(
        [_random(shape, 100 * seed + rank).to(dtype) for rank in range(world_size)],
        [_scale(of_scale, 1000 + 100 * seed + rank) for rank in range(world_size)],
    )


def operand_b(kind: str, k: int, n: int, dtype: torch.dtype, seed: int) -> Operands:
    """One B, column-major, with its scales."""
    of_scale: tuple[int, ...] = {
        "tensorwise": (1,),
        "rowwise": (1, n),
        "block": (_blocks(k), _blocks(n)),
        "block 1x128": (_blocks(k), n),
    }[kind]
    values = _random((n, k), 7 * seed + 1).to(dtype).t()
    return Operands([values], [_scale(of_scale, 7 * seed + 2)])


def fault(label: str, out: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> list[str]:
    if out.dtype != dtype or out.shape != wanted.shape:
        return [f"{label}: {out.dtype} {tuple(out.shape)}, wanted {dtype} {tuple(wanted.shape)}"]
    error = relative_error(out, wanted)
    allowed = _ROUNDING[dtype] + 2**-19
    return [] if error <= allowed else [f"{label}: error {error}, allowed {allowed}"]


def gathered(
    world_size: int,
    kind: str,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    dtypes: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3),
    bias: bool = False,
    weights: int | None = None,
    return_A: bool = False,
    leading: tuple[int, ...] = (),
    gather_dim: int = 0,
    result_scale: bool = False,
    row_major: bool = False,
    strict: bool = True,
    shapes: Sequence[tuple[int, int, int]] = tuple(SHAPES),
) -> Result:
    """Faults of `agmm.all_gather_scaled_matmul`, in words."""
    group = group_of(world_size)
    if group is None:
        return None
    rank = dist.get_rank(group)
    faults = []
    for seed, (m_local, k, n) in enumerate(shapes):
        label = f"{kind} {(m_local, k, n)} {out_dtype} rank {rank} of {world_size}"
        shard_shape = (m_local, *leading, k)
        a = operands_a(kind, world_size, shard_shape, dtypes[0], seed)
        count = weights or 1
        bs = [operand_b(kind, k, n + i, dtypes[1], seed + i) for i in range(count)]
        biases = [_random((n + i,), seed + i).bfloat16() if bias else None for i in range(count)]
        factor = torch.tensor([3.0]) if result_scale else None
        Bs = [b.values[0].contiguous() if row_major else b.values[0] for b in bs]
        scale_bs = [b.scales[0] for b in bs]
        shard, scale = a.values[rank].clone(), a.scales[rank].clone()
        op: Callable[..., Any] = agmm.all_gather_scaled_matmul
        found = op(
            shard,
            Bs[0] if weights is None else Bs,
            scale,
            scale_bs[0] if weights is None else scale_bs,
            group,
            gather_dim=gather_dim,
            return_A=return_A,
            bias=biases[0] if weights is None else biases,
            result_scale=factor if weights is None or factor is None else [factor] * weights,
            out_dtype=out_dtype,
            strict=strict,
        )
        shard.view(torch.uint8).fill_(0x7F)
        scale.fill_(torch.nan)
        if return_A:
            A, scale_A, found = found
            values = [one.view(torch.uint8) for one in a.values]
            if not torch.equal(A.view(torch.uint8), torch.cat(values, gather_dim)):
                faults.append(f"{label}: A differs")
            scales = [s.reshape(1, 1) if kind == "tensorwise" else s for s in a.scales]
            dim = 0 if kind == "tensorwise" else gather_dim
            if not torch.equal(scale_A, torch.cat(scales, dim)):
                faults.append(f"{label}: its scales differ")
        outs = [found] if weights is None else found
        whole = torch.cat([a.dequantised(r) for r in range(world_size)], gather_dim)
        for b, one_bias, out in zip(bs, biases, outs, strict=True):
            wanted = whole @ b.dequantised(0)
            wanted = wanted if one_bias is None else wanted + one_bias.double()
            if factor is not None:
                largest = torch.finfo(out_dtype).max
                wanted = (wanted * 3).clamp(-largest, largest)
            faults += fault(label, out, wanted, out_dtype)
            if not out.is_contiguous():
                faults.append(f"{label}: strides {out.stride()}")
    return faults


def scattered(
    world_size: int,
    kind: str,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    dtypes: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3),
    bias: bool = False,
    reduce_op: str = "sum",
    leading: tuple[int, ...] = (),
    scatter_dim: int = 0,
    result_scale: bool = False,
    strict: bool = True,
    products: int = 1,
    shapes: Sequence[tuple[int, int, int]] = tuple(SHAPES),
) -> Result:
    """Faults of `agmm.scaled_matmul_reduce_scatter`, in words. K differs from rank to rank, and
    from product to product."""
    group = group_of(world_size)
    if group is None:
        return None
    rank = dist.get_rank(group)
    faults = []
    for seed, (m_local, k, n) in enumerate(shapes):
        label = f"{kind} {(m_local, k, n)} {out_dtype} {reduce_op} rank {rank} of {world_size}"
        ks = [k + 16 * (r % 3) for r in range(world_size)]
        shape = [m_local, *leading]
        if scatter_dim == len(shape):
            n *= world_size
        else:
            shape[scatter_dim] *= world_size
        summands: list[torch.Tensor] = []
        own: list[tuple[Operands, Operands]] = []
        for r in range(world_size):
            every = [
                _product(kind, shape, ks[r] + 16 * i, n, dtypes, r + 5 * i + 10 * seed)
                for i in range(products)
            ]
            exact = [a.dequantised(0) @ b.dequantised(0) for a, b in every]
            summands.append(torch.stack(exact).sum(0))
            own = every if r == rank else own
        one_bias = _random((n,), seed).bfloat16() if bias else None
        given: list[Any] = [
            [a.values[0] for a, _ in own],
            [b.values[0] for _, b in own],
            [a.scales[0] for a, _ in own],
            [b.scales[0] for _, b in own],
        ]
        if products == 1:
            given = [one for (one,) in given]
        op: Callable[..., torch.Tensor] = agmm.scaled_matmul_reduce_scatter
        out = op(
            *given,
            group,
            scatter_dim=scatter_dim,
            reduce_op=reduce_op,
            bias=one_bias,
            result_scale=torch.tensor(3.0) if result_scale else None,
            out_dtype=out_dtype,
            strict=strict,
        )
        wanted = torch.stack(summands).sum(0)
        wanted = wanted / world_size if reduce_op == "avg" else wanted
        wanted = wanted if one_bias is None else wanted + one_bias.double()
        if result_scale:
            largest = torch.finfo(out_dtype).max
            wanted = (wanted * 3).clamp(-largest, largest)
        wanted = wanted.chunk(world_size, scatter_dim)[rank]
        # What is sent is rounded too.
        found = fault(label, out, wanted, out_dtype)
        spread = max(1.0, float(torch.stack(summands).norm() / max(float(wanted.norm()), 1e-9)))
        if found and relative_error(out, wanted) > 3 * spread * _ROUNDING[out_dtype]:
            faults += found
        if not out.is_contiguous():
            faults.append(f"{label}: strides {out.stride()}")
    return faults


def _product(
    kind: str,
    leading: Sequence[int],
    k: int,
    n: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    seed: int,
) -> tuple[Operands, Operands]:
    """A [..., K] and B [K, N] of one rank."""
    a = operands_a(kind, 1, (*leading, k), dtypes[0], seed)
    return a, operand_b(kind, k, n, dtypes[1], seed)


def summed(
    world_size: int,
    kind: str,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    dtypes: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3),
    bias: bool = False,
    leading: tuple[int, ...] = (),
    result_scale: bool = False,
    strict: bool = True,
    rows: Sequence[int] = (1, 2, 7, 131),
) -> Result:
    """Faults of `agmm.scaled_matmul_all_reduce`, in words: errors, and bits that differ between
    ranks or calls. K differs from rank to rank."""
    group = group_of(world_size)
    if group is None:
        return None
    rank, faults = dist.get_rank(group), []
    for seed, m in enumerate(rows):
        label = f"{kind} {m} rows {out_dtype} rank {rank} of {world_size}"
        n, ks = 24 + seed, [144 + 16 * (r % 3) for r in range(world_size)]
        every = [
            _product(kind, (*leading, m), k, n, dtypes, r + 10 * seed) for r, k in enumerate(ks)
        ]
        a, b = every[rank]
        one_bias = _random((n,), seed).bfloat16() if bias else None

        def call(a: Operands = a, b: Operands = b, bias: Any = one_bias) -> torch.Tensor:
            return agmm.scaled_matmul_all_reduce(
                *(a.values[0], b.values[0], a.scales[0], b.scales[0], group),
                bias=bias,
                result_scale=torch.tensor(3.0) if result_scale else None,
                out_dtype=out_dtype,
                strict=strict,
            )

        out, again = call(), call()
        summands = [a.dequantised(0) @ b.dequantised(0) for a, b in every]
        wanted = torch.stack(summands).sum(0)
        wanted = wanted if one_bias is None else wanted + one_bias.double()
        if result_scale:
            largest = torch.finfo(out_dtype).max
            wanted = (wanted * 3).clamp(-largest, largest)
        found = fault(label, out, wanted, out_dtype)
        spread = max(1.0, float(torch.stack(summands).norm() / max(float(wanted.norm()), 1e-9)))
        if found and not relative_error(out, wanted) <= 3 * spread * _ROUNDING[out_dtype]:
            faults += found
        bits = out.contiguous().view(torch.uint8)
        of_all = [torch.empty_like(bits) for _ in range(world_size)]
        dist.all_gather(of_all, bits, group=group)
        if strict and not all(torch.equal(one, bits) for one in of_all):
            faults.append(f"{label}: the ranks have other bits")
        if not torch.equal(again.view(torch.uint8), bits):
            faults.append(f"{label}: the next call has other bits")
        if not out.is_contiguous() or out._is_view():
            faults.append(f"{label}: strides {out.stride()}")
    return faults


KERNEL = KernelConfig.parse("128x128x128_1x1_pingpong")


def summed_as_on_cuda(world_size: int, kind: str, bias: bool) -> Result:
    """Faults of all-reduces as on a GPU, for whose kernel the CPU backend stands in: as planned by
    a scatter and a gather, or unfused; the first call, and the one that is kept."""
    group = group_of(world_size)
    if group is None:
        return None
    rank, faults = dist.get_rank(group), []
    called: list[str] = []

    def scatter(
        call: fp8_sums.Fp8Sum, kernel: KernelConfig, A: torch.Tensor, **_: Any
    ) -> Callable[..., torch.Tensor]:
        assert kernel == KERNEL and A.shape[0] % world_size == 0
        sizes, fast = A.shape, call.given.fast_accum

        def made(
            As: Any, Bs: Any, bias: Any, residual: Any, scale_as: Any, scale_bs: Any
        ) -> torch.Tensor:
            assert As[0].shape == sizes and As[0].is_contiguous() and residual is None
            called.append("scatter")
            of_all = As, Bs, scale_as, scale_bs, bias
            given = ScaledProducts(*of_all, None, torch.bfloat16, fast)
            made = fp8_scatter.Fp8Scatter(given, group, ScatterSettings())
            return made.by_cpu(made.words())

        return made

    def prepare_again(kind: str, *_: Any, **__: Any) -> Any:
        return SumOfTheBackend(group) if kind == "all_reduce" else None

    for rows in (1, world_size, 2 * world_size + 1):
        every = [_product(kind, (rows, 1), 144, 16, (E4M3, E4M3), r) for r in range(world_size)]
        a, b = every[rank]
        one_bias = _random((16,), 3).bfloat16() if bias else None
        exact = torch.stack([a.dequantised(0) @ b.dequantised(0) for a, b in every])
        wanted = exact.sum(0) + (0 if one_bias is None else one_bias.double())
        spread = max(1.0, float(exact.norm() / wanted.norm()))
        given = ScaledProducts(
            a.values, b.values, a.scales, b.scales, one_bias, None, torch.bfloat16, True
        )
        ways: list[tuple[str, bool]] = [("scatter", False), ("scatter", True), ("unfused", False)]
        for way, strict in ways:
            called.clear()
            plan = AllReducePlan(parse(way), None, 132, KERNEL if way == "scatter" else None)
            with (
                mock.patch.object(fp8_sums, "why_unfused", return_value=None),
                mock.patch.object(fp8_sums.Fp8Sum, "of_scatter", return_value=PROBLEM),
                mock.patch.object(fp8_sums.Fp8Sum, "ready_scatter", scatter),
                mock.patch.object(scatter_plan, "all_reduce_plan_of", return_value=plan) as asked,
                mock.patch.object(small_collectives, "why_not", return_value=None),
                mock.patch.object(small_collectives, "gather", gathered_by_the_backend),
                mock.patch.object(small_collectives, "prepare_again", prepare_again),
            ):
                call = fp8_all_reduce.Fp8AllReduce(given, group, strict)
                call.device = torch.device("cuda", 0)
                kept.kept_calls.pop(group, None)
                out = serve(call, "kind")
                found = called.copy()
                again = kept.call_kept(group, "kind", *call.operands())
            label = f"rank {rank}: {rows} rows, planned {way}, strict {strict}"
            if found != (["scatter"] if way == "scatter" else []):
                faults.append(f"{label}: {found}")
            if asked.call_args.args[0].op != "matmul_all_reduce":
                faults.append(f"{label}: asked {asked.call_args}")
            is_kept = way == "unfused" or not (strict or rows % world_size)
            if (again is not None) != is_kept:
                faults.append(f"{label}: kept {again is not None}")
            for one in (out,) if again is None else (out, again):
                if one.shape != wanted.shape or one._is_view():
                    faults.append(f"{label}: {one.shape}")
                elif not relative_error(one, wanted) <= 4 * spread * 2**-8:
                    faults.append(f"{label}: error {relative_error(one, wanted)}")
    return faults


PROBLEM = Problem(8, 16, 144, op="matmul_reduce_scatter")


def gathered_by_the_backend(shard: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return collectives.start_all_gather(shard, group.group_name, 0)()


class ByTheLibrary(NamedTuple):
    """Stands in for `ReadyMatmul` where no kernel runs."""

    A: Scaled
    weight: Weight
    config: Any = None

    def __call__(
        self,
        A: torch.Tensor,
        B: torch.Tensor,
        signals: None,
        *,
        bias: torch.Tensor | None,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
    ) -> torch.Tensor:
        scale_b = scale_b.reshape(self.weight.B.scale.shape)
        scaled = Scaled(B, scale_b, self.weight.B.tile)
        weight = self.weight._replace(B=scaled, bias=bias)
        return scaled_products.product(Scaled(A, scale_a, self.A.tile), weight)


def several_as_on_cuda(world_size: int) -> Result:
    """Two products of a call as on a GPU that has the kernels: the library multiplies them, with
    one warning, and ``strict`` refuses that by name."""
    group = group_of(world_size)
    if group is None:
        return None
    shape = (2 * world_size,)
    every = [_product("rowwise", shape, 32 * (i + 1), 16, (E4M3, E4M3), i) for i in range(2)]
    bias = _random((16,), 1).bfloat16()
    given = ScaledProducts(
        [a.values[0] for a, _ in every],
        [b.values[0] for _, b in every],
        [a.scales[0] for a, _ in every],
        [b.scales[0] for _, b in every],
        *(bias, None, torch.bfloat16, False),
    )

    def call(*, strict: bool) -> torch.Tensor:
        made = fp8_scatter.Fp8Scatter(given, group, ScatterSettings(strict=strict))
        made.device = torch.device("cuda", 0)
        return serve(made)

    reason, faults = "A: found 2 products, wanted at most 1 of fp8 in one kernel", []
    forget_warnings()
    with (
        mock.patch.object(fp8_sums, "why_unfused", return_value=None),
        mock.patch.object(portable, "instead", return_value=None),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        outs = [call(strict=False) for _ in range(2)]
        try:
            call(strict=True)
            faults.append("strict: nothing raised")
        except agmm.Unsupported as error:
            if reason not in str(error):
                faults.append(f"strict: {error}")
    if len(caught) != 1 or f"takes the unfused path: {reason}" not in str(caught[0].message):
        faults.append(f"{[str(warning.message) for warning in caught]}")
    exact = [a.dequantised(0) @ b.dequantised(0) for a, b in every]
    wanted = world_size * torch.stack(exact).sum(0) + bias.double()
    for out in outs:
        error_here = relative_error(out, wanted.chunk(world_size)[dist.get_rank(group)])
        if not error_here < 2**-6:
            faults.append(f"error {error_here}")
    return faults


def gathered_as_planned(world_size: int, kind: str) -> Result:
    """Calls whose plan is agmm's gather, which the backend's stands in for, as the library does for
    agmm's matmul: the first call of each kind, and the one that is kept. Values and scales are
    gathered by one call."""
    group = group_of(world_size)
    if group is None:
        return None
    cases: list[tuple[dict[str, Any], bool]] = [
        ({"bias": True}, True),
        ({"return_A": True, "weights": 2}, True),
        ({"leading": (2,), "return_A": True}, True),
        ({"gather_dim": -2, "leading": (2, 3), "return_A": True}, False),
    ]
    faults = []

    def gather(shard: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = gathered_by_the_backend(shard.view(torch.uint8), group).view(shard.dtype)
        return values, gathered_by_the_backend(second, group)

    gathers = mock.Mock(side_effect=gather)
    with (
        planned(GATHERED),
        mock.patch.object(fp8_gather.Fp8Gather, "why_not_gathered", return_value=None),
        mock.patch.object(small_collectives, "prepare_gather_of_two", return_value=gathers),
        mock.patch.object(fp8_behind_gather, "ready_matmul_of", ByTheLibrary),
        noted(fp8_gather.Fp8Gather, "route") as routes,
    ):
        for case, is_kept in cases:
            kept.kept_calls.pop(group, None)
            for turn in range(2):
                gathers.reset_mock()
                routes.reset_mock()
                faults += gathered(world_size, kind, strict=False, **case) or []
                counts = gathers.call_count, routes.call_count
                of_routes = 0 if is_kept and turn else len(SHAPES)
                if counts != (len(SHAPES), of_routes):
                    faults.append(f"{case}, turn {turn}: {counts} gathers and routes")
    return faults


def delayed(world_size: int, kind: str) -> Result:
    """Chunks and their scales that come late and in any order, several to a shard, in slots that
    are NaN before: what is multiplied has to have come with its scales."""
    group = group_of(world_size)
    if group is None:
        return None
    rank = dist.get_rank(group)
    faults = []
    workspace = workspaces.cpu_workspace(group)
    workspace.set_push_delay_us(3000)
    plan = mock.Mock(chunks_per_shard=3)
    try:
        with planned(plan):
            for step in range(6):
                time.sleep(random.Random(7 * step + rank).random() / 100)
                found = gathered(
                    world_size, kind, return_A=True, bias=True, shapes=[(5, 144, 9), (2, 16, 3)]
                )
                faults += found or []
    finally:
        workspace.set_push_delay_us(0)
    return faults


def repeated(world_size: int) -> Result:
    """One call has the same bits every time."""
    group = group_of(world_size)
    if group is None:
        return None
    rank = dist.get_rank(group)
    a = operands_a("block", world_size, (world_size * 4, 256), E4M3, 1)
    b = operand_b("block", 256, 24, E4M3, rank)
    arguments = a.values[rank], b.values[0], a.scales[rank], b.scales[0], group
    found = [
        (
            agmm.all_gather_scaled_matmul(*arguments, strict=True),
            agmm.scaled_matmul_reduce_scatter(*arguments, strict=True),
        )
        for _ in range(4)
    ]
    first = found[0]
    same = all(torch.equal(one, first[0]) and torch.equal(two, first[1]) for one, two in found)
    return [] if same else [f"rank {rank}: other bits"]


def compiled(world_size: int, kind: str) -> Result:
    """Both ops inside ``torch.compile`` against the same calls outside."""
    group = group_of(world_size)
    if group is None:
        return None
    rank = dist.get_rank(group)
    a = operands_a(kind, world_size, (world_size * 3, 144), E4M3, 1)
    b, c = (operand_b(kind, 144, 24, E4M3, seed) for seed in (2, 3))
    bias = _random((24,), 1)

    def function(A: Any, B: Any, C: Any, sa: Any, sb: Any, sc: Any) -> Any:
        _, scale, outs = agmm.all_gather_scaled_matmul(
            A, [B, C], sa, [sb, sc], group, return_A=True, bias=[bias, None], strict=True
        )
        summed = agmm.scaled_matmul_reduce_scatter(
            A, B, sa, sb, group, bias=bias, out_dtype=torch.float32, strict=True
        )
        both = agmm.scaled_matmul_reduce_scatter(
            [A, A], [B, C], [sa, sa], [sb, sc], group, bias=bias, strict=True
        )
        whole = agmm.scaled_matmul_all_reduce(A, B, sa, sb, group, bias=bias, strict=True)
        return scale * 2, outs[0].relu(), outs[1].relu(), summed.relu(), both.relu(), whole.relu()

    given = a.values[rank], b.values[0], c.values[0], a.scales[rank], b.scales[0], c.scales[0]
    torch.compiler.reset()
    found = torch.compile(function, fullgraph=True)(*given)
    wanted = function(*given)
    torch.compiler.reset()
    pairs = enumerate(zip(found, wanted, strict=True))
    return [f"rank {rank}: result {i} differs" for i, (x, y) in pairs if not torch.equal(x, y)]


def unfused(world_size: int, kind: str) -> Result:
    """The path of groups with no shared memory: bytes and scales by gloo."""
    group = group_of(world_size)
    if group is None:
        return None
    refusal = agmm.Unsupported("group: found ranks on 2 hosts, wanted one")
    faults = []
    with (
        mock.patch.object(fp8_gather, "cpu_workspace", side_effect=refusal),
        mock.patch.object(fp8_scatter, "cpu_workspace", side_effect=refusal),
        mock.patch.object(fp8_all_reduce, "cpu_workspace", side_effect=refusal),
    ):
        calls: list[Callable[..., Result]] = [gathered, scattered, summed]
        for call in calls:
            forget_warnings()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                faults += call(world_size, kind, strict=False, bias=True) or []
                if call is scattered:
                    faults += call(world_size, kind, strict=False, bias=True, products=2) or []
                if call is gathered:
                    faults += call(world_size, kind, strict=False, return_A=True) or []
            messages = [str(warning.message) for warning in caught]
            if (
                len(messages) != 1
                or "takes the unfused path: group: found ranks" not in messages[0]
            ):
                faults.append(f"{messages}")
    return faults


def quantised(world_size: int, kind: str) -> Result:
    """`agmm.all_gather_matmul` with operands quantised before the gather, eager and, on up to three
    ranks, compiled. The shards' magnitudes differ by 1000 from rank to rank: each has scales of its
    own."""
    group = group_of(world_size)
    if group is None:
        return None
    rank = dist.get_rank(group)
    shards = [_random((5, 144), r).mul(1000**r).bfloat16() for r in range(world_size)]
    B, bias = _random((24, 144), 9).bfloat16().t(), _random((24,), 9).bfloat16()
    op: Callable[..., Any] = agmm.all_gather_matmul
    out = op(shards[rank], B, group, quantize=kind, bias=bias, strict=True)
    faults = []
    for r, (part, shard) in enumerate(zip(out.chunk(world_size), shards, strict=True)):
        error = relative_error(part, shard.double() @ B.double() + bias.double())
        if not error < 0.05 or part.dtype != torch.bfloat16:
            faults.append(f"{kind} rank {rank}, rows of rank {r}: error {error}")
    if world_size > 3:
        return faults
    torch.compiler.reset()
    again = torch.compile(
        lambda a, b, c: op(a, b, group, quantize=kind, bias=c, strict=True).relu(), fullgraph=True
    )(shards[rank], B, bias)
    torch.compiler.reset()
    if relative_error(again, out.relu().double()) > 0.01:
        faults.append(f"{kind} rank {rank}: compiled differs")
    return faults


def quantised_by_one_scale(world_size: int) -> Result:
    """With ``reduce_amax`` the result is bit for bit the product of A quantised as one tensor,
    which of a shard whose numbers are 2000 times smaller keeps but few digits."""
    group = group_of(world_size)
    if group is None:
        return None
    rank = dist.get_rank(group)
    shards = [_random((5, 144), r).mul(2000.0**r).bfloat16() for r in range(world_size)]
    B = _random((24, 144), 9).bfloat16().t()
    op: Callable[..., Any] = agmm.all_gather_matmul

    def call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = op(a, b, group, quantize="tensorwise", reduce_amax=True, strict=True)
        return out

    tile, of_b = scaling.BY_NAME["tensorwise"][1:]
    values, scale = quantize.quantised(torch.cat(shards), tile)
    weight, scale_b = quantize.quantised(B, of_b)
    rows = len(values) // world_size
    wanted = agmm.all_gather_scaled_matmul(
        values[rank * rows : (rank + 1) * rows],
        weight,
        scale,
        scale_b,
        group,
        out_dtype=torch.bfloat16,
        strict=True,
    )
    faults = []
    if not torch.equal(call(shards[rank], B), wanted):
        faults.append(f"rank {rank}: not the product of one tensor")
    torch.compiler.reset()
    again = torch.compile(call, fullgraph=True)(shards[rank], B)
    torch.compiler.reset()
    if not torch.equal(again, wanted):
        faults.append(f"rank {rank}: compiled differs")
    return faults


# --- torch's ops, served by agmm ---


def served_gather(
    world_size: int,
    scales: str,
    gather_dim: int,
    out_dtype: torch.dtype | None = torch.bfloat16,
    result_scale: bool = False,
) -> Result:
    """Faults of torch's fused_all_gather_scaled_matmul over agmm."""
    group = group_of(world_size)
    if group is None:
        return None
    rank = dist.get_rank(group)
    kind = "tensorwise" if scales == "tensorwise" else "rowwise"
    shape = (2, 3, 144)
    a = operands_a(kind, world_size, shape, E4M3, 1)
    if kind == "tensorwise":  # torch knows one for all ranks
        a = a._replace(scales=[a.scales[0]] * world_size)
    bs = [operand_b(kind, 144, 16 * (i + 1), E4M3, i) for i in range(2)]
    bias, factor = _random((16,), 3).bfloat16(), torch.tensor(0.5)
    scale = a.scales[rank]
    if scales == "replicated":
        scale = torch.cat(a.scales, gather_dim)
    op: Callable[..., Any] = torch.ops.symm_mem.fused_all_gather_scaled_matmul
    with left_to_torch.enabled() as left:
        A, outs = op(
            a.values[rank],
            [b.values[0] for b in bs],
            scale,
            [b.scales[0] for b in bs],
            gather_dim,
            group.group_name,
            [bias, None],
            [factor if result_scale else None, None],
            [out_dtype, torch.float32],
            [False, True],
        )
    faults = list(left)
    values = torch.cat([one.view(torch.uint8) for one in a.values], gather_dim)
    if not torch.equal(A.view(torch.uint8), values):
        faults.append(f"rank {rank}: A differs")
    whole = torch.cat([a.dequantised(r) for r in range(world_size)], gather_dim)
    wanted = [whole @ b.dequantised(0) for b in bs]
    wanted[0] += bias.double()
    dtype = out_dtype or E4M3
    if result_scale and dtype == E4M3:
        wanted[0] *= 0.5
    for out, w, d in zip(outs, wanted, (dtype, torch.float32), strict=True):
        faults += fault(f"{scales} {gather_dim} rank {rank}", out, w, d)
        front = out.movedim(gather_dim, 0)
        if not front.is_contiguous():
            faults.append(f"rank {rank}: strides {out.stride()}")
    return faults


def served_scatter(world_size: int, kind: str, scatter_dim: int, reduce_op: str) -> Result:
    """Faults of torch's fused_scaled_matmul_reduce_scatter over agmm, of a 3-D A and of one that
    was made 2-D; each rank has a bias of its own, which is a part of its product."""
    group = group_of(world_size)
    if group is None:
        return None
    rank = dist.get_rank(group)
    shape = [2, 3]
    shape[scatter_dim] *= world_size
    summands, own = [], None
    for r in range(world_size):
        a = operands_a(kind, 1, (*shape, 144), E4M3, r)
        b = operand_b(kind, 144, 16, E4M3, r)
        bias = _random((16,), r).bfloat16()
        summands.append(a.dequantised(0) @ b.dequantised(0) + bias.double())
        own = (a.values[0], b.values[0], a.scales[0], b.scales[0], bias) if r == rank else own
    assert own is not None
    A, B, scale_a, scale_b, bias = own
    wanted = torch.stack(summands).sum(0)
    wanted = wanted / world_size if reduce_op == "avg" else wanted
    wanted = wanted.chunk(world_size, scatter_dim)[rank]
    op: Callable[..., Any] = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter
    faults = []
    for flat in (False, True):
        if flat:
            A = A.flatten(0, 1)
            scale_a = scale_a if kind == "tensorwise" else scale_a.flatten(0, 1)
        with left_to_torch.enabled() as left:
            out = op(
                A,
                B,
                scale_a,
                scale_b,
                reduce_op,
                scatter_dim,
                0 if flat else scatter_dim,
                group.group_name,
                [*shape, 16],
                bias,
                torch.tensor(0.5),  # which counts for results in fp8 only, as in torch
                torch.bfloat16,
                True,
            )
        faults += fault(f"{kind} {scatter_dim} {flat=} rank {rank}", out, wanted, torch.bfloat16)
        faults += left
    return faults


def _has_rowwise_on_the_cpu() -> bool:
    A = torch.zeros(16, 16).to(torch.float8_e4m3fn)
    scale = torch.ones(16, 1)
    try:
        torch._scaled_mm(A, A.t(), scale, scale.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


needs_rowwise = pytest.mark.skipif(
    not _has_rowwise_on_the_cpu(), reason="this torch's _scaled_mm has one scale on the CPU"
)


def as_torch(world_size: int, kind: str, gather_dim: int) -> Result:
    """agmm against torch's own decomposition over gloo, which knows no fp8: its gather is replaced
    by one of bytes."""
    group = group_of(world_size)
    if group is None:
        return None
    rank = dist.get_rank(group)
    a = operands_a(kind, world_size, (2, 16, 144), E4M3, 1)
    if kind == "tensorwise":
        a = a._replace(scales=[a.scales[0]] * world_size)
    b = operand_b(kind, 144, 32, E4M3, 1)
    given: tuple[Any, ...] = (
        a.values[rank],
        [b.values[0]],
        a.scales[rank],
        [b.scales[0]],
        gather_dim,
        group.group_name,
        [None],
        [None],
        [torch.bfloat16],
        [False],
    )
    with async_tp.enable():
        A, (out,) = torch.ops.symm_mem.fused_all_gather_scaled_matmul(*given)
    functional = torch.ops._c10d_functional

    class Bytes:
        wait_tensor = functional.wait_tensor

        @staticmethod
        def all_gather_into_tensor(tensor: torch.Tensor, size: int, name: str) -> torch.Tensor:
            raw = functional.all_gather_into_tensor(tensor.view(torch.uint8), size, name)
            return functional.wait_tensor(raw).view(tensor.dtype)  # type: ignore[no-any-return]

    with mock.patch.object(symm_mem.torch.ops, "_c10d_functional", Bytes):
        wanted_A, (wanted,) = symm_mem._fused_all_gather_scaled_matmul_fallback(*given)
    faults = []
    if not torch.equal(A.view(torch.uint8), wanted_A.view(torch.uint8)):
        faults.append(f"rank {rank}: A differs")
    if A.stride() != wanted_A.stride() or out.stride() != wanted.stride():
        faults.append(f"rank {rank}: strides {A.stride()} {out.stride()}, {wanted.stride()}")
    if relative_error(out, wanted.double()) > 2**-8:
        faults.append(f"rank {rank}: error {relative_error(out, wanted.double())}")
    return faults
