"""What the tests of converted plans run inside the ranks of a pool of five."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_work import group_of
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import scaled_dot_product_attention, silu

import agmm
from agmm.errors import forget_warnings
from agmm.nn import GatherColwiseParallel, convert_plan
from agmm.testing.reference import relative_error

_WHERE: dict[str, Any] = {"dtype": torch.float64}
_WORDS, _HIDDEN, _SIZE, _LIMIT = 32, 24, 4, 1e-10


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq = torch.nn.Linear(_HIDDEN, 8 * _SIZE, **_WHERE)
        self.wk = torch.nn.Linear(_HIDDEN, 4 * _SIZE, bias=False, **_WHERE)
        self.wv = torch.nn.Linear(_HIDDEN, 4 * _SIZE, bias=False, **_WHERE)
        self.q_norm = torch.nn.RMSNorm(_SIZE, **_WHERE)
        self.wo = torch.nn.Linear(8 * _SIZE, _HIDDEN, **_WHERE)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, -1, _SIZE) for w in (self.wq, self.wk, self.wv))
        q = self.q_norm(q) * (scale.to_local() if isinstance(scale, DTensor) else scale)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        found: torch.Tensor = self.wo(out.transpose(1, 2).flatten(2))
        return found


class Feed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = torch.nn.Linear(_HIDDEN, 48, bias=False, **_WHERE)
        self.w3 = torch.nn.Linear(_HIDDEN, 48, bias=False, **_WHERE)
        self.w2 = torch.nn.Linear(48, _HIDDEN, bias=False, **_WHERE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.w2(silu(self.w1(x)) * self.w3(x))
        return found


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = torch.nn.RMSNorm(_HIDDEN, **_WHERE)
        self.attention = Attention()
        self.ffn_norm = torch.nn.RMSNorm(_HIDDEN, **_WHERE)
        self.feed_forward = Feed()

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), scale)
        found: torch.Tensor = x + self.feed_forward(self.ffn_norm(x))
        return found


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = torch.nn.Embedding(_WORDS, _HIDDEN, **_WHERE)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))
        self.norm = torch.nn.RMSNorm(_HIDDEN, **_WHERE)
        self.output = torch.nn.Linear(_HIDDEN, _WORDS, bias=False, **_WHERE)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, scale = self.tok_embeddings(ids), torch.ones(_SIZE, **_WHERE) * 1.5
        for layer in self.layers:
            x = layer(x, scale)
        found: torch.Tensor = self.output(self.norm(x))
        return found


def _gathered(*others: Placement | None) -> PrepareModuleInput:
    return PrepareModuleInput(
        input_layouts=(Shard(1), *others), desired_input_layouts=(Replicate(), *others)
    )


PLANS: dict[str, Callable[[], dict[str, Any]]] = {
    "torchtitan": lambda: {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        "layers.*.*_norm": SequenceParallel(),
        "layers.*.attention": _gathered(Replicate()),
        "layers.*.attention.w[qkv]": ColwiseParallel(),
        "layers.*.attention.q_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.feed_forward": _gathered(),
        "layers.*.feed_forward.w1": ColwiseParallel(),
        "layers.*.feed_forward.w3": ColwiseParallel(),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    },
    "all rows": lambda: {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
        "output": ColwiseParallel(output_layouts=Replicate()),
        "layers.*.attention.w[qkv]": ColwiseParallel(),
        "layers.*.attention.q_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
        "layers.*.attention.wo": RowwiseParallel(),
        "layers.*.feed_forward.w[13]": ColwiseParallel(),
        "layers.*.feed_forward.w2": RowwiseParallel(),
    },
    "transformers": lambda: {
        "tok_embeddings": "embedding_rowwise",
        "output": "colwise_gather_output",
        "norm": "replicate",
        "layers.*.attention.w[qkv]": "colwise",
        "layers.*.attention.q_norm": "replicated_with_grad_allreduce",
        "layers.*.attention.wo": "rowwise",
        "layers.*.feed_forward.w[13]": "colwise_gather_output",
        "layers.*.feed_forward.w2": "rowwise_split_input",
    },
}


def _full(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def against_whole(
    world_size: int, which: str, compiled: bool = False
) -> tuple[list[str], dict[str, str]] | None:
    """Faults of a model under a converted plan, and the styles of its first layer and its ends."""
    group = group_of(world_size)
    if group is None:
        return None
    mesh = DeviceMesh.from_group(group, "cpu")
    torch.manual_seed(3)
    whole = Model()
    sharded = copy.deepcopy(whole)
    plan = convert_plan(sharded, mesh, PLANS[which](), strict=True)
    parallelize_module(sharded, mesh, plan)
    ids = torch.randint(0, _WORDS, (2, 8))
    scale = torch.randn(2, 8, _WORDS, **_WHERE)
    run: Any = sharded
    if compiled:
        torch.compiler.reset()
        run = torch.compile(sharded, fullgraph=True, backend="aot_eager")
    wanted, found = whole(ids), run(ids)
    (wanted * scale).sum().backward()
    (found * scale).sum().backward()
    pairs = {"output": (found, wanted)}
    for (name, one), other in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        pairs[f"gradient of {name}"] = _full(one.grad), other.grad
    faults = [
        f"{name}: {one} for {other}"
        for name, (one, other) in pairs.items()
        if one is None or other is None or relative_error(one.detach(), other.detach()) > _LIMIT
    ]
    return faults, {name: repr(style) for name, style in plan.items() if "layers.1" not in name}


def exchanged(folder: str, which: str) -> list[str] | None:
    """Faults of checkpoints that models under torch's plan and under the converted plan write, each
    read by the other."""
    group = group_of(2)
    if group is None:
        return None
    mesh = DeviceMesh.from_group(group, "cpu")
    models = []
    for seed, is_converted in ((1, False), (2, True)):
        torch.manual_seed(seed)
        model = Model()
        plan = PLANS[which]()
        plan = convert_plan(model, mesh, plan, strict=True) if is_converted else plan
        models.append(parallelize_module(model, mesh, plan))
    faults: list[str] = []
    for writer, reader in (models, models[::-1]):
        saved, read = (_state(model) for model in (writer, reader))
        path = f"{folder}/{len(faults)}-{writer is models[0]}"
        dcp.save(saved, checkpoint_id=path, process_group=group)
        dcp.load(read, checkpoint_id=path, process_group=group)
        set_model_state_dict(reader, read["model"])
        for name, one in _state(writer)["model"].items():
            other = reader.state_dict()[name]
            same = type(one) is type(other) and torch.equal(_full(one), _full(other))
            if not same or getattr(one, "placements", 0) != getattr(other, "placements", 0):
                faults.append(f"{name}: found {other}, wanted {one}")
        with torch.no_grad():  # so that the second round has something to read
            for parameter in reader.parameters():
                parameter.mul_(2)
    return faults


def _state(model: torch.nn.Module) -> dict[str, Any]:
    return {"model": get_model_state_dict(model)}


_LAYOUTS = [Replicate(), Shard(1), Shard(-1)]


def _cases() -> list[ParallelStyle]:
    kinds: list[Any] = [ColwiseParallel, RowwiseParallel]
    return [
        kind(input_layouts=given, output_layouts=wanted, use_local_output=local)
        for kind in kinds
        for given in _LAYOUTS
        for wanted in _LAYOUTS
        for local in (False, True)
    ]


def _step(style: ParallelStyle, mesh: DeviceMesh, given: Placement) -> list[Any]:
    torch.manual_seed(5)
    linear = torch.nn.Linear(8, 16, **_WHERE)
    x = torch.randn(2, 4, 8, **_WHERE)
    parallelize_module(linear, mesh, {"": style})
    shard = DTensor.from_local(x, mesh, [Replicate()]).redistribute(mesh, [given]).to_local()
    shard = shard.detach().clone().requires_grad_()
    out: Any = linear(shard)
    layout = out.placements if isinstance(out, DTensor) else None
    local = out.to_local() if isinstance(out, DTensor) else out
    (local * torch.linspace(1, 2, local.shape[-1], **_WHERE)).sum().backward()
    return [layout, local.detach(), shard.grad, *(_full(p.grad) for p in linear.parameters())]


def layouts(world_size: int) -> list[str] | None:
    """Faults of every pair of layouts at the ends of a linear, against torch's own styles."""
    group = group_of(world_size)
    if group is None:
        return None
    mesh = DeviceMesh.from_group(group, "cpu")
    faults = []
    for style in _cases():
        made = convert_plan(torch.nn.Linear(8, 16), mesh, {"": style}, strict=True)[""]
        if not type(made).__module__.startswith("agmm."):
            faults.append(f"{style}: {made}")
        given: Any = style
        wanted = _step(style, mesh, given.input_layouts[0])
        found = _step(made, mesh, given.input_layouts[0])
        for one, other in zip(found, wanted, strict=True):
            if not isinstance(other, torch.Tensor):
                same = one == other or str(one) == str(other)
            else:
                same = one is not None and one.shape == other.shape and torch.allclose(one, other)
            if not same:
                faults.append(f"{style} by {made}: {one} for {other}")
    return faults


