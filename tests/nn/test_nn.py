"""Layers and parallel styles on CPU ranks, against the whole module."""

from __future__ import annotations

from pathlib import Path

import layer_group_work
import nn_work
import pytest
import torch

from agmm.testing.ranks import RankPool


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_layers_are_the_whole_module(
    pool: RankPool, world_size: int, rows: int, bias: bool
) -> None:
    results = pool.run(nn_work.layers_against_whole, world_size, rows, bias, False)
    assert results == [None] * (5 - world_size) + [[]] * world_size


def test_layers_compiled(pool: RankPool) -> None:
    assert pool.run(nn_work.layers_against_whole, 3, 2, True, True)[2:] == [[]] * 3


@pytest.mark.parametrize("bias", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.slow
@pytest.mark.parametrize(
    "fp8", [None, *(pytest.param(fp8, marks=pytest.mark.slow) for fp8 in ("tensorwise", "rowwise"))]
)
def test_layers_compiled_without_gradients(pool: RankPool, fp8: str | None, bias: bool) -> None:
    assert pool.run(nn_work.compiled_without_gradients, 2, fp8, bias)[3:] == [[], []]


@pytest.mark.parametrize("world_size", [1, 3])
def test_whole_state_dict_in_and_out(pool: RankPool, world_size: int) -> None:
    results = pool.run(nn_work.state_round_trip, world_size)
    assert results == [None] * (5 - world_size) + [[]] * world_size


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "state_dict: found no 'back.weight', wanted one of shape (12, 60)"),
        ("shape", "state_dict: found 'both.weight' of shape (60, 12), wanted (120, 12)"),
        ("unknown", "state_dict: found 'third.weight', wanted no such name"),
    ],
)
def test_bad_state_dict_is_named_and_nothing_is_copied(
    pool: RankPool, kind: str, message: str
) -> None:
    assert pool.run(nn_work.bad_state, kind)[3:] == [(message, True)] * 2


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "out_features",
            "ColumnParallelLinear: out_features: found 10, wanted a multiple of 4 ranks",
        ),
        (
            "one of several",
            "ColumnParallelLinear: out_features: found 2, wanted a multiple of 4 ranks",
        ),
        (
            "no outputs",
            "ColumnParallelLinear: out_features: found an empty list, wanted at least one size",
        ),
        ("in_features", "RowParallelLinear: in_features: found 10, wanted a multiple of 4 ranks"),
        ("both", "device_mesh: found one beside a group, wanted one of the two"),
        ("input", "ColumnParallelLinear: x: found 7 features in its last dimension, wanted 8"),
        ("row input", "RowParallelLinear: x: found 8 features in its last dimension, wanted 2"),
        ("rows", "RowParallelLinear: x: found 6 in dimension 0, wanted a multiple of the 4 ranks"),
        (
            "style",
            (
                "GatherColwiseParallel on ReLU(): found torch.nn.modules.activation.ReLU, wanted "
                "torch.nn.Linear"
            ),
        ),
        (
            "style subclass",
            (
                "RowwiseScatterParallel on Special(in_features=8, out_features=8, bias=True): "
                "found nn_work.Special, wanted torch.nn.Linear itself: the style takes the place "
                "of forward, and a subclass has its own"
            ),
        ),
        (
            "shared style subclass",
            (
                "SharedGatherParallel on 'Sequential.1', Special(in_features=8, out_features=8, "
                "bias=True): found nn_work.Special, wanted torch.nn.Linear itself: the style "
                "takes the place of forward, and a subclass has its own"
            ),
        ),
        (
            "second style",
            (
                "GatherColwiseParallel on Linear(in_features=8, out_features=8, bias=True): "
                "found a style on it already, wanted one style for each linear"
            ),
        ),
        (
            "shared style name",
            (
                "SharedGatherParallel on Sequential: found no 'wq' in it, wanted the names of its "
                "torch.nn.Linear modules"
            ),
        ),
        (
            "style size",
            (
                "GatherColwiseParallel on Linear(in_features=8, out_features=10, bias=True): "
                "out_features: found 10, wanted a multiple of 4 ranks"
            ),
        ),
        (
            "row style size",
            (
                "RowwiseScatterParallel on Linear(in_features=10, out_features=8, bias=True): "
                "in_features: found 10, wanted a multiple of 4 ranks"
            ),
        ),
        (
            "dimension",
            (
                "GatherColwiseParallel on Linear(in_features=8, out_features=8, bias=True): "
                "sequence_dim: found 5, wanted one of the 2 dimensions of the input"
            ),
        ),
        (
            "style features",
            (
                "GatherColwiseParallel on Linear(in_features=8, out_features=8, bias=True): "
                "x: found 7 features in its last dimension, wanted 8"
            ),
        ),
        (
            "dimension of features",
            (
                "RowwiseScatterParallel on Linear(in_features=8, out_features=8, bias=True): "
                "sequence_dim: found -1, the input's features, wanted another one"
            ),
        ),
        (
            "dtype",
            (
                "ColumnParallelLinear: x: found dtype torch.bfloat16, wanted torch.float32 as the "
                "layer's weight"
            ),
        ),
        (
            "one dimension",
            "RowParallelLinear: x: found 1 dimensions, wanted at least 2, rows and features",
        ),
        ("no names", "names: found none, wanted the names of torch.nn.Linear modules"),
        (
            "sparse",
            ("ColumnParallelLinear: x: found layout torch.sparse_coo, wanted layout torch.strided"),
        ),
        ("none", "RowParallelLinear: x: found None, wanted a tensor"),
        (
            "dtensor",
            "ColumnParallelLinear: x: found a DTensor, wanted this rank's part, to_local()",
        ),
        (
            "vmap",
            (
                "ColumnParallelLinear: x: found a tensor inside torch.func (vmap, grad, jvp), "
                "wanted one outside: the op has a backward, but none of these rules"
            ),
        ),
        (
            "row weight norm",
            (
                "ParametrizedRowParallelLinear: weight: found [2, 8] on this rank, wanted [8, 2] "
                "(S(1) over the 4 ranks)"
            ),
        ),
        (
            "column weight",
            (
                "ParametrizedColumnParallelLinear: weight: found [16, 8] on this rank, wanted "
                "[4, 8] (S(0) over the 4 ranks)"
            ),
        ),
        (
            "row style weight norm",
            (
                "RowwiseScatterParallel on ParametrizedLinear(in_features=8, out_features=8, "
                "bias=True): weight: found (Shard(dim=0),), wanted (Shard(dim=1),)"
            ),
        ),
        (
            "style weight",
            (
                "GatherColwiseParallel on ParametrizedLinear(in_features=8, out_features=8, "
                "bias=True): weight: found (Replicate(),), wanted (Shard(dim=0),)"
            ),
        ),
        (
            "row style none",
            (
                "RowwiseScatterParallel on Linear(in_features=8, out_features=8, bias=True): "
                "x: found None, wanted a tensor"
            ),
        ),
        (
            "style sparse",
            (
                "GatherColwiseParallel on Linear(in_features=8, out_features=8, bias=True): "
                "x: found layout torch.sparse_coo, wanted layout torch.strided"
            ),
        ),
    ],
)
def test_bad_layer_is_named_in_one_line(pool: RankPool, kind: str, message: str) -> None:
    assert pool.run(nn_work.bad_layer, kind)[1:] == [message] * 4


