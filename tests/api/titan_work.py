"""What the test of torchtitan's linears over agmm runs inside the ranks of a pool."""

from __future__ import annotations

import dataclasses
import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import left_to_torch
import op_work
import torch
import torch.distributed as dist

from agmm.integrations import async_tp
from agmm.testing.reference import relative_error


@cache
def linears() -> ModuleType:
    """``torchtitan/distributed/linear.py`` as it was installed. By its path, since the package
    around it imports what torchtitan's trainer needs."""
    package = importlib.util.find_spec("torchtitan")
    assert package is not None and package.submodule_search_locations
    path = Path(package.submodule_search_locations[0]) / "distributed" / "linear.py"
    spec = importlib.util.spec_from_file_location("torchtitan_linear", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def mm_with_out_dtype() -> torch.library.Library | None:
    """torch.mm(..., out_dtype=...), with which torchtitan multiplies and of which torch has a CUDA
    kernel only: a CPU one, where this torch has none."""
    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm.dtype", "CPU"):
        return None
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm.dtype", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype), "CPU")
    return library


def override() -> list[str]:
    """Faults of torchtitan's own mechanism of overrides, given the line of a user."""
    from torchtitan.config import Configurable, OverrideConfig, apply_overrides
    from torchtitan.config.override import parse_cli_imports
    from torchtitan.tools.profiler import Profiler

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):  # type: ignore[misc]
        profiler: Profiler.Config = dataclasses.field(default_factory=Profiler.Config)

    config = Config()
    given, before = config.profiler, async_tp.is_enabled()
    imports = parse_cli_imports(["agmm.integrations.torchtitan.by_agmm"])
    lines = apply_overrides(OverrideConfig(imports=imports), config)
    on = async_tp.is_enabled()
    async_tp.disable()
    faults = [] if (before, on) == (False, True) else [f"agmm serves: {before}, {on}"]
    if config.profiler is not given:
        faults.append(f"profiler: {config.profiler}")
    return faults if len(lines) == 1 else [*faults, *lines]


def _leaf(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype).requires_grad_()


def run(world_size: int, which: str, dtype: torch.dtype) -> op_work.Result:
    """Faults of one of the linears, forward and backward, against the whole layer in float64."""
    group = op_work._prepare(world_size)
    if group is None:
        return None
    mm_with_out_dtype()
    rank, m, k, n = dist.get_rank(group), 3 * world_size, 4 * world_size, 5 * world_size
    x, ws, biases = (
        op_work._random((m, k), dtype, 1),
        [op_work._random((n, k), dtype, 2 + i) for i in range(2)],
        [op_work._random((n,), dtype, 4 + i) for i in range(2)],
    )
    douts = [op_work._random((m, n), dtype, 6 + i) for i in range(2)]
    gathers = which != "LinearReduceScatter"
    outputs = 2 if which == "AllGatherLinearMulti" else 1
    has_bias = outputs == 1

    def part(whole: torch.Tensor, dim: int) -> torch.Tensor:
        return whole.tensor_split(world_size, dim)[rank]

    wholes = [_leaf(t, torch.float64) for t in (x, *ws[:outputs], *biases[: int(has_bias)])]
    ends: list[Any] = wholes[1 + outputs :] or [None] * outputs
    wanted = [
        torch.nn.functional.linear(wholes[0], w, b)
        for w, b in zip(wholes[1 : 1 + outputs], ends, strict=True)
    ]
    torch.autograd.backward(wanted, [d.double() for d in douts[:outputs]])

    # Where the parts lie: x's rows and outputs' columns on the ranks, or the reverse.
    dims = [0, *[0] * outputs, 0] if gathers else [1, 1, None]
    leaves = [
        _leaf((t if dim is None else part(t, dim)).detach().clone(), dtype)
        for t, dim in zip(wholes, dims, strict=False)
    ]
    given: list[Any] = [*leaves, group, group.group_name]
    with left_to_torch.enabled() as left:
        found = getattr(linears(), which).apply(*given)
        outs = found if isinstance(found, tuple) else (found,)
        out_dim = 1 if gathers else 0
        torch.autograd.backward(outs, [part(d, out_dim).contiguous() for d in douts[:outputs]])
    faults = list(left)
    pairs = [
        (out, part(whole.detach(), out_dim), "output")
        for out, whole in zip(outs, wanted, strict=True)
    ]
    for leaf, whole, dim, name in zip(leaves, wholes, dims, ("x", "w", "w or bias"), strict=False):
        assert whole.grad is not None
        right = whole.grad if dim is None else part(whole.grad, dim)
        if leaf.grad is None or leaf.grad.dtype != dtype:
            faults.append(f"gradient of {name}: {leaf.grad}")
        else:
            pairs.append((leaf.grad, right, f"gradient of {name}"))
    for one, right, name in pairs:
        error = relative_error(one, right)
        if error > 8 * torch.finfo(min(dtype, torch.float32, key=lambda d: d.itemsize)).eps:
            faults.append(f"{which} {name}: error {error}")
    return faults
