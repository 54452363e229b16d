"""What the tests of PEFT over agmm run inside the ranks of a pool."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers_work
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

import agmm.integrations.peft as by_agmm
import agmm.integrations.transformers as transformers_by_agmm
from agmm.errors import InvalidArgument
from agmm.nn import (
    ColumnParallelLinear,
    GatherColwiseParallel,
    ReplicatedColwiseParallel,
    RowParallelLinear,
    RowwiseAllReduceParallel,
    RowwiseScatterParallel,
    SharedGatherParallel,
    sum_replicated_gradients,
)
from agmm.testing.reference import relative_error

LIMIT = 1e-10
TARGETS = ["up", "gate", "down"]

STYLES: dict[str, Callable[[], dict[str, Any]]] = {
    "sequence": lambda: {
        "up": GatherColwiseParallel(),
        "gate": GatherColwiseParallel(),
        "down": RowwiseScatterParallel(),
    },
    "rows first": lambda: {
        "up": GatherColwiseParallel(sequence_dim=0),
        "gate": GatherColwiseParallel(sequence_dim=0),
        "down": RowwiseScatterParallel(sequence_dim=0),
    },
    "shared gather": lambda: {
        "": SharedGatherParallel("up", "gate"),
        "down": RowwiseScatterParallel(),
    },
    "all rows": lambda: {
        "up": ReplicatedColwiseParallel(),
        "gate": ReplicatedColwiseParallel(),
        "down": RowwiseAllReduceParallel(),
    },
    "DTensors": lambda: {
        "up": GatherColwiseParallel(use_local_output=False),
        "gate": GatherColwiseParallel(use_local_output=False),
        "down": RowwiseScatterParallel(use_local_output=False),
    },
}


class Feed(torch.nn.Module):
    """Norm and feed-forward network."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        where: dict[str, Any] = {"dtype": torch.float64}
        self.norm = torch.nn.LayerNorm(16, **where)
        self.up = torch.nn.Linear(16, 24, bias, **where)
        self.gate = torch.nn.Linear(16, 24, bias, **where)
        self.down = torch.nn.Linear(24, 16, bias, **where)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        found: torch.Tensor = self.down(torch.tanh(self.up(normed)) * self.gate(normed))
        return found


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _with_layers(whole: Feed) -> Feed:
    """A copy of it whose linears are agmm's layers."""
    made = copy.deepcopy(whole)
    where: dict[str, Any] = {"dtype": torch.float64}
    for name in TARGETS:
        linear = whole.get_submodule(name)
        assert isinstance(linear, torch.nn.Linear)
        kind = RowParallelLinear if name == "down" else ColumnParallelLinear
        layer = kind(linear.in_features, linear.out_features, linear.bias is not None, **where)
        layer.load_state_dict(linear.state_dict())
        setattr(made, name, layer)
    return made


def _sharded(which: str, whole: Feed) -> Feed:
    if which == "layers":
        return _with_layers(whole)
    made = copy.deepcopy(whole)
    for name, style in STYLES[which]().items():
        parallelize_module(made, _mesh(), {name: style} if name else style)
    return made


def _dim(which: str) -> int | None:
    """The dimension whose rows the ranks share outside the linears."""
    return {"all rows": None, "layers": 0, "rows first": 0}.get(which, 1)


def _adapted(model: torch.nn.Module, **options: Any) -> Any:
    import peft

    torch.manual_seed(11)
    options = {"init_lora_weights": False, **options}
    return peft.get_peft_model(
        model, peft.LoraConfig(r=4, lora_alpha=6, target_modules=TARGETS, **options)
    )


def _own(x: torch.Tensor, dim: int | None) -> torch.Tensor:
    return x if dim is None else x.chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()


