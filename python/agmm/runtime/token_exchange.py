"""What ranks that hold tokens exchange: the rows of all of them, and the sums of rows that belong
to each. The ranks may hold different numbers of tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist

from agmm.runtime import collectives, cpu_collectives, groups, nan_check
from agmm.runtime.calls import Call
from agmm.runtime.cpu_summands import add_up
from agmm.runtime.workspaces import cpu_workspace


class Exchange(ABC):
    """The exchanges of one call.

    Args:
        counts: how many tokens each rank holds, the same on all ranks.
        call: the call, for messages.
        agreed: what has to be the same on all ranks.
    """

    has_others = True
    """Whether what is gathered is what the other ranks hold."""

    def __init__(
        self, group: dist.ProcessGroup, counts: Sequence[int], call: Call, agreed: str
    ) -> None:
        self.group, self.counts, self.call, self.agreed = group, list(counts), call, agreed
        self.rank = groups.of(group).rank

    def gather(self, shard: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks, one rank after the other, in a tensor of their own."""
        if len(self.counts) == 1:
            return shard.clone(memory_format=torch.contiguous_format)
        return self._gather(shard.contiguous())

    def scatter(self, partials: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the sum over the ranks of ``partials``, one row for each token of all
        ranks; contiguous. The sums are made in the order of the ranks."""
        return partials if len(self.counts) == 1 else self._scatter(partials)

    def _room(self, shard: torch.Tensor) -> torch.Tensor:
        """Memory for the rows of all ranks."""
        return shard.new_empty(sum(self.counts), *shard.shape[1:])

    @abstractmethod
    def _gather(self, shard: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def _scatter(self, partials: torch.Tensor) -> torch.Tensor: ...


class InSharedMemory(Exchange):
    """The exchange of CPU ranks on one host."""

    def _gather(self, shard: torch.Tensor) -> torch.Tensor:
        ranks, sizes, out = (self.rank, len(self.counts)), self._sizes(shard), self._room(shard)
        job = cpu_collectives.AllGather(*ranks, shard.view(-1), out.view(-1), sizes)
        return self._run(job, out)

    def _scatter(self, partials: torch.Tensor) -> torch.Tensor:
        ranks, sizes = (self.rank, len(self.counts)), self._sizes(partials)
        out = partials.new_empty(self.counts[self.rank], *partials.shape[1:])
        flat = partials.view(-1), out.view(-1)
        return self._run(cpu_collectives.ReduceScatter(*ranks, *flat, False, sizes), out)

    def _sizes(self, rows: torch.Tensor) -> list[int]:
        return [count * prod(rows.shape[1:]) for count in self.counts]

    def _run(self, job: cpu_collectives.Job, out: torch.Tensor) -> torch.Tensor:
        workspace = cpu_workspace(self.group)
        done = workspace.collective(job, self.call, lambda: out, agreed=self.agreed)
        assert isinstance(done, torch.Tensor)  # it is not in the background
        return done


class ByBackend(Exchange):
    """The exchange by the collectives of the group's backend, of which none leaves the order of the
    sums open."""

    def _gather(self, shard: torch.Tensor) -> torch.Tensor:
        most = max(self.counts)
        padded = shard
        if len(shard) < most:
            padded = shard.new_zeros(most, *shard.shape[1:])
            padded[: len(shard)] = shard
        found = self._gathered(padded)
        if min(self.counts) == most:
            return found
        rows, out = found.view(len(self.counts), most, *shard.shape[1:]), self._room(shard)
        for count, part, target in zip(self.counts, rows, out.split(self.counts), strict=True):
            target.copy_(part[:count])
        return out

    def _gathered(self, shard: torch.Tensor) -> torch.Tensor:
        """The shards of all ranks, which have one size."""
        with nan_check.done():
            name = self.group.group_name
            return collectives.start_all_gather(shard, name, 0, call=self.call)()

    def _scatter(self, partials: torch.Tensor) -> torch.Tensor:
        with nan_check.done():
            name = self.group.group_name
            parts = collectives.all_to_all(partials, name, self.counts, self.rank, call=self.call)
        out = torch.empty_like(parts[0])
        add_up(list(parts), 1, out)
        return out


class WithoutOthers(Exchange):
    """The exchange of a dry run, in which the other ranks hold what this one does, and of a call
    without elements."""

    has_others = False

    def _gather(self, shard: torch.Tensor) -> torch.Tensor:
        out = self._room(shard)
        if len(shard) == 0:
            return out.zero_()
        rows = torch.arange(len(out), device=shard.device) % len(shard)
        return out.copy_(shard[rows])

    def _scatter(self, partials: torch.Tensor) -> torch.Tensor:
        first = sum(self.counts[: self.rank])
        return partials[first : first + self.counts[self.rank]].clone()
