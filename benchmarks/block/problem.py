"""One rank's tensors at one token count, what its results should be, and one pass of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from agmm.bench.measure import release_memory
from agmm.nn import load_full_state_dict
from agmm.nn._held import local_shard
from agmm.nn._sharded import ShardedLinear
from agmm.testing.reference import allowed_error, relative_error
from benchmarks.block.model import Block, Sizes

ERROR_FACTOR = 3.0
"""A result may have this many times the error of the whole block in the same dtype (in fp8: on
operands quantised by the same recipe): the ranks' partial sums are rounded before they are added
up."""

FORWARD, STEP = "forward", "forward + backward"
_ROPE_BASE = 500000.0  # Llama 3's

Tensors = tuple[torch.Tensor, ...]
Call = Callable[[], Tensors]
"""One pass. Returns the output, and after it the gradients of the input and of the weights."""


@dataclass(frozen=True)
class Settings:
    """What every rank is told."""

    device: str
    sizes: Sizes
    ways: tuple[str, ...]
    samples: int
    backward: bool
    save_gathered: bool
    compile_left_s: float
    recipe: str | None = None
    """The recipe of fp8, by its name in `agmm.nn`."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    @property
    def passes(self) -> tuple[str, ...]:
        return (FORWARD, STEP) if self.backward else (FORWARD,)


@dataclass
class Problem:
    """One rank's tensors at one token count, and what its results should be."""

    settings: Settings
    group: dist.ProcessGroup
    device: torch.device
    x: torch.Tensor
    dout: torch.Tensor
    tables: tuple[torch.Tensor, torch.Tensor]
    weights: dict[str, torch.Tensor]
    wanted: dict[str, torch.Tensor]
    allowed: dict[str, float]
    async_tp_calls: dict[str, Prepared] = field(default_factory=dict)

    def block(self, layers: str) -> Block:
        """A block with parameters of its own over the one storage of the weights."""
        made = Block(
            self.settings.sizes,
            layers,
            save_gathered=self.settings.save_gathered,
            recipe=self.settings.recipe,
            device="meta",
            dtype=self.settings.dtype,
        )
        made.load_state_dict(self.weights, assign=True)
        return made


@dataclass
class Prepared:
    """`peak_bytes` where it was measured while preparing."""

    call: Call
    peak_bytes: int | None = None
    note: str = ""


def make_call(
    block: Block,
    x: torch.Tensor,
    dout: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    which: str,
    *,
    run: Callable[..., torch.Tensor] | None = None,
) -> Call:
    """One pass through the block, or through what `run` made of it."""
    run = block if run is None else run
    leaf = x.detach().requires_grad_()
    leaves = [leaf, *block.parameters()]

    def forward() -> Tensors:
        with torch.no_grad():
            return (run(leaf, *tables),)

    def step() -> Tensors:
        out = run(leaf, *tables)
        # The graph must end here: a capture on another stream must find no AccumulateGrad of it.
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    return forward if which == FORWARD else step


def make_problem(tokens: int, settings: Settings) -> Problem:
    """The problem and its reference, on every rank of the default group."""
    group = dist.group.WORLD
    assert group is not None
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if settings.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    sizes, dtype = settings.sizes, settings.dtype
    place: dict[str, Any] = {"device": device, "dtype": dtype}
    generator = torch.Generator(device).manual_seed(tokens)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, **place)

    whole = Block(sizes, "whole", device="meta", dtype=dtype)
    state = {
        name: randn(*weight.shape) * weight.shape[1] ** -0.5
        if weight.dim() == 2
        else 1 + 0.1 * randn(*weight.shape)
        for name, weight in whole.state_dict().items()
    }
    x, dout = (randn(tokens, 1, sizes.hidden) for _ in range(2))
    half = sizes.head_size // 2
    frequencies = _ROPE_BASE ** (-torch.arange(half, dtype=torch.float64, device=device) / half)
    angles = torch.arange(tokens, dtype=torch.float64, device=device)[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    tables = angles.cos().to(dtype), angles.sin().to(dtype)

    sharded = Block(sizes, "agmm", **place)
    load_full_state_dict(sharded, state)
    rows = slice(rank * tokens // world_size, (rank + 1) * tokens // world_size)

    def own(results: Tensors) -> dict[str, torch.Tensor]:
        """What this rank should find of the whole block's results, by name."""
        found = {"out": results[0][rows]}
        if len(results) > 1:
            found["x"] = results[1][rows]
        for (name, _), grad in zip(whole.named_parameters(), results[2:], strict=False):
            path, _, leaf = name.rpartition(".")
            owner = sharded.get_submodule(path)
            if isinstance(owner, ShardedLinear):
                for piece, whole_grad in owner.held[leaf].split(grad).items():
                    part = local_shard(whole_grad, owner.get_parameter(piece))
                    found[f"{path}.{piece}"] = part
            else:
                found[name] = grad
        return {name: tensor.clone() for name, tensor in found.items()}

    def whole_results(dtype: torch.dtype, recipe: str | None) -> dict[str, torch.Tensor]:
        block = Block(sizes, "whole", recipe=recipe, device="meta")
        block.load_state_dict({name: t.to(dtype) for name, t in state.items()}, assign=True)
        cos, sin = (table.to(dtype) for table in tables)
        call = make_call(block, x.to(dtype), dout.to(dtype), (cos, sin), settings.passes[-1])
        return own(call())

    wanted = whole_results(torch.float32 if device.type == "cuda" else torch.float64, None)
    release_memory(device)
    same_dtype = whole_results(dtype, settings.recipe)
    allowed = {
        name: allowed_error(relative_error(found, wanted[name]), ERROR_FACTOR)
        for name, found in same_dtype.items()
    }
    return Problem(
        settings=settings,
        group=group,
        device=device,
        x=x[rows].clone(),
        dout=dout[rows].clone(),
        tables=tables,
        weights={name: tensor.detach() for name, tensor in sharded.state_dict().items()},
        wanted=wanted,
        allowed=allowed,
    )
