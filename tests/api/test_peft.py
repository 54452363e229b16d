"""PEFT's LoRA on linears that agmm serves, against the unsharded model."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from pathlib import Path

import peft_work
import pytest
import transformers_work

import agmm.integrations.peft as by_agmm
from agmm.errors import InvalidArgument
from agmm.testing.ranks import RankPool

Pools = Callable[..., RankPool]

needs_peft = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("peft", "transformers", "accelerate")),
    reason="needs peft, transformers and accelerate, in versions that `make test-clients` installs",
)


def client(test: Callable[..., None]) -> Callable[..., None]:
    found: Callable[..., None] = pytest.mark.clients(needs_peft(test))
    return found


_WHICH = ["layers", *peft_work.STYLES]


@client
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("lora_bias", [False, True])
@pytest.mark.parametrize("which", _WHICH)
def test_adapters_are_those_of_the_unsharded_model(
    rank_pools: Pools, tmp_path: Path, which: str, lora_bias: bool, world_size: int
) -> None:
    found = rank_pools(world_size).run(peft_work.training, which, lora_bias, tmp_path)
    assert found == [[]] * world_size


@client
@pytest.mark.parametrize(("world_size", "length"), [(2, 5), (4, 6), (4, 1)])
def test_adapters_on_rows_of_several_sizes(rank_pools: Pools, world_size: int, length: int) -> None:
    assert rank_pools(world_size).run(peft_work.rows_of_several_sizes, length) == [[]] * world_size


@client
@pytest.mark.parametrize("which", ["sequence", "all rows"])
def test_ranks_agree_on_gradients_under_dropout(rank_pools: Pools, which: str) -> None:
    assert rank_pools(2).run(peft_work.with_dropout, which) == [[]] * 2


@client
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("kind", ["auto", "sequence"])
@pytest.mark.parametrize(("length", "dropout"), [(70, 0.0), (131, 0.1), (5, 0.0)])
def test_adapters_of_a_model_of_transformers(
    rank_pools: Pools, tmp_path: Path, kind: str, length: int, dropout: float, world_size: int
) -> None:
    source = tmp_path / "Llama"
    transformers_work.save_whole("Llama", source)
    given = source, kind, length, dropout, tmp_path
    found = rank_pools(world_size).run(peft_work.transformers_model, *given)
    assert found == [[]] * world_size


@client
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "several",
            (
                "LoRA on ColumnParallelLinear: out_features: found (8, 8), wanted one output: give "
                "each a layer of its own"
            ),
        ),
        (
            "pissa",
            (
                "LoRA on Linear: init_lora_weights: found 'pissa', wanted one of "
                "[True, False, 'gaussian']: others need the whole weight"
            ),
        ),
        (
            "mixed",
            "adapter_names: found some, wanted None: one batch has the same adapters for all",
        ),
    ],
)
def test_what_is_not_served_is_named(rank_pools: Pools, kind: str, message: str) -> None:
    assert rank_pools(2).run(peft_work.refused, kind) == [message] * 2


@client
def test_peft_gets_its_methods_back(rank_pools: Pools) -> None:
    assert rank_pools(2).run(peft_work.given_back) == [True] * 2


@pytest.mark.parametrize("version", ["0.20.0", "0.22.0", "1.0.0"])
def test_a_version_that_was_not_tried_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    with pytest.raises(InvalidArgument, match=rf"peft: found version {version}, wanted 0\.21"):
        by_agmm.enable()
    assert not by_agmm.is_enabled()


def test_a_missing_peft_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(InvalidArgument, match=r"peft: found none, wanted 0\.21"):
        by_agmm.enable()
