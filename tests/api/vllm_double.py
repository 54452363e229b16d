"""The part of vLLM 0.32 and 0.33 that agmm's plugin meets, with its names and signatures.

vLLM itself takes seconds to import, in every rank. What is taken from its sources are facts: which
modules, functions and attributes there are, that a layer is made of the class that is registered
under the name of its own, and what a row-parallel linear does with each of its arguments.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from framework_stubs import module


class UnquantizedLinearMethod:
    """A weight as it is."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.nn.functional.linear(x, layer.weight, bias)


class QuantizedLinearMethod(UnquantizedLinearMethod):
    """Any other weight."""


def _split(tensor: torch.Tensor, num_partitions: int) -> tuple[torch.Tensor, ...]:
    return tensor.chunk(num_partitions, -1)


def modules(*, batch_invariant: bool = False) -> dict[str, ModuleType]:
    """vLLM's modules by their names."""
    registry: dict[str, type] = {}

    class PluggableLayer(torch.nn.Module):
        def __new__(cls, *args: Any, **options: Any) -> Any:
            return super().__new__(registry.get(cls.__name__, cls))

        @classmethod
        def register_oot(cls, layer_cls: type) -> type:
            assert cls.__name__ not in registry
            registry[cls.__name__] = layer_cls
            return layer_cls

    class RowParallelLinear(PluggableLayer):
        def __init__(
            self,
            input_size: int,
            output_size: int,
            bias: bool = True,
            input_is_parallel: bool = True,
            skip_bias_add: bool = False,
            params_dtype: torch.dtype | None = None,
            reduce_results: bool = True,
            quant_config: Any = None,
            prefix: str = "",
            *,
            return_bias: bool = True,
            disable_tp: bool = False,
        ) -> None:
            super().__init__()
            self.tp_rank = 0 if disable_tp else dist.get_rank()
            self.tp_size = 1 if disable_tp else dist.get_world_size()
            self.input_is_parallel = input_is_parallel
            self.skip_bias_add = skip_bias_add
            self.reduce_results = reduce_results
            self.return_bias = return_bias
            self.quant_method = UnquantizedLinearMethod() if quant_config is None else quant_config
            shape = output_size, input_size // self.tp_size
            self.weight = torch.nn.Parameter(torch.empty(shape), requires_grad=False)
            self.bias = None
            if bias:
                self.bias = torch.nn.Parameter(torch.empty(output_size), requires_grad=False)

        def forward(self, input_: torch.Tensor) -> Any:
            x = input_
            if not self.input_is_parallel:
                x = _split(x, self.tp_size)[self.tp_rank].contiguous()
            adds = self.tp_rank == 0 and not self.skip_bias_add
            out = self.quant_method.apply(self, x, self.bias if adds else None)
            if self.reduce_results and self.tp_size > 1:
                dist.all_reduce(out)
            if not self.return_bias:
                return out
            return out, self.bias if self.skip_bias_add else None

    linear = module(
        "vllm.model_executor.layers.linear",
        RowParallelLinear=RowParallelLinear,
        UnquantizedLinearMethod=UnquantizedLinearMethod,
        split_tensor_along_last_dim=_split,
    )
    tp_group = SimpleNamespace(device_group=dist.group.WORLD)
    found = [
        module("vllm"),
        module("vllm.envs", VLLM_BATCH_INVARIANT=batch_invariant),
        module("vllm.distributed", get_tp_group=lambda: tp_group),
        module("vllm.model_executor"),
        module("vllm.model_executor.custom_op", op_registry_oot=registry),
        module("vllm.model_executor.layers"),
        linear,
    ]
    return {one.__name__: one for one in found}
