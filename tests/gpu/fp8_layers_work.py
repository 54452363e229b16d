"""What the GPU tests of fp8 layers run inside the ranks, all in one group."""

from __future__ import annotations

import warnings
from typing import Any

import gpu_work
import torch
import torch.distributed as dist
from layers_work import local_values

from agmm.nn import ColumnParallelLinear, GatedMLP, RowParallelLinear, load_full_state_dict
from agmm.testing.cases import uneven_blocks
from agmm.testing.reference import relative_error

# Values are rounded to e4m3, whose steps are a 16th to an 8th (e5m2: an 8th to a 4th), both
# operands at random: that is some 4% and 6% of the norm.
LIMIT = 0.1


def _randn(*shape: int, seed: int) -> torch.Tensor:
    return gpu_work.randn(shape, torch.bfloat16, seed)


def _weight(*shape: int, seed: int) -> torch.Tensor:
    return uneven_blocks(_randn(*shape, seed=seed) / 8)


def layers(recipe: str, rows: int, bias: bool) -> list[str]:
    """Faults of a column- and a row-parallel layer, forward and backward, against the whole ones in
    float64."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    k, n = 256, 64 * world_size
    where: dict[str, Any] = {"device": gpu_work.device(), "dtype": torch.bfloat16}
    faults = []
    for layer, whole, is_column in (
        (ColumnParallelLinear(k, n, bias, fp8=recipe, **where), (n, k), True),
        (RowParallelLinear(n, k, bias, fp8=recipe, **where), (k, n), False),
    ):
        state = {"weight": _weight(*whole, seed=1)}
        if bias:
            state["bias"] = _randn(whole[0], seed=2)
        load_full_state_dict(layer, state)
        x = _randn(world_size * rows, whole[1], seed=3)
        dout = _randn(world_size * rows, whole[0], seed=4)
        given = x if is_column else x.chunk(world_size, -1)[rank]
        own = slice(rank * rows, (rank + 1) * rows)
        given = (x[own] if is_column else given).clone().requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is unfused
            out = layer(given)
            out.backward(dout.chunk(world_size, -1)[rank] if is_column else dout[own])
        leaves = [t.double().requires_grad_() for t in (x, *state.values())]
        wanted = torch.nn.functional.linear(*leaves)
        wanted.backward(dout.double())

        def part(tensor: Any, dim: int | None) -> torch.Tensor:
            found: torch.Tensor = tensor.detach()
            return found if dim is None else found.chunk(world_size, dim)[rank]

        shards = (0, 0, 0) if is_column else (1, 1, None)
        pairs = [("out", out, part(wanted, 1 if is_column else 0))]
        found: list[Any] = [given.grad]
        found += [None if p.grad is None else local_values(p.grad) for p in layer.parameters()]
        for name, one, leaf, dim in zip(
            ("dx", "dweight", "dbias"), found, leaves, shards, strict=False
        ):
            pairs.append((name, one, part(leaf.grad, dim)))
        for name, one, other in pairs:
            if not relative_error(one, other) < LIMIT:
                faults.append(f"{recipe} {layer} {name}: error {relative_error(one, other)}")
    return faults


def gated(recipe: str, rows: int, hidden: int) -> list[str]:
    """Faults of a gated feed-forward module with so many hidden features on a rank, forward and
    backward, against the whole one in float64."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    width = 256
    where: dict[str, Any] = {"device": gpu_work.device(), "dtype": torch.bfloat16}
    mlp = GatedMLP(width, hidden * world_size, fp8=recipe, **where)
    whole = {
        "gate_proj.weight": _weight(hidden * world_size, width, seed=1),
        "up_proj.weight": _weight(hidden * world_size, width, seed=2),
        "down_proj.weight": _weight(width, hidden * world_size, seed=3),
    }
    load_full_state_dict(mlp, whole)
    x, dout = (_randn(world_size * rows, width, seed=seed) for seed in (4, 5))
    own = slice(rank * rows, (rank + 1) * rows)
    given = x[own].clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is unfused
        out = mlp(given)
        out.backward(dout[own])
        with torch.no_grad():
            without_gradients = mlp(given)
    leaves = [one.double().requires_grad_() for one in (x, *whole.values())]
    of_x, gate, up, down = leaves
    products = torch.nn.functional.silu(of_x @ gate.t()) * (of_x @ up.t())
    wanted = products @ down.t()
    wanted.backward(dout.double())
    pairs: list[Any] = [
        ("out", out, wanted.detach()[own]),
        ("out without gradients", without_gradients, wanted.detach()[own]),
        ("dx", given.grad, of_x.grad[own] if of_x.grad is not None else None),
    ]
    for (name, parameter), leaf, dim in zip(
        mlp.named_parameters(), (gate, up, down), (0, 0, 1), strict=True
    ):
        assert parameter.grad is not None and leaf.grad is not None
        wanted_part = leaf.grad.chunk(world_size, dim)[rank]
        pairs.append((name, local_values(parameter.grad), wanted_part))
    # Two products follow each other, and a third in the backward.
    return [
        f"{recipe} {name}: error {relative_error(one, other)}"
        for name, one, other in pairs
        if not relative_error(one, other) < 2 * LIMIT
    ]
