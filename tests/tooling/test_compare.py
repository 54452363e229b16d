"""Two reports side by side: what is flagged, what is listed, what is warned of."""

from __future__ import annotations

import copy
import io
import random
import statistics
from typing import Any

import pytest
from rich.console import Console

from agmm.bench.compare import Verdict, compare, noise_us
from agmm.bench.ratios import ratios
from agmm.cli.report_tables import render_comparison
from agmm.errors import InvalidArgument
from agmm.planning.problems import ALL_GATHER_MATMUL
from agmm.planning.shapes import Shape

SHAPE = Shape(16, 8, 32)


def _way(us: float | None, samples: int = 20, seed: int = 0) -> dict[str, Any]:
    draw = random.Random(f"{us} {seed}")
    taken = [] if us is None else [draw.gauss(us, us / 100) for _ in range(samples)]
    return {
        "median_us": statistics.median(taken) if taken else us,
        "samples_us": taken,
        "reason": None if us is not None else "rank 0: it failed",
        "wrong": False,
    }


def test_ratios_over_all_shapes() -> None:
    """A geometric mean, and the worst shape; graphs are compared with graphs."""
    entries = []
    for m, (own, other) in ((16, (10.0, 20.0)), (32, (40.0, 20.0)), (64, (20.0, 20.0))):
        times = {"portable": own, "torch-decomposed": other, "roof": 1.0, "unfused": None}
        times |= {"portable-graph": own, "torch-decomposed-graph": other / 2}
        ways = {name: {"median_us": us} for name, us in times.items()}
        entries.append({"M": m, "N": 8, "K": 32, "ways": ways})
    eager, captured = ratios({"shapes": entries}, ALL_GATHER_MATMUL)
    assert (eager.way, eager.other, eager.shapes) == ("portable", "torch-decomposed", 3)
    assert (round(eager.mean, 6), eager.worst) == (1.0, 2.0)
    assert eager.worst_shape == Shape(32, 8, 32).title
    assert (captured.way, captured.other) == ("portable-graph", "torch-decomposed-graph")
    assert (round(captured.mean, 6), captured.worst) == (2.0, 4.0)


def _report(**ways: dict[str, Any]) -> dict[str, Any]:
    named = {name.replace("_", "-"): way for name, way in ways.items()}
    return {
        "machine": {"device_name": "NVIDIA H200", "torch": "2.11.0"},
        "settings": {"world_size": 4, "dtype": "bfloat16", "environment": {}},
        "shapes": [{"M": 16, "N": 8, "K": 32, "ways": named}],
    }


def _text(old: dict[str, Any], new: dict[str, Any]) -> str:
    out = io.StringIO()
    render_comparison(compare(old, new), Console(file=out, width=160))
    return out.getvalue()


def test_reports_of_different_ops_are_not_compared() -> None:
    old, new = _report(roof=_way(100)), _report(roof=_way(100))
    new["settings"]["op"] = "matmul_reduce_scatter"
    found = "found one of all_gather_matmul beside one of matmul_reduce_scatter, wanted the same"
    with pytest.raises(InvalidArgument, match=found):
        compare(old, new)
    old["settings"]["op"] = "matmul_reduce_scatter"
    assert "matmul, then reduce-scatter" in _text(_report_of(old), _report_of(new))


def _report_of(report: dict[str, Any]) -> dict[str, Any]:
    report["shapes"][0]["ways"]["unfused"] = _way(200)
    return report


def test_only_changes_beyond_the_noise_are_flagged() -> None:
    old = _report(roof=_way(100), unfused=_way(200), agmm=_way(120), agmm_A=_way(150))
    new = _report(
        roof=_way(100, seed=1), unfused=_way(240), agmm=_way(110), agmm_A=_way(150, seed=1)
    )
    found = compare(old, new)
    assert {c.way: c.verdict for c in found.changes} == {
        "roof": Verdict.same,
        "unfused": Verdict.slower,
        "agmm": Verdict.faster,
        "agmm-A": Verdict.same,
    }
    assert [c.way for c in found.beyond_noise] == ["unfused", "agmm"]
    assert found.changes[1].ratio == pytest.approx(1.2, rel=0.01)
    text = _text(old, new)
    assert "SLOWER" in text and "FASTER" in text
    assert "4 times in both: 1 faster, 1 slower, 2 within noise." in text
    assert "not the same conditions" not in text


def test_a_slower_card_is_seen_in_roofs() -> None:
    found = compare(
        _report(roof=_way(100), agmm=_way(120)), _report(roof=_way(110), agmm=_way(132))
    )
    assert [c.verdict for c in found.changes] == 2 * [Verdict.slower]
    assert found.changes[1].ratio_in_roofs == pytest.approx(1.0, rel=0.02)
    alone = compare(_report(agmm=_way(120)), _report(agmm=_way(132)))
    assert alone.changes[0].ratio_in_roofs is None


def test_one_slow_sample_is_no_noise() -> None:
    samples = _way(100)["samples_us"]
    assert noise_us([*samples[1:], 1e6], samples) == pytest.approx(
        noise_us(samples, samples), rel=0.3
    )


def test_few_samples_say_nothing() -> None:
    found = compare(_report(agmm=_way(100, 4)), _report(agmm=_way(200, 20)))
    assert [c.verdict for c in found.changes] == [Verdict.unknown]
    assert "noise unknown" in _text(_report(agmm=_way(100, 4)), _report(agmm=_way(200)))


def test_what_one_report_lacks_is_listed() -> None:
    old = _report(agmm=_way(100), unfused=_way(200), torch_native=_way(150))
    new = _report(agmm=_way(100), unfused=_way(None), agmm_graph=_way(90))
    new["shapes"].append({"M": 32, "N": 8, "K": 32, "ways": {"agmm": _way(100)}})
    text = _text(old, new)
    assert "only old: 16x8x32: torch-native, unfused (no time now: rank 0: it failed)" in text
    assert "only new: 32x8x32: all ways" in text
    assert "only new: 16x8x32: agmm-graph" in text
    assert "only old: 16x8x32: w0, " in _text(_report(**{f"w{i}": _way(1) for i in range(20)}), new)
    assert " and 8 more" in _text(_report(**{f"w{i}": _way(1) for i in range(20)}), new)


def test_other_conditions_are_warned_of_in_one_line() -> None:
    old, new = _report(agmm=_way(100)), _report(agmm=_way(100))
    new = copy.deepcopy(new)
    new["machine"].update(device_name="NVIDIA H100", torch="2.13.0")
    new["settings"].update(world_size=2, environment={"NCCL_NVLS_ENABLE": "0"})
    (line,) = [line for line in _text(old, new).splitlines() if "not the same" in line]
    assert line == (
        "not the same conditions: machine NVIDIA H200 then, NVIDIA H100 now; torch 2.11.0 then, "
        "2.13.0 now; world size 4 then, 2 now; NCCL_NVLS_ENABLE=unset then, 0 now"
    )


def test_nothing_in_common_is_said() -> None:
    other = _report(agmm=_way(100))
    other["shapes"][0]["M"] = 64
    assert "no shape and way in common" in _text(_report(agmm=_way(100)), other)
