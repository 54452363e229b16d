"""Which rows the experts of a rank multiply: `agmm.moe.route`, its torch op and `Routing`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from agmm.errors import InvalidArgument
from agmm.ops.checks import check_dtype, check_flag, check_matrix, check_operand
from agmm.ops.grouped import GroupedCall
from agmm.ops.library import define
from agmm.ops.pipeline import serve
from agmm.runtime import groups
from agmm.runtime.calls import Call
from agmm.runtime.token_exchange import Exchange

IDS = (torch.int32, torch.int64)


class Routing(NamedTuple):
    """Which rows the experts of this rank multiply, on the device of the ids.

    A row is a token and one of its ``k`` choices, whose expert is on this rank. Rows are sorted by
    expert, inside an expert by token, and for one token by choice. Tokens are counted over all
    ranks, in the order of the ranks. It is a tuple of tensors, so a pytree.

    The tensors have to agree with each other: on GPUs a call waits for every row that ``offsets``
    counts, so that a row which ``positions`` do not list ends the process by the limit. Drop tokens
    by their ids instead.
    """

    tokens: torch.Tensor
    """int32 [capacity]: the token of each row; 0 behind the last row."""
    choices: torch.Tensor
    """int32 [capacity]: the choice of each row, ``0 <= choice < k``; 0 behind the last row."""
    counts: torch.Tensor
    """int32 [experts of this rank]: the rows of each expert."""
    offsets: torch.Tensor
    """int32 [experts of this rank + 1]: where the rows of each expert begin; the last one is the
    number of rows. ``offsets[1:]`` is the ``offs`` of torch's grouped matmul."""
    positions: torch.Tensor
    """int32 [tokens of all ranks, k]: the row of each token and choice; -1 where the expert is on
    another rank, or the token was dropped."""
    tokens_per_rank: tuple[int, ...] | None = None
    """How many tokens each rank holds; None where all hold the same number."""


class _Arguments(NamedTuple):
    """The arguments of the torch op."""

    topk_ids: torch.Tensor
    group_name: str
    world_size: int
    num_experts: int
    num_local_experts: int
    capacity: int = -1
    """The rows of the result; -1 for the most that there can be."""
    tokens_per_rank: list[int] = []  # noqa: RUF012  # the default of the schema
    """Empty where all ranks hold the same number of tokens."""
    strict: bool = False


_Found = tuple[torch.Tensor, ...]


def _check(call: _Arguments) -> None:
    check_operand("topk_ids", call.topk_ids)
    check_matrix("topk_ids", call.topk_ids)
    check_dtype("topk_ids", call.topk_ids, IDS)
    experts, local, ranks = call.num_experts, call.num_local_experts, call.world_size
    if experts < 1:
        raise InvalidArgument(f"num_experts: found {experts}, wanted at least 1")
    if local not in (experts, experts / ranks):
        raise InvalidArgument(
            f"num_experts: found {experts} with {local} on each of {ranks} ranks, wanted "
            f"{local * ranks}, or {local} for experts of which every rank has a slice"
        )


