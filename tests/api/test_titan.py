"""torchtitan's eager async-TP linears, which call torch's ops by name, on CPU ranks over agmm, and
the override that has agmm compute these ops."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import titan_work
import torch
import torchrun

from agmm.errors import InvalidArgument
from agmm.testing.ranks import RankPool

needs_linears = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("torchtitan", "spmd_types")),
    reason="needs torchtitan 0.3.0 and spmd_types 0.2.3: pip install --no-deps "
    "torchtitan==0.3.0 spmd_types==0.2.3",
)


@needs_linears
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "which", ["AllGatherLinear", "AllGatherLinearMulti", "LinearReduceScatter"]
)
def test_linears_of_torchtitan(
    pool: RankPool, which: str, dtype: torch.dtype, world_size: int
) -> None:
    results = pool.run(titan_work.run, world_size, which, dtype)
    assert sum(result is not None for result in results) == world_size
    assert [fault for result in results for fault in result or []] == []


@pytest.mark.clients
@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("torchtitan", "spmd_types", "tyro")),
    reason="needs torchtitan with tyro, in the versions that `make test-clients` installs",
)
def test_the_override_has_agmm_serve(pool: RankPool) -> None:
    assert pool.run(titan_work.override) == [[]] * 5


def _trained(
    folder: Path, config: str, ranks: int, *options: str
) -> tuple[list[float], list[dict[str, object]]]:
    """The loss and the norm of the gradients at every step of torchtitan's own trainer, which are
    the same on all ranks, and what agmm has computed on each rank."""
    command = ["-m", "titan_on_cpu", "--module", "titan_tiny", "--config", config]
    command += ["--dump_folder", str(folder), *options]
    done = torchrun.run(folder, [f"--nproc-per-node={ranks}"], command, timeout_s=500)
    assert done.returncode == 0, done.stderr
    texts = {(folder / f"steps.{rank}").read_text() for rank in range(ranks)}
    (steps,) = ([json.loads(line) for line in text.splitlines()] for text in texts)
    served = [json.loads((folder / f"served.{rank}").read_text()) for rank in range(ranks)]
    return [value for step in steps for value in step], served


@pytest.fixture(scope="module")
def unsharded(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """What the trainer finds on one rank, in four steps that change the model."""
    found, _ = _trained(tmp_path_factory.mktemp("whole"), "eager", 1)
    assert len(set(found)) == len(found) == 8
    return found


@pytest.mark.clients
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    not all(
        importlib.util.find_spec(name)
        for name in ("torchtitan", "spmd_types", "tyro", "datasets", "torchdata", "tensorboard")
    ),
    reason="needs torchtitan and what its trainer requires, which `make test-clients` installs",
)
@pytest.mark.parametrize(
    ("config", "ranks", "ops"),
    [
        ("eager", 2, ["all_gather_matmul", "matmul_reduce_scatter"]),
        ("eager", 4, ["all_gather_matmul", "matmul_reduce_scatter"]),
        ("compiled", 2, ["all_gather_matmul"]),  # torch's pass finds no scatter in its graphs
    ],
)
def test_the_trainer_of_torchtitan(
    tmp_path: Path, unsharded: list[float], config: str, ranks: int, ops: list[str]
) -> None:
    degree = f"--parallelism.tensor_parallel_degree={ranks}"
    by_agmm = "--override.imports=agmm.integrations.torchtitan.by_agmm"
    found, served = _trained(tmp_path, config, ranks, degree, by_agmm)
    assert served == [{"by agmm": ops, "left": []}] * ranks
    assert found == pytest.approx(unsharded, rel=1e-4)


@pytest.mark.parametrize(
    ("version", "found"), [("0.2.2", "version 0.2.2"), ("0.4.0", "version 0.4.0"), (None, "none")]
)
def test_a_torchtitan_that_was_not_tried_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str | None, found: str
) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    monkeypatch.delitem(sys.modules, "agmm.integrations.torchtitan", raising=False)
    with pytest.raises(InvalidArgument, match=rf"^torchtitan: found {found}, wanted 0\.3"):
        importlib.import_module("agmm.integrations.torchtitan")
