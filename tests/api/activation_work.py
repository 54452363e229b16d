"""What activations are, by torch's functions, for calls of all ops that take one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import every_op
import torch
import torch.distributed as dist
from every_op import Call
from torch.nn import functional

import agmm

OF_ONE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}
"""The functions of one number by the names of the activations."""
GATED = ("silu_mul", "gelu_mul", "gelu_tanh_mul")
ACTIVATIONS = (*OF_ONE, *GATED)


def activated(name: str, products: list[torch.Tensor]) -> list[torch.Tensor]:
    """What the activation makes of products, in their dtype."""
    if name not in GATED:
        return [OF_ONE[name](product) for product in products]
    gate, up = products
    return [OF_ONE[name.removesuffix("_mul")](gate) * up]


def takes_one(call: Call) -> bool:
    # Ops of mixtures of experts have tests of their own, and so have results in fp8.
    is_other = "grouped" in call.op or "quantize_out" in call.settings
    return "activation" in every_op.arguments_of(call.op) and not is_other


def variants(call: Call) -> Iterator[tuple[str, Call]]:
    """The call with each activation, for the products alone."""
    known = every_op.arguments_of(call.op)
    alone: dict[str, Any] = {"return_A": False} if "return_A" in known else {}
    if "save_preactivation" in known:
        alone["save_preactivation"] = False
    for name in ACTIVATIONS:
        yield name, call._replace(settings=call.settings | alone | {"activation": name})


def is_refused(name: str, call: Call) -> bool:
    """Whether the operands are none that the activation can have."""
    weights = _weights(call)
    if any(isinstance(B, agmm.Packed4BitWeight) for B in weights):
        return True
    if name not in GATED:
        return "up" in call.operands
    scales = call.operands.get("result_scale", call.operands.get("result_scales"))
    is_of_two = isinstance(scales, list) and None not in scales
    return len(weights) != 2 or weights[0].shape != weights[1].shape or is_of_two


def wanted(name: str, call: Call, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """What the call has to return, of products of the same op without an activation: those of a
    result in fp8 are computed in float32."""
    settings, operands = dict(call.settings), dict(call.operands)
    del settings["activation"]
    dtype: Any = settings.get("out_dtype")
    scales = operands.get("result_scale", operands.get("result_scales"))
    is_fp8 = dtype is not None and dtype.itemsize == 1
    if is_fp8:
        settings["out_dtype"] = torch.float32
        for key in ("result_scale", "result_scales"):
            if key in operands:
                operands[key] = [None] * len(operands[key])
    products = []
    for given in _without_up(operands):
        products += call._replace(operands=given, settings=settings)(group)
    found = activated(name, [product.float() for product in products])
    results = []
    for i, out in enumerate(found):
        if not is_fp8:
            results.append(out.to(products[0].dtype))
            continue
        if scales and scales[i] is not None:
            out = out * scales[i]
        largest = torch.finfo(dtype).max
        results.append(out.clamp(-largest, largest).to(dtype))
    return results


def _weights(call: Call) -> list[Any]:
    found = next(call.operands[name] for name in ("B", "Bs", "b") if name in call.operands)
    weights = list(found) if isinstance(found, list) else [found]
    return weights + ([call.operands["up"]] if "up" in call.operands else [])


def _without_up(operands: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The operands of each product, for an op that takes a second weight by a name of its own."""
    own = {name: tensor for name, tensor in operands.items() if not name.endswith("up")}
    yield own
    if "up" in operands:
        names = {"b": "up"} if "b" in own else {"B": "up", "scale_b": "scale_up", "bias": "bias_up"}
        yield own | {name: operands[of_up] for name, of_up in names.items()}
