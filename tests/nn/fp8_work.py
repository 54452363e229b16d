"""What the tests of fp8 layers and styles run inside the ranks of a pool of five."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from rank_groups import mesh_over
from rank_work import group_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

import agmm
from agmm.errors import InvalidArgument
from agmm.nn import (
    ColumnParallelLinear,
    Fp8Recipe,
    GatedMLP,
    GatherColwiseParallel,
    RowParallelLinear,
    RowwiseScatterParallel,
    SharedGatherParallel,
    full_state_dict,
    load_full_state_dict,
)
from agmm.nn.fp8_recipe import RECIPES
from agmm.testing.reference import relative_error

Faults = list[str] | None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torchao's import tells of kernels that do not load on this machine."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def converted(module: torch.nn.Module, name: str, **changes: Any) -> torch.nn.Module:
    """The module by torchao's conversion, with torchao's recipe of that name."""
    with _quiet():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        # Emulated, so that float32 results are not rounded to what a GPU writes.
        config = dataclasses.replace(
            Float8LinearConfig.from_recipe_name(name), emulate=True, **changes
        )
        found: torch.nn.Module = convert_to_float8_training(module, config=config)
    return found


def recipes() -> list[str]:
    """The names of recipes that differ from torchao's."""
    with _quiet():
        from torchao.float8 import Float8LinearConfig, Float8LinearRecipeName

        found = {
            recipe.value: Fp8Recipe.of_torchao(Float8LinearConfig.from_recipe_name(recipe))
            for recipe in Float8LinearRecipeName
        }
    return [name for name in found.keys() | RECIPES.keys() if found.get(name) != RECIPES.get(name)]


def _random(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator)


def column_against_torchao(
    world_size: int, name: str, bias: bool, outputs: int, rows: int
) -> Faults:
    """Faults of a column-parallel layer against torchao's whole one: forward and backward."""
    group = group_of(world_size)
    if group is None:
        return None
    rank = dist.get_rank(group)
    whole = torch.nn.Linear(64, outputs * 16 * world_size, bias)
    layer = ColumnParallelLinear(
        64, [16 * world_size] * outputs, bias, group=group, fp8=name, device="cpu"
    )
    load_full_state_dict(layer, whole.state_dict() if _same(whole) else {})
    x = _random(rows * world_size, 64, seed=1) * _random(rows * world_size, 1, seed=2).exp()
    wanted_x = x.clone().requires_grad_()
    wanted = converted(torch.nn.Sequential(whole), name)(wanted_x)
    own = slice(rank * rows, (rank + 1) * rows)
    shard = x[own].clone().requires_grad_()
    found = torch.cat(list(layer(shard)), -1)
    dout = _random(*wanted.shape, seed=3)
    wanted.backward(dout)
    assert wanted_x.grad is not None
    part = torch.cat([block.chunk(world_size, -1)[rank] for block in dout.chunk(outputs, -1)], -1)
    wanted_part = torch.cat(
        [block.chunk(world_size, -1)[rank] for block in wanted.detach().chunk(outputs, -1)], -1
    )
    found.backward(part)
    pairs: list[Any] = [("out", found, wanted_part), ("dx", shard.grad, wanted_x.grad[own])]
    for parameter_name, gradient in _gradients(layer).items():
        pairs.append((parameter_name, gradient, whole.get_parameter(parameter_name).grad))
    same = {"bias"} | (set() if name == "tensorwise" else {"out", "weight"})
    return _faults(pairs, world_size == outputs == 1, same)


def row_against_torchao(world_size: int, name: str, bias: bool, rows: int) -> Faults:
    """What a row-parallel layer has wrong beside torchao's."""
    group = group_of(world_size)
    if group is None:
        return None
    rank = dist.get_rank(group)
    features = 32 * world_size
    whole = torch.nn.Linear(features, 48, bias)
    layer = RowParallelLinear(features, 48, bias, group=group, fp8=name)
    load_full_state_dict(layer, whole.state_dict() if _same(whole) else {})
    x = _random(rows * world_size, features, seed=1)
    wanted_x = x.clone().requires_grad_()
    wanted = converted(torch.nn.Sequential(whole), name)(wanted_x)
    part = x.chunk(world_size, -1)[rank].clone().requires_grad_()
    found = layer(part)
    dout = _random(*wanted.shape, seed=3)
    wanted.backward(dout)
    assert wanted_x.grad is not None
    own = slice(rank * rows, (rank + 1) * rows)
    found.backward(dout[own].clone())
    pairs = [
        ("out", found, wanted.detach()[own]),
        ("dx", part.grad, wanted_x.grad.chunk(world_size, -1)[rank]),
    ]
    for parameter_name, gradient in _gradients(layer).items():
        pairs.append((parameter_name, gradient, whole.get_parameter(parameter_name).grad))
    same = {
        "tensorwise": {"bias"},
        "rowwise": {"bias", "weight", "dx"},
        "rowwise_with_gw_hp": {"bias", "weight"},
    }
    return _faults(pairs, world_size == 1, same[name])


