"""What every op promises of every feature, for the calls that `every_op` lists: the call is right,
or it is refused by name. Run inside the ranks of a group, on CPUs or GPUs."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from unittest import mock

import activation_work
import every_op
import torch
import torch.distributed as dist
from every_op import Call, Sizes
from rank_groups import fresh_group
from torch.utils._pytree import tree_leaves

import agmm
from agmm.integrations import async_tp
from agmm.runtime import groups

SIZES = (Sizes(), Sizes((4,), 0), Sizes(dim=1), Sizes(dim=2))
SIZES_OF = {
    "NaN look": (Sizes(), Sizes(dim=2)),
    "no rows": (Sizes((0, 3)), Sizes((2, 0), 1)),
    "compiled": (Sizes(),),
    "captured": (Sizes((4,), 0),),
}
"""Other sizes than `SIZES`, by feature."""

Found = tuple[str, str]
"""The name of a call, and what is wrong with it."""

_SENDS_NOTHING = (
    "_async_input_mm",
    "_async_input_scaled_mm",
    "_invariant_matmul",
    "_scaled_matmul",
)
_ways: dict[tuple[str, str], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


class Ways:
    """The group of all ranks, and another one whose calls the library serves.

    Args:
        hosts: the letter of each rank's host, where they are to take themselves to be on several;
            the calls then name the portable path.
    """

    def __init__(self, device: str, hosts: str = "") -> None:
        if (device, hosts) not in _ways:
            ranks = list(range(dist.get_world_size()))
            _ways[device, hosts] = dist.new_group(ranks), dist.new_group(ranks)
        self.group, self.library = _ways[device, hosts]
        self._hosts = hosts

    def by_agmm(self, call: Call) -> list[torch.Tensor]:
        if not self._hosts:
            return call(self.group)
        with mock.patch.object(groups, "host_id", return_value=self._hosts[dist.get_rank()]):
            return call(self.group)

    def by_library(self, call: Call) -> list[torch.Tensor] | None:
        """The results of the unfused path: each rank takes itself to be on a host of its own. None
        where torch's op, to which agmm then leaves the call, has no path on this device."""
        if call.settings.get("config") == "portable":
            call = call._replace(settings=call.settings | {"config": "unfused"})
        with mock.patch.object(groups, "host_id", return_value=f"host {dist.get_rank()}"):
            try:
                return call(self.library)
            except RuntimeError as error:
                if call.op not in every_op.SERVED or isinstance(error, agmm.AgmmError):
                    raise
                return None


def _is_close(found: list[torch.Tensor], wanted: list[torch.Tensor] | None) -> str | None:
    if wanted is None:
        return None
    if [t.shape for t in found] != [t.shape for t in wanted]:
        return (
            f"shapes {[tuple(t.shape) for t in found]}, wanted {[tuple(t.shape) for t in wanted]}"
        )
    for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if one.dtype != other.dtype:
            return f"result {i}: found {one.dtype}, wanted {other.dtype}"
        a, b = one.double(), other.double()
        # One rounding of the result to either side, and float32 sums in another order.
        limit = 2.0 * torch.finfo(one.dtype).eps if one.dtype.is_floating_point else 0.0
        error = (a - b).norm().item()
        if not error <= (limit + 1e-5) * (1e-30 + b.norm().item()):
            return f"result {i}: differs by {error:.3g} of {b.norm().item():.3g}"
    return None


