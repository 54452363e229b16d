"""The command `agmm`: demo, bench, tune, explain and doctor."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from agmm import _installation
from agmm.cli.command_options import (
    BenchOptions,
    ExplainOptions,
    TuneOptions,
    with_options_of,
)
from agmm.cli.options import (
    DTYPE_NAMES,
    Command,
    Device,
    DType,
    Layout,
    Op,
    Tp,
    Where,
    one_line_errors,
    say_left_out,
    say_why_cpu,
    torch_dtype,
)
from agmm.cli.terminal import console, print_table
from agmm.errors import InvalidArgument

app = typer.Typer(
    name="agmm",
    help="Fused all-gather + matmul and matmul + reduce-scatter for tensor-parallel layers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
    cls=Command,
    epilog="Examples:\n\n  agmm demo\n\n  agmm demo --device cpu --tp 2 --output overlap.png",
)
def demo(
    device: Where = Device.auto,
    tp: Tp = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where to write the picture.", dir_okay=False)
    ] = Path("agmm-demo.png"),
) -> None:
    """Run the op on a Llama-70B-shaped projection, check it, time it and draw the overlap.

    Starts its own ranks; on CPU processes M, N and K are 8 times smaller. Prints times, ratios to
    the matmul alone and errors, and draws when each chunk of A arrived and was computed.
    """
    with one_line_errors():
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
        say_why_cpu(device, tp)
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
    cls=Command,
    epilog="Examples:\n\n"
    "  agmm bench --json new.json\n\n"
    "  agmm bench --shapes 4096x3584x8192,1024x3584x8192 --ways agmm,unfused,torch-native\n\n"
    "  agmm bench --model llama-3-70b --tokens 1024..8192 --tp 4 --plot pictures\n\n"
    "  agmm bench --compare old.json\n\n"
    "  agmm bench --from new.json --compare old.json --plot pictures\n\n"
    "  agmm bench --timeline 4096x3584x8192 --plot pictures\n\n"
    "  agmm bench --device cpu --tp 2\n\n"
    "  agmm bench --op matmul_reduce_scatter --model llama-3-70b --tp 4\n\n"
    "  agmm bench --op moe --model mixtral-8x7b --tokens 2048,16384 --routing zipf --tp 2\n\n"
    "  torchrun --nproc-per-node 4 -m agmm bench --json new.json",
)
@with_options_of(BenchOptions)
def bench(options: BenchOptions) -> None:
    """Time agmm beside the matmul alone, NCCL + cuBLAS and torch's fused ops, in one run.

    Samples of all ways are interleaved; each is checked against a reference before it is timed.
    L2 is flushed, a spin hides launches, and a sample is the maximum over the ranks. Compare times
    within one run only: a warm card is slower. Starts its own ranks unless torchrun did.
    """
    with one_line_errors():
        from agmm.bench import presets
        from agmm.cli import bench_command

        op = None if options.op is None else options.op.value
        if options.list_ways:
            bench_command.list_ways(op)
            return
        request = bench_command.Request(
            presets.ShapeOptions(
                options.shapes,
                options.file,
                options.model,
                options.tokens,
                routing=options.routing,
            ),
            None if options.ways is None else presets.split(options.ways),
            device=options.device.value,
            world_size=options.tp,
            dtype=None if options.dtype is None else torch_dtype(options.dtype),
            samples=options.samples,
            limit_s=options.limit,
            json_path=options.json_path,
            source=options.source,
            compare=options.compare,
            plot=options.plot,
            timeline=options.timeline,
            op=op,
            scaling=None if options.scaling is None else options.scaling.value,
        )
        if options.source is None:
            say_why_cpu(options.device, options.tp)
        found = bench_command.run_any(request)
        if found.wrong:
            print(f"agmm: wrong results: {', '.join(found.wrong)}", file=sys.stderr)
        if found.failed:
            print(f"agmm: did not run: {', '.join(found.failed)}", file=sys.stderr)
        if found.wrong or found.failed:
            raise typer.Exit(1)


@app.command(
    cls=Command,
    epilog="Examples:\n\n"
    "  agmm tune --m 4096 --n 3584 --k 8192 --tp 4\n\n"
    "  agmm tune --model llama-3-70b --tokens 512..32768 --tp 4\n\n"
    "  agmm tune --file shapes.txt --tp 2 --device cpu\n\n"
    "  agmm tune --file calls.json\n\n"
    "  agmm tune --op matmul_reduce_scatter --model llama-3-70b --tp 4\n\n"
    "  agmm tune --op matmul_all_reduce --shapes 2048x8192x2048 --tp 4\n\n"
    "  agmm tune --alone\n\n"
    "  torchrun --nproc-per-node 4 -m agmm tune --model deepseek-v3",
)
@with_options_of(TuneOptions)
def tune(options: TuneOptions) -> None:
    """Measure the plans of each shape and keep the fastest in your table.

    Every candidate is checked against a reference before it is timed. Ctrl-C keeps the shapes that
    are done, and the same command goes on with the rest. Starts its own ranks unless torchrun did.
    """
    with one_line_errors():
        from agmm import _env
        from agmm.bench import launcher, layer_runs, presets, recorded, tuning_session
        from agmm.cli import from_file, tuning

        _env.check()
        if options.alone:
            tuning.run_alone(options)
            return
        if options.op is not None:
            tuning.check_op(options.op.value)
        op = None if options.op is None else options.op.value
        scaling = None if options.scaling is None else options.scaling.value
        one = options.m, options.n, options.k
        shapes = presets.ShapeOptions(
            options.shapes, options.file, options.model, options.tokens, one
        )
        if from_file.is_recorded(shapes):
            from_file.refuse({"--return-a": options.return_a, "--b-layout": options.b_layout})
            dtype = None if options.dtype is None else DTYPE_NAMES[options.dtype]
            wanted = recorded.Wanted(op, dtype, scaling)
            device, tp, again = options.device.value, options.tp, options.again
            if not from_file.tune(shapes, wanted, device, tp, again=again):
                raise typer.Exit(1)
            return
        kind, ranks = launcher.choose(options.device.value, launcher.world_size_or(options.tp))
        say_why_cpu(options.device, options.tp)
        if options.is_of_a_layer and options.model is not None:
            shapes.check_one()
            tokens = presets.parse_tokens(options.tokens or presets.DEFAULT_TOKENS)
            dtype = options.dtype or (DType.fp32 if kind == "cpu" else DType.bf16)
            runs = layer_runs.layer_runs(options.model, tokens, ranks, DTYPE_NAMES[dtype])
            divided, left_out = layer_runs.divided(runs, ranks)
            if not tuning.run_all(divided, left_out, kind, ranks, again=options.again):
                raise typer.Exit(1)
            return
        of_op = op or Op.all_gather_matmul.value
        listed, left_out = presets.shared_equally(shapes.read(ranks, of_op), ranks, of_op)
        say_left_out(left_out)
        session = tuning_session.TuningOptions.of(
            kind,
            ranks,
            listed,
            None if options.dtype is None else torch_dtype(options.dtype),
            return_A=options.return_a,
            row_major=options.b_layout is Layout.row,
            again=options.again,
            op=of_op,
            scaling=scaling,
        )
        if not tuning.run([tuning.Session(session)], ranks):
            raise typer.Exit(1)


@app.command(
    cls=Command,
    epilog="Examples:\n\n"
    "  agmm explain --m 4096 --n 3584 --k 8192 --tp 4\n\n"
    "  agmm explain --m 64 --n 3584 --k 8192 --tp 4 --gpu h200 --return-a\n\n"
    "  agmm explain --m 4096 --n 8192 --k 2048 --tp 4 --op matmul_reduce_scatter\n\n"
    "  agmm explain --m 64 --k 8192 --tp 8 --op all_reduce\n\n"
    "  agmm explain --op moe --model deepseek-v3 --tokens 8192 --tp 8\n\n"
    "  agmm explain --model llama-3-70b --tokens 512..8192 --tp 4\n\n"
    "  agmm explain --shapes 4096x3584x8192,64x3584x8192 --tp 4 --json | jq .[].plan\n\n"
    "  agmm explain --file calls.json",
)
@with_options_of(ExplainOptions)
def explain(options: ExplainOptions) -> None:
    """Say which plan a call gets, where it comes from, and what the others would cost.

    Needs no GPU.
    """
    with one_line_errors():
        from agmm.cli import explain_command

        explain_command.run(options)


@app.command(
    cls=Command,
    epilog="Examples:\n\n  agmm doctor\n\n  agmm doctor --report\n\n"
    "  agmm doctor --json | jq .findings",
)
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
    as_report: Annotated[
        bool,
        typer.Option("--report", help="Print plain text for an issue: no host names, no paths."),
    ] = False,
) -> None:
    """Say what is here (GPU, driver, links, torch, kernels built) and what that means for you.

    Ends with exit code 1 only where agmm cannot work as installed.
    """
    with one_line_errors(needs_agmm=False):
        from agmm.cli import doctor_command

        if not doctor_command.run(as_json=as_json, as_report=as_report):
            raise typer.Exit(1)
