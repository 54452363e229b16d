"""A step of FSDP2 (forward and backward) by `agmm.integrations.fsdp` beside the backend's
collectives, and beside the same step of a model that is not sharded, with parameters in bfloat16.

    torchrun --nproc-per-node 4 benchmarks/fsdp.py
    torchrun --nproc-per-node 4 benchmarks/fsdp.py --tokens 1024,8192 --layers 8 --json out.json

The model is a stack of Llama-shaped blocks, each sharded over all ranks; parameters in float32,
computed with in bfloat16. Tokens are those of each rank.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from agmm.bench.exchange import of_all_ranks
from agmm.bench.launcher import choose, rank_pool, torchrun_world_size
from agmm.bench.measure import release_memory
from agmm.bench.options import Options
from agmm.bench.reports import new_report, write_json
from agmm.bench.timer import pick_device, time_ways
from agmm.cli.terminal import console, plain_table
from agmm.integrations import fsdp
from agmm.nn._held import local_values
from agmm.testing.reference import relative_error
from benchmarks.block.model import Block, Sizes

DEFAULTS = {
    "cuda": (Sizes(4096, 14336, 32, 8), "2048,8192", 4),
    "cpu": (Sizes(64, 128, 4, 2), "16", 2),
}
"""Sizes of a block, tokens, blocks: those of Llama 3 8B, and some that take milliseconds."""
SAMPLES = 10
SPIN_US_PER_BLOCK = 3000.0
"""Meanwhile the host launches, as beside the step before in training: FSDP2's hooks are Python."""
ALLOWED_ERROR = 2e-2
"""The error of a gradient beside the backend's, whose sum is rounded between the ranks."""
WAYS = "alone", "backend", "agmm"
Step = Callable[[], torch.Tensor]


class Model(nn.Module):
    def __init__(self, sizes: Sizes, layers: int, **place: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(sizes, "whole", **place) for _ in range(layers))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, cos, sin)
        return x


def _model(sizes: Sizes, layers: int, device: torch.device, dtype: torch.dtype) -> Model:
    """With the same weights on all ranks and in every call."""
    torch.manual_seed(0)
    return Model(sizes, layers, device=device, dtype=dtype)


def _sharded(sizes: Sizes, layers: int, device: torch.device, dtype: torch.dtype) -> Model:
    model = _model(sizes, layers, device, torch.float32)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def _inputs(tokens: int, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> list[Any]:
    """x, the gradient of the output, and the positions' tables; each rank's own."""
    generator = torch.Generator(device).manual_seed(1 + dist.get_rank())
    x, dout = (
        torch.randn(tokens, 1, sizes.hidden, generator=generator, device=device).to(dtype)
        for _ in range(2)
    )
    angles = torch.rand(tokens, sizes.head_size, generator=generator, device=device)
    return [x, dout, angles.cos().to(dtype), angles.sin().to(dtype)]


def _step(model: nn.Module, x: torch.Tensor, dout: torch.Tensor, *tables: torch.Tensor) -> Step:
    def step() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        out: torch.Tensor = model(x, *tables)
        out.backward(dout)
        return out.detach()

    return step


def _check(ours: Model, theirs: Model, steps: dict[str, Step]) -> float:
    """The largest relative error of a gradient beside the backend's, on any rank. Collective.

    Raises:
        SystemExit: a gathered parameter or a gradient is wrong; on all ranks.
    """
    fault, worst = "", 0.0
    for _ in range(2):  # the first step makes agmm's slots
        if not torch.equal(steps["agmm"](), steps["backend"]()):
            fault = "found another output by agmm's gathers than by the backend's"
    for (name, mine), wanted in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert mine.grad is not None and wanted.grad is not None
        error = relative_error(local_values(mine.grad), local_values(wanted.grad).float())
        if not error <= ALLOWED_ERROR:
            fault = f"{name}: found a gradient with a relative error of {error:.3g}"
        worst = max(worst, error)
    group = dist.group.WORLD
    assert group is not None
    found = of_all_ranks("what came of a step", (fault, worst), group)
    for rank, (its_fault, _) in enumerate(found):
        if its_fault:
            raise SystemExit(f"rank {rank}: {its_fault}")
    return max(float(error) for _, error in found)


def measure(
    tokens: int, sizes: Sizes, layers: int, samples: int, device: torch.device
) -> dict[str, dict[str, float]]:
    """Median µs of each way, and what its gradients differ from the backend's by. Collective."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x, dout, *tables = _inputs(tokens, sizes, device, dtype)
    models = {
        "alone": _model(sizes, layers, device, dtype),
        "backend": _sharded(sizes, layers, device, dtype),
        "agmm": _sharded(sizes, layers, device, dtype),
    }
    fsdp.enable(models["agmm"], strict=device.type == "cuda")
    steps = {way: _step(model, x, dout, *tables) for way, model in models.items()}
    error = _check(models["agmm"], models["backend"], steps)
    timed = time_ways(
        steps,
        samples=samples,
        spin_us=SPIN_US_PER_BLOCK * layers,
        group=dist.group.WORLD,
        device=device,
    )
    found = {way: {"median_us": statistics.median(timed[way])} for way in WAYS}
    found["agmm"]["relative_error"] = error
    fsdp.disable(models["agmm"])
    del models, steps
    release_memory(device)
    return found


def main(
    tokens: Annotated[
        str | None, typer.Option(help="Of each rank, comma-separated counts.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Blocks.")] = None,
    samples: Annotated[int, typer.Option(min=1)] = SAMPLES,
    json_path: Annotated[Path | None, typer.Option("--json", dir_okay=False)] = None,
) -> None:
    """Time a step of FSDP2 by agmm and by the backend, in one run. Under torchrun."""
    world_size = torchrun_world_size()
    if world_size is None:
        raise SystemExit("found no torchrun; torchrun --nproc-per-node 4 benchmarks/fsdp.py")
    device_type, _ = choose("auto", world_size)
    sizes, default_tokens, default_layers = DEFAULTS[device_type]
    counts = [int(count) for count in (tokens or default_tokens).split(",")]
    layers = layers or default_layers
    with rank_pool(device_type, world_size):
        on_gpus = device_type == "cuda"
        device = pick_device()
        found = {count: measure(count, sizes, layers, samples, device) for count in counts}
        if dist.get_rank() != 0:
            return
        name = torch.cuda.get_device_name() if on_gpus else "CPU"
        title = f"{dist.get_world_size()} ranks on {name}, {layers} blocks of {sizes}, ms"
        table = plain_table(title)
        for heading in ("tokens", *WAYS, "backend ÷ agmm", "agmm ÷ alone"):
            table.add_column(heading, justify="right")
        for count, ways in found.items():
            alone, backend, ours = (ways[way]["median_us"] for way in WAYS)
            table.add_row(
                str(count),
                *(f"{us / 1e3:.3f}" for us in (alone, backend, ours)),
                f"{backend / ours:.3f}",
                f"{ours / alone:.3f}",
            )
        console().print(table)
        if json_path is not None:
            report = new_report(
                Options(
                    device=device.type,
                    world_size=world_size,
                    samples=samples,
                    spin_us=SPIN_US_PER_BLOCK * layers,
                    dtype=torch.bfloat16 if on_gpus else torch.float32,
                )
            )
            report["settings"] |= {"op": "fsdp step", "block": vars(sizes), "layers": layers}
            report["shapes"] = [{"tokens": count, "ways": ways} for count, ways in found.items()]
            write_json(report, json_path)


if __name__ == "__main__":
    typer.run(main)
