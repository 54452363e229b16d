"""What the tests of the plugins for serving frameworks run inside the ranks of a pool."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import framework_stubs
import torch
import torch.distributed as dist
import vllm_double

import agmm
from agmm.errors import forget_warnings
from agmm.integrations import async_tp
from agmm.testing.reference import relative_error

ROWS, K, N = 12, 32, 24


def _random(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@contextmanager
def _counting(folder: Path, *ops: str) -> Iterator[list[int]]:
    """The list has afterwards how many calls of each op agmm has computed in it."""

    def calls(op: str) -> int:
        return sum(one.count for one in agmm.status().calls if one.op == op and one.is_by_agmm)

    made: list[int] = []
    with agmm.record(folder / "calls.json"):  # which counts calls that are made again, too
        before = [calls(op) for op in ops]
        yield made
        made += [calls(op) - count for op, count in zip(ops, before, strict=True)]


def _load(group: str) -> list[str]:
    """Loads the plugins as the frameworks do, twice, as may happen. What they warn of."""
    forget_warnings()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for entry in importlib.metadata.entry_points(group=group, name="agmm"):
                entry.load()()
    return sorted({str(warning.message) for warning in caught})


def _vllm_linear(**options: Any) -> Any:
    linear = importlib.import_module("vllm.model_executor.layers.linear")
    layer = linear.RowParallelLinear(K, N, **options)
    weight, bias = _random(N, K, seed=1), _random(N, seed=2)
    with torch.no_grad():
        layer.weight.copy_(weight.chunk(layer.tp_size, -1)[layer.tp_rank])
        if layer.bias is not None:
            layer.bias.copy_(bias)
    return layer


def vllm_layer(folder: Path, options: dict[str, Any], compiled: bool) -> list[str]:
    """Faults of a row-parallel linear against the whole one."""
    given = folder, vllm_double.modules(), {"vllm": "0.33.0"}, {"AGMM_VLLM": "1"}
    with framework_stubs.installed(*given):
        faults = _load("vllm.general_plugins")
        layer = _vllm_linear(**options)
        run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
        x = _random(ROWS, K, seed=3)
        shard = x.chunk(layer.tp_size, -1)[layer.tp_rank] if layer.input_is_parallel else x
        with _counting(folder, "matmul_all_reduce") as made, torch.no_grad():
            found = run(shard.float())
    torch.compiler.reset()
    served = options.get("reduce_results", True) and not options.get("disable_tp", False)
    if made != [int(served)]:
        faults.append(f"{made} calls of agmm, wanted {int(served)}")
    weight, bias = _random(N, K, seed=1), _random(N, seed=2)
    inputs, ranks = x, slice(None)
    if not options.get("reduce_results", True):
        width = K // dist.get_world_size()
        ranks = slice(dist.get_rank() * width, (dist.get_rank() + 1) * width)
    wanted = inputs[:, ranks] @ weight[:, ranks].t()
    out, left = found if options.get("return_bias", True) else (found, None)
    if layer.skip_bias_add != (left is not None) and layer.return_bias:
        faults.append(f"bias: {left}")
    if layer.bias is not None and not layer.skip_bias_add:
        wanted += bias
    error = relative_error(out, wanted)
    return faults if error < 1e-5 else [*faults, f"error {error}"]


def vllm_left(folder: Path, kind: str) -> list[str]:
    """What is said of a linear that vLLM keeps."""
    modules = vllm_double.modules(batch_invariant=kind == "batch invariant")
    quantized = vllm_double.QuantizedLinearMethod() if kind == "quantised" else None
    with framework_stubs.installed(folder, modules, {"vllm": "0.32.0"}, {"AGMM_VLLM": "1"}):
        said = _load("vllm.general_plugins")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            layer = _vllm_linear(quant_config=quantized)
        with _counting(folder, "matmul_all_reduce") as made:
            layer(torch.ones(ROWS, K // layer.tp_size))
        said += [str(warning.message) for warning in caught]
    return said if made == [0] else [*said, f"{made} calls of agmm"]


def vllm_plugin(folder: Path, version: str, value: str, other: bool) -> tuple[list[str], str]:
    """What is warned of, and who serves."""
    modules = vllm_double.modules()
    with framework_stubs.installed(folder, modules, {"vllm": version}, {"AGMM_VLLM": value}):
        registry = modules["vllm.model_executor.custom_op"].op_registry_oot
        if other:
            registry["RowParallelLinear"] = SimpleNamespace
        said = _load("vllm.general_plugins")
        served = [found.__module__ for found in registry.values()]
    if async_tp.is_enabled():
        async_tp.disable()
        served.append("async_tp")
    return said, " ".join(served)


def _sglang() -> dict[str, ModuleType]:
    """SGLang's package with its own files, but what imports CUDA or all of SGLang."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    package = framework_stubs.module("sglang")
    package.__path__ = list(spec.submodule_search_locations)
    group = SimpleNamespace(
        world_size=dist.get_world_size(),
        rank_in_group=dist.get_rank(),
        device_group=dist.group.WORLD,
        all_gather_into_tensor=dist.all_gather_into_tensor,
    )
    context = {"tp_group": group, "enable_layernorm_sp": True}
    stubs = [
        package,
        framework_stubs.module(
            "sglang.srt.runtime_context",
            get_flags=lambda: SimpleNamespace(sp=SimpleNamespace(enabled=True)),
            get_forward=dict,
            get_parallel=lambda: SimpleNamespace(**context),
        ),
        framework_stubs.module("sglang.srt.utils"),
        framework_stubs.module(
            "sglang.srt.utils.common", ceil_align=lambda n, step: -(-n // step) * step
        ),
        framework_stubs.module("sglang.srt.layers.quantization"),
        framework_stubs.module(
            "sglang.srt.layers.quantization.unquant",
            UnquantizedLinearMethod=vllm_double.UnquantizedLinearMethod,
        ),
    ]
    return {one.__name__: one for one in stubs}


def sglang_layers(folder: Path, rows: int, on: bool) -> list[str]:
    """Faults of SGLang's two linears with sequence parallelism against the whole ones, after its
    own loader of plugins."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    environment = {"AGMM_SGLANG": str(int(on)), "SGLANG_PLUGINS": "agmm"}
    ops = ("all_gather_matmul", "matmul_reduce_scatter")
    with framework_stubs.installed(folder, _sglang(), {}, environment):
        importlib.import_module("sglang.srt.plugins").load_plugins()
        sp = importlib.import_module("sglang.srt.layers.layernorm_sp")
        is_on = async_tp.is_enabled()
        # Without agmm torch has no kernel of these ops for the CPU.
        with nullcontext() if on else async_tp.enable(), torch.no_grad():
            x, up, down = _random(rows, K, seed=4), _random(N, K, seed=5), _random(K, N, seed=6)
            part = up.chunk(world_size)[rank], down.chunk(world_size, -1)[rank]
            shard = sp.sp_entry_scatter(x.bfloat16())
            with _counting(folder, *ops) as made:
                hidden = sp.column_parallel_g_matmul(_sglang_linear(part[0]), shard, None)
                out = sp.row_parallel_gbar_matmul(_sglang_linear(part[1]), hidden, None)
            whole = sp.sp_exit_gather(out, num_tokens=rows)
    async_tp.disable()
    faults = [] if is_on == on else [f"agmm serves: {is_on}"]
    if made != [1, 1]:
        faults.append(f"calls of agmm: {made}")
    error = relative_error(whole, x @ up.t() @ down.t())
    return faults if error < 0.03 else [*faults, f"error {error}"]


def _sglang_linear(weight: torch.Tensor) -> Any:
    method = sys.modules["sglang.srt.layers.quantization.unquant"].UnquantizedLinearMethod()
    return SimpleNamespace(
        weight=weight.bfloat16().contiguous(),
        bias=None,
        quant_method=method,
        tp_group=SimpleNamespace(world_size=dist.get_world_size()),
    )
