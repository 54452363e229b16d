"""Epilogues: what becomes of products and their biases before they are rounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional

from agmm.errors import InvalidArgument
from agmm.runtime.cpu_summands import sum_dtype

_Function = Callable[[torch.Tensor], torch.Tensor]

GatedActivation = Literal["silu_mul", "gelu_mul", "gelu_tanh_mul"]
"""The activations of two weights, gate and up: ``activation(A @ gate) * (A @ up)``."""


def _relu2(x: torch.Tensor) -> torch.Tensor:
    positive = torch.relu(x)
    return positive * positive  # autocast leaves products alone, but not powers


def _grad_of_relu(dout: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.threshold_backward(dout, x, 0)  # type: ignore[no-any-return]


def _grad_of_relu2(dout: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return _grad_of_relu(dout * (2 * torch.relu(x)), x)


_gelu_tanh = partial(functional.gelu, approximate="tanh")
_grad_of_gelu_tanh = partial(torch.ops.aten.gelu_backward, approximate="tanh")

_FUNCTIONS: dict[str, tuple[_Function, Callable[..., torch.Tensor]]] = {
    "relu": (torch.relu, _grad_of_relu),
    "relu2": (_relu2, _grad_of_relu2),
    "gelu": (functional.gelu, torch.ops.aten.gelu_backward),
    "gelu_tanh": (_gelu_tanh, _grad_of_gelu_tanh),
    "silu": (functional.silu, torch.ops.aten.silu_backward),
}
"""The functions of one number, each with its gradient for that of the result and the number."""

_GATE = "_mul"
GATED = ("silu_mul", "gelu_mul", "gelu_tanh_mul")
ACTIVATIONS = (*_FUNCTIONS, *GATED)
"""The names of all activations."""


class Epilogue(NamedTuple):
    """An activation of the products of one gather. It is a value: calls of one kind have equal
    ones."""

    activation: str
    """One of `ACTIVATIONS`."""
    saves_products: bool = False
    """Whether the products with their biases, before the activation, are results too, behind the
    others, as a backward wants them."""
    quantize_out: str = ""
    """The kind of the scales with which a kernel is to write the result of a gate in fp8, or
    nothing. What torch's ops compute is not quantised."""

    @property
    def is_gated(self) -> bool:
        """Whether the products of two weights, gate and up, make one result."""
        return self.activation.endswith(_GATE)

    @property
    def kernel(self) -> str:
        """The epilogue of the kernels that compute it, as `_core.KernelFacts.epilogue` says it."""
        if not self.is_gated:
            return "activation"
        return "gate_fp8" if self.quantize_out else "gate"

    def check(self, Bs: Sequence[Any], dtype: torch.dtype, *, name: str = "B") -> None:
        """Refuses weights that the activation cannot have, and dtypes.

        Args:
            name: the argument that holds the weights.

        Raises:
            InvalidArgument: names the activation, the weights found and those wanted.
        """
        activation = self.activation
        if not dtype.is_floating_point:
            raise InvalidArgument(
                f"activation: found {activation!r} for dtype {dtype}, wanted a real "
                "floating-point type"
            )
        if not self.is_gated:
            return
        if len(Bs) != 2:
            raise InvalidArgument(
                f"activation: found {activation!r} with {name} a list of {len(Bs)}, wanted two "
                "weights, gate and up"
            )
        gate, up = Bs
        if gate.shape != up.shape:
            raise InvalidArgument(
                f"activation: found {activation!r} with weights {tuple(gate.shape)} and "
                f"{tuple(up.shape)}, wanted gate and up of one shape"
            )

    def results_of(self, outs: int) -> int:
        """How many results the products of so many weights make."""
        return 1 if self.is_gated else outs

    def outs(self, products: list[Any]) -> list[Any]:
        """What is returned of results and products, for what describes each product alike."""
        results = products[: self.results_of(len(products))]
        return results + products if self.saves_products else results

    def __call__(self, products: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results of products with their biases, in the dtype of the products; computed in
        float32 at least, and rounded once."""
        function, _ = _FUNCTIONS[self.activation.removesuffix(_GATE)]
        if not self.is_gated:
            return [function(product) for product in products]  # which torch computes so
        gate, up = products
        return [(function(gate.to(sum_dtype(gate.dtype))) * up).to(gate.dtype)]

    def composed(self, products: list[torch.Tensor]) -> list[torch.Tensor]:
        """All that is returned, of products that are rounded already."""
        results = self(products)
        return results + products if self.saves_products else results

    def gradients(
        self, douts: Sequence[torch.Tensor | None], products: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """The gradient of each product, for those of the results; rounded once."""
        function, gradient = _FUNCTIONS[self.activation.removesuffix(_GATE)]
        if not self.is_gated:
            return [
                None if dout is None else gradient(dout, product)
                for dout, product in zip(douts, products, strict=True)
            ]
        (dout,) = douts
        if dout is None:
            return [None, None]
        gate, up = products
        wide = sum_dtype(gate.dtype)
        of_gate, of_out = gate.to(wide), dout.to(wide)
        dgate = gradient(of_out * up, of_gate).to(gate.dtype)
        return [dgate, (of_out * function(of_gate)).to(up.dtype)]


def named(activation: Any, *, saves_products: bool = False) -> Epilogue | None:
    """The epilogue that a caller asks for; None for None and "".

    Raises:
        InvalidArgument: there is none of that name.
    """
    if activation is None or activation == "":
        return None
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        names = ", ".join(ACTIVATIONS)
        raise InvalidArgument(f"activation: found {activation!r}, wanted one of {names}, or None")
    return Epilogue(activation, saves_products)
