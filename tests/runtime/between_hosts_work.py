"""Every op, layer and integration in groups that span hosts, run by CPU ranks that take themselves
to be on hosts of their own. What is wanted is what the same calls give in a group on one host."""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import cpu_async_tp_work
import every_op
import torch
import torch.distributed as dist
from every_op import Call, Sizes
from rank_groups import fresh_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import agmm
from agmm.errors import forget_warnings
from agmm.integrations import async_tp, fsdp
from agmm.nn import ColumnParallelLinear, GatedMLP, MoE, RowParallelLinear
from agmm.ops import portable
from agmm.planning import built_kernels
from agmm.runtime import groups
from agmm.runtime.hosts import CpuHosts

SIZES = (Sizes(), Sizes(dim=1))


class Sides:
    """A group of all ranks on one host, and one whose rank i is on the host that letter i of
    ``hosts`` names."""

    def __init__(self, hosts: str) -> None:
        ranks = list(range(dist.get_world_size()))
        self.near, self.far = dist.new_group(ranks), dist.new_group(ranks)
        self._host = hosts[dist.get_rank()]
        count = len(set(hosts))
        self.reason = f"group: found ranks on {count} hosts, wanted one"

    @contextmanager
    def apart(self) -> Iterator[list[str]]:
        """The ranks are on those hosts. Yields the warnings that are given."""
        here = mock.patch.object(groups, "host_id", return_value=self._host)
        with here, heard() as said:
            yield said

    def fault_of(
        self,
        call: Callable[[dist.ProcessGroup], list[Any]],
        *,
        strict: Callable[[dist.ProcessGroup], list[Any]] | None = None,
    ) -> str | None:
        """What is wrong with a call that spans the hosts, or None. It warns of them once, but for
        the collectives, of which each kind has a warning."""
        with heard() as before:
            wanted = _copies(call(self.near))
        with self.apart() as said:
            found = _copies(call(self.far))
        fault = _differ(found, wanted)
        new = [text for text in said if text not in before]
        paths = [text for text in new if "agmm takes the" in text]
        is_named = [self.reason in text or "on the portable path" in text for text in new]
        if fault is None and (paths[1:] or not all(is_named)):
            fault = f"warned {said}"
        return fault or (None if strict is None else self._fault_of_strict(strict, wanted))

    def _fault_of_strict(
        self, call: Callable[[dist.ProcessGroup], list[Any]], wanted: list[Any]
    ) -> str | None:
        """A strict call is served without a warning, or refused by name."""
        with self.apart() as said:
            try:
                found = call(self.far)
            except agmm.Unsupported as error:
                text = str(error)
                is_named = self.reason in text or "_dim" in text or "portable" in text
                return None if is_named else f"strict: refused by {text}"
        return _differ(found, wanted) or (f"strict: warned {said}" if said else None)


SERVED = {"all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"}
SERVED |= {"all_gather_scaled_matmul", "scaled_matmul_reduce_scatter", "scaled_matmul_all_reduce"}
"""The ops that messages between hosts serve, by their names in messages."""


def by_messages(what: Callable[[str], list[str]], hosts: str) -> list[str]:
    """Faults of such calls where AGMM_MESSAGES is on, of any number of rows, and the ops that
    messages have not served."""
    served = set()

    def noted(group: dist.ProcessGroup, call: Any) -> CpuHosts:
        served.add(call.op)
        return CpuHosts(group, call)

    with (
        mock.patch.object(portable, "PORTABLE_ROWS", 1),
        mock.patch.object(portable, "CpuHosts", noted),
        mock.patch.dict(os.environ, AGMM_MESSAGES="on"),
    ):
        faults = what(hosts)
    return faults + sorted(SERVED - served if what is ops else [])


def at_odds(hosts: str, what: str) -> str:
    """The error of ranks of which one asks for messages, or has another build, alone."""
    sides, is_first = Sides(hosts), dist.get_rank() == 0
    differ: Any = mock.patch.dict(os.environ, AGMM_MESSAGES="on" if is_first else "off")
    if what == "build":
        build = "0.3.1/2/ab" if is_first else "0.3.0/178/cd"
        differ = mock.patch.object(built_kernels, "build", return_value=build)
    with sides.apart(), differ:
        try:
            A, B = torch.ones(1024, 4), torch.ones(4, 4)
            if what == "sum":
                agmm.matmul_all_reduce(A, B, fresh_group())
            agmm.all_gather_matmul(A, B, sides.near if what == "build" else sides.far)
        except agmm.AgmmError as error:
            return str(error)
    return "no error"


