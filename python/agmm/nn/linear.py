"""Linear layers that hold this rank's shard of the weight: by columns, and by rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from agmm.errors import InvalidArgument
from agmm.nn._column_product import column_product
from agmm.nn._fp8 import gather_products, scatter_product, scatter_quantised
from agmm.nn._held import Held
from agmm.nn._sharded import ShardedLinear
from agmm.nn.fp8_recipe import WHY_NOT_SAVED, Fp8Recipe
from agmm.ops.all_gather_matmul import all_gather_matmul
from agmm.ops.matmul_all_reduce import matmul_all_reduce
from agmm.ops.matmul_all_reduce_rms_norm import matmul_all_reduce_rms_norm
from agmm.ops.matmul_reduce_scatter import matmul_reduce_scatter


class ColumnParallelLinear(ShardedLinear):
    """``all_gather(x) @ weightᵀ + bias``, each rank with its shard of the outputs.

    The whole layer is ``torch.nn.Linear(in_features, sum(out_features))``. Several outputs share
    one gather and one matmul: with ``out_features=[q, k, v]`` the layer returns three tensors.

    Args:
        in_features: K.
        out_features: N, or one N for each output; multiples of the world size.
        bias: whether there is one; each rank holds its shard.
        group: process group, its name or a 1-D mesh; the default group when None.
        device_mesh: 1-D mesh, instead of ``group``. With FSDP2 around the layer it has to be a
            dimension of the mesh of which FSDP2 is given another.
        save_gathered: see `agmm.all_gather_matmul`; not with ``fp8``.
        strict: see `agmm.all_gather_matmul`.
        fp8: quantise what is multiplied and what is gathered, forward and backward, by torchao's
            recipe "tensorwise", "rowwise" or "rowwise_with_gw_hp", by "block", which has scales of
            1 x 128 and 128 x 128, or by an `Fp8Recipe`. K and this rank's shard of each N are
            multiples of 16.
        sequence_parallel: whether ``x`` is this rank's rows. With False it is all rows, the same on
            all ranks, as in decoding: the forward communicates nothing, and the backward sums the
            gradient of ``x``. With ``AGMM_BATCH_INVARIANT=on`` a row's bits do not depend on the
            other rows then. Neither ``save_gathered`` nor ``fp8`` goes with False.
        device: of the parameters.
        dtype: of the parameters.

    Attributes:
        weight: DTensor [out_features, in_features], Shard(0) over the ranks. With several outputs
            there is one for each: ``weight_0``, ``weight_1`` and so on.
        bias: DTensor [out_features], Shard(0), or None; ``bias_0`` and so on.

    Raises:
        InvalidArgument: sizes that the ranks cannot share, a mesh that is not 1-D, or a group or
            mesh that this rank is not in.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        bias: bool = True,
        *,
        group: dist.ProcessGroup | DeviceMesh | str | None = None,
        device_mesh: DeviceMesh | None = None,
        save_gathered: bool = False,
        strict: bool = False,
        fp8: str | Fp8Recipe | None = None,
        sequence_parallel: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        several = not isinstance(out_features, int)
        sizes = (out_features,) if isinstance(out_features, int) else tuple(out_features)
        super().__init__(in_features, group, device_mesh, fp8, sequence_parallel)
        if not sizes:
            raise InvalidArgument(
                f"{type(self).__name__}: out_features: found an empty list, wanted at least one "
                "size"
            )
        for size in sizes:
            self._check_divides("out_features", size)
        self._check_fp8_size("in_features", in_features, ranks=1)
        for size in sizes:
            self._check_fp8_size("out_features", size, ranks=self._world_size)
        if save_gathered and self.fp8 is not None:
            raise InvalidArgument(f"{type(self).__name__}: {WHY_NOT_SAVED}")
        if save_gathered and not sequence_parallel:
            raise InvalidArgument(
                f"{type(self).__name__}: save_gathered: found True with sequence_parallel=False, "
                "wanted False: nothing is gathered"
            )
        self.out_features = sizes if several else sizes[0]
        self.save_gathered = save_gathered
        self.strict = strict
        self._sizes = [size // self._world_size for size in sizes] if several else None
        for name in ("weight", "bias"):
            numbered = tuple(f"{name}_{i}" for i in range(len(sizes)))
            names = numbered if len(sizes) > 1 else (name,)
            self.held[name] = Held(names, sizes, Shard(0))
        self._make_parameters(bias, device, dtype)

    def operands_for(
        self, x: torch.Tensor
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor | None]]:
        """This rank's weights and biases, `operands`, of checked shapes, for an input that is
        checked too."""
        self._check_operand(x)
        weights, biases = self.operands()
        self._check_weights(weights)
        self._check_input(x, weights[0])
        return weights, biases

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """The products of the gathered rows. Collective; without sequence parallelism only its
        backward is.

        Args:
            x: [M_local, ..., in_features], this rank's rows; all rows without sequence parallelism.

        Returns:
            [world_size * M_local, ..., N / world_size]; for several outputs a tuple of them. Their
            rows lie beside each other in memory; each may be changed in place. Without sequence
            parallelism there are as many rows as those of ``x``.

        Raises:
            InvalidArgument: names x or the weight, what was found and what the layer wants.
        """
        weights, biases = self.operands_for(x)
        if not self.sequence_parallel:
            ranks = self.ranks.for_ops
            outs = [
                column_product(x, weight.t(), bias, ranks)
                for weight, bias in zip(weights, biases, strict=True)
            ]
        elif self.fp8 is not None:
            outs = gather_products(
                self.fp8, x, weights, biases, self.ranks.own_name, strict=self.strict
            )
        else:
            outs = all_gather_matmul(
                x,
                list(weights),
                self.ranks.for_ops,
                bias=list(biases),
                save_gathered=self.save_gathered,
                strict=self.strict,
            )
        if self._sizes is None:
            return outs[0]
        if len(outs) == 1:
            # Autograd lets nobody change split()'s views in place. Nobody else has the whole, of
            # which their gradients are put together by one kernel.
            return torch.unsafe_split_with_sizes(outs[0], self._sizes, -1)
        return tuple(outs)