def test_a_rank_outside_is_told_so(pool: RankPool) -> None:
    for rank, found in enumerate(pool.run(layer_group_work.layers_of_others)[1:], 1):
        assert found == ["made"] * 3, rank
    outside, mesh, not_a_group = pool.run(layer_group_work.layers_of_others)[0]
    assert outside == (
        "group: found one which this rank 0 is not in "
        "(torch.distributed.new_group returned GroupMember.NON_GROUP_MEMBER)"
    )
    assert mesh.startswith("device_mesh: found DeviceMesh(") and mesh.endswith(
        ", which this rank 0 is not in"
    )
    assert (
        not_a_group == "group: found 'no such group', wanted the name of a process group of "
        "this process"
    )


def test_a_mesh_is_taken_as_a_group(pool: RankPool) -> None:
    assert pool.run(layer_group_work.mesh_as_group)[1:] == [True] * 4


def test_a_pickled_layer_finds_its_own_rank(pool: RankPool) -> None:
    """The layer of rank 1 of 5, unpickled on every rank, loads that rank's parts."""
    results = pool.run(layer_group_work.pickled_elsewhere)
    assert results == [(rank, 5, []) for rank in range(5)]


DESTROYED = (
    "group: found a destroyed one (torch.distributed.destroy_process_group), wanted one in use"
)


