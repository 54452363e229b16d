"""What the tests of `agmm.check_nan` run inside ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import agmm
from agmm import _core, nn
from agmm.ops import fp8_operands
from agmm.runtime import relays
from agmm.runtime.topology import Move, Schedule


def _bad(shape: tuple[int, ...], index: tuple[int, ...], rank: int) -> torch.Tensor:
    """Ones, on that rank with a NaN at the index and one behind it."""
    x = torch.ones(shape)
    if dist.get_rank() == rank:
        x[index] = torch.nan
        x.view(-1)[-1] = torch.nan
    return x


def _backward_of_sum(rank: int) -> None:
    """A NaN comes with the gradient: it is in the partial sums of dA_shard."""
    shard = torch.ones(2, 3, requires_grad=True)
    out = agmm.all_gather_matmul(shard, torch.ones(3, 4))
    out.backward(_bad((2 * dist.get_world_size(), 4), (3, 1), rank))


def _backward_of_gather(rank: int) -> None:
    """The other gradient: it is in the rows that are gathered."""
    A = torch.ones(2 * dist.get_world_size(), 3, requires_grad=True)
    out = agmm.matmul_reduce_scatter(A, torch.ones(3, 4))
    out.backward(_bad((2, 4), (1, 2), rank))


def _fp8_layer(
    layer: Callable[..., torch.nn.Module], recipe: str, rank: int, *, backward: bool = False
) -> None:
    """The NaN is in the input, or comes with the gradient."""
    torch.manual_seed(0)
    sizes = (32, 16 * dist.get_world_size())
    module = layer(*(sizes if layer is nn.ColumnParallelLinear else sizes[::-1]), fp8=recipe)
    rows = 4 * (1 if layer is nn.ColumnParallelLinear else dist.get_world_size())
    x = _bad((rows, 16 if layer is nn.RowParallelLinear else 32), (1, 2), -1 if backward else rank)
    out = module(x.requires_grad_(backward))
    if backward:
        out.backward(_bad(tuple(out.shape), (1, 2), rank))


def _unfused_scaled_gather(rank: int) -> None:
    """Its bytes are the backend's to gather."""
    with (
        mock.patch.object(fp8_operands, "why_no_kernel", return_value="fp8: not here"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        CALLS["scaled gather"](rank)


_ops: Any = agmm.collectives
_gather: Any = agmm.all_gather_matmul
_scaled_gather: Any = agmm.all_gather_scaled_matmul
_bf16, _f8 = torch.bfloat16, torch.float8_e4m3fn
CALLS: dict[str, Callable[[int], Any]] = {
    "gather": lambda rank: agmm.all_gather_matmul(_bad((4, 3), (2, 1), rank), torch.ones(3, 2)),
    "gather kept": lambda rank: [
        agmm.all_gather_matmul(_bad((4, 3), (2, 1), of), torch.ones(3, 2)) for of in (-1, rank)
    ],
    "gather unfused": lambda rank: agmm.all_gather_matmul(
        _bad((4, 3), (2, 1), rank), torch.ones(3, 2), config="unfused"
    ),
    # Row 3 of A is rank 1's: rank 0 sends it, rank 1 does not.
    "scatter": lambda rank: agmm.matmul_reduce_scatter(
        _bad((6, 3), (4, 2), rank), torch.ones(3, 2)
    ),
    "scatter unfused": lambda rank: agmm.matmul_reduce_scatter(
        _bad((6, 3), (4, 2), rank), torch.ones(3, 4), scatter_dim=1
    ),
    "matmul_all_reduce": lambda rank: agmm.matmul_all_reduce(
        _bad((6, 3), (4, 2), rank), torch.ones(3, 2)
    ),
    "matmul_all_reduce_rms_norm": lambda rank: agmm.matmul_all_reduce_rms_norm(
        _bad((6, 3), (4, 2), rank), torch.ones(3, 2), torch.ones(6, 2), torch.ones(2)
    ),
    "all_gather": lambda rank: _ops.all_gather(_bad((4, 3), (0, 1), rank).t()),
    "reduce_scatter": lambda rank: _ops.reduce_scatter(_bad((4, 3), (0, 1), rank), op="avg"),
    "all_reduce": lambda rank: _ops.all_reduce(_bad((4,), (2,), rank).bfloat16()),
    "background": lambda rank: _ops.all_reduce(_bad((4,), (2,), rank), async_op=True).wait(),
    "torch": lambda rank: _ops.all_reduce(_bad((4,), (2,), rank).to(torch.complex64)),
    "own rows of an all-reduce": lambda rank: agmm.matmul_all_reduce(
        _bad((6, 3), (rank * 3, 1), rank)[:, :2], torch.ones(2, 2)
    ),
    "scaled gather": lambda rank: _scaled_gather(
        _bad((4, 32), (1, 2), rank).to(_f8), torch.ones(32, 16).to(_f8), *torch.ones(2, 1)
    ),
    "scale of a gather": lambda rank: _scaled_gather(
        *(torch.ones(size, 32).to(_f8) for size in (4, 32)),
        _bad((4, 1), (1, 0), rank),
        torch.ones(1, 32),
    ),
    "scaled gather unfused": _unfused_scaled_gather,
    "scaled scatter": lambda rank: agmm.scaled_matmul_reduce_scatter(
        _bad((6, 32), (4, 2), rank).to(_f8), torch.ones(32, 16).to(_f8), *torch.ones(2, 1)
    ),
    "scaled all-reduce": lambda rank: agmm.scaled_matmul_all_reduce(
        _bad((6, 32), (4, 2), rank).to(_f8), torch.ones(32, 16).to(_f8), *torch.ones(2, 1)
    ),
    "scale of a scatter": lambda rank: agmm.scaled_matmul_reduce_scatter(
        torch.ones(6, 32).to(_f8), torch.ones(32, 16).to(_f8), torch.ones(1), _bad((1,), (0,), rank)
    ),
    "tensorwise": lambda rank: _gather(
        _bad((4, 32), (1, 2), rank).to(_bf16), torch.ones(32, 16).to(_bf16), quantize="tensorwise"
    ),
    "rowwise": lambda rank: _gather(
        _bad((4, 32), (1, 2), rank), torch.ones(32, 16), quantize="rowwise"
    ),
    "block": lambda rank: _gather(
        _bad((4, 2, 32), (1, 0, 2), rank), torch.ones(32, 16), quantize="block", gather_dim=1
    ),
    "one scale": lambda rank: _gather(
        *(_bad((4, 32), (1, 2), rank), torch.ones(32, 16)), quantize="tensorwise", reduce_amax=True
    ),
    "infinite": lambda rank: _gather(  # which quantisation makes a NaN
        torch.ones(4, 32).fill_(1 if dist.get_rank() != rank else torch.inf),
        torch.ones(32, 16),
        quantize="rowwise",
    ),
    "fp8 layer": lambda rank: _fp8_layer(nn.ColumnParallelLinear, "tensorwise", rank),
    "fp8 layer of rows": lambda rank: _fp8_layer(nn.RowParallelLinear, "rowwise", rank),
    "relays": lambda rank: relays.all_gather(
        _bad((4, 3), (0, 1), rank), _world(), Schedule(2, (Move(0, 0, 1), Move(1, 1, 0)), ())
    ),
    "norm": lambda rank: _ops.all_reduce_rms_norm(
        _bad((2, 4), (1, 2), rank), torch.ones(2, 4), torch.ones(4)
    ),
    "backward of sum": _backward_of_sum,
    "backward of gather": _backward_of_gather,
}


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _arguments() -> dict[str, dict[str, Any]]:
    """A call of each op of the library, whose numbers are all ones."""
    size, name = dist.get_world_size(), _world().group_name
    group = {"group_name": name, "world_size": size}
    packed = agmm.Packed4BitWeight.pack(
        torch.full((16, 16), 0x99, dtype=torch.uint8), torch.ones(16, 1)
    )
    signals = {"a_chunk_signals": torch.ones(1, dtype=torch.uint32), "a_chunk_pivot": 0}
    shard, A, B = torch.ones(4, 32), torch.ones(4 * size, 32), torch.ones(32, 16)
    scales = {"scale_a": torch.ones(1), "scale_b": torch.ones(1)}
    many = {"scale_a": torch.ones(1), "scale_bs": [torch.ones(1)], "result_scales": [None]}
    bias, rows = torch.ones(16), {"gather_dim": 0, "return_A": False}
    how = {"out_dtype": _bf16, "use_fast_accum": False}
    gated = {"activation": "silu_mul"}
    ids = torch.arange(size, dtype=torch.int32).expand(4, size)  # each token goes to every rank
    routing = agmm.moe.route(ids, num_experts=size, capacity=4 * size)
    routed = {"offsets": routing.offsets}
    to_experts = {**routed, "tokens": routing.tokens, "positions": routing.positions}
    return {
        "_route": {"topk_ids": ids, "num_experts": size, "num_local_experts": 1, **group},
        "_all_gather_grouped_matmul": {
            "x": shard,
            "weights": [B[None]],
            "biases": [bias[None]],
            **to_experts,
            **group,
        },
        "_grouped_matmul_reduce_scatter": {
            "ys": [A],
            "weights": [B[None]],
            "bias": bias[None],
            "topk_weights": torch.ones(4, size),
            **to_experts,
            **group,
        },
        "_all_gather_scaled_grouped_matmul": {
            "x": shard.to(_f8),
            "scale_a": torch.ones(4, 1),
            "weights": [B[None].to(_f8)],
            "scale_bs": [torch.ones(1, 1, 16)],
            "biases": [bias[None]],
            **to_experts,
            **group,
            **how,
        },
        "_scaled_grouped_matmul_reduce_scatter": {
            "y": A.to(_f8),
            "scale_a": torch.ones(4 * size, 1),
            "weight": B[None].to(_f8),
            "scale_b": torch.ones(1, 1, 16),
            "bias": bias[None],
            "topk_weights": torch.ones(4, size),
            **to_experts,
            **group,
            **how,
        },
        "_grouped_grad_of_weight": {"rows": A, "douts": A, **routed},
        "_grouped_grad_of_bias": {"douts": A, **routed},
        "_async_input_mm": {"a": shard, "b": B, "up": B, **gated, **signals},
        "_async_input_scaled_mm": {
            "A": shard.to(_f8),
            "B": B.to(_f8),
            "bias": bias,
            "use_fast_accum": False,
            "up": B.to(_f8),
            "scale_up": torch.ones(1),
            "bias_up": bias,
            **gated,
            **scales,
            **signals,
        },
        "_invariant_matmul": {"A": A, "B": B, "bias": bias},
        "_scaled_matmul": {
            "A": shard.to(_f8),
            "B": B.to(_f8),
            **how,
            **{name: scale.view(1, 1) for name, scale in scales.items()},
        },
        "_fused_all_gather_matmul_native": {"A_shard": shard, "B": B, "group_name": name},
        "_all_gather_matmul": {
            "A_shard": shard,
            "Bs": [B],
            "biases": [bias],
            "config": "",
            "strict": True,
            **rows,
            **group,
        },
        "_all_gather_packed_matmul": {
            "A_shard": shard,
            "packed": [packed.packed],
            "ns": [16],
            "group_sizes": [32],
            "biases": [bias],
            "strict": True,
            **rows,
            **group,
        },
        "_all_gather_scaled_matmul": {
            "A_shard": shard.to(_f8),
            "Bs": [B.to(_f8)],
            "biases": [bias],
            **many,
            **rows,
            **group,
            **how,
        },
        "_fused_matmul_reduce_scatter_native": {
            "A": A,
            "B": B,
            "reduce_op": "sum",
            "group_name": name,
        },
        "_matmul_reduce_scatter": {
            "As": [A],
            "Bs": [B],
            "bias": bias,
            "residual": torch.ones(4, 16),
            "scatter_dim": 0,
            "reduce_op": "sum",
            **group,
        },
        "_scaled_matmul_reduce_scatter": {
            "As": [A.to(_f8)],
            "Bs": [B.to(_f8)],
            "scale_as": [torch.ones(1)],
            "scale_bs": [torch.ones(1)],
            "bias": bias,
            "result_scale": None,
            "scatter_dim": 0,
            "reduce_op": "sum",
            **group,
            **how,
        },
        "_scaled_matmul_all_reduce": {
            "A": A.to(_f8),
            "B": B.to(_f8),
            "bias": bias,
            "result_scale": None,
            **scales,
            **group,
            **how,
        },
        "_matmul_all_reduce": {
            "A": A,
            "B": B,
            "bias": bias,
            "residual": torch.ones(4 * size, 16),
            **group,
        },
        "_matmul_all_reduce_rms_norm": {
            "A": A,
            "B": B,
            "bias": bias,
            "residual": torch.ones(4 * size, 16),
            "weight": bias,
            "eps": 1e-6,
            **group,
        },
        "_all_gather": {"x": A, "dim": 0, **group},
        "_reduce_scatter": {"x": A, "op": "sum", "dim": 0, **group},
        "_all_reduce": {"x": A, "op": "sum", **group},
        "_all_reduce_rms_norm": {
            "x": A,
            "residual": A,
            "weight": A[0],
            "eps": 1e-6,
            **group,
        },
    }


def _with_a_nan(value: Any) -> Any:
    """The value with a NaN in its last number; a list gets it in its first tensor."""
    if isinstance(value, list):
        return [_with_a_nan(value[0]), *value[1:]]
    wide = value.to(torch.float32, copy=True)
    wide.view(-1)[-1] = torch.nan
    return wide.to(value.dtype)


def reported(rank: int) -> dict[str, dict[str, bool]]:
    """By op of the library, and by each argument that has floating-point numbers: whether this rank
    was told of a NaN there. The rank has it."""
    said: list[str] = []
    found: dict[str, dict[str, bool]] = {}
    with mock.patch.object(_core, "write_line", said.append):
        for name, arguments in _arguments().items():
            op = getattr(torch.ops.agmm, name).default
            for argument, value in arguments.items():
                first = value[0] if isinstance(value, list) else value
                if not (isinstance(first, torch.Tensor) and first.is_floating_point()):
                    continue
                agmm.check_nan("warn")
                is_bad = dist.get_rank() == rank
                op(**arguments | ({argument: _with_a_nan(value)} if is_bad else {}))
                agmm.check_nan("off")
                found.setdefault(name, {})[argument] = any("sends a NaN" in line for line in said)
                said.clear()
    return found


def warned(name: str, rank: int) -> None:
    assert agmm.check_nan("warn") == "off"
    CALLS[name](-1)  # without a NaN
    CALLS[name](rank)
    CALLS[name](rank)  # is not reported again
    assert agmm.check_nan("off") == "warn"
    CALLS[name](rank)


def raised(name: str) -> list[str]:
    """Every rank has a NaN, so none waits for another."""
    agmm.check_nan("raise")
    found = []
    try:
        CALLS[name](dist.get_rank())
    except agmm.AgmmError as error:
        found.append(str(error))
    agmm.check_nan("off")
    out = agmm.collectives.all_reduce(torch.ones(2))
    return [*found, str(out.tolist())]
