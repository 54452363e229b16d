"""Tensor-parallel linears of Megatron-core by agmm.

    from agmm.integrations import megatron as by_agmm

    spec = by_agmm.served(get_gpt_layer_local_spec())
    model = GPTModel(config, spec, ...)

Or, for specs that are made by a provider, `spec_provider` takes the place of
``LocalSpecProvider()``. `serve_experts` has agmm serve the mixtures of experts of a model that
was built.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

from agmm.errors import InvalidArgument
from agmm.integrations.clients import Client

__all__ = ["serve_experts", "served", "spec_provider"]

_CLIENT = Client("megatron-core", (0, 16), (0, 19), "0.16.0")


def served(spec: Any, *, strict: bool = False) -> Any:
    """A copy of a spec of layers whose column- and row-parallel linears are agmm's.

    The linears are subclasses of Megatron's, with their parameters, checkpoints and arguments. With
    sequence parallelism they multiply by
    `agmm.all_gather_matmul` and `agmm.matmul_reduce_scatter`, without it by
    `agmm.matmul_all_reduce`, in the forward of one and the backward of the other. With
    ``gradient_accumulation_fusion`` the weight's gradient is added to ``main_grad`` by Megatron's
    kernel. Linears of experts, with a frozen weight, with deferred gradients of embeddings, or with
    what else agmm does not do, stay with Megatron, with one warning that names the reason.

    Args:
        spec: a ``ModuleSpec``, or what else Megatron builds layers from.
        strict: raise `agmm.Unsupported` where a linear would stay with Megatron, or a call of agmm
            would take its unfused path.

    Raises:
        InvalidArgument: megatron-core is missing, or of a version that is not known to work, or the
            spec has no linears of Megatron's own.
    """
    _CLIENT.check()
    from agmm.integrations import megatron_linear

    by_agmm = megatron_linear.classes(strict)
    found = _replaced(spec, by_agmm)
    if found is spec:
        wanted = " or ".join(kind.__name__ for kind in by_agmm)
        raise InvalidArgument(
            f"spec: found {type(spec).__name__} without linears of Megatron's own, wanted one with "
            f"{wanted}, as get_gpt_layer_local_spec has them"
        )
    return found


def spec_provider(*, strict: bool = False) -> Any:
    """Megatron's ``LocalSpecProvider`` with linears as `served` has them.

    Args:
        strict: see `served`.

    Raises:
        InvalidArgument: megatron-core is missing, or of a version that is not known to work.
    """
    _CLIENT.check()
    from agmm.integrations import megatron_linear

    return megatron_linear.SpecProvider(strict)


def serve_experts(model: Any, *, strict: bool = False) -> None:
    """Has agmm gather, multiply and scatter in the mixtures of experts of a model that Megatron has
    built.

    A layer whose dispatcher is ``"allgather"`` then calls `agmm.all_gather_grouped_matmul` and
    `agmm.grouped_matmul_reduce_scatter`, in place of Megatron's gathers, its experts and its
    reduce-scatter. Parameters, checkpoints and the router stay as they are. The ranks share whole
    experts (``expert_model_parallel_size``) or slices of each (``expert_tensor_parallel_size``).
    Layers that ask for what agmm does not do, such as biases, stay with Megatron, with one warning
    that names the reason.

    Args:
        model: a module with Megatron's ``MoELayer``; all ranks call it alike.
        strict: raise `agmm.Unsupported` where a layer would stay with Megatron, or a call of agmm
            would take its unfused path.

    Raises:
        InvalidArgument: megatron-core is missing, or of a version that is not known to work, or the
            model has no such layer.
    """
    _CLIENT.check()
    from agmm.integrations import megatron_moe

    if not megatron_moe.serve(model, strict):
        raise InvalidArgument(
            f"model: found {type(model).__name__} without mixtures of experts, wanted one with a "
            "MoELayer of Megatron"
        )


def _replaced(value: Any, by_agmm: dict[type, type]) -> Any:
    """The value itself where it holds nothing that is to be replaced."""
    if isinstance(value, type):
        return by_agmm.get(value, value)
    if isinstance(value, functools.partial):
        args, options = _replaced(value.args, by_agmm), _replaced(value.keywords, by_agmm)
        if args is value.args and options is value.keywords:
            return value
        return functools.partial(value.func, *args, **options)
    if isinstance(value, dict):
        items = {key: _replaced(one, by_agmm) for key, one in value.items()}
        return value if all(items[key] is value[key] for key in items) else items
    if type(value) in (list, tuple):
        ones = [_replaced(one, by_agmm) for one in value]
        same = all(one is other for one, other in zip(ones, value, strict=True))
        return value if same else type(value)(ones)
    if not dataclasses.is_dataclass(value):
        return value
    made = value
    for field in dataclasses.fields(value):
        old = getattr(value, field.name, None)
        new = _replaced(old, by_agmm)
        if new is not old:
            made = copy.copy(value) if made is value else made
            setattr(made, field.name, new)
    return made
