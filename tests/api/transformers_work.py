"""What the tests of transformers over agmm run inside the ranks of a pool."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

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
    """How often the styles call those ops, and how often they have a gate computed, until it is
    asked for."""
    given = {name: getattr(transformers_styles, name) for name in names}
    calls = dict.fromkeys([*names, "gates"], 0)

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            calls["gates"] += bool(kwargs.get("activation"))
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
    found = {"logits": out.logits.detach()}
    for name, parameter in model.named_parameters():
        grad, pieces = _full(parameter.grad), name.split(".")
        assert grad is not None, name
        if pieces[-2].isdigit():  # a part of a packed linear
            name = ".".join([*pieces[:-2], pieces[-1]])
        label = f"gradient of {name}"
        found[label] = torch.cat([found[label], grad]) if label in found else grad
    return list(found.items())


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
    shared &= "Phi3" not in folder.name  # whose packed linears stay with transformers
    right = [sublayers * layers] * 2 + [0] if shared else [0, 0, sublayers * layers]
    right.append(layers if shared and not folder.name.startswith(("Mixtral", "Phi")) else 0)
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


def _on_all_rows(*results: Placement | None) -> Any:
    """A module that each rank runs on all rows, between a gather and its own shard."""
    wanted: Any = Shard(1), *results
    return PrepareModuleInputOutput(
        input_layouts=Shard(1),
        desired_input_layouts=Replicate(),
        use_local_input=True,
        output_layouts=(Replicate(), *results),
        desired_output_layouts=wanted,
        use_local_output=False,
    )


def _sequence_styles(model: Any) -> dict[str, Any]:
    """The plan of a decoder in torch's styles, with sequence parallelism. Activations between
    sublayers are DTensors, so any number of tokens will do."""
    by_columns: Any = ColwiseParallel()
    by_rows = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    layer: Any = model.model.layers[0]
    plan: dict[str, Any] = {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    }
    if hasattr(layer.mlp, "experts"):
        plan["mlp"] = _on_all_rows(*[None] * (type(layer.mlp).__name__ == "GptOssMLP"))
    for name, _ in layer.named_modules():
        last = name.rpartition(".")[2]
        if last in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1"):
            plan[name] = by_columns
        elif last in ("o_proj", "down_proj", "dense", "fc2"):
            plan[name] = by_rows
        elif last in ("q_norm", "k_norm"):
            plan[name] = "replicated_with_grad_allreduce"
        elif last.endswith("norm"):
            plan[name] = SequenceParallel()
    last_norm = "final_layernorm" if hasattr(model.model, "final_layernorm") else "norm"
    return {
        "model.embed_tokens": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
        ),
        **{f"model.layers.*.{name}": style for name, style in plan.items()},
        f"model.{last_norm}": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def by_torch_styles(folder: Path) -> list[str]:
    """Faults of steps, and of tokens that are generated, of a model whose plan in torch's styles
    was converted."""
    whole, sharded = _loaded(folder), _loaded(folder)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (ranks,))
    is_tied = sharded.lm_head.weight is sharded.model.embed_tokens.weight
    plan = convert_plan(sharded, mesh, _sequence_styles(sharded), strict=True)
    parallelize_module(sharded, mesh, plan)
    if is_tied:
        sharded.lm_head.weight = sharded.model.embed_tokens.weight
    for layer in sharded.model.layers:
        sinks = getattr(layer.self_attn, "sinks", None)  # one for each head
        if sinks is not None:
            layer.self_attn.sinks = torch.nn.Parameter(sinks.detach().chunk(ranks)[rank].clone())
    faults = []
    for batch, length in ((2, 4 * ranks), (1, 4 * ranks + 1), (2, 1)):
        tokens = _tokens(batch, length)
        pairs = zip(_trained(sharded, tokens), _trained(whole, tokens), strict=True)
        for (name, one), (_, other) in pairs:
            if "sinks" in name:
                other = other.chunk(ranks)[rank]
            is_defined = length > 1 or name == "logits"  # one token has no loss
            if is_defined and (error := relative_error(one, other)) > LIMIT:
                faults.append(f"{batch} x {length}: {name}: error {error}")
        whole.zero_grad()
        sharded.zero_grad()
    return faults + _generated(whole.eval(), sharded.eval(), 7)


def generating(folder: Path, kind: str, length: int) -> list[str]:
    """Faults of tokens that are generated after prompts of two lengths."""
    whole, sharded = _loaded(folder).eval(), _loaded(folder, _plan(kind, folder)).eval()
    return _generated(whole, sharded, length)


def _generated(whole: Any, sharded: Any, length: int) -> list[str]:
    tokens = _tokens(2, length)
    mask = torch.ones_like(tokens)
    mask[0, : length // 3] = 0
    tokens[0, : length // 3] = 0
    given = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    wanted = whole.generate(tokens, **given)
    found = sharded.generate(tokens, **given)
    return [] if torch.equal(found, wanted) else [f"found {found}, wanted {wanted}"]


def by_trainer(folder: Path, kind: str, target: Path) -> list[str]:
    """Faults of what transformers' trainer and accelerate make of a sharded model, in three steps
    of one batch."""
    import transformers

    tokens = _tokens(2, 70)
    whole, sharded = _loaded(folder), _loaded(folder, _plan(kind, folder))
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, weight_decay=0.0)
    wanted = []
    for _ in range(3):
        loss = whole(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(loss.item())
    rank = str(dist.get_rank())
    variables = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    options: dict[str, Any] = {"logging_steps": 1, "report_to": [], "disable_tqdm": True}
    options |= {"save_strategy": "no", "lr_scheduler_type": "constant"}
    # accelerate has tensor parallelism on devices alone.
    check = "accelerate.parallelism_config.ParallelismConfig._validate_accelerator"
    on_devices = mock.patch(check)
    with mock.patch.dict(os.environ, variables), on_devices, redirect_stdout(io.StringIO()):
        arguments = transformers.TrainingArguments(
            output_dir=str(target),
            per_device_train_batch_size=2,
            max_steps=3,
            use_cpu=True,
            learning_rate=1e-2,
            **options,
        )
        data = [{"input_ids": row, "labels": row} for row in tokens]
        trainer = transformers.Trainer(model=sharded, args=arguments, train_dataset=data)
        trainer.train()
    found = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    close = len(found) == 3 and torch.allclose(torch.tensor(found), torch.tensor(wanted), 1e-4)
    return [] if close else [f"losses {found}, wanted {wanted}"]


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
