"""Megatron's mixtures of experts over agmm's ops. It imports megatron.

Megatron's layer hands its dispatcher the tokens of this rank, its experts what the dispatcher makes
of them, and the dispatcher again what the experts return. With agmm the gather and the scatter are
part of the experts' ops, so the dispatcher passes the tokens on, with the experts that the router
has chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.moe import experts as kinds
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher

from agmm.errors import Unsupported, warn_once
from agmm.nn._experts import Way, through_experts
from agmm.runtime.epilogues import GatedActivation

_LEFT = "agmm leaves a mixture of experts to Megatron"

_ACTIVATIONS: dict[Any, GatedActivation] = {
    torch.nn.functional.silu: "silu_mul",
    torch.nn.functional.gelu: "gelu_mul",
}
"""The names of Megatron's ``activation_func``, with ``gated_linear_unit``."""

_OPTIONS = (
    "add_bias_linear",
    "activation_func_clamp_value",
    "glu_linear_offset",
    "use_te_activation_func",
    "moe_mlp_glu_interleave_size",
    "moe_apply_probs_on_input",
    "moe_latent_size",
    "fp8",
    "fp4",
)
"""Options of Megatron's config that ask of experts what agmm's ops do not do."""

_Weights = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _stacked(experts: Any) -> _Weights:
    first = torch.stack([one.linear_fc1.weight for one in experts.local_experts])
    gate, up = first.chunk(2, 1)
    down = torch.stack([one.linear_fc2.weight for one in experts.local_experts])
    return gate.transpose(1, 2), up.transpose(1, 2), down.transpose(1, 2)


def _viewed(experts: Any) -> _Weights:
    count, hidden = experts.num_local_experts, experts.config.hidden_size
    gate, up = experts.weight1.view(count, hidden, -1).chunk(2, -1)
    return gate, up, experts.weight2.view(count, -1, hidden)


_WEIGHTS: dict[type, Callable[[Any], _Weights]] = {kinds.SequentialMLP: _stacked}
"""How each class of Megatron's gives gate, up and down, [experts, K, N] each."""
if hasattr(kinds, "GroupedMLP"):  # which later versions of Megatron have not
    _WEIGHTS[kinds.GroupedMLP] = _viewed


class _Served(NamedTuple):
    """Experts that agmm computes."""

    experts: Any
    megatrons: Callable[..., Any]
    """Their own forward."""
    ranks: tuple[Any, int]
    """The group that tokens are gathered over, and its size."""
    way: Way

    def is_ready(self) -> bool:
        """Whether weights may be read without a call of the linears that hold them."""
        inner = list(self.experts.modules())[1:]
        return not any(module._forward_pre_hooks for module in inner)

    def forward(self, x: torch.Tensor, second: torch.Tensor, probs: torch.Tensor) -> Any:
        """The weighted sums of the results of each token's experts, where it is given this rank's
        tokens with the ids and the weights of their experts, [tokens, k] each. Megatron gives rows
        that it has sorted and how many each expert has, and gets its own results."""
        if second.dim() == 1:
            return self.megatrons(x, second, probs)
        weights = _WEIGHTS[type(self.experts)](self.experts)
        total = self.experts.config.num_moe_experts
        choices = second, probs
        return through_experts(x, choices, weights, self.ranks, self.way, total, None), None


class _Dispatcher(MoEAllGatherTokenDispatcher):  # type: ignore[misc]
    """Passes on this rank's tokens, and leaves the exchange to the experts."""

    router_topk: int
    routing_map: torch.Tensor | None

    def __init__(self, megatrons: Any, served: _Served) -> None:
        self.__dict__.update(vars(megatrons))
        self._served, self._passes = served, False

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> Any:
        """The tokens of this rank with the router's probabilities."""
        self._passes = self._served.is_ready()
        if self._passes:
            return hidden_states, probs
        why_not = "linears of its experts have hooks, as with overlap_param_gather"
        if self._served.way.strict:
            raise Unsupported(f"MoELayer: {why_not}; strict=True refuses Megatron")
        warn_once(f"{_LEFT}: {why_not}")
        return super().token_dispatch(hidden_states, probs)

    def dispatch_postprocess(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> Any:
        """The tokens of this rank, and of each the ids and the weights of its experts."""
        if not self._passes:
            return super().dispatch_postprocess(hidden_states, probs)
        assert self.routing_map is not None
        chosen, ids = self.routing_map.to(torch.uint8).topk(self.router_topk)
        is_none = chosen == 0  # of tokens that the router has dropped
        self.routing_map = None
        weights = probs.gather(1, ids).masked_fill(is_none, 0)
        return hidden_states, ids.masked_fill(is_none, -1), weights

    def combine_preprocess(self, hidden_states: torch.Tensor) -> Any:
        """The sums as they are."""
        return hidden_states if self._passes else super().combine_preprocess(hidden_states)

    def token_combine(self, hidden_states: torch.Tensor) -> Any:
        """The sums as they are."""
        return hidden_states if self._passes else super().token_combine(hidden_states)


def serve(model: torch.nn.Module, strict: bool) -> int:
    """Has agmm compute the experts of each layer where it can, and returns how many layers there
    are.

    Raises:
        Unsupported: a layer stays with Megatron, under ``strict``.
    """
    layers: list[Any] = [module for module in model.modules() if isinstance(module, MoELayer)]
    for layer in layers:
        dispatcher = layer.token_dispatcher
        if dispatcher.tp_ep_group.size() > 1 and not isinstance(dispatcher, _Dispatcher):
            why_not = _why_not(layer)
            if why_not is None:
                _serve(layer, strict)
            elif strict:
                raise Unsupported(f"MoELayer: {why_not}; strict=True refuses Megatron")
            else:
                warn_once(f"{_LEFT}: {why_not}")
    return len(layers)


def _serve(layer: Any, strict: bool) -> None:
    dispatcher, experts = layer.token_dispatcher, layer.experts
    group = dispatcher.tp_ep_group
    way = Way(
        sliced=dispatcher.tp_size > 1,
        activation=_ACTIVATIONS[layer.config.activation_func],
        strict=strict,
    )
    served = _Served(experts, experts.forward, (group, group.size()), way)
    experts.forward = served.forward
    layer.token_dispatcher = _Dispatcher(dispatcher, served)


def _why_not(layer: Any) -> str | None:
    config, dispatcher = layer.config, layer.token_dispatcher
    if type(layer.experts) not in _WEIGHTS:
        return f"its experts are a {type(layer.experts).__name__}"
    if config.moe_token_dispatcher_type != "allgather":
        return f"its dispatcher is {config.moe_token_dispatcher_type!r}, not 'allgather'"
    if dispatcher.tp_size > 1 and dispatcher.ep_size > 1:
        return "ranks share its experts and slices of each (expert_tensor_parallel_size)"
    if not config.gated_linear_unit or config.activation_func not in _ACTIVATIONS:
        return "its activation is not gated, or is neither silu nor gelu"
    if config.recompute_granularity == "selective" and "moe_act" in config.recompute_modules:
        return "its activation is computed again in the backward (moe_act)"
    asked = [name for name in _OPTIONS if getattr(config, name, None)]
    return f"agmm's experts have no {', '.join(asked)}" if asked else None
