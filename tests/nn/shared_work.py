"""What the tests of shared gathers run inside the ranks of a pool of five: a module whose linears
share a gather, beside one whose linears do not."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rank_work import group_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

import agmm
from agmm.errors import forget_warnings
from agmm.nn import GatherColwiseParallel, SharedGatherParallel, gathered

Forward = Callable[["Three", torch.Tensor], list[torch.Tensor]]

_MAKES_ZEROS = torch.__version__ < TorchVersion("2.13")
"""`DTensor.to_local` of older torch returns zeros to a parameter whose gradient is None."""


class Three(torch.nn.Module):
    """Three linears of one input, called by a forward that is given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.a, self.b, self.c = (torch.nn.Linear(16, 16) for _ in range(3))
        self.way: Forward = in_turn

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return self.way(self, x)


def _between(change: Callable[[Three, torch.Tensor], object]) -> Forward:
    """The change comes behind the first linear."""

    def forward(m: Three, x: torch.Tensor) -> list[torch.Tensor]:
        first = m.a(x)
        with torch.no_grad():
            change(m, x)
        return [first, m.b(x), m.c(x)]

    return forward


def in_turn(m: Three, x: torch.Tensor) -> list[torch.Tensor]:
    return [m.a(x), m.b(x), m.c(x)]


def _in_modes(first: Callable[[], Any], others: Callable[[], Any]) -> Forward:
    def forward(m: Three, x: torch.Tensor) -> list[torch.Tensor]:
        with first():
            found = [m.a(x)]
        with others():
            return [*found, m.b(x), m.c(x)]

    return forward


def _replaced(m: Three, x: torch.Tensor) -> None:
    weight: Any = m.b.weight
    m.b.weight = torch.nn.Parameter(weight.detach() * 3)


def _swapped(m: Three, x: torch.Tensor) -> None:
    weight: Any = m.b.weight
    torch.utils.swap_tensors(weight, torch.nn.Parameter(weight.detach() * 3))


def _with_other_weights(m: Three, x: torch.Tensor) -> list[torch.Tensor]:
    named = m.named_parameters()
    others = {name: p.detach() * 2 for name, p in named if name in ("b.weight", "c.weight")}
    first = m.a(x)
    with mock.patch.object(m, "way", lambda m, x: [m.b(x), m.c(x)]):
        found: list[torch.Tensor] = torch.func.functional_call(m, others, (x,))
    return [first, *found]


def _autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def _twice(m: Three, x: torch.Tensor) -> list[torch.Tensor]:
    return [m.a(x), m.a(x), m.b(x), m.b(x), m.c(x)]


def _recomputed(m: Three, x: torch.Tensor) -> list[torch.Tensor]:
    found: list[torch.Tensor] = checkpoint(lambda x: in_turn(m, x), x, use_reentrant=False)
    return found


def _one_recomputed(m: Three, x: torch.Tensor) -> list[torch.Tensor]:
    first: torch.Tensor = checkpoint(m.a, x, use_reentrant=False)
    return [first, m.b(x), m.c(x)]


def _one_recomputed_anew(m: Three, x: torch.Tensor) -> list[torch.Tensor]:
    first: torch.Tensor = checkpoint(m.a, x, use_reentrant=True)
    return [first, m.b(x), m.c(x)]


WAYS: dict[str, Forward] = {
    "in turn": in_turn,
    "twice": _twice,
    "x in place": _between(lambda m, x: x.detach().add_(1)),
    "x in place by a view": _between(lambda m, x: x.detach()[:1].mul_(2)),
    "weight in place": _between(lambda m, x: m.b.weight.mul_(2)),
    "bias in place": _between(lambda m, x: m.c.bias.add_(1)),
    "weight replaced": _between(_replaced),
    "weight frozen": _between(lambda m, x: m.b.weight.requires_grad_(False)),
    "other weights": _with_other_weights,
    "no grad, then grad": _in_modes(torch.no_grad, torch.enable_grad),
    "grad, then no grad": _in_modes(torch.enable_grad, torch.no_grad),
    "inference, then no grad": _in_modes(torch.inference_mode, torch.no_grad),
    "no autocast, then autocast": _in_modes(torch.enable_grad, _autocast),
    "autocast, then none": _in_modes(_autocast, torch.enable_grad),
    "recomputed": _recomputed,
    "one recomputed": _one_recomputed,
    "one recomputed anew": _one_recomputed_anew,
}


WITHOUT_GRAPH: dict[str, Forward] = {
    "weight's part in place": _between(lambda m, x: _part(m.b.weight).mul_(2)),
    "weight swapped": _between(_swapped),
}
"""The changes of which the backward of the first linear would say that a weight is another by
now."""


