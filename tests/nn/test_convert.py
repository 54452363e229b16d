"""Plans of torch's and of transformers' styles, converted, against the whole model and torch."""

from __future__ import annotations

from pathlib import Path

import convert_work
import pytest
import quick

from agmm.nn import GatedGatherParallel, SharedGatherParallel
from agmm.testing.ranks import RankPool

_COLUMN = "LaidOut(ReplicatedColwiseParallel(), None, Replicate())"
_STYLES: dict[str, dict[str, str]] = {
    "torchtitan": {
        "tok_embeddings": "RowwiseParallel",
        "norm": "SequenceParallel",
        "output": "LaidOut(GatherColwiseParallel(sequence_dim=1), None, Replicate())",
        "layers.0.attention": "Several(PrepareModuleInput",
        "layers.0.attention.wo": "RowwiseScatterParallel(sequence_dim=1)",
        "layers.0.feed_forward": "GatedGatherParallel(sequence_dim=1)",
        "layers.0.feed_forward.w2": "RowwiseScatterParallel(sequence_dim=1)",
    },
    "all rows": {
        "output": _COLUMN,
        "layers.0.attention.wq": "ReplicatedColwiseParallel()",
        "layers.0.attention.wo": "RowwiseAllReduceParallel()",
    },
    "transformers": {
        "tok_embeddings": "RowwiseParallel",
        "output": _COLUMN,
        "layers.0.attention.q_norm": "SummedGradients()",
        "layers.0.attention.wv": "ReplicatedColwiseParallel()",
        "layers.0.feed_forward.w3": _COLUMN,
        "layers.0.feed_forward.w2": "LaidOut(RowwiseAllReduceParallel(), Replicate(), None)",
    },
}


@pytest.mark.parametrize("which", convert_work.PLANS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_converted_plan_is_the_whole_model(pool: RankPool, which: str, world_size: int) -> None:
    for found in pool.run(convert_work.against_whole, world_size, which)[5 - world_size :]:
        faults, styles = found
        assert faults == []
        for name, style in _STYLES[which].items():
            assert styles[name].startswith(style), styles[name]
    assert ("layers.0.feed_forward.w1" in styles) == (which != "torchtitan")


@pytest.mark.slow
@pytest.mark.parametrize("which", convert_work.PLANS)
def test_a_converted_plan_compiled(pool: RankPool, which: str) -> None:
    found = pool.run(convert_work.against_whole, 2, which, True)[3:]
    assert [faults for faults, _ in found] == [[]] * 2


@pytest.mark.parametrize("world_size", quick.first(1, [2, 4]))
def test_linears_keep_their_layouts(pool: RankPool, world_size: int) -> None:
    assert pool.run(convert_work.layouts, world_size)[5 - world_size :] == [[]] * world_size


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (
            "size",
            (
                "'': ReplicatedColwiseParallel on Linear(in_features=8, out_features=7, "
                "bias=True): out_features: found 7, wanted a multiple of 2 ranks"
            ),
        ),
        (
            "subclass",
            (
                "'': ReplicatedColwiseParallel on _Odd(in_features=8, out_features=8, bias=True): "
                "found convert_work._Odd, wanted torch.nn.Linear itself: the style takes the place "
                "of forward, and a subclass has its own"
            ),
        ),
        ("partial", "'': found the layout Partial(sum), wanted Shard or Replicate"),
        ("unknown", "'': found convert_work._Own, which agmm does not know"),
        ("router", "'': found 'gate' in it, which may take the gathered input too"),
        ("two arguments", "'': found a gather of other arguments, wanted one of the first alone"),
        (
            "features",
            "'': found column-wise linears of [6, 8] features in it, wanted one number",
        ),
        ("outputs", "'': found column-wise linears with several layouts of outputs in it"),
        (
            "of features",
            "'': found Shard(dim=-1) to Replicate(), wanted a Shard of rows to Replicate()",
        ),
    ],
)
def test_what_stays_torchs_is_named(pool: RankPool, kind: str, reason: str) -> None:
    said = [
        f"agmm leaves entries of a plan to torch: {reason}",
        f"plan: {reason}; strict=True refuses what agmm leaves to torch",
    ]
    assert pool.run(convert_work.left, kind)[3:] == [said] * 2


_WANTED = (
    "wanted one of ['all_reduce', 'colwise', 'colwise_gather_output', 'colwise_rep', "
    "'embedding_colwise', 'embedding_rowwise', 'replicate', 'replicated_with_grad_allreduce', "
    "'rowwise', 'rowwise_rep', 'rowwise_split_input', 'sequence_parallel']"
)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "packed",
            "'': found 'packed_colwise', wanted agmm.nn.PackedColwiseParallel",
        ),
        (
            "experts",
            "'': found 'moe_tp_experts', wanted agmm.nn.ExpertParallel in a plan of your own",
        ),
        ("name", f"'': found 'diagonal', {_WANTED}"),
        (
            "type",
            "'': found int, wanted a ParallelStyle or the name of a style of transformers",
        ),
        (
            "module",
            (
                "'': found ColwiseParallel on ReLU, wanted it on torch.nn.Linear or "
                "torch.nn.Embedding"
            ),
        ),
        (
            "twice",
            "'u*': found 'up', which 'up' names too, wanted one entry for each module",
        ),
    ],
)
def test_what_no_style_serves_is_refused(pool: RankPool, kind: str, message: str) -> None:
    assert pool.run(convert_work.left, kind)[3:] == [[f"plan: {message}"]] * 2


def test_an_entry_that_names_nothing(pool: RankPool) -> None:
    reason = "'down.*': found no such module"
    said = [
        f"agmm leaves entries of a plan to torch: {reason}",
        f"plan: {reason}; strict=True refuses what agmm leaves to torch",
    ]
    assert pool.run(convert_work.left, "nowhere")[3:] == [said] * 2


def test_styles_without_linears_stay(pool: RankPool) -> None:
    found = {
        "up": "GatherColwiseParallel",
        "held": "Several",
        "norm": "PrepareModuleOutput",
    }
    assert pool.run(convert_work.kept)[3:] == [found] * 2


def test_a_linear_that_takes_something_else_is_named(pool: RankPool) -> None:
    linear = "'_Crossed.key', Linear(in_features=8, out_features=8, bias=True)"
    found = "x: found 6 in dimension 1, wanted 2 as in the input of the module"
    why = "the linear of a converted plan takes shards of that alone"
    said = f"GatherOfInput on {linear}: {found}: {why}"
    assert pool.run(convert_work.crossed)[3:] == [["no error", said]] * 2


@pytest.mark.parametrize("which", ["torchtitan", "all rows"])
def test_checkpoints_go_between_the_plans(pool: RankPool, which: str, tmp_path: Path) -> None:
    assert pool.run(convert_work.exchanged, str(tmp_path), which)[3:] == [[]] * 2


def test_a_plan_that_is_printed_names_its_linears() -> None:
    printed = repr(SharedGatherParallel("wq", "wk"))
    assert printed == "SharedGatherParallel('wq', 'wk', sequence_dim=1)"
    assert repr(GatedGatherParallel()) == "GatedGatherParallel(sequence_dim=1)"
