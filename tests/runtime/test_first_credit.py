"""The credits of an SM push of two rounds (`src/transport/push_warp.hpp`), in every interleaving.

A model of what its warps do to the words, step by step: the first warp of each CTA's consumers
claims an item and looks at the credits (`claim_first_item`), later the CTA's pushing warp awaits
them (`take_credits`) and signals (`signal_item`). The nearest peer is served in the first round,
the other in the second; a peer gives the next credit only after it has got all of this call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

PARTS = 2  # of the only chunk: items 0 and 1 are of the first round, 2 and 3 of the second
ITEMS = 2 * PARTS


@dataclass(frozen=True)
class Cta:
    """`step` names what it does next."""

    step: str = "claim"
    item: int = -1
    saw_all: bool = False


@dataclass(frozen=True)
class State:
    ctas: tuple[Cta, ...]
    credits: tuple[bool, bool] = (True, True)  # of the peers of the two rounds
    go: bool = False
    claims: int = 0
    signalled: int = 0
    early_reset: bool = False  # a credit was taken before anybody had said `go`


def moves(state: State, first_takes_go: bool) -> Iterator[State]:
    """Every state that one step of one CTA leads to; a step that has to wait leads to none."""
    for i, cta in enumerate(state.ctas):

        def with_cta(after: Cta, state: State = state, i: int = i) -> State:
            return replace(state, ctas=(*state.ctas[:i], after, *state.ctas[i + 1 :]))

        if cta.step == "claim":
            after = with_cta(Cta("look", state.claims))
            yield replace(after, claims=state.claims + 1)
        elif cta.step == "look":
            after = with_cta(replace(cta, step="say", saw_all=all(state.credits)))
            yield after
        elif cta.step == "say":
            done = cta.item >= ITEMS
            after = with_cta(replace(cta, step="done" if done else "await"))
            yield replace(after, go=state.go or (cta.item == 0 and cta.saw_all))
        elif cta.step == "await":
            is_first = cta.item == 0
            sees_go = state.go and (first_takes_go or not is_first)
            if all(state.credits) or sees_go:
                after = with_cta(replace(cta, step="signal"))
                yield replace(after, go=state.go or is_first)
        elif cta.step == "signal":
            current, part = divmod(cta.item, PARTS)
            if part == 0 and current != 0 and not state.go:
                continue
            credit = list(state.credits)
            if part == 0:
                credit[current] = False
            after = with_cta(Cta("take"))
            yield replace(
                after,
                credits=(credit[0], credit[1]),
                signalled=state.signalled + 1,
                early_reset=state.early_reset or (part == 0 and not state.go),
            )
        elif cta.step == "take":  # push_items: no credits are awaited any more
            item = state.claims
            after = with_cta(Cta("signal" if item < ITEMS else "done", item))
            yield replace(after, claims=item + 1)


def ends(ctas: int, first_takes_go: bool) -> set[State]:
    """The states in which nothing can move."""
    begin = State((Cta(),) * ctas)
    seen = {begin}
    stack = [begin]
    found = set()
    while stack:
        state = stack.pop()
        following = list(moves(state, first_takes_go))
        if not following:
            found.add(state)
        for after in following:
            if after not in seen:
                seen.add(after)
                stack.append(after)
    return found


@pytest.mark.parametrize("ctas", [1, 2, 3])
def test_every_interleaving_sends_all(ctas: int) -> None:
    for end in ends(ctas, first_takes_go=True):
        assert end.signalled == ITEMS
        assert not end.early_reset
        assert {cta.step for cta in end.ctas} == {"done"}


def test_the_model_finds_a_first_warp_that_looks_at_the_credits_alone() -> None:
    """The rule before: its CTA's consumers had said `go`, the second round took its credit, and the
    first warp waited for that credit until the limit. With two CTAs at least."""
    assert all(end.signalled == ITEMS for end in ends(1, first_takes_go=False))
    stuck = [end for end in ends(2, first_takes_go=False) if end.signalled < ITEMS]
    assert stuck
    for end in stuck:
        assert Cta("await", 0, True) in end.ctas
        assert end.credits == (True, False)
