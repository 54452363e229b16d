"""transformers' tensor parallelism by agmm, against the whole model."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers_work

import agmm.integrations.transformers as by_agmm
from agmm.errors import InvalidArgument
from agmm.testing.ranks import RankPool

Pools = Callable[..., RankPool]

needs_transformers = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("transformers", "accelerate")),
    reason="needs transformers and accelerate, in versions that `make test-clients` installs",
)


def client(test: Callable[..., None]) -> Callable[..., None]:
    found: Callable[..., None] = pytest.mark.clients(needs_transformers(test))
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`saved(family)`: where a tiny model of that family lies."""
    folders: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp(family)
            transformers_work.save_whole(family, folders[family])
        return folders[family]

    return get


def _families() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Mixtral"])


@client
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Phi3"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_its_plans_are_converted(
    rank_pools: Pools, saved: Callable[[str], Path], world_size: int, family: str
) -> None:
    found = rank_pools(world_size).run(transformers_work.by_converted_plan, saved(family))
    assert found == [[]] * world_size


@client
@pytest.mark.parametrize(
    ("family", "world_size"),
    [(family, 2) for family in ("Llama", "Qwen3", "Mistral", "Gemma2", "Phi", "Mixtral", "GptOss")]
    + [("Llama", 4), ("GptOss", 4)],
)
def test_plans_of_torch_with_sequence_parallelism_are_converted(
    rank_pools: Pools, saved: Callable[[str], Path], family: str, world_size: int
) -> None:
    """transformers has no such plan. Rows that the ranks cannot share evenly are among these."""
    found = rank_pools(world_size).run(transformers_work.by_torch_styles, saved(family))
    assert found == [[]] * world_size


@client
@pytest.mark.parametrize("kind", ["auto", "sequence"])
def test_its_trainer(
    rank_pools: Pools, saved: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    found = rank_pools(2).run(transformers_work.by_trainer, saved("Llama"), kind, tmp_path)
    assert found == [[]] * 2


@client
@pytest.mark.parametrize("kind", ["auto", "sequence"])
@pytest.mark.parametrize("family", ["Mistral", "Gemma2", "Phi", "Phi3"])
def test_further_families(
    rank_pools: Pools, saved: Callable[[str], Path], family: str, kind: str
) -> None:
    given = saved(family), kind
    assert rank_pools(2).run(transformers_work.training, *given, 2, 70, False) == [[]] * 2
    assert rank_pools(2).run(transformers_work.generating, *given, 9) == [[]] * 2


@client
@pytest.mark.parametrize("kind", ["auto", "sequence"])
@_families()
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("batch", "length", "checkpointing"),
    [(2, 70, False), (1, 131, True), (2, 5, False)],
)
def test_training_is_that_of_the_whole_model(
    rank_pools: Pools,
    saved: Callable[[str], Path],
    world_size: int,
    family: str,
    kind: str,
    batch: int,
    length: int,
    checkpointing: bool,
) -> None:
    pool = rank_pools(world_size)
    given = saved(family), kind, batch, length, checkpointing
    assert pool.run(transformers_work.training, *given) == [[]] * world_size


@client
@pytest.mark.parametrize("kind", ["auto", "sequence"])
@_families()
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("length", [70, 6])
def test_generated_tokens_are_those_of_the_whole_model(
    rank_pools: Pools,
    saved: Callable[[str], Path],
    world_size: int,
    family: str,
    kind: str,
    length: int,
) -> None:
    pool = rank_pools(world_size)
    given = saved(family), kind, length
    assert pool.run(transformers_work.generating, *given) == [[]] * world_size


@client
@pytest.mark.parametrize("kind", ["auto", "sequence"])
@_families()
@pytest.mark.parametrize("world_size", [2, 4])
def test_what_is_saved_is_the_whole_model(
    rank_pools: Pools,
    saved: Callable[[str], Path],
    tmp_path: Path,
    world_size: int,
    family: str,
    kind: str,
) -> None:
    pool = rank_pools(world_size)
    given = saved(family), kind, tmp_path
    assert pool.run(transformers_work.saving, *given) == [[]] * world_size


@client
def test_checkpoints_of_several_forwards_are_computed_again_in_their_shapes(
    rank_pools: Pools, saved: Callable[[str], Path]
) -> None:
    assert rank_pools(2).run(transformers_work.two_forwards, saved("Llama")) == [[]] * 2


@client
def test_transformers_gets_its_styles_back(rank_pools: Pools, saved: Callable[[str], Path]) -> None:
    assert rank_pools(2).run(transformers_work.stock_again, saved("Llama")) == [[]] * 2


@client
def test_what_is_no_decoder_is_refused(rank_pools: Pools) -> None:
    message = "model: found list, wanted a model of transformers, its config, or where AutoConfig "
    assert rank_pools(2).run(transformers_work.refused, [])[0].startswith(message)


@pytest.mark.parametrize("version", ["4.57.6", "5.16.1", "5.25.0", "6.0.0"])
def test_a_version_that_was_not_tried_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    with pytest.raises(
        InvalidArgument, match=rf"transformers: found version {version}, wanted 5\.17 to 5\.24"
    ):
        by_agmm.enable()
    assert not by_agmm.is_enabled()


def test_a_missing_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(InvalidArgument, match=r"transformers: found none, wanted 5\.17 to 5\.24"):
        by_agmm.sequence_plan("somewhere")
