"""Weights of 4 bits on the CPU, as torch packs them, and products with them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from agmm.errors import InvalidArgument

_GROUP_MULTIPLE = 32  # torch's: of group_size, where it is not K


@dataclass(frozen=True, eq=False)
class Packed4BitWeight:
    """What ``torch.ops.aten._dyn_quant_pack_4bit_weight`` packs of a weight, with its sizes.

    Taken as B by `agmm.all_gather_matmul` on the CPU. Each row of A is quantised to 8 bits when it
    is multiplied, as ``torch.ops.aten._dyn_quant_matmul_4bit`` does it.

    Attributes:
        packed: CPU tensor, in a layout of torch's own for this processor.
        K: rows of B, even.
        N: columns of B.
        group_size: how many values of a column share a scale: K (channel-wise), or a multiple of 32
            that divides K.

    Raises:
        InvalidArgument: sizes that do not go together, another device, or too few bytes for them.
    """

    packed: torch.Tensor
    K: int
    N: int
    group_size: int

    def __post_init__(self) -> None:
        check_sizes(self.K, self.N, self.group_size)
        if not isinstance(self.packed, torch.Tensor) or self.packed.device.type != "cpu":
            found = getattr(self.packed, "device", type(self.packed).__name__)
            raise InvalidArgument(f"packed: found {found}, wanted a tensor on the CPU")
        least = self.K * self.N // 2
        if self.packed.nbytes < least:
            raise InvalidArgument(
                f"packed: found {self.packed.nbytes} bytes, wanted at least {least} for "
                f"K={self.K}, N={self.N}"
            )

    @classmethod
    def pack(
        cls,
        weight: torch.Tensor,
        scales: torch.Tensor,
        group_size: int | None = None,
        bias: torch.Tensor | None = None,
    ) -> Packed4BitWeight:
        """Pack a weight.

        Args:
            weight: uint8 [N, K / 2], two values of a row in a byte, the first in the low bits; a
                value of v is stored as v + 8, for v from -8 to 7.
            scales: [N] or [N, 1] where group_size is K, else [N, K / group_size]; what a value is
                multiplied with. float32, or for groups bfloat16 too.
            group_size: K when None.
            bias: float32 [N], added to each product, or None.

        Raises:
            InvalidArgument: shapes or dtypes that do not go together.
        """
        if weight.dim() != 2 or weight.dtype != torch.uint8:
            raise InvalidArgument(
                f"weight: found {weight.dtype} {tuple(weight.shape)}, wanted torch.uint8 [N, K / 2]"
            )
        n, k = weight.shape[0], 2 * weight.shape[1]
        group_size = k if group_size is None else group_size
        check_sizes(k, n, group_size)
        if scales.numel() != n * (k // group_size) or len(scales) != n:
            raise InvalidArgument(
                f"scales: found shape {tuple(scales.shape)}, wanted ({n}, {k // group_size})"
            )
        if bias is not None and (bias.shape != (n,) or bias.dtype != torch.float32):
            raise InvalidArgument(
                f"bias: found {bias.dtype} {tuple(bias.shape)}, wanted torch.float32 ({n},)"
            )
        dtype = torch.float32 if group_size == k else torch.bfloat16  # those of Arm's kernels
        scales = scales.reshape(n, -1).to(dtype)
        pack = torch.ops.aten._dyn_quant_pack_4bit_weight.default
        packed = pack(weight.contiguous(), scales.contiguous(), bias, group_size, k, n)
        return cls(packed, k, n, group_size)

    @property
    def shape(self) -> torch.Size:
        """[K, N], of the weight as B."""
        return torch.Size((self.K, self.N))

    def product(self, a: torch.Tensor) -> torch.Tensor:
        """``a @ B`` [M, N] of float32 a [M, K]."""
        multiply = torch.ops.aten._dyn_quant_matmul_4bit.default
        found: torch.Tensor = multiply(a.contiguous(), self.packed, self.group_size, self.K, self.N)
        return found


def check_sizes(k: int, n: int, group_size: int) -> None:
    """Checks the sizes of a weight [K, N] of 4 bits.

    Raises:
        InvalidArgument: K is odd, or ``group_size`` is neither K nor a multiple of 32 that divides
            it.
    """
    if k < 1 or n < 1 or k % 2:
        raise InvalidArgument(f"K, N: found K={k}, N={n}, wanted at least 1, and an even K")
    if group_size != k and (group_size < 1 or group_size % _GROUP_MULTIPLE or k % group_size):
        raise InvalidArgument(
            f"group_size: found {group_size}, wanted K={k}, or a multiple of {_GROUP_MULTIPLE} "
            "that divides it"
        )
