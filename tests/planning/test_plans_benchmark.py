"""`benchmarks/plans.py`: what it draws, how it judges, and a run of it on CPU ranks."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import pytest

from agmm.planning.problems import ALL_GATHER_MATMUL
from benchmarks import plans
from benchmarks.plans import CELLS, Cell, drawn, figures, read


def of(count: int, seed: int = 0, cell: Cell = CELLS[0]) -> list[Any]:
    return list(itertools.islice(drawn(cell, seed, 2), count))


def test_shapes_are_drawn_by_seed_and_op() -> None:
    shapes = of(60)
    assert shapes == of(60)
    assert shapes != of(60, plans.HELD_SEEDS)
    assert all(shape.M % 2 == 0 and shape.N % 8 == 0 for shape in shapes)
    assert sum(shape.M % 16 != 0 for shape in shapes) > 5, "odd rows are among them"
    assert len({(shape.N, shape.K) for shape in of(60, cell=CELLS[2])} - {s[1:] for s in shapes})


def entry(plan_us: float, best_us: float, least_us: float) -> dict[str, Any]:
    return {"plan_us": plan_us, "best_us": best_us, "least_us": least_us}


def test_figures_are_those_of_plans_beside_the_best() -> None:
    found = figures([*(entry(10.0, 10.0, 8.0) for _ in range(99)), entry(20.0, 10.0, 10.0)])
    assert found is not None
    assert found.shapes == 100
    assert found.mean == pytest.approx(2**0.01)
    assert (found.percentile_97, found.largest) == (1.0, 2.0)
    assert found.mean_of_least == pytest.approx(1.25**0.99 * 2**0.01)
    assert figures([]) is None


@pytest.mark.slow
def test_a_run_keeps_each_shape_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plans, "CPU_SCALE", 256)
    path = tmp_path / "plans.jsonl"
    given = {"device": "cpu", "tp": 2, "limit_s": 60.0, "shape_s": 1.0, "seed": 0, "verbose": True}
    only = f"{ALL_GATHER_MATMUL}, bf16"
    arguments = argparse.Namespace(**given, count=2, only=only, json=path)
    entries = plans.run(arguments)
    assert [each["set"] for each in entries] == ["fit", "held", "fit", "held"]
    for each in entries:
        assert each["plan"] in each["us"] and each["best"] in each["us"]
        assert 0 < each["least_us"] <= each["best_us"]
        assert (each["gpu"], each["world_size"], each["failures"]) == ("cpu", 2, [])
    with path.open("a", encoding="utf-8") as file:
        file.write('{"op": "all_gat')
    assert read(path) == entries
    assert plans.run(arguments) == [], "all of them are in the file"
    capsys.readouterr()
    plans.show(entries)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 + 2 * len(entries)
    assert lines[1].startswith("all_gather_matmul, bf16, fit")