@contextmanager
def heard() -> Iterator[list[str]]:
    """Yields the warnings that are given inside, as if none had been given before."""
    forget_warnings()
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
        said += [str(warning.message) for warning in caught]


def _differ(found: list[Any], wanted: list[Any]) -> str | None:
    if len(found) != len(wanted):
        return f"{len(found)} tensors, wanted {len(wanted)}"
    for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if (one is None) != (other is None):
            return f"tensor {i}: found {one}, wanted {other}"
        if one is None:
            continue
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return f"tensor {i}: found {one.shape} {one.dtype}, wanted {other.shape} {other.dtype}"
        is_float = one.dtype.is_floating_point
        limit = 2 * torch.finfo(one.dtype).eps + 1e-5 if is_float else 0.0
        a, b = one.double(), other.double()
        if not (a - b).norm() <= limit * (1e-30 + b.norm()):
            return f"tensor {i}: differs by {(a - b).norm():.3g} of {b.norm():.3g}"
    return None


def _copies(tensors: list[Any]) -> list[Any]:
    return [tensor if tensor is None else tensor.detach().clone() for tensor in tensors]


def ops(hosts: str) -> list[str]:
    """Faults of all ops: their values, their warnings, and what they refuse under ``strict``."""
    sides, faults = Sides(hosts), []
    with torch.no_grad(), async_tp.enable():
        for sizes in SIZES:
            torch.manual_seed(0)
            for call in every_op.calls(dist.get_world_size(), sizes):
                strict = _strict(call)
                fault = sides.fault_of(
                    call.__call__, strict=None if strict is None else strict.__call__
                )
                faults += [] if fault is None else [f"{call} of {sizes}: {fault}"]
    return faults


def _strict(call: Call) -> Call | None:
    """The call under ``strict``; None for an op that has no such setting."""
    function = every_op.op_named(call.op)
    if not inspect.isfunction(function) or "strict" not in inspect.signature(function).parameters:
        return None
    if call.settings.get("config") == "unfused":
        return None  # which is refused on any hosts
    return call._replace(settings=call.settings | {"strict": True})


def backward(hosts: str) -> list[str]:
    """Faults of the gradients of all ops that have a backward."""
    sides, faults = Sides(hosts), []
    torch.manual_seed(0)
    for call in every_op.calls(dist.get_world_size(), Sizes()):
        if call.has_backward:
            fault = sides.fault_of(functools.partial(_gradients, call))
            faults += [] if fault is None else [f"{call}: {fault}"]
    return faults


def _gradients(call: Call, group: dist.ProcessGroup) -> list[torch.Tensor | None]:
    operands = [tensor for name, tensor in call.tensors() if name not in ("out", "residual_out")]
    for operand in operands:
        operand.requires_grad_()
        operand.grad = None
    sums = [out.float().square().sum() for out in call(group) if out.requires_grad]
    torch.stack(sums).sum().backward()
    found = [operand.grad for operand in operands]
    for operand in operands:
        operand.requires_grad_(False)
    return found


def _layers(size: int) -> dict[str, tuple[Callable[..., torch.nn.Module], int]]:
    """Makers of layers for a group, each with the columns of its input."""
    n = 16 * size
    return {
        "columns": (lambda group: ColumnParallelLinear(8, [n, 2 * n], group=group), 8),
        "columns, saved": (
            lambda group: ColumnParallelLinear(8, n, group=group, save_gathered=True),
            8,
        ),
        "columns of all rows": (
            lambda group: ColumnParallelLinear(8, n, group=group, sequence_parallel=False),
            8,
        ),
        "columns in fp8": (
            lambda group: ColumnParallelLinear(16, n, group=group, fp8="rowwise"),
            16,
        ),
        "rows": (lambda group: RowParallelLinear(n, 8, group=group), 16),
        "rows of all rows": (
            lambda group: RowParallelLinear(n, 8, group=group, sequence_parallel=False),
            16,
        ),
        "rows in fp8": (lambda group: RowParallelLinear(n, 16, group=group, fp8="tensorwise"), 16),
        "gated": (lambda group: GatedMLP(8, n, group=group), 8),
        "experts": (lambda group: MoE(8, n, 2 * size, 2, group=group), 8),
        "sliced experts": (lambda group: MoE(8, n, 4, 2, group=group, sliced=True), 8),
    }


