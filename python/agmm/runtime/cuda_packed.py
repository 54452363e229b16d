"""Weights of 4 bits on CUDA, and products of few rows with them by agmm's kernel.

The layout is that of `src/gemm/sm90/packed_weight.hpp`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from agmm import _core
from agmm.errors import InvalidArgument
from agmm.runtime.cuda_calls import aligned_pointer, bias_pointer
from agmm.runtime.streams import stream_of

_COLUMNS, _DEPTH = 64, 128
"""The columns, and the K, of an atom (`agmm::PackedAtom`)."""
_SMALL_GROUP = 32
"""The K of a group where an atom has several; larger groups are several of these. torch's packing
for CPUs has the same multiple."""
_ZERO = 8
"""How a value of 0 is stored."""


def check_sizes(k: int, n: int, group_size: int) -> None:
    """Checks the sizes of a weight [K, N] of 4 bits.

    Raises:
        InvalidArgument: K is odd, or ``group_size`` is neither K nor a multiple of 32 that divides
            it.
    """
    if k < 1 or n < 1 or k % 2:
        raise InvalidArgument(f"K, N: found K={k}, N={n}, wanted at least 1, and an even K")
    if group_size != k and (group_size < 1 or group_size % _SMALL_GROUP or k % group_size):
        raise InvalidArgument(
            f"group_size: found {group_size}, wanted K={k}, or a multiple of {_SMALL_GROUP} "
            "that divides it"
        )


class Sizes(NamedTuple):
    """What a packed weight [K, N] holds."""

    K: int
    N: int
    group_size: int

    @property
    def groups(self) -> int:
        """How many groups the 128 of K of an atom have: 1 or 4."""
        is_large = self.group_size == self.K or self.group_size % _DEPTH == 0
        return 1 if is_large else _DEPTH // _SMALL_GROUP

    @property
    def packed_shape(self) -> tuple[int, int, int]:
        """The atoms along N and K, and the bytes of each: its values, and its scales, in float32
        where it has one group, else in bfloat16."""
        of_scales = _COLUMNS * self.groups * (4 if self.groups == 1 else 2)
        atoms = -(-self.N // _COLUMNS), -(-self.K // _DEPTH)
        return *atoms, _COLUMNS * _DEPTH // 2 + of_scales

    def check(self) -> None:
        """Raises InvalidArgument where the kernel has no such weight."""
        check_sizes(self.K, self.N, self.group_size)
        if self.K % _core.ALIGNMENT or self.N % _core.ALIGNMENT:
            raise InvalidArgument(
                f"K, N: found K={self.K}, N={self.N}, wanted multiples of {_core.ALIGNMENT}"
            )


def product(
    packed: torch.Tensor,
    sizes: Sizes,
    a: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    splits: int | None = None,
    sm_count: int = 0,
) -> torch.Tensor:
    """``a @ B (+ bias)``, rounded once to bfloat16.

    Args:
        packed: what `pack` has made of B.
        sizes: B's.
        a: bfloat16 [M, K], contiguous, on the weight's GPU.
        bias: bfloat16 [N] or None.
        splits: into how many parts K is split; None for those of a weight of this size.
        sm_count: CTAs at most; 0 for as many as there are multiprocessors.

    Raises:
        InvalidArgument: the kernel cannot take the operands, or one requires a gradient, which
            it has none; the message says why.
    """
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (a, bias)):
        raise InvalidArgument(
            "a, b: found requires_grad=True, wanted a call under torch.no_grad(): the "
            "product has no backward"
        )
    if a.dtype != torch.bfloat16 or a.dim() != 2 or a.shape[1] != sizes.K:
        found = f"{a.dtype} {tuple(a.shape)}"
        raise InvalidArgument(f"a: found {found}, wanted torch.bfloat16 [M, {sizes.K}]")
    if not a.is_contiguous() or a.device != packed.device:
        raise InvalidArgument(
            f"a: found strides {tuple(a.stride())} on {a.device}, wanted contiguous rows on "
            f"{packed.device}"
        )
    if bias is not None and (bias.dtype != torch.bfloat16 or bias.shape != (sizes.N,)):
        found = f"{bias.dtype} {tuple(bias.shape)}"
        raise InvalidArgument(f"bias: found {found}, wanted torch.bfloat16 ({sizes.N},)")
    out = a.new_empty(a.shape[0], sizes.N)
    if out.numel() == 0:
        return out
    if splits is None:
        splits = _core.streaming_splits(sizes.N, sizes.K, 4)
    copies: list[torch.Tensor] = []  # they live until the call is enqueued
    addresses = [
        aligned_pointer(a, copies),
        packed.data_ptr(),
        bias_pointer(bias, copies),
        out.data_ptr(),
    ]
    size = a.shape[0], sizes.N, sizes.K
    with torch.cuda.device(a.device):
        stream = stream_of(a.device)
        try:
            _core.packed_matmul(size, sizes.groups, splits, addresses, stream, sm_count)
        except ValueError as error:
            raise InvalidArgument(str(error)) from None
    return out


def pack(weight: torch.Tensor, scales: torch.Tensor, group_size: int) -> torch.Tensor:
    """Pack a weight, on any device, as uint8 of `Sizes.packed_shape`.

    Args:
        weight: uint8 [N, K / 2], two values of a row in a byte, the first in the low bits; a value
            of v is stored as v + 8, for v from -8 to 7. N and K are multiples of 8.
        scales: [N, K / group_size], on the weight's device. They are kept in float32 where a group
            is K, or has a multiple of 128 values, else in bfloat16.
        group_size: K, or a multiple of 32 that divides K.

    Raises:
        InvalidArgument: the message names the argument, what was found, and what is wanted.
    """
    if weight.dtype != torch.uint8 or weight.dim() != 2:
        found = f"{weight.dtype} {tuple(weight.shape)}"
        raise InvalidArgument(f"weight: found {found}, wanted torch.uint8 [N, K / 2]")
    n, k = weight.shape[0], 2 * weight.shape[1]
    sizes = Sizes(k, n, group_size)
    sizes.check()
    if scales.shape != (n, k // group_size):
        raise InvalidArgument(
            f"scales: found shape {tuple(scales.shape)}, wanted ({n}, {k // group_size})"
        )
    groups = sizes.groups
    tiles_n, tiles_k, _ = sizes.packed_shape
    values = torch.stack((weight & 15, weight >> 4), -1).flatten(1)
    whole = weight.new_full((tiles_n * _COLUMNS, tiles_k * _DEPTH), _ZERO)
    whole[:n, :k] = values
    # Columns of an atom are warp, row // 8 and row % 8; K is step, half, q and its last bit.
    fields = whole.view(tiles_n, 4, 2, 8, tiles_k, 8, 2, 4, 2)
    # Memory has step // 4, thread (warp, row % 8, q), step % 4, nibble (last bit, half, row // 8).
    fields = fields.unflatten(5, (2, 4)).permute(0, 4, 5, 1, 3, 8, 6, 9, 7, 2)
    nibbles = fields.reshape(tiles_n, tiles_k, -1, 2)
    bytes_ = nibbles[..., 0] | nibbles[..., 1] << 4
    per_group = _DEPTH // groups
    dtype = torch.float32 if groups == 1 else torch.bfloat16
    of_groups = scales.reshape(n, -1).to(dtype).repeat_interleave(group_size, 1)[:, ::per_group]
    every = of_groups.new_zeros(tiles_n * _COLUMNS, tiles_k * groups)
    every[:n, : of_groups.shape[1]] = of_groups
    of_atoms = every.view(tiles_n, _COLUMNS, tiles_k, groups).permute(0, 2, 3, 1)
    of_atoms = of_atoms.reshape(tiles_n, tiles_k, -1).contiguous().view(torch.uint8)
    return torch.cat((bytes_, of_atoms), -1).contiguous()
