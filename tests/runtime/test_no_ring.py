"""FSDP beside tensor-parallel matmuls that fill their GPUs and wait: every order in which the GPUs
may take up their work is tried on a model, and none ends with ranks that wait for each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest

Ranks = frozenset[int]


class Matmul(NamedTuple):
    """Fills its GPU from its start until all these ranks have started theirs of this name."""

    name: str
    ranks: Ranks


class Await(NamedTuple):
    """The stream goes on when this rank's part of a collective is done."""

    name: str


class Collective(NamedTuple):
    """A barrier: it is done when all these ranks have started it, and starts only where no matmul
    fills the GPU."""

    name: str
    ranks: Ranks
    after: int = 0
    """Items of the compute stream that have to be done before."""


class Program(NamedTuple):
    """What one rank has on its streams."""

    compute: Sequence[Matmul | Await]
    streams: Sequence[Sequence[Collective]]


State = tuple[tuple[int, bool, tuple[tuple[int, bool], ...]], ...]
"""The items done on each rank and whether the next one runs; then both for each stream."""


def can_hang(programs: Sequence[Program], fills: bool, whole: bool = False) -> bool:
    """Whether some order of events leads to a state in which nothing can happen any more.
    ``whole``: a matmul starts only where nothing else runs, as one with tiles that are awaited."""
    begin: State = tuple((0, False, ((0, False),) * len(p.streams)) for p in programs)
    seen, queue = {begin}, [begin]
    while queue:
        state = queue.pop()
        following = list(_following(state, programs, fills, whole))
        if not following and not _is_done(state, programs):
            return True
        for new in following:
            if new not in seen:
                seen.add(new)
                queue.append(new)
    return False


def _is_done(state: State, programs: Sequence[Program]) -> bool:
    return all(
        done == len(program.compute)
        and all(n == len(s) for (n, _), s in zip(streams, program.streams, strict=True))
        for (done, _, streams), program in zip(state, programs, strict=True)
    )


def _has_begun(name: str, rank: int, state: State, programs: Sequence[Program]) -> bool:
    done, runs, streams = state[rank]
    names = [item.name for item in programs[rank].compute if isinstance(item, Matmul)]
    if name in names:
        begun = [i.name for i in programs[rank].compute[: done + runs] if isinstance(i, Matmul)]
        return name in begun
    return any(
        name in [c.name for c in stream[: n + on]]
        for (n, on), stream in zip(streams, programs[rank].streams, strict=True)
    )


def _following(state: State, programs: Sequence[Program], fills: bool, whole: bool) -> list[State]:
    """The states that may come next. What ends is taken at once, whatever else may happen: an end
    keeps nothing from happening, so trying it later would lead to the same states."""
    starts: list[State] = []
    for rank, (program, (done, runs, streams)) in enumerate(zip(programs, state, strict=True)):

        def with_rank(
            done: int, runs: bool, streams: tuple[tuple[int, bool], ...], rank: int = rank
        ) -> State:
            return (*state[:rank], (done, runs, streams), *state[rank + 1 :])

        def all_begun(item: Matmul | Collective) -> bool:
            return all(_has_begun(item.name, peer, state, programs) for peer in item.ranks)

        if done < len(program.compute):
            item = program.compute[done]
            if isinstance(item, Await):
                finished = [
                    c.name
                    for (n, _), stream in zip(streams, program.streams, strict=True)
                    for c in stream[:n]
                ]
                if item.name in finished:
                    return [with_rank(done + 1, False, streams)]
            elif not runs:
                if not (whole and any(on for _, on in streams)):
                    starts.append(with_rank(done, True, streams))
            elif all_begun(item):
                return [with_rank(done + 1, False, streams)]
        for i, ((n, on), stream) in enumerate(zip(streams, program.streams, strict=True)):
            if n == len(stream):
                continue
            if on and all_begun(stream[n]):
                return [with_rank(done, runs, (*streams[:i], (n + 1, False), *streams[i + 1 :]))]
            if not on and done >= stream[n].after and not (fills and runs):
                starts.append(with_rank(done, runs, (*streams[:i], (n, True), *streams[i + 1 :])))
    return starts


def training(early: int) -> list[Program]:
    """A step of two layers on a mesh of 2 x 2: the same program on every rank. Gathers may begin so
    many steps before they are awaited."""
    programs = []
    for rank in range(4):
        shards, tp = (
            frozenset({rank % 2, rank % 2 + 2}),
            frozenset({rank // 2 * 2, rank // 2 * 2 + 1}),
        )
        compute: list[Matmul | Await] = []
        gathers: list[Collective] = []
        sums: list[Collective] = []
        for step, layer in enumerate((0, 1, 1, 0)):
            gathers.append(Collective(f"gather {step}", shards, max(0, len(compute) - early)))
            compute += [Await(f"gather {step}"), Matmul(f"matmul {step}", tp)]
            if step >= 2:
                if sums:  # FSDP awaits the last one before it packs the next
                    compute.append(Await(sums[-1].name))
                sums.append(Collective(f"sum of {layer}", shards, len(compute)))
        compute.append(Await(sums[-1].name))
        programs.append(Program(compute, [gathers, sums]))
    return programs


@pytest.mark.parametrize("early", [0, 2, 100])
def test_the_same_program_on_all_ranks(early: int) -> None:
    assert not can_hang(training(early), fills=True)


def test_matmuls_that_need_all_ctas_need_a_free_multiprocessor() -> None:
    """A barrier may have the place of one."""
    assert can_hang(training(2), fills=True, whole=True)
    assert not can_hang(training(2), fills=False)


def ring() -> list[Program]:
    """The ring of docs/dev/no-ring.md: 0's matmul waits for 1, which awaits 3, whose matmul waits
    for 2, which awaits 0. The programs differ."""
    left, right, even, odd = (frozenset(r) for r in ({0, 1}, {2, 3}, {0, 2}, {1, 3}))
    m, n = Matmul("left", left), Matmul("right", right)
    c, d = Collective("even", even), Collective("odd", odd)
    return [
        Program([m, Await("even")], [[c]]),
        Program([Await("odd"), m], [[d]]),
        Program([Await("even"), n], [[c]]),
        Program([n, Await("odd")], [[d]]),
    ]


def test_programs_that_differ_need_a_free_multiprocessor() -> None:
    assert can_hang(ring(), fills=True)
    assert not can_hang(ring(), fills=False)


def test_collectives_that_are_awaited_in_another_order_than_issued() -> None:
    """The second condition of the argument is needed too."""
    programs = training(100)
    for rank in (0, 1):
        (gathers, sums), compute = programs[rank].streams, programs[rank].compute
        order = [gathers[1], gathers[0], *gathers[2:]]
        programs[rank] = Program(compute, [order, sums])
    assert can_hang(programs, fills=True)


@pytest.mark.parametrize("ranks", [2, 3])
def test_calls_of_a_group_on_two_streams(ranks: int) -> None:
    """A matmul, a collective and a matmul: they have to come one after the other, whatever their
    streams, as `Group.last_before` has it."""
    group = frozenset(range(ranks))
    first, last = Matmul("first", group), Matmul("last", group)
    apart = Program([first, last], [[Collective("between", group)]])
    assert can_hang([apart] * ranks, fills=True, whole=True)
    in_turn = Program([first, Await("between"), last], [[Collective("between", group, after=1)]])
    assert not can_hang([in_turn] * ranks, fills=True, whole=True)
    only_ahead = Program([first, last], [[Collective("between", group, after=1)]])
    assert can_hang([only_ahead] * ranks, fills=True, whole=True)
