"""Megatron-core's tensor parallelism by agmm, against Megatron's own linears."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable

import megatron_moe_work
import megatron_work
import pytest
import torch

import agmm.integrations.megatron as by_agmm
from agmm.errors import InvalidArgument
from agmm.testing.ranks import RankPool

Pools = Callable[..., RankPool]

needs_megatron = pytest.mark.skipif(
    not importlib.util.find_spec("megatron"),
    reason="needs megatron-core, in the version that `make test-clients` installs",
)


# `make test` runs the quickest of these tests, `make test-clients` all.
slow = pytest.mark.slow


def client(test: Callable[..., None]) -> Callable[..., None]:
    found: Callable[..., None] = pytest.mark.clients(needs_megatron(test))
    return found


@client
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=slow)])
@pytest.mark.parametrize("sequence", [True, pytest.param(False, marks=slow)])
@pytest.mark.parametrize(
    ("fused", "hooked", "bias", "by_provider"),
    [
        (False, False, False, False),
        pytest.param(False, False, True, False, marks=slow),
        pytest.param(True, False, True, False, marks=slow),
        pytest.param(True, True, False, False, marks=slow),
        pytest.param(False, False, True, True, marks=slow),
    ],
)
def test_a_model_is_that_of_megatron(
    rank_pools: Pools,
    sequence: bool,
    fused: bool,
    hooked: bool,
    bias: bool,
    by_provider: bool,
    world_size: int,
) -> None:
    given = sequence, fused, hooked, bias, by_provider
    assert rank_pools(world_size).run(megatron_work.gpt, *given) == [[]] * world_size


_REASONS = {
    "expert": "it is an expert's",
    "frozen": "its weight is frozen",
    "deferred": "the gradient of the embedding's weight is deferred",
    "disable_grad_reduce": "the gradient of its input is not to be summed (disable_grad_reduce)",
}


@slow
@client
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", list(_REASONS))
def test_what_stays_with_megatron_is_named(rank_pools: Pools, kind: str, strict: bool) -> None:
    found = rank_pools(2).run(megatron_work.left_to_megatron, kind, strict)
    reason = f"ColumnParallelLinear: {_REASONS[kind]}"
    wanted = f"agmm leaves a linear to Megatron: {reason}"
    if strict:
        wanted = f"Strict{reason}; strict=True refuses Megatron"
    assert found == [[wanted]] * 2


@slow
@client
def test_a_spec_without_linears_is_refused(rank_pools: Pools) -> None:
    message = (
        "spec: found ModuleSpec without linears of Megatron's own, wanted one with "
        "ColumnParallelLinear or RowParallelLinear, as get_gpt_layer_local_spec has them"
    )
    assert rank_pools(2).run(megatron_work.refused) == [message] * 2


@client
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=slow)])
@pytest.mark.parametrize("sliced", [False, pytest.param(True, marks=slow)])
@pytest.mark.parametrize("grouped", [False, pytest.param(True, marks=slow)])
def test_experts_are_those_of_the_whole_layer(
    rank_pools: Pools, grouped: bool, sliced: bool, world_size: int
) -> None:
    if grouped and not importlib.metadata.version("megatron-core").startswith("0.16"):
        pytest.skip("only megatron-core 0.16 has GroupedMLP")
    found = rank_pools(world_size).run(
        megatron_moe_work.against_the_whole, grouped, sliced, hooked=False
    )
    assert found == [[]] * world_size


_EXPERTS_LEFT = "agmm leaves a mixture of experts to Megatron: "


@slow
@client
def test_experts_with_hooks_stay_with_megatron(rank_pools: Pools) -> None:
    message = _EXPERTS_LEFT + "linears of its experts have hooks, as with overlap_param_gather"
    found = rank_pools(2).run(megatron_moe_work.against_the_whole, False, False, hooked=True)
    assert found == [[message]] * 2


@slow
@client
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"moe_token_dispatcher_type": "alltoall"},
            "its dispatcher is 'alltoall', not 'allgather'",
        ),
        ({"gated_linear_unit": False}, "its activation is not gated, or is neither silu nor gelu"),
        (
            {"activation_func": torch.nn.functional.relu},
            "its activation is not gated, or is neither silu nor gelu",
        ),
        ({"add_bias_linear": True}, "agmm's experts have no add_bias_linear"),
    ],
)
def test_experts_that_stay_with_megatron_are_named(
    rank_pools: Pools, options: dict[str, object], reason: str, strict: bool
) -> None:
    found = rank_pools(2).run(megatron_moe_work.left_to_megatron, options, strict)
    wanted = f"MoELayer: {reason}; strict=True refuses Megatron"
    assert found == [[wanted if strict else _EXPERTS_LEFT + reason]] * 2


@slow
@client
def test_a_model_without_experts_is_refused(rank_pools: Pools) -> None:
    message = (
        "model: found Linear without mixtures of experts, wanted one with a MoELayer of Megatron"
    )
    assert rank_pools(2).run(megatron_moe_work.refused) == [message] * 2


@pytest.mark.parametrize("version", ["0.15.3", "0.20.0", "1.0.0"])
def test_a_version_that_was_not_tried_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    message = rf"megatron-core: found version {version}, wanted 0\.16 to 0\.19"
    with pytest.raises(InvalidArgument, match=message):
        by_agmm.served(None)


def test_a_missing_megatron_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(InvalidArgument, match=r"megatron-core: found none, wanted 0\.16 to 0\.19"):
        by_agmm.spec_provider()
