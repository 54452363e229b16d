"""A decode step: a chain of transformer layers as one CUDA graph, by several ways of summing over
the ranks. The ranks of the launch share the layers (tensor parallelism 1, 2, 4).

    torchrun --standalone --nproc-per-node 4 -m benchmarks.decode --json out.json --plot out.png
    python -m benchmarks.decode --device cpu --world-size 2 --hidden 64 --heads 4 --ffn 64

Attention is left out: the output projection reads the columns of the queries. Each layer has
weights of its own, so no weight is found in L2. A layer's share of the memory's rate is the time in
which its weights are read, at the rate at which `torch.sum` reads 1 GiB, over the time that it
takes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import typer
from torch.nn.functional import rms_norm, silu

import agmm
from agmm.bench import figures
from agmm.bench.exchange import of_all_ranks
from agmm.bench.launcher import choose, is_rank_0, ranks, world_size_or
from agmm.bench.options import Options
from agmm.bench.presets import MODELS, Attention, parse_tokens
from agmm.bench.reports import new_report, write_json
from agmm.bench.timer import pick_device, time_ways
from agmm.bench.way import as_graph
from agmm.cli.terminal import console, plain_table
from agmm.errors import InvalidArgument
from agmm.ops import async_input_mm
from agmm.testing.reference import relative_error
from benchmarks.few_rows import read_gb_per_s

EPS = 1e-6
BACKEND, SYMMETRIC = "backend", "one-shot"
PARTS, OURS, STREAMED = "agmm-parts", "agmm", "agmm-streamed"
ONE_KERNEL = "agmm-one-kernel"
WORDS = {
    BACKEND: "torch.mm, all_reduce of NCCL (gloo on CPUs), an addition, torch's rms_norm",
    SYMMETRIC: "torch.mm, torch.ops.symm_mem.one_shot_all_reduce, an addition, torch's rms_norm",
    PARTS: "agmm.matmul_all_reduce with the residual, torch's rms_norm",
    OURS: "agmm.matmul_all_reduce_rms_norm",
    ONE_KERNEL: 'agmm.matmul_all_reduce_rms_norm(config="streamed"): all of it in one kernel',
    STREAMED: "as agmm, and the column-parallel products by the kernel that agmm plans for them",
}
"""The ways by name, as the output explains them."""
ON_GPUS = (SYMMETRIC, ONE_KERNEL, STREAMED)
"""The ways that CPU ranks do not have."""
LOOKS = {
    BACKEND: (figures.GREY, "s"),
    SYMMETRIC: (figures.SKY, "^"),
    PARTS: (figures.ORANGE, "o"),
    OURS: (figures.VERMILION, "o"),
    ONE_KERNEL: (figures.BLUE, "v"),
    STREAMED: (figures.PURPLE, "D"),
}
"""The colour and the marker of each way."""
MOST_ERROR = 0.05
"""How far a way's result may be from the backend's, of 16 bits behind some layers."""
_READ_ON_CPU = 1 << 24
"""The float32 numbers of which the CPU's rate of reading is taken."""
_Call = Callable[[], torch.Tensor]


class Settings(NamedTuple):
    """What is run; the sizes are those of the whole model."""

    sizes: Attention
    layers: int
    samples: int
    ways: tuple[str, ...]


class Layer(NamedTuple):
    """The weights of one layer on a rank, transposed, and both norms'."""

    qkv: torch.Tensor
    attention_out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor]


