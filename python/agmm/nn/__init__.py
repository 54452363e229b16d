"""Tensor-parallel layers with sequence parallelism, over the ops of agmm: linears, and mixtures of
experts."""

from __future__ import annotations

from agmm.nn.convert import convert_plan
from agmm.nn.expert_style import ExpertParallel
from agmm.nn.experts import Experts
from agmm.nn.fp8_recipe import Fp8Cast, Fp8Recipe
from agmm.nn.gated_style import GatedGatherParallel, gated_plan
from agmm.nn.gradients import clip_grad_norm_, sum_replicated_gradients
from agmm.nn.linear import ColumnParallelLinear, RowParallelLinear
from agmm.nn.mlp import GatedMLP
from agmm.nn.moe import MoE
from agmm.nn.optimizer import parameter_groups
from agmm.nn.packed import UnpackedLinear
from agmm.nn.packed_style import PackedColwiseParallel
from agmm.nn.replicated import ReplicatedColwiseParallel, RowwiseAllReduceParallel
from agmm.nn.router import Choices, RouterLoad, TopKRouter, load_balance_loss
from agmm.nn.state_dict import full_state_dict, load_full_state_dict
from agmm.nn.styles import GatherColwiseParallel, RowwiseScatterParallel, SharedGatherParallel

__all__ = [
    "Choices",
    "ColumnParallelLinear",
    "ExpertParallel",
    "Experts",
    "Fp8Cast",
    "Fp8Recipe",
    "GatedGatherParallel",
    "GatedMLP",
    "GatherColwiseParallel",
    "MoE",
    "PackedColwiseParallel",
    "ReplicatedColwiseParallel",
    "RouterLoad",
    "RowParallelLinear",
    "RowwiseAllReduceParallel",
    "RowwiseScatterParallel",
    "SharedGatherParallel",
    "TopKRouter",
    "UnpackedLinear",
    "clip_grad_norm_",
    "convert_plan",
    "full_state_dict",
    "gated_plan",
    "load_balance_loss",
    "load_full_state_dict",
    "parameter_groups",
    "sum_replicated_gradients",
]