@pytest.mark.parametrize(
    "compiled",
    ["several", *(pytest.param(one, marks=pytest.mark.slow) for one in ("row", "styles"))],
)
def test_what_outlives_its_group_is_refused(tmp_path: Path, compiled: str) -> None:
    """It is refused also where another group has its name, of as many ranks or fewer. What was
    pickled belongs to the group of its name, if that has as many ranks."""
    with RankPool(3) as pool:
        found = pool.run(layer_group_work.outlived, str(tmp_path), compiled)
    for said in found:
        pickled = {name: said.pop(name) for name in list(said) if "pickled" in name}
        assert {name: text for name, text in said.items() if text != DESTROYED} == {}
        for name, text in pickled.items():
            found_fewer = "group: found '0' with 2 ranks, wanted 3 as what was pickled was made for"
            assert text == ("no error" if name.startswith("3") else found_fewer), name
    assert "2 ranks, compiled" in found[0]


def test_a_pickled_layer_without_its_group_says_so(tmp_path: Path) -> None:
    with RankPool(2) as pool:
        for said in pool.run(layer_group_work.unpickled_without_a_group, str(tmp_path)):
            assert said == (
                "group: found '0', wanted the name of a process group of this process, as what was "
                "pickled had it"
            )


@pytest.mark.parametrize("with_fsdp", [False, True])
def test_activations_may_change_what_layers_return(pool: RankPool, with_fsdp: bool) -> None:
    """FSDP2 warns of outputs that are views of an autograd Function."""
    assert pool.run(nn_work.activations_in_place, with_fsdp) == [[]] * 5


def test_mesh_of_two_dimensions(pool: RankPool) -> None:
    message = "device_mesh: found 2 dimensions, wanted 1, e.g. mesh['tp']"
    layer = "in_features=5, out_features=5, bias=True, world_size=5"
    assert pool.run(nn_work.mesh_of_two_dimensions) == [[message, message, layer]] * 5


def test_what_a_layer_says_and_returns(pool: RankPool) -> None:
    for facts in pool.run(nn_work.layer_facts, 4)[1:]:
        assert facts == {
            "column": "ColumnParallelLinear(in_features=8, out_features=(12, 24), bias=True, "
            "world_size=4)",
            "single": "ColumnParallelLinear(in_features=8, out_features=12, bias=False, "
            "world_size=4)",
            "row": "RowParallelLinear(in_features=12, out_features=8, bias=True, world_size=4)",
            "meta": True,
            "shapes": [(8, 3), (8, 6), (8, 3), (2, 8)],
            "dtype": torch.bfloat16,
        }


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_plan_shards_a_model(pool: RankPool, world_size: int, batch: int, shared: bool) -> None:
    results = pool.run(nn_work.styles_against_whole, world_size, batch, shared)
    assert results[5 - world_size :] == [([], 1 if shared else 3)] * world_size


def test_a_plan_with_dtensors_outside(pool: RankPool) -> None:
    for faults, _ in pool.run(nn_work.styles_against_whole, 2, 2, True, local=False)[3:]:
        assert faults == []


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_plan_compiled(pool: RankPool, shared: bool) -> None:
    for faults, _ in pool.run(nn_work.styles_against_whole, 2, 2, shared, compiled=True)[3:]:
        assert faults == []


def test_shared_outputs_belong_to_their_input(pool: RankPool) -> None:
    assert pool.run(nn_work.shared_outputs_are_not_stale, 2)[3:] == [[True] * 6] * 2


def test_an_input_that_was_gathered_before_is_named(pool: RankPool) -> None:
    for faults, (said,) in pool.run(nn_work.gathered_before, 2)[3:]:
        assert faults == []
        assert "Linear(in_features=8, out_features=12, bias=True): x: found (Replicate(),)" in said
        assert said.endswith("leave out the PrepareModuleInput of its module")


def test_the_plan_of_the_documentation(pool: RankPool) -> None:
    assert all(error < 1e-10 for error in pool.run(nn_work.documented_plan))


def test_the_layers_of_the_documentation(pool: RankPool) -> None:
    assert pool.run(nn_work.documented_layers) == [[]] * 5