class _Odd(torch.nn.Linear):
    pass


class _Own(ParallelStyle):
    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        return module


class _Routed(torch.nn.Module):
    """A module whose input has a second taker, and one that takes two."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(hidden, 3)
        self.up = torch.nn.Linear(8, 8)
        self.other = torch.nn.Linear(6, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.up(x) * self.gate(x).sum(), y


def _left(kind: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    two = PrepareModuleInput(
        input_layouts=(Shard(1), Shard(1)), desired_input_layouts=(Replicate(), Replicate())
    )
    linear, columns, routed = torch.nn.Linear(8, 7), ColwiseParallel(), _Routed()
    cases: dict[str, Callable[[], tuple[torch.nn.Module, dict[str, Any]]]] = {
        "size": lambda: (linear, {"": columns}),
        "subclass": lambda: (_Odd(8, 8), {"": columns}),
        "partial": lambda: (linear, {"": RowwiseParallel(output_layouts=Partial())}),
        "unknown": lambda: (linear, {"": _Own()}),
        "nowhere": lambda: (routed, {"down.*": columns}),
        "router": lambda: (routed, {"": _gathered(None), "up": columns}),
        "two arguments": lambda: (routed, {"": two, "up": columns}),
        "features": lambda: (_Routed(4), {"": _gathered(None), "up": columns, "other": columns}),
        "outputs": lambda: (
            _Routed(4),
            {"": _gathered(None), "up": ColwiseParallel(output_layouts=Replicate())},
        ),
        "of features": lambda: (
            _Routed(4),
            {
                "": PrepareModuleInput(
                    input_layouts=(Shard(-1), None), desired_input_layouts=(Replicate(), None)
                ),
                "up": columns,
            },
        ),
        # These are refused.
        "packed": lambda: (linear, {"": "packed_colwise"}),
        "experts": lambda: (linear, {"": "moe_tp_experts"}),
        "name": lambda: (linear, {"": "diagonal"}),
        "type": lambda: (linear, {"": 3}),
        "module": lambda: (torch.nn.ReLU(), {"": columns}),
        "twice": lambda: (routed, {"up": columns, "u*": columns}),
    }
    return cases[kind]()


def left(kind: str) -> list[str]:
    """What is said of a plan, without `strict` and with it, and whether its styles are torch's."""
    group = group_of(2)
    if group is None:
        return []
    mesh = DeviceMesh.from_group(group, "cpu")
    module, plan = _left(kind)
    said: list[str] = []
    forget_warnings()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            kept = convert_plan(module, mesh, plan)
            said += [name for name, style in kept.items() if plan.get(name) is not style]
        except agmm.InvalidArgument as error:
            return [str(error)]
    said += [str(warning.message) for warning in caught]
    try:
        convert_plan(module, mesh, plan, strict=True)
    except agmm.Unsupported as error:
        said.append(str(error))
    return said


