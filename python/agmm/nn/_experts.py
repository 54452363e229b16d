"""What layers and styles with stacked experts share: how they are called, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement, Shard

from agmm.errors import InvalidArgument
from agmm.nn.fp8_recipe import WHY_NOT_SAVED
from agmm.ops.grouped_matmuls import all_gather_grouped_matmul, grouped_matmul_reduce_scatter
from agmm.runtime.epilogues import GATED, GatedActivation


class Way(NamedTuple):
    """How experts are divided and called.

    Attributes:
        sliced: whether each rank has a slice of every expert's inner features; else some experts.
        capacity_factor: how many times the mean of the ranks' rows a rank has room for; None for
            the worst case.
        fp8: the kind of the scales with which the forward quantises its operands; None for none.
    """

    sliced: bool = False
    activation: GatedActivation = "silu_mul"
    capacity_factor: float | None = None
    save_gathered: bool = False
    save_preactivation: bool = True
    strict: bool = False
    fp8: Literal["rowwise", "block"] | None = None

    def why_not(self) -> str | None:
        """What is wrong in itself, or None."""
        if self.activation not in GATED:
            return f"activation: found {self.activation!r}, wanted one of {', '.join(GATED)}"
        if self.fp8 not in (None, "rowwise", "block"):
            return f"fp8: found {self.fp8!r} for experts, wanted 'rowwise', 'block' or None"
        if self.fp8 and self.save_gathered:
            return WHY_NOT_SAVED
        factor = self.capacity_factor
        if factor is None:
            return None
        if self.sliced:
            return (
                f"capacity_factor: found {factor!r} with sliced experts, wanted None: every rank "
                "has the rows of all tokens"
            )
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 0:
            return f"capacity_factor: found {factor!r}, wanted a number larger than 0"
        return None

    def placements(self) -> tuple[Placement, Placement]:
        """How gate and up [experts, inner, hidden] lie over the ranks, and how down [experts,
        hidden, inner] does."""
        return (Shard(1), Shard(2)) if self.sliced else (Shard(0), Shard(0))

    def capacity(self, tokens: int, k: int, ranks: int) -> int | None:
        """The rows that a rank has room for; None for the worst case."""
        if self.capacity_factor is None:
            return None
        return min(tokens * k, math.ceil(self.capacity_factor * tokens * k / ranks))


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a parameter, which a wrapper may have made a plain tensor."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def through_experts(
    x: torch.Tensor,
    choices: tuple[torch.Tensor, torch.Tensor],
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ranks: tuple[dist.ProcessGroup | str, int],
    way: Way,
    num_experts: int,
    tokens_per_rank: Sequence[int] | None,
) -> torch.Tensor:
    """The weighted sum of the results of each token's experts.

    Args:
        x: [tokens of this rank, hidden].
        choices: ids and weights of the router, [tokens of this rank, k] each.
        weights: this rank's gate, up and down, [experts, K, N] each.
        ranks: what the ops take as the group, and its size.
    """
    (topk_ids, topk_weights), (gate, up, down), (group, size) = choices, weights, ranks
    tokens = size * x.shape[0] if tokens_per_rank is None else sum(tokens_per_rank)
    y, routing = all_gather_grouped_matmul(
        x,
        [gate, up],
        topk_ids,
        group,
        num_experts=num_experts,
        capacity=way.capacity(tokens, topk_ids.shape[-1], size),
        tokens_per_rank=tokens_per_rank,
        activation=way.activation,
        strict=way.strict,
        save_gathered=way.save_gathered,
        save_preactivation=way.save_preactivation,
        quantize=way.fp8,
    )
    return grouped_matmul_reduce_scatter(
        y, down, routing, topk_weights, group, strict=way.strict, quantize=way.fp8
    )


def why_not_shared(way: Way, num_experts: int, inner: int, ranks: int) -> str | None:
    """Why the ranks cannot share the experts equally, or None."""
    name, size = ("inner_features", inner) if way.sliced else ("num_experts", num_experts)
    if size % ranks:
        return f"{name}: found {size}, wanted a multiple of {ranks} ranks"
    return None


def check_tokens(what: str, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
    """Refuses choices that are not those of the tokens.

    Args:
        what: the layer, for the message.
        x: [tokens, hidden].
    """
    for name, tensor in (("topk_ids", ids), ("topk_weights", weights)):
        if tensor.dim() != 2 or tensor.shape[0] != x.shape[0]:
            raise InvalidArgument(
                f"{what}: {name}: found shape {tuple(tensor.shape)}, wanted a row for each of the "
                f"{x.shape[0]} tokens of x"
            )
