"""The portable path of ranks that do not all share memory: messages between hosts, along rails,
beside what the ranks of one host exchange and multiply.

A rank's shard goes to one rank of each other host, its carrier there, which shares it with the
ranks of that host. In the mirror image a host's carrier for a rank of another one adds up the
products of its own host and sends the sum. So a shard, or a sum, goes to another host once. Ranks
of one host whose GPUs reach no memory of each other are laid out as hosts of one rank each.

`gather` and `scatter` are the protocol, for messages of any kind and for any exchange inside a
host. CPU ranks have it in `hosts`, GPUs in `cuda_hosts`.

No ranks wait in a ring, though there are two communicators: the group's backend carries messages,
and the ranks of a host exchange through memory, by other means. The messages of a call are in
batches that have a number. A batch of one rank has messages with the batches of the same number of
others alone, and every rank begins its batches in the order of their numbers, which is the order in
which the backend carries them out. By induction over the calls, and in a call over the batches, all
that is awaited comes:

- In an all-gather a rank begins all batches before anything else. They wait for no exchange of this
  call, so they end. The exchanges inside a host come in one order on its ranks, and each waits only
  for batches.
- In a reduce-scatter a batch is begun behind the exchange inside the host that makes what it sends.
  That exchange waits for earlier exchanges of the host, and these for no batch. So all sums are
  made, all batches are begun, and they end. A rank awaits them after that.

A GPU has room for both at a time: a barrier inside a host is one CTA, the backend's kernel takes a
few, and the library's matmul waits for neither of them once it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from agmm.runtime.host_layout import Layout
from agmm.runtime.portable import Consume, cuts_of

Message = tuple[int, list[torch.Tensor]]
"""The rank to send to, or to receive from, and contiguous tensors."""


class Messages(Protocol):
    """The messages of one call between ranks."""

    def begin(self, number: int, sends: Sequence[Message], receives: Sequence[Message]) -> Any:
        """Begin the batch of that number, behind what was computed so far, and return a mark of its
        end. What is sent lives until `finish`."""
        ...

    def wait(self, mark: Any) -> None:
        """What is computed from now on comes behind the mark."""
        ...

    def finish(self) -> None:
        """What was sent may be overwritten from now on."""
        ...


class Inside(Protocol):
    """What the ranks of one host exchange; each is meant by its place among them."""

    def share(
        self,
        parts: Sequence[torch.Tensor],
        targets: Sequence[Sequence[torch.Tensor]],
        consume: Consume,
        *,
        pieces: int,
        keeps_own: bool,
    ) -> None:
        """Do what `portable.gather` does; ``targets`` are its ``wholes``."""
        ...

    def sum(self, product: Callable[[int, torch.Tensor], None], into: torch.Tensor) -> None:
        """Write to ``into`` the sum over these ranks, in their order, of what ``product`` writes
        for this one: it is given the place of a rank and memory."""
        ...


class Place(NamedTuple):
    """A rank among those of its host."""

    layout: Layout
    rank: int
    near: Sequence[int]
    """The ranks of this host, in the order in which they exchange."""

    @property
    def host(self) -> int:
        return self.layout.host_of(self.rank)

    @property
    def others(self) -> list[int]:
        """The other hosts."""
        return [host for host in range(len(self.layout.hosts)) if host != self.host]

    def carried(self) -> list[list[int]]:
        """The ranks of other hosts that each rank of this one carries."""
        return [self.layout.carried(each) for each in self.near]


def gather(
    place: Place,
    messages: Messages,
    inside: Inside,
    parts: Sequence[torch.Tensor],
    wholes: Sequence[torch.Tensor],
    consume: Consume,
    *,
    pieces: int,
    keeps_own: bool,
) -> None:
    """Gather the parts of all ranks, and consume the rows of each piece once they are there: those
    of the own host first, then those of others, piece by piece. Arguments are those of
    `portable.gather`."""
    layout, rank = place.layout, place.rank
    rows = parts[0].shape[0]
    cuts = cuts_of(rows, pieces)
    carried = place.carried()
    own = carried[list(place.near).index(rank)]

    def of_cut(tensor: torch.Tensor, cut: slice) -> torch.Tensor:
        return tensor[cut] if tensor.shape[0] == rows else tensor

    marks = []
    for i, cut in enumerate(cuts):
        sent = [of_cut(part, cut) for part in parts]
        marks.append(
            messages.begin(
                i,
                [(layout.carrier(rank, host), sent) for host in place.others],
                [(source, [of_cut(whole[source], cut) for whole in wholes]) for source in own],
            )
        )
    inside.share(
        *(parts, [[whole[each] for each in place.near] for whole in wholes]),
        lambda near, cut, come: consume(place.near[near], cut, come),
        pieces=pieces,
        keeps_own=keeps_own,
    )
    for mark, cut in zip(marks, cuts, strict=True):
        messages.wait(mark)
        for turn in range(layout.rounds(place.host)):
            sources = [ranks[turn] if turn < len(ranks) else None for ranks in carried]
            come = [
                [
                    torch.empty_like(of_cut(part, cut))
                    if source is None
                    else of_cut(whole[source], cut)
                    for source in sources
                ]
                for part, whole in zip(parts, wholes, strict=True)
            ]

            def hand_on(
                near: int,
                piece: slice,
                received: list[torch.Tensor],
                sources: list[int | None] = sources,
                first: int = cut.start,
            ) -> None:
                source = sources[near]
                if source is not None:
                    consume(source, slice(first + piece.start, first + piece.stop), received)

            at = list(place.near).index(rank)
            shared = [targets[at] for targets in come]
            inside.share(shared, come, hand_on, pieces=1, keeps_own=False)
    messages.finish()


def scatter(
    place: Place,
    messages: Messages,
    inside: Inside,
    come: torch.Tensor,
    product: Callable[[int, torch.Tensor], None],
    *,
    meanwhile: Callable[[], None] | None = None,
) -> None:
    """Write what each host has for this rank, the sum of the products of its ranks, to ``come``
    [number of hosts, ...]. Sums for other hosts are made first, and sent while later ones are made.

    Args:
        product: writes the product for a rank, the first argument, to the second.
        meanwhile: called while the last messages are on their way.
    """
    layout, rank, carried = place.layout, place.rank, place.carried()
    turns = {host: layout.carried(layout.carrier(rank, host)).index(rank) for host in place.others}
    marks = []
    for turn in range(max(layout.rounds(host) for host in range(len(layout.hosts)))):
        owners = [ranks[turn] if turn < len(ranks) else None for ranks in carried]
        sends: list[Message] = []
        if any(owner is not None for owner in owners):
            part = torch.empty_like(come[0])

            def product_of(near: int, into: torch.Tensor, owners: Any = owners) -> None:
                if owners[near] is None:
                    into.zero_()
                else:
                    product(owners[near], into)

            inside.sum(product_of, part)
            owner = owners[list(place.near).index(rank)]
            if owner is not None:
                sends.append((owner, [part]))
        receives = [
            (layout.carrier(rank, host), [come[host]])
            for host in place.others
            if turns[host] == turn
        ]
        if sends or receives:
            marks.append(messages.begin(turn, sends, receives))
    inside.sum(lambda near, into: product(place.near[near], into), come[place.host])
    if meanwhile is not None:
        meanwhile()
    for mark in marks:
        messages.wait(mark)
    messages.finish()


class First:
    """The first error of what a call multiplies: its peers wait for the rest of the call, so it is
    raised when the call is done."""

    def __init__(self, consume: Consume) -> None:
        self._consume = consume
        self._error: Exception | None = None

    def __call__(self, source: int, cut: slice, come: list[torch.Tensor]) -> None:
        if self._error is None:
            try:
                self._consume(source, cut, come)
            except Exception as error:
                self._error = error

    def raise_it(self) -> None:
        if self._error is not None:
            raise self._error


class Apart:
    """The exchanges of a rank that is alone on its host."""

    def share(
        self,
        parts: Sequence[torch.Tensor],
        targets: Sequence[Sequence[torch.Tensor]],
        consume: Consume,
        *,
        pieces: int,
        keeps_own: bool,
    ) -> None:
        consume(0, slice(0, parts[0].shape[0]), list(parts))
        if keeps_own:
            for part, places in zip(parts, targets, strict=True):
                places[0].copy_(part)

    def sum(self, product: Callable[[int, torch.Tensor], None], into: torch.Tensor) -> None:
        product(0, into)
