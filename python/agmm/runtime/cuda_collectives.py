"""Collectives on CUDA: the symmetric memory that they take, and their calls."""

from __future__ import annotations

import torch
import torch.distributed as dist

from agmm import _core
from agmm.errors import Unsupported
from agmm.runtime import capabilities
from agmm.runtime.calls import Call
from agmm.runtime.cuda_background import BackgroundStreams, CudaBackground
from agmm.runtime.group_gpus import group_facts
from agmm.runtime.group_topology import relays_of
from agmm.runtime.streams import stream_of
from agmm.runtime.symmetric import SymmetricWorkspace, enqueue

ELEMENTS = {
    torch.bfloat16: _core.CollectiveElement.bfloat16,
    torch.float16: _core.CollectiveElement.float16,
    torch.float32: _core.CollectiveElement.float32,
}
"""The element types that can be summed; bytes of any type can be gathered."""


SLOT_BYTES = 32 << 20
"""The size of a slot in every workspace; no call makes it grow: an all-reduce of 16 MiB takes one
launch, a larger one several. So all calls but a group's first can be captured."""


class CollectivesWorkspace(SymmetricWorkspace):
    """The slots through which the ranks of a group send each other data. Calls of all sizes fit."""

    core_class = _core.CudaCollectives
    _granule = SLOT_BYTES

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self._background = BackgroundStreams(device)
        self._relayed: _core.CudaCollectives | None = None  # that knows the relays
        self._words: torch.Tensor | None = None
        """Two rows of one word per rank, at multiples of 16 bytes: what a call without elements
        sends and receives, which nobody looks at."""

    @property
    def is_ready(self) -> bool:
        """Whether a call takes no step on the host that other ranks see; alike on all ranks."""
        return self.slot_bytes > 0

    def start(
        self,
        op: _core.CollectiveOp,
        method: _core.CollectiveMethod,
        x: torch.Tensor,
        out: torch.Tensor,
        *,
        is_average: bool = False,
    ) -> CudaBackground:
        """Enqueue `call` on another stream, after the work of the current one. Later calls of the
        group come after it, like after any other (`Group.last_before`): else a matmul that fills
        the GPU and waits for a peer could keep this call from running, and this call the peer's
        matmul."""
        with self.lock:
            self.ensure(SLOT_BYTES)  # may raise, with nothing forked yet
            return self._background.start(
                lambda: self.call(op, method, x, out, is_average=is_average), x, out
            )

    def meet(self, what: str, call: Call) -> None:
        """Enqueue a call without elements on the current stream. What is enqueued after it runs
        when all ranks have come to such a call, of the same ``what``. Collective.

        A rank whose call has elements is found out by its tag where it is in this memory; elsewhere
        both wait, and tell each other after a second (`EmptyCalls.look`).

        Args:
            what: what all ranks have to agree on.
            call: for messages.

        Raises:
            Unsupported: the group cannot have such memory; all ranks raise.
            AgmmError: as `SymmetricWorkspace.ensure`.
        """
        reason = capabilities.why_not(capabilities.COLLECTIVES, self.device)
        if reason is None and self.world_size > _core.MAX_COLLECTIVE_RANKS:
            reason = f"group: {self.world_size} ranks, wanted at most {_core.MAX_COLLECTIVE_RANKS}"
        if reason is not None:
            raise Unsupported(reason)
        with self.lock:
            self.known.calls += 1
            if not torch.cuda.is_current_stream_capturing():
                self.known.empty_calls.note(self.known.eager_calls, str(call))
            self._enqueue_meeting(what, f"{call}, which has no elements")

    def barrier(self, what: str, words: str) -> None:
        """Enqueue a barrier on the current stream: what is enqueued after it runs when all ranks
        have come to one of the same ``what``. Collective; errors are those of `meet`.

        Args:
            what: what all ranks have to agree on.
            words: the call, for messages.
        """
        with self.lock:
            self.known.calls += 1
            self._enqueue_meeting(what, words)

    def _enqueue_meeting(self, what: str, words: str) -> None:
        self.ensure(SLOT_BYTES)
        if self._words is None:
            size = 2, 4 * self.world_size
            self._words = torch.empty(size, dtype=torch.int32, device=self.device)
        if relays_of(self.group, self.device) is not None:
            method = _core.CollectiveMethod.relayed
            self._know_relays()
        elif group_facts(self.group, self.device).peer_atomics:
            method = _core.CollectiveMethod.one_shot
        else:
            method = _core.CollectiveMethod.blocks
        enqueue(
            self,
            SLOT_BYTES,
            "meet",
            method,
            self._words[0].data_ptr(),
            self._words[1].data_ptr(),
            what,
            words,
            stream_of(self.device),
        )

    def call(
        self,
        op: _core.CollectiveOp,
        method: _core.CollectiveMethod,
        x: torch.Tensor,
        out: torch.Tensor,
        *,
        is_average: bool = False,
    ) -> None:
        """Enqueue a collective on the current stream. Collective.

        Args:
            op: what is made of the ranks' ``x``.
            method: how the data travels; "two_shot" for all_reduce alone. Alike on all ranks.
            x: contiguous; for reduce_scatter [world_size, ...] in all.
            out: contiguous, as large as the result; of all_reduce it may be ``x``.
            is_average: sums are multiplied by 1 / world_size.

        Raises:
            InvalidArgument, Unsupported, AgmmError: as `symmetric.enqueue`.
        """
        count = out.numel() if op == _core.CollectiveOp.reduce_scatter else x.numel()
        element = ELEMENTS.get(x.dtype)
        if op == _core.CollectiveOp.all_gather:
            element, count = _core.CollectiveElement.uint8, count * x.element_size()
        assert element is not None, x.dtype
        with self.lock:
            self.known.calls += 1
            if method == _core.CollectiveMethod.relayed:
                self._know_relays()
            enqueue(
                self,
                SLOT_BYTES,
                "call",
                op,
                method,
                element,
                x.data_ptr(),
                out.data_ptr(),
                count,
                is_average,
                stream_of(x.device),
            )

    def all_gather_two(
        self,
        method: _core.CollectiveMethod,
        x: torch.Tensor,
        out: torch.Tensor,
        second: torch.Tensor,
        second_out: torch.Tensor,
    ) -> None:
        """Enqueue an all-gather of two tensors on the current stream: in one launch where they
        are not too large for it. Collective. All tensors are contiguous, of any dtypes."""
        with self.lock:
            self.known.calls += 1
            if method == _core.CollectiveMethod.relayed:
                self._know_relays()
            enqueue(
                self,
                SLOT_BYTES,
                "all_gather_two",
                method,
                x.data_ptr(),
                out.data_ptr(),
                x.nbytes,
                second.data_ptr(),
                second_out.data_ptr(),
                second.nbytes,
                stream_of(x.device),
            )

    def all_reduce_rms_norm(
        self,
        method: _core.CollectiveMethod,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        normed: torch.Tensor,
        total: torch.Tensor,
        eps: float,
    ) -> None:
        """Enqueue an all-reduce, then the addition of a residual and an RMS norm, on the current
        stream. Collective. ``method`` is "one_shot" or "two_shot". All tensors are contiguous and
        of one dtype; ``weight`` is one row."""
        with self.lock:
            self.known.calls += 1
            enqueue(
                self,
                SLOT_BYTES,
                "all_reduce_rms_norm",
                method,
                ELEMENTS[x.dtype],
                x.data_ptr(),
                residual.data_ptr(),
                weight.data_ptr(),
                normed.data_ptr(),
                total.data_ptr(),
                x.numel(),
                weight.numel(),
                eps,
                stream_of(x.device),
            )

    def streamed_all_reduce(
        self,
        method: _core.CollectiveMethod,
        problem: _core.MatmulProblem,
        addresses: tuple[int, ...],
        eps: float = 0.0,
        *,
        of_blocks: bool = False,
    ) -> None:
        """Enqueue a matmul of few rows and its all-reduce as one kernel on the current stream.
        Collective. ``method`` is "one_shot" or "two_shot"; ``addresses`` are those of A, B, the
        bias, the residual, the result, a norm's weight, the normed rows and their scales, 0 where
        there is none. ``of_blocks``: a scale is that of 128 columns, not of a row."""
        with self.lock:
            self.known.calls += 1
            stream = stream_of(self.device)
            given = method, problem, addresses, stream, eps, of_blocks
            enqueue(self, SLOT_BYTES, "streamed_all_reduce", *given)

    def streamed_reduce_scatter(
        self, problem: _core.MatmulProblem, addresses: tuple[int, ...], *, is_average: bool
    ) -> None:
        """Enqueue a matmul of few rows and its reduce-scatter as one kernel on the current stream.
        Collective. ``addresses`` are those of A, B, the bias, the residual and the result."""
        with self.lock:
            self.known.calls += 1
            given = problem, addresses, is_average, stream_of(self.device)
            enqueue(self, SLOT_BYTES, "streamed_reduce_scatter", *given)

    def gathered_matmul(
        self,
        method: _core.CollectiveMethod,
        problem: _core.MatmulProblem,
        addresses: tuple[int, ...],
        nbytes: int,
    ) -> None:
        """Enqueue an all-gather of so many bytes of each rank on the current stream, and the
        product of the gathered rows by a streaming kernel, which reads its weight meanwhile.
        Collective. ``addresses`` are those of the shard, the gathered rows, B, the bias and the
        product."""
        with self.lock:
            self.known.calls += 1
            if method == _core.CollectiveMethod.relayed:
                self._know_relays()
            given = method, problem, addresses, nbytes, stream_of(self.device)
            enqueue(self, SLOT_BYTES, "gathered_matmul", *given)

    def _know_relays(self) -> None:
        core = self.buffers_of(SLOT_BYTES).core
        if self._relayed is not core:
            schedule = relays_of(self.group, self.device)
            assert schedule is not None
            moves = (*schedule.first, *schedule.second)
            core.relay_over([(move.owner, move.source, move.target) for move in moves])
            self._relayed = core
