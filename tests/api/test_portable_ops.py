"""Which calls take the portable path, with simulated GPUs, and how it is asked for on CPU ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import portable_work
import pytest
import torch

import agmm
from agmm.errors import Unsupported, forget_warnings
from agmm.ops import pipeline, portable
from agmm.ops.gather import GatherSettings
from agmm.ops.pipeline import LIBRARY, PORTABLE, OpCall
from agmm.ops.plain_all_reduce import PlainAllReduce
from agmm.ops.plain_gather import PlainGather
from agmm.ops.plain_scatter import PlainScatter
from agmm.ops.scatter import ScatterSettings
from agmm.planning import call_plans
from agmm.planning.plans import BY_COPIES, UNFUSED
from agmm.runtime import cuda_hosts, symmetric
from agmm.runtime.capabilities import COLLECTIVES, MATMULS, Feature
from agmm.testing.ranks import RankPool

GPU = torch.device("cuda", 0)
NO_MATMULS = "device: found cuda:0 of compute capability 8.0, wanted 9.0 for agmm's matmuls"
NOTHING = "device: found cuda:0 of compute capability 7.5, wanted at least 8.0"
CARDS = {
    "Ampere": {MATMULS: NO_MATMULS},
    "Turing": {MATMULS: NOTHING, COLLECTIVES: NOTHING},
    "mixed": {MATMULS: f"rank 1: {NO_MATMULS}"},
    "no peer access": {MATMULS: NO_MATMULS},
    "two hosts": {MATMULS: NO_MATMULS},
}
"""Why cards do not do what agmm asks of them."""
APART = {
    "no peer access": "group: cuda:0 has no peer access to cuda:1",
    "two hosts": "group: found ranks on 2 hosts, wanted one",
}
"""Why the GPUs do not all reach each other's memory."""
OPS = ("gather", "scatter", "all-reduce")


@pytest.fixture(params=CARDS)
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    def why(group: Any, device: torch.device, feature: Feature = MATMULS) -> str | None:
        return CARDS[request.param].get(feature)

    known = mock.Mock()
    known.of.return_value.hosts.return_value = ["a", "b" if request.param == "two hosts" else "a"]
    monkeypatch.setattr(symmetric, "why_group_unfused", why)
    monkeypatch.setattr(portable, "groups", known)
    monkeypatch.setattr(cuda_hosts, "why_apart", lambda *_: APART.get(request.param))
    forget_warnings()
    yield request.param
    forget_warnings()


def call_of(op: str, rows: int = 2048, ranks: int = 2, dim: int = 0, **settings: Any) -> Any:
    """A call whose operands are taken to be on a GPU."""
    group, strict = mock.Mock(size=lambda: ranks), settings.get("strict", False)
    plan = {"portable": BY_COPIES, "unfused": UNFUSED}.get(settings.get("config", ""))
    B = torch.zeros(16, 8)
    call: Any
    if op == "gather":
        A_shard = torch.zeros(rows // ranks, 1, 16)
        call = PlainGather(A_shard, [B], [None], group, GatherSettings(dim, **settings))
    elif op == "scatter":
        of_scatter = ScatterSettings(dim, "sum", strict, plan)
        call = PlainScatter([torch.zeros(rows, 1, 16)], [B], None, group, of_scatter)
    else:
        call = PlainAllReduce(torch.zeros(rows, 16), B, None, group, strict, None, plan)
    call.device = GPU
    return call


def route_of(call: Any, card: str) -> pipeline.Route:
    """The route of a call on such cards; other paths than the portable one are the library's."""
    unfused = pipeline.Route(LIBRARY)
    found: pipeline.Route
    with (
        mock.patch.object(call, "why_no_kernel", return_value=CARDS[card][MATMULS]),
        mock.patch.object(call, "otherwise", create=True, return_value=unfused),
    ):
        found = call.route()
    return found


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("asked", "by_copies"),
    [
        ({}, True),
        ({"rows": 512}, False),  # too few
        ({"rows": 512, "strict": True}, True),
        ({"rows": 512, "config": "portable"}, True),
        ({"config": "unfused"}, False),
        ({"ranks": 1}, False),
        ({"ranks": 1, "config": "portable"}, False),
    ],
    ids=str,
)
def test_cards_without_a_matmul_take_the_best_common_path(
    card: str, op: str, asked: dict[str, Any], by_copies: bool
) -> None:
    call = call_of(op, **asked)
    route = route_of(call, card)
    is_asked = asked.get("config") == "portable"
    wanted = PORTABLE if by_copies and card != "Turing" else LIBRARY
    if card in APART and not is_asked:  # messages have to be asked for
        wanted = LIBRARY
    assert route.by == wanted
    if wanted == PORTABLE and "config" not in asked:
        assert route.reason == CARDS[card][MATMULS]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("asked", "by_messages"),
    [
        ({}, True),
        ({"rows": 512}, False),
        ({"config": "unfused"}, False),
        ({"ranks": 1}, False),
    ],
    ids=str,
)
def test_messages_are_taken_where_the_variable_says_so(
    monkeypatch: pytest.MonkeyPatch, card: str, op: str, asked: dict[str, Any], by_messages: bool
) -> None:
    """Before anything is planned, so on GPUs that have kernels too; only where no memory is
    shared."""
    monkeypatch.setenv("AGMM_MESSAGES", "on")
    monkeypatch.setattr(portable, "shares_no_memory", lambda *_: card in APART)
    agreed = mock.Mock()
    monkeypatch.setattr(call_plans, "agree", agreed)
    route = route_of(call_of(op, **asked), card)
    if card in APART:
        assert route.by == (PORTABLE if by_messages else LIBRARY)
        assert not by_messages or (route.reason is None and agreed.called)
    else:
        assert agreed.called == by_messages


