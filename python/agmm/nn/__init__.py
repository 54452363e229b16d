"""Tensor-parallel linear layers with sequence parallelism, over the ops of agmm."""

from __future__ import annotations

from agmm.nn.fp8_recipe import Fp8Cast, Fp8Recipe
from agmm.nn.gradients import clip_grad_norm_, sum_replicated_gradients
from agmm.nn.linear import ColumnParallelLinear, RowParallelLinear
from agmm.nn.mlp import GatedMLP
from agmm.nn.optimizer import parameter_groups
from agmm.nn.packed import UnpackedLinear
from agmm.nn.replicated import ReplicatedColwiseParallel, RowwiseAllReduceParallel
from agmm.nn.state_dict import full_state_dict, load_full_state_dict
from agmm.nn.styles import GatherColwiseParallel, RowwiseScatterParallel, SharedGatherParallel

__all__ = [
    "ColumnParallelLinear",
    "Fp8Cast",
    "Fp8Recipe",
    "GatedMLP",
    "GatherColwiseParallel",
    "ReplicatedColwiseParallel",
    "RowParallelLinear",
    "RowwiseAllReduceParallel",
    "RowwiseScatterParallel",
    "SharedGatherParallel",
    "UnpackedLinear",
    "clip_grad_norm_",
    "full_state_dict",
    "load_full_state_dict",
    "parameter_groups",
    "sum_replicated_gradients",
]
