"""All-gather + matmul on CUDA for one kind of tensors, ready to be called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from agmm import _core
from agmm.errors import InvalidArgument
from agmm.runtime.cuda import CudaWorkspace
from agmm.runtime.cuda_calls import (
    SCALE_BYTES,
    Kernel,
    OutScales,
    ReadyMatmul,
    Up,
    aligned_pointer,
    b_layout,
    bias_pointer,
    contiguous_stride,
    new_on_gpu,
    ready_matmul,
    scale_pointer,
    up_leading,
    up_pointers,
)
from agmm.runtime.cuda_lists import ReadyMatmuls, ready_matmuls, share_a_launch
from agmm.runtime.results import reshaped
from agmm.runtime.streams import stream_of
from agmm.runtime.symmetric import enqueue

PUSH = (0, 0, 0, 0, 0)
"""Copy-engine push, in the form in which `_core.GatherProblem` takes a transport."""

Gathered = tuple[torch.Tensor | None, torch.Tensor | None, list[torch.Tensor]]
"""The result: A and its scales, or None for each, and the products."""


class ReadyWeight(NamedTuple):
    """The facts about a weight that a gather has before it is called."""

    out_shape: tuple[int, ...]
    out_stride: tuple[int, ...]
    out_dtype: torch.dtype
    b_scale_alignment: int


class ReadyGather(NamedTuple):
    """An all-gather + matmul that can be called any number of times with tensors of one kind."""

    workspace: CudaWorkspace
    problem: _core.GatherProblem
    slot_bytes: int
    shard_shape: tuple[int, int]
    """The rows and columns (K) of A_shard."""
    scale_columns: int
    """The number of scales that travel with a row of A; 0 where it has none."""
    has_one_scale: bool
    """Whether A_shard has a single scale, which is sent with each of its rows."""
    gathered_shape: tuple[int, ...] | None
    weights: tuple[ReadyWeight, ...]
    alone: tuple[ReadyMatmul, ...]
    """The matmul of each weight where there is one rank, which has nothing to gather."""
    is_gated: bool = False
    """Whether one kernel multiplies both weights, of which one result comes."""
    quantizes: bool = False
    """Whether that result is fp8, with its scales behind it."""
    together: ReadyMatmuls | None = None
    """The matmul of all weights where there is one rank, and one launch serves them."""

    def __call__(
        self,
        A_shard: torch.Tensor,
        Bs: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        scale_a: torch.Tensor | None = None,
        scale_bs: Sequence[torch.Tensor | None] = (),
        scale_out: torch.Tensor | None = None,
        tile_times: torch.Tensor | None = None,
    ) -> Gathered:
        """Gather A_shard, with its scales, and multiply it by each weight. Collective.

        Args:
            A_shard: [M_local, ..., K], contiguous.
            Bs: a weight [K, N] each.
            biases: for each weight a bias [N] or None.
            scale_a: float32, of fp8 operands.
            scale_bs: of fp8 operands one for each weight; else empty.
            scale_out: the one that a tensor-wise quantised result is wanted with.
            tile_times: uint8, where the kernel records when each of the first weight's tiles waited
                and ran (timed kernels).

        Returns:
            A and its scales, or None, and out [world_size * M_local, ..., N] for each weight. The
            scales are those of each rank, [world_size, 1], where a shard has one.

        Raises:
            Unsupported: the workspace cannot be made or grow; all ranks raise.
            InvalidArgument: a kernel cannot take the operands; nothing was enqueued.
        """
        workspace, problem, slot_bytes, shape, columns, has_one, A_shape, weights, alone = self[:9]
        gated, quantizes = self[9:11]
        up: Up | None = None
        if gated:
            up = Up(Bs[1], biases[1], scale_bs[1] if scale_bs else None)
            Bs, biases, scale_bs = Bs[:1], biases[:1], scale_bs[:1]
        if scale_a is None:
            scale_bs = (None,) * len(weights)
        if alone:
            return self._alone(A_shard, Bs, biases, scale_a, scale_bs, up, scale_out)
        with workspace.lock:
            workspace.known.calls += 1
            # Each shard may have its own scale, which is sent as the scales of its rows.
            scales = scale_a
            if scale_a is not None and has_one:
                scales = scale_a.reshape(1, 1).expand(shape[0], 1)
            A = scale_A = None
            if A_shape is not None:
                A = A_shard.new_empty(A_shape)
                if scales is not None:
                    scale_A = scales.new_empty(*A_shape[:-1], columns)
            copies: list[torch.Tensor] = []  # they live until the call is enqueued
            addresses = [
                aligned_pointer(A_shard, copies),
                0 if scales is None else scale_pointer(scales, SCALE_BYTES, copies),
                0 if A is None else A.data_ptr(),
                0 if scale_A is None else scale_A.data_ptr(),
            ]
            outs = []
            for w, B, bias, scale_b in zip(weights, Bs, biases, scale_bs, strict=True):
                out = new_on_gpu(A_shard, w.out_shape, w.out_stride, w.out_dtype)
                outs.append(out)
                addresses += (
                    aligned_pointer(B, copies),
                    0 if scale_b is None else scale_pointer(scale_b, w.b_scale_alignment, copies),
                    bias_pointer(bias, copies),
                    out.data_ptr(),
                )
            if gated:
                addresses += up_pointers(up, scale_bs[0], weights[0].b_scale_alignment, copies)
            if quantizes:
                out_scales = OutScales.of(A_shard, weights[0].out_shape, scale_out)
                outs.append(out_scales.written)
                addresses += out_scales.pointers
            enqueue(
                workspace,
                slot_bytes,
                "all_gather_matmul",
                problem,
                addresses,
                stream_of(A_shard.device),
                0 if tile_times is None else tile_times.data_ptr(),
            )
        if has_one and scale_A is not None:
            of_each = scale_A.view(-1, 1)[:: shape[0]]
            scale_A = of_each.clone(memory_format=torch.contiguous_format)
        return A, scale_A, outs

    def _alone(
        self,
        A_shard: torch.Tensor,
        Bs: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        scale_a: torch.Tensor | None,
        scale_bs: Sequence[torch.Tensor | None],
        up: Up | None,
        scale_out: torch.Tensor | None,
    ) -> Gathered:
        rows = A_shard.view(self.shard_shape)
        if self.together is not None:
            products = self.together(rows, Bs, None, biases, scale_a, scale_bs)
            outs = [reshaped(o, w.out_shape) for w, o in zip(self.weights, products, strict=True)]
        else:
            outs = []
            of_each = zip(self.weights, self.alone, Bs, biases, scale_bs, strict=True)
            for w, matmul, B, bias, scale_b in of_each:
                scales = OutScales.of(rows, w.out_shape, scale_out) if self.quantizes else None
                given: dict[str, Any] = {"bias": bias, "up": up, "out_scales": scales}
                out = matmul(rows, B, None, scale_a=scale_a, scale_b=scale_b, **given)
                outs.append(reshaped(out, w.out_shape))
                if scales is not None:
                    outs.append(scales.written)
        if self.gathered_shape is None:
            return None, None, outs
        if scale_a is not None:
            scale_a = (scale_a.reshape(1, 1) if self.has_one_scale else scale_a).clone()
        return A_shard.clone(), scale_a, outs


def ready_gather(
    workspace: CudaWorkspace,
    A_shard: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    kernels: Sequence[Kernel],
    *,
    return_A: bool,
    transport: tuple[int, int, int, int, int] = PUSH,
) -> ReadyGather:
    """The call for operands of these kinds.

    Args:
        A_shard: [M_local, ..., K], contiguous, the same shape and dtype on all ranks.
        Bs: weights [K, N], N free for each of them, row-major or column-major.
        kernels: for each weight; their formats are of one dtype, with the same scales of A. A
            gated one is for both weights.
        return_A: whether A and its scales are wanted, in tensors of their own.
        transport: as `_core.GatherProblem` has it.

    Raises:
        InvalidArgument: a weight is neither row-major nor column-major.
    """
    k = A_shard.shape[-1]
    rows = A_shard.numel() // k
    front = (workspace.world_size * A_shard.shape[0], *A_shard.shape[1:-1])
    ready, of_core = [], []
    is_gated = kernels[0].is_gated
    Bs, up = (Bs[:1], Bs[1]) if is_gated else (Bs, None)
    for B, kernel in zip(Bs, kernels, strict=True):
        layout = b_layout(B)
        if layout is None:
            raise InvalidArgument(
                f"B: found strides {tuple(B.stride())}, wanted row-major or column-major"
            )
        n = B.shape[1]
        of_core.append(
            _core.GatherWeight(
                *(n, layout, kernel.format, kernel.config, kernel.activation, up_leading(up)),
                quantizes=bool(kernel.quantize_out),
            )
        )
        shape = (*front, n)
        ready.append(
            ReadyWeight(shape, contiguous_stride(shape), kernel.out_dtype, kernel.b_scale_alignment)
        )
    scales = kernels[0].format.scales
    scale_columns = 0 if scales is None else scales.a_columns
    alone: tuple[ReadyMatmul, ...] = ()
    together: ReadyMatmuls | None = None
    if workspace.world_size == 1:
        matrix = A_shard.view(rows, k)
        if share_a_launch(Bs, kernels):
            together = ready_matmuls(matrix, Bs, None, 0, kernels)
        pairs = zip(Bs, kernels, strict=True)
        alone = tuple(ready_matmul(matrix, B, None, 0, kernel, up=up) for B, kernel in pairs)
    return ReadyGather(
        workspace,
        _core.GatherProblem(rows, k, of_core, transport),
        workspace.world_size * rows * (k * A_shard.element_size() + SCALE_BYTES * scale_columns),
        (rows, k),
        scale_columns,
        scales is not None and not scales.a_per_row,
        (*front, k) if return_A else None,
        tuple(ready),
        alone,
        is_gated,
        bool(kernels[0].quantize_out),
        together,
    )