def _full(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _faults(pairs: dict[str, tuple[Any, Any]], limit: float = LIMIT) -> list[str]:
    return [
        f"{name}: {one} for {other}"
        for name, (one, other) in pairs.items()
        if one is None or other is None or relative_error(one.detach(), other.detach()) > limit
    ]


def _step(model: Any, x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, Any]:
    given = x.clone().requires_grad_()
    out = _local(model(given))
    (out * scale).sum().backward()
    return out, given.grad


def training(which: str, lora_bias: bool, folder: Path) -> list[str]:
    """Faults of outputs and gradients, merged and unmerged, saved and loaded."""
    by_agmm.enable()
    torch.manual_seed(3)
    plain = Feed(bias=True)
    dim = _dim(which)
    whole = _adapted(copy.deepcopy(plain), lora_bias=lora_bias)
    sharded = _adapted(_sharded(which, plain), lora_bias=lora_bias)
    x, scale = torch.randn(2, 4, 8, 16, dtype=torch.float64)[:, :, :4]
    x, scale = x.reshape(4, 4, 16), scale.reshape(4, 4, 16)
    wanted, dwanted = _step(whole, x, scale)
    found, dfound = _step(sharded, _own(x, dim), _own(scale, dim))
    if dim is not None:  # adapters' gradients are right already, and stay so
        sum_replicated_gradients(sharded)
    pairs = {"out": (found, _own(wanted, dim)), "x": (dfound, _own(dwanted, dim))}
    others = dict(whole.named_parameters())
    faults = []
    for name, parameter in sharded.named_parameters():
        if not parameter.requires_grad:
            continue
        pairs[f"gradient of {name}"] = _full(parameter.grad), others[name].grad
        pairs[name] = _full(parameter), others[name]
        if not isinstance(parameter, DTensor):
            faults.append(f"{name}: {type(parameter)}")
    if len(pairs) < 2 + 2 * 2 * len(TARGETS):
        faults.append(f"only {list(pairs)}")
    own = _own(x, dim)
    with torch.no_grad():
        for safe in (False, True):
            sharded.merge_adapter(safe_merge=safe)
            pairs[f"merged, {safe}"] = _local(sharded(own)), _own(wanted, dim)
            weight = sharded.base_model.model.up.base_layer.weight
            delta = whole.base_model.model.up.get_delta_weight("default")
            pairs[f"weight, {safe}"] = _full(weight), plain.up.weight + delta
            sharded.unmerge_adapter()
            pairs[f"unmerged, {safe}"] = _local(sharded(own)), _own(wanted, dim)
        with sharded.disable_adapter():
            pairs["without"] = _local(sharded(own)), _own(plain(x), dim)
        faults += _saved_and_loaded(which, plain, whole, sharded, folder, own)
        sharded = sharded.merge_and_unload()
        pairs["unloaded"] = _local(sharded(own)), _own(wanted, dim)
    return faults + _faults(pairs)


def rows_of_several_sizes(length: int) -> list[str]:
    """Faults of adapters on rows that the ranks cannot share evenly, which a DTensor has."""
    by_agmm.enable()
    torch.manual_seed(3)
    plain, mesh = Feed(bias=True), _mesh()
    whole = _adapted(copy.deepcopy(plain), lora_bias=True)
    sharded = copy.deepcopy(plain)
    plan = {"norm": SequenceParallel(), **STYLES["DTensors"]()}
    parallelize_module(sharded, mesh, plan)
    adapted = _adapted(sharded, lora_bias=True)
    x, scale = torch.randn(2, 2, length, 16, dtype=torch.float64)
    wanted, _ = _step(whole, x, scale)
    found = adapted(DTensor.from_local(x, mesh, [Replicate()]).redistribute(mesh, [Shard(1)]))
    (found.full_tensor() * scale).sum().backward()
    pairs = {"out": (_full(found), wanted)}
    others = dict(whole.named_parameters())
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            pairs[name] = _full(parameter.grad), others[name].grad
    return _faults(pairs)


def _saved_and_loaded(
    which: str, plain: Feed, whole: Any, sharded: Any, folder: Path, own: torch.Tensor
) -> list[str]:
    import peft
    from safetensors.torch import load_file

    is_first = dist.get_rank() == 0
    sharded.save_pretrained(folder / "sharded", is_main_process=is_first)
    if is_first:
        whole.save_pretrained(folder / "whole")
    dist.barrier()
    one = load_file(folder / "sharded" / "adapter_model.safetensors")
    other = load_file(folder / "whole" / "adapter_model.safetensors")
    pairs = {name: (one.get(name), value) for name, value in other.items()}
    for low in (False, True):
        again = peft.PeftModel.from_pretrained(
            _sharded(which, plain), folder / "whole", low_cpu_mem_usage=low
        )
        pairs[f"loaded, {low}"] = _local(again(own)), _local(sharded(own))
    return [] if one.keys() == other.keys() and not _faults(pairs) else [*one, *_faults(pairs)]


def with_dropout(which: str) -> list[str]:
    """Faults of a step with dropout, and of two adapters of which one is active."""
    by_agmm.enable()
    import peft

    torch.manual_seed(3)
    dim = _dim(which)
    model = _adapted(_sharded(which, Feed(bias=False)), lora_dropout=0.5)
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["down"]))
    x = torch.randn(4, 4, 16, dtype=torch.float64)
    torch.manual_seed(17)  # masks are the same where rows are
    _step(model, _own(x, dim), torch.ones((), dtype=torch.float64))
    faults = []
    for name, parameter in model.named_parameters():
        if isinstance(parameter.grad, DTensor):
            whole = _full(parameter.grad)
            if not torch.equal(whole, _agreed(whole)):
                faults.append(f"{name}: other gradients on other ranks")
        elif "default" in name:
            faults.append(f"{name}: no gradient")
    return faults


