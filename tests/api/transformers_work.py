"""What the tests of transformers over agmm run inside the ranks of a pool."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import agmm.integrations.transformers as by_agmm
from agmm.integrations import transformers_styles
from agmm.nn import convert_plan
from agmm.testing.reference import relative_error

LIMIT = 2e-5
_LAYERS, _TOKENS = 2, 64
_SIZES: dict[str, Any] = {
    "vocab_size": _TOKENS,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}


def save_whole(family: str, folder: Path) -> None:
    """A tiny model of random weights."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**_SIZES)
    torch.manual_seed(5)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)


def _loaded(folder: Path, plan: Any = None) -> Any:
    import transformers
    from transformers.distributed import DistributedConfig

    given: dict[str, Any] = {}
    if plan is not None:
        os.environ["WORLD_SIZE"] = str(dist.get_world_size())
        given["distributed_config"] = DistributedConfig(tp_plan=plan)
    found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **given
    )
    return found.train()


def _plan(kind: str, folder: Path) -> Any:
    if kind == "sequence":
        return by_agmm.sequence_plan(folder)
    by_agmm.enable()
    return "auto"


def _tokens(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, _TOKENS, (batch, length), generator=generator)


def _full(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _counted(names: list[str]) -> Callable[[], dict[str, int]]:
    """How often the styles call those ops, until it is asked for."""
    given = {name: getattr(transformers_styles, name) for name in names}
    calls = dict.fromkeys(names, 0)

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return given[name](*args, **kwargs)

        return call

    for name in names:
        setattr(transformers_styles, name, counting(name))

    def found() -> dict[str, int]:
        for name in names:
            setattr(transformers_styles, name, given[name])
        return calls

    return found


def _trained(model: Any, tokens: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The logits and the gradients of a step."""
    out = model(input_ids=tokens, labels=tokens, use_cache=False)
    out.loss.backward()
    found = [("logits", out.logits.detach())]
    for name, parameter in model.named_parameters():
        grad = _full(parameter.grad)
        assert grad is not None, name
        found.append((f"gradient of {name}", grad))
    return found


def checkpoint(model: Any) -> None:
    newer = hasattr(model, "activation_checkpointing_enable")
    getattr(model, f"{'activation' if newer else 'gradient'}_checkpointing_enable")()


def training(folder: Path, kind: str, batch: int, length: int, checkpointing: bool) -> list[str]:
    """Faults of a step, and the calls of its forward."""
    whole, sharded = _loaded(folder), _loaded(folder, _plan(kind, folder))
    if checkpointing:
        checkpoint(sharded)
    tokens = _tokens(batch, length)
    wanted = _trained(whole, tokens)
    calls = _counted(["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
    try:
        found = _trained(sharded, tokens)
    finally:
        made = calls()
    layers = _LAYERS * (2 if checkpointing else 1)
    shared = kind == "sequence" and batch * length >= transformers_styles.FEW_ROWS
    sublayers = 1 if "Mixtral" in folder.name else 2  # whose linears are agmm's
    right = [sublayers * layers] * 2 + [0] if shared else [0, 0, sublayers * layers]
    faults = [] if list(made.values()) == right else [f"{made}, wanted {right}"]
    for (name, one), (other_name, other) in zip(found, wanted, strict=True):
        assert name == other_name
        error = relative_error(one, other)
        if error > LIMIT:
            faults.append(f"{name}: error {error}")
    return faults


def by_converted_plan(folder: Path) -> list[str]:
    """Faults of a step of a model to which torch has applied its own plan, converted."""
    whole, sharded = _loaded(folder), _loaded(folder)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = convert_plan(sharded, mesh, sharded.tp_plan, strict=True)
    parallelize_module(sharded, mesh, plan)
    tokens, faults = _tokens(2, 9), []
    for (name, one), (_, other) in zip(
        _trained(sharded, tokens), _trained(whole, tokens), strict=True
    ):
        if (error := relative_error(one, other)) > LIMIT:
            faults.append(f"{name}: error {error}")
    return faults


def generating(folder: Path, kind: str, length: int) -> list[str]:
    """Faults of tokens that are generated after prompts of two lengths."""
    whole, sharded = _loaded(folder).eval(), _loaded(folder, _plan(kind, folder)).eval()
    tokens = _tokens(2, length)
    mask = torch.ones_like(tokens)
    mask[0, : length // 3] = 0
    tokens[0, : length // 3] = 0
    given = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    wanted = whole.generate(tokens, **given)
    found = sharded.generate(tokens, **given)
    return [] if torch.equal(found, wanted) else [f"found {found}, wanted {wanted}"]


def saving(folder: Path, kind: str, target: Path) -> list[str]:
    """Faults of weights that were loaded in parts, changed and saved."""
    whole, sharded = _loaded(folder), _loaded(folder, _plan(kind, folder))
    with torch.no_grad():
        for model in (whole, sharded):
            for parameter in model.parameters():
                parameter.mul_(2)
    sharded.save_pretrained(target)
    dist.barrier()
    faults = []
    for again in (_loaded(target), _loaded(target, _plan(kind, target))):
        for (name, one), other in zip(again.named_parameters(), whole.parameters(), strict=True):
            value = _full(one.detach())
            assert value is not None
            if not torch.equal(value, other.detach()):
                faults.append(name)
    return faults


def stock_again(folder: Path) -> list[str]:
    """Whether agmm serves after `disable`."""
    by_agmm.enable()
    by_agmm.enable()
    on = by_agmm.is_enabled()
    by_agmm.disable()
    calls = _counted(["matmul_all_reduce"])
    try:
        _loaded(folder, "auto")(input_ids=_tokens(1, 4))
    finally:
        made = calls()
    return [] if on and not by_agmm.is_enabled() and made["matmul_all_reduce"] == 0 else [str(made)]


def two_forwards(folder: Path) -> list[str]:
    """Faults of gradients of two forwards of other shapes, before any backward."""
    whole, sharded = _loaded(folder), _loaded(folder, _plan("sequence", folder))
    checkpoint(sharded)
    given = _tokens(2, 70), _tokens(1, 140), _tokens(3, 50)
    for model in (whole, sharded):
        losses = [model(input_ids=t, labels=t, use_cache=False).loss for t in given]
        for loss in losses:
            loss.backward()
    faults = []
    for (name, one), other in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        grad = _full(one.grad)
        assert grad is not None and other.grad is not None
        error = relative_error(grad, other.grad)
        if error > LIMIT:
            faults.append(f"gradient of {name}: error {error}")
    return faults


def refused(given: Any) -> str:
    """The message with which a plan is refused."""
    try:
        by_agmm.sequence_plan(given)
    except ValueError as error:
        return str(error)
    return "nothing was refused"
