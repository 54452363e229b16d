"""`torchtitan.train` on CPU ranks: what torchtitan asks of a GPU, or of a torch that is not yet
released, is put in its place here, and then its own trainer is run with the arguments of this one.
The ops that agmm has computed are written beside the losses."""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import titan_work
import torch
import torch.distributed as dist

import agmm


def _as_a_gpu() -> None:
    """Has torchtitan find an accelerator, whose module is torch.cpu. Before it is imported."""
    utils: Any = torch._utils
    utils._get_available_device_type = lambda: "cpu"
    for name, value in (
        ("current_device", 0),
        ("get_device_name", "CPU"),
        ("get_device_properties", types.SimpleNamespace(total_memory=1)),
        ("memory_stats", {}),
        ("reset_peak_memory_stats", None),
        ("empty_cache", None),
    ):
        setattr(torch.cpu, name, lambda *_, value=value: value)
    # Kernels of Triton, which the torch for CPUs has not, for an exchange of experts' tokens.
    kernels: Any = types.ModuleType("torchtitan.distributed.minimal_async_ep.kernels")
    kernels.__getattr__ = lambda name: None
    sys.modules[kernels.__name__] = kernels
    titan_work.mm_with_out_dtype()
    distributed: Any = dist
    distributed.is_nccl_available = lambda: True  # without which the compiler puts in no fused op
    if not hasattr(dist, "set_timeout"):  # of a later torch than 2.13
        distributed.set_timeout = dist.distributed_c10d._set_pg_timeout


@torch.no_grad()
def _clip(parameters: Iterable[torch.Tensor], max_norm: float, **_: Any) -> torch.Tensor:
    """Sums the gradients of weights that every rank has, those of norms, over the ranks, which saw
    other tokens; and does what torchtitan's function of this name does for DTensors."""
    held: list[Any] = list(parameters)
    norms = [parameter for parameter in held if parameter.dim() == 1]
    shards = [parameter for parameter in held if parameter.dim() > 1]
    squares = sum((one.grad.square().sum() for one in shards), torch.zeros(()))
    dist.all_reduce(squares)
    for parameter in norms:
        dist.all_reduce(parameter.grad)
        squares += parameter.grad.square().sum()
    norm = squares.sqrt()
    torch.nn.utils.clip_grads_with_norm_(held, max_norm, norm)
    return norm


def _without_fsdp() -> None:
    """The FSDP2 of torch 2.13 refuses weights that are plain tensors with notes on their sharding
    beside them, as torchtitan's are. With a single data-parallel rank it has to do what `_clip`
    does."""
    from torchtitan.distributed import utils
    from torchtitan.models.llama3 import parallelize

    utils.clip_grad_norm_ = _clip
    parallelize.apply_fsdp_to_decoder = lambda *_, **__: None


def main() -> None:
    _as_a_gpu()
    if int(os.environ["WORLD_SIZE"]) > 1:
        _without_fsdp()
    from torchtitan import train

    folder = Path(sys.argv[sys.argv.index("--dump_folder") + 1])
    train.main()
    calls = agmm.status().calls
    left = [f"{one.op} by {one.by}: {one.reason}" for one in calls if not one.is_by_agmm]
    served = {"by agmm": sorted({one.op for one in calls if one.is_by_agmm}), "left": left}
    (folder / f"served.{os.environ['RANK']}").write_text(json.dumps(served))


if __name__ == "__main__":
    main()