def _same_bits(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> str | None:
    if len(found) != len(wanted) or not all(map(torch.equal, found, wanted)):
        return "other bits than in the first call"
    return None


def _copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def _sent(call: Call) -> Iterator[tuple[str, torch.Tensor]]:
    """The operands that a rank sends, or of which it sends the product."""
    if call.op.split("::")[-1] not in _SENDS_NOTHING:
        names = ("A_shard", "A", "As", "x", "scale_a", "A_scale")
        yield from ((name, tensor) for name, tensor in call.tensors() if name in names)


def _tell_ranks_apart(call: Call, rank: int) -> None:
    for _, tensor in _sent(call):
        tensor.copy_((2.0**rank * tensor.float()).to(tensor.dtype))


# --- the features: each says what is wrong, or None ---


def _is_right(call: Call, ways: Ways) -> str | None:
    return _is_close(_copies(ways.by_agmm(call)), ways.by_library(call))


def _is_strict(call: Call, ways: Ways) -> str | None:
    function = every_op.op_named(call.op)
    if not inspect.isfunction(function) or "strict" not in inspect.signature(function).parameters:
        return None
    wanted = _copies(ways.by_agmm(call))
    settings = call.settings | {"strict": True}
    # A plan may have left the first call to the library, which rounds otherwise.
    return _is_close(_copies(ways.by_agmm(call._replace(settings=settings))), wanted)


def _is_kept(call: Call, ways: Ways) -> str | None:
    """Later calls are as right as the first, and read what their operands hold then."""
    first = _copies(ways.by_agmm(call))
    fault = _same_bits(ways.by_agmm(call), first)
    if fault is not None or call.op.endswith("_async_input_mm"):
        return fault
    changed = [tensor for name, tensor in call.tensors() if name not in ("out", "residual_out")]
    for tensor in changed:
        tensor.copy_((0.5 * tensor.float()).to(tensor.dtype))
    found = _copies(ways.by_agmm(call))
    return _is_close(found, ways.by_library(call))


def _is_compiled(call: Call, ways: Ways) -> str | None:
    wanted = _copies(ways.by_agmm(call))
    torch.compiler.reset()
    compiled = torch.compile(lambda: call(ways.group), backend="aot_eager")
    found = _copies(compiled())  # the group knows its hosts since the first call
    torch.compiler.reset()
    return _is_close(found, wanted)


def _is_looked_through(call: Call, ways: Ways) -> str | None:
    """A NaN in what a rank sends is found, in fp8 and in scales too."""
    for name, tensor in _sent(call):
        tensor.view(torch.uint8).fill_(0xFF)  # NaNs in all dtypes, in what goes to any rank
        group = fresh_group()  # ranks that raise leave it out of step
        agmm.check_nan("raise")
        try:
            call(group)
            return f"a NaN in {name} was not found"
        except agmm.InvalidArgument:
            raise
        except agmm.AgmmError as error:
            if "found a NaN at" not in str(error):
                return f"a NaN in {name}: {error}"
        finally:
            agmm.check_nan("off")
            tensor.view(torch.uint8).fill_(0)
    return None


def _is_activated(call: Call, ways: Ways) -> str | None:
    """Each activation is torch's, of the products that the op has without one; operands that none
    can have are refused by name."""
    if not activation_work.takes_one(call):
        return None
    for name, variant in activation_work.variants(call):
        if activation_work.is_refused(name, variant):
            try:
                ways.by_agmm(variant)
            except agmm.InvalidArgument as error:
                if str(error).split(":")[0] in ("activation", "up", "result_scale"):
                    continue
                return f"{name}: refused by {error}"
            return f"{name}: found no refusal"
        found = _copies(ways.by_agmm(variant))
        fault = _is_close(found, activation_work.wanted(name, variant, ways.group))
        if fault is not None:
            return f"{name}: {fault}"
    return None


def _is_captured(call: Call, ways: Ways) -> str | None:
    """A graph repeats the call's bits. On GPUs only, by kernels that a capture may hold."""
    wanted = _copies(ways.by_agmm(call))
    ways.by_agmm(call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = ways.by_agmm(call)
    for _ in range(2):
        for out in outs:
            out.view(torch.uint8).fill_(0xFF)
        graph.replay()
        torch.cuda.synchronize()
    return _same_bits(outs, wanted)


FEATURES: dict[str, Callable[[Call, Ways], str | None]] = {
    "right": _is_right,
    "strict": _is_strict,
    "kept": _is_kept,
    "compiled": _is_compiled,
    "NaN look": _is_looked_through,
    "no rows": _is_right,
    "activation": _is_activated,
    "captured": _is_captured,
}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), async_tp.enable(), torch.no_grad():
        warnings.simplefilter("ignore")
        yield


RUNS_OF = {"compiled": 10}
"""Into how many runs the calls of a feature are divided, where one would take too long."""
RUNS = [(feature, run) for feature in FEATURES for run in range(RUNS_OF.get(feature, 1))]


NOT_BY_COPIES = {"agmm.matmul_all_reduce_rms_norm"}
"""The ops whose ``config`` names no portable path."""


def by_copies(calls: list[Call]) -> list[Call]:
    """The calls that can name the portable path, each naming it, once."""
    found = {}
    for call in calls:
        function = every_op.op_named(call.op)
        has_it = inspect.isfunction(function) and "config" in inspect.signature(function).parameters
        has_it = has_it and call.op not in NOT_BY_COPIES
        # These are refused with any config.
        refused = {"quantize", "batch_invariant"} & {*call.settings}
        packed = any(isinstance(each, agmm.Packed4BitWeight) for each in tree_leaves(call.operands))
        if has_it and not refused and not packed:
            one = call._replace(settings=call.settings | {"config": "portable"})
            found[f"{one} {[name for name, t in call.operands.items() if t is not None]}"] = one
    return list(found.values())


def broken(
    feature: str, run: int | None, device: str = "cpu", hosts: str | None = None
) -> list[Found]:
    """The calls that do not keep the promise, each with what is wrong or why it was refused.

    Args:
        run: which of the runs of `RUNS_OF` this is; None for all of them at once.
        hosts: None for all calls as they are; else those that name the portable path, on hosts as
            `Ways` has them.
    """
    ways = Ways(device, hosts or "")
    found: list[Found] = []
    with _quiet():
        for sizes in SIZES_OF.get(feature, SIZES):
            torch.manual_seed(0)
            calls = every_op.calls(ways.group.size(), sizes, device)
            if hosts is not None:
                calls = by_copies(calls)
            for call in calls if run is None else calls[run :: RUNS_OF.get(feature, 1)]:
                if feature == "no rows" and call.op in every_op.SERVED:
                    continue  # these are left to torch, which may have no path for them
                _tell_ranks_apart(call, ways.group.rank())
                try:
                    fault = FEATURES[feature](call, ways)
                except (agmm.InvalidArgument, agmm.Unsupported) as error:
                    fault = f"{type(error).__name__}: {error}"
                except RuntimeError as error:
                    # The calls that agmm leaves to torch's op may be such as that op does not take.
                    # CPU ranks leave none to it.
                    is_served = device != "cpu" and call.op in every_op.SERVED
                    if not is_served or isinstance(error, agmm.AgmmError):
                        raise
                    continue
                if fault is not None:
                    found.append((f"{call} of {sizes}", fault))
    return found
