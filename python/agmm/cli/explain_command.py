"""What `agmm explain` prints: one call, several shapes, or the calls of a recording."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import cast

from agmm.bench.presets import ShapeOptions, shared_equally
from agmm.cli import explain, explanations, gpu_names
from agmm.cli.command_options import ExplainOptions
from agmm.cli.explain_moe import explain_moe, operands
from agmm.cli.explain_norm import explain_normed
from agmm.cli.explanations import Explanation
from agmm.cli.options import DTYPE_NAMES, DType, Layout, Op, element_bytes
from agmm.cli.terminal import console, print_table
from agmm.errors import InvalidArgument
from agmm.planning.cost_model.collectives import Kind
from agmm.planning.problems import COLLECTIVES, CPU, MATMUL_ALL_REDUCE, MOE, NORMED, Problem
from agmm.planning.shapes import Shape


def run(options: ExplainOptions) -> None:
    """Prints what the options ask for.

    Raises:
        InvalidArgument: they name no call, or one that cannot be made.
    """
    if options.file is not None:
        _run_file(options)
        return
    if options.tp is None:
        raise InvalidArgument("tp: found none, wanted --tp, the number of ranks, or --file")
    op = (options.op or Op.all_gather_matmul).value
    gpu = gpu_names.find_gpu(options.gpu)
    dtype = options.dtype or (DType.fp32 if gpu == CPU else DType.bf16)
    if op == MOE:
        found = _mixtures(options, options.tp, gpu, dtype)
    elif op in COLLECTIVES:
        found = _collectives(options, op, options.tp, gpu, dtype)
    else:
        found = _products(options, op, options.tp, gpu, dtype)
    if options.as_json:
        print(explanations.as_json([one.as_dict() for one in found]))
    elif len(found) == 1 or options.everything or op == MOE:
        for one in found:
            said = one.text(everything=options.everything)
            console().print(said, soft_wrap=True, markup=False)
    else:
        head = found[0].asked
        where = f"{head.get('operands', dtype.value)}, {head['ranks']} ranks on {head['gpu']}"
        console().print(f"{op}, {where}", soft_wrap=True, markup=False)
        print_table(console(), explanations.summary(found))


def _run_file(options: ExplainOptions) -> None:
    from agmm.cli import from_file

    assert options.file is not None
    if any(given is not None for given in (options.m, options.n, options.k)):
        raise InvalidArgument("--file: found it with --m, --n or --k, wanted one of these")
    of_call = "op", "dtype", "scaling", "return_a", "b_layout", "activation", "routing"
    of_shape = *of_call, "shapes", "model", "tokens"
    given = {f"--{name.replace('_', '-')}": getattr(options, name) for name in of_shape}
    from_file.refuse(given)
    from_file.explain(
        options.file,
        options.tp,
        options.gpu,
        as_json=options.as_json,
        everything=options.everything,
    )


def _collectives(
    options: ExplainOptions, kind: str, ranks: int, gpu: str, dtype: DType
) -> list[Explanation]:
    """The explanation of the call on each tensor."""
    for name in ("scaling", "return_a", "b_layout", "activation"):
        if getattr(options, name) not in (None, False):
            option = name.replace("_", "-")
            raise InvalidArgument(f"--{option}: found it with {kind}, wanted --m rows by --k")
    one = options.m, options.n, options.k
    shapes = ShapeOptions(options.shapes, None, options.model, options.tokens, one, options.routing)
    itemsize = element_bytes(dtype)
    found: list[Explanation] = []
    for m, k in shapes.read_tensors(kind):
        if kind == explain.NORM:
            found.append(explain.explain_norm(m, k, itemsize, ranks, gpu))
        else:
            found.append(explain.explain_collective(cast(Kind, kind), m, k, itemsize, ranks, gpu))
    return found


def _mixtures(options: ExplainOptions, ranks: int, gpu: str, dtype: DType) -> list[Explanation]:
    """The explanation of each mixture of experts, with each routing."""
    for name in ("m", "n", "k", "return_a", "b_layout", "activation"):
        if getattr(options, name) not in (None, False):
            option = name.replace("_", "-")
            raise InvalidArgument(f"--{option}: found it with moe, wanted --shapes or --model")
    named = ShapeOptions(
        options.shapes, None, options.model, options.tokens, routing=options.routing
    )
    listed = named.read_moe()
    if options.routing is None:  # of which nothing that is said depends
        listed = [shape for shape in listed if shape.routing == "even"]
    served, left_out = shared_equally(listed, ranks)
    for line in left_out:
        print(f"agmm: {line}", file=sys.stderr)
    scaling = None if options.scaling is None else options.scaling.value
    given = operands(DTYPE_NAMES[dtype], scaling)
    return [explain_moe(shape, given, ranks, gpu) for shape in served]


def _products(
    options: ExplainOptions, op: str, ranks: int, gpu: str, dtype: DType
) -> list[Explanation]:
    """The explanation of each shape. Of several shapes those are left out, and named, of which
    there is no such call."""
    one = options.m, options.n, options.k
    shapes = ShapeOptions(options.shapes, None, options.model, options.tokens, one, options.routing)
    if options.m is not None and options.k is not None and options.n is None:
        raise InvalidArgument(f"n: found none, wanted the columns of B for {op}")
    listed = shapes.read(ranks, op)
    found: list[Explanation] = []
    for shape in listed:
        try:
            found.append(_product(options, op, shape, ranks, gpu, dtype))
        except InvalidArgument as error:
            if len(listed) == 1:
                raise
            print(f"agmm: left out {shape}: {error}", file=sys.stderr)
    if not found:
        raise InvalidArgument("shapes: found none that can be explained, wanted at least one")
    return found


def _product(
    options: ExplainOptions, op: str, shape: Shape, ranks: int, gpu: str, dtype: DType
) -> Explanation:
    of_plan = MATMUL_ALL_REDUCE if op == NORMED else op
    called = Problem(*shape, op=of_plan, format=DTYPE_NAMES[dtype], world_size=ranks)
    there = replace(called, gpu=gpu, sm_count=gpu_names.HOPPERS.get(gpu, 0))
    layout = (options.b_layout or Layout.column).value
    problem = replace(there, return_A=options.return_a, b_layout=layout)
    if options.activation is not None:
        problem = explain.with_activation(problem, options.activation)
    scaling = None if options.scaling is None else options.scaling.value
    if op == NORMED:
        return explain_normed(problem)
    return explain.explain_any(problem, scaling)
