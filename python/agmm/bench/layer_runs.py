"""The calls of a model's layers with sequence parallelism, forward and backward, by the runs that
tune them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agmm.bench import presets
from agmm.bench.recorded import Run
from agmm.planning.problems import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from agmm.planning.shapes import Shape


def layer_runs(model: str, tokens: Sequence[int], ranks: int, dtype: str) -> dict[Run, list[Shape]]:
    """The four runs of a training step. The weights' gradients are no calls of agmm.

    The gradient of what a column-parallel layer gathered is scattered, that of what a row-parallel
    one scattered is gathered, and is returned too, for the weight's gradient. Both multiply by the
    weight as it lies, [outputs, inputs], which is row-major.

    Raises InvalidArgument for an unknown model, or ranks that do not divide it.
    """
    columns = presets.shapes(model, list(tokens), ranks, ALL_GATHER_MATMUL)
    rows = presets.shapes(model, list(tokens), ranks, MATMUL_REDUCE_SCATTER)
    return {
        Run(ALL_GATHER_MATMUL, dtype, None, "column", False): columns,
        Run(MATMUL_REDUCE_SCATTER, dtype, None, "row", False): [_turned(one) for one in columns],
        Run(MATMUL_REDUCE_SCATTER, dtype, None, "column", False): rows,
        Run(ALL_GATHER_MATMUL, dtype, None, "row", True): [_turned(one) for one in rows],
    }


def _turned(shape: Shape) -> Shape:
    return Shape(shape.M, shape.K, shape.N)


def divided(
    runs: Mapping[Run, Sequence[Shape]], ranks: int
) -> tuple[dict[Run, list[Shape]], list[str]]:
    """The runs with the shapes whose rows the ranks can share, and a line for each number of rows
    that they cannot; all of them where there is no such shape, whose error then says so."""
    found = {run: presets.shared_equally(list(shapes), ranks)[0] for run, shapes in runs.items()}
    rows = {shape.M for shapes in runs.values() for shape in shapes}
    kept = {shape.M for shapes in found.values() for shape in shapes}
    lines = [
        f"left out {m} rows: found no multiple of the world size, {ranks}"
        for m in sorted(rows - kept)
    ]
    return found, lines
