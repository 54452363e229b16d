"""Layers and styles with experts on CPU ranks, against the unsharded model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import moe_layer_work as work
import pytest
import torch
from moe_layer_work import Kind
from torch.distributed.tensor.parallel import parallelize_module

from agmm.errors import InvalidArgument
from agmm.nn import Choices, ExpertParallel, Experts, MoE, TopKRouter, load_balance_loss
from agmm.nn.fp8_recipe import WHY_NOT_SAVED
from agmm.nn.router import load_of
from agmm.testing.ranks import RankPool

Pools = Callable[..., RankPool]

KINDS = [
    Kind(),
    Kind(k=3, normalised=False, shared=True, sliced=True),
    Kind(score="sigmoid", scale=2.5, has_choice_bias=True, shared=True),
    Kind(activation="gelu_tanh_mul", options=(("capacity_factor", 4.0), ("save_gathered", True))),
    Kind(sliced=True, options=(("save_preactivation", False),)),
]


@pytest.mark.parametrize("kind", KINDS, ids=range(len(KINDS)))
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_training_has_the_losses_of_the_unsharded_model(
    rank_pools: Pools, world_size: int, kind: Kind
) -> None:
    results = rank_pools(4).run(work.training, world_size, kind, torch.float64)
    assert results == [None] * (4 - world_size) + [[]] * world_size


@pytest.mark.parametrize("sliced", [False, True])
def test_training_in_bfloat16_has_the_losses_within_its_noise(
    rank_pools: Pools, sliced: bool
) -> None:
    kind = Kind(k=1, sliced=sliced, scale=0.5)
    assert rank_pools(2).run(work.training, 2, kind, torch.bfloat16) == [[]] * 2


@pytest.mark.parametrize("fp8", ["rowwise", "block"])
def test_training_in_fp8_has_the_losses_within_its_noise(rank_pools: Pools, fp8: str) -> None:
    kind = Kind(k=1, scale=0.5, wide=8, sliced=fp8 == "block", options=(("fp8", fp8),))
    assert rank_pools(2).run(work.training, 2, kind, torch.float32) == [[]] * 2


@pytest.mark.parametrize("compiled", [False, True])
def test_tokens_may_be_uneven_and_dropped(rank_pools: Pools, compiled: bool) -> None:
    assert rank_pools(4).run(work.uneven, 4, compiled) == [[]] * 4


@pytest.mark.parametrize("kind", KINDS[:2], ids=range(2))
def test_compiled_is_eager(rank_pools: Pools, kind: Kind) -> None:
    assert rank_pools(2).run(work.compiled_is_eager, 2, kind) == [[]] * 2


@pytest.mark.parametrize("sliced", [False, True])
def test_checkpoints_go_to_other_ranks_and_divisions(
    rank_pools: Pools, tmp_path: Path, sliced: bool
) -> None:
    assert rank_pools(4).run(work.checkpoints, str(tmp_path), sliced) == [[]] * 4


@pytest.mark.parametrize("sliced", [False, True])
def test_fsdp_shards_its_parameters(rank_pools: Pools, sliced: bool) -> None:
    assert rank_pools(4).run(work.with_fsdp, sliced) == [[]] * 4


@pytest.mark.parametrize(
    "options",
    [{}, {"capacity_factor": 4.0, "use_local_output": False}, {"sliced": True}],
    ids=lambda given: " ".join(given) or "as usual",
)
@pytest.mark.parametrize("which", work.MODULES)
def test_modules_under_the_style_are_what_they_were(
    rank_pools: Pools, which: str, options: dict[str, Any]
) -> None:
    assert rank_pools(2).run(work.styled, which, 2, ExpertParallel, options) == [[]] * 2


def test_the_loss_that_balances_is_of_all_ranks(rank_pools: Pools) -> None:
    assert rank_pools(2).run(work.load_of_ranks) == [[]] * 2


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MoE(4, 4, 2), "MoE: found neither k nor router, wanted one of the two"),
        (
            lambda: MoE(4, 4, 2, 1, fp8="tensorwise"),  # type: ignore[arg-type]
            "Experts: fp8: found 'tensorwise' for experts, wanted 'rowwise', 'block' or None",
        ),
        (
            lambda: Experts(4, 4, 2, fp8="block", save_gathered=True),
            f"Experts: {WHY_NOT_SAVED}",
        ),
        (
            lambda: MoE(4, 4, 2, 1, router=torch.nn.Identity()),
            "MoE: found both k and router, wanted one of the two",
        ),
        (
            lambda: MoE(4, 4, 2, 3),
            "TopKRouter: k: found 3, wanted 1 to 2, the number of experts",
        ),
        (
            lambda: TopKRouter(4, 2, 1, score="max"),  # type: ignore[arg-type]
            "TopKRouter: score: found 'max', wanted one of softmax, sigmoid",
        ),
        (
            lambda: Experts(4, 4, 2, activation="silu"),  # type: ignore[arg-type]
            "Experts: activation: found 'silu', wanted one of silu_mul, gelu_mul, gelu_tanh_mul",
        ),
        (
            lambda: Experts(4, 4, 2, sliced=True, capacity_factor=2.0),
            (
                "Experts: capacity_factor: found 2.0 with sliced experts, wanted None: every rank "
                "has the rows of all tokens"
            ),
        ),
        (
            lambda: ExpertParallel(capacity_factor=0),
            "ExpertParallel: capacity_factor: found 0, wanted a number larger than 0",
        ),
        (
            lambda: Experts(4, 4, 2)(torch.ones(3, 5), torch.ones(3, 1).int(), torch.ones(3, 1)),
            "Experts: x: found shape (3, 5), wanted (tokens, 4)",
        ),
        (
            lambda: Experts(4, 4, 2)(torch.ones(3, 4), torch.ones(2, 1).int(), torch.ones(3, 1)),
            "Experts: topk_ids: found shape (2, 1), wanted a row for each of the 3 tokens of x",
        ),
        (
            lambda: MoE(4, 4, 2, 1)(torch.ones(4)),
            "MoE: x: found 1 dimensions, wanted at least 2, tokens and features",
        ),
        (
            lambda: MoE(4, 4, 2, 1, shared_features=4)(torch.ones(2, 4), tokens_per_rank=[2]),
            (
                "MoE: tokens_per_rank: found [2] with a shared expert, wanted None: its gather "
                "takes the same number of each rank"
            ),
        ),
        (
            lambda: load_balance_loss(
                load_of(Choices(torch.ones(1, 1), torch.zeros(1, 1).long()), 2)
            ),
            "load: found no scores_per_expert, wanted a router that returns its scores",
        ),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        make()
    assert str(refused.value) == message


class _WithAct(work.Packed):
    def __init__(self) -> None:
        super().__init__()
        self.act_fn = torch.nn.Tanh()


class _OwnGate(work.Packed):
    def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
        return both


class _Biased(work.Packed):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj_bias = torch.nn.Parameter(torch.zeros(work.EXPERTS, 2))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("module", "message"),
    [
        (torch.nn.Linear(2, 2), "found weight [2, 2], bias [2], wanted gate_up_proj, down_proj or"),
        (_Biased(), "gate_up_proj_bias [8, 2], wanted gate_up_proj, down_proj or"),
        (_WithAct(), "act_fn: found Tanh, wanted an activation= of the style"),
        (_OwnGate(), "gate and up: found a gate of the module's own, wanted activation(gate) * up"),
    ],
    ids=lambda given: type(given).__name__ if isinstance(given, torch.nn.Module) else "",
)
def test_modules_that_the_style_does_not_take_are_refused(
    module: torch.nn.Module, message: str
) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    with pytest.raises(InvalidArgument) as refused:
        parallelize_module(module, mesh, ExpertParallel())
    assert message in str(refused.value)


@pytest.mark.usefixtures("group")
def test_a_styled_module_wants_ids_and_weights() -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    module = parallelize_module(work.Titan(), mesh, ExpertParallel())
    x = torch.ones(2, work.HIDDEN, dtype=torch.float64)
    with pytest.raises(InvalidArgument, match=r"found torch.int64 \[8\] behind x \[2, 6\], wanted"):
        module(x, torch.ones(8, dtype=torch.int64))


def test_the_bias_of_the_choice_keeps_its_type_and_begins_at_0() -> None:
    router = TopKRouter(4, 8, 2, has_choice_bias=True)
    bias = router.to(torch.bfloat16).choice_bias
    assert bias is not None and bias.dtype == torch.float32
    router = TopKRouter(4, 8, 2, has_choice_bias=True, device="meta").to_empty(device="cpu")
    assert router.choice_bias is not None
    router.choice_bias.fill_(torch.nan)
    router.reset_parameters()
    assert router.choice_bias.tolist() == [0.0] * 8
