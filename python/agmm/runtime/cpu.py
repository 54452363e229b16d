"""The CPU backend: all-gather and reduce-scatter through POSIX shared memory, multiplication by
torch."""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import ClassVar

import torch
import torch.distributed as dist

from agmm import _core, _env
from agmm.errors import AgmmError, Unsupported
from agmm.runtime import calls, cpu_collectives, cpu_scatter, groups, nan_check
from agmm.runtime.background import Task, Worker
from agmm.runtime.calls import Call
from agmm.runtime.groups import Group

_READY = 1
_NAN_BYTE = 0xFF  # a NaN in every floating-point type when all bytes of the number are this


def arrivals(m: int, a_chunk_signals: torch.Tensor, pivot: int) -> Iterator[slice]:
    """The rows of each chunk of ``m`` rows once its signal is 1, in ring order from ``pivot``. The
    signals are a 1-D uint32 tensor whose length divides ``m``."""
    chunks = a_chunk_signals.numel()
    rows = m // chunks
    base, stride = a_chunk_signals.data_ptr(), 4 * a_chunk_signals.stride(0)
    rank = dist.get_rank() if dist.is_initialized() else -1
    limit_s = _env.timeout_s()
    for step in range(chunks):
        chunk = (pivot + step) % chunks
        _core.cpu_wait_signal(base + chunk * stride, _READY, rank, -1, chunk, limit_s)
        yield slice(chunk * rows, (chunk + 1) * rows)


def async_input_mm(
    a: torch.Tensor, b: torch.Tensor, a_chunk_signals: torch.Tensor, pivot: int
) -> torch.Tensor:
    """Multiply ``a`` [M, K] by ``b`` [K, N], each row chunk of ``a`` once its signal is 1.

    The arguments have been checked by the caller.
    """
    out = a.new_empty(a.shape[0], b.shape[1])
    for rows in arrivals(a.shape[0], a_chunk_signals, pivot):
        _multiply(a[rows], b, None, out[rows])
    return out


@lru_cache(maxsize=4096)
def _tag(rows: int, k: int, what: str, return_A: bool) -> int:
    return _core.call_tag(rows, k, what, return_A)


