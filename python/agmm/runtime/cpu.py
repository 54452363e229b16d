"""The CPU backend: all-gather and reduce-scatter through POSIX shared memory, multiplication by
torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from agmm import _core
from agmm.runtime import cpu_collectives, cpu_gather, cpu_scatter, nan_check
from agmm.runtime.background import Task
from agmm.runtime.calls import Call
from agmm.runtime.cpu_slots import CpuSlots, tag_of
from agmm.runtime.epilogues import Epilogue
from agmm.runtime.packed import Packed4BitWeight


class CpuWorkspace(CpuSlots):
    """The ops that the CPU ranks of one group compute together, through their slots."""

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

    @torch.no_grad()
    def all_gather_matmul(
        self,
        A_shard: torch.Tensor,
        Bs: Sequence[torch.Tensor | Packed4BitWeight],
        biases: list[torch.Tensor | None],
        *,
        return_A: bool,
        chunks_per_shard: int | None = None,
        epilogue: Epilogue | None = None,
        timeline: list[dict[str, int]] | None = None,
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """Gather ``A_shard`` and multiply it by each of ``Bs``. Collective.

        Grows the slots where A [world_size * M_local, K] is too large or has too many chunks. A
        multiplication that fails leaves the group in step: the call raises when all else is done.

        Args:
            A_shard: [M_local, K], contiguous, the same shape and dtype on all ranks. It may be
                overwritten as soon as this returns.
            Bs: weights [K, N], N free for each of them and on each rank; of 4 bits for float32.
            biases: for each weight a bias [N] or None.
            return_A: whether A [M, K] is wanted, in a tensor of its own.
            chunks_per_shard: row chunks of each shard, the same on all ranks; None: as many as the
                workspace has room for.
            epilogue: what becomes of the products, in float32 at least; free on each rank.
            timeline: where given, receives for each chunk a dict with ``chunk``, ``source`` and,
                in ns of ``time.monotonic_ns``, ``arrived_ns``, ``start_ns`` and ``end_ns`` of its
                multiplication. ``arrived_ns`` of the rank's own chunks is the time of the call.

        Returns:
            A or None, and out [M, N] for each weight, or what the epilogue makes of them.

        Raises:
            Unsupported: the slots would have to grow, and a rank has no memory for it; all ranks
                raise, and keep the slots they had.
            AgmmError: an earlier call on this workspace was interrupted or the workspace is closed.
        """
        asked = {"activation": epilogue.activation} if epilogue else {}
        call = Call("all_gather_matmul", A_shard=A_shard, B=Bs, return_A=return_A, **asked)
        if nan_check.active:
            nan_check.look_through(call.op, "A_shard", A_shard, self.rank)
        name = str(A_shard.dtype).removeprefix("torch.")
        with self.group.lock:
            chunks = chunks_per_shard or self.chunks_per_shard
            tag = tag_of(*A_shard.shape, f"{name} in {chunks} chunks", return_A)
            with self.in_step(tag, call):
                self.make_room(self.world_size * A_shard.nbytes, chunks, tag)
                m = self.world_size * A_shard.shape[0]
                weights = cpu_gather.Products(Bs, biases, epilogue, A_shard, m)
                A, outs, error = cpu_gather.products(
                    self, A_shard, weights, return_A, chunks, tag, timeline
                )
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
        with self.group.lock:
            tag = tag_of(chunks, record_bytes, f"records {agreed}", False)
            with self.in_step(tag, call):
                self.make_room(self.world_size * records.nbytes, chunks, tag)
                error = cpu_gather.records(self, records, consume, tag)
        if error is not None:
            raise error

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
        """Return this rank's rows of the sum over the ranks of their products. Collective.

        Products and sums are made in float32 (float64 for float64); what goes to another rank is
        rounded once, and so is the result. The partial sums are added in the order of the ranks, so
        the result has the same bits in every call. Grows the slots where they are too small. Large
        calls go through them in bands (`_core.scatter_bands`).

        Args:
            summed: of a number of rows that is a multiple of the world size; rows, columns and
                dtypes the same on all ranks, at least one column.
            reduce_op: "sum", or "avg" for the sum divided by the world size.
            call: the call, for messages.
            agreed: what else has to be the same on all ranks.
            pieces: into how many pieces each rank's rows of a band are cut, the same on all
                ranks.
            meanwhile: called once, when all has been sent to the other ranks and their last sums
                are still to be awaited. What it raises is raised when the call is done.
            timeline: is extended by a dict for each piece: its ``chunk`` (the rank that owns the
                rows), ``start_ns`` and ``end_ns`` (of the product), ``done_ns`` (when it was handed
                to the copying thread, or, of an own piece, when the others' sums were there), by
                `time.monotonic_ns`, and ``called_ns``.

        Returns:
            out [M / world_size, N].

        Raises:
            Unsupported: as `all_gather_matmul`.
            AgmmError: as `all_gather_matmul`.
        """
        rows, columns = summed.rows, summed.columns
        name = str(summed.sent_dtype).removeprefix("torch.")
        with self.group.lock:
            what = f"{reduce_op} of {name} in {pieces} pieces {agreed}"
            tag = tag_of(rows, columns, what, False)
            slot_bytes = _core.scatter_slot_bytes(
                rows, columns * summed.sent_dtype.itemsize, self.world_size
            )
            with self.in_step(tag, call):
                self.make_room(slot_bytes, pieces, tag)
                divisor = self.world_size if reduce_op == "avg" else 1
                out, error = cpu_scatter.send_and_sum(
                    self, summed, divisor, pieces, tag, call.op, meanwhile, timeline=timeline
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
        residual: torch.Tensor | None = None,
        invariant: bool = False,
    ) -> torch.Tensor:
        """Return the sum over the ranks of ``A @ B``, by `all_reduce`. Collective.

        Args:
            A: [M, K], of any number of rows, the same on all ranks; at least 1.
            B: [K, N], of one N on all ranks; at least 1.
            bias: [N] or None; added to the sum before it is rounded.
            call, agreed: as `all_reduce`.
            residual: [M, N] or None, the same on all ranks; added to the sum before it is rounded.
            invariant: whether a row's bits may not depend on the other rows.

        Returns:
            out [M, N], contiguous.

        Raises:
            Unsupported: as `all_gather_matmul`.
            AgmmError: as `all_gather_matmul`.
        """
        summed = cpu_scatter.plain_sum([A], [B], bias, residual, invariant=invariant)
        return self.all_reduce(summed, call, agreed=agreed)

    @torch.no_grad()
    def all_reduce(self, summed: cpu_scatter.Sum, call: Call, *, agreed: str = "") -> torch.Tensor:
        """Return the sum over the ranks of their products, with the same bits on all. Collective.

        Band after band of rows (`_core.scatter_bands`) is scattered as `reduce_scatter` does it;
        each rank's finished rows go to all, piece by piece, while the others' are computed. A band
        whose rows the ranks cannot share equally is filled up with zeros. Grows the slots where
        they are too small.

        Args:
            summed: of any number of rows, at least 1; rows, columns and dtypes the same on all
                ranks, at least one column.
            call: the call, for messages.
            agreed: what else has to be the same on all ranks.

        Returns:
            out [M, N], contiguous.

        Raises:
            Unsupported: as `all_gather_matmul`.
            AgmmError: as `all_gather_matmul`.
        """
        rows, columns = summed.rows, summed.columns
        shared = -(-rows // self.world_size)
        sent, finished = (
            str(dtype).removeprefix("torch.") for dtype in (summed.sent_dtype, summed.out_dtype)
        )
        bands = _core.scatter_bands(shared * self.world_size, self.world_size)
        pieces = cpu_scatter.all_reduce_pieces(max(end - begin for begin, end in bands))
        slot_bytes = cpu_scatter.all_reduce_slot_bytes(
            rows, columns * summed.sent_dtype.itemsize, self.world_size
        )
        with self.group.lock:
            tag = tag_of(rows, columns, f"all_reduce of {sent} to {finished} {agreed}", False)
            with self.in_step(tag, call):
                self.make_room(slot_bytes, 2 * pieces, tag)
                out = torch.empty(rows, columns, dtype=summed.out_dtype)
                for begin, end in bands:
                    band = slice(begin * self.world_size, end * self.world_size)
                    whole = cpu_scatter.send_sum_and_return(
                        self, summed, pieces, tag, call.op, band=band
                    )
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
        """Run a collective without a matmul. Collective.

        Grows the slots where they are too small, to a power of two. Large tensors go through them
        in bands, so that they need no more than `cpu_collectives.BAND_BYTES`.

        Args:
            job: what is exchanged, and what is made of it.
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
        tag = tag_of(0, 0, agreed, False)
        slot_bytes = job.slot_bytes()

        def run() -> torch.Tensor:
            self.lent = job.lent
            job.run(partial(cpu_collectives.exchange, self, tag))
            found = finish()
            self.lent = None
            return found

        def later() -> torch.Tensor:
            with torch.no_grad():  # which is for each thread
                self.check_usable()
                with self.under_way(tag, call):
                    return run()

        with self.group.lock:
            if in_background and slot_bytes <= self.slot_bytes:
                self.begin(call)
                return self.worker.add(later)
            with self.in_step(tag, call):
                self.make_room(slot_bytes, 1, tag)
                if not in_background:
                    return run()
            return self.worker.add(later)
