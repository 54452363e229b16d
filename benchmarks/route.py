"""The order of the rows of a rank's experts, alone on one GPU: agmm's kernel beside torch's ops,
which serve larger calls, on the ids of all ranks. Times are the GPU's, with all launches queued,
and those of a captured graph; the host's are those of calls one after the other.

    python benchmarks/route.py
    python benchmarks/route.py --ranks 8 --tokens 128 --tokens 2048 --json route.json
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from agmm.bench.machine import machine_facts
from agmm.bench.moe_presets import MOE_MODELS
from agmm.bench.moe_ways import drawn_ids
from agmm.bench.timer import host_time, time_ways
from agmm.cli.terminal import console, plain_table
from agmm.ops.routing import rows_of
from agmm.planning.shapes import MoEShape
from agmm.runtime import cuda_routing

MODELS = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3")
TOKENS = (16, 128, 1024, 2048, 4096)
OURS, TORCH = "agmm", "torch"
Found = tuple[torch.Tensor, ...]


def captured(call: Callable[[], Any]) -> Callable[[], None]:
    """The replay of a graph of the call."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def measure(model: str, tokens: int, ranks: int, samples: int) -> dict[str, Any] | None:
    """The times of both ways, with so many tokens on each rank; None where the kernel takes no such
    call."""
    hidden, inner, experts, k = MOE_MODELS[model]
    ids = drawn_ids(MoEShape(tokens * ranks, hidden, inner, experts, k), 0).cuda()
    held = experts // ranks
    sizes = held, held, ids.numel()  # those of the second rank, with room for all choices

    def by_kernel() -> Found | None:
        return cuda_routing.routed(ids, experts, *sizes, checks_capacity=False)

    def by_ops() -> Found:
        torch._assert_async((ids.flatten() < experts).all(), "topk_ids: found an id too large")
        return rows_of(ids, *sizes)

    found = by_kernel()
    if found is None:
        return None
    ways: dict[str, Callable[[], Any]] = {OURS: by_kernel, TORCH: by_ops}
    replays = {f"{name}, graph": captured(call) for name, call in ways.items()}
    timed = time_ways({**ways, **replays}, samples=samples, device=ids.device)
    return {
        "model": model,
        "tokens": tokens,
        "choices": ids.numel(),
        "us": {name: round(statistics.median(each), 2) for name, each in timed.items()},
        "host_us": {name: round(host_time(call).us, 2) for name, call in ways.items()},
        "wrong": not all(map(torch.equal, found, by_ops())),
    }


def main(
    models: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(MODELS),
    tokens: Annotated[list[int] | None, typer.Option(min=1, help="May be repeated.")] = None,
    ranks: Annotated[int, typer.Option(min=2)] = 4,
    samples: Annotated[int, typer.Option(min=1)] = 20,
    json_path: Annotated[Path | None, typer.Option("--json", dir_okay=False)] = None,
) -> None:
    """Time the order of rows beside torch's ops on one GPU."""
    if not torch.cuda.is_available():
        raise SystemExit("found no GPU, wanted one")
    every = [(model, count) for model in models.split(",") for count in tokens or TOKENS]
    measured = [measure(model, count, ranks, samples) for model, count in every]
    cases = [case for case in measured if case is not None]
    table = plain_table(f"µs: agmm / torch, on {ranks} ranks")
    for heading in ("model", "tokens of a rank", "choices", "launched", "graph", "host"):
        table.add_column(heading)
    for case in cases:
        us, host = case["us"], case["host_us"]
        table.add_row(
            *(case["model"], str(case["tokens"]), str(case["choices"])),
            f"{us[OURS]:.1f} / {us[TORCH]:.1f}",
            f"{us[f'{OURS}, graph']:.1f} / {us[f'{TORCH}, graph']:.1f}",
            f"{host[OURS]:.1f} / {host[TORCH]:.1f}{' wrong' if case['wrong'] else ''}",
        )
    console().print(table)
    if json_path is not None:
        report = {"machine": machine_facts(), "ranks": ranks, "cases": cases}
        json_path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if any(case["wrong"] for case in cases):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
