"""PEFT's LoRA layer around a linear that ranks share. It imports peft."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from agmm.errors import InvalidArgument
from agmm.integrations.low_rank import LowRank
from agmm.integrations.transformers_styles import served_linear
from agmm.nn._divided import Divided, divided
from agmm.nn._filled import filled_shard, filled_up, own_rows_of
from agmm.nn._targets import local

_STARTS = (True, False, "gaussian")


def _base(module: torch.nn.Module) -> torch.nn.Module:
    found: torch.nn.Module = (
        module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
    )
    return found


def _division(base: torch.nn.Module) -> Divided | None:
    served = served_linear(base)
    if served is not None:
        return Divided(served.ranks, served.by_columns, None)
    return divided(base)


def is_served(module: torch.nn.Module) -> bool:
    """Whether agmm serves the linear that a module is, or that its adapters are around."""
    return _division(_base(module)) is not None


def made_whole(model: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """An adapter's values as the unsharded model has them. Collective."""
    if not any(isinstance(module, Linear) for module in model.modules()):
        return state
    return {
        key: value.full_tensor() if isinstance(value, DTensor) else value
        for key, value in state.items()
    }


def _cut(module: torch.nn.Module, division: Divided, placement: Placement) -> None:
    """Makes DTensors of the parameters, with the first rank's values on all. Not by
    ``register_parameter``, of which PEFT has its own where it makes none in memory."""
    parameters: dict[str, Any] = module._parameters
    for name, parameter in parameters.items():
        if parameter is not None:
            mesh, source = division.ranks.mesh(parameter.device), None if parameter.is_meta else 0
            cut = distribute_tensor(parameter.data, mesh, [placement], src_data_rank=source)
            parameters[name] = torch.nn.Parameter(cut, requires_grad=parameter.requires_grad)


class Linear(lora.Linear):  # type: ignore[misc]
    """``lora.Linear`` around a linear that agmm serves."""

    def _get_in_out_features(self, module: torch.nn.Module) -> tuple[int, int]:
        """The whole layer's: adapters begin as in the unsharded model, and are cut then."""
        features: Any = module.out_features
        if not isinstance(features, int):
            raise InvalidArgument(
                f"LoRA on {type(module).__name__}: out_features: found {features}, wanted one "
                "output: give each a layer of its own"
            )
        found: Any = module.in_features
        return int(found), features

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        """Plain LoRA alone; PEFT refuses the others."""
        return {(): None}

    def update_layer(
        self, adapter_name: str, r: int, lora_alpha: int, config: Any, **options: Any
    ) -> None:
        """Adds an adapter, and cuts it like the base layer. Collective."""
        base = self.get_base_layer()
        start = config.init_lora_weights
        if not any(start is one or start == one for one in _STARTS) or options.get("tied_adapter"):
            found = "tied adapters" if options.get("tied_adapter") else repr(start)
            raise InvalidArgument(
                f"LoRA on {type(base).__name__}: init_lora_weights: found {found}, wanted one of "
                f"{list(_STARTS)}: others need the whole weight"
            )
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **options)
        division = _division(base)
        assert division is not None, "is_served was asked"
        of_a: Placement = Replicate() if division.by_columns else Shard(1)
        of_b: Placement = Shard(0) if division.by_columns else Replicate()
        _cut(self.lora_A[adapter_name], division, of_a)
        _cut(self.lora_B[adapter_name], division, of_b)
        if getattr(base, "_hf_tp_plan", None) is not None:  # by which PEFT would cut them again
            base._hf_tp_plan = base._hf_device_mesh = None

    def _prepared(self, adapter_name: str, x: torch.Tensor) -> torch.Tensor:
        x = self._cast_input_dtype(x, self.lora_A[adapter_name].weight.dtype)
        found: torch.Tensor = self.lora_dropout[adapter_name](x)
        return found

    def _added(self, adapter_name: str, x: torch.Tensor) -> torch.Tensor:
        """What an adapter adds to the output, but for its scale."""
        base = self.get_base_layer()
        division = _division(base)
        assert division is not None
        a, b = self.lora_A[adapter_name], self.lora_B[adapter_name]
        adapter = LowRank(
            a.weight.to_local(),
            b.weight.to_local(),
            None if b.bias is None else b.bias.to_local(),
            partial(self._prepared, adapter_name),
            division.ranks,
        )
        served = served_linear(base)
        if served is not None:
            return served.low_rank_product(x, adapter)
        dim = division.sequence_dim
        length = x.shape[dim] if dim is not None else 0
        if not division.by_columns:
            x = local(x, Shard(x.dim() - 1))
            if dim is None:
                return adapter.summed(x)
            added = adapter.scattered(filled_up(x.movedim(dim, 0), division.ranks.size))
            return own_rows_of(added, length, division.ranks).movedim(0, dim)
        if dim is None:
            return adapter.of_all_rows(local(x, Replicate()))
        rows = local(x, Shard(dim)).movedim(dim, 0)
        if not isinstance(x, DTensor):
            return adapter.gathered(rows).movedim(0, dim)
        rows = filled_shard(rows, length, division.ranks.size)
        return adapter.gathered(rows)[:length].movedim(0, dim)

    def forward(self, x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        """The base layer's output, and what the active adapters add. Collective."""
        if options.get("adapter_names") is not None:
            raise InvalidArgument(
                "adapter_names: found some, wanted None: one batch has the same adapters for all"
            )
        found: torch.Tensor
        if self.disable_adapters or self.merged:
            found = super().forward(x)
            return found
        found = self.base_layer(x)
        dtype = found.dtype
        for name in self.active_adapters:
            if name not in self.lora_A:
                continue
            added = self._added(name, x)
            if isinstance(found, DTensor):
                mesh, placements = found.device_mesh, found.placements
                added = DTensor.from_local(
                    added,
                    mesh,
                    placements,
                    run_check=False,
                    shape=found.shape,
                    stride=found.stride(),
                )
            found = found + added * self.scaling[name]
        return found.to(dtype)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Adds adapters to the base layer's weight, after a look for what is not finite."""
        if safe_merge:
            names = self.active_adapters if adapter_names is None else adapter_names
            for name in names:
                if name not in self.lora_A:
                    continue
                merged = self.get_base_layer().weight.data + self.get_delta_weight(name)
                if not torch.isfinite(merged).all():  # on any rank
                    raise ValueError(f"adapter {name!r}: found values that are not finite")
        super().merge(adapter_names=adapter_names)
