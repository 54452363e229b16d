"""The times of the library's matmul by its tiles, and their fit to times that are made up."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agmm.planning import cost_model, tables
from agmm.planning.cost_model import collectives, gpu_constants
from agmm.planning.cost_model.library_matmul import is_badly_chosen, tiled_us
from agmm.planning.plans import GATHERED
from agmm.planning.predictions import predict_us
from agmm.planning.problems import Problem
from benchmarks import fit_library
from benchmarks.descent import FITTED

GPU = "nvidia-h200"
FP8 = "float8_e4m3fn_float8_e4m3fn fast"


@pytest.fixture(autouse=True)
def _forgets() -> Iterator[None]:
    before = cost_model.constants(GPU)
    yield
    gpu_constants.give(GPU, before)


@pytest.mark.parametrize("name", ["bfloat16", FP8])
def test_products_take_longer_the_larger_they_are(name: str) -> None:
    c = cost_model.constants_for(Problem(64, 64, 64, format=name, world_size=2))
    assert len(c.library_tiles) == fit_library.KEPT_TILES
    small, large = (tiled_us(c, size, 2.0) for size in ((256, 2048, 2048), (4096, 8192, 8192)))
    assert 0 < small < large
    assert tiled_us(c, (4096, 8192, 16384), 2.0) > 1.8 * large


def test_products_that_the_library_gets_wrong_are_expected_to_take_longer() -> None:
    """Measured between two H200: 70 µs, and 84 with 384 rows of a larger product."""
    wrong = Problem(448, 9472, 3584, world_size=2)
    factor = cost_model.constants_for(wrong).library["badly_chosen_factor"]
    near = [cost_model.matmul_us(replace(wrong, m=m)) for m in (440, 456)]
    assert factor > 1.1 and cost_model.matmul_us(wrong) > 1.1 * max(near)
    small = replace(wrong, n=2048)  # whose weight the L2 cache holds
    assert cost_model.matmul_us(small) < 1.05 * cost_model.matmul_us(replace(small, m=456))
    assert [m for m in range(64, 1024, 64) if is_badly_chosen(m)] == [320, 448]


def test_gathers_of_fp8_take_the_time_of_a_matmul_without_tiles() -> None:
    """The library multiplies nothing there."""
    few = Problem(64, 3584, 8192, format=FP8, world_size=2)
    gathered = predict_us(few, GATHERED)
    nbytes = cost_model.gathered_bytes(few)
    gather_us = collectives.by_kernel_us("all_gather", nbytes, few.world_size)
    assert gathered == pytest.approx(gather_us + cost_model.roof_us(few))
    assert cost_model.roof_us(few) != cost_model.matmul_us(few)


def test_other_numbers_of_ranks_have_no_tiles() -> None:
    for problem in (Problem(512, 8192, 8192), Problem(512, 8192, 8192, world_size=4)):
        assert not cost_model.constants_for(problem).library
        assert cost_model.matmul_us(problem) == cost_model.roof_us(problem)


def entries(truth: Problem, count: int) -> list[dict[str, Any]]:
    """What runs measure where the packaged constants are right, as lines of a file."""
    draw, found = random.Random(3), []
    for i in range(count):
        m, n, k = draw.randint(64, 4096), *draw.choices((1024, 3584, 8192, 18432), k=2)
        us = cost_model.matmul_us(replace(truth, m=m, n=n, k=k))
        found.append(
            {"op": "all_gather_matmul", "format": "bf16", "M": m, "N": n, "K": k}
            | {"plan": "gather", "best_us": us, "roof_us": us, "us": {"gather": us}}
            | {"set": "held" if i % 2 else "fit", "gpu": GPU, "world_size": 2}
        )
    return found


def test_shapes_that_were_measured_twice_are_held_back_together() -> None:
    once = entries(Problem(64, 64, 64, world_size=2), 8)
    again = [{**entry, "roof_us": 3 * entry["roof_us"], "set": "held"} for entry in once[:2]]
    ((cell, found),) = fit_library.roofs([*once, *again]).items()
    assert cell == (GPU, 2, "16 bits")
    assert [roof.is_held for roof in found] == [True, True, *[False, True] * 3]
    assert found[0].us == pytest.approx(2 * once[0]["roof_us"])
    assert {roof.problem.gpu for roof in found} == {FITTED}


def test_a_fit_finds_other_constants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Times are a fifth shorter than those by the packaged constants."""
    measured = entries(Problem(64, 64, 64, world_size=2), 60)
    for entry in measured:
        entry["roof_us"] *= 0.8
    path = tmp_path / "plans.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in measured))
    written = tmp_path / f"{GPU}.json"
    written.write_text((Path(tables.__file__).parent / written.name).read_text())
    monkeypatch.setattr(tables, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr("sys.argv", ["fit_library", str(path), "--write"])
    fit_library.main()
    assert "held, tiles" in capsys.readouterr().out
    found = json.loads(written.read_text())["of_ranks"]["2"]["16 bits"]
    assert len(found["library_tiles"]) == fit_library.KEPT_TILES
    assert found["library"]["gb_per_s"] > 3800 and found["choice_margins"]
    problem = Problem(1000, 8192, 8192, world_size=2)
    before = cost_model.matmul_us(problem)
    changed = {name: found[name] for name in ("library", "library_tiles")}
    base = gpu_constants.constants_of_kind(GPU, "16 bits", 2)
    gpu_constants.give(GPU, replace(base, of_ranks={}, **changed))
    assert cost_model.matmul_us(problem) == pytest.approx(0.8 * before, rel=0.05)
