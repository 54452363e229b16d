"""What the tests of vLLM's released files run, in ranks of their own.

vLLM's files are imported as they are, but for four that its linears only name: ROCm's ops, parsers
of answers, executors and quantisation on load, which import most of the package. Its platform is
the unspecified one, whose linears multiply as those of CUDA do.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import framework_stubs
import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional

import agmm
from agmm.errors import forget_warnings
from agmm.integrations import async_tp
from agmm.testing.reference import relative_error

ROWS, HIDDEN, HEADS, KV_HEADS, INNER, LAYERS = 16, 32, 8, 4, 64, 2
WIDTH = HIDDEN // HEADS

_IMPORTED = (
    "vllm.config",
    "vllm.distributed.parallel_state",
    "vllm.model_executor.layers.linear",
    "vllm.plugins",
)


def _random(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _left_out() -> list[ModuleType]:
    executor = SimpleNamespace(supports_async_scheduling=lambda: False)
    executor.get_class = lambda config: executor
    parser = {"ReasoningParser": None, "ReasoningParserManager": None}
    on_load = "vllm.model_executor.layers.quantization.online.fp8"
    return [
        framework_stubs.module(
            "vllm._aiter_ops", rocm_aiter_ops=SimpleNamespace(is_enabled=lambda: False)
        ),
        framework_stubs.module("vllm.reasoning", **parser),
        framework_stubs.module("vllm.v1.executor", Executor=executor),
        framework_stubs.module("vllm.v1.executor.abstract", Executor=executor),
        framework_stubs.module(on_load, OnlineLinearBase=type("OnlineLinearBase", (), {})),
    ]


@contextmanager
def _vllm(folder: Path, files: Path) -> Iterator[Any]:
    """vLLM with its groups of all ranks, after its own loader of plugins: its modules by their last
    names. A process has one vLLM, which defines ops of torch."""
    modules = {one.__name__: one for one in _left_out()}
    environment = {
        "AGMM_VLLM": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "agmm",
    }
    sys.path.insert(0, str(files))
    with framework_stubs.installed(folder, modules, {}, environment):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # theirs
            importlib.import_module("vllm.platforms").current_platform.device_type = "cpu"
            found = {name.rpartition(".")[2]: importlib.import_module(name) for name in _IMPORTED}
            config = found["config"].VllmConfig()
        vllm, world_size, rank = SimpleNamespace(**found), dist.get_world_size(), dist.get_rank()
        with vllm.config.set_current_vllm_config(config):
            vllm.parallel_state.init_distributed_environment(
                world_size, rank, local_rank=rank, backend="gloo"
            )
            vllm.parallel_state.initialize_model_parallel(world_size, backend="gloo")
            forget_warnings()
            vllm.plugins.load_general_plugins()
            try:
                yield vllm
            finally:
                vllm.parallel_state.destroy_model_parallel()
    if async_tp.is_enabled():
        async_tp.disable()


class _Model(torch.nn.Module):
    """Layers of attention and a gated feed-forward, whose linears are given."""

    def __init__(self, linears: Callable[[int], dict[str, torch.nn.Module]], ranks: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.ModuleDict(linears(i)) for i in range(LAYERS))
        self.heads = [n // ranks for n in (HEADS, KV_HEADS, KV_HEADS)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(LAYERS):
            layer: Any = self.layers[i]
            qkv = layer["qkv"](functional.rms_norm(x, (HIDDEN,)))
            q, k, v = (
                one.unflatten(-1, (-1, WIDTH)).transpose(0, 1)
                for one in qkv.split([n * WIDTH for n in self.heads], -1)
            )
            groups = HEADS // KV_HEADS
            k, v = (one.repeat_interleave(groups, 0) for one in (k, v))
            context = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + layer["o"](context.transpose(0, 1).flatten(1))
            gate, up = layer["gate_up"](functional.rms_norm(x, (HIDDEN,))).chunk(2, -1)
            x = x + layer["down"](functional.silu(gate) * up)
        return x


_SHAPES = {
    "q": (HIDDEN, HIDDEN),
    "k": (KV_HEADS * WIDTH, HIDDEN),
    "v": (KV_HEADS * WIDTH, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate": (INNER, HIDDEN),
    "up": (INNER, HIDDEN),
    "down": (HIDDEN, INNER),
}


def _weights(i: int) -> dict[str, torch.Tensor]:
    return {
        name: _random(*shape, seed=10 * i + n) / shape[1] ** 0.5
        for n, (name, shape) in enumerate(_SHAPES.items())
    }


def _whole(i: int) -> dict[str, torch.nn.Module]:
    weights, found = _weights(i), {}
    packed = {"qkv": "q k v", "o": "o", "gate_up": "gate up", "down": "down"}
    for name, parts in packed.items():
        weight = torch.cat([weights[part] for part in parts.split()])
        found[name] = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        found[name].weight = torch.nn.Parameter(weight)
    return dict(found)


def _of_vllm(linear: Any) -> Callable[[int], dict[str, torch.nn.Module]]:
    """vLLM's linears, which load their shards of the weights by themselves."""

    def made(i: int) -> dict[str, torch.nn.Module]:
        weights, plain = _weights(i), {"bias": False, "return_bias": False}
        found = {
            "qkv": linear.QKVParallelLinear(HIDDEN, WIDTH, HEADS, KV_HEADS, **plain),
            "o": linear.RowParallelLinear(HIDDEN, HIDDEN, **plain),
            "gate_up": linear.MergedColumnParallelLinear(HIDDEN, [INNER, INNER], **plain),
            "down": linear.RowParallelLinear(INNER, HIDDEN, **plain),
        }
        for name in ("o", "down"):
            weight = found[name].weight
            weight.weight_loader(weight, weights[name])
        for name, parts in (("qkv", "qkv"), ("gate_up", ("gate", "up"))):
            weight = found[name].weight
            for n, part in enumerate(parts):
                weight.weight_loader(weight, weights[part], part if name == "qkv" else n)
        return found

    return made


