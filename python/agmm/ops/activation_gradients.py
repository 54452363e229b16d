"""Gradients through activations: by agmm's kernel where there is one, else by torch's ops."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agmm.ops.quantize import quantised
from agmm.runtime import cuda_activations
from agmm.runtime.collectives import is_traced
from agmm.runtime.cuda_activations import Cast
from agmm.runtime.epilogues import Epilogue

_MaybeTensor = torch.Tensor | None


def gradients(
    epilogue: Epilogue, douts: Sequence[_MaybeTensor], products: Sequence[torch.Tensor]
) -> list[_MaybeTensor]:
    """The gradient of each product for those of the results, computed in float32 at least and
    rounded once. What is traced is left to the compiler, which makes one kernel of torch's ops."""
    if epilogue.is_gated:
        (dout,) = douts
        found = None if dout is None else _by_kernel(epilogue, dout, products)
        return [*found] if found is not None else epilogue.gradients(douts, products)
    outs: list[_MaybeTensor] = []
    for dout, product in zip(douts, products, strict=True):
        found = None if dout is None else _by_kernel(epilogue, dout, [product])
        outs += found if found is not None else epilogue.gradients([dout], [product])
    return outs


def _by_kernel(
    epilogue: Epilogue, dout: torch.Tensor, products: Sequence[torch.Tensor]
) -> list[torch.Tensor] | None:
    if not dout.is_cuda or is_traced(dout):
        return None
    return cuda_activations.gradients(epilogue.activation, dout, products)


def joint_gradients(
    activation: str, dout: torch.Tensor, products: Sequence[torch.Tensor], cast: Cast | None
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """The gradients of the products of gate and up side by side, [..., 2 N], and, where a cast
    is given, the values and scales of these rows in fp8."""
    found = None
    if dout.is_cuda and not is_traced(dout):
        found = cuda_activations.joint_gradients(activation, dout, products, cast)
    if found is None:
        of_both = Epilogue(activation).gradients([dout], products)
        found = torch.cat([one for one in of_both if one is not None], -1), None
    joint, in_fp8 = found
    if in_fp8 is None and cast is not None:
        rows = joint.flatten(0, -2)
        in_fp8 = quantised(rows, cast.tile, cast.dtype, power_of_2=cast.power_of_2)
    return joint, in_fp8
