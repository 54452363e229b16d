"""The feed-forward half of a transformer's layer: gate, up and down with one gather and one
scatter."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from agmm.errors import InvalidArgument
from agmm.nn._fp8 import gather_products, quantised_gate
from agmm.nn._gated_form import has_hooks
from agmm.nn.fp8_recipe import Fp8Recipe
from agmm.nn.linear import ColumnParallelLinear, RowParallelLinear
from agmm.ops.all_gather_matmul import all_gather_matmul
from agmm.ops.checks import needs_gradient
from agmm.runtime.epilogues import GATED, GatedActivation


class GatedMLP(torch.nn.Module):
    """``down(activation(gate(x)) * up(x))``, each rank with its shard of the hidden features.

    The whole module is three ``torch.nn.Linear``, and has their parameters under the names that
    transformers gives them, so that checkpoints are those of the separate layers. gate and up share
    one gather, and the activation is computed with their products (`agmm.all_gather_matmul`).

    Args:
        in_features: K, the size of a row of x and of the result.
        hidden_features: of gate and up, a multiple of the world size.
        bias: whether the three linears have one.
        activation: ``"silu_mul"`` (SwiGLU), ``"gelu_mul"`` or ``"gelu_tanh_mul"``.
        group: process group, its name or a 1-D mesh; the default group when None.
        device_mesh: 1-D mesh, instead of ``group``; see `ColumnParallelLinear`.
        save_gathered: see `agmm.all_gather_matmul`; not with ``fp8``.
        save_preactivation: see `agmm.all_gather_matmul`; ``True`` with ``fp8``.
        strict: of the gather; see `agmm.all_gather_matmul`.
        fp8: see `ColumnParallelLinear`. The sizes on each rank are multiples of 16.
        device: of the parameters.
        dtype: of the parameters.

    Attributes:
        gate_proj: `ColumnParallelLinear`, in_features to hidden_features.
        up_proj: `ColumnParallelLinear`, in_features to hidden_features.
        down_proj: `RowParallelLinear`, hidden_features to in_features.

    Raises:
        InvalidArgument: an activation of another name, an argument that goes not with ``fp8``, or
            what the layers refuse.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        bias: bool = False,
        *,
        activation: GatedActivation = "silu_mul",
        group: dist.ProcessGroup | DeviceMesh | str | None = None,
        device_mesh: DeviceMesh | None = None,
        save_gathered: bool = False,
        save_preactivation: bool = True,
        strict: bool = False,
        fp8: str | Fp8Recipe | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in GATED:
            names = ", ".join(GATED)
            raise InvalidArgument(
                f"{type(self).__name__}: activation: found {activation!r}, wanted one of {names}"
            )
        if fp8 is not None and not save_preactivation:
            raise InvalidArgument(
                f"{type(self).__name__}: save_preactivation: found False with fp8, wanted True"
            )
        where: dict[str, Any] = {"group": group, "device_mesh": device_mesh}
        where |= {"bias": bias, "fp8": fp8, "device": device, "dtype": dtype}
        of_gather: dict[str, Any] = {"save_gathered": save_gathered, "strict": strict, **where}
        self.activation = activation
        self.save_preactivation = save_preactivation
        self.gate_proj = ColumnParallelLinear(in_features, hidden_features, **of_gather)
        self.up_proj = ColumnParallelLinear(in_features, hidden_features, **of_gather)
        self.down_proj = RowParallelLinear(hidden_features, in_features, **where)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the result. Collective.

        The parameters of gate and up are used here, and not by the calls of these layers: hooks on
        them are not called, and FSDP2 is to be given this module or one around it. With scales of
        blocks, and where no gradient is wanted, what the gate's kernel quantises goes straight into
        down's product, unless another module stands in down's place or down has hooks.

        Args:
            x: [M_local, ..., in_features], this rank's rows.

        Returns:
            [M_local, ..., in_features].

        Raises:
            InvalidArgument: names the layer, x or the weight, what was found and what it wants.
        """
        gate, down = self.gate_proj, self.down_proj
        of_both = gate.operands_for(x), self.up_proj.operands_for(x)
        weights = [weight for weights, _ in of_both for weight in weights]
        biases = [bias for _, biases in of_both for bias in biases]
        if gate.fp8 is None:
            hidden = all_gather_matmul(
                x,
                weights,
                gate.ranks.for_ops,
                bias=biases,
                activation=self.activation,
                save_gathered=gate.save_gathered,
                save_preactivation=self.save_preactivation,
                strict=gate.strict,
            )
            return down(hidden)  # type: ignore[no-any-return]
        recipe = gate.fp8
        given = recipe, x, weights, biases, gate.ranks.own_name
        of_gate: dict[str, Any] = {"activation": self.activation, "strict": gate.strict}
        is_plain = type(down) is RowParallelLinear and not has_hooks(down)
        wants_gradient = needs_gradient(x, *weights, *biases, *down.parameters())
        if recipe.quantises_gates and is_plain and not wants_gradient:
            return down.of_quantised(quantised_gate(*given, **of_gate), x)
        (hidden,) = gather_products(*given, **of_gate)
        return down(hidden)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"activation={self.activation}"
