"""`benchmarks/fit_alone.py` on times that are made up by other constants."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from agmm.planning import cost_model
from agmm.planning.cost_model import Constants, gpu_constants
from agmm.planning.problems import KernelConfig, Problem
from agmm.planning.tables import gpu_name
from benchmarks import fit_alone
from benchmarks.descent import FITTED, changed
from benchmarks.fit_alone import ROOF, Fit, Sweep, predicted_us, regret

LARGE = "128x256x64_2x1_cooperative"
PINGPONG = "128x128x64_1x1_pingpong"
SPLITS = "128x112x64_2x1_cooperative"
SWAPPED = "64x128x64_1x2_cooperative_swapped"
IN_CLUSTER = "96x128x64_1x1_cooperative_swapped"
KERNELS = {
    LARGE: (1,),
    PINGPONG: (1,),
    SPLITS: (1, 2, 3),
    SWAPPED: (1,),
    IN_CLUSTER: (1, 2, 4, 8),
}
START = cost_model.constants("nvidia-h100-80gb-hbm3")


@pytest.fixture(autouse=True)
def _forgets() -> Iterator[None]:
    yield
    gpu_constants.give(FITTED, START)


def _sweep(
    truth: Constants, twist: Callable[[Problem, KernelConfig], float] = lambda *_: 1.0
) -> Sweep:
    """Times as ``truth`` predicts them, times a factor."""
    gpu_constants.give(FITTED, truth)
    shapes = []
    for m in (64, 200, 1000):
        for n, k in ((3584, 4096), (1280, 8192), (7168, 2048)):
            for b_layout in ("column", "row"):
                problem = Problem(m, n, k, b_layout=b_layout, gpu=FITTED)
                us = {ROOF: cost_model.matmul_us(problem)}
                for name, parts in KERNELS.items():
                    kernel = KernelConfig.parse(name)
                    for splits in parts:
                        config = replace(kernel, splits=splits)
                        factor = twist(problem, kernel)
                        us[config.name] = factor * predicted_us(problem, kernel, splits)
                shapes.append({"M": m, "N": n, "K": k, "b_layout": b_layout, "us": us})
    return {"gpu": "NVIDIA H100 80GB HBM3", "sm_count": 132, "shapes": shapes}


def _lost(found: Sweep) -> float:
    """The loss of the choice by the constants given now, over all rows: the mean of logarithms."""
    rows = regret(found)
    lost = sum(row.products * math.log(row.chosen / row.best) for row in rows)
    return lost / sum(row.products for row in rows)


def _fit(found: Sweep, rounds: int) -> Constants:
    fit = Fit(found, START)
    for _ in range(rounds):
        fit.round()
    return fit.finish()


def _lost_before_and_after(found: Sweep) -> tuple[float, float]:
    gpu_constants.give(FITTED, START)
    before = _lost(found)
    _fit(found, 2)
    return before, _lost(found)


def _scaled(name: str, kernel: str, factor: float, usual: float | None = None) -> Constants:
    values = getattr(START, name)
    return changed(START, name, {**values, kernel: values.get(kernel, usual) * factor})


@pytest.mark.parametrize(
    "truth",
    [
        pytest.param(_scaled("tflops_per_sm", LARGE, 0.7), id="slower"),
        pytest.param(_scaled("tflops_per_sm", PINGPONG, 1.6), id="faster", marks=pytest.mark.slow),
        pytest.param(_scaled("tile_overhead_us", IN_CLUSTER, 5.0), id="overhead"),
        pytest.param(
            _scaled("row_major_factor", IN_CLUSTER, 1.8, 1.0),
            id="row-major B",
            marks=pytest.mark.slow,
        ),
        pytest.param(replace(START, split_us=8.0), id="splits"),
        pytest.param(
            replace(START, cluster_split_us=(20.0, 0.6)),
            id="splits in a cluster, once",
            marks=pytest.mark.slow,
        ),
        pytest.param(replace(START, cluster_split_us=(4.7, 4.0)), id="splits in a cluster, each"),
    ],
)
@pytest.mark.slow
def test_what_differs_from_the_constants_is_found_out(truth: Constants) -> None:
    before, after = _lost_before_and_after(_sweep(truth))
    assert before > 0.01
    assert after < 0.25 * before


def test_constants_that_are_right_stay() -> None:
    found = _sweep(START)
    fitted = _fit(found, 1)
    assert _lost(found) == pytest.approx(0.0, abs=1e-6)
    for name, rate in START.tflops_per_sm.items():
        assert fitted.tflops_per_sm[name] == pytest.approx(rate, rel=0.1), name


def test_it_is_the_choice_that_counts_not_the_errors() -> None:
    """A kernel that takes longer with few rows than any constants say: what the others lose by it
    counts, however well it is predicted elsewhere."""

    def twist(problem: Problem, kernel: KernelConfig) -> float:
        return 1.6 if kernel.kernel == IN_CLUSTER and problem.m <= 200 else 1.0

    before, after = _lost_before_and_after(_sweep(START, twist))
    assert before > 0.1
    assert after < 0.2 * before


def test_the_constants_returned_are_those_given() -> None:
    found = _sweep(_scaled("tile_overhead_us", PINGPONG, 2.0))
    fit = Fit(found, START)
    fit.round()
    assert cost_model.constants(FITTED) == fit.now
    again = Fit(found, fit.now)
    assert fit.loss() == pytest.approx(again.loss(), rel=1e-9)  # nothing of a try is left in it
    gpu_constants.give(FITTED, fit.now)
    assert fit.finish() == cost_model.constants(FITTED)


def test_the_library_is_fitted_too() -> None:
    found = _sweep(replace(START, matmul_tflops=600.0))
    assert _fit(found, 1).matmul_tflops == pytest.approx(600.0, rel=0.03)


def test_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {**_sweep(_scaled("tflops_per_sm", LARGE, 0.8)), "gpu": "NVIDIA H800", "sm_count": 114}
    sweep = tmp_path / "sweep.json"
    sweep.write_text(json.dumps(found))
    tables = SimpleNamespace(__file__=str(tmp_path / "t.py"), gpu_name=gpu_name)
    monkeypatch.setattr(fit_alone, "tables", tables)
    fit_alone.main(rounds=1, from_path=sweep, writes=True)
    written = json.loads((tmp_path / "nvidia-h800.json").read_text())
    assert written.keys() == asdict(START).keys()
    assert written["gpu"] == "nvidia-h800"
    assert written["sm_count"] == 114
    assert all(factor > 1.03 for factor in written["row_major_factor"].values())
    assert "18 products on one NVIDIA H800. All else as before: " in written["sources"]
