"""A table of promises: every op, with every kind of operands, keeps each of them, or the call is
refused by name. `every_op` makes the calls, `contract_work` has the features; an op that is new
comes into the table by itself (`test_every_op.py`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import contract_work as work
import pytest

from agmm.testing.ranks import RankPool

Refused = Mapping[str, tuple[tuple[str, str], ...]]
REFUSED: Refused = {
    "strict": (
        ("config=unfused", r"config: unfused was asked for; strict=True refuses"),
        ("all_gather_matmul.*gather_dim=[12]", r"gather_dim: [12], the fused path wants 0; strict"),
        (
            "matmul_reduce_scatter.*scatter_dim=2",
            r"scatter_dim: 2, the fused path wants another than the last; strict",
        ),
    )
}
"""The calls that a feature refuses, and in which words, on every device."""
SLOW = {"compiled"}


def unexpected(
    found: list[work.Found], feature: str, refused: Refused | None = None
) -> list[work.Found]:
    """What is broken, or refused without standing in `REFUSED` or in ``refused``, which has what
    one kind of device refuses."""
    known = (*REFUSED.get(feature, ()), *(refused or {}).get(feature, ()))
    return [
        (call, fault)
        for call, fault in found
        if not any(re.search(kind, call) and re.search(words, fault) for kind, words in known)
    ]


def not_refused(found: list[work.Found], feature: str, refused: Refused | None = None) -> list[str]:
    """The kinds of calls in `REFUSED` and in ``refused`` of which none was refused: they were
    served by a path that the feature forbids."""
    return [
        kind
        for kind, words in (*REFUSED.get(feature, ()), *(refused or {}).get(feature, ()))
        if not any(re.search(kind, call) and re.search(words, fault) for call, fault in found)
    ]


@pytest.mark.parametrize(
    ("world_size", "feature", "run"),
    [
        pytest.param(
            *(world_size, feature, run),
            marks=[pytest.mark.slow] if feature in SLOW or world_size == 3 else [],
        )
        for world_size in (2, 3)
        for feature, run in work.RUNS
        if feature != "captured"  # CPUs have no graphs
        and (world_size == 2 or feature not in SLOW)
    ],
)
def test_every_op_keeps_its_promise(
    rank_pools: Callable[..., RankPool], world_size: int, feature: str, run: int
) -> None:
    for found in rank_pools(world_size).run(work.broken, feature, run):
        assert unexpected(found, feature) == []
        assert not_refused(found, feature) == []


BY_COPIES: Refused = {
    "strict": (
        ("activation=", r"activation: found '.*' on the portable path, wanted none; strict"),
        ("gather_dim=[12]", r"gather_dim: [12], the fused path wants 0; strict"),
        ("scatter_dim=2", r"scatter_dim: 2, the fused path wants another than the last; strict"),
    )
}
"""The calls that a feature refuses, and in which words, where all name the portable path."""


@pytest.mark.parametrize("hosts", ["", "ab"])
@pytest.mark.parametrize("feature", ["right", "strict", "kept", "activation"])
def test_the_portable_path_keeps_its_promise(
    rank_pools: Callable[..., RankPool], hosts: str, feature: str
) -> None:
    for found in rank_pools(2).run(work.broken, feature, None, "cpu", hosts):
        assert unexpected(found, feature, BY_COPIES) == []


def test_a_refusal_that_the_table_does_not_know_is_found() -> None:
    call = "agmm.matmul_reduce_scatter(scatter_dim=2)"
    assert unexpected([(call, "Unsupported: scatter_dim: something else")], "strict")
    assert unexpected([(call, "result 0: differs")], "right")


def test_a_refusal_that_is_missing_is_found() -> None:
    assert len(not_refused([], "strict")) == len(REFUSED["strict"])