def layers(hosts: str) -> list[str]:
    """Faults of the results and of the gradients of layers."""
    sides, faults = Sides(hosts), []
    size = dist.get_world_size()
    for name, (make, columns) in _layers(size).items():
        fault = sides.fault_of(functools.partial(_trained, make, columns))
        faults += [] if fault is None else [f"{name}: {fault}"]
    return faults


def _trained(
    make: Callable[..., torch.nn.Module], columns: int, group: dist.ProcessGroup
) -> list[torch.Tensor | None]:
    """The results of a layer, and the gradients of its input and of this rank's parameters."""
    layer = make(group)
    torch.manual_seed(3)
    for parameter in layer.parameters():
        local: Any = parameter.detach()
        getattr(local, "to_local", lambda local=local: local)().normal_(std=0.2)
    x = torch.randn(4 * group.size(), columns).requires_grad_()
    results = layer(x)
    results = results if isinstance(results, tuple) else (results,)
    torch.stack([result.square().sum() for result in results]).sum().backward()
    gradients: list[Any] = [parameter.grad for parameter in layer.parameters()]
    return [*results, x.grad, *(getattr(g, "to_local", lambda g=g: g)() for g in gradients)]


def compiled(hosts: str) -> list[str]:
    """Faults of compiled calls: of layers with their backward, and of what torch's async-TP pass
    makes of a gather, two matmuls and a reduce-scatter."""
    sides, faults = Sides(hosts), []
    size = dist.get_world_size()
    for name in ("columns", "gated"):
        make, columns = _layers(size)[name]

        def in_graph(
            group: dist.ProcessGroup, make: Callable[..., torch.nn.Module] = make
        ) -> torch.nn.Module:
            torch.compiler.reset()
            layer = make(group)
            layer.compile(backend="aot_eager")
            return layer

        with sides.apart():
            wanted = _copies(_trained(make, columns, sides.far))
            fault = _differ(_trained(in_graph, columns, sides.far), wanted)
        faults += [] if fault is None else [f"{name}: {fault}"]

    def halves(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        A = cpu_async_tp_work.all_gather(x, 0, sides.far)
        product = torch.relu(A @ up) @ down
        out: torch.Tensor = cpu_async_tp_work.reduce_scatter(product, "sum", 0, sides.far)
        return out

    torch.manual_seed(dist.get_rank())
    operands = torch.randn(4, 16), torch.randn(16, 8), torch.randn(8, 16)
    with sides.apart(), async_tp.enable(), torch.no_grad():
        _, found, code = cpu_async_tp_work.compiled_by_pass(halves, sides.far, *operands)
        fault = _differ([found], [halves(*operands)])
    for op in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        faults += [] if op in code else [f"the pass has not made a {op}"]
    return faults + ([] if fault is None else [f"async TP: {fault}"])


def sharded(hosts: str) -> list[str]:
    """Faults of a step of FSDP2 over the hosts, whose collectives are the backend's there."""
    sides = Sides(hosts)

    def trained(group: dist.ProcessGroup) -> list[torch.Tensor | None]:
        torch.manual_seed(5)
        model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))
        mesh = DeviceMesh.from_group(group, "cpu")
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
        fsdp.enable(model)
        torch.manual_seed(dist.get_rank())
        out = model(torch.randn(4, 6))
        out.square().sum().backward()
        gradients: list[Any] = [parameter.grad for parameter in model.parameters()]
        return [out, *(gradient.to_local() for gradient in gradients)]

    fault = sides.fault_of(trained)
    return [] if fault is None else [fault]