class Chain:
    """The layers of this rank, made once for all numbers of rows."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.sizes, tp = settings.sizes, dist.get_world_size()
        found = (*self.sizes.projections(tp), *self.sizes.row_projections(tp))
        self.shapes = {one.name: (one.n, one.k) for one in found}
        self.layers = [self._layer(i) for i in range(settings.layers)]
        self.weight_bytes = sum(n * k for n, k in self.shapes.values()) * self.dtype.itemsize
        """The bytes of a layer's weights on this rank."""
        if device.type == "cuda":
            self.gb_per_s = read_gb_per_s(device, settings.samples)
        else:
            data = torch.ones(_READ_ON_CPU)
            us = statistics.median(time_ways({"sum": data.sum}, samples=3, device=device)["sum"])
            self.gb_per_s = data.nbytes / us / 1e3

    def _layer(self, number: int) -> Layer:
        generator = torch.Generator(self.device).manual_seed(100 * number + dist.get_rank())

        def weight(name: str) -> torch.Tensor:
            n, k = self.shapes[name]
            drawn = torch.randn(n, k, generator=generator, device=self.device)
            whole_k = k if name in ("qkv", "gate_up") else k * dist.get_world_size()
            found: torch.Tensor = (drawn / whole_k**0.5).to(self.dtype).t()
            return found

        ones = torch.ones(self.sizes.hidden, device=self.device, dtype=self.dtype)
        return Layer(
            weight("qkv"),
            weight("attention_out"),
            weight("gate_up"),
            weight("down"),
            norms=(ones, ones.clone()),
        )

    def call(self, way: str, rows: int) -> _Call:
        """The chain of all layers on so many rows, by one way."""
        generator = torch.Generator(self.device).manual_seed(rows)
        x = torch.randn(rows, self.sizes.hidden, generator=generator, device=self.device)
        x = x.to(self.dtype)
        multiply = _streamed if way == STREAMED else torch.mm
        sum_and_norm = self._sums(way, x)

        def run() -> torch.Tensor:
            normed, residual = x, x
            for layer in self.layers:
                queries = multiply(normed, layer.qkv)[:, : layer.attention_out.shape[0]]
                normed, residual = sum_and_norm(
                    queries, layer.attention_out, residual, layer.norms[0]
                )
                gate, up = multiply(normed, layer.gate_up).chunk(2, -1)
                hidden = silu(gate) * up
                normed, residual = sum_and_norm(hidden, layer.down, residual, layer.norms[1])
            return residual

        return run

    def _sums(self, way: str, x: torch.Tensor) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """What multiplies by a row-parallel weight, sums, adds the residual and norms."""
        hidden = (self.sizes.hidden,)
        if way in (OURS, STREAMED, ONE_KERNEL):
            is_one = way == ONE_KERNEL
            options: dict[str, Any] = {"config": "streamed" if is_one else None, "strict": is_one}
            return lambda a, b, residual, weight: agmm.matmul_all_reduce_rms_norm(
                a.contiguous(), b, residual, weight, EPS, **options
            )
        if way == PARTS:

            def by_parts(a: Any, b: Any, residual: Any, weight: Any) -> Any:
                total = agmm.matmul_all_reduce(a.contiguous(), b, residual=residual)
                return rms_norm(total, hidden, weight, EPS), total

            return by_parts
        group = dist.group.WORLD
        assert group is not None
        partial = torch.empty_like(x)
        if way == SYMMETRIC:
            partial = symm_mem.empty(*x.shape, dtype=x.dtype, device=x.device)
            symm_mem.rendezvous(partial, group.group_name)

        def by_library(a: Any, b: Any, residual: Any, weight: Any) -> Any:
            torch.mm(a, b, out=partial)
            if way == SYMMETRIC:
                op = torch.ops.symm_mem.one_shot_all_reduce
                summed = op(partial, "sum", group.group_name)
            else:
                dist.all_reduce(partial)
                summed = partial
            total = summed + residual
            return rms_norm(total, hidden, weight, EPS), total

        return by_library


def _streamed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return async_input_mm.on_cuda(a, b, None, 0)


def _captured(call: _Call) -> _Call:
    capture: Any = as_graph
    replay: _Call = capture(lambda _: call)(None)
    return replay


_chains: dict[Settings, Chain] = {}
"""The chain of this process, which runs one benchmark."""


