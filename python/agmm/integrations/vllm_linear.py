"""vLLM's row-parallel linear over agmm's op. It imports vllm."""

from __future__ import annotations

from typing import Any

import torch
from vllm import envs
from vllm.distributed import get_tp_group
from vllm.model_executor import custom_op
from vllm.model_executor.layers import linear

from agmm.errors import InvalidArgument, warn_once
from agmm.ops.matmul_all_reduce import matmul_all_reduce

_NAME = "RowParallelLinear"


class RowParallelLinear(linear.RowParallelLinear):  # type: ignore[misc]
    """vLLM's, multiplied and summed by agmm."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ranks: str | None = None
        """The name of the group of ranks that sum; None where vLLM serves the layer."""
        if self.tp_size > 1 and self.reduce_results and not self._is_left():
            self._ranks = get_tp_group().device_group.group_name

    def _is_left(self) -> bool:
        """Whether vLLM multiplies. One warning says why."""
        why_not = ""
        if envs.VLLM_BATCH_INVARIANT:
            why_not = "VLLM_BATCH_INVARIANT is set"
        elif type(self.quant_method) is not linear.UnquantizedLinearMethod:
            why_not = f"its weight is that of {type(self.quant_method).__name__}"
        if why_not:
            warn_once(f"agmm leaves a linear to vLLM: {why_not}")
        return bool(why_not)

    def forward(self, input_: torch.Tensor) -> Any:
        """The sum over the ranks, with the bias where the caller does not add it. Collective."""
        if self._ranks is None:
            return super().forward(input_)
        if not self.input_is_parallel:
            parts = linear.split_tensor_along_last_dim(input_, num_partitions=self.tp_size)
            input_ = parts[self.tp_rank]
        bias = None if self.skip_bias_add else self.bias
        out = matmul_all_reduce(input_.contiguous(), self.weight.t(), self._ranks, bias=bias)
        if not self.return_bias:
            return out
        return out, self.bias if self.skip_bias_add else None


def register() -> None:
    """Has vLLM make agmm's linear where it would make its own.

    Raises:
        InvalidArgument: another plugin has registered one.
    """
    found = custom_op.op_registry_oot.get(_NAME)
    if found is None:
        linear.RowParallelLinear.register_oot(RowParallelLinear)
    elif found is not RowParallelLinear:
        raise InvalidArgument(
            f"plugin: found {found.__module__}.{found.__qualname__} in place of vLLM's {_NAME}, "
            "wanted vLLM's own"
        )