def _calls() -> dict[str, int]:
    """How many calls of each op agmm has computed."""
    found: dict[str, int] = {}
    for one in agmm.status().calls:
        if one.is_by_agmm:
            found[one.op] = found.get(one.op, 0) + one.count
    return found


def linears(folder: Path, files: Path) -> list[str]:
    """Faults of a model of vLLM's linears against the whole one, in eager and compiled."""
    x = _random(ROWS, HIDDEN, seed=99)
    wanted = _Model(_whole, 1)(x).detach()
    faults = []
    with _vllm(folder, files) as vllm, torch.no_grad():
        model = _Model(_of_vllm(vllm.linear), dist.get_world_size())
        for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
            with agmm.record(folder / f"{dist.get_rank()}.json"):  # counts repeated calls, too
                before = _calls().get("matmul_all_reduce", 0)
                out = run(x.float())
                made = _calls().get("matmul_all_reduce", 0) - before
            error = relative_error(out, wanted)
            if error > 1e-5:
                faults.append(f"error {error}")
            if made != 2 * LAYERS:
                faults.append(f"{made} calls of agmm, wanted {2 * LAYERS}")
        torch.compiler.reset()
        return faults + _faults_of_options(vllm.linear)


def _faults_of_options(linear: Any) -> list[str]:
    """Faults of a row-parallel linear beside the class of vLLM that agmm's stands in for."""
    faults: list[str] = []
    registry = importlib.import_module("vllm.model_executor.custom_op").op_registry_oot
    if list(registry) != ["RowParallelLinear"]:
        faults.append(f"registered: {list(registry)}")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    whole, bias, x = (
        _random(*shape, seed=i).float()
        for i, shape in enumerate([(HIDDEN, INNER), (HIDDEN,), (ROWS, INNER)])
    )
    for options in (
        {},
        {"skip_bias_add": True},
        {"return_bias": False, "input_is_parallel": False},
        {"bias": False, "reduce_results": False},
        {"disable_tp": True},
    ):
        given = {"input_is_parallel": True, **options}
        is_part = given["input_is_parallel"] and not options.get("disable_tp", False)
        part = x.chunk(world_size, -1)[rank] if is_part else x
        outs = []
        for registered in (dict(registry), {}):  # agmm's class, then vLLM's
            before = dict(registry)
            registry.clear()
            registry.update(registered)
            layer = linear.RowParallelLinear(INNER, HIDDEN, **given)
            layer.weight.weight_loader(layer.weight, whole)
            if layer.bias is not None:
                layer.bias.weight_loader(layer.bias, bias)
            outs.append(layer(part))
            registry.clear()
            registry.update(before)
        found, wanted = ([out] if torch.is_tensor(out) else list(out) for out in outs)
        if [one is None for one in found] != [one is None for one in wanted] or any(
            relative_error(one, other) > 1e-5
            for one, other in zip(found, wanted, strict=True)
            if one is not None
        ):
            faults.append(f"{options}: {found}, wanted {wanted}")
    return faults


def fused_by_a_pass(folder: Path, files: Path) -> list[str]:
    """Faults of a graph whose matmuls vLLM 0.31's own pass has fused with its collectives."""
    x, up, down = (
        _random(*shape, seed=i).bfloat16()
        for i, shape in enumerate([(ROWS, HIDDEN), (HIDDEN, INNER), (INNER, HIDDEN)])
    )
    wanted = functional.relu(x.double() @ up.double()) @ down.double()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with _vllm(folder, files) as vllm, torch.no_grad():
        group = vllm.parallel_state.get_tp_group()
        given = {"dim": 0, "world_size": world_size, "group_name": group.unique_name}

        def sublayer(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
            hidden = functional.relu(torch.ops.vllm.all_gather(x, **given) @ up)
            out: torch.Tensor = torch.ops.vllm.reduce_scatter(hidden @ down, **given)
            return out

        config = vllm.config.get_current_vllm_config()
        config.model_config = SimpleNamespace(dtype=torch.bfloat16)
        fusion = importlib.import_module("vllm.compilation.passes.fusion.collective_fusion")
        fuse = fusion.AsyncTPPass(config)

        def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            fuse(graph.graph)
            graph.recompile()
            return graph

        compiled = torch.compile(
            sublayer, backend=aot_autograd(fw_compiler=compiler), fullgraph=True
        )
        shards = x.chunk(world_size)[rank], up.chunk(world_size, 1)[rank]
        with agmm.record(folder / f"{rank}.json"):
            out = compiled(*shards, down.chunk(world_size)[rank])
            made = _calls()
        torch.compiler.reset()
    faults, calls = [], {"all_gather_matmul": 1, "matmul_reduce_scatter": 1}
    if fuse.matched_count != 2 or made != calls:
        faults.append(f"{fuse.matched_count} matches, {made} by agmm, wanted {calls}")
    error = relative_error(out, wanted.chunk(world_size)[rank])
    return faults if error < 0.03 else [*faults, f"error {error}"]