class CpuWorkspace:
    """Two slots per rank of one group, in shared memory: each for a gathered A or a sum's parts.

    Every method that is said to be collective must be called by all ranks of the group, in the same
    order. Threads of a process take turns.
    """

    poison: ClassVar[bool] = False
    """For tests: fill each slot with NaN before its senders may write to it."""

    rank: int
    world_size: int
    slot_bytes: int

    def __init__(
        self, group: dist.ProcessGroup, slot_bytes: int, *, chunks_per_shard: int = 1
    ) -> None:
        # Weakly: workspaces are kept by group, and end with it.
        self._group_ref = weakref.ref(group)
        self._group = groups.of(group)
        self._chunks_per_shard = chunks_per_shard
        self._push_delay_us = 0
        self._lent: Sequence[torch.Tensor] | torch.Tensor | None = None  # the copy thread reads it
        self._worker = Worker()
        self._interrupted = False
        self._refused: tuple[int, int, str] | None = None
        calls.be_asked()
        self._use(_connect(self._group, slot_bytes, chunks_per_shard, poison=self.poison))

    @classmethod
    def create(
        cls, group: dist.ProcessGroup, slot_bytes: int, *, chunks_per_shard: int = 1
    ) -> CpuWorkspace:
        """Make the workspace of ``group``. Collective.

        Args:
            group: a process group.
            slot_bytes: size of one slot in bytes; the largest value of all ranks counts.
            chunks_per_shard: row chunks into which each shard is cut, the same on all ranks.

        Raises:
            Unsupported: the ranks are not all on one host, or a rank could not get or map the
                memory; all ranks raise.
            AgmmError: not all ranks came within AGMM_TIMEOUT_S.
        """
        return cls(group, slot_bytes, chunks_per_shard=chunks_per_shard)

    def _use(self, core: _core.CpuWorkspace) -> None:
        self._core = core
        self._finalizer = weakref.finalize(self, _close, core, self._worker)
        self.rank = core.rank
        self.world_size = core.world_size
        self.slot_bytes = core.slot_bytes
        self._chunks_per_shard = core.chunks_per_shard
        self._slots = [_bytes_at(core.slot_ptr(s), self.slot_bytes) for s in (0, 1)]
        self._next_slot = 0
        core.set_push_delay_us(self._push_delay_us)

    def close(self) -> None:
        """Stop the copy thread and give the memory back. Harmless when called again."""
        self._slots = []
        self._finalizer()

    def set_push_delay_us(self, us: int) -> None:
        """For tests: delay every chunk by a random time up to ``us`` before it is pushed."""
        self._push_delay_us = us
        self._core.set_push_delay_us(us)

    @torch.no_grad()
    def all_gather_matmul(
        self,
        A_shard: torch.Tensor,
        Bs: list[torch.Tensor],
        biases: list[torch.Tensor | None],
        *,
        return_A: bool,
        chunks_per_shard: int | None = None,
        timeline: list[dict[str, int]] | None = None,
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """Gather ``A_shard`` and multiply it by each of ``Bs``. Collective.

        Grows the slots where A [world_size * M_local, K] is too large or has too many chunks. A
        multiplication that fails leaves the group in step: the call raises when all else is done.

        Args:
            A_shard: [M_local, K], contiguous, the same shape and dtype on all ranks. It may be
                overwritten as soon as this returns.
            Bs: weights [K, N], N free for each of them and on each rank.
            biases: for each weight a bias [N] or None.
            return_A: whether A [M, K] is wanted, in a tensor of its own.
            chunks_per_shard: row chunks of each shard, the same on all ranks; None: as many as the
                workspace has room for.
            timeline: where given, receives for each chunk a dict with ``chunk``, ``source`` and,
                in ns of ``time.monotonic_ns``, ``arrived_ns``, ``start_ns`` and ``end_ns`` of its
                multiplication. ``arrived_ns`` of the rank's own chunks is the time of the call.

        Returns:
            A or None, and out [M, N] for each weight.

        Raises:
            Unsupported: the slots would have to grow, and a rank has no memory for it; all ranks
                raise, and keep the slots they had.
            AgmmError: an earlier call on this workspace was interrupted or the workspace is closed.
        """
        call = Call("all_gather_matmul", A_shard=A_shard, B=Bs, return_A=return_A)
        if nan_check.active:
            nan_check.look_through(call.op, "A_shard", A_shard, self.rank)
        name = str(A_shard.dtype).removeprefix("torch.")
        with self._group.lock:
            chunks = chunks_per_shard or self._chunks_per_shard
            tag = _tag(*A_shard.shape, f"{name} in {chunks} chunks", return_A)
            with self._in_step(tag, call):
                self._make_room(self.world_size * A_shard.nbytes, chunks, tag)
                A, outs, error = self._run(A_shard, Bs, biases, return_A, chunks, tag, timeline)
        if error is not None:
            raise error
        return A, outs

    @torch.no_grad()
    def all_gather_records(
        self,
        records: torch.Tensor,
        consume: Callable[[int, int, torch.Tensor], None],
        call: Call,
        *,
        agreed: str,
    ) -> None:
        """Hand the records of all ranks to ``consume``, each once it has arrived. Collective.

        Grows the slots where they are too small.

        Args:
            records: uint8 [chunks, bytes], contiguous, the same shape on all ranks; at least one
                chunk. It may be overwritten as soon as this returns.
            consume: called for each record with the rank that it is from, its number there and the
                record, which is valid during the call; the own ones first. What it raises is raised
                when the call is done.
            call: the call, for messages.
            agreed: what else has to be the same on all ranks.

        Raises:
            Unsupported: as `all_gather_matmul`.
            AgmmError: as `all_gather_matmul`.
        """
        chunks, record_bytes = records.shape
        error: Exception | None = None
        with self._group.lock:
            tag = _tag(chunks, record_bytes, f"records {agreed}", False)
            with self._in_step(tag, call):
                self._make_room(self.world_size * records.nbytes, chunks, tag)
                core, slot = self._core, self._take_slot()
                self._lent = records
                core.push(slot, records.data_ptr(), records.nbytes, record_bytes, tag)
                arrived = self._slots[slot][: self.world_size * records.nbytes]
                arrived = arrived.view(self.world_size, chunks, record_bytes)
                for source, i in self._arrivals(slot, tag):
                    if i >= chunks:
                        continue
                    try:
                        own = source == self.rank
                        consume(source, i, records[i] if own else arrived[source, i])
                    except Exception as e:  # the peers wait for the rest of this call
                        error = error or e
                if self.poison:
                    self._slots[slot].fill_(_NAN_BYTE)
                core.release(slot)
                core.wait_pushed()
                self._lent = None
        if error is not None:
            raise error

    @torch.no_grad()
    def matmul_reduce_scatter(
        self,
        As: list[torch.Tensor],
        Bs: list[torch.Tensor],
        bias: torch.Tensor | None,
        reduce_op: str,
        call: Call,
        *,
        agreed: str = "",
        pieces: int = 1,
        meanwhile: Callable[[], None] | None = None,
        timeline: list[dict[str, int]] | None = None,
    ) -> torch.Tensor:
        """`reduce_scatter` of ``sum(A @ B)``. Collective.

        Args:
            As: [M, K_i], of one dtype, M a multiple of the world size and the same on all ranks.
            Bs: [K_i, N], one for each of ``As``; N at least 1 and the same on all ranks.
            bias: [N] or None; added to the sum before it is rounded.
            reduce_op, call, agreed, pieces, meanwhile, timeline: as `reduce_scatter`.

        Returns:
            out [M / world_size, N].

        Raises:
            Unsupported: as `all_gather_matmul`.
            AgmmError: as `all_gather_matmul`.
        """
        return self.reduce_scatter(
            cpu_scatter.plain_sum(As, Bs, bias),
            reduce_op,
            call,
            agreed=agreed,
            pieces=pieces,
            meanwhile=meanwhile,
            timeline=timeline,
        )

    @torch.no_grad()
    def reduce_scatter(
        self,
        summed: cpu_scatter.Sum,
        reduce_op: str,
        call: Call,
        *,
        agreed: str = "",
        pieces: int = 1,
        meanwhile: Callable[[], None] | None = None,
        timeline: list[dict[str, int]] | None = None,
    ) -> torch.Tensor:
        """This rank's rows of the sum over the ranks of their products. Collective.

        Products and sums are made in float32 (float64 for float64); what goes to another rank is
        rounded once, and so is the result. The parts are added in the order of the ranks, so the
        result has the same bits in every call. Grows the slots where they are too small. Large
        calls go through them in bands (`_core.scatter_bands`).

        Args:
            summed: of a number of rows that is a multiple of the world size; rows, columns and
                dtypes the same on all ranks, at least one column.
            reduce_op: "sum", or "avg" for the sum divided by the world size.
            call: the call, for messages.
            agreed: what else has to be the same on all ranks.
            pieces: into how many pieces of rows each rank's part of a band is cut, the same on all
                ranks.
            meanwhile: called once, when all has been sent to the other ranks and their last parts
                are still to be awaited. What it raises is raised when the call is done.
            timeline: is extended by a dict for each piece: its ``chunk`` (the rank that owns the
                rows), ``start_ns`` and ``end_ns`` (of the product), ``done_ns`` (when it was handed
                to the copying thread, or, of an own piece, when the others' parts were there), by
                `time.monotonic_ns`, and ``called_ns``.

        Returns:
            out [M / world_size, N].

        Raises:
            Unsupported: as `all_gather_matmul`.
            AgmmError: as `all_gather_matmul`.
        """
        rows, columns = summed.rows, summed.columns
        name = str(summed.sent_dtype).removeprefix("torch.")
        with self._group.lock:
            what = f"{reduce_op} of {name} in {pieces} pieces {agreed}"
            tag = _tag(rows, columns, what, False)
            slot_bytes = _core.scatter_slot_bytes(
                rows, columns * summed.sent_dtype.itemsize, self.world_size
            )
            with self._in_step(tag, call):
                self._make_room(slot_bytes, pieces, tag)
                divisor = self.world_size if reduce_op == "avg" else 1
                out, error = self._run_scatter(
                    summed, divisor, pieces, tag, call.op, meanwhile, timeline=timeline
                )
        if error is not None:
            raise error
        return out

    @torch.no_grad()
    def matmul_all_reduce(
        self,
        A: torch.Tensor,
        B: torch.Tensor,
        bias: torch.Tensor | None,
        call: Call,
        *,
        agreed: str = "",
    ) -> torch.Tensor:
        """The sum over the ranks of ``A @ B``, with the same bits on all of them. Collective.

        Band after band of rows (`_core.scatter_bands`) is scattered as `matmul_reduce_scatter` does
        it, then the parts of the sum are gathered. A band whose rows the ranks cannot share equally
        is filled up with zeros. Grows the slots where they are too small.

        Args:
            A: [M, K], of any number of rows, the same on all ranks; at least 1.
            B: [K, N], of one N on all ranks; at least 1.
            bias: [N] or None; added to the sum before it is rounded.
            call: the call, for messages.
            agreed: what else has to be the same on all ranks.

        Returns:
            out [M, N], contiguous.

        Raises:
            Unsupported: as `all_gather_matmul`.
            AgmmError: as `all_gather_matmul`.
        """
        rows, columns = A.shape[0], B.shape[1]
        shared = -(-rows // self.world_size)
        name = str(A.dtype).removeprefix("torch.")
        bands = _core.scatter_bands(shared * self.world_size, self.world_size)
        with self._group.lock:
            tag = _tag(rows, columns, f"all_reduce of {name} {agreed}", False)
            most_rows = max(end - begin for begin, end in bands) * self.world_size
            with self._in_step(tag, call):
                self._make_room(most_rows * columns * A.element_size(), 1, tag)
                out = A.new_empty(rows, columns)
                for begin, end in bands:
                    band = slice(begin * self.world_size, min(end * self.world_size, rows))
                    a = A[band]
                    missing = (end - begin) * self.world_size - len(a)
                    if missing:
                        a = torch.nn.functional.pad(a, (0, 0, 0, missing))
                    part, _ = self._run_scatter(
                        cpu_scatter.plain_sum([a], [B], bias),
                        1,
                        1,
                        tag,
                        call.op,
                        row_of_A=band.start,
                        rows_of_A=rows,
                    )
                    whole, _, _ = self._run(part, [], [], True, 1, tag, None)
                    assert whole is not None
                    out[band] = whole[: len(out[band])]
        return out

    @torch.no_grad()
    def collective(
        self,
        job: cpu_collectives.Job,
        call: Call,
        finish: Callable[[], torch.Tensor],
        *,
        agreed: str,
        in_background: bool = False,
    ) -> Task[torch.Tensor] | torch.Tensor:
        """A collective without a matmul. Collective.

        Grows the slots where they are too small, to a power of two. Large tensors go through them
        in bands, so that they need no more than `cpu_collectives.BAND_BYTES`.

        Args:
            job: what is exchanged, and what becomes of it.
            call: the call, for messages.
            finish: called when that is done, for what this returns.
            agreed: what has to be the same on all ranks.
            in_background: return once the call has its place in the order of the group's calls. A
                thread of the workspace carries it out, and later calls wait for it.

        Returns:
            what ``finish`` returns, or the task that returns it.

        Raises:
            Unsupported: as `all_gather_matmul`.
            AgmmError: as `all_gather_matmul`.
        """
        tag = _tag(0, 0, agreed, False)
        slot_bytes = job.slot_bytes()

        def run() -> torch.Tensor:
            self._lent = job.lent
            job.run(lambda outgoing, incoming: self._exchange(outgoing, incoming, tag))
            found = finish()
            self._lent = None
            return found

        def later() -> torch.Tensor:
            with torch.no_grad():  # which is for each thread
                self._check_usable()
                with self._under_way(tag, call):
                    return run()

        with self._group.lock:
            if in_background and slot_bytes <= self.slot_bytes:
                self._begin(call)
                return self._worker.add(later)
            with self._in_step(tag, call):
                self._make_room(slot_bytes, 1, tag)
                if not in_background:
                    return run()
            return self._worker.add(later)

    def reserve(self, slot_bytes: int) -> None:
        """Grow the slots to at least ``slot_bytes``, the same on all ranks. Collective.

        Raises:
            Unsupported: a rank has no memory for it; all ranks raise, and keep the slots they had.
        """
        tag = _tag(0, 0, f"reserve {slot_bytes}", False)
        with self._in_step(tag, Call("reserve", nbytes=slot_bytes)):
            self._pass_tag(tag)
            self._make_room(slot_bytes, self._chunks_per_shard, tag)

    def meet(self, what: str, call: Call) -> None:
        """Waits until all ranks are about to do the same with the group's backend. Collective.

        That has limits and messages of its own, and takes a collective of another kind or shape for
        this one. After this it finds its peers there, with the same call.

        Args:
            what: what has to be the same on all ranks.
            call: the call, for messages.
        """
        if self.world_size == 1:
            return
        tag = _tag(0, 0, what, False)
        with self._in_step(tag, call):
            self._pass_tag(tag)

    @contextmanager
    def _in_step(self, tag: int, call: Call) -> Iterator[None]:
        """One call of the group, after those in the background."""
        with self._group.lock:
            self._worker.wait_idle()
            self._begin(call)
            with self._under_way(tag, call):
                yield

    def _begin(self, call: Call) -> None:
        """What precedes each call of the group, in their order."""
        self._check_usable()
        self._core.timeout_s = _env.timeout_s()
        self._core.warn_s = _env.warn_s()
        self._group.calls += 1
        call.number = self._group.calls

    def _check_usable(self) -> None:
        if self._interrupted:
            raise AgmmError(
                "workspace: found one whose last call was interrupted, wanted one in step with "
                "the other ranks; make a new process group"
            )
        if not self._finalizer.alive:
            raise AgmmError("workspace: found a closed one, wanted an open one")

    @contextmanager
    def _under_way(self, tag: int, call: Call) -> Iterator[None]:
        """What ends a call half-way, other than a refusal that all ranks make, leaves this rank out
        of step."""
        self._group.call = tag, call
        try:
            yield
        except Unsupported:
            raise
        except BaseException:
            self._interrupted = True
            raise
        finally:
            self._group.call = None

    def _exchange(
        self, outgoing: Sequence[torch.Tensor], incoming: Sequence[int], tag: int
    ) -> Iterator[tuple[slice, list[torch.Tensor]]]:
        """Sends each rank its own tensor, band after band, as `cpu_collectives.Exchange`.

        All bands are handed to the copy thread at once. It takes a slot's credits before it writes
        to it, and those come with the release of the band before the last, so two are under way.
        """
        core, rank, slots = self._core, self.rank, []
        owners = [_core.scatter_owner(rank, i, self.world_size) for i in range(self.world_size - 1)]
        own = outgoing[rank]
        bands = cpu_collectives.bands(outgoing, incoming)
        for begin, end in bands:
            slot, part_bytes = self._take_slot(), (end - begin) * own.element_size()
            slots.append(slot)
            core.take_credits(slot)
            for owner in owners:
                piece = outgoing[owner][begin:end]
                core.send(slot, owner, 0, piece.data_ptr(), piece.nbytes, part_bytes, 0, tag)
                for i in range(1, self._chunks_per_shard):  # of other calls: empty in this one
                    core.send(slot, owner, i, 0, 0, part_bytes, 0, tag)
        for slot, (begin, end) in zip(slots, bands, strict=True):
            part_bytes = (end - begin) * own.element_size()
            parts = []
            for source in range(self.world_size):
                if source == rank:
                    parts.append(own[begin:end])
                    continue
                for i in range(self._chunks_per_shard):
                    core.wait_chunk(slot, source * self._chunks_per_shard + i, tag)
                at = _core.part_place(source, rank, self.world_size) * part_bytes
                part = self._slots[slot][at : at + part_bytes].view(own.dtype)
                parts.append(part[: max(0, min(end, incoming[source]) - begin)])
            yield slice(begin, end), parts
            if self.poison:
                self._slots[slot].fill_(_NAN_BYTE)
            core.release(slot)
        core.wait_pushed()

    def _pass_tag(self, tag: int) -> None:
        """A round in which the tag goes to all ranks, without data."""
        core, slot = self._core, self._take_slot()
        core.push(slot, 0, 0, 0, tag)
        for chunk in range(self.world_size * self._chunks_per_shard):
            if chunk // self._chunks_per_shard != self.rank:
                core.wait_chunk(slot, chunk, tag)
        core.release(slot)
        core.wait_pushed()

    def _take_slot(self) -> int:
        slot, self._next_slot = self._next_slot, 1 - self._next_slot
        return slot

    def _arrivals(self, slot: int, tag: int) -> Iterator[tuple[int, int]]:
        """Source and number of each chunk that the workspace has room for, once it has arrived: the
        own ones first, then around the ring."""
        chunks = self.world_size * self._chunks_per_shard
        for step in range(chunks):
            chunk = (self.rank * self._chunks_per_shard + step) % chunks
            source, i = divmod(chunk, self._chunks_per_shard)
            if source != self.rank:
                self._core.wait_chunk(slot, chunk, tag)
            yield source, i

    def _run(
        self,
        shard: torch.Tensor,
        Bs: list[torch.Tensor],
        biases: list[torch.Tensor | None],
        return_A: bool,
        chunks_per_shard: int,
        tag: int,
        timeline: list[dict[str, int]] | None,
    ) -> tuple[torch.Tensor | None, list[torch.Tensor], Exception | None]:
        """A, the products, and what went wrong with them."""
        called_ns = time.monotonic_ns()
        m_local, k = shard.shape
        m, shard_bytes = self.world_size * m_local, shard.nbytes
        gathered_bytes = self.world_size * shard_bytes
        outs = [shard.new_empty(m, B.shape[1]) for B in Bs]
        A = shard.new_empty(m, k) if return_A else None
        core, per_shard = self._core, self._chunks_per_shard
        chunk_rows = -(-m_local // chunks_per_shard)
        slot = self._take_slot()

        self._lent = shard
        core.push(slot, shard.data_ptr(), shard_bytes, chunk_rows * k * shard.element_size(), tag)
        gathered = self._slots[slot][:gathered_bytes].view(shard.dtype).view(m, k)
        spans: list[tuple[int, int, int]] = []
        error: Exception | None = None
        for source, i in self._arrivals(slot, tag):
            begin, end = min(i * chunk_rows, m_local), min((i + 1) * chunk_rows, m_local)
            rows = slice(source * m_local + begin, source * m_local + end)
            a = shard[begin:end] if source == self.rank else gathered[rows]
            if i >= chunks_per_shard:  # the workspace has room for more; their signals come too
                continue
            start_ns = time.monotonic_ns()
            try:
                for B, bias, out in zip(Bs, biases, outs, strict=True):
                    _multiply(a, B, bias, out[rows])
            except Exception as e:  # the peers wait for the rest of this call
                error = error or e
            spans.append((source * per_shard + i, start_ns, time.monotonic_ns()))
        if timeline is not None:
            arrived = core.arrival_ns(slot)
            for chunk, start_ns, end_ns in spans:
                source = chunk // per_shard
                timeline.append(
                    {
                        "chunk": chunk,
                        "source": source,
                        "arrived_ns": called_ns if source == self.rank else arrived[chunk],
                        "start_ns": start_ns,
                        "end_ns": end_ns,
                    }
                )
        if A is not None:
            A.copy_(gathered)
            A[self.rank * m_local : (self.rank + 1) * m_local] = shard
        if self.poison:
            self._slots[slot].fill_(_NAN_BYTE)
        core.release(slot)
        core.wait_pushed()
        self._lent = None
        return A, outs, error

    def _run_scatter(
        self,
        summed: cpu_scatter.Sum,
        divisor: int,
        pieces: int,
        tag: int,
        op: str,
        meanwhile: Callable[[], None] | None = None,
        row_of_A: int = 0,
        rows_of_A: int = 0,
        timeline: list[dict[str, int]] | None = None,
    ) -> tuple[torch.Tensor, Exception | None]:
        """The sum, and what went wrong in ``meanwhile``. The op, and at which of how many rows of
        its A ``summed`` begins, are for messages."""
        called_ns = time.monotonic_ns()
        error: Exception | None = None
        core, rank = self._core, self.rank
        columns, dtype = summed.columns, summed.sent_dtype
        m_local = summed.rows // self.world_size
        bands = _core.scatter_bands(summed.rows, self.world_size)
        band_rows = max(end - begin for begin, end in bands)
        owners = [_core.scatter_owner(rank, i, self.world_size) for i in range(self.world_size - 1)]
        sources = [source for source in range(self.world_size) if source != rank]
        out = torch.empty(m_local, columns, dtype=summed.out_dtype)
        sent = torch.empty(len(owners), band_rows, columns, dtype=dtype)
        summands = summed.summands(-(-band_rows // pieces))
        row_bytes = columns * dtype.itemsize
        self._lent = sent
        for begin, end in bands:
            slot, part_bytes = self._take_slot(), (end - begin) * row_bytes
            piece_rows = -(-(end - begin) // pieces)
            cuts = [  # of the band; the workspace may have room for more than there are
                slice(min(i * piece_rows, end - begin), min((i + 1) * piece_rows, end - begin))
                for i in range(self._chunks_per_shard)
            ]
            core.take_credits(slot)
            for owner, part in zip(owners, sent, strict=True):
                first = owner * m_local + begin
                for i, cut in enumerate(cuts):
                    piece = part[cut]
                    start_ns = time.monotonic_ns()
                    if len(piece):
                        piece.copy_(summands.product(slice(first + cut.start, first + cut.stop)))
                    end_ns = time.monotonic_ns()
                    if len(piece) and nan_check.active:
                        row = row_of_A + first + cut.start
                        place = row, rows_of_A or summed.rows
                        nan_check.look_through(op, "A @ B", piece, rank, rows=place)
                    core.send(
                        slot,
                        owner,
                        i,
                        piece.data_ptr(),
                        piece.nbytes,
                        part_bytes,
                        cut.start * row_bytes,
                        tag,
                    )
                    if len(piece) and timeline is not None:
                        timeline.append(_piece_times(called_ns, owner, start_ns, end_ns))
            if meanwhile is not None and end == m_local:
                try:
                    meanwhile()
                except Exception as e:  # the peers wait for the rest of this call
                    error = e
            arrived = self._slots[slot][: len(sources) * part_bytes].view(dtype)
            arrived = arrived.view(len(sources), end - begin, columns)
            first = rank * m_local + begin
            for i, cut in enumerate(cuts):
                own = slice(first + cut.start, first + cut.stop)
                start_ns = time.monotonic_ns()
                product = summands.product(own) if own.stop > own.start else None
                end_ns = time.monotonic_ns()
                for source in sources:
                    core.wait_chunk(slot, source * self._chunks_per_shard + i, tag)
                if product is not None:
                    if timeline is not None:
                        timeline.append(_piece_times(called_ns, rank, start_ns, end_ns))
                    parts = [
                        arrived[_core.part_place(s, rank, self.world_size)][cut] for s in sources
                    ]
                    rows = slice(begin + cut.start, begin + cut.stop)
                    summands.sum(product, parts, rank, divisor, summed.bias, out[rows])
            if self.poison:
                self._slots[slot].fill_(_NAN_BYTE)
            core.release(slot)
            core.wait_pushed()  # what was sent may be overwritten
        self._lent = None
        return out, error

    def _make_room(self, slot_bytes: int, chunks_per_shard: int, tag: int) -> None:
        """Replace the workspace by a larger one where that is too small. Collective then.

        Whether to grow is each rank's own decision, and one with another shape would not take part.
        So the tag goes round first, without data: whoever made a different call is found out.
        """
        if slot_bytes <= self.slot_bytes and chunks_per_shard <= self._chunks_per_shard:
            return
        if self._refused is not None:
            refused_bytes, refused_chunks, reason = self._refused
            if slot_bytes >= refused_bytes and chunks_per_shard >= refused_chunks:
                raise Unsupported(reason)
        self._pass_tag(tag)
        slot_bytes = max(slot_bytes, self.slot_bytes)
        chunks_per_shard = max(chunks_per_shard, self._chunks_per_shard)
        try:
            core = _connect(self._group, slot_bytes, chunks_per_shard, poison=self.poison)
        except Unsupported as error:
            reason = f"workspace: no room for gather buffers of {slot_bytes} bytes: {error}"
            self._refused = slot_bytes, chunks_per_shard, reason
            raise Unsupported(reason) from None
        self.close()
        self._use(core)


def _piece_times(called_ns: int, owner: int, start_ns: int, end_ns: int) -> dict[str, int]:
    return {
        "chunk": owner,
        "called_ns": called_ns,
        "start_ns": start_ns,
        "end_ns": end_ns,
        "done_ns": time.monotonic_ns(),
    }


def _close(core: _core.CpuWorkspace, worker: Worker) -> None:
    core.end_waits()
    worker.stop()
    core.close()


def _multiply(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    if bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)


def _bytes_at(address: int, size: int) -> torch.Tensor:
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)


def _connect(
    group: Group, slot_bytes: int, chunks_per_shard: int, *, poison: bool
) -> _core.CpuWorkspace:
    """A new workspace of the group. Raises Unsupported on all ranks where one cannot have it."""
    hosts = len(set(group.hosts()))
    if hosts > 1:
        raise Unsupported(
            f"group: found ranks on {hosts} hosts, wanted one: the CPU backend uses shared memory"
        )
    wishes = group.exchange("the size of a workspace", str(slot_bytes))
    slot_bytes = max(int(wish) for wish in wishes)

    core: _core.CpuWorkspace | None = None
    try:
        error = ""
        try:
            core = _core.CpuWorkspace(
                group.rank, group.world_size, slot_bytes, chunks_per_shard, _env.timeout_s()
            )
        except RuntimeError as e:
            error = str(e)
        names = group.exchange("the name of a workspace", "" if core is None else core.name)
        if core is not None and all(names):
            if poison:
                for slot in (0, 1):
                    _bytes_at(core.slot_ptr(slot), slot_bytes).fill_(_NAN_BYTE)
            try:
                core.connect(names)
            except RuntimeError as e:
                error = str(e)
        # From here on every rank has mapped what it needs: the names can go.
        for peer, found in enumerate(group.exchange("whether they have a workspace", error)):
            if found:
                raise Unsupported(f"rank {peer}: {found}")
        assert core is not None
        core.unlink()
        return core
    except BaseException:
        if core is not None:
            core.close()
        raise