class RowParallelLinear(ShardedLinear):
    """``reduce_scatter(x @ weightᵀ) + bias``, each rank with its shard of the inputs.

    The whole layer is ``torch.nn.Linear(in_features, out_features)``.

    Args:
        in_features: K, a multiple of the world size.
        out_features: N.
        bias: whether there is one; it is the same on all ranks, and so is its gradient.
        group: process group, its name or a 1-D mesh; the default group when None.
        device_mesh: 1-D mesh, instead of ``group``. With FSDP2 around the layer it has to be a
            dimension of the mesh of which FSDP2 is given another.
        fp8: see `ColumnParallelLinear`. N and this rank's shard of K are multiples of 16.
        sequence_parallel: whether each rank gets its own rows of the sum. With False every rank
            gets all of them, by `agmm.matmul_all_reduce`, as in decoding; not with ``fp8``. The
            gradient of the output is then taken to be the same on all ranks.
        device: of the parameters.
        dtype: of the parameters.

    Attributes:
        weight: DTensor [out_features, in_features], Shard(1) over the ranks.
        bias: DTensor [out_features], Replicate(), or None.

    Raises:
        InvalidArgument: sizes that the ranks cannot share, a mesh that is not 1-D, or a group or
            mesh that this rank is not in.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: dist.ProcessGroup | DeviceMesh | str | None = None,
        device_mesh: DeviceMesh | None = None,
        fp8: str | Fp8Recipe | None = None,
        sequence_parallel: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, group, device_mesh, fp8, sequence_parallel)
        self._check_divides("in_features", in_features)
        self._check_fp8_size("in_features", in_features, ranks=self._world_size)
        self._check_fp8_size("out_features", out_features, ranks=1)
        self.out_features = out_features
        self.held["weight"] = Held(("weight",), (out_features,), Shard(1))
        self.held["bias"] = Held(("bias",), (out_features,), Replicate())
        self._make_parameters(bias, device, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the sum over the ranks. Collective.

        Args:
            x: [M, ..., in_features / world_size], M a multiple of the world size; without sequence
                parallelism any number.

        Returns:
            [M / world_size, ..., out_features]; all M rows without sequence parallelism.

        Raises:
            InvalidArgument: names x or the weight, what was found and what the layer wants.
        """
        weight, bias = self._operands_for(x)
        if not self.sequence_parallel:
            return matmul_all_reduce(x, weight, self.ranks.for_ops, bias=bias)
        if x.shape[0] % self._world_size:
            self._refuse_input(
                f"{x.shape[0]} in dimension 0", f"a multiple of the {self._world_size} ranks"
            )
        if self.fp8 is not None:
            return scatter_product(self.fp8, x, weight, bias, self.ranks.own_name)
        return matmul_reduce_scatter(x, weight, self.ranks.for_ops, bias=bias)

    def of_quantised(
        self, x: tuple[torch.Tensor, torch.Tensor], like: torch.Tensor
    ) -> torch.Tensor:
        """The layer's result for an input that is quantised already, with the scales of the layer's
        recipe. Collective; without a backward.

        Args:
            x: values [M, ..., in_features / world_size] and their scales.
            like: what has the dtype of the result.

        Returns:
            [M / world_size, ..., out_features].
        """
        assert self.fp8 is not None
        (weight,), (bias,) = self.operands()
        self._check_weights([weight])
        return scatter_quantised(self.fp8, x, weight, bias, self.ranks.own_name, like)

    def normed(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float = 1e-6,
        *,
        quantize_out: str | None = None,
    ) -> tuple[Any, torch.Tensor]:
        """The layer, the residual behind it and the RMS norm of their sum, by
        `agmm.matmul_all_reduce_rms_norm`: the end of a sublayer in decoding. Collective.

        Args:
            x: [M, ..., in_features / world_size].
            residual: [M, ..., out_features], the same on all ranks.
            norm_weight: [out_features], the norm's weight, the same on all ranks.
            eps: is added to the mean of the squares of a row.
            quantize_out: the norm in fp8, as `agmm.matmul_all_reduce_rms_norm` has it; without a
                backward.

        Returns:
            The norm, with ``quantize_out`` a tuple of its values and scales, and the new residual.

        Raises:
            InvalidArgument: names what was found and what is wanted; also of a layer with sequence
                parallelism.
        """
        if self.sequence_parallel:
            raise InvalidArgument(
                f"{type(self).__name__}: sequence_parallel: found True, wanted False for normed()"
            )
        weight, bias = self._operands_for(x)
        return matmul_all_reduce_rms_norm(
            *(x, weight, residual, norm_weight, eps, self.ranks.for_ops),
            bias=bias,
            quantize_out=quantize_out,
        )

    def _operands_for(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """This rank's weight and bias, for an input that is checked here but for its rows."""
        self._check_operand(x)
        (weight,), (bias,) = self.operands()
        self._check_weights([weight])
        self._check_input(x, weight)
        return weight, bias
