"""``all_gather_matmul`` with weights of 4 bits: on CPU ranks overlapped, on GPUs a gather and the
kernel that streams such weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from agmm.errors import InvalidArgument
from agmm.ops import small_collectives
from agmm.ops.checks import (
    check_bias,
    check_count,
    check_inner,
    check_no_backward,
    check_operand,
    check_rows,
)
from agmm.ops.gather import GatherCall, Gathered, GatherSettings
from agmm.ops.library import define
from agmm.ops.pipeline import GATHER, LIBRARY, Ready, Route, serve
from agmm.planning import call_plans
from agmm.planning.problems import Problem
from agmm.runtime import capabilities, groups
from agmm.runtime.calls import Call
from agmm.runtime.collectives import start_all_gather
from agmm.runtime.packed import Packed4BitWeight
from agmm.runtime.results import moved, reshaped
from agmm.runtime.workspaces import cpu_workspace

Outs = tuple[torch.Tensor, list[torch.Tensor]]


def gather_packed(
    A_shard: torch.Tensor,
    Bs: Sequence[Any],
    biases: Sequence[torch.Tensor | None],
    group: Any,
    gather_dim: int,
    return_A: bool,
    strict: bool,
) -> Outs:
    """A, of no meaning without ``return_A``, and the products, in its dtype. Collective."""
    for B in Bs:
        if not isinstance(B, Packed4BitWeight):
            raise InvalidArgument(
                f"B: found {type(B).__name__} beside a Packed4BitWeight, wanted weights of one kind"
            )
    _check(A_shard, Bs, biases, gather_dim)
    _check_no_backward(A_shard, [("B", B.packed) for B in Bs], biases)
    name = groups.name_of(group)
    A, outs = torch.ops.agmm._all_gather_packed_matmul.default(
        A_shard,
        [B.packed for B in Bs],
        [B.N for B in Bs],
        [B.group_size for B in Bs],
        list(biases),
        name,
        groups.world_size_of(name),
        gather_dim,
        return_A,
        strict,
    )
    return A, outs


def _check_no_backward(
    A_shard: torch.Tensor,
    weights: Sequence[tuple[str, torch.Tensor]],
    biases: Sequence[torch.Tensor | None],
) -> None:
    check_no_backward(
        [("A_shard", A_shard), *weights, *(("bias", bias) for bias in biases)],
        "products with 4-bit weights",
    )


def _check(
    A_shard: torch.Tensor,
    Bs: Sequence[Packed4BitWeight],
    biases: Sequence[torch.Tensor | None],
    gather_dim: int,
) -> None:
    check_operand("A_shard", A_shard)
    wanted = _DTYPES.get(A_shard.device.type)
    if wanted is None:
        raise InvalidArgument(
            f"A_shard: found device {A_shard.device} with a Packed4BitWeight, wanted cpu or cuda"
        )
    if A_shard.dtype != wanted:
        raise InvalidArgument(
            f"A_shard: found dtype {A_shard.dtype} with a Packed4BitWeight, wanted {wanted} on "
            f"{A_shard.device.type}"
        )
    reason = None
    if A_shard.device.type == "cuda":
        reason = capabilities.why_not(capabilities.MATMULS, A_shard.device)
    if reason is not None:
        raise InvalidArgument(f"{reason}, for a Packed4BitWeight")
    for B in Bs:
        if B.packed.device != A_shard.device:
            raise InvalidArgument(
                f"B: found a Packed4BitWeight on {B.packed.device}, wanted {A_shard.device} as "
                "A_shard"
            )
    check_rows("A_shard", A_shard)
    last = A_shard.dim() - 1
    if not -A_shard.dim() <= gather_dim < last or gather_dim == -1:
        raise InvalidArgument(
            f"gather_dim: found {gather_dim} with a Packed4BitWeight, wanted 0 to {last - 1}"
        )
    check_count("bias", biases, len(Bs), "weights")
    for B, bias in zip(Bs, biases, strict=True):
        check_inner("B", B.K, A_shard.shape[-1], "A_shard")
        if bias is not None:
            check_bias(bias, B.N, "A_shard", A_shard)


_DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
"""The dtype of A, by the type of its device."""


class _PackedGather(GatherCall):
    """``all_gather(A_shard) @ B (+ bias)`` for each weight of 4 bits.

    On GPUs no kernel starts on chunks: agmm's gather, or the group's where it is faster, comes
    first.

    Args:
        A_shard: [M_local, ..., K], float32 on the CPU, bfloat16 on a GPU.
        Bs: the weights.
        biases: [N] of A's dtype, or None, for each weight.
    """

    def __init__(
        self,
        A_shard: torch.Tensor,
        Bs: Sequence[Packed4BitWeight],
        biases: Sequence[torch.Tensor | None],
        group: dist.ProcessGroup,
        settings: GatherSettings,
    ) -> None:
        super().__init__(A_shard, group, settings)
        self.Bs = Bs
        self.biases = biases

    @cached_property
    def shard(self) -> torch.Tensor:
        """This rank's rows as a matrix, the gathered dimension first."""
        return self.A_shard.movedim(self.dim, 0).flatten(0, -2).contiguous()

    def check(self) -> None:
        _check(self.A_shard, self.Bs, self.biases, self.settings.gather_dim)

    def words(self) -> Call:
        return Call(self.op, A_shard=self.shard, B=list(self.Bs))

    def operands(self) -> tuple[Any, ...]:
        return ()

    def columns(self) -> list[int]:
        return [B.N for B in self.Bs]

    def also_agreed(self) -> str:
        return ", packed"

    def lasts(self) -> bool:
        return False

    learns = False  # plans are those of the dtype, whose matmul is another

    def rows_by_copies(self) -> int | None:
        return None

    def why_no_kernel(self) -> str | None:
        return None

    def asks_a_plan(self) -> bool:
        return self.device.type == "cpu" and super().asks_a_plan()

    def route(self) -> Route:
        if self.device.type == "cpu":
            return super().route()
        if self.group.size() == 1:
            return Route(GATHER, lasts=False)  # the group's backend need not take GPU tensors
        reason = small_collectives.why_not(
            "all_gather", self.values, self.group, strict=self.strict
        )
        if reason is None:
            return Route(GATHER, lasts=False)
        # A shard that is large is a matter of choice.
        if not self.strict:
            reason = small_collectives.why_not("all_gather", self.values, self.group, strict=True)
        return Route(LIBRARY, reason)

    @property
    def values(self) -> torch.Tensor:
        return self.shard

    def problem(self, weight: int | None) -> Problem:
        columns = self.columns()
        m_local, k = self.shard.shape
        n = sum(columns) if weight is None else columns[weight]
        return call_plans.problem_of(
            (self.group.size() * m_local, n, k),
            self.shard.dtype,
            self.device,
            group=self.group,
            return_A=self.settings.return_A,
        )

    def again_on_cpu(self) -> Ready:
        return self.by_cpu

    def by_cpu(self) -> _Matrices:
        planner = call_plans.planner(self.group, self.device)
        return cpu_workspace(self.group).all_gather_matmul(
            self.shard,
            list(self.Bs),
            list(self.biases),
            return_A=self.settings.return_A,
            chunks_per_shard=planner.plan(self.problem(None)).chunks_per_shard,
        )

    def ready_behind_gather(self, _: Sequence[Any]) -> Ready:
        if self.group.size() == 1:
            A = self.shard.clone() if self.settings.return_A else self.shard
            return lambda: self._products(A)
        gather = small_collectives.prepare_gather(self.shard, self.group)
        return lambda: self._products(gather(self.shard))

    def ready_by_copies(self, pieces: int) -> Ready:
        raise NotImplementedError("no kernel multiplies pieces by weights of 4 bits")

    def ready_on_cuda(self, *_: Any) -> Ready:
        raise NotImplementedError("no kernel multiplies chunks by weights of 4 bits")

    def _products(self, A: torch.Tensor) -> _Matrices:
        outs = [B.product(A, bias) for B, bias in zip(self.Bs, self.biases, strict=True)]
        return A, outs

    def by_library(self, words: Call) -> Gathered:
        A = start_all_gather(self.shard, self.group.group_name, 0, call=words)()
        return self.finished(self._products(A), None)

    def on_nothing(self) -> Gathered:
        shard = self.shard
        A = shard.new_empty(self.group.size() * len(shard), shard.shape[1])
        return self.finished((A, [shard.new_empty(len(A), B.N) for B in self.Bs]), None)

    def finished(self, found: _Matrices, route: Route | None) -> Gathered:
        A, outs = found

        def unfolded(rows: torch.Tensor) -> torch.Tensor:
            return moved(reshaped(rows, (*self.leading, rows.shape[-1])), 0, self.dim)

        whole = unfolded(A) if self.settings.return_A and A is not None else None
        return Gathered(whole, None, [unfolded(out) for out in outs])


