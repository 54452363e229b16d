"""The benchmark's command; the package's docstring says what it measures."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from agmm.bench.launcher import is_rank_0, ranks, torchrun_world_size
from agmm.bench.options import DEFAULT_WORLD_SIZE, Options
from agmm.bench.reports import new_report, write_json
from agmm.cli.terminal import console
from agmm.errors import InvalidArgument
from benchmarks.block.measure import SPIN_US, WARMUP, measure
from benchmarks.block.model import DEFAULTS, Sizes
from benchmarks.block.problem import Settings
from benchmarks.block.report import render, wrong_ways
from benchmarks.block.ways import WAYS, select_ways

SAMPLES = 8

COMPILE_LIMIT_S = 75.0
"""Beyond it, fewer token counts are compiled for; the largest come first."""


def run(
    settings: Settings,
    world_size: int,
    tokens: Sequence[int],
    progress: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None] = lambda report: None,
) -> dict[str, Any]:
    """Runs the benchmark and returns the report; under torchrun every rank returns it. ``keep``
    gets the report of those so far after each token count.

    Raises InvalidArgument for what cannot run.
    """
    settings.sizes.check(world_size)
    for count in tokens:
        if count < 1 or count % world_size:
            raise InvalidArgument(f"tokens: found {count}, wanted a multiple of {world_size} ranks")
    if settings.device == "cuda" and torch.cuda.device_count() < world_size:
        raise InvalidArgument(
            f"world size: found {world_size}, wanted at most {torch.cuda.device_count()}, the "
            "number of GPUs here (--device cpu needs none)"
        )
    # The ranks compile at the same time.
    threads = max(1, min(16, (os.cpu_count() or 1) // world_size))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    report = new_report(
        Options(
            device=settings.device,
            world_size=world_size,
            samples=settings.samples,
            warmup=WARMUP,
            spin_us=SPIN_US,
            dtype=settings.dtype,
        )
    )
    report["settings"] |= {
        "op": "transformer block",
        "block": asdict(settings.sizes),
        "passes": list(settings.passes),
        "save_gathered": settings.save_gathered,
        "compile_limit_s": settings.compile_left_s,
        "fp8": settings.recipe,
    }
    with ranks(settings.device, world_size) as call:
        # The largest first: no later one makes the workspaces grow.
        for i, count in enumerate(sorted(set(tokens), reverse=True), 1):
            began = time.perf_counter()
            progress(f"[{i}/{len(set(tokens))}] {count} tokens: {len(settings.ways)} ways")
            found = call(measure, count, settings)
            left = settings.compile_left_s - found["compile_s"]
            settings = replace(settings, compile_left_s=left)
            report["shapes"] = found["entries"] + report["shapes"]
            keep(report)
            progress(
                f"  {time.perf_counter() - began:.1f} s, of them {found['compile_s']:.1f} in "
                "compiled ways before their timing"
            )
    return report


class Device(str, Enum):
    cuda = "cuda"
    cpu = "cpu"


class Recipe(str, Enum):
    """Recipes without tensorwise, where torchao gathers fp8, which the plain layers do not."""

    rowwise = "rowwise"
    rowwise_with_gw_hp = "rowwise_with_gw_hp"


def _token_counts(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidArgument(f"tokens: found {text!r}, wanted counts such as 2048,4096") from None


def main(
    tokens: Annotated[
        str | None, typer.Option(help="Tokens of all ranks together, comma-separated.")
    ] = None,
    ways: Annotated[
        str | None, typer.Option(help=f"Of {', '.join(WAYS)}; comma-separated. Default: all.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples per way and pass.")] = SAMPLES,
    hidden: Annotated[int | None, typer.Option(min=1)] = None,
    ffn: Annotated[int | None, typer.Option(min=1)] = None,
    heads: Annotated[int | None, typer.Option(min=1)] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1)] = None,
    world_size: Annotated[int, typer.Option(min=1)] = DEFAULT_WORLD_SIZE,
    device: Annotated[Device, typer.Option()] = Device.cuda,
    backward: Annotated[
        bool, typer.Option(help="Also forward + backward, beside the forward alone.")
    ] = True,
    save_gathered: Annotated[
        bool,
        typer.Option(
            help="agmm's layers keep the gathered rows for the backward, as the other ways do; "
            "else they gather again and need less memory."
        ),
    ] = False,
    fp8: Annotated[
        Recipe | None,
        typer.Option(help="The recipe by which all linear layers quantise; else bf16."),
    ] = None,
    quick: Annotated[bool, typer.Option(help="Leave out the compiled ways.")] = False,
    compile_limit: Annotated[
        float,
        typer.Option(min=0, help="Seconds of compiling after which other token counts do without."),
    ] = COMPILE_LIMIT_S,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", dir_okay=False, help="Write the report with every sample here."),
    ] = None,
) -> None:
    """Time one tensor-parallel transformer block by agmm, NCCL and torch's async TP, in one run."""
    stdout, stderr = console(), console(stderr=True)
    torchrun_size = torchrun_world_size()
    default, default_tokens = DEFAULTS[device.value]

    def progress(line: str) -> None:
        if is_rank_0():
            stderr.print(line, markup=False)

    def keep(report: dict[str, Any]) -> None:
        if json_path is not None and is_rank_0():
            write_json(report, json_path)

    try:
        settings = Settings(
            device=device.value,
            sizes=Sizes(
                hidden or default.hidden,
                ffn or default.ffn,
                heads or default.heads,
                kv_heads or default.kv_heads,
            ),
            ways=select_ways(ways.split(",") if ways else None, device.value, quick),
            samples=samples,
            backward=backward,
            save_gathered=save_gathered,
            compile_left_s=compile_limit,
            recipe=None if fp8 is None else fp8.value,
        )
        counts = default_tokens if tokens is None else _token_counts(tokens)
        report = run(settings, torchrun_size or world_size, counts, progress, keep)
    except InvalidArgument as error:
        print(f"benchmarks.block: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if not is_rank_0():
        return
    render(report, stdout)
    if json_path is not None:
        stderr.print(f"wrote {json_path}")
    wrong = wrong_ways(report)
    if wrong:
        print(f"benchmarks.block: wrong results: {'; '.join(wrong)}", file=sys.stderr)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
