"""All ops, layers and integrations in groups that span hosts: uneven numbers of ranks, and one rank
on each of three hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import between_hosts_work as work
import pytest
import quick

from agmm.testing.ranks import RankPool


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """Ranks of their own: torch makes a group of a host's ranks only where all have been in equally
    many groups, which is not so of all ranks that tests share."""
    with RankPool(3, env={"AGMM_TIMEOUT_S": "30"}) as pool:
        yield pool


@pytest.mark.parametrize("hosts", quick.first(1, ["abb", "abc"]))
@pytest.mark.parametrize("what", [work.ops, work.backward, work.layers, work.sharded])
def test_as_on_one_host(ranks: RankPool, hosts: str, what: Callable[[str], list[str]]) -> None:
    assert ranks.run(what, hosts) == [[]] * 3


@pytest.mark.parametrize("hosts", quick.first(1, ["abc", "abb"]))
@pytest.mark.parametrize("what", [work.ops, work.backward, work.layers])
def test_messages_that_are_asked_for_once(
    ranks: RankPool, hosts: str, what: Callable[[str], list[str]]
) -> None:
    assert ranks.run(work.by_messages, what, hosts) == [[]] * 3


@pytest.mark.slow
@pytest.mark.parametrize("is_asked", [False, True])
def test_compiled_calls(ranks: RankPool, is_asked: bool) -> None:
    found = ranks.run(*((work.by_messages,) if is_asked else ()), work.compiled, "abb")
    assert found == [[]] * 3


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("messages", "AGMM_MESSAGES: found 'on' on rank 0, 'off' on rank 1, 'off' on rank 2"),
        ("sum", "AGMM_MESSAGES: found 'on' on rank 0, 'off' on rank 1, 'off' on rank 2"),
        ("build", "build of agmm: found '0.3.1/2/ab' on rank 0, '0.3.0/178/cd' on rank 1, "),
    ],
)
def test_ranks_at_odds(ranks: RankPool, what: str, words: str) -> None:
    found = ranks.run(work.at_odds, "abb", what)
    assert [words in error and "wanted the same on all" in error for error in found] == [True] * 3