def _same(module: torch.nn.Module) -> bool:
    """Gives a module the same first values on all ranks."""
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters(), 10):
            parameter.copy_(_random(*parameter.shape, seed=seed) / 8)
    return True


def _own_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    gradient: Any = parameter.grad
    found: torch.Tensor = gradient.to_local()
    return found


def _gradients(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The whole layer's, by the names of nn.Linear."""
    for parameter in layer.parameters():
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.copy_(parameter.grad)
    return full_state_dict(layer)


# The errors of float32 sums of the same products. They are larger where scales cover other parts
# than torchao's: each value is then rounded to fp8 elsewhere, and errs by 2**-4 of itself at most
# (e5m2: 2**-3).
_SAME, _OTHER_SCALES = 1e-5, 0.1


def _faults(pairs: list[Any], is_one: bool, same: set[str]) -> list[str]:
    """The pairs that differ, by more than rounding where the layer is the whole or where scales
    cover the same on all ranks."""
    found = []
    for what, one, other in pairs:
        error = relative_error(one, other)
        limit = _SAME if is_one or what in same else _OTHER_SCALES
        if not error < limit:
            found.append(f"{what}: error {error}")
    return found


# --- models by torchao's conversion and agmm's styles ---


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq = torch.nn.Linear(128, 128, bias=False)
        self.wk = torch.nn.Linear(128, 64, bias=False)
        self.wv = torch.nn.Linear(128, 64, bias=False)
        self.wo = torch.nn.Linear(128, 128, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            w(x).unflatten(-1, (-1, 16)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        projected: torch.Tensor = self.wo(out.transpose(1, 2).flatten(2))
        return projected


class FeedForward(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = torch.nn.Linear(128, 320, bias=False)
        self.w3 = torch.nn.Linear(128, 320, bias=False)
        self.w2 = torch.nn.Linear(320, 128, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.w2(torch.nn.functional.silu(self.w1(x)) * self.w3(x))
        return out


class Block(torch.nn.Module):
    """Shaped as Llama's: [batch, sequence, features]."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = torch.nn.RMSNorm(128)
        self.attention = Attention()
        self.ffn_norm = torch.nn.RMSNorm(128)
        self.feed_forward = FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: torch.Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


def sharded(block: torch.nn.Module, mesh: DeviceMesh, **options: Any) -> torch.nn.Module:
    plan: Any = {
        "attention_norm": SequenceParallel(),
        "attention": SharedGatherParallel("wq", "wk", "wv", **options),
        "attention.wo": RowwiseScatterParallel(**options),
        "ffn_norm": SequenceParallel(),
        "feed_forward": SharedGatherParallel("w1", "w3", **options),
        "feed_forward.w2": RowwiseScatterParallel(**options),
    }
    return parallelize_module(block, mesh, plan)


def llama_losses(name: str, by: str, dtype: torch.dtype, steps: int) -> list[list[float]] | None:
    """The loss curves of a block on 4 ranks and of torchao's unsharded one.

    Args:
        by: "torchao" for a block that torchao converted, else by the styles' own ``fp8``.
    """
    group = group_of(4)
    if group is None:
        return None
    mesh = DeviceMesh.from_group(group, "cpu")
    rank = dist.get_rank(group)
    x, target = (_random(2, 48, 128, seed=seed).to(dtype) for seed in (1, 2))
    curves = []
    for is_sharded in (True, False):
        torch.manual_seed(0)
        block: torch.nn.Module = Block().to(dtype)
        if by == "torchao" or not is_sharded:
            block = converted(block, name)
        if is_sharded:
            block = sharded(block, mesh, **({} if by == "torchao" else {"fp8": name}))
        own_x, own_target = (t.chunk(4, 1)[rank] if is_sharded else t for t in (x, target))
        optimizer = torch.optim.AdamW(block.parameters(), lr=2e-3, foreach=False)
        curve = []
        for _ in range(steps):
            optimizer.zero_grad()
            out = block(own_x)
            out = out.to_local() if isinstance(out, DTensor) else out
            loss = (out.float() - own_target.float()).square().sum() / target.numel()
            loss.backward()
            total = loss.detach().clone()
            if is_sharded:
                dist.all_reduce(total, group=group)
            optimizer.step()
            curve.append(float(total))
        curves.append(curve)
    return curves


def compiled(world_size: int, dynamic: bool) -> Faults:
    """Faults of compiled layers against the same layers eager."""
    group = group_of(world_size)
    if group is None:
        return None
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        ColumnParallelLinear(32, 32 * world_size, group=group, fp8="rowwise"),
        torch.nn.ReLU(),
        RowParallelLinear(32 * world_size, 32, group=group, fp8="rowwise"),
    )
    found = []
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        x = _random(4, 32, seed=1).requires_grad_()
        if dynamic:
            torch._dynamo.mark_dynamic(x, 0)
        out = run(x)
        out.square().sum().backward()
        found.append([out, x.grad, *map(_own_gradient, model.parameters())])
    torch.compiler.reset()
    return [
        f"{i}: error {relative_error(one, other)}"
        for i, (one, other) in enumerate(zip(*found, strict=True))
        if not relative_error(one, other) < _SAME
    ]


def autocast_and_checkpoint(world_size: int) -> Faults:
    """Faults of dtypes under autocast, and of gradients under activation checkpointing."""
    group = group_of(world_size)
    if group is None:
        return None
    layer = ColumnParallelLinear(32, 16 * world_size, group=group, fp8="rowwise")
    x = _random(4, 32, seed=1).requires_grad_()
    grads = []
    for checkpointed in (False, True):
        layer.zero_grad()
        x.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            if checkpointed:
                out = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            else:
                out = layer(x)
        out.float().square().sum().backward()
        grads.append([x.grad, *map(_own_gradient, layer.parameters())])
    faults = [] if out.dtype == torch.bfloat16 else [f"out: {out.dtype}"]
    for one, other in zip(*grads, strict=True):
        assert one is not None and other is not None
        if one.dtype != torch.float32 or not torch.equal(one, other):
            faults.append(f"gradient: {one.dtype}, {relative_error(one, other)}")
    return faults


def nothing(world_size: int) -> Faults:
    """Faults of layers that are given no rows, and of frozen ones."""
    group = group_of(world_size)
    if group is None:
        return None
    faults = []
    for layer, features in (
        (ColumnParallelLinear(32, 16 * world_size, group=group, fp8="rowwise"), 32),
        (RowParallelLinear(16 * world_size, 32, group=group, fp8="tensorwise"), 16),
        (RowParallelLinear(16 * world_size, 32, group=group, fp8="block"), 16),
        (GatedMLP(32, 16 * world_size, group=group, fp8="rowwise"), 32),
        (GatedMLP(32, 16 * world_size, group=group, fp8="block"), 32),
    ):
        x = torch.ones(0, features, requires_grad=True)
        layer(x).sum().backward()
        with torch.no_grad():
            layer(x)
        if any(_own_gradient(p).any() for p in layer.parameters()):
            faults.append(f"{layer}: gradients of no rows")
        layer.requires_grad_(False)
        x = _random(world_size, features, seed=1).requires_grad_()
        layer(x).sum().backward()
        if x.grad is None or not x.grad.any():
            faults.append(f"{layer}: no gradient of x of a frozen layer")
    return faults


def bad(kind: str) -> str:
    """What a layer or a style says that is given what it cannot take."""
    group = group_of(2)
    if group is None:
        return ""
    mesh = DeviceMesh.from_group(group, "cpu")
    linear = torch.nn.Linear(32, 32)

    def styled(module: torch.nn.Module, style: Any) -> object:
        return parallelize_module(module, mesh, style)

    calls: dict[str, Callable[[], object]] = {
        "name": lambda: ColumnParallelLinear(32, 32, group=group, fp8="row"),
        "in": lambda: ColumnParallelLinear(24, 32, group=group, fp8="rowwise"),
        "out": lambda: ColumnParallelLinear(32, [32, 48], group=group, fp8="rowwise"),
        "row in": lambda: RowParallelLinear(48, 32, group=group, fp8="rowwise"),
        "saved": lambda: ColumnParallelLinear(
            32, 32, group=group, fp8="rowwise", save_gathered=True
        ),
        "float64": lambda: RowParallelLinear(
            32, 32, group=group, fp8="rowwise", dtype=torch.float64
        )(torch.ones(2, 16, dtype=torch.float64)),
        "style size": lambda: styled(torch.nn.Linear(32, 48), GatherColwiseParallel(fp8="rowwise")),
        "style saved": lambda: styled(
            linear, GatherColwiseParallel(fp8="rowwise", save_gathered=True)
        ),
        "other recipe": lambda: styled(
            converted(linear, "tensorwise"), RowwiseScatterParallel(fp8="rowwise")
        ),
        "mixed": lambda: styled(
            torch.nn.Sequential(linear, converted(torch.nn.Linear(32, 32), "rowwise")),
            SharedGatherParallel("0", "1"),
        ),
        "fsdp": lambda: styled(
            converted(linear, "tensorwise", enable_fsdp_float8_all_gather=True),
            GatherColwiseParallel(),
        ),
        "disabled": lambda: styled(_without_forward(linear), GatherColwiseParallel()),
    }
    try:
        calls[kind]()
    except agmm.InvalidArgument as error:
        return str(error)
    return "no error"


def _without_forward(linear: torch.nn.Module) -> torch.nn.Module:
    with _quiet():
        from torchao.float8.config import CastConfig, ScalingType

        off = CastConfig(ScalingType.DISABLED, target_dtype=torch.float8_e4m3fn)
    return converted(linear, "tensorwise", cast_config_input=off, cast_config_weight=off)


def quantised_by_torchao(style: str) -> str:
    """With which words a style refuses a linear whose weight torchao has quantised."""
    with _quiet():
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        module = torch.nn.Sequential(torch.nn.Linear(32, 32)).bfloat16()
        quantize_(module, Int8WeightOnlyConfig())
    mesh = mesh_over(tuple(range(dist.get_world_size())))
    try:
        parallelize_module(module, mesh, {"0": getattr(agmm.nn, style)()})
    except InvalidArgument as error:
        return str(error).rpartition(": weight: ")[2]
    return "nothing was refused"
