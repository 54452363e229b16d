"""What no path can serve: found before the first step of a call that another rank sees."""

from __future__ import annotations

from typing import Any

import torch

from agmm.errors import InvalidArgument
from agmm.planning.cost_model.collectives import Kind


def check_settings(**settings: Any) -> None:
    for name, value in settings.items():
        if value is not True and value is not False:
            raise InvalidArgument(f"{name}: found {value!r}, wanted True or False")


def check_op(op: Any, x: torch.Tensor) -> None:
    if not isinstance(op, str) or op not in ("sum", "avg"):
        raise InvalidArgument(f"op: found {op!r}, wanted 'sum' or 'avg'")
    if op == "avg" and not (x.is_floating_point() or x.is_complex()):
        raise InvalidArgument(
            f"op: found 'avg' of {x.dtype}, wanted 'sum', or a floating-point or complex type"
        )


def check_dim(x: torch.Tensor, dim: Any) -> int:
    """``dim`` counted from the front."""
    if type(dim) is not int:
        raise InvalidArgument(f"dim: found {dim!r}, wanted an int")
    most = max(1, x.dim())
    if not -most <= dim < most:
        raise InvalidArgument(f"dim: found {dim}, wanted {-most} to {most - 1}")
    return dim % most


def shape_of_result(kind: Kind, x: torch.Tensor, world_size: int, dim: int) -> list[Any]:
    """The shape of the result, made of the sizes of ``x``, which may be symbols."""
    shape = list(x.shape)
    if kind == "all_reduce":
        return shape
    if kind == "all_gather":
        shape = shape or [1]
        shape[dim] = shape[dim] * world_size
        return shape
    if not shape:
        raise InvalidArgument("x: found 0 dimensions, wanted at least 1")
    if shape[dim] % world_size:
        raise InvalidArgument(
            f"x: found {shape[dim]} in dimension {dim}, wanted a multiple of the world size "
            f"{world_size}"
        )
    shape[dim] = shape[dim] // world_size
    return shape


def check_out(out: torch.Tensor, x: torch.Tensor, shape: list[Any]) -> None:
    if list(out.shape) != shape:
        raise InvalidArgument(f"out: found shape {tuple(out.shape)}, wanted {tuple(shape)}")
    if out.dtype != x.dtype:
        raise InvalidArgument(f"out: found dtype {out.dtype}, wanted {x.dtype} as x")
    if out.device != x.device:
        raise InvalidArgument(f"out: found device {out.device}, wanted {x.device} as x")
