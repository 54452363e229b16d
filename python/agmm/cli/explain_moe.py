"""`agmm explain --op moe`: who serves a mixture of experts, how much it moves, and what it would
take at least."""

from __future__ import annotations

from typing import NamedTuple

from agmm.bench.moe_presets import check_kind
from agmm.bench.units import duration, size
from agmm.cli.explanations import Explanation
from agmm.errors import InvalidArgument
from agmm.planning import cost_model, formats
from agmm.planning.cost_model import collectives as collective_costs
from agmm.planning.problems import CPU, MOE, Problem
from agmm.planning.shapes import MoEShape
from agmm.runtime.scaling import BY_NAME, scale_shape

_FLOAT32_BYTES = 4
"""The bytes of a partial sum, which CPU ranks send in float32."""
_BYTES_OF_A_SCALE, _FILLED_UP = _FLOAT32_BYTES, 16
"""The bytes of a scale behind a row of fp8, and those of which all scales of a row take a multiple
(`runtime.scaled_rows`)."""
_FP8 = "float8_e4m3fn"


class Operands(NamedTuple):
    """The operands of a mixture."""

    dtype: str
    scaling: str | None = None
    """The kind of the scales of fp8 operands; None for others."""

    @property
    def is_fp8(self) -> bool:
        return self.dtype == _FP8

    @property
    def product_bytes(self) -> int:
        """The bytes of a number of a product."""
        return _FLOAT32_BYTES if self.dtype == "float32" else _FLOAT32_BYTES // 2

    @property
    def sent_bytes(self) -> int:
        """The bytes of a number of a token or a weight."""
        return 1 if self.is_fp8 else self.product_bytes

    @property
    def format(self) -> str:
        """What the cost model is asked of them."""
        if not self.is_fp8:
            return self.dtype
        accumulation = "block" if self.scaling == "block" else "slow"
        return formats.fp8_name(f"{_FP8}_{_FP8}", accumulation)

    def row_bytes(self, hidden: int) -> int:
        """The bytes of a token of so many numbers, in fp8 with its scales."""
        if self.scaling is None:
            return hidden * self.sent_bytes
        _, scales = scale_shape((1, hidden), BY_NAME[self.scaling].a)
        return hidden + -(-scales * _BYTES_OF_A_SCALE // _FILLED_UP) * _FILLED_UP


def operands(dtype: str, scaling: str | None) -> Operands:
    """The operands of a dtype, in fp8 with scales of rows where no kind is given.

    Raises InvalidArgument for scales that experts do not take.
    """
    if scaling is None:
        return Operands(dtype, "rowwise" if dtype == _FP8 else None)
    if dtype != _FP8:
        raise InvalidArgument(f"scaling: found {scaling!r} with {dtype}, wanted none, or {_FP8}")
    check_kind(scaling)
    return Operands(dtype, scaling)


def explain_moe(shape: MoEShape, given: Operands, ranks: int, gpu: str) -> Explanation:
    """The explanation of both calls of a mixture.

    Raises InvalidArgument where the ranks cannot share the tokens or the experts.
    """
    dtype = given.dtype
    for name, number in (("tokens", shape.tokens), ("experts", shape.experts)):
        if number % ranks:
            raise InvalidArgument(f"{name}: found {number}, wanted a multiple of tp, {ranks}")
    asked = {"op": MOE, **shape._asdict(), "operands": dtype, "ranks": ranks, "gpu": gpu}
    if given.scaling is not None:
        asked["scaling"] = given.scaling
    kind = dtype if given.scaling is None else f"{dtype} {given.scaling}"
    here, where = shape.experts // ranks, f"{ranks} rank{'s' if ranks > 1 else ''} on {gpu}"
    call = (
        f"{shape.tokens} tokens of {shape.hidden}, {shape.k} of {shape.experts} experts of "
        f"{shape.inner} each, {shape.routing} routing, {kind}, {where}"
    )
    if gpu == CPU:
        plan, why = "agmm, through shared memory", "each expert's rows are one product"
    else:
        rows_of = "fp8 rows with their scales" if given.is_fp8 else "the rows"
        plan = (
            f"agmm brings {rows_of}, on Hopper beside the grouped matmul, and adds up the products"
        )
        why = "its kernels move what is grouped by expert where GPUs reach each other"
    rows = shape.tokens * shape.k
    spread = f"{rows // ranks} rows in the mean, {rows / shape.experts:.1f} an expert"
    notes = [
        f"{here} experts on a rank, with {spread}",
        f"without a capacity there is room for {rows} rows on each rank",
        *_bytes(shape, given, ranks, on_gpu=gpu != CPU),
    ]
    alone = None
    if gpu != CPU:
        alone = _alone_us(shape, given, ranks, gpu)
        notes += _exchange_us(shape, given, ranks, gpu)
        notes.append(f"the grouped matmuls alone: at least {duration(alone)}, spread evenly")
    return Explanation(asked, call, plan, why, alone_us=alone, notes=tuple(notes))


def _bytes(shape: MoEShape, given: Operands, ranks: int, *, on_gpu: bool) -> list[str]:
    """How much a rank gets, and how much of that its experts need."""
    if ranks == 1:
        return []
    others = shape.tokens * (ranks - 1) // ranks
    whole = others * given.row_bytes(shape.hidden)
    needed = 1 - (1 - 1 / ranks) ** shape.k
    back = size(others * shape.hidden * _FLOAT32_BYTES) + " of sums"
    if on_gpu:
        back = size(others * shape.k // ranks * shape.hidden * given.product_bytes) + " of products"
    share = f"its experts need about {needed:.0%} where choices are spread evenly"
    return [f"a rank gets {size(whole)} of tokens, of which {share}, and sends {back}"]


def _alone_us(shape: MoEShape, given: Operands, ranks: int, gpu: str) -> float:
    """The time of gate and up, and of down, as if the rows of a rank had one expert, or as long as
    it takes to read the weights of all."""
    rows = max(1, shape.tokens * shape.k // ranks)
    wide, narrow = 2 * shape.inner, shape.inner
    problems = [
        Problem(rows, n, k, gpu=gpu, format=given.format)
        for n, k in ((wide, shape.hidden), (shape.hidden, narrow))
    ]
    together = sum(cost_model.matmul_us(problem) for problem in problems)
    weights = 3 * shape.experts // ranks * shape.hidden * shape.inner * given.sent_bytes
    reading: float = weights / (cost_model.constants(gpu).memory_gb_per_s * 1e3)
    return max(together, reading)


def _exchange_us(shape: MoEShape, given: Operands, ranks: int, gpu: str) -> list[str]:
    if ranks == 1:
        return []
    tokens = shape.tokens * given.row_bytes(shape.hidden)
    sums = shape.tokens * shape.hidden * given.product_bytes
    there = collective_costs.by_library_us("all_gather", tokens, ranks, gpu)
    back = collective_costs.by_library_us("reduce_scatter", sums, ranks, gpu)
    of_sums = "bfloat16" if given.is_fp8 else given.dtype
    words = f"its reduce-scatter of sums in {of_sums} {duration(back)}"
    return [f"NCCL's all-gather of the tokens takes {duration(there)}, {words}, as predicted"]
