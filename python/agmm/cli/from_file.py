"""What `agmm tune` and `agmm explain` do with the calls that a program has recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from agmm.bench import launcher, recorded
from agmm.bench.presets import ShapeOptions
from agmm.cli import explain as explain_module
from agmm.cli import explanations, gpu_names, tuning
from agmm.cli.explanations import Explanation
from agmm.cli.terminal import console
from agmm.errors import InvalidArgument
from agmm.ops import recordings, seen
from agmm.ops.recordings import RecordedCall
from agmm.planning.problems import CPU, Problem
from agmm.runtime.epilogues import Epilogue


def is_recorded(shapes: ShapeOptions) -> bool:
    """Whether the options name a recording."""
    return recorded.read(shapes, recorded.Wanted()) is not None


def refuse(given: Mapping[str, object]) -> None:
    """Raises InvalidArgument for options of a shape beside recorded calls."""
    names = [name for name, value in given.items() if value not in (None, False)]
    if names:
        raise InvalidArgument(
            f"{', '.join(names)}: found with recorded calls, wanted none: each call says it"
        )


def tune(
    shapes: ShapeOptions, wanted: recorded.Wanted, device: str, tp: int | None, *, again: bool
) -> bool:
    """Tunes recorded calls, those that differ in shapes alone in one run.

    Returns:
        Whether every shape has a plan that was saved, and no candidate failed.

    Raises:
        InvalidArgument: the file has nothing that can be tuned; before anything is measured.
    """
    calls = recorded.read(shapes, wanted)
    assert calls is not None
    given = recorded.ranks_of(calls, launcher.world_size_or(tp))
    kind, ranks = launcher.choose(device, given)
    reason = launcher.why_cpu(device, given)
    runs, lines = recorded.runs(calls, ranks, each_weight=True)
    if reason is not None:
        lines.insert(0, reason)
    return tuning.run_all(runs, lines, kind, ranks, again=again)


def explain(
    path: Path, tp: int | None, gpu: str | None, *, as_json: bool, everything: bool
) -> None:
    """Prints the explanation of each recorded call, those with so many ranks where ``tp`` is given.

    Raises InvalidArgument where the file cannot be read or has no such calls.
    """
    calls = [call for call in recordings.read(path) if tp in (None, call.kind.world_size)]
    if not calls:
        raise InvalidArgument(f"file: found no such calls in {path}, wanted some")
    name = None if gpu is None else gpu_names.find_gpu(gpu)
    found = [(call, _explained(call, name or call.gpu)) for call in calls]
    if as_json:
        print(explanations.as_json([_as_dict(call, said) for call, said in found]))
        return
    stdout = console()
    for call, said in found:
        lines = [f"{call.count} × {recorded.described(call)}, served by: {call.kind.by}"]
        if call.kind.reason is not None:
            lines.append(f"not by agmm's kernel: {call.kind.reason}")
        if isinstance(said, Explanation):
            shown = said.text(everything=everything)
        else:
            shown = f"not explained: {said}"
        stdout.print(*lines, shown, "", sep="\n", soft_wrap=True, markup=False)


def _explained(call: RecordedCall, gpu: str) -> Explanation | InvalidArgument:
    """The explanation of a call on that GPU, or why there is none."""
    kind = call.kind
    problem = Problem(
        kind.m,
        sum(kind.n),
        kind.k,
        op=call.planned_op,
        format=kind.dtype,
        world_size=kind.world_size,
        return_A=kind.return_A,
        b_layout=kind.b_layout,
        gpu=gpu,
        sm_count=gpu_names.HOPPERS.get(gpu, 0),
    )
    if kind.activation is not None and seen.who(kind) in seen.BY_AGMM:
        epilogue = Epilogue(kind.activation)
        if gpu != CPU and not kind.dtype.startswith("float8"):
            problem = replace(problem, epilogue=epilogue.kernel)
    if kind.b_layout == "packed":
        return InvalidArgument("call: agmm has one way for weights of 4 bits")
    if 0 in (problem.m, problem.n, problem.k):
        return InvalidArgument("call: no elements")
    try:
        return explain_module.explain_any(problem, kind.scaling, kind.n)
    except InvalidArgument as error:
        return error


def _as_dict(call: RecordedCall, said: Explanation | InvalidArgument) -> dict[str, Any]:
    return {
        "call": recorded.described(call),
        "count": call.count,
        "served_by": call.kind.by,
        "reason": call.kind.reason,
        **(said.as_dict() if isinstance(said, Explanation) else {"not_explained": str(said)}),
    }
