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
    folder: Path, ranks: int, *options: str
) -> tuple[list[float], list[dict[str, object]]]:
    """The loss and the norm of the gradients at every step of torchtitan's own trainer, which are
    the same on all ranks, and what agmm has computed on each rank."""
    folder.mkdir()
    command = ["-m", "titan_on_cpu", "--module", "titan_tiny", "--config", "tiny"]
    command += ["--dump_folder", str(folder), *options]
    done = torchrun.run(folder, [f"--nproc-per-node={ranks}"], command)
    assert done.returncode == 0, done.stderr
    texts = {(folder / f"steps.{rank}").read_text() for rank in range(ranks)}
    (steps,) = ([json.loads(line) for line in text.splitlines()] for text in texts)
    served = [json.loads((folder / f"served.{rank}").read_text()) for rank in range(ranks)]
    return [value for step in steps for value in step], served


@pytest.mark.clients
@pytest.mark.skipif(
    not all(
        importlib.util.find_spec(name)
        for name in ("torchtitan", "spmd_types", "tyro", "datasets", "torchdata", "tensorboard")
    ),
    reason="needs torchtitan and what its trainer requires, which `make test-clients` installs",
)
@pytest.mark.slow
def test_the_trainer_of_torchtitan(tmp_path: Path) -> None:
    wanted, _ = _trained(tmp_path / "whole", 1)
    assert len(set(wanted)) == len(wanted) == 8  # of four steps, which the model learns from
    by_agmm = {"by agmm": ["all_gather_matmul", "matmul_reduce_scatter"], "left": []}
    for ranks in (2, 4):
        found, served = _trained(
            tmp_path / str(ranks),
            ranks,
            f"--parallelism.tensor_parallel_degree={ranks}",
            "--override.imports=agmm.integrations.torchtitan.by_agmm",
        )
        assert served == [by_agmm] * ranks
        assert found == pytest.approx(wanted, rel=1e-4)


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