def _agreed(value: torch.Tensor) -> torch.Tensor:
    found = value.clone()
    dist.broadcast(found, 0)
    return found


def refused(kind: str) -> str:
    """The message of what is not served."""
    by_agmm.enable()
    import peft

    torch.manual_seed(3)
    plain = Feed(bias=False)
    try:
        if kind == "several":
            model = torch.nn.Sequential(ColumnParallelLinear(16, [8, 8]))
            peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"]))
        elif kind == "pissa":
            _adapted(_sharded("sequence", plain), init_lora_weights="pissa")
        else:
            model = _adapted(_sharded("all rows", plain)).eval()
            model(torch.randn(1, 2, 16, dtype=torch.float64), adapter_names=["default"])
    except InvalidArgument as error:
        return str(error)
    return ""


def given_back() -> bool:
    """Whether PEFT has its own methods again."""
    from peft.tuners.lora.model import LoraModel

    def own() -> list[bool]:
        methods = LoraModel._create_new_module, LoraModel._get_adapter_state_dict.__func__
        return [method.__module__ == LoraModel.__module__ for method in methods]

    by_agmm.enable()
    replaced = own()
    by_agmm.disable()
    return replaced == [False] * 2 and own() == [True] * 2 and not by_agmm.is_enabled()


def _causal_model(folder: Path, kind: str | None) -> Any:
    import transformers
    from transformers.distributed import DistributedConfig

    given: dict[str, Any] = {}
    if kind is not None:
        os.environ["WORLD_SIZE"] = str(dist.get_world_size())
        transformers_by_agmm.enable()
        plan = transformers_by_agmm.sequence_plan(folder) if kind == "sequence" else "auto"
        given["distributed_config"] = DistributedConfig(tp_plan=plan)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **given
    ).train()


def transformers_model(
    source: Path, kind: str, length: int, dropout: float, folder: Path
) -> list[str]:
    """Faults of adapters on a model of transformers."""
    import peft

    by_agmm.enable()
    options: dict[str, Any] = {
        "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
        "init_lora_weights": False,
        "lora_dropout": dropout,
    }

    def adapted(model: Any) -> Any:
        torch.manual_seed(11)
        return peft.get_peft_model(model, peft.LoraConfig(r=4, **options))

    whole, sharded = adapted(_causal_model(source, None)), adapted(_causal_model(source, kind))
    tokens = torch.randint(1, 64, (2, length), generator=torch.Generator().manual_seed(1))
    if dropout:  # which draws other masks where rows are shared
        whole.eval()
        sharded.eval()
    transformers_work.checkpoint(sharded.get_base_model())
    losses = []
    for model in (whole, sharded):
        out = model(input_ids=tokens, labels=tokens, use_cache=False)
        out.loss.backward()
        losses.append(out.logits)
    pairs = {"logits": (_full(losses[1]), losses[0])}
    others = dict(whole.named_parameters())
    for name, parameter in sharded.named_parameters():
        if parameter.requires_grad:
            pairs[f"gradient of {name}"] = _full(parameter.grad), others[name].grad
    assert len(pairs) > 20
    sharded.save_pretrained(folder / "sharded", is_main_process=dist.get_rank() == 0)
    dist.barrier()
    again = peft.PeftModel.from_pretrained(_causal_model(source, kind), folder / "sharded")
    with torch.no_grad():
        logits = again(input_ids=tokens, use_cache=False).logits
        pairs["loaded"] = _full(logits), losses[0]
        sharded.merge_adapter()
        pairs["merged"] = _full(sharded(input_ids=tokens, use_cache=False).logits), losses[0]
    given: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    generated = [model.eval().generate(input_ids=tokens, **given) for model in (whole, again)]
    if not torch.equal(*generated):
        return ["other tokens"]
    return _faults(pairs, 2e-5)
