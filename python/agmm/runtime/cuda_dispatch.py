"""Rows of experts on CUDA: the symmetric memory in which ranks offer each other their tokens, and
that in which they leave what their experts made of them, and the calls of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from agmm import _core
from agmm.runtime.cuda_collectives import ELEMENTS
from agmm.runtime.streams import stream_of
from agmm.runtime.symmetric import SymmetricWorkspace, enqueue


class RowsOfExperts(NamedTuple):
    """The rows that the experts of this rank want, on its GPU: contiguous int32 tensors, as in
    `Routing`."""

    tokens: torch.Tensor
    offsets: torch.Tensor
    positions: torch.Tensor


class Dispatched(NamedTuple):
    """Memory for what a dispatch brings."""

    rows: torch.Tensor
    """[capacity, K]: the rows by expert; what lies behind the last row is not written."""
    gathered: torch.Tensor | None
    """[tokens of all ranks, K], or None where they are not wanted."""
    words: torch.Tensor
    """int32 [2, ranks * experts]: the counts of rows that have come, and the first rows of the
    sources."""


class DispatchWorkspace(SymmetricWorkspace):
    """The slots in which the ranks of a group offer each other their tokens."""

    core_class = _core.CudaRowDispatch
    _granule = 8 << 20
    ctas = 0
    """How many CTAs bring rows; 0 leaves the number to the core. A benchmark sets it."""

    def dispatch(
        self,
        x: torch.Tensor,
        counts: Sequence[int],
        wanted: RowsOfExperts,
        room: Dispatched,
        matmuls: Sequence[Any] = (),
    ) -> None:
        """Enqueue a dispatch on the current stream, and behind it matmuls of its rows, of which the
        first one takes the rows as they come. Collective.

        Args:
            x: [tokens of this rank, K], contiguous, at a multiple of 16 bytes.
            counts: the tokens of each rank, the same on all ranks.
            wanted: which rows to bring, of which tokens.
            room: where they are brought to.
            matmuls: what `grouped_kernel.described` makes of them.

        Raises:
            InvalidArgument, Unsupported, AgmmError: as `symmetric.enqueue`.
        """
        row_bytes = x.shape[1] * x.element_size()
        experts, choices = wanted.offsets.shape[0] - 1, wanted.positions.shape[1]
        with self.lock:
            self.known.calls += 1
            enqueue(
                self,
                max(counts) * row_bytes,
                "dispatch",
                (row_bytes, choices, experts, room.rows.shape[0]),
                list(counts),
                (
                    x.data_ptr(),
                    *(tensor.data_ptr() for tensor in wanted),
                    room.rows.data_ptr(),
                    0 if room.gathered is None else room.gathered.data_ptr(),
                    room.words[0].data_ptr(),
                    room.words[1].data_ptr(),
                ),
                list(matmuls),
                stream_of(x.device),
                self.ctas,
            )


class CombineWorkspace(SymmetricWorkspace):
    """The slot in which the ranks of a group leave the rows that others add up."""

    core_class = _core.CudaRowCombine
    _granule = 8 << 20

    def combine(
        self,
        out: torch.Tensor,
        counts: Sequence[int],
        wanted: RowsOfExperts,
        weights: torch.Tensor | None,
        rows: Sequence[torch.Tensor],
        matmuls: Sequence[Any] = (),
    ) -> None:
        """Enqueue the sums of the rows of each token on the current stream, behind the matmuls that
        compute the rows, if those are not there already. Collective.

        Args:
            out: [tokens of this rank, N], contiguous.
            counts: the tokens of each rank, the same on all ranks.
            wanted: where the rows of each token are.
            weights: float32 [tokens of this rank, choices], contiguous, or None for 1.
            rows: [capacity, N] each, contiguous, in the dtype of ``out``; added up.
            matmuls: in their place what `grouped_kernel.described` makes of each, with the address
                and the leading dimension of its rows.

        Raises:
            InvalidArgument, Unsupported, AgmmError: as `symmetric.enqueue`.
        """
        experts, choices = wanted.offsets.shape[0] - 1, wanted.positions.shape[1]
        capacity, columns = wanted.tokens.shape[0], out.shape[1]
        parts = len(rows) + len(matmuls)
        row_bytes = columns * out.element_size()
        slot_bytes = self.core_class.slot_bytes_of(
            sum(counts) * choices, parts * capacity, row_bytes
        )
        with self.lock:
            self.known.calls += 1
            enqueue(
                self,
                slot_bytes,
                "combine",
                ELEMENTS[out.dtype],
                (columns, choices, experts, capacity),
                list(counts),
                (
                    wanted.offsets.data_ptr(),
                    wanted.positions.data_ptr(),
                    0 if weights is None else weights.data_ptr(),
                    out.data_ptr(),
                ),
                [one.data_ptr() for one in rows],
                list(matmuls),
                stream_of(out.device),
            )
