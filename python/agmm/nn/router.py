"""Routers, which choose the experts of each token, and how evenly they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from agmm.collectives import all_reduce
from agmm.errors import InvalidArgument

_SCORES = ("softmax", "sigmoid")


class Choices(NamedTuple):
    """What a router says of each token."""

    topk_weights: torch.Tensor
    """[tokens, k]: what the results of the chosen experts are multiplied by."""
    topk_ids: torch.Tensor
    """int32 or int64 [tokens, k]: the chosen experts; below 0 for none."""
    scores: torch.Tensor | None = None
    """[tokens, experts]: the scores of all experts, for `RouterLoad`."""


class RouterLoad(NamedTuple):
    """How a router spread this rank's tokens over all experts: what losses and biases that balance
    the experts are made of."""

    tokens_per_expert: torch.Tensor
    """int64 [experts]: how many choices of this rank's tokens each expert has."""
    scores_per_expert: torch.Tensor | None
    """[experts]: the sum of each expert's scores over this rank's tokens, with a gradient; None
    where the router gives no scores."""
    tokens: int
    """How many tokens this rank has."""


def load_of(choices: Choices, num_experts: int) -> RouterLoad:
    """The load that a router's choices make; nothing waits for a GPU."""
    ids = choices.topk_ids.detach().flatten().long()
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    counts = counts.scatter_add(0, ids.clamp(min=-1) + 1, torch.ones_like(ids))[1:]
    scores = None if choices.scores is None else choices.scores.sum(0)
    return RouterLoad(counts, scores, choices.topk_ids.shape[0])


def load_balance_loss(
    load: RouterLoad, group: dist.ProcessGroup | DeviceMesh | str | None = None
) -> torch.Tensor:
    """This rank's part of the loss by which Switch Transformers balance their experts. Collective.

    The sum over the ranks is ``experts * sum(f * P)`` over the experts, where f is the expert's
    share of all choices, and P the mean of its scores over the tokens of all ranks. It is 1 where
    choices and scores (of a softmax) are even. The gradient of each rank's part is that of the sum,
    so add it, times a coefficient, to the rank's part of the other loss.

    Args:
        load: what `MoE` returns.
        group: the layer's ranks: a process group, its name or a 1-D DeviceMesh; the default group
            when None.

    Raises:
        InvalidArgument: the router gives no scores.
    """
    scores = load.scores_per_expert
    if scores is None:
        raise InvalidArgument(
            "load: found no scores_per_expert, wanted a router that returns its scores"
        )
    counts = load.tokens_per_expert.to(scores.dtype)
    total: Any = all_reduce(torch.cat([counts, counts.new_full((1,), load.tokens)]), group)
    counts, tokens = total[:-1], total[-1]
    shares = counts / counts.sum().clamp(min=1)
    mean: torch.Tensor = (shares * scores).sum() / tokens.clamp(min=1)
    return mean * len(counts)


class TopKRouter(torch.nn.Module):
    """A linear whose k largest scores are a token's experts.

    Its weight is a plain parameter, the same on all ranks, which each rank applies to its own
    tokens: its gradient is added up by `sum_replicated_gradients`.

    Args:
        hidden_features: K, the size of a token.
        num_experts: how many experts there are on all ranks.
        k: how many of them a token gets.
        score: ``"softmax"`` over all experts, or ``"sigmoid"`` of each.
        normalised: whether the k weights of a token are divided by their sum.
        scale: what the weights are multiplied by at last.
        has_choice_bias: whether there is a buffer ``choice_bias`` [experts], zeros at first, that
            is added to the scores for the choice alone. What balances experts without a loss
            changes it, from `RouterLoad`.
        device: of the parameters.
        dtype: of the weight.

    Attributes:
        weight: [experts, hidden_features].

    Raises:
        InvalidArgument: another score, or a k that is not within 1 and the number of experts.
    """

    choice_bias: torch.Tensor | None

    def __init__(
        self,
        hidden_features: int,
        num_experts: int,
        k: int,
        *,
        score: Literal["softmax", "sigmoid"] = "softmax",
        normalised: bool = True,
        scale: float = 1.0,
        has_choice_bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if score not in _SCORES:
            raise InvalidArgument(
                f"TopKRouter: score: found {score!r}, wanted one of {', '.join(_SCORES)}"
            )
        if not 1 <= k <= num_experts:
            raise InvalidArgument(
                f"TopKRouter: k: found {k}, wanted 1 to {num_experts}, the number of experts"
            )
        self.num_experts, self.k = num_experts, k
        self.score, self.normalised, self.scale = score, normalised, scale
        shape = num_experts, hidden_features
        self.weight = torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        bias = torch.zeros(num_experts, dtype=torch.float32, device=device)
        self.register_buffer("choice_bias", bias if has_choice_bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight as ``torch.nn.Linear`` draws its own; ``choice_bias`` becomes 0."""
        bound = self.weight.shape[1] ** -0.5
        torch.nn.init.uniform_(self.weight, -bound, bound)
        if self.choice_bias is not None:
            self.choice_bias.zero_()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Moves and converts the module; ``choice_bias`` stays float32, since 16 bits would round
        its small steps away."""
        bias = self.choice_bias
        super()._apply(fn, recurse)
        moved = self.choice_bias
        if bias is not None and moved is not None and moved.dtype != bias.dtype:
            self.choice_bias = bias.to(moved.device)
        return self

    def forward(self, x: torch.Tensor) -> Choices:
        """The experts of tokens [tokens, hidden_features], with their weights; scores and weights
        are float32, or float64 for float64."""
        logits = torch.nn.functional.linear(x, self.weight)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
        chosen = scores if self.choice_bias is None else scores + self.choice_bias
        ids = chosen.detach().topk(self.k, -1).indices
        weights = scores.gather(-1, ids)
        if self.normalised:
            smallest = torch.finfo(weights.dtype).tiny
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=smallest)
        return Choices(weights * self.scale, ids, scores)

    def extra_repr(self) -> str:
        return (
            f"hidden_features={self.weight.shape[1]}, num_experts={self.num_experts}, k={self.k}, "
            f"score={self.score}, normalised={self.normalised}, scale={self.scale}"
        )
