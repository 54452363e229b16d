"""A mixture of experts in the place of a transformer layer's feed-forward half."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from agmm.errors import InvalidArgument
from agmm.nn.experts import Experts
from agmm.nn.mlp import GatedMLP
from agmm.nn.router import Choices, RouterLoad, TopKRouter, load_of
from agmm.ops.checks import check_operand
from agmm.runtime.epilogues import GatedActivation


class MoE(torch.nn.Module):
    """A router, the experts that it chooses from, and perhaps one that all tokens see.

    Each rank has its shard of the tokens, and some of the experts, or a slice of each.

    Args:
        hidden_features: K, the size of a token and of the result.
        inner_features: of each expert.
        num_experts: how many there are on all ranks.
        k: how many experts `TopKRouter` gives each token; None with a ``router``.
        router: a module that returns `Choices` of tokens [tokens, hidden_features], or a tuple of
            the same, of which the scores may be left out. `TopKRouter` when None.
        score: of `TopKRouter`.
        normalised: of `TopKRouter`.
        scale: of `TopKRouter`.
        has_choice_bias: of `TopKRouter`.
        shared_features: the inner features of an expert that all tokens see, a `GatedMLP` whose
            result is added; a multiple of the world size. None for none.
        sliced: see `Experts`.
        activation: see `Experts`; the shared expert's too.
        capacity_factor: see `Experts`.
        group: process group, its name or a 1-D mesh; the default group when None.
        device_mesh: 1-D mesh, instead of ``group``; see `ColumnParallelLinear`.
        save_gathered: see `agmm.all_gather_grouped_matmul`.
        save_preactivation: see `agmm.all_gather_grouped_matmul`.
        strict: see `agmm.all_gather_grouped_matmul`.
        fp8: see `Experts`; the shared expert is not quantised.
        device: of the parameters.
        dtype: of the parameters.

    Attributes:
        router: `TopKRouter`, or the one that was given.
        experts: `Experts`.
        shared_expert: `GatedMLP`, or None.

    Raises:
        InvalidArgument: both or none of ``k`` and ``router``, or what the parts refuse.
    """

    shared_expert: GatedMLP | None

    def __init__(
        self,
        hidden_features: int,
        inner_features: int,
        num_experts: int,
        k: int | None = None,
        *,
        router: torch.nn.Module | None = None,
        score: Literal["softmax", "sigmoid"] = "softmax",
        normalised: bool = True,
        scale: float = 1.0,
        has_choice_bias: bool = False,
        shared_features: int | None = None,
        sliced: bool = False,
        activation: GatedActivation = "silu_mul",
        capacity_factor: float | None = None,
        group: dist.ProcessGroup | DeviceMesh | str | None = None,
        device_mesh: DeviceMesh | None = None,
        save_gathered: bool = False,
        save_preactivation: bool = True,
        strict: bool = False,
        fp8: Literal["rowwise", "block"] | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if (k is None) == (router is None):
            found = "both k and router" if k is not None else "neither k nor router"
            raise InvalidArgument(f"{type(self).__name__}: found {found}, wanted one of the two")
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        if k is not None:
            router = TopKRouter(
                hidden_features,
                num_experts,
                k,
                score=score,
                normalised=normalised,
                scale=scale,
                has_choice_bias=has_choice_bias,
                **where,
            )
        where |= {"group": group, "device_mesh": device_mesh, "activation": activation}
        where |= {"save_gathered": save_gathered, "save_preactivation": save_preactivation}
        where["strict"] = strict
        self.router: Any = router
        self.experts = Experts(
            hidden_features,
            inner_features,
            num_experts,
            sliced=sliced,
            capacity_factor=capacity_factor,
            fp8=fp8,
            **where,
        )
        self.shared_expert = None
        if shared_features is not None:
            self.shared_expert = GatedMLP(hidden_features, shared_features, **where)

    @overload
    def forward(
        self,
        x: torch.Tensor,
        *,
        tokens_per_rank: Sequence[int] | None = ...,
        return_load: Literal[False] = ...,
    ) -> torch.Tensor: ...
    @overload
    def forward(
        self,
        x: torch.Tensor,
        *,
        tokens_per_rank: Sequence[int] | None = ...,
        return_load: Literal[True],
    ) -> tuple[torch.Tensor, RouterLoad]: ...
    def forward(
        self,
        x: torch.Tensor,
        *,
        tokens_per_rank: Sequence[int] | None = None,
        return_load: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, RouterLoad]:
        """The results for this rank's tokens. Collective.

        Args:
            x: [..., hidden_features], this rank's tokens.
            tokens_per_rank: how many tokens each rank holds, the same on all ranks; None where all
                hold as many as this one. Not with a shared expert.
            return_load: also return how the router spread this rank's tokens.

        Returns:
            A tensor of the shape of x; with ``return_load`` a tuple of it and the `RouterLoad`.

        Raises:
            InvalidArgument: names what was found and what the layer wants.
        """
        if tokens_per_rank is not None and self.shared_expert is not None:
            raise InvalidArgument(
                f"{type(self).__name__}: tokens_per_rank: found {list(tokens_per_rank)} with a "
                "shared expert, wanted None: its gather takes the same number of each rank"
            )
        check_operand(f"{type(self).__name__}: x", x)
        if x.dim() < 2:
            raise InvalidArgument(
                f"{type(self).__name__}: x: found {x.dim()} dimensions, wanted at least 2, tokens "
                "and features"
            )
        if x.shape[-1] != self.experts.hidden_features:
            raise InvalidArgument(
                f"{type(self).__name__}: x: found {x.shape[-1]} features, wanted "
                f"{self.experts.hidden_features}"
            )
        tokens = x.flatten(0, -2)
        choices = Choices(*self.router(tokens))
        out = self.experts(
            tokens, choices.topk_ids, choices.topk_weights, tokens_per_rank=tokens_per_rank
        )
        if self.shared_expert is not None:
            out = out + self.shared_expert(tokens)
        out = out.view(x.shape)
        return (out, load_of(choices, self.experts.num_experts)) if return_load else out
