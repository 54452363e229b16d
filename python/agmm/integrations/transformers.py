"""Tensor parallelism of transformers by agmm.

    from agmm.integrations import transformers as by_agmm

    by_agmm.enable()  # all-reduces of every plan, forward and backward
    model = AutoModelForCausalLM.from_pretrained(
        path, distributed_config=DistributedConfig(tp_plan="auto")
    )

With sequence parallelism the plan is another one, and there is no more to do:

    config = DistributedConfig(tp_plan=by_agmm.sequence_plan(path))
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=config)
"""

from __future__ import annotations

import copy
import os
from typing import Any

import torch

from agmm.errors import InvalidArgument
from agmm.integrations.clients import Client, Replaced
from agmm.integrations.transformers_styles import (
    LAST_NORM,
    LAYER,
    LINEAR_STYLES,
    NORM,
    SEQUENCE_STYLES,
    SUBLAYER,
    LinearStyle,
    SequenceStyle,
)

__all__ = ["disable", "enable", "is_enabled", "sequence_plan"]

_CLIENT = Client("transformers", (5, 17), (5, 24), "5.24.0")

_replaced = Replaced()


def _registry() -> Any:
    """transformers' parallel styles by name.

    Raises:
        InvalidArgument: transformers is missing, or of a version that is not known to work.
    """
    _CLIENT.check()
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    return ALL_PARALLEL_STYLES


def enable() -> None:
    """Makes agmm serve the linears of every tensor-parallel plan that is applied from now on.

    Column-wise and row-wise ``torch.nn.Linear`` multiply and sum by `agmm.matmul_all_reduce`, the
    former in their backward. Other modules, and linears whose size does not divide by the ranks,
    keep transformers' own styles.

    Raises:
        InvalidArgument: transformers is missing, or of a version that is not known to work.
    """
    registry = _registry()
    if _replaced:
        return
    _replaced.keep((name, registry[name]) for name in LINEAR_STYLES)
    for name in LINEAR_STYLES:
        registry.register(name, LinearStyle(name, registry[name]))
    for name, forward in SEQUENCE_STYLES.items():
        registry.register(name, SequenceStyle(forward))


def disable() -> None:
    """Gives transformers its own styles back. Models that are sharded already stay as they are."""
    if _replaced:
        _replaced.give_back(_registry().register)


def is_enabled() -> bool:
    """Whether agmm serves plans that are applied now."""
    return bool(_replaced)


def _skeleton(given: Any) -> Any:
    """A model without memory, of which the names are asked."""
    import transformers

    if isinstance(given, str | os.PathLike):
        given = transformers.AutoConfig.from_pretrained(given)
    if not isinstance(given, transformers.PretrainedConfig):
        raise InvalidArgument(
            f"model: found {type(given).__name__}, wanted a model of transformers, its config, or "
            "where AutoConfig finds that"
        )
    config = copy.deepcopy(given)
    names = [name for name in config.architectures or () if hasattr(transformers, name)]
    with torch.device("meta"):
        if names:
            return getattr(transformers, names[0])._from_config(config)
        return transformers.AutoModelForCausalLM.from_config(config)


def _is_norm(module: torch.nn.Module) -> bool:
    return type(module).__name__.endswith("Norm")


def _layers(model: torch.nn.Module, plan: dict[str, str]) -> tuple[str, torch.nn.Module]:
    """The list of layers that a plan shards, with its name."""
    names = sorted({key.partition(".*.")[0] for key in plan if ".*." in key})
    if len(names) != 1:
        raise InvalidArgument(
            f"model: found {names or 'no'} lists of layers in the plan of {type(model).__name__}, "
            "wanted one"
        )
    return names[0], model.get_submodule(names[0])


def sequence_plan(model: Any) -> dict[str, str]:
    """The plan of a decoder with sequence parallelism, for ``DistributedConfig(tp_plan=...)``.

    Between the linears, in norms and residual sums, each rank holds its shard of the rows.
    Attention and feed-forward sublayers gather and multiply by `agmm.all_gather_matmul`, and end in
    `agmm.matmul_reduce_scatter`; gradients of norms are summed in the backward. A sublayer with
    other sharded modules than column-wise and row-wise ``torch.nn.Linear``, as with experts, runs
    on all rows as it is. Below 128 rows (batch × sequence) every rank keeps all of them, as after
    `enable`, which this calls.

    Args:
        model: a model of transformers, its config, or the name or path of either.

    Raises:
        InvalidArgument: transformers is missing or of another version, or the model is no decoder
            whose layers are norms and sublayers with one norm behind them.
    """
    enable()
    if not isinstance(model, torch.nn.Module):
        model = _skeleton(model)
    stock: dict[str, str] = dict(model.tp_plan or {})
    prefix, layers = _layers(model, stock)
    added = {f"{prefix}.*": LAYER}
    for layer in layers.children():
        if next(layer.parameters(recurse=False), None) is not None:
            raise InvalidArgument(
                f"model: found parameters of {type(layer).__name__} itself, wanted them in modules"
            )
        for name, child in layer.named_children():
            if next(child.parameters(), None) is not None:
                added[f"{prefix}.*.{name}"] = NORM if _is_norm(child) else SUBLAYER
    parent, _, own = prefix.rpartition(".")
    norms = [
        name
        for name, child in model.get_submodule(parent).named_children()
        if name != own and _is_norm(child)
    ]
    if len(norms) != 1:
        raise InvalidArgument(
            f"model: found {norms or 'no'} norms beside {prefix!r} in {type(model).__name__}, "
            "wanted one, which ends the layers"
        )
    added[f"{parent}.{norms[0]}" if parent else norms[0]] = LAST_NORM
    taken = sorted(added.keys() & stock.keys())
    if taken:
        raise InvalidArgument(
            f"model: found the style {stock[taken[0]]!r} on {taken[0]!r} in the plan of "
            f"{type(model).__name__}, wanted none"
        )
    return stock | added
