"""Batch invariance: whether calls ask for it, and products that have it.

The bits of a row are then the same whatever other rows there are, for the same bits in that row and
in B on each rank, the same group, and the same kinds and numbers of GPUs, or of threads, and
versions. Two things decide on them: the order in which a product sums its K, and the order in which
the ranks are summed, with what is rounded before.

- On Hopper a streaming kernel multiplies, whose splits of K depend on the size of B alone.
- Elsewhere the library multiplies blocks of rows, all of one shape (`runtime.row_blocks`).
- Every rank's product is rounded to its dtype, the own one too. The products are added in the order
  of the ranks, in float32 at least, each element by itself. So it does not matter who adds up which
  row, nor by which carrier the products come.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from agmm import _env
from agmm.errors import InvalidArgument
from agmm.planning import built_kernels, call_plans, heuristics, legality
from agmm.planning.problems import ALL_GATHER_MATMUL, KernelConfig
from agmm.runtime import cuda_calls, symmetric
from agmm.runtime.row_blocks import ROWS, RowBlocks

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A function that multiplies A [rows, K] by B [K, N]."""


def is_asked(batch_invariant: bool | None) -> bool:
    """The value of an op's argument, or what the environment says where that is None.

    Raises:
        InvalidArgument: it, or AGMM_BATCH_INVARIANT, is none of its values.
    """
    if batch_invariant is None:
        return _env.batch_invariant() == "on"
    if batch_invariant is not True and batch_invariant is not False:
        raise InvalidArgument(
            f"batch_invariant: found {batch_invariant!r}, wanted True, False or None"
        )
    return batch_invariant


def check_config(config: str) -> None:
    """Refuses a plan that a caller names, since batch invariance leaves no choice of plans."""
    if config:
        raise InvalidArgument(
            f"config: found {config!r} of a batch-invariant call, wanted None "
            f"(batch_invariant=False overrides {_env.BATCH_INVARIANT.name})"
        )


def why_not_streamed(A: torch.Tensor, B: torch.Tensor) -> str | None:
    """The reason why no streaming kernel multiplies ``A @ B``, which are on a GPU, or None. It is
    the same for every number of rows, addresses and strides."""
    dtype = str(A.dtype).removeprefix("torch.")
    reason = symmetric.why_unfused(A.device) or legality.why_unfused(
        dtype, B.shape[1], B.shape[0], a="A"
    )
    if reason is None and kernel_of(A, B) is None:
        reason = "kernels: found no streaming one for it in this build, wanted one"
    return reason


def kernel_of(A: torch.Tensor, B: torch.Tensor) -> KernelConfig | None:
    """The streaming kernel that multiplies ``A @ B``; None where there is none, for no number of
    rows then."""
    shape = A.shape[0], B.shape[1], B.shape[0]
    problem = call_plans.problem_of(shape, A.dtype, A.device, column_major=B.stride(0) == 1)
    kernels = built_kernels.kernels_of(ALL_GATHER_MATMUL, problem.format)
    return heuristics.batch_invariant_kernel(problem, kernels)


def streamed(A: torch.Tensor, B: torch.Tensor, kernel: KernelConfig) -> Product:
    """What multiplies operands like these by a streaming kernel; A is contiguous and B as TMA wants
    it."""
    of_core = cuda_calls.Kernel(kernel.core, cuda_calls.plain_format("A", A))
    call = cuda_calls.ready_matmul(A, B, None, 0, of_core)
    return lambda a, b: call(a, b, None)


def in_blocks(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """``A @ B`` by the library, in blocks of rows of one shape."""
    B = B.clone()  # at an address of its own, on whose alignment products may depend
    block = A.new_zeros(ROWS, A.shape[1])

    def multiply(rows: slice, into: torch.Tensor) -> None:
        there = A[rows]
        block[: len(there)] = there
        block[len(there) :].zero_()
        # The product goes into given memory, since autocast leaves such calls alone.
        torch.mm(block, B, out=into)

    out = A.new_empty(A.shape[0], B.shape[1])
    RowBlocks(B.shape[1], A, multiply).write(slice(0, len(out)), out)
    return out