class _Held(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, scale: Any = None) -> torch.Tensor:
        found: torch.Tensor = self.up(x) * scale
        return found


def kept() -> dict[str, str]:
    """What becomes of styles that serve no linear, of agmm's own, and of a gather with more."""
    group = group_of(2)
    if group is None:
        return {}
    mesh = DeviceMesh.from_group(group, "cpu")
    own = GatherColwiseParallel()
    model = torch.nn.ModuleDict({"up": torch.nn.Linear(8, 8), "held": _Held(), "norm": _Held()})
    both = PrepareModuleInputOutput(
        input_kwarg_layouts={"x": Shard(1), "scale": Replicate()},
        desired_input_kwarg_layouts={"x": Replicate(), "scale": Replicate()},
        output_layouts=Shard(-1),
        desired_output_layouts=Replicate(),
    )
    behind = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
    plan = {
        "up": own,
        "held": both,
        "held.up": ColwiseParallel(use_local_output=False),
        "norm": behind,
    }
    made = convert_plan(model, mesh, plan, strict=True)
    assert made["up"] is own and made["norm"] is behind
    torch.manual_seed(1)
    held: Any = model["held"]
    x, scale = torch.randn(2, 4, 8), torch.full((2, 4, 8), 2.0)
    wanted = held.up(x) * 2
    parallelize_module(model, mesh, made)
    shard = x.chunk(2, 1)[dist.get_rank(group)].contiguous()
    torch.testing.assert_close(held(x=shard, scale=scale), wanted)
    return {name: type(style).__name__ for name, style in made.items()}


class _Crossed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = torch.nn.Linear(8, 8)
        self.key = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        query: torch.Tensor = self.query(x * 2)
        key: torch.Tensor = self.key(x if other is None else other)
        return query.sum() + key.sum()


def crossed() -> list[str]:
    """What a module says of which a linear takes its input, and of one that takes another."""
    group = group_of(2)
    if group is None:
        return []
    mesh = DeviceMesh.from_group(group, "cpu")
    said = []
    module, columns = _Crossed(), ColwiseParallel()
    plan = {"": _gathered(None), "query": columns, "key": columns}
    parallelize_module(module, mesh, convert_plan(module, mesh, plan, strict=True))
    for other in (None, torch.ones(1, 6, 8)):
        try:
            module(torch.ones(1, 2, 8), other)
            said.append("no error")
        except agmm.InvalidArgument as error:
            said.append(str(error))
    return said
