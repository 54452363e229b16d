"""Stacked gated experts, of which each rank has some, or a slice of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from agmm.errors import InvalidArgument
from agmm.nn._experts import Way, check_tokens, local_part, through_experts, why_not_shared
from agmm.nn._held import Held, local_values
from agmm.nn._parameters import ShardedModule
from agmm.ops.checks import check_operand
from agmm.runtime.epilogues import GatedActivation

_NAMES = ("gate_proj", "up_proj", "down_proj")


class Experts(ShardedModule):
    """The experts of a mixture, each ``down(activation(gate(x)) * up(x))``.

    Tokens are sharded over the ranks. One gather brings them to their experts, one scatter brings
    back to each token's rank the sum of the results, weighted by the router
    (`agmm.all_gather_grouped_matmul`, `agmm.grouped_matmul_reduce_scatter`).

    Args:
        hidden_features: K, the size of a token and of the result.
        inner_features: of each expert's gate and up; of ``sliced`` experts a multiple of the world
            size.
        num_experts: how many there are on all ranks; a multiple of the world size, but of
            ``sliced`` experts.
        sliced: give each rank a slice of the inner features of every expert, in place of some of
            the experts: the ranks then have equally much to do whatever the router chooses, and
            smaller matrices.
        activation: ``"silu_mul"`` (SwiGLU), ``"gelu_mul"`` or ``"gelu_tanh_mul"``.
        capacity_factor: how many times the mean of all ranks' rows a rank has room for; more are an
            error on all ranks. When None there is room for the worst case, all choices of all
            tokens.
        group: process group, its name or a 1-D mesh; the default group when None.
        device_mesh: 1-D mesh, instead of ``group``; see `ColumnParallelLinear`.
        save_gathered: see `agmm.all_gather_grouped_matmul`.
        save_preactivation: see `agmm.all_gather_grouped_matmul`.
        strict: see `agmm.all_gather_grouped_matmul`.
        fp8: quantise the operands of the forward, ``"rowwise"`` or ``"block"``, as ``quantize`` of
            `agmm.all_gather_grouped_matmul`. The backward has them as they are.
        device: of the parameters.
        dtype: of the parameters.

    Attributes:
        gate_proj: DTensor [num_experts, inner_features, hidden_features], Shard(0) over the ranks;
            Shard(1) where the experts are sliced.
        up_proj: DTensor, as gate_proj.
        down_proj: DTensor [num_experts, hidden_features, inner_features], Shard(0) over the ranks;
            Shard(2) where the experts are sliced.

    Raises:
        InvalidArgument: sizes that the ranks cannot share, an activation of another name, or what
            `ColumnParallelLinear` refuses of a group or mesh.
    """

    gate_proj: DTensor
    up_proj: DTensor
    down_proj: DTensor

    def __init__(
        self,
        hidden_features: int,
        inner_features: int,
        num_experts: int,
        *,
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
        super().__init__(group, device_mesh)
        self.way = Way(
            sliced, activation, capacity_factor, save_gathered, save_preactivation, strict, fp8
        )
        self.hidden_features, self.inner_features = hidden_features, inner_features
        self.num_experts = num_experts
        size = self._world_size
        fault = self.way.why_not() or why_not_shared(self.way, num_experts, inner_features, size)
        if fault is not None:
            raise InvalidArgument(f"{type(self).__name__}: {fault}")
        self._make_parameters(device, dtype)

    @torch.inference_mode(False)  # else a layer that was made under it could not be trained
    def _make_parameters(self, device: Any, dtype: torch.dtype | None) -> None:
        first, last = self.way.placements()
        for name in _NAMES:
            placement = last if name == "down_proj" else first
            self.held[name] = Held((name,), (self.num_experts,), placement)
            shard = torch.empty(self._shape_here(name), device=device, dtype=dtype)
            self._register(name, shard, placement)
        self._settle()
        self.reset_parameters()

    def _whole_shape(self, name: str) -> list[int]:
        inner, hidden = self.inner_features, self.hidden_features
        return [self.num_experts, *((hidden, inner) if name == "down_proj" else (inner, hidden))]

    def _shape_here(self, name: str) -> list[int]:
        shape, placement = self._whole_shape(name), self.held[name].placement
        assert isinstance(placement, Shard)
        shape[placement.dim] //= self._world_size
        return shape

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw gate, then up, then down, expert by expert, each as the weight of a
        ``torch.nn.Linear``.

        Every rank draws all of them, so that the ranks agree when their seeds do.
        """
        for name in _NAMES:
            shard = local_values(self.get_parameter(name))
            if shard.is_meta:
                return
            _, rows, columns = self._whole_shape(name)
            drawn = torch.empty((rows, columns), device=shard.device, dtype=shard.dtype)
            for expert in range(self.num_experts):
                torch.nn.init.uniform_(drawn, -(columns**-0.5), columns**-0.5)
                self._copy_expert(shard, expert, drawn, self.held[name].placement)

    def _copy_expert(
        self, shard: torch.Tensor, expert: int, whole: torch.Tensor, placement: Placement
    ) -> None:
        """Copies what this rank holds of one expert's matrix."""
        assert isinstance(placement, Shard)
        if placement.dim:
            shard[expert].copy_(whole.chunk(self._world_size, placement.dim - 1)[self.rank])
        elif expert // len(shard) == self.rank:
            shard[expert % len(shard)].copy_(whole)

    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """This rank's gate, up and down, [experts, K, N] each."""
        gate, up, down = (self._operand(name) for name in _NAMES)
        return gate, up, down

    def _operand(self, name: str) -> torch.Tensor:
        parameter: Any = getattr(self, name)  # a wrapper may have put a plain tensor in its place
        if isinstance(parameter, DTensor) and len(parameter.placements) > 1:
            self._refuse_placement(parameter)
        shard, wanted = local_part(parameter), self._shape_here(name)
        if list(shard.shape) != wanted:
            raise InvalidArgument(
                f"{type(self).__name__}: {name}: found {list(shard.shape)} on this rank, wanted "
                f"{wanted} ({self.held[name].placement} over the {self._world_size} ranks)"
            )
        return shard.transpose(1, 2)

    def forward(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        tokens_per_rank: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """For each of this rank's tokens the weighted sum of its experts' results. Collective.

        Args:
            x: [tokens, hidden_features], this rank's tokens.
            topk_ids: int32 or int64 [tokens, k], the experts of each; below 0 for none.
            topk_weights: [tokens, k], what each expert's result is multiplied by.
            tokens_per_rank: how many tokens each rank holds, the same on all ranks; None where all
                hold as many as this one.

        Returns:
            [tokens, hidden_features].

        Raises:
            InvalidArgument: names what was found and what the layer wants.
        """
        name = type(self).__name__
        check_operand(f"{name}: x", x)
        weights = self.operands()
        if x.dim() != 2 or x.shape[1] != self.hidden_features:
            raise InvalidArgument(
                f"{name}: x: found shape {tuple(x.shape)}, wanted (tokens, {self.hidden_features})"
            )
        check_tokens(name, x, topk_ids, topk_weights)
        return through_experts(
            x,
            (topk_ids, topk_weights),
            weights,
            (self.ranks.for_ops, self._world_size),
            self.way,
            self.num_experts,
            tokens_per_rank,
        )

    def extra_repr(self) -> str:
        return (
            f"hidden_features={self.hidden_features}, inner_features={self.inner_features}, "
            f"num_experts={self.num_experts}, sliced={self.way.sliced}, "
            f"activation={self.way.activation}, fp8={self.way.fp8}, world_size={self._world_size}"
        )
