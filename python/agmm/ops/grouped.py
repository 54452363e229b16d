"""The flow of calls on rows that are grouped by expert: what all of them have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from agmm.errors import InvalidArgument
from agmm.ops import grouped_dispatch
from agmm.ops.pipeline import KERNEL, LIBRARY, OpCall, Ready, Route, device_of
from agmm.runtime import backends, groups
from agmm.runtime.calls import Call
from agmm.runtime.token_exchange import ByBackend, Exchange, InSharedMemory, WithoutOthers
from agmm.runtime.workspaces import take_turn

Result = TypeVar("Result")


class GroupedCall(OpCall[Result]):
    """A call whose ranks hold tokens, perhaps different numbers of them. An op says what it
    exchanges and what it makes of that.

    Args:
        given: a tensor of the call; its device is the call's.
        tokens_per_rank: how many tokens each rank holds; empty where all hold the same number.
    """

    op: str

    def __init__(
        self,
        given: Any,
        group: dist.ProcessGroup,
        tokens_per_rank: Sequence[int],
        *,
        strict: bool,
    ) -> None:
        self.device = device_of(given)
        self.group = group
        self.strict = strict
        self._tokens_per_rank = list(tokens_per_rank)
        self.counts: list[int] = self._tokens_per_rank
        """How many tokens each rank holds, from `check_tokens` on."""

    # --- what an op says ---

    @abstractmethod
    def compute(self, exchange: Exchange) -> Result:
        """The result, by the exchanges that the route takes."""

    @abstractmethod
    def agreed(self) -> str:
        """What has to be the same on all ranks: no size that depends on the tokens' experts."""

    @abstractmethod
    def sent_columns(self) -> int:
        """How many numbers a rank sends or gets for each token."""

    # --- the flow ---

    @property
    def asked(self) -> dict[str, Any]:
        """The numbers of tokens by the name of their argument, for messages; nothing where there
        are none."""
        return {"tokens_per_rank": self._tokens_per_rank} if self._tokens_per_rank else {}

    def check_tokens(self, name: str, held: torch.Tensor) -> None:
        """Refuses numbers of tokens that are not those of the group, and sets `counts`.

        Args:
            name: the argument that has one row for each of this rank's tokens.
            held: that argument.
        """
        self.counts = counts_of(self._tokens_per_rank, held.shape[0], self.group.size())
        found, rank = self.counts, groups.of(self.group).rank
        if found[rank] != held.shape[0]:
            raise InvalidArgument(
                f"tokens_per_rank: found {found[rank]} for rank {rank}, wanted {held.shape[0]} as "
                f"the rows of {name}"
            )

    def is_empty(self) -> bool:
        return sum(self.counts) * self.sent_columns() == 0

    def without_elements(self, words: Call) -> Result:
        take_turn(self.group, self.device, self.agreed(), words)
        return self.compute(self._exchange(WithoutOthers, words))

    def route(self) -> Route:
        reason = self.why_not_fused()
        return Route(KERNEL) if reason is None else Route(LIBRARY, reason)

    def why_not_fused(self) -> str | None:
        """Why agmm itself cannot serve the call, or None. Collective at first use."""
        if self.device.type == "cpu":
            return None
        return grouped_dispatch.why_not(self.group, self.device) or self.why_no_kernel()

    def why_no_kernel(self) -> str | None:
        """Why no kernel serves the call on a GPU, or None; the same on all ranks."""
        return None

    def look(self, route: Route, words: Call) -> None:
        return None

    def prepare(self, route: Route) -> Ready:
        way = InSharedMemory if self.device.type == "cpu" else grouped_dispatch.ByKernels
        return partial(self.compute, self._exchange(way, self.words()))

    def operands(self) -> tuple[Any, ...]:
        return ()

    def finished(self, found: Any, route: Route) -> Result:
        result: Result = found
        return result

    def by_library(self, words: Call) -> Result:
        way = WithoutOthers if backends.is_fake(self.group) else ByBackend
        return self.compute(self._exchange(way, words))

    def to_keep(self, ready: Ready, found: Any) -> Ready | None:
        return None

    def _exchange(self, way: type[Exchange], words: Call) -> Exchange:
        return way(self.group, self.counts, words, self.agreed())


def counts_of(tokens_per_rank: Sequence[int], held: int, world_size: int) -> list[int]:
    """How many tokens each rank holds.

    Args:
        tokens_per_rank: what the caller says; empty where all ranks hold the same number.
        held: how many this rank holds.

    Raises:
        InvalidArgument: they are not as many as the ranks.
    """
    if not tokens_per_rank:
        return [held] * world_size
    if len(tokens_per_rank) != world_size:
        raise InvalidArgument(
            f"tokens_per_rank: found {len(tokens_per_rank)} numbers, wanted {world_size}, one for "
            "each rank"
        )
    return list(tokens_per_rank)