def measure(rows: int, settings: Settings) -> dict[str, Any]:
    """The times of all ways on so many rows, µs a layer. Collective."""
    chain = _chains.get(settings)
    if chain is None:
        chain = _chains[settings] = Chain(settings, pick_device())
    calls: dict[str, _Call] = {}
    found: dict[str, Any] = {}
    with torch.no_grad():
        wanted = chain.call(BACKEND, rows)().double()
        for way in settings.ways:
            try:
                call = chain.call(way, rows)
                error = relative_error(call(), wanted)
                calls[way] = _captured(call) if chain.device.type == "cuda" else call
            except RuntimeError as why:
                found[way] = {"median_us": None, "reason": f"{type(why).__name__}: {why}"}
                continue
            found[way] = {"reason": None, "relative_error": error}
        refused = of_all_ranks(f"ways at {rows} rows", [way for way in found if way not in calls])
        for way in {name for of_rank in refused for name in of_rank}:
            calls.pop(way, None)
        timed = time_ways(calls, samples=settings.samples, device=chain.device)
    read_us = chain.weight_bytes / chain.gb_per_s / 1e3
    for way, samples_us in timed.items():
        per_layer = [us / settings.layers for us in samples_us]
        us = statistics.median(per_layer)
        found[way] |= {"median_us": us, "samples_us": per_layer, "rate_share": read_us / us}
    return {"rows": rows, "read_us": read_us, "gb_per_s": chain.gb_per_s, "ways": found}


def elapsed_of_all(seconds: float, rows: int) -> float:
    """The longest time that a rank has taken, so that all stop alike. Collective."""
    return float(max(of_all_ranks(f"seconds before {rows} rows", seconds)))


def run(
    settings: Settings, device: str, world_size: int, counts: list[int], limit_s: float
) -> dict[str, Any]:
    """Measures each number of rows and returns the report; under torchrun in every rank."""
    begin, stderr = time.monotonic(), console(stderr=True)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    options = Options(
        device=device, world_size=world_size, samples=settings.samples, dtype=dtype, limit_s=limit_s
    )
    report = new_report(options)
    report["settings"] |= {
        "op": "decode",
        "layers": settings.layers,
        "sizes": settings.sizes.__dict__,
        "attention": "left out",
        "ways": {way: WORDS[way] for way in settings.ways},
    }
    with ranks(device, world_size) as call:
        for i, rows in enumerate(counts):
            if call(elapsed_of_all, time.monotonic() - begin, rows) > limit_s:
                if is_rank_0():
                    stderr.print(f"stopped after {i} of {len(counts)}, at {limit_s:g} s")
                break
            if is_rank_0():
                stderr.print(f"[{i + 1}/{len(counts)}] {rows} rows")
            report["shapes"].append(call(measure, rows, settings))
    return report


def show(report: dict[str, Any]) -> None:
    """Prints what the ways are, then their µs a layer and share of the memory's rate."""
    out, settings = console(), report["settings"]
    name = report["machine"].get("device_name") or "CPU"
    sizes = settings["sizes"]
    out.print(
        f"{settings['layers']} layers of hidden {sizes['hidden']}, {sizes['heads']} heads and "
        f"feed-forward {sizes['feed_forward']} on {settings['world_size']} ranks, {name}; "
        f"attention is left out{'; one CUDA graph' if settings['device'] == 'cuda' else ''}"
    )
    for way, words in settings["ways"].items():
        out.print(f"{way}: {words}")
    table = plain_table("µs a layer (share of the memory's rate)")
    table.add_column("rows", justify="right")
    table.add_column("weights alone", justify="right")
    for way in settings["ways"]:
        table.add_column(way, justify="right")
    for entry in report["shapes"]:
        cells = [
            "–" if one["median_us"] is None else f"{one['median_us']:.1f} ({one['rate_share']:.0%})"
            for one in entry["ways"].values()
        ]
        table.add_row(str(entry["rows"]), f"{entry['read_us']:.1f}", *cells)
    out.print(table)
    for way, reason in {
        way: one["reason"] for e in report["shapes"] for way, one in e["ways"].items()
    }.items():
        if reason is not None:
            out.print(f"{way} has no time: {reason}")


