"""Weights of 4 bits, on the CPU as torch packs them, on GPUs as agmm's kernel reads them, and
products with them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from agmm.errors import InvalidArgument
from agmm.runtime import cuda_packed
from agmm.runtime.cuda_packed import check_sizes


@dataclass(frozen=True, eq=False)
class Packed4BitWeight:
    """A packed weight of 4 bits, with its sizes, taken as B by `agmm.all_gather_matmul`.

    On the CPU it is what ``torch.ops.aten._dyn_quant_pack_4bit_weight`` packs; each row of A is
    quantised to 8 bits when it is multiplied, as ``torch.ops.aten._dyn_quant_matmul_4bit`` does it.
    On Hopper GPUs A is bfloat16, values of a weight are exact in the tensor cores, and the products
    of each group are scaled and summed in float32.

    Attributes:
        packed: a CPU tensor in a layout of torch's own for this processor, or on a GPU uint8 in
            that of agmm's kernel; `pack` makes both.
        K: rows of B, even; on a GPU a multiple of 8, as N.
        N: columns of B.
        group_size: how many values of a column share a scale: K (channel-wise), or a multiple of 32
            that divides K.

    Raises:
        InvalidArgument: sizes that do not go together, another device, or too few bytes, on a GPU
            another shape, for them.
    """

    packed: torch.Tensor
    K: int
    N: int
    group_size: int

    def __post_init__(self) -> None:
        check_sizes(self.K, self.N, self.group_size)
        device = getattr(self.packed, "device", None)
        if device is None or device.type not in ("cpu", "cuda"):
            found = type(self.packed).__name__ if device is None else device
            raise InvalidArgument(f"packed: found {found}, wanted a tensor on the CPU or a GPU")
        if device.type == "cuda":
            self._sizes.check()
            wanted = self._sizes.packed_shape
            if self.packed.shape != wanted or self.packed.dtype != torch.uint8:
                found = f"{self.packed.dtype} {tuple(self.packed.shape)}"
                raise InvalidArgument(f"packed: found {found}, wanted torch.uint8 {wanted}")
            return
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
            bias: float32 [N], added to each product, or None; on a GPU the op takes it instead.

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
        if weight.device.type == "cuda":
            if bias is not None:
                raise InvalidArgument("bias: found one of a weight on a GPU, wanted the op's bias")
            of_groups = scales.reshape(n, -1)
            return cls(cuda_packed.pack(weight, of_groups, group_size), k, n, group_size)
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

    @property
    def _sizes(self) -> cuda_packed.Sizes:
        return cuda_packed.Sizes(self.K, self.N, self.group_size)

    def product(self, a: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``a @ B (+ bias)`` [M, N] of a [M, K] and bias [N]: float32 on the CPU, bfloat16 on a
        GPU."""
        if self.packed.device.type == "cuda":
            return cuda_packed.product(self.packed, self._sizes, a.contiguous(), bias)
        multiply = torch.ops.aten._dyn_quant_matmul_4bit.default
        found: torch.Tensor = multiply(a.contiguous(), self.packed, self.group_size, self.K, self.N)
        return found if bias is None else found.add_(bias)
