"""What `agmm bench` does with its options: run or read a report, compare it, draw it, or record
timelines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from agmm import _env
from agmm.bench import (
    compare,
    figures,
    launcher,
    measure,
    moe_presets,
    options,
    plots,
    presets,
    record,
    recorded,
    reports,
    runner,
    timeline,
    timeline_picture,
    timeline_trace,
    ways,
)
from agmm.bench.exchange import of_all_ranks
from agmm.bench.figures import check_writable
from agmm.bench.options import Options
from agmm.bench.timer import SAMPLES
from agmm.cli import report_tables
from agmm.cli.options import say_left_out
from agmm.cli.terminal import console
from agmm.errors import InvalidArgument
from agmm.planning.problems import ALL_GATHER_MATMUL, COLLECTIVES, MOE, NORMED, OPS
from agmm.planning.shapes import AnyShape, MoEShape, Shape, TensorShape
from agmm.runtime.kernels import built


@dataclass(frozen=True)
class Request:
    """The options of `agmm bench`. `op` None: `ALL_GATHER_MATMUL`, or that of the report. `source`
    is a report to take instead of a run, `timeline` the shapes to record, which is done instead of
    timing."""

    shapes: presets.ShapeOptions
    ways: Sequence[str] | None = None
    device: str = "auto"
    world_size: int | None = None
    dtype: torch.dtype | None = None
    samples: int = SAMPLES
    limit_s: float = options.LIMIT_S
    json_path: Path | None = None
    source: Path | None = None
    compare: Path | None = None
    plot: Path | None = None
    timeline: str | None = None
    op: str | None = None
    scaling: str | None = None

    def check(self) -> None:
        """Raises InvalidArgument for options that do not go together."""
        named = self.shapes
        by_preset = named.model or named.file or named.tokens
        excluded: list[tuple[str, object, str, object]] = [
            ("--from", self.source, "--json", self.json_path),
            ("--from", self.source, "--file or --model", by_preset),
            ("--from", self.source, "--op", self.op),
            ("--timeline", self.timeline, "--from", self.source),
            ("--timeline", self.timeline, "--compare", self.compare),
            ("--timeline", self.timeline, "--json", self.json_path),
            ("--timeline", self.timeline, "--ways", self.ways),
            ("--timeline", self.timeline, "--scaling", self.scaling),
            ("--from", self.source, "--scaling", self.scaling),
            ("--timeline", self.timeline, "--shapes, --file or --model", named.shapes or by_preset),
        ]
        if self.op in _WITHOUT_PICTURES:
            named_op = f"--op {self.op}"
            excluded += [
                (named_op, self.op, "--timeline", self.timeline),
                (named_op, self.op, "--plot", self.plot),
            ]
            if self.op != MOE:
                excluded.append((named_op, self.op, "--scaling", self.scaling))
        for option, value, other, other_value in excluded:
            if value is not None and other_value is not None:
                raise InvalidArgument(f"{option}: found it with {other}, wanted one of the two")


_WITHOUT_PICTURES = (NORMED, MOE, *COLLECTIVES)
"""The ops that pictures and timelines have no place for."""


def list_ways(op: str | None) -> None:
    """Prints the ways of the op with their titles."""
    for way in ways.ways_of(op or ALL_GATHER_MATMUL).values():
        print(f"{way.name:26}{way.title}{'' if way.on_cpu else ' (GPUs only)'}")


class Found(NamedTuple):
    """'way at shape' for each wrong result of the report, and for each way of agmm that failed."""

    wrong: list[str]
    failed: list[str]


def run_any(request: Request) -> Found:
    """Does what `run` does, for each op and kind of operands of recorded calls one after the other.

    Raises InvalidArgument as `run` does, and where one report is wanted of several of these.
    """
    dtype = None if request.dtype is None else str(request.dtype).removeprefix("torch.")
    wanted = recorded.Wanted(request.op, dtype, request.scaling)
    calls = None if request.source else recorded.read(request.shapes, wanted)
    if calls is None:
        return run(request)
    given = launcher.world_size_or(request.world_size)
    ranks = recorded.ranks_of(calls, given)
    runs, left_out = recorded.runs(calls, ranks, each_weight=False)
    requests: dict[tuple[str, str, str | None], dict[Shape, None]] = {}
    for alike, shapes in runs.items():
        key = alike.op, alike.dtype, alike.scaling
        requests.setdefault(key, {}).update(dict.fromkeys(shapes))
    files = (request.json_path, request.compare, request.plot)
    if len(requests) > 1 and any(path is not None for path in files):
        raise InvalidArgument(
            f"file: found calls of {len(requests)} ops and kinds of operands, wanted one for "
            "--json, --compare and --plot: --op, --dtype and --scaling choose"
        )
    if launcher.is_rank_0():
        for line in left_out:
            console(stderr=True).print(line, soft_wrap=True, markup=False)
    found = Found([], [])
    for (op, name, scaling), listed in requests.items():
        one = replace(
            request,
            shapes=presets.ShapeOptions(",".join(map(str, listed))),
            op=op,
            dtype=getattr(torch, name),
            scaling=scaling,
            world_size=ranks,
        )
        wrong, failed = run(one)
        found = Found([*found.wrong, *wrong], [*found.failed, *failed])
    return found


def run(request: Request) -> Found:
    """Does what the options say.

    Under torchrun every rank calls this; rank 0 alone prints and writes.

    Raises:
        InvalidArgument: options that cannot be, or a report that cannot be read.
        PlotUnavailable: pictures are wanted and matplotlib is not installed; before any run.
    """
    request.check()
    if request.timeline is not None:
        _record(request, presets.parse_shapes(request.timeline, "--timeline"))
        return Found([], [])
    if request.plot is not None:
        figures.need_matplotlib()
        _make(request.plot)
    old = None if request.compare is None else reports.read(request.compare)
    stderr = console(stderr=True)
    if request.source is None:
        report = _measure(request, stderr)
    else:
        report, old = _read(request, request.source, old)
    if report is None:
        return Found([], [])
    _write(report, request, stderr)
    if old is not None:
        report_tables.render_comparison(compare.compare(old, report), console())
    if request.plot is not None:
        written, left_out = plots.write(report, request.plot)
        for line in (*(f"wrote {path}" for path in written), *left_out):
            stderr.print(line, soft_wrap=True, markup=False)
    failed = reports.failed_ways(report) if request.source is None else []
    return Found(reports.wrong_ways(report), failed)


def _write(report: reports.Report, request: Request, stderr: Console) -> None:
    if request.json_path is not None:
        reports.write_json(report, request.json_path)
        stderr.print(f"wrote {request.json_path}", soft_wrap=True, markup=False)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f"plot: {folder} cannot be made ({error})") from None


def _of_report(report: reports.Report, named: presets.ShapeOptions) -> list[MoEShape]:
    """The named mixtures; without a named routing, with those that the report has."""
    listed = named.read_moe()
    if named.routing is not None:
        return listed
    routings = {entry["routing"] for entry in report["shapes"]}
    return [shape for shape in listed if shape.routing in routings] or listed


def _read(
    request: Request, source: Path, old: reports.Report | None
) -> tuple[reports.Report, reports.Report | None]:
    """The report of the file and the old one, both narrowed to the shapes and ways wanted. Prints
    its tables where nothing else is to be done with it."""
    report = reports.read(source)
    op = reports.op_of(report)
    if op in _WITHOUT_PICTURES and request.plot is not None:
        raise InvalidArgument(f"--plot: found it with {source}, wanted no report of {op}")
    shapes: Sequence[AnyShape] | None = None
    if request.shapes.shapes is not None:
        if op == MOE:
            shapes = _of_report(report, request.shapes)
        elif op in COLLECTIVES:
            shapes = request.shapes.read_tensors(op)
        else:
            shapes = presets.parse_shapes(request.shapes.shapes, "--shapes")
    report = reports.narrow(report, shapes, request.ways)
    if request.compare is None and request.plot is None:
        report_tables.render(report, console())
    if old is not None:
        old = reports.narrow(old, shapes, request.ways, missing_ok=True)
    return report, old


def _measure(request: Request, stderr: Console) -> reports.Report | None:
    """Runs the benchmark and prints its tables; None on torchrun's other ranks. What is there when
    it ends early is printed and written."""
    _env.check()
    if request.json_path is not None and launcher.is_rank_0():
        check_writable(request.json_path, "--json")
    kind, ranks = launcher.choose(request.device, launcher.world_size_or(request.world_size))
    op = request.op or ALL_GATHER_MATMUL
    shapes, left_out = _shapes(request.shapes, kind, ranks, op)
    say_left_out(left_out)
    options = Options(
        device=kind,
        world_size=ranks,
        shapes=shapes,
        ways=request.ways,
        dtype=request.dtype,
        samples=request.samples,
        limit_s=request.limit_s,
        op=op,
        scaling=request.scaling,
    )

    def progress(line: str) -> None:
        if launcher.is_rank_0():
            stderr.print(line)

    begun: list[reports.Report] = []

    def keep() -> None:
        if launcher.is_rank_0() and begun and begun[0]["shapes"]:
            _write(begun[0], request, stderr)
            report_tables.render(begun[0], console())

    try:
        report = runner.run(options, progress, begun.append, keep)
    except BaseException:
        keep()
        raise
    if not launcher.is_rank_0():
        return None
    report_tables.render(report, console())
    return report


def _shapes(
    named: presets.ShapeOptions, device: str, ranks: int, op: str
) -> tuple[Sequence[AnyShape] | None, list[str]]:
    """The shapes that are named, None where none is, and a line for each that is left out."""
    if op in COLLECTIVES:
        tensors: list[TensorShape] | None = named.read_tensors(op) if named.given else None
        return (None, []) if tensors is None else presets.shared_equally(tensors, ranks, op)
    if op != MOE:
        shapes = named.read(ranks, op) if named.given else None
        return (None, []) if shapes is None else presets.shared_equally(shapes, ranks, op)
    if named.given:
        return presets.shared_equally(named.read_moe(), ranks)
    if named.routing is None:
        return None, []
    routings = moe_presets.parse_routings(named.routing)
    return moe_presets.default_shapes(device, ranks, routings), []


def _record(request: Request, shapes: Sequence[Shape]) -> None:
    """Records one call of each shape on every rank and writes its trace and its picture."""
    _env.check()
    kind, ranks = launcher.choose(request.device, launcher.world_size_or(request.world_size))
    op = request.op or ALL_GATHER_MATMUL
    if op not in OPS:
        raise InvalidArgument(f"timeline: found {op}, wanted one of {', '.join(OPS)}")
    options = Options(
        device=kind, world_size=ranks, shapes=shapes, ways=["agmm"], dtype=request.dtype, op=op
    ).resolved()
    if kind == "cuda":
        _need_timed_kernel(options)
    stderr = console(stderr=True)
    leads = launcher.is_rank_0()
    folder = Path() if request.plot is None else request.plot
    _make(folder)
    where = "GPUs" if kind == "cuda" else "CPU processes"
    one_clock = kind == "cpu"  # the timers of two GPUs are not known to be in step
    with launcher.ranks(kind, ranks) as call:
        for i, shape in enumerate(shapes, 1):
            if leads:
                stderr.print(f"[{i}/{len(shapes)}] {shape}: recording one call on {ranks} {where}")
            by_rank = call(record_all_ranks, shape, options)
            if not leads:
                continue
            title = f"{op} on {ranks} {where}, M x N x K = {shape.M} x {shape.N} x {shape.K}"
            path = folder / f"timeline-{op}-{kind}-x{ranks}-{shape}.json"
            try:
                timeline_trace.write_trace(by_rank, path, title=title, one_clock=one_clock, op=op)
                lines = [f"wrote {path}"]
                try:
                    timeline_picture.draw_ranks(
                        by_rank, path.with_suffix(".png"), title=title, one_clock=one_clock, op=op
                    )
                    lines.append(f"wrote {path.with_suffix('.png')}")
                except figures.PlotUnavailable as error:
                    lines.append(f"no picture: {error}")
            except OSError as error:
                raise InvalidArgument(f"plot: {folder} cannot be written to ({error})") from None
            for line in lines:
                stderr.print(line, soft_wrap=True, markup=False)


def _need_timed_kernel(options: Options) -> None:
    if options.dtype is not torch.bfloat16:
        raise InvalidArgument(
            f"dtype: found {options.dtype}, wanted torch.bfloat16, that of the timed kernel"
        )
    if not built(options.op, timed=True):
        raise InvalidArgument("timeline: found a build without the timed kernel, wanted one")


def record_all_ranks(shape: Shape, options: Options) -> list[list[timeline.ChunkEvent]]:
    """One call's times on every rank. Every rank of the default group calls this."""
    mine = [dict(event) for event in record.record_timeline(shape, options)]
    everyone = of_all_ranks("the times of a call", mine)
    if options.device == "cuda":
        measure.release_memory(torch.device("cuda", torch.cuda.current_device()))
    return everyone
