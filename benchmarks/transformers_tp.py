"""A model of transformers on several GPUs: its stock plan beside agmm's all-reduces and agmm's
sequence parallelism, in one run.

    torchrun --nproc-per-node 2 benchmarks/transformers_tp.py
    torchrun --nproc-per-node 2 benchmarks/transformers_tp.py --family Qwen3 --json out.json

The model has random weights, which rank 0 saves and all ranks load by `from_pretrained`. A training
step is a forward pass, the loss and a backward pass, without the optimizer; a prefill is a forward
pass without gradients that gives the logits of the last position. Tokens are those of a call, which
all ranks compute together.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from agmm.bench.launcher import choose, rank_pool, torchrun_world_size
from agmm.bench.measure import release_memory
from agmm.bench.options import Options
from agmm.bench.reports import new_report, write_json
from agmm.bench.timer import pick_device, time_ways
from agmm.cli.terminal import console, plain_table
from agmm.integrations import transformers as by_agmm
from agmm.testing.reference import relative_error

SIZES: dict[str, dict[str, Any]] = {
    "cuda": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32000,
    },
    "cpu": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "vocab_size": 128,
    },
}
"""The sizes of a layer of Llama 3 8B, which every family is given, and some that take
milliseconds."""
DEFAULTS = {"cuda": ("2048,8192", 8), "cpu": ("256", 2)}
"""Tokens and layers: 8 layers of these have 2 billion parameters with both embeddings."""
SAMPLES = 8
SPIN_US_PER_LAYER = 4000.0
"""Meanwhile the host launches a step, whose layers are Python."""
LARGEST_SEQUENCE = 4096
NEW_TOKENS = 16
WAYS = "stock", "all-reduce", "sequence"


def _save(family: str, layers: int, sizes: dict[str, Any], folder: Path, device: str) -> None:
    import transformers

    config = getattr(transformers, f"{family}Config")(
        **sizes, num_hidden_layers=layers, pad_token_id=0, bos_token_id=None, eos_token_id=None
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    model.to(torch.bfloat16 if device == "cuda" else torch.float32).save_pretrained(folder)


def _load(way: str, folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    by_agmm.disable()
    if way == "all-reduce":
        by_agmm.enable()
    plan = by_agmm.sequence_plan(folder) if way == "sequence" else "auto"
    config = DistributedConfig(tp_plan=plan)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, distributed_config=config, attn_implementation="sdpa"
    )


def _ids(tokens: int, vocabulary: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(1)
    length = min(tokens, LARGEST_SEQUENCE)
    shape = (tokens // length, length)
    return torch.randint(1, vocabulary, shape, generator=generator, device=device)


def _steps(model: Any, ids: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    def train() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def prefill() -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=ids, logits_to_keep=1, use_cache=False).logits
        return logits

    return {"train": train, "prefill": prefill}


def measure(
    way: str, folder: Path, counts: list[int], samples: int, spin_us: float, device: torch.device
) -> dict[str, Any]:
    """Median µs of each step by the number of tokens, what a prefill gave, and what was generated.
    Collective."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = _load(way, folder, dtype)
    vocabulary = model.config.vocab_size
    found: dict[str, Any] = {"us": {}, "logits": {}}
    for tokens in counts:
        steps = _steps(model, _ids(tokens, vocabulary, device))
        found["logits"][tokens] = steps["prefill"]().float().cpu()
        timed = time_ways(
            steps, samples=samples, spin_us=spin_us, group=dist.group.WORLD, device=device
        )
        found["us"][tokens] = {step: statistics.median(us) for step, us in timed.items()}
        model.zero_grad(set_to_none=True)
    with torch.no_grad():
        prompt = _ids(16, vocabulary, device).expand(2, -1)
        found["generated"] = model.generate(
            input_ids=prompt, max_new_tokens=NEW_TOKENS, do_sample=False
        )[:, prompt.shape[1] :].cpu()
    del model
    release_memory(device)
    return found


def main(
    family: Annotated[str, typer.Option(help="Of transformers: Llama, Qwen2, Qwen3.")] = "Llama",
    tokens: Annotated[str | None, typer.Option(help="Comma-separated counts.")] = None,
    layers: Annotated[int | None, typer.Option(min=1)] = None,
    samples: Annotated[int, typer.Option(min=1)] = SAMPLES,
    json_path: Annotated[Path | None, typer.Option("--json", dir_okay=False)] = None,
) -> None:
    """Time training steps and prefills of a model under three plans. Under torchrun."""
    world_size = torchrun_world_size()
    if world_size is None:
        raise SystemExit(
            "found no torchrun; torchrun --nproc-per-node 2 benchmarks/transformers_tp.py"
        )
    device_type, _ = choose("auto", world_size)
    default_tokens, default_layers = DEFAULTS[device_type]
    counts = [int(count) for count in (tokens or default_tokens).split(",")]
    layers = layers or default_layers
    spin_us = SPIN_US_PER_LAYER * layers
    warnings.simplefilter("once")
    with rank_pool(device_type, world_size):
        device = pick_device()
        folders: list[Any] = [None]
        if dist.get_rank() == 0:
            folders = [tempfile.mkdtemp(prefix="agmm-model-")]
            _save(family, layers, SIZES[device_type], Path(folders[0]), device_type)
            release_memory(device)
        dist.broadcast_object_list(folders, device=device)
        try:
            found = {
                way: measure(way, Path(folders[0]), counts, samples, spin_us, device)
                for way in WAYS
            }
        finally:
            by_agmm.disable()
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(folders[0], ignore_errors=True)
        if dist.get_rank() != 0:
            return
        _print(family, layers, counts, found, device)
        if json_path is not None:
            report = new_report(
                Options(
                    device=device.type,
                    world_size=world_size,
                    samples=samples,
                    spin_us=spin_us,
                    dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
                )
            )
            report["settings"] |= {
                "op": "transformers step",
                "family": family,
                "layers": layers,
                "sizes": SIZES[device_type],
            }
            report["shapes"] = [
                {"tokens": count, "ways": {way: found[way]["us"][count] for way in WAYS}}
                for count in counts
            ]
            write_json(report, json_path)


def _print(
    family: str, layers: int, counts: list[int], found: dict[str, Any], device: torch.device
) -> None:
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    ranks = dist.get_world_size()
    table = plain_table(f"{family}, {layers} layers, {ranks} ranks on {name}, 1000 tokens/s")
    for heading in ("step", "tokens", *WAYS, *(f"{way} ÷ stock" for way in WAYS[1:])):
        table.add_column(heading, justify="right")
    for step in ("train", "prefill"):
        for count in counts:
            rates = [count / found[way]["us"][count][step] * 1e3 for way in WAYS]
            table.add_row(
                step,
                str(count),
                *(f"{rate:.1f}" for rate in rates),
                *(f"{rate / rates[0]:.3f}" for rate in rates[1:]),
            )
    console().print(table)
    stock = found["stock"]
    for way in WAYS[1:]:
        same = int((found[way]["generated"] == stock["generated"]).sum())
        errors = [relative_error(found[way]["logits"][c], stock["logits"][c]) for c in counts]
        console().print(
            f"{way}: {same} of {stock['generated'].numel()} generated tokens are the stock plan's; "
            f"relative error of the logits {max(errors):.2g}"
        )


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    typer.run(main)
