"""The command `agmm`: demo, bench and doctor."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from agmm._terminal import console
from agmm.errors import InvalidArgument

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


class Device(str, Enum):
    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"


class DType(str, Enum):
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    """Turns bad input, failing ranks and Ctrl-C into one message and an exit code."""
    try:
        yield
    except KeyboardInterrupt:
        print("agmm: interrupted", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    except InvalidArgument as e:
        print(f"agmm: {e}", file=sys.stderr)
        raise typer.Exit(2) from None
    except RuntimeError as e:
        from agmm.testing.ranks import RankError

        if not isinstance(e, RankError):
            raise
        print(f"agmm: {e}", file=sys.stderr)
        raise typer.Exit(1) from None


def _version(wanted: bool) -> None:
    if wanted:
        from agmm.doctor import agmm_version

        print(f"agmm {agmm_version()}")
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
    epilog="Examples:\n\n"
    "  agmm demo\n\n"
    "  agmm demo --device cpu --world-size 2 --output overlap.png"
)
def demo(
    device: Annotated[
        Device, typer.Option(help="auto: GPUs where there are at least 2, else CPU processes.")
    ] = Device.auto,
    world_size: Annotated[
        int | None,
        typer.Option(min=1, help="Number of ranks. Default: 4, or as many as there are GPUs."),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where to write the picture.", dir_okay=False)
    ] = Path("agmm-demo.png"),
) -> None:
    """Run the op on a Llama-70B-shaped projection, check it, time it and draw the overlap.

    Starts its own ranks. Prints a table of ways with time, ratio to the matmul alone and error, and
    writes a picture of when each chunk of A arrived and when its tiles were computed.
    """
    with _one_line_errors():
        from agmm import demo as demo_module
        from agmm.benchmarking import shape_table

        stderr = console(stderr=True)
        kind, ranks = demo_module.choose(device.value, world_size)
        result = demo_module.run(kind, ranks, output, progress=stderr.print)
        stdout = console()
        machine = result.report["machine"]
        where = "GPUs" if kind == "cuda" else "processes"
        stdout.print(
            f"all_gather(A_shard) @ B on {ranks} {where} of {machine['device_name']}, "
            f"{result.report['settings']['dtype']}"
        )
        stdout.print(shape_table(result.report["shapes"][0]))
        for line in demo_module.explain(result):
            stdout.print(line, soft_wrap=True)
        if result.failure is not None:
            print(f"agmm: demo failed: {result.failure}", file=sys.stderr)
            raise typer.Exit(1)


@app.command(
    epilog="Examples:\n\n"
    "  agmm bench --json benchmarks/results/h200x4.json\n\n"
    "  agmm bench --shapes 4096x3584x8192,1024x3584x8192 --ways agmm,unfused,torch-native\n\n"
    "  agmm bench --device cpu --world-size 2\n\n"
    "  torchrun --nproc-per-node 4 benchmarks/bench.py"
)
def bench(
    shapes: Annotated[
        str | None,
        typer.Option(help="Gathered MxNxK, comma-separated; N is per rank.", metavar="MxNxK,..."),
    ] = None,
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
    samples: Annotated[int, typer.Option(min=1, help="Samples per way.")] = 20,
    world_size: Annotated[
        int | None,
        typer.Option(min=1, help="Number of ranks. Default: 4, or as many as there are GPUs."),
    ] = None,
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
    Starts its own ranks unless torchrun did.
    """
    with _one_line_errors():
        from agmm import benchmarking
        from agmm import demo as demo_module
        from agmm.testing.cases import Shape

        if list_ways:
            for way in benchmarking.WAYS.values():
                print(f"{way.name:26}{way.title}{'' if way.on_cpu else ' (GPUs only)'}")
            return
        torchrun_size = benchmarking.torchrun_world_size()
        kind, ranks = demo_module.choose(device.value, torchrun_size or world_size)
        options = benchmarking.Options(
            device=kind,
            world_size=ranks,
            shapes=None if shapes is None else [Shape.parse(s) for s in _split(shapes)],
            ways=None if ways is None else _split(ways),
            dtype=None if dtype is None else _torch_dtype(dtype),
            samples=samples,
        )
        stderr = console(stderr=True)

        def progress(line: str) -> None:
            if benchmarking.is_rank_0():
                stderr.print(line)

        report = benchmarking.run(options, progress)
        if not benchmarking.is_rank_0():
            return
        benchmarking.render(report, console())
        if json_path is not None:
            benchmarking.write_json(report, json_path)
            stderr.print(f"wrote {json_path}")
        wrong = benchmarking.wrong_ways(report)
        if wrong:
            print(f"agmm: wrong results: {', '.join(wrong)}", file=sys.stderr)
            raise typer.Exit(1)


@app.command(epilog="Examples:\n\n  agmm doctor\n\n  agmm doctor --json | jq .findings")
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Say what is here (GPU, driver, links, torch, kernels built) and what that means for you.

    Ends with exit code 1 only where agmm cannot work as installed.
    """
    with _one_line_errors():
        from agmm import doctor as doctor_module

        findings = doctor_module.diagnose()
        if as_json:
            facts = doctor_module.machine_facts()
            body: dict[str, Any] = {"machine": facts, "findings": [asdict(f) for f in findings]}
            print(json.dumps(body, indent=1))
        else:
            console().print(doctor_module.table(findings))
        if doctor_module.is_broken(findings):
            raise typer.Exit(1)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _torch_dtype(dtype: DType) -> Any:
    import torch

    return {
        DType.bf16: torch.bfloat16,
        DType.fp16: torch.float16,
        DType.fp32: torch.float32,
    }[dtype]


if __name__ == "__main__":
    app()