def _part(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def _made(shared: bool, way: str) -> Three | None:
    group = group_of(2)
    if group is None:
        return None
    mesh = DeviceMesh.from_group(group, "cpu")
    module = Three()
    plan: Any = SharedGatherParallel("a", "b", "c", sequence_dim=0)
    if not shared:
        plan = {name: GatherColwiseParallel(sequence_dim=0) for name in "abc"}
    parallelize_module(module, mesh, plan)
    module.way = {**WAYS, **WITHOUT_GRAPH}[way]
    return module


def _x(kind: str) -> torch.Tensor:
    rank = dist.get_rank()
    x = torch.randn(2, 16, generator=torch.Generator().manual_seed(rank))
    group = group_of(2)
    if kind == "dtensor" and group is not None:
        mesh = DeviceMesh.from_group(group, "cpu")
        return DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
    return x


def _run(
    module: Three, kind: str, compiled: bool = False
) -> tuple[list[torch.Tensor | None], list[bool]]:
    x = _x(kind)
    run: Any = module
    if compiled:
        torch.compiler.reset()
        run = torch.compile(module, fullgraph=True, backend="aot_eager")
    if kind == "inference":
        with torch.inference_mode():
            return run(x.clone()), []
    if kind == "no grad":
        with torch.no_grad():
            return run(x), []
    if kind == "leaf":
        x.requires_grad_()
    outs = run(x)
    found: list[torch.Tensor | None] = [out.detach() for out in outs]
    needs = [out.requires_grad for out in outs]
    try:
        torch.stack([out.float().square().sum() for out in outs]).sum().backward()
    except RuntimeError:  # what was saved is another by now: autograd says so of both
        return found, [*needs, False]
    if kind == "leaf":
        found.append(x.grad)
    for parameter in module.parameters():
        grad = parameter.grad
        found.append(_part(grad) if grad is not None else None)
    if _MAKES_ZEROS:
        found = [None if one is not None and not one.any() else one for one in found]
    return found, needs


def as_each_by_itself(way: str, kind: str, compiled: bool = False) -> tuple[list[str], int] | None:
    """What differs from linears that share nothing, and how many gathers the forward made."""
    shared, single = _made(True, way), _made(False, way)
    if shared is None or single is None:
        return None
    forget_warnings()
    gather = mock.Mock(wraps=agmm.all_gather_matmul)
    with warnings.catch_warnings(record=True):
        if compiled:
            found, needs = _run(shared, kind, True)
        else:
            with mock.patch.object(gathered, "all_gather_matmul", gather):
                found, needs = _run(shared, kind)
    wanted, wanted_needs = _run(single, kind)
    torch.compiler.reset()
    faults = [] if needs == wanted_needs else [f"requires_grad {needs}, wanted {wanted_needs}"]
    limit = 2e-2 if "autocast" in way else 1e-5
    for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if (one is None) != (other is None):
            faults.append(f"{i}: found {one}, wanted {other}")
        elif one is None or other is None:
            continue
        elif one.dtype != other.dtype or not torch.allclose(one, other, rtol=limit, atol=limit):
            faults.append(f"{i}: {one.dtype} {one - other} off")
    return faults, gather.call_count


def across_a_graph_break() -> bool | None:
    """Whether an input that is changed between two compiled parts of a forward is gathered anew."""
    shared = _made(True, "in turn")
    if shared is None:
        return None

    def change(x: torch.Tensor) -> None:
        torch._dynamo.graph_break()
        x.add_(1)
        torch._dynamo.graph_break()

    single = _made(False, "in turn")
    assert single is not None
    shared.way = single.way = _between(lambda m, x: change(x))
    torch.compiler.reset()
    run: Any = torch.compile(shared, backend="aot_eager")
    same = []
    for _ in range(3):
        with torch.no_grad():
            found, wanted = run(_x("")), single(_x(""))
        same += [torch.allclose(one, other) for one, other in zip(found, wanted, strict=True)]
    torch.compiler.reset()
    return all(same)


def warned_of_inference() -> list[str] | None:
    shared = _made(True, "in turn")
    if shared is None:
        return None
    forget_warnings()
    with warnings.catch_warnings(record=True) as caught, torch.inference_mode():
        warnings.simplefilter("always")
        for _ in range(2):
            shared(_x("").clone())
    return [str(one.message) for one in caught]


def what_is_kept() -> dict[str, bool] | None:
    """Whether the input and the outputs are given up when the module's forward has ended, by an
    exception too, and a backward between calls outside it does not matter."""
    shared = _made(True, "in turn")
    if shared is None:
        return None

    def leaves_out(m: Three, x: torch.Tensor) -> list[torch.Tensor]:
        return [m.a(x)]

    def raises(m: Three, x: torch.Tensor) -> list[torch.Tensor]:
        m.a(x)
        raise ValueError("between the linears")

    found = {}
    for name, way in (("ended", leaves_out), ("raised", raises)):
        shared.way = way
        x = _x("")
        ref = weakref.ref(x)
        with contextlib.suppress(ValueError):
            shared(x)
        del x
        gc.collect()
        found[name] = ref() is None
    x = _x("")
    ref = weakref.ref(x)
    with torch.no_grad():
        for linear in (shared.a, shared.b, shared.c):
            linear(x)
    del x
    gc.collect()
    found["all called"] = ref() is None
    x = _x("").requires_grad_()
    shared.a(x).sum().backward()
    shared.b(x).sum().backward()
    found["backward between"] = x.grad is not None
    return found


def of_a_copy() -> bool | None:
    """Whether the linears of a deep copy multiply by their own weights."""
    shared = _made(True, "in turn")
    if shared is None:
        return None
    twin = copy.deepcopy(shared)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2)
        pairs = zip(shared(_x("")), twin(_x("")), strict=True)
        return all(torch.allclose(2 * one, other) for one, other in pairs)