_Matrices = tuple[torch.Tensor | None, list[torch.Tensor]]
"""A and the products, as matrices of rows."""


class _Arguments(NamedTuple):
    """The arguments of the torch op."""

    A_shard: torch.Tensor
    packed: list[torch.Tensor]
    ns: list[int]
    group_sizes: list[int]
    biases: list[torch.Tensor | None]
    group_name: str
    world_size: int
    gather_dim: int
    return_A: bool
    strict: bool


def _impl(call: _Arguments) -> Outs:
    group = groups.group_of_size(call.group_name, call.world_size)
    k = call.A_shard.shape[-1]
    weights = zip(call.packed, call.ns, call.group_sizes, strict=True)
    Bs = [Packed4BitWeight(packed, k, n, size) for packed, n, size in weights]
    settings = GatherSettings(call.gather_dim, call.return_A, strict=call.strict)
    A, _, outs = serve(_PackedGather(call.A_shard, Bs, call.biases, group, settings))
    return call.A_shard.new_empty(0) if A is None else A, outs


def _fake(call: _Arguments) -> Outs:
    shape = list(call.A_shard.shape)
    shape[call.gather_dim] = shape[call.gather_dim] * call.world_size
    A = call.A_shard.new_empty(shape if call.return_A else 0)
    return A, [call.A_shard.new_empty(*shape[:-1], n) for n in call.ns]


def _check_grad(call: _Arguments) -> None:
    _check_no_backward(call.A_shard, [("packed", one) for one in call.packed], call.biases)


define(
    "_all_gather_packed_matmul",
    _Arguments,
    "(Tensor A, Tensor[] outs)",
    run={"CPU": _impl, "CUDA": _impl},
    fake=_fake,
    check_grad=_check_grad,
)
