"""The pictures of a report: what they show, and what they say they cannot."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from agmm.bench import plots, reports
from agmm.bench.figures import PlotUnavailable
from agmm.bench.way import ROOF
from agmm.errors import InvalidArgument

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "benchmarks" / "results"


@pytest.fixture(scope="module")
def report() -> reports.Report:
    pytest.importorskip("matplotlib")
    return reports.read(RESULTS / "nvidia-h100-x4.json")


def _small(**times: float | None) -> dict[str, Any]:
    ways = {name.replace("_", "-"): {"median_us": us} for name, us in times.items()}
    return {
        "machine": {},
        "settings": {},
        "shapes": [{"M": 64, "N": 8, "K": 32, "ways": ways}],
    }


def test_both_pictures_are_written(report: reports.Report, tmp_path: Path) -> None:
    written, left_out = plots.write(report, tmp_path / "new")
    assert [path.name for path in written] == [
        "time_over_roof-all_gather_matmul-nvidia-h100-80gb-hbm3-x4.png",
        "speedup-all_gather_matmul-nvidia-h100-80gb-hbm3-x4.png",
    ]
    assert left_out == []
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


@pytest.mark.slow
def test_one_command_draws_the_pictures_of_the_documentation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but timelines, which are recorded on GPUs; and a page shows each of them."""
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(REPOSITORY))
    drawn = {path.name for path in importlib.import_module("benchmarks.pictures").draw(tmp_path)}
    images = {path.name for path in (REPOSITORY / "docs" / "images").iterdir()}
    assert drawn == {name for name in images if not name.startswith("timeline-")}
    pages = "".join(page.read_text() for page in (REPOSITORY / "docs").rglob("*.md"))
    assert [name for name in images if f"images/{name})" not in pages] == []


def test_time_over_roof_by_m(report: reports.Report) -> None:
    panels = plots.time_over_roof(report).axes
    assert [axes.get_title(loc="left") for axes in panels] == [
        "N = 3584 per rank, K = 8192",
        "",  # bars of the shapes that have one M
    ]
    assert [label.get_text() for label in panels[1].get_xticklabels()] == [
        "M = 2048\nN = 2112\nK = 7168",
        "M = 4096\nN = 7168\nK = 8192",
        "M = 8192\nN = 8192\nK = 4096",
    ]
    axes = panels[0]
    assert axes.get_xscale() == "log"
    ticks = [label.get_text() for label in axes.get_xticklabels()]
    rows = [entry["M"] for entry in report["shapes"] if entry["N"] == 3584]
    assert ticks == [str(m) for m in rows]
    drawn: list[Any] = axes.get_lines()
    lines = [line for line in drawn if len(line.get_xdata()) == len(rows)]
    ways = report["shapes"][0]["ways"]
    assert len(lines) == len(ways) - 1  # all but the roof
    ratio = ways["agmm"]["median_us"] / ways["roof"]["median_us"]
    (ours,) = (line for line in lines if line.get_ydata()[0] == pytest.approx(ratio))
    assert ours.get_linewidth() == max(line.get_linewidth() for line in lines)
    assert ours.get_color() not in {line.get_color() for line in lines[:8]}


def test_speedups_are_over_the_baseline() -> None:
    pytest.importorskip("matplotlib")
    figure = plots.speedup(_small(roof=50.0, unfused=100.0, agmm=80.0, agmm_graph=125.0))
    (axes,) = figure.axes
    patches: list[Any] = list(axes.patches)
    bars = [(round(bar.get_y(), 3), round(bar.get_height(), 3)) for bar in patches]
    assert bars == [(1.0, 0.25), (1.0, -0.2)]
    assert [text.get_text() for text in axes.texts] == ["1.25", "roof ↑ 2.00"]
    assert 1.25 < axes.get_ylim()[1] < 2.0


def test_a_report_of_scatters_says_so() -> None:
    pytest.importorskip("matplotlib")
    found = _small(roof=50.0, unfused=100.0, torch_fused=90.0, agmm_fused=70.0, agmm=60.0)
    found["settings"]["op"] = "matmul_reduce_scatter"
    found["shapes"].append({**found["shapes"][0], "M": 128})
    lines, bars = plots.time_over_roof(found), plots.speedup(found)
    (axes,) = lines.axes
    assert axes.get_title(loc="left") == "N = 8, K = 32 per rank"
    assert axes.get_xlabel() == "M, rows before the scatter"
    assert bars.get_suptitle().startswith(
        "matmul_reduce_scatter: speed-up over matmul, then reduce-scatter ("
    )
    labels = [text.get_text() for text in lines.legends[0].get_texts()]
    assert {"torch fused", "matmul, then reduce-scatter", "agmm, never unfused"} <= {*labels}


def test_ways_without_a_time_and_unknown_ways_are_no_trouble(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ours = {f"way{i}": 60.0 + i for i in range(6)}
    found = _small(roof=50.0, unfused=100.0, agmm=None, agmm_A=500.0, **ours)
    written, left_out = plots.write(found, tmp_path)
    assert (len(written), left_out) == (2, [])


@pytest.mark.parametrize(
    ("times", "missing"),
    [({"agmm": 2.0, "unfused": 3.0}, ROOF), ({"roof": 1.0, "agmm": 2.0}, plots.BASELINE)],
)
def test_a_picture_without_its_base_is_left_out(
    times: dict[str, float], missing: str, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    written, (line,) = plots.write(_small(**times), tmp_path)
    assert len(written) == 1
    assert f"found no shape with times of {missing!r}" in line


def test_a_roof_alone_has_no_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(InvalidArgument, match="found no shape with times of 'roof' and another"):
        plots.time_over_roof(_small(roof=1.0))


def test_missing_matplotlib_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlotUnavailable, match=r"pip install 'agmm\[plot\]'"):
        plots.write(_small(roof=1.0), tmp_path)