@pytest.mark.parametrize(("op", "dim"), [("gather", 1), ("scatter", 2)])
def test_dimensions_that_are_not_sent_by_rows_are_the_librarys(
    card: str, op: str, dim: int
) -> None:
    for config in ("", "portable"):
        asked: dict[str, Any] = {"config": config} if config else {}
        call = call_of(op, dim=dim, **asked)
        assert route_of(call, card).by == LIBRARY


class Served(OpCall[Any]):
    """A call that is served as far as its memory goes."""

    def __init__(self, reason: str | None) -> None:
        self.group, self.device, self.strict = mock.MagicMock(), GPU, False
        self.reason = reason

    def check(self) -> None: ...
    def words(self) -> Any:
        return mock.MagicMock()

    def is_empty(self) -> bool:
        return False

    def without_elements(self, words: Any) -> Any: ...
    def route(self) -> pipeline.Route:
        return pipeline.Route(PORTABLE, NO_MATMULS)

    def look(self, route: Any, words: Any) -> None: ...
    def prepare(self, route: Any) -> Any:
        if self.reason is not None:
            raise Unsupported(self.reason)
        return lambda: "by copies"

    def operands(self) -> tuple[Any, ...]:
        return ()

    def finished(self, found: Any, route: Any) -> Any:
        return found

    def by_library(self, words: Any) -> Any:
        return "by the library"


@pytest.mark.parametrize(
    ("reason", "found", "warning"),
    [
        (None, "by copies", f"agmm takes the portable path: {NO_MATMULS}"),
        ("group: no peer access", "by the library", "agmm takes the unfused path: group: no peer"),
    ],
)
def test_there_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, reason: str | None, found: str, warning: str
) -> None:
    for name in ("groups", "seen", "kept"):
        monkeypatch.setattr(pipeline, name, mock.MagicMock())
    monkeypatch.setattr("agmm.runtime.backends.is_fake", lambda group: False)
    monkeypatch.setattr(pipeline, "calling", mock.MagicMock())
    forget_warnings()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert pipeline.serve(Served(reason)) == found
    assert [str(one.message)[: len(warning)] for one in caught] == [warning]
    forget_warnings()


def test_configs_of_sums_are_named() -> None:
    for op in (agmm.matmul_reduce_scatter, agmm.matmul_all_reduce):
        with pytest.raises(agmm.InvalidArgument, match="config: found 'fast', wanted 'portable'"):
            op(torch.zeros(4, 4), torch.zeros(4, 4), config="fast")
    # Ranks of their own: others may have made more kinds of calls than `status` counts.
    with RankPool(3) as pool:
        for faults in pool.run(portable_work.named):
            assert faults == []