class _Route(GroupedCall[_Found]):
    """A call of the torch op."""

    op = "route"

    def __init__(self, call: _Arguments, group: dist.ProcessGroup) -> None:
        super().__init__(call.topk_ids, group, call.tokens_per_rank, strict=call.strict)
        self._call = call

    def check(self) -> None:
        _check(self._call)
        self.check_tokens("topk_ids", self._call.topk_ids)

    def words(self) -> Call:
        call = self._call
        experts = {"num_experts": call.num_experts, "num_local_experts": call.num_local_experts}
        capacity = {"capacity": call.capacity} if call.capacity >= 0 else {}
        return Call(self.op, topk_ids=call.topk_ids, **experts, **capacity, **self.asked)

    def agreed(self) -> str:
        call = self._call
        experts = f"{call.num_experts} experts, {call.num_local_experts} on a rank"
        ids = f"{self.counts} x {call.topk_ids.shape[1]} {call.topk_ids.dtype}"
        return f"{self.op} of {ids} to {experts}, capacity {call.capacity}"

    def sent_columns(self) -> int:
        return self._call.topk_ids.shape[1]

    def compute(self, exchange: Exchange) -> _Found:
        call, rank = self._call, exchange.rank
        ids = exchange.gather(call.topk_ids.detach())
        capacity = ids.numel() if call.capacity < 0 else call.capacity
        self._check_ids(ids, capacity if exchange.has_others else ids.numel())
        whole = call.num_local_experts == call.num_experts
        first = 0 if whole else rank * call.num_local_experts
        found = rows_of(ids, first, call.num_local_experts, capacity)
        return found if exchange.has_others else within(found, capacity)

    def _check_ids(self, ids: torch.Tensor, capacity: int) -> None:
        """Refuses ids that are of no expert, and more rows of any rank than there is room for: all
        ranks alike, since each has the ids of all. On a GPU the device asserts it."""
        call = self._call
        given, is_gpu = ids.flatten(), ids.device.type == "cuda"
        if is_gpu:
            torch._assert_async((given < call.num_experts).all(), "topk_ids: found an id too large")
            if capacity >= len(given):
                return
        here = torch.where(given < 0, call.num_experts, given) // call.num_local_experts
        ranks = call.num_experts // call.num_local_experts
        rows = (here[:, None] == torch.arange(ranks, device=ids.device)).sum(0)
        if is_gpu:
            torch._assert_async((rows <= capacity).all(), "capacity: found more rows than that")
            return
        most = int(given.max()) if len(given) else -1
        if most >= call.num_experts:
            raise InvalidArgument(
                f"topk_ids: found {most}, wanted less than num_experts={call.num_experts}"
            )
        rank = int(rows.argmax())
        if int(rows[rank]) > capacity:
            owner = f"rank {rank}" if ranks > 1 or call.world_size == 1 else "every rank"
            raise InvalidArgument(
                f"capacity: found {int(rows[rank])} rows for the experts of {owner}, wanted at "
                f"most {capacity}"
            )


