"""Megatron's linears over agmm's ops. It imports megatron."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.mappings import scatter_to_tensor_model_parallel_region

from agmm.errors import Unsupported, warn_once
from agmm.nn._column_product import column_product
from agmm.ops import accumulated
from agmm.ops.all_gather_matmul import all_gather_matmul
from agmm.ops.autograd import GradOfWeight
from agmm.ops.matmul_all_reduce import matmul_all_reduce
from agmm.ops.matmul_reduce_scatter import matmul_reduce_scatter


def _into_main_grad(weight: torch.Tensor) -> GradOfWeight:
    """What adds a weight's gradient to its ``main_grad``, by Megatron's kernel."""
    held: Any = weight
    main_grad = held.main_grad  # Megatron may put another in its place before the backward

    def add(x: torch.Tensor, dout: torch.Tensor, _: bool) -> torch.Tensor | None:
        held.main_grad = main_grad
        kernels = layers.fused_weight_gradient_mlp_cuda
        in_float = main_grad.dtype == torch.float32
        name = f"wgrad_gemm_accum_fp{32 if in_float else 16}"
        rows, drows = x.flatten(0, -2).contiguous(), dout.flatten(0, -2).contiguous()
        getattr(kernels, name)(rows, drows, main_grad)
        if not hasattr(held, "grad_added_to_main_grad"):
            return None
        # The hooks of Megatron's data parallelism wait for a gradient, and pass over its values.
        held.grad_added_to_main_grad = True
        make = torch.zeros_like if getattr(held, "zero_out_wgrad", False) else torch.empty_like
        return make(weight).t()

    return add


class _ByAgmm:
    """What both linears share, beside Megatron's own class."""

    strict = False
    config: Any
    is_expert: bool
    tp_group: Any
    sequence_parallel: bool

    def _is_served(self, weight: torch.Tensor, why_not: str = "") -> bool:
        """Whether agmm multiplies by the weight. One warning says why it does not.

        Raises:
            Unsupported: it does not, under ``strict``.
        """
        if self.tp_group.size() == 1:
            return False
        offloading = getattr(self.config, "_cpu_offloading_context", None)
        if self.is_expert:
            why_not = "it is an expert's"
        elif not weight.requires_grad and torch.is_grad_enabled():
            why_not = "its weight is frozen"
        elif getattr(self, "gtp_remat_size", 1) > 1:
            why_not = "its weight is sharded over a further group (gtp_remat)"
        elif hasattr(weight, "__fsdp_param__"):
            why_not = "Megatron-FSDP makes its main_grad in the backward"
        elif offloading is not None and offloading.inside_context:
            why_not = "its input is offloaded to the CPU"
        if why_not:
            if self.strict:
                raise Unsupported(f"{type(self).__name__}: {why_not}; strict=True refuses Megatron")
            warn_once(f"agmm leaves a linear to Megatron: {type(self).__name__}: {why_not}")
        return not why_not

    def _is_accumulated(self, weight: torch.Tensor) -> bool:
        """Whether the backward adds the weight's gradient to ``main_grad``."""
        wanted = self.config.gradient_accumulation_fusion and torch.is_grad_enabled()
        return bool(wanted) and getattr(weight, "main_grad", None) is not None


class ColumnParallelLinear(_ByAgmm, layers.ColumnParallelLinear):  # type: ignore[misc]
    """Megatron's, multiplied by agmm."""

    def _forward_impl(self, **options: Any) -> Any:
        x, weight = options["input"], options["weight"]
        why_not = ""
        if options.get("grad_output_buffer") is not None:
            why_not = "the gradient of the embedding's weight is deferred"
        elif self.disable_grad_reduce:
            why_not = "the gradient of its input is not to be summed (disable_grad_reduce)"
        if not self._is_served(weight, why_not):
            return super()._forward_impl(**options)
        B, group, bias = weight.t(), self.tp_group, options.get("bias")
        if self._is_accumulated(weight):
            ops = accumulated
            product = ops.gather_product if self.sequence_parallel else ops.column_product
            out = product(_into_main_grad(weight), x, B, group, self.strict)
            return out if bias is None else out + bias
        if self.sequence_parallel:
            return all_gather_matmul(x.contiguous(), B, group, bias=bias, strict=self.strict)
        return column_product(x, weight, bias, group)


class RowParallelLinear(_ByAgmm, layers.RowParallelLinear):  # type: ignore[misc]
    """Megatron's, multiplied and summed by agmm."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The sum over the ranks, of this rank's rows with sequence parallelism, and the bias where
        it is left to the caller. Collective."""
        weight = self.weight
        if not self._is_served(weight):
            found: tuple[torch.Tensor, torch.Tensor | None] = super().forward(input_)
            return found
        B, group = weight.t(), self.tp_group
        if not self.input_is_parallel:
            input_ = scatter_to_tensor_model_parallel_region(input_, group=group)
        if self._is_accumulated(weight):
            ops = accumulated
            product = ops.scatter_product if self.sequence_parallel else ops.sum_product
            out = product(_into_main_grad(weight), input_, B, group, self.strict)
        elif self.sequence_parallel:
            out = matmul_reduce_scatter(input_, B, group, strict=self.strict)
        else:
            out = matmul_all_reduce(input_, B, group, strict=self.strict)
        if self.skip_bias_add:
            return out, self.bias
        # Megatron sums the gradient of a bias that saw this rank's rows: agmm's op is not to.
        return out if self.bias is None else out + self.bias, None


class StrictColumnParallelLinear(ColumnParallelLinear):
    """`ColumnParallelLinear`, which raises where Megatron would serve."""

    strict = True


class StrictRowParallelLinear(RowParallelLinear):
    """`RowParallelLinear`, which raises where Megatron would serve."""

    strict = True


def classes(strict: bool) -> dict[type, type]:
    """agmm's linears by Megatron's."""
    return {
        layers.ColumnParallelLinear: StrictColumnParallelLinear if strict else ColumnParallelLinear,
        layers.RowParallelLinear: StrictRowParallelLinear if strict else RowParallelLinear,
    }


class SpecProvider(LocalSpecProvider):  # type: ignore[misc]
    """Megatron's provider of local modules, with agmm's linears; experts have Megatron's."""

    def __init__(self, strict: bool) -> None:
        super().__init__()
        self._linears = classes(strict)

    def column_parallel_linear(self) -> type:
        """The class of column-parallel linears."""
        return self._linears[layers.ColumnParallelLinear]

    def row_parallel_linear(self) -> type:
        """The class of row-parallel linears."""
        return self._linears[layers.RowParallelLinear]
