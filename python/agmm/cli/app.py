"""The command `agmm`: demo, bench, tune, explain and doctor."""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from agmm import _installation
from agmm.bench.units import duration
from agmm.cli.terminal import console, print_table
from agmm.errors import AgmmError, InvalidArgument

app = typer.Typer(
    name="agmm",
    help="Fused all-gather + matmul for tensor-parallel layers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

INTERRUPTED = 130
MAX_EXTENT = 2**31 - 1
"""That of `agmm.testing.cases`, which needs torch."""


class _Command(TyperCommand):
    """A command whose flags may be followed by true or false, as their <bool> in the help says, and
    whose paragraphs of help fill the terminal's lines."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        text = inspect.cleandoc(keywords["help"] or "")
        keywords["help"] = re.sub(r"(?<!\n)\n(?!\n)", " ", text)
        super().__init__(*args, **keywords)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _as_flags(self.params, args))


_BOOLS = {"true": True, "false": False}


def _as_flags(params: Iterable[Any], args: Iterable[str]) -> list[str]:
    """The arguments with "--flag true" and "--flag=true" as the flag, without "--flag false" and
    "--flag=false"."""
    flags = {n for param in params if getattr(param, "is_flag", False) for n in param.opts}
    found: list[str] = []
    for arg in args:
        name, has_value, value = arg.partition("=")
        if has_value and name in flags and value.lower() in _BOOLS:
            found += [name] if _BOOLS[value.lower()] else []
        elif found and found[-1] in flags and arg.lower() in _BOOLS:
            found = found if _BOOLS[arg.lower()] else found[:-1]
        else:
            found.append(arg)
    return found


class Device(str, Enum):
    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"


class DType(str, Enum):
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


_DTYPE_NAMES = {DType.bf16: "bfloat16", DType.fp16: "float16", DType.fp32: "float32"}


class Layout(str, Enum):
    column = "column"
    row = "row"


_Shapes = Annotated[
    str | None,
    typer.Option(help="Gathered MxNxK, comma-separated; N is per rank.", metavar="MxNxK,..."),
]
_File = Annotated[
    Path | None,
    typer.Option(help="Shapes, one MxNxK a line; # begins a comment.", dir_okay=False),
]
_Model = Annotated[str | None, typer.Option(help="The QKV and gate/up projections of this model.")]
_Tokens = Annotated[
    str | None,
    typer.Option(
        help="Gathered rows for --model: a..b doubles through, a,b,c lists. Default: 512..32768."
    ),
]


_TP_NAMES = ("--tp", "--world-size")
_Tp = Annotated[
    int | None,
    typer.Option(
        *_TP_NAMES,
        min=1,
        metavar="N",
        help="Number of ranks. Default: 4, or as many as there are GPUs.",
    ),
]
_ReturnA = Annotated[bool, typer.Option("--return-a", help="Calls that return A.")]


@contextlib.contextmanager
def _one_line_errors(*, needs_agmm: bool = True) -> Iterator[None]:
    """Turns bad input, failing ranks, a missing extra, Ctrl-C and warnings into lines and an exit
    code. What needs agmm ends at once where it is broken, which has been said."""
    if needs_agmm and _installation.fault() is not None:
        raise typer.Exit(1)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *rest: print(f"agmm: {message}", file=sys.stderr)
            yield
    except KeyboardInterrupt:
        print("agmm: interrupted", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    except typer.Exit:
        raise
    except InvalidArgument as e:
        print(f"agmm: {e}", file=sys.stderr)
        raise typer.Exit(2) from None
    except RuntimeError as e:
        from agmm.bench.figures import PlotUnavailable
        from agmm.testing.ranks import RankError

        if not isinstance(e, (AgmmError, RankError, PlotUnavailable)):
            raise
        print(f"agmm: {e}", file=sys.stderr)
        raise typer.Exit(1) from None


def _say_why_cpu(device: Device, tp: int | None) -> None:
    from agmm.bench import launcher

    reason = launcher.why_cpu(device.value, launcher.world_size_or(tp))
    if reason is not None and launcher.is_rank_0():
        print(f"agmm: {reason}", file=sys.stderr)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"agmm {_installation.version() or '(not installed as a package)'}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


@app.command(
    cls=_Command,
    epilog="Examples:\n\n  agmm demo\n\n  agmm demo --device cpu --tp 2 --output overlap.png",
)
def demo(
    device: Annotated[
        Device, typer.Option(help="auto: GPUs where there are at least 2, else CPU processes.")
    ] = Device.auto,
    tp: _Tp = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where to write the picture.", dir_okay=False)
    ] = Path("agmm-demo.png"),
) -> None:
    """Run the op on a Llama-70B-shaped projection, check it, time it and draw the overlap.

    Starts its own ranks. Prints a table of ways with time, ratio to the matmul alone and error, and
    writes a picture of when each chunk of A arrived and when its tiles were computed.
    """
    with _one_line_errors():
        from agmm import _env
        from agmm.bench import figures, launcher
        from agmm.cli import demo as demo_module
        from agmm.cli.report_tables import shape_table

        if launcher.torchrun_world_size() is not None:
            raise InvalidArgument(
                "demo: found torchrun around it, wanted none: it starts its ranks"
            )
        _env.check()
        figures.check_path(output, "--output")
        stderr = console(stderr=True)
        kind, ranks = launcher.choose(device.value, tp)
        _say_why_cpu(device, tp)
        result = demo_module.run(kind, ranks, output, progress=stderr.print)
        stdout = console()
        machine = result.report["machine"]
        where = "GPUs" if kind == "cuda" else "processes"
        stdout.print(
            f"all_gather(A_shard) @ B on {ranks} {where} of {machine['device_name']}, "
            f"{result.report['settings']['dtype']}"
        )
        print_table(stdout, shape_table(result.report["shapes"][0]))
        for line in demo_module.explain(result):
            stdout.print(line, soft_wrap=True, markup=False)
        if result.failure is not None:
            print(f"agmm: demo failed: {result.failure}", file=sys.stderr)
            raise typer.Exit(1)


@app.command(
    cls=_Command,
    epilog="Examples:\n\n"
    "  agmm bench --json benchmarks/results/h200x4.json\n\n"
    "  agmm bench --shapes 4096x3584x8192,1024x3584x8192 --ways agmm,unfused,torch-native\n\n"
    "  agmm bench --model llama-3-70b --tokens 1024..8192 --tp 4 --plot pictures\n\n"
    "  agmm bench --compare old.json\n\n"
    "  agmm bench --from new.json --compare old.json --plot pictures\n\n"
    "  agmm bench --timeline 4096x3584x8192 --plot pictures\n\n"
    "  agmm bench --device cpu --tp 2\n\n"
    "  torchrun --nproc-per-node 4 benchmarks/bench.py",
)
def bench(
    shapes: _Shapes = None,
    file: _File = None,
    model: _Model = None,
    tokens: _Tokens = None,
    ways: Annotated[
        str | None,
        typer.Option(help="Ways, comma-separated. Default: all there are.", metavar="WAY,..."),
    ] = None,
    json_path: Annotated[
        Path | None,
        typer.Option(
            "--json",
            help="Write the report with every sample, machine, versions and commit here.",
            dir_okay=False,
        ),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", help="Take this report instead of a run; needs no GPU.", dir_okay=False
        ),
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(help="Show what changed since this report.", dir_okay=False),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw time_over_roof.png and speedup.png into this folder.",
            metavar="DIR",
            file_okay=False,
        ),
    ] = None,
    timeline: Annotated[
        str | None,
        typer.Option(
            help="Instead of timing, record when chunks arrived and tiles ran: a trace for "
            "ui.perfetto.dev and a PNG per shape, in --plot or here.",
            metavar="MxNxK,...",
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples per way.")] = 20,
    limit: Annotated[
        float,
        typer.Option(
            min=1.0,
            metavar="SECONDS",
            help="A way that does not come back within it is left out and named.",
        ),
    ] = 120.0,
    tp: _Tp = None,
    device: Annotated[
        Device, typer.Option(help="auto: GPUs where there are at least 2, else CPU processes.")
    ] = Device.auto,
    dtype: Annotated[
        DType | None,
        typer.Option(help="Element type. Default: bf16 on GPUs, fp32 on the CPU."),
    ] = None,
    list_ways: Annotated[bool, typer.Option("--list", help="List the ways and stop.")] = False,
) -> None:
    """Time agmm beside the matmul alone, NCCL + cuBLAS and torch's fused ops, in one run.

    Samples of all ways are interleaved; each is checked against a reference before it is timed.
    L2 is flushed, a spin hides launches, and a sample is the maximum over the ranks. Compare times
    within one run only: a warm card is slower. Starts its own ranks unless torchrun did.
    """
    with _one_line_errors():
        from agmm.bench import presets
        from agmm.cli import bench_command

        if list_ways:
            bench_command.list_ways()
            return
        request = bench_command.Request(
            presets.ShapeOptions(shapes, file, model, tokens),
            None if ways is None else presets.split(ways),
            device=device.value,
            world_size=tp,
            dtype=None if dtype is None else _torch_dtype(dtype),
            samples=samples,
            limit_s=limit,
            json_path=json_path,
            source=source,
            compare=compare,
            plot=plot,
            timeline=timeline,
        )
        if source is None:
            _say_why_cpu(device, tp)
        found = bench_command.run(request)
        if found.wrong:
            print(f"agmm: wrong results: {', '.join(found.wrong)}", file=sys.stderr)
        if found.failed:
            print(f"agmm: did not run: {', '.join(found.failed)}", file=sys.stderr)
        if found.wrong or found.failed:
            raise typer.Exit(1)


@app.command(
    cls=_Command,
    epilog="Examples:\n\n"
    "  agmm tune --m 4096 --n 3584 --k 8192 --tp 4\n\n"
    "  agmm tune --model llama-3-70b --tokens 512..32768 --tp 4\n\n"
    "  agmm tune --file shapes.txt --tp 2 --device cpu\n\n"
    "  torchrun --nproc-per-node 4 -m agmm tune --model deepseek-v3",
)
def tune(
    m: Annotated[
        int | None,
        typer.Option(
            "--m",
            min=1,
            max=MAX_EXTENT,
            metavar="ROWS",
            help="Gathered rows (tokens) of one shape.",
        ),
    ] = None,
    n: Annotated[
        int | None,
        typer.Option(
            "--n", min=1, max=MAX_EXTENT, metavar="COLUMNS", help="Columns of B per rank."
        ),
    ] = None,
    k: Annotated[
        int | None,
        typer.Option("--k", min=1, max=MAX_EXTENT, metavar="COLUMNS", help="Columns of A."),
    ] = None,
    shapes: _Shapes = None,
    file: _File = None,
    model: _Model = None,
    tokens: _Tokens = None,
    tp: _Tp = None,
    dtype: Annotated[
        DType | None,
        typer.Option(help="Element type. Default: bf16 on GPUs, fp32 on the CPU."),
    ] = None,
    return_a: _ReturnA = False,
    b_layout: Annotated[
        Layout, typer.Option(help="column: a transposed [N, K] weight.")
    ] = Layout.column,
    device: Annotated[
        Device, typer.Option(help="auto: GPUs where there are at least 2, else CPU processes.")
    ] = Device.auto,
    again: Annotated[
        bool, typer.Option("--again", help="Measure shapes anew that were tuned before.")
    ] = False,
) -> None:
    """Measure the plans of each shape and keep the fastest in your table.

    Every candidate is checked against a reference before it is timed. Ctrl-C keeps the shapes that
    are done, and the same command goes on with the rest. Starts its own ranks unless torchrun did.
    """
    with _one_line_errors():
        from agmm import _env
        from agmm.bench import launcher, presets, tuner, tuning_session

        _env.check()
        kind, ranks = launcher.choose(device.value, launcher.world_size_or(tp))
        _say_why_cpu(device, tp)
        options = tuning_session.Options.of(
            kind,
            ranks,
            presets.ShapeOptions(shapes, file, model, tokens, (m, n, k)).read(ranks),
            None if dtype is None else _torch_dtype(dtype),
            return_A=return_a,
            row_major=b_layout is Layout.row,
            again=again,
        )
        outcomes: list[tuner.Outcome] = []
        keeper = tuner.Keeper(ranks)
        leads = launcher.is_rank_0()
        interrupted = False
        try:
            with _TuningBar(leads) as bar:
                for outcome in tuner.tune(options, bar):
                    outcomes.append(outcome)
                    bar.ended(outcome)
                    if leads:
                        keeper.add(outcome)
        except KeyboardInterrupt:
            interrupted = True
        if leads:
            _report_tuning(outcomes, keeper)
        if interrupted:
            if leads and outcomes:
                print("agmm: the same command goes on with the rest", file=sys.stderr)
            raise KeyboardInterrupt
        failed = any(outcome.failures or outcome.row is None for outcome in outcomes)
        if failed or keeper.unsaved:
            raise typer.Exit(1)


class _TuningBar:
    """Progress of `agmm tune` on stderr: a bar in a terminal; in a pipe or a file a line as each
    shape begins and ends, and every so often between."""

    LINE_EVERY_S = 10.0

    def __init__(self, visible: bool) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._visible = visible
        stderr = console(stderr=True)
        self._by_lines = visible and not stderr.is_terminal
        self._bar = Progress(
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=stderr,
            transient=True,
            disable=not visible or self._by_lines,
        )
        self._task = self._bar.add_task("starting the ranks", total=1.0)
        self._label = ""
        self._line_at = 0.0

    def __enter__(self) -> _TuningBar:
        self._bar.start()
        if self._by_lines:
            self.say("starting the ranks")
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def at(self, done: float, text: str) -> None:
        self._bar.update(self._task, completed=done, description=text)
        label, now = text.partition(":")[0], time.monotonic()
        if self._by_lines and (
            label != self._label or now - self._line_at >= _TuningBar.LINE_EVERY_S
        ):
            self._label, self._line_at = label, now
            self.say(f"{done:4.0%} {text}")

    def ended(self, outcome: Any) -> None:
        if self._by_lines and outcome.row is not None:
            self.say(f"     {outcome.shape}: {duration(outcome.row.us)}, {outcome.row.plan.name}")

    def say(self, line: str) -> None:
        if self._visible:
            self._bar.console.print(line, markup=False, soft_wrap=True)


def _report_tuning(outcomes: list[Any], keeper: Any) -> None:
    from agmm.cli.report_tables import tuning_table

    if outcomes:
        print_table(console(), tuning_table(outcomes))
    if keeper.path is not None:
        print(f"agmm: the plans stand in {keeper.path}", file=sys.stderr)
    failures = [(o.shape, failure) for o in outcomes for failure in o.failures]
    for shape, failure in failures:
        print(f"agmm: {shape}: {failure.plan.name}: {failure.reason}", file=sys.stderr)
    if keeper.unsaved:
        print(f"agmm: {keeper.error}; these rows were not saved:", file=sys.stderr)
        print(keeper.unsaved_text(), end="")


@app.command(
    cls=_Command,
    epilog="Examples:\n\n"
    "  agmm explain --m 4096 --n 3584 --k 8192 --tp 4\n\n"
    "  agmm explain --m 64 --n 3584 --k 8192 --tp 4 --gpu h200 --return-a",
)
def explain(
    m: Annotated[
        int,
        typer.Option("--m", min=1, max=MAX_EXTENT, metavar="ROWS", help="Gathered rows (tokens)."),
    ],
    n: Annotated[
        int,
        typer.Option(
            "--n", min=1, max=MAX_EXTENT, metavar="COLUMNS", help="Columns of B per rank."
        ),
    ],
    k: Annotated[
        int, typer.Option("--k", min=1, max=MAX_EXTENT, metavar="COLUMNS", help="Columns of A.")
    ],
    tp: Annotated[int, typer.Option(*_TP_NAMES, min=1, metavar="N", help="Number of ranks.")],
    dtype: Annotated[DType, typer.Option(help="Element type.")] = DType.bf16,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="A GPU, such as h200 or 'H100 PCIe', or cpu. Default: the one here, else the H200."
        ),
    ] = None,
    return_a: _ReturnA = False,
    b_layout: Annotated[
        Layout, typer.Option(help="column: a transposed [N, K] weight.")
    ] = Layout.column,
) -> None:
    """Say which plan a call gets, where it comes from, and what the others would cost.

    Needs no GPU.
    """
    with _one_line_errors():
        from agmm.cli import explain as explain_module
        from agmm.planning.plans import Problem

        name = explain_module.find_gpu(gpu)
        problem = Problem(m, n, k, _DTYPE_NAMES[dtype], tp, return_a, b_layout.value, name)
        problem = problem._replace(sm_count=explain_module.HOPPERS.get(name, 0))
        planner = explain_module.planner_for(name, tp)
        console().print(explain_module.explain(problem, planner), soft_wrap=True, markup=False)


@app.command(
    cls=_Command, epilog="Examples:\n\n  agmm doctor\n\n  agmm doctor --json | jq .findings"
)
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Say what is here (GPU, driver, links, torch, kernels built) and what that means for you.

    Ends with exit code 1 only where agmm cannot work as installed.
    """
    with _one_line_errors(needs_agmm=False):
        from agmm.bench.machine import machine_facts
        from agmm.cli import doctor as doctor_module

        findings = doctor_module.diagnose()
        if as_json:
            facts = machine_facts()
            body: dict[str, Any] = {"machine": facts, "findings": [asdict(f) for f in findings]}
            print(json.dumps(body, indent=1))
        else:
            print_table(console(), doctor_module.table(findings))
        if doctor_module.is_broken(findings):
            raise typer.Exit(1)


def _torch_dtype(dtype: DType) -> Any:
    import torch

    return {
        DType.bf16: torch.bfloat16,
        DType.fp16: torch.float16,
        DType.fp32: torch.float32,
    }[dtype]
