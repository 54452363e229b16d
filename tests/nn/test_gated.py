"""Gated feed-forward modules that are found in models, and packed linears of a plan, against the
whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gated_work
import pytest
import quick
import torch

from agmm.errors import InvalidArgument
from agmm.nn import PackedColwiseParallel, gated_plan
from agmm.testing.ranks import RankPool

_ACTIVATIONS = {
    "llama": "silu_mul",
    "gemma": "gelu_tanh_mul",
    "titan": "silu_mul",
    "phi": "gelu_mul",
}


@pytest.mark.parametrize("world_size", quick.first(1, [2, 4]))
@pytest.mark.parametrize("kind", gated_work.KINDS)
@pytest.mark.parametrize("way", ["own", "sequence", "all rows"])
def test_a_gated_module_in_a_model(
    pool: RankPool, tmp_path: Path, kind: str, way: str, world_size: int
) -> None:
    path = str(tmp_path / "{rank}.json")
    found = pool.run(gated_work.against_whole, world_size, kind, way, path)
    wanted: Any = [
        ("all_gather_matmul", 2, _ACTIVATIONS.get(kind, "gelu_mul")),
        ("matmul_reduce_scatter", 1, None),
    ]
    if way == "all rows":
        wanted = [("matmul_all_reduce", 1, None)]
    assert found[5 - world_size :] == [([], wanted)] * world_size


@pytest.mark.parametrize("what", ["own hook", "packed", "replaced"])
def test_what_stands_in_the_way_of_a_gate_is_called(pool: RankPool, what: str) -> None:
    assert pool.run(gated_work.with_a_hook, 2, what)[3:] == [[]] * 2


@pytest.mark.parametrize("what", ["alone", "fp8", pytest.param("compiled", marks=pytest.mark.slow)])
def test_other_ways_to_a_gate(pool: RankPool, what: str) -> None:
    assert pool.run(gated_work.other_ways, 2, what)[3:] == [[]] * 2


class _Residual(gated_work.Llama):
    def forward(self, x: torch.Tensor) -> Any:
        return x + super().forward(x)


class _Clamped(gated_work.Llama):
    def forward(self, x: torch.Tensor) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=7) * self.up_proj(x))


class _TwoInputs(gated_work.Llama):
    def forward(self, x: torch.Tensor, other: torch.Tensor) -> Any:  # type: ignore[override]
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(other))


class _Branching(gated_work.Llama):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) if x.shape[0] > 1 else x


class _Twice(gated_work.Llama):
    def forward(self, x: torch.Tensor) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.gate_proj(x))


@pytest.mark.parametrize(
    "module",
    [
        *(kind() for kind in (_Residual, _Clamped, _TwoInputs, _Branching, _Twice)),
        gated_work.Llama(act_fn=torch.nn.ReLU()),
        gated_work.Llama(act_fn=torch.nn.PReLU(dtype=torch.float64)),
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)),
    ],
    ids=lambda module: f"{type(module).__name__} {type(getattr(module, 'act_fn', None)).__name__}",
)
def test_a_module_that_computes_anything_else_is_none(module: torch.nn.Module) -> None:
    with pytest.raises(InvalidArgument, match="found no gated feed-forward in ModuleList, wanted"):
        gated_plan(torch.nn.ModuleList([module]))


def test_refusals() -> None:
    with pytest.raises(InvalidArgument, match="found save_gathered, strict without a sequence_dim"):
        PackedColwiseParallel(3, save_gathered=True, strict=True)
    assert repr(PackedColwiseParallel([4, 2])) == "PackedColwiseParallel((4, 2), sequence_dim=None)"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("gated", "found torch.nn.modules.container.Sequential, wanted a module that computes"),
        ("fp8", "save_preactivation: found False with fp8, wanted True"),
        ("sizes", "sizes: found [15, 17], wanted multiples of 2 ranks that add up to the 32"),
        ("sum", "sizes: found [16, 4], wanted multiples of 2 ranks that add up to the 32"),
    ],
)
def test_a_style_that_cannot_be_applied_says_so(pool: RankPool, kind: str, message: str) -> None:
    for said in pool.run(gated_work.refused, kind)[3:]:
        assert message in said
