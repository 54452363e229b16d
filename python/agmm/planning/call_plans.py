"""The plan of a call, from its tensors and its group; the same on every rank of the group."""

from __future__ import annotations

import weakref
from functools import cache

import torch
import torch.distributed as dist

from agmm import _env
from agmm.errors import AgmmError, warn_once
from agmm.planning import built_kernels, problems, tables
from agmm.planning.planner import Planner
from agmm.planning.problems import Problem
from agmm.runtime import groups
from agmm.runtime.group_gpus import GroupFacts, group_facts

_planners: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Planner]]
_planners = weakref.WeakKeyDictionary()


@cache
def device_facts(device: torch.device) -> tuple[str, int]:
    """Return `Problem.gpu` and `Problem.sm_count` of a device."""
    if device.type == "cpu":
        return problems.CPU, 0
    facts = torch.cuda.get_device_properties(device)
    return tables.gpu_name(facts.name), facts.multi_processor_count


def gpu_of(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Return `Problem.gpu` of a group's calls, the same on all its ranks and collective at first
    use; for None that of the device."""
    if group is None or device.type == "cpu":
        return device_facts(device)[0]
    return tables.gpu_name(group_facts(group, device).gpu)


def problem_of(
    shape: tuple[int, int, int],
    operands: str | torch.dtype,
    device: torch.device,
    *,
    op: str = problems.ALL_GATHER_MATMUL,
    group: dist.ProcessGroup | None = None,
    return_A: bool = False,
    column_major: bool = True,
    has_all_sms: bool = False,
    epilogue: str = problems.PLAIN,
) -> Problem:
    """The problem of a group's call, whose facts are collective at first use, or of a call of one
    rank that has all of the GPU to itself.

    Args:
        shape: M, N and K as `Problem` has them.
        operands: the name of a `formats.Format`, or the dtype of operands without scales.
        device: where the operands are.
        column_major: whether B is.
        has_all_sms: a group's call leaves no multiprocessors to other groups, as the library's do.
        epilogue: `Problem.epilogue`.
    """
    m, n, k = shape
    facts = _facts(group, device)
    return Problem(
        m,
        n,
        k,
        op=op,
        format=str(operands).removeprefix("torch."),
        world_size=1 if group is None else dist.get_world_size(group),
        return_A=return_A,
        b_layout="column" if column_major else "row",
        gpu=gpu_of(group, device),
        sm_count=facts.all_sms if has_all_sms else facts.sm_count,
        peer_atomics=facts.peer_atomics,
        epilogue=epilogue,
    )


def _facts(group: dist.ProcessGroup | None, device: torch.device) -> GroupFacts:
    return GroupFacts(device_facts(device)[1]) if group is None else group_facts(group, device)


def planner(group: dist.ProcessGroup | None, device: torch.device) -> Planner:
    """The planner of a group, of this process alone for None. Collective at first use."""
    if group is None:
        return _lone_planner(device)
    by_gpu = _planners.setdefault(group, {})
    gpu = gpu_of(group, device)
    found = by_gpu.get(gpu)
    if found is None:
        with groups.of(group).lock:
            found = by_gpu.get(gpu)
            if found is None:
                agreed, learns = _agreed_tables(group, gpu)
                found = Planner(built_kernels.kernels_of, agreed, learns=learns)
                by_gpu[gpu] = found
    return found


def agree(group: dist.ProcessGroup, device: torch.device) -> None:
    """Does what precedes a group's first planned call, for calls that need no plan: ranks whose
    calls differ then differ in one exchange. Collective at first use."""
    group_facts(group, device)
    planner(group, device)


@cache
def _lone_planner(device: torch.device) -> Planner:
    gpu, _ = device_facts(device)
    found = _tables(tables.user(gpu, 1), tables.packaged(gpu, 1))
    return Planner(built_kernels.kernels_of, found)


def _tables(*found: tables.Table | None) -> list[tables.Table]:
    return [table for table in found if table is not None]


_LOOKS = 3
"""How often ranks that learn look for one version of the user's table, which another group may be
writing. It is a choice."""


def _agreed_tables(group: dist.ProcessGroup, gpu: str) -> tuple[list[tables.Table], bool]:
    """The user's table where all ranks read the same one, and the packaged one; and whether the
    group learns plans.

    Raises:
        AgmmError: some ranks learn plans and others do not, AGMM_BATCH_INVARIANT or AGMM_MESSAGES
            differs, or the build of agmm; all ranks raise.
    """
    world_size = dist.get_world_size(group)
    learns = is_learning()
    settings = {
        "build of agmm": (built_kernels.build(), " (its version, its kernels and their digest)"),
        _env.LEARN.name: ("on" if learns else "off", " (agmm.learn_plans sets it, too)"),
        _env.BATCH_INVARIANT.name: (_env.batch_invariant(), ""),
        _env.MESSAGES.name: ("on" if _env.is_on(_env.MESSAGES) else "off", ""),
    }
    said = " ".join(value for value, _ in settings.values())
    for _ in range(_LOOKS if learns else 1):
        own = tables.user(gpu, world_size)
        digest = "" if own is None else own.digest
        found = _exchange(group, f"their tuned tables for {gpu}", f"{digest} {said}")
        for i, (name, (_, hint)) in enumerate(settings.items()):
            _check_same(name, [one.split(" ")[1 + i] for one in found], hint)
        if len(set(found)) == 1:
            break
    else:
        warn_once(
            f"agmm ignores {tables.file_name(gpu, world_size)} of the user: its ranks found "
            f"{len(set(found))} versions of it, wanted one"
        )
        own = None
    return _tables(own, tables.packaged(gpu, world_size)), learns


def _check_same(name: str, values: list[str], hint: str) -> None:
    """Raises AgmmError where the ranks have several values of a setting."""
    if len(set(values)) > 1:
        ranks = ", ".join(f"{one!r} on rank {rank}" for rank, one in enumerate(values))
        raise AgmmError(f"{name}: found {ranks} of a group, wanted the same on all its ranks{hint}")


_wants_to_learn: bool | None = None


def is_learning() -> bool:
    """Whether groups that make their first planned call are to learn plans.

    Raises:
        InvalidArgument: AGMM_LEARN is neither "on" nor "off".
    """
    return _env.is_on(_env.LEARN) if _wants_to_learn is None else _wants_to_learn


def set_learning(on: bool) -> int:
    """Groups that make their first planned call from now on learn plans, or do not. Returns how
    many groups have made theirs and do otherwise."""
    global _wants_to_learn
    _wants_to_learn = on
    known = [planner for by_gpu in _planners.values() for planner in by_gpu.values()]
    return sum(planner.learns != on for planner in known)


def _exchange(group: dist.ProcessGroup, topic: str, value: str) -> list[str]:
    """Every rank's value, by rank. Collective."""
    return groups.of(group).exchange(topic, value)