def plot(report: dict[str, Any], path: Path) -> None:
    """Draws µs a layer over the rows, each way a line, beside what reading the weights takes."""
    figure = figures.new_figure(figures.PAGE_WIDTH, 3.8)
    axes, settings = figure.subplots(), report["settings"]
    shown = [entry["rows"] for entry in report["shapes"]]
    for way in settings["ways"]:
        color, marker = LOOKS[way]
        points = [
            (entry["rows"], entry["ways"][way]["median_us"])
            for entry in report["shapes"]
            if entry["ways"][way]["median_us"] is not None
        ]
        axes.plot(
            [rows for rows, _ in points],
            [us for _, us in points],
            color=color,
            marker=marker,
            linewidth=2.4 if way == OURS else 1.4,
            label=way,
        )
    reads = [entry["read_us"] for entry in report["shapes"]]
    axes.plot(shown, reads, color=figures.BLACK, linestyle=":", label="weights alone")
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown, [str(rows) for rows in shown])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rows")
    axes.set_ylabel("µs a layer")
    figures.strip(axes, grid="both")
    where = report["machine"].get("device_name") or "CPU"
    title = f"A decode layer without attention, {settings['world_size']} ranks, {where}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10.5)
    figure.legend(loc="outside lower left", ncols=3, fontsize=9, frameon=False)
    figures.save(figure, path)


def _settings(
    sizes: Attention, layers: int, samples: int, ways: str | None, device: str
) -> Settings:
    there = tuple(way for way in WORDS if device == "cuda" or way not in ON_GPUS)
    chosen = there if ways is None else tuple(ways.split(","))
    for way in chosen:
        if way not in there:
            raise InvalidArgument(f"ways: found {way!r}, wanted of {', '.join(there)}")
    return Settings(sizes, layers, samples, chosen)


def main(
    model: Annotated[str, typer.Option(help="One of agmm bench's models.")] = "llama-3-70b",
    rows: Annotated[str, typer.Option(help="As 1..256 (doubling) or 1,8.")] = "1..256",
    layers: Annotated[int, typer.Option(min=1)] = 4,
    hidden: Annotated[int | None, typer.Option(min=1, help="Instead of the model's.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Of 16 columns, key heads too.")] = None,
    ffn: Annotated[int | None, typer.Option(min=1)] = None,
    ways: Annotated[str | None, typer.Option(help="Comma-separated. Default: all.")] = None,
    samples: Annotated[int, typer.Option(min=1)] = 12,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    world_size: Annotated[int | None, typer.Option(min=1, help="Outside torchrun.")] = None,
    limit_s: Annotated[float, typer.Option(help="Begin no number of rows later.")] = 240.0,
    json_path: Annotated[Path | None, typer.Option("--json", dir_okay=False)] = None,
    picture: Annotated[Path | None, typer.Option("--plot", dir_okay=False)] = None,
) -> None:
    """Time a chain of transformer layers in decoding by several ways, µs a layer."""
    try:
        sizes = MODELS.get(model)
        if not isinstance(sizes, Attention):
            raise InvalidArgument(f"model: found {model!r}, wanted one with grouped attention")
        if heads is not None:
            sizes = Attention((hidden or sizes.hidden), heads, heads, 16, sizes.feed_forward)
        sizes = Attention(
            hidden or sizes.hidden,
            *(sizes.heads, sizes.kv_heads, sizes.head_dim),
            ffn or sizes.feed_forward,
        )
        device, count = choose(device, world_size_or(world_size))
        sizes.projections(count)
        settings = _settings(sizes, layers, samples, ways, device)
        if picture is not None:
            figures.check_path(picture, "--plot")
        report = run(settings, device, count, parse_tokens(rows), limit_s)
    except InvalidArgument as error:
        raise SystemExit(str(error)) from None
    if not is_rank_0():
        return
    show(report)
    if json_path is not None:
        write_json(report, json_path)
    if picture is not None:
        plot(report, picture)
    wrong = [
        f"{way} on {entry['rows']} rows is off by {one['relative_error']:.3g}"
        for entry in report["shapes"]
        for way, one in entry["ways"].items()
        if one["reason"] is None and one["relative_error"] > MOST_ERROR
    ]
    for words in wrong:
        console().print(f"wrong: {words}")
    if wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
