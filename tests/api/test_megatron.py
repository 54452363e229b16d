"""Megatron-core's tensor parallelism by agmm, against Megatron's own linears."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable

import megatron_work
import pytest

import agmm.integrations.megatron as by_agmm
from agmm.errors import InvalidArgument
from agmm.testing.ranks import RankPool

Pools = Callable[..., RankPool]

needs_megatron = pytest.mark.skipif(
    not importlib.util.find_spec("megatron"),
    reason="needs megatron-core, in the version that `make test-clients` installs",
)


def client(test: Callable[..., None]) -> Callable[..., None]:
    found: Callable[..., None] = pytest.mark.clients(needs_megatron(test))
    return found


@client
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize(
    ("fused", "hooked", "bias", "by_provider"),
    [
        (False, False, False, False),
        (False, False, True, False),
        (True, False, True, False),
        (True, True, False, False),
        (False, False, True, True),
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


@client
def test_a_spec_without_linears_is_refused(rank_pools: Pools) -> None:
    message = (
        "spec: found ModuleSpec without linears of Megatron's own, wanted one with "
        "ColumnParallelLinear or RowParallelLinear, as get_gpt_layer_local_spec has them"
    )
    assert rank_pools(2).run(megatron_work.refused) == [message] * 2


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
