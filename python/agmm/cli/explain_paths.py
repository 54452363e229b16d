"""What `agmm explain` says of calls whose path no plan decides: on GPUs that agmm's matmuls do not
run on, and between hosts."""

from __future__ import annotations

from typing import Any

from agmm import _core
from agmm.bench.units import duration
from agmm.cli import gpu_names
from agmm.cli.explanations import Alternative, Explanation
from agmm.planning.cost_model import cards
from agmm.planning.legality import PORTABLE_ROWS
from agmm.planning.problems import CPU, Problem

GPUS_OF_A_HOST = 8
"""The most GPUs that a host with Hopper GPUs has; ranks on several hosts take the unfused path."""


def by_other_path(problem: Problem, asked: dict[str, Any], call: str) -> Explanation | None:
    """The explanation of a call on GPUs of an architecture that agmm has no matmul for; None for
    other calls. Its times are by what a data sheet or the driver says of the card."""
    found = gpu_names.capability_of(problem.gpu)
    if found is None or found == divmod(_core.CAPABILITY, 10):
        return None
    version, least = ".".join(map(str, found)), divmod(_core.LEAST_CAPABILITY, 10)
    wanted = ".".join(map(str, divmod(_core.CAPABILITY, 10)))
    why = f"agmm's matmuls are for compute capability {wanted}, {problem.gpu} has {version}"
    unfused = "unfused, the group's backend and the library"
    if found < least:
        why += f", and agmm's copies want at least {'.'.join(map(str, least))}"
        return Explanation(asked, call, unfused, why)
    if problem.world_size == 1:
        return Explanation(asked, call, "the library's matmul", "1 rank has nothing to send")
    on_hosts = why_on_hosts(problem)
    if on_hosts is not None:
        return Explanation(asked, call, unfused, on_hosts)
    if problem.m < PORTABLE_ROWS:
        few = f"; of less than {PORTABLE_ROWS} rows copies are not taken"
        return Explanation(asked, call, unfused, why + few)
    note = "no such GPU has been measured; the GPUs have to reach each other's memory"
    plan = "portable, copies beside the library's matmul"
    card = gpu_names.card_of(problem.gpu)
    if card is None:
        return Explanation(asked, call, plan, why, notes=(note,))
    us = cards.portable_us(card, problem)
    times = {plan: us, unfused: cards.unfused_us(card, problem)}
    return Explanation(
        *(asked, call, plan, why),
        source=f"the rule for such GPUs; times by constants of {card.source}",
        predicted_us=us,
        alone_us=card.matmul_us(problem.m, problem.n, problem.k),
        times=(f"predicted: {duration(us)}",),
        notes=(note,),
        alternatives=tuple(
            Alternative(name, times[name], " (the plan)" if name == plan else "")
            for name in sorted(times, key=lambda each: times[each])
        ),
    )


def why_on_hosts(problem: Problem) -> str | None:
    """Why a call of so many ranks is not fused whatever its plan is, or None."""
    gpus, which = _gpus_of_a_host(problem.gpu)
    if problem.gpu == CPU or problem.world_size <= gpus:
        return None
    return (
        f"{problem.world_size} ranks are more than the {gpus} GPUs {which}, and calls between "
        "hosts are not fused"
    )


def _gpus_of_a_host(gpu: str) -> tuple[int, str]:
    if gpu == gpu_names.gpu_here():
        return len(gpu_names.gpus_here()), "that are visible here"
    return GPUS_OF_A_HOST, "of a host"
