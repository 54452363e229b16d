"""torch's async-TP ops on fp8 operands: which calls agmm serves, and how."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from agmm.errors import InvalidArgument
from agmm.ops import fp8_operands
from agmm.ops.fp8_gather import Fp8Gather
from agmm.ops.fp8_operands import Fp8Weights
from agmm.ops.fp8_scatter import Fp8Scatter
from agmm.ops.gather import GatherSettings
from agmm.ops.kept import kind_of
from agmm.ops.pipeline import serve
from agmm.ops.scaled_checks import check_scaled_scatter
from agmm.ops.scatter import ScatterSettings
from agmm.runtime.results import strided
from agmm.runtime.scaled import FP8, ScaledProducts


def _result_scale(scale: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor | None:
    """torch scales fp8 results only."""
    return scale if out_dtype in FP8 else None


class ServedGather(NamedTuple):
    """A call of ``fused_all_gather_scaled_matmul``, in torch's order."""

    A: torch.Tensor
    Bs: list[torch.Tensor]
    A_scale: torch.Tensor
    B_scales: list[torch.Tensor]
    gather_dim: int
    group_name: str
    biases: list[torch.Tensor | None]
    result_scales: list[torch.Tensor | None]
    out_dtypes: list[torch.dtype | None]
    use_fast_accum: list[bool]

    def kind(self) -> tuple[object, ...]:
        tensors = self.A, *self.Bs, self.A_scale, *self.B_scales
        maybes = *self.biases, *self.result_scales
        return (
            self.gather_dim,
            tuple(map(kind_of, tensors)),
            tuple(None if t is None else kind_of(t) for t in maybes),
            tuple(self.dtypes()),
            (len(self.Bs), len(self.biases), len(self.use_fast_accum)),
        )

    def dtypes(self) -> list[torch.dtype | None]:
        # Through the dispatcher they come as numbers.
        return symm_mem._maybe_convert_scalar_types_to_dtypes(self.out_dtypes)

    def _given(self, group: dist.ProcessGroup) -> tuple[list[torch.dtype], torch.Tensor]:
        """The results' dtypes, and the scales of this rank's shard: torch takes those of all rows
        too."""
        dtypes = [
            B.dtype if dtype is None else dtype
            for B, dtype in zip(self.Bs, self.dtypes(), strict=True)
        ]
        scale, dim = self.A_scale, self.gather_dim
        rows, scales = list(self.A.shape[:-1]), list(scale.shape[:-1])
        own = rows[dim]
        rows[dim] *= group.size()
        if scale.numel() > 1 and scales == rows:
            scale = scale.narrow(dim, dist.get_rank(group) * own, own)
        return dtypes, scale

    def why_torch(self, group: dist.ProcessGroup) -> str | None:
        """The reason why torch has to serve such calls, or None; the same on all ranks, as long as
        they call with the same shapes and dtypes."""
        if not 0 <= self.gather_dim < self.A.dim() - 1:
            return (
                f"gather_dim: {self.gather_dim} with {self.A.dim()} dimensions, "
                "agmm gathers along any but the last"
            )
        lists = (
            ("B_scales", self.B_scales),
            ("biases", self.biases),
            ("result_scales", self.result_scales),
            ("out_dtypes", self.out_dtypes),
            ("use_fast_accum", self.use_fast_accum),
        )
        for name, found in lists:
            if len(found) != len(self.Bs):
                return f"{name}: {len(found)} for {len(self.Bs)} weights"
        try:
            self._call(group).check()
        except InvalidArgument as error:
            return str(error)  # torch refuses it in its own words
        return None

    def why_unfused(self, group: dist.ProcessGroup) -> str | None:
        """The reason why agmm has no kernel for such calls, or None; the same on all ranks."""
        reason = fp8_operands.why_unfused(self.A.device, group)
        return reason or self._call(group).why_not_fused()

    def _call(self, group: dist.ProcessGroup, *, strict: bool = True) -> Fp8Gather:
        """agmm's call, with the gathered dimension first."""
        dtypes, scale = self._given(group)
        dim = self.gather_dim
        if scale.dim() == self.A.dim() and scale.numel() > 1:
            scale = scale.movedim(dim, 0)
        result_scales = [
            _result_scale(*one) for one in zip(self.result_scales, dtypes, strict=True)
        ]
        weights = Fp8Weights(
            *(self.Bs, self.B_scales, self.biases, result_scales, dtypes, self.use_fast_accum)
        )
        settings = GatherSettings(return_A=True, strict=strict)
        return Fp8Gather(self.A.movedim(dim, 0), scale, weights, group, settings)

    def run(
        self, group: dist.ProcessGroup, *, strict: bool = True
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """A and the products, with the strides of torch's."""
        A, _, outs = serve(self._call(group, strict=strict))
        assert A is not None
        dim = self.gather_dim
        return strided(A, 0, dim), [strided(out, 0, dim) for out in outs]

    def run_unfused(self, group: dist.ProcessGroup) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return what `run` does, by whichever path serves the call."""
        return self.run(group, strict=False)


class ServedScatter(NamedTuple):
    """A call of ``fused_scaled_matmul_reduce_scatter``, in torch's order."""

    A: torch.Tensor
    B: torch.Tensor
    A_scale: torch.Tensor
    B_scale: torch.Tensor
    reduce_op: str
    orig_scatter_dim: int
    scatter_dim_after_maybe_reshape: int
    group_name: str
    output_shape: list[int] | None
    bias: torch.Tensor | None = None
    result_scale: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None
    use_fast_accum: bool = False

    def kind(self) -> tuple[object, ...]:
        maybes = self.bias, self.result_scale
        return (
            *map(kind_of, (self.A, self.B, self.A_scale, self.B_scale)),
            tuple(None if t is None else kind_of(t) for t in maybes),
            self.reduce_op,
            self.orig_scatter_dim,
            self.out_dtype,
            None if self.output_shape is None else tuple(self.output_shape),
        )

    def _dtype(self) -> torch.dtype:
        return self.A.dtype if self.out_dtype is None else self.out_dtype

    def _rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A and its scales with the leading sizes of the sum; A may come as a matrix of its rows.

        Raises:
            InvalidArgument: there is another number of them.
        """
        A, scale, shape = self.A, self.A_scale, self.output_shape
        if shape is None:
            return A, scale
        leading = list(shape[:-1])
        if A.shape[:-1].numel() != torch.Size(leading).numel():
            raise InvalidArgument(
                f"output_shape: found {shape}, wanted as many rows as A's {tuple(A.shape[:-1])}"
            )
        if scale.numel() > 1 and scale.shape[:-1] == A.shape[:-1]:
            scale = scale.reshape(*leading, scale.shape[-1])
        return A.reshape(*leading, A.shape[-1]), scale

    def why_torch(self, group: dist.ProcessGroup) -> str | None:
        """Why torch serves this call; None where agmm does."""
        if self.A.shape[-1] == 0:
            return f"A: shape {tuple(self.A.shape)} has no elements to multiply"
        try:
            A, scale = self._rows()
            if not 0 <= self.orig_scatter_dim < A.dim() - 1:
                return (
                    f"scatter_dim: {self.orig_scatter_dim} with {A.dim()} dimensions, "
                    "agmm scatters along any but the last"
                )
            check_scaled_scatter(
                self._products(A, scale), group.size(), self.orig_scatter_dim, self.reduce_op
            )
        except InvalidArgument as error:
            return str(error)  # torch refuses it in its own words
        return None

    def why_unfused(self, group: dist.ProcessGroup) -> str | None:
        """The reason why agmm has no kernel for such calls, or None; the same on all ranks."""
        return fp8_operands.why_unfused(self.A.device, group)

    def run(self, group: dist.ProcessGroup, *, strict: bool = True) -> torch.Tensor:
        """The sum's part. A bias is a part of each rank's product, as in torch."""
        settings = ScatterSettings(self.orig_scatter_dim, self.reduce_op, strict)
        given = self._products(*self._rows())
        return serve(Fp8Scatter(given, group, settings, is_bias_of_each=True))

    def run_unfused(self, group: dist.ProcessGroup) -> torch.Tensor:
        """Return what `run` does, by whichever path serves the call."""
        return self.run(group, strict=False)

    def _products(self, A: torch.Tensor, scale: torch.Tensor) -> ScaledProducts:
        """The one product."""
        dtype = self._dtype()
        return ScaledProducts(
            *([A], [self.B], [scale], [self.B_scale], self.bias),
            *(_result_scale(self.result_scale, dtype), dtype, self.use_fast_accum),
        )
