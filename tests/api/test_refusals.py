"""What no path can serve is refused before the first step that another rank sees; what is no plain
memory is computed from what it stands for."""

from __future__ import annotations

import pytest
import refusal_work

from agmm.testing.ranks import RankPool

INSIDE_FUNC = (
    "found a tensor inside torch.func (vmap, grad, jvp), wanted one outside: the op has a "
    "backward, but none of these rules"
)
FP8 = (
    "found dtype torch.float8_e4m3fn, wanted one of bfloat16, float16, float32, float64, "
    "complex64, complex128, int8, uint8, int16, int32, int64"
)
LIMIT = "AGMM_TIMEOUT_S: found 'abc', wanted a number of seconds > 0"
MESSAGES = {
    "return_A": "return_A: found 'no', wanted True or False",
    "strict": "strict: found 'no', wanted True or False",
    "save_gathered": "save_gathered: found 1, wanted True or False",
    "config": "config: found 7, wanted a KernelConfig, the name of one, or None",
    "sparse A_shard": "A_shard: found layout torch.sparse_coo, wanted layout torch.strided",
    "sparse B": "B: found layout torch.sparse_coo, wanted layout torch.strided",
    "compressed B": "B: found layout torch.sparse_csr, wanted layout torch.strided",
    "sparse bias": "bias: found layout torch.sparse_coo, wanted layout torch.strided",
    "fp8": f"A_shard: {FP8}",
    "dtensor": "B: found a DTensor, wanted this rank's part, to_local()",
    "vmap": f"A_shard: {INSIDE_FUNC}",
    "jvp": f"A_shard: {INSIDE_FUNC}",
    "func.grad": f"A_shard: {INSIDE_FUNC}",
    "dual": "A_shard: found a tangent, wanted none: the op has no forward-mode derivative",
    "another mesh": (
        "group: found a DeviceMesh that this rank is not in, wanted a mesh of this rank"
    ),
    "group of others": "group: found a group that this rank is not in, wanted a group of this rank",
    "limit": LIMIT,
    "limit, unfused": LIMIT,
    "scatter: limit": LIMIT,
    "scatter: sparse B": "B: found layout torch.sparse_coo, wanted layout torch.strided",
    "scatter: reduce_op": "reduce_op: found 3, wanted 'sum' or 'avg'",
    "scatter: scatter_dim": "scatter_dim: found '0', wanted an int",
    "scatter: vmap": f"A: {INSIDE_FUNC}",
    "scatter: fp8": f"A: {FP8}",
    "scatter: native": "B: found layout torch.sparse_coo, wanted layout torch.strided",
    "native": "B: found layout torch.sparse_coo, wanted layout torch.strided",
    "reduce: sparse B": "B: found layout torch.sparse_coo, wanted layout torch.strided",
    "reduce: sparse bias": "bias: found layout torch.sparse_coo, wanted layout torch.strided",
    "reduce: strict": "strict: found 'no', wanted True or False",
    "reduce: vmap": f"A: {INSIDE_FUNC}",
    "reduce: dual": "A: found a tangent, wanted none: the op has no forward-mode derivative",
    "reduce: fp8": f"A: {FP8}",
}


@pytest.mark.parametrize("kind", refusal_work.CALLS)
def test_a_refused_call_leaves_the_group_as_it_was(pool: RankPool, kind: str) -> None:
    results = pool.run(refusal_work.refused, kind)
    assert results == [None] * 2 + [("InvalidArgument", MESSAGES[kind], True)] * 3


def test_operands_that_are_to_be_negated_or_conjugated(pool: RankPool) -> None:
    assert pool.run(refusal_work.lazy_operands) == [None, None, [], [], []]


def test_in_place_ops_on_outputs(pool: RankPool) -> None:
    assert pool.run(refusal_work.in_place_on_outputs) == [None, None, [], [], []]
