"""The options of the commands that have many: a dataclass for each, a field for each option."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from agmm.cli.options import (
    OPS_LISTED,
    TP_NAMES,
    ColumnsOfB,
    Device,
    DType,
    ElementType,
    File,
    LayoutOfB,
    Model,
    Op,
    ReturnA,
    Routing,
    ScalingOf,
    Shapes,
    Tokens,
    Tp,
    TunedOp,
    Where,
)
from agmm.planning.shapes import MAX_EXTENT

Options = TypeVar("Options")


def with_options_of(
    options: type[Options],
) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Makes of a function of ``options``, a dataclass, one that typer gives an option for each
    field."""
    hints = get_type_hints(options, include_extras=True)
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(options)  # type: ignore[arg-type]  # mypy knows no bound for these
    ]

    def decorate(command: Callable[[Options], None]) -> Callable[..., None]:
        def run(**given: Any) -> None:
            command(options(**given))

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = hints
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


@dataclass(frozen=True)
class BenchOptions:
    """What `agmm bench` is told."""

    shapes: Shapes = None
    file: File = None
    model: Model = None
    tokens: Tokens = None
    routing: Routing = None
    op: Annotated[
        Op | None,
        typer.Option(metavar="OP", help=f"Which call: {OPS_LISTED}. Default: all_gather_matmul."),
    ] = None
    ways: Annotated[
        str | None,
        typer.Option(help="Ways, comma-separated. Default: all there are.", metavar="WAY,..."),
    ] = None
    json_path: Annotated[
        Path | None,
        typer.Option(
            "--json",
            help="Write the report with every sample, machine, versions and commit here.",
            dir_okay=False,
        ),
    ] = None
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", help="Take this report instead of a run; needs no GPU.", dir_okay=False
        ),
    ] = None
    compare: Annotated[
        Path | None,
        typer.Option(help="Show what changed since this report.", dir_okay=False),
    ] = None
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw time over the roof and speed-up into this folder, a PNG each.",
            metavar="DIR",
            file_okay=False,
        ),
    ] = None
    timeline: Annotated[
        str | None,
        typer.Option(
            help="Instead of timing, record when chunks came or went and tiles ran: a trace for "
            "ui.perfetto.dev and a PNG per shape, in --plot or here.",
            metavar="MxNxK,...",
        ),
    ] = None
    samples: Annotated[int, typer.Option(min=1, help="Samples per way.")] = 20
    limit: Annotated[
        float,
        typer.Option(
            min=1.0,
            metavar="SECONDS",
            help="Leave out and name a way that takes longer than this.",
        ),
    ] = 120.0
    tp: Tp = None
    device: Where = Device.auto
    dtype: ElementType = None
    scaling: ScalingOf = None
    list_ways: Annotated[bool, typer.Option("--list", help="List the ways and stop.")] = False


@dataclass(frozen=True)
class TuneOptions:
    """What `agmm tune` is told."""

    m: Annotated[
        int | None,
        typer.Option(
            "--m",
            min=1,
            max=MAX_EXTENT,
            metavar="ROWS",
            help="Gathered rows (tokens) of one shape.",
        ),
    ] = None
    n: ColumnsOfB = None
    k: Annotated[
        int | None,
        typer.Option("--k", min=1, max=MAX_EXTENT, metavar="COLUMNS", help="Columns of A."),
    ] = None
    shapes: Shapes = None
    file: File = None
    model: Model = None
    tokens: Tokens = None
    op: TunedOp = None
    tp: Tp = None
    dtype: ElementType = None
    scaling: ScalingOf = None
    return_a: ReturnA = False
    b_layout: LayoutOfB = None
    device: Where = Device.auto
    again: Annotated[
        bool, typer.Option("--again", help="Measure shapes anew that were tuned before.")
    ] = False
    alone: Annotated[
        bool,
        typer.Option(
            "--alone",
            help="Measure in a minute what one GPU does by itself, for predictions of `agmm "
            "explain` on GPUs other than Hopper; takes no other options.",
        ),
    ] = False

    @property
    def is_of_a_layer(self) -> bool:
        """Whether no option says which of a layer's calls are meant, of 16 bits or more."""
        said = self.op, self.scaling, self.b_layout
        is_fp8 = self.dtype is DType.float8_e4m3fn
        return said == (None, None, None) and not (self.return_a or is_fp8)


@dataclass(frozen=True)
class ExplainOptions:
    """What `agmm explain` is told."""

    m: Annotated[
        int | None,
        typer.Option(
            "--m",
            min=1,
            max=MAX_EXTENT,
            metavar="ROWS",
            help="Rows (tokens) of all ranks; --shapes takes several numbers of them.",
        ),
    ] = None
    k: Annotated[
        int | None,
        typer.Option(
            "--k",
            min=1,
            max=MAX_EXTENT,
            metavar="COLUMNS",
            help="Columns of A, or of what a collective gathers, scatters or sums.",
        ),
    ] = None
    tp: Annotated[
        int | None, typer.Option(*TP_NAMES, min=1, metavar="N", help="Number of ranks.")
    ] = None
    file: Annotated[
        Path | None,
        typer.Option(
            help="The calls that agmm.record wrote, instead of --m, --n and --k.", dir_okay=False
        ),
    ] = None
    n: ColumnsOfB = None
    shapes: Shapes = None
    model: Model = None
    tokens: Tokens = None
    routing: Routing = None
    op: Annotated[
        Op | None,
        typer.Option(
            metavar="OP",
            help=f"Which call: {OPS_LISTED}. Default: all_gather_matmul. M counts the rows of A "
            "before they are scattered or summed.",
        ),
    ] = None
    dtype: ElementType = None
    gpu: Annotated[
        str | None,
        typer.Option(
            help="A GPU, such as h200 or 'H100 PCIe', or cpu. Default: the one here, else the H200."
        ),
    ] = None
    everything: Annotated[
        bool,
        typer.Option("--all", help="Print all alternatives; of several shapes, all of each."),
    ] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False
    scaling: ScalingOf = None
    return_a: ReturnA = False
    b_layout: LayoutOfB = None
    activation: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The activation of the product, such as silu. With silu_mul, --n counts the "
            "columns of gate, and of up.",
        ),
    ] = None