def rows_of(ids: torch.Tensor, first: int, experts: int, capacity: int) -> _Found:
    """The tensors of the `Routing` for experts ``first`` and later, without a look at the device.

    Args:
        ids: [tokens of all ranks, k].
        first: the first expert of this rank, of ``experts``.
        capacity: no fewer than the rows of these experts.
    """
    k, device, count = ids.shape[1], ids.device, ids.numel()
    local = ids.flatten() - first
    is_here = (local >= 0) & (local < experts)
    # A GPU sorts by a few bits at a time, so it makes fewer passes over short keys.
    keys, order = torch.where(is_here, local, experts).to(_key_dtype(experts)).sort(stable=True)
    wanted = torch.arange(experts + 1, device=device, dtype=keys.dtype)
    offsets = torch.searchsorted(keys, wanted, out_int32=True)
    numbers = torch.arange(count, device=device, dtype=torch.int32)
    rows = torch.empty_like(numbers).scatter_(0, order, numbers)
    # None of the results is a view of another tensor.
    positions = torch.where(is_here.view(ids.shape), rows.view(ids.shape), -1)
    sources = torch.where(numbers < offsets[-1], order.to(torch.int32), 0)
    if capacity > count:
        sources = torch.nn.functional.pad(sources, (0, capacity - count))
    sources = sources[:capacity]
    tokens, choices = (sources // k, sources % k) if k else (sources, sources.clone())
    return tokens, choices, offsets.diff(), offsets, positions


def _key_dtype(experts: int) -> torch.dtype:
    """The smallest dtype that holds numbers up to that of the experts."""
    return torch.int16 if experts <= torch.iinfo(torch.int16).max else torch.int32


def within(found: _Found, capacity: int) -> _Found:
    """The tensors of a `Routing` without the rows that there is no room for: a dry run knows no
    other ranks' ids, so that it says nothing that there are too many of them."""
    tokens, choices, _, offsets, positions = found
    offsets = offsets.clamp(max=capacity)
    positions = torch.where(positions < capacity, positions, -1)
    return tokens, choices, offsets.diff(), offsets, positions


def _run(call: _Arguments) -> _Found:
    return serve(_Route(call, groups.group_of_size(call.group_name, call.world_size)))


def _fake(call: _Arguments) -> _Found:
    _check(call)
    held, k = call.topk_ids.shape
    tokens = sum(call.tokens_per_rank) if call.tokens_per_rank else call.world_size * held
    capacity = tokens * k if call.capacity < 0 else call.capacity
    experts = call.num_local_experts
    shapes: tuple[Any, ...] = ((capacity,), (capacity,), (experts,), (experts + 1,), (tokens, k))
    return tuple(call.topk_ids.new_empty(shape, dtype=torch.int32) for shape in shapes)


define(
    "_route",
    _Arguments,
    "(Tensor tokens, Tensor choices, Tensor counts, Tensor offsets, Tensor positions)",
    run=_run,
    fake=_fake,
    check_grad=lambda call: None,
)


def check_number(name: str, number: Any, least: int) -> None:
    if not isinstance(number, (int, torch.SymInt)) or isinstance(number, bool) or number < least:
        raise InvalidArgument(f"{name}: found {number!r}, wanted an int of at least {least}")


def route(
    topk_ids: torch.Tensor,
    group: dist.ProcessGroup | DeviceMesh | str | None = None,
    *,
    num_experts: int,
    num_local_experts: int | None = None,
    capacity: int | None = None,
    tokens_per_rank: Sequence[int] | None = None,
    strict: bool = False,
) -> Routing:
    """Gather the experts of all ranks' tokens, and sort those of this rank's experts. Collective.

    Counts, offsets and positions are made on the device, in an order that depends on the ids alone;
    on a GPU nothing waits for the host. Every rank of the group calls with the same number of
    choices, dtype and settings, in the same order, as with any collective. ``torch.compile`` traces
    it.

    Args:
        topk_ids: int32 or int64 [T_local, k], the experts of this rank's tokens. An id below 0 is
            dropped: the token is not sent to any expert for that choice.
        group: process group, its name or a 1-D DeviceMesh; the default group when None.
        num_experts: how many experts there are on all ranks. Rank r has those from
            ``r * num_local_experts`` on.
        num_local_experts: how many of them each rank has; ``num_experts / world_size`` when None.
            ``num_experts`` where every rank has a slice of all experts.
        capacity: the rows of the result, which bound what this rank's experts may multiply; the
            same on all ranks. All choices of all tokens when None. More rows than that on any rank
            end in an error on all of them, on a GPU in an assertion of the device.
        tokens_per_rank: how many tokens each rank holds, the same on all ranks; None where all hold
            as many as this one.
        strict: raise `Unsupported` instead of leaving the gather to the group's backend.

    Returns:
        The `Routing`.

    Raises:
        InvalidArgument: names the argument, the value found and the value wanted.
        Unsupported: under ``strict`` only.
    """
    check_operand("topk_ids", topk_ids)
    check_number("num_experts", num_experts, 1)
    if num_local_experts is not None:
        check_number("num_local_experts", num_local_experts, 1)
    if capacity is not None:
        check_number("capacity", capacity, 0)
    check_flag("strict", strict)
    group_name = groups.name_of(group)
    world_size = groups.world_size_of(group_name)
    if num_local_experts is None:
        if num_experts % world_size:
            raise InvalidArgument(
                f"num_experts: found {num_experts}, wanted a multiple of the world size "
                f"{world_size}"
            )
        num_local_experts = num_experts // world_size
    tokens = checked_tokens(tokens_per_rank)
    rows, choices, counts, offsets, positions = torch.ops.agmm._route.default(
        topk_ids,
        group_name,
        world_size,
        num_experts,
        num_local_experts,
        -1 if capacity is None else capacity,
        list(tokens or ()),
        strict,
    )
    return Routing(rows, choices, counts, offsets, positions, tokens)


def checked_tokens(tokens_per_rank: Any) -> tuple[int, ...] | None:
    """The numbers of tokens as a tuple.

    Raises:
        InvalidArgument: they are no list of numbers.
    """
    if tokens_per_rank is None:
        return None
    if not isinstance(tokens_per_rank, (list, tuple)) or not tokens_per_rank:
        raise InvalidArgument(
            f"tokens_per_rank: found {tokens_per_rank!r}, wanted a list of one int for each rank"
        )
    for count in tokens_per_rank:
        check_number("tokens_per_rank", count, 0)
    return tuple(tokens_per_rank)
