"""The FLOPs of agmm's ops, for ``torch.utils.flop_counter``: MFU and the choice of what a backward
computes again go by them.

Each pair of numbers that this rank multiplies counts as two, as in torch's own formulas.
Collectives have no formula, since torch takes an op that has one for a matmul.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from math import prod
from types import ModuleType
from typing import Any

import torch

_Shape = Sequence[int]
_Shapes = Sequence[_Shape]


def _product(A: _Shape, B: _Shape, *_: Any, **__: Any) -> int:
    """``A @ B`` has all its rows and columns computed, whatever becomes of them."""
    return 2 * prod(A) * B[1]


def _products(As: _Shapes, Bs: _Shapes, *_: Any, **__: Any) -> int:
    return sum(map(_product, As, Bs))


def _waiting_product(a: _Shape, b: _Shape, *rest: Any, up: _Shape | None = None, **__: Any) -> int:
    """A second weight is the last argument of the op, or has its name."""
    given = up or (rest[3] if len(rest) > 3 else None)
    return _product(a, b) * (2 if given else 1)


def _scaled_waiting_product(
    A: _Shape, B: _Shape, *rest: Any, up: _Shape | None = None, **__: Any
) -> int:
    given = up or (rest[7] if len(rest) > 7 else None)
    return _product(A, B) * (2 if given else 1)


def _scaled_product(A: _Shape, scale_a: _Shape, B: _Shape, *_: Any, **__: Any) -> int:
    return _product(A, B)


def _gathered(A_shard: _Shape, Bs: _Shapes, *_: Any, out_shape: Any, **__: Any) -> int:
    """Each result has the rows of the gathered A, and B has as many rows as that has columns. An
    activation may make one result of two products, and adds no FLOPs."""
    return sum(2 * prod(out_shape[-1][0][:-1]) * prod(B) for B in Bs)


def _scaled_gathered(
    A_shard: _Shape, scale_a: _Shape, Bs: _Shapes, *_: Any, out_shape: Any, **__: Any
) -> int:
    return _gathered(A_shard, Bs, out_shape=out_shape)


def _packed_gathered(A_shard: _Shape, *_: Any, out_shape: Any, **__: Any) -> int:
    return sum(2 * prod(out) * A_shard[-1] for out in out_shape[-1])


def _grouped_gather(
    x: _Shape, weights: _Shapes, biases: Any, tokens: _Shape, *_: Any, **__: Any
) -> int:
    """Each row that the routing has room for is multiplied by one matrix of each weight."""
    return sum(2 * tokens[0] * prod(weight[1:]) for weight in weights)


def _grouped_scatter(ys: _Shapes, weights: _Shapes, *_: Any, **__: Any) -> int:
    return sum(2 * y[0] * prod(w[1:]) for y, w in zip(ys, weights, strict=True))


def _scaled_grouped_gather(
    x: _Shape,
    scale: _Shape,
    weights: _Shapes,
    scales: Any,
    biases: Any,
    tokens: _Shape,
    *_: Any,
    **__: Any,
) -> int:
    return _grouped_gather(x, weights, biases, tokens)


def _scaled_grouped_scatter(y: _Shape, scale: _Shape, weight: _Shape, *_: Any, **__: Any) -> int:
    return _grouped_scatter([y], [weight])


def _grouped_grad(rows: _Shape, douts: _Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(rows) * douts[1]


_FORMULAS: dict[str, Callable[..., int]] = {
    "_all_gather_grouped_matmul": _grouped_gather,
    "_all_gather_matmul": _gathered,
    "_all_gather_packed_matmul": _packed_gathered,
    "_all_gather_scaled_matmul": _scaled_gathered,
    "_all_gather_scaled_grouped_matmul": _scaled_grouped_gather,
    "_async_input_mm": _waiting_product,
    "_async_input_scaled_mm": _scaled_waiting_product,
    "_grouped_grad_of_weight": _grouped_grad,
    "_grouped_matmul_reduce_scatter": _grouped_scatter,
    "_invariant_matmul": _product,
    "_matmul_all_reduce": _product,
    "_matmul_all_reduce_rms_norm": _product,
    "_matmul_reduce_scatter": _products,
    "_scaled_grouped_matmul_reduce_scatter": _scaled_grouped_scatter,
    "_scaled_matmul": _scaled_product,
    "_scaled_matmul_all_reduce": _product,
    "_scaled_matmul_reduce_scatter": _products,
}
"""The formula of each op, by its name. It takes the shapes of the op's arguments and results."""

_COUNTER = "torch.utils.flop_counter"


def _register(counter: ModuleType) -> None:
    for name, formula in _FORMULAS.items():
        counter.register_flop_formula(getattr(torch.ops.agmm, name))(formula)


class _OnImport(MetaPathFinder):
    """Registers the formulas when somebody imports the counter. agmm does not: it imports Triton,
    which takes 0.3 s."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)  # by the other finders
        if spec is not None and spec.loader is not None:
            loader, execute = spec.loader, spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register(module)

            loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def register() -> None:
    """Have torch's counter know the FLOPs of agmm's ops, which have to be defined by then."""
    if _COUNTER in sys.modules:
        _register(sys.modules[_COUNTER])
    else:
        sys.meta_path.insert(0, _OnImport())
