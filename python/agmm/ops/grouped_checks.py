"""Checks of the arguments that only mixtures of experts have."""

from __future__ import annotations

from typing import Any

import torch

from agmm.errors import InvalidArgument
from agmm.ops.checks import check_device, check_flag, check_inner, check_operand, check_same
from agmm.ops.scaled_checks import BIAS_DTYPES
from agmm.runtime.scaling import OF_EXPERTS


def check_routing(
    tokens: torch.Tensor,
    offsets: torch.Tensor,
    positions: torch.Tensor,
    like: tuple[str, torch.Tensor],
) -> None:
    """Refuses what is no `agmm.moe.Routing` on the device of an argument, given with its name."""
    for name, tensor, dims in (
        ("tokens", tokens, 1),
        ("offsets", offsets, 1),
        ("positions", positions, 2),
    ):
        if tensor.dtype != torch.int32 or tensor.dim() != dims:
            raise InvalidArgument(
                f"routing: found {name} of {tensor.dim()} dimensions and dtype {tensor.dtype}, "
                f"wanted {dims} and torch.int32, as agmm.moe.route returns them"
            )
        check_device("routing", tensor, *like)


def check_quantize(quantize: str, name: str, rows: torch.Tensor) -> None:
    """Refuses operands that cannot be quantised for products of experts, or another kind of
    scales; "" is for none."""
    if not quantize:
        return
    names = [scaling.name for scaling in OF_EXPERTS]
    if quantize not in names:
        raise InvalidArgument(
            f"quantize: found {quantize!r} for experts, wanted {' or '.join(map(repr, names))} or "
            "None"
        )
    if rows.dtype not in BIAS_DTYPES:
        raise InvalidArgument(
            f"{name}: found dtype {rows.dtype} with quantize={quantize!r}, wanted bfloat16, "
            "float16 or float32"
        )


def check_flags(**flags: Any) -> None:
    for name, flag in flags.items():
        check_flag(name, flag)


def check_not_gathered(**asked: bool) -> None:
    """Refuses tokens that are to be returned or kept where they travel in fp8."""
    for name, flag in asked.items():
        if flag:
            raise InvalidArgument(
                f"{name}: found True with tokens that travel in fp8, wanted False: they are not "
                "what was given"
            )


def check_stack(name: str, weight: Any) -> None:
    """Refuses what is no stack of matrices, one for each expert."""
    check_operand(name, weight)
    if weight.dim() != 3:
        raise InvalidArgument(
            f"{name}: found {weight.dim()} dimensions, wanted 3: experts, K and N"
        )


def check_weights_of_experts(
    weight: torch.Tensor, of: str, rows: torch.Tensor, offsets: torch.Tensor
) -> None:
    """Refuses a weight that is not a matrix of K rows for each expert of the routing.

    Args:
        of: the argument that is multiplied by the weight.
        rows: that argument, [..., K].
    """
    check_stack("weights", weight)
    check_same("weights", weight, of, rows)
    check_inner("weights", weight.shape[1], rows.shape[-1], of)
    check_experts(weight, offsets)


def check_experts(weight: torch.Tensor, offsets: torch.Tensor) -> None:
    """Refuses a weight that has other experts than the routing."""
    experts = offsets.shape[0] - 1
    if weight.shape[0] != experts:
        raise InvalidArgument(
            f"weights: found {weight.shape[0]} experts, wanted {experts}, those of the routing"
        )


def check_columns_of_experts(weight: torch.Tensor, first: torch.Tensor) -> None:
    """Refuses a weight whose products have other columns than those of the first of the list."""
    if weight.shape[2] != first.shape[2]:
        raise InvalidArgument(
            f"weights: found {weight.shape[2]} columns, wanted {first.shape[2]} as the first of "
            "the list"
        )


def check_bias_of_experts(bias: torch.Tensor, weight: torch.Tensor) -> None:
    """Refuses a bias that is not a row for each expert of the weight."""
    check_operand("bias", bias)
    check_same("bias", bias, "weights", weight)
    check_bias_shape_of_experts(bias, weight)


def check_bias_shape_of_experts(bias: torch.Tensor, weight: torch.Tensor) -> None:
    wanted = weight.shape[0], weight.shape[2]
    if tuple(bias.shape) != wanted:
        raise InvalidArgument(
            f"bias: found shape {tuple(bias.shape)}, wanted {wanted}, a row for each expert"
        )


def listed_biases(bias: Any, count: int) -> list[torch.Tensor | None]:
    """The bias of each weight, of one or of a list of them."""
    if isinstance(bias, (list, tuple)):
        return list(bias)
    if bias is not None and count != 1:
        raise InvalidArgument(f"bias: found one for {count} weights, wanted a list of one each")
    return [bias] * count
