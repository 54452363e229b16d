"""Reports read from files: what is refused, and what is chosen from one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agmm.bench import reports
from agmm.bench.options import Options
from agmm.bench.ways import TIMED_OPS
from agmm.errors import InvalidArgument
from agmm.planning.problems import ALL_GATHER_MATMUL
from agmm.planning.shapes import Shape

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
WAYS = RESULTS / "nvidia-h100-x4.json"
OF_MEMORY = {"read_us", "gb_per_s"}
"""What a report of decode steps has beside its ways: the time to read the weights, and the rate."""
ONE_WAY = '{"M": 1, "N": 1, "K": 1, "ways": {"a": {}}}'


def test_own_reports_are_read(tmp_path: Path) -> None:
    written = reports.new_report(Options("cpu", 2).resolved())
    reports.write_json(written, tmp_path / "r.json")
    assert reports.read(tmp_path / "r.json")["settings"] == written["settings"]
    assert reports.where(written).startswith("2 ranks on ")


def _committed() -> list[Path]:
    return sorted(RESULTS.rglob("*.json"))


def _id(path: Path) -> str:
    return str(path.relative_to(RESULTS))


@pytest.mark.parametrize("path", _committed(), ids=_id)
def test_committed_reports_have_one_schema(path: Path) -> None:
    report = json.loads(path.read_text())
    assert report.keys() == {"schema", "date", "commit", "machine", "settings", "shapes"}
    assert report["schema"] == reports.SCHEMA
    assert {"device_name", "torch", "cuda"} <= report["machine"].keys()
    assert {"device", "world_size", "dtype", "statistic"} <= report["settings"].keys()
    assert report["shapes"]
    for entry in report["shapes"]:
        sizes = entry.keys() - {"ways", "sm_clock_mhz", "b_layout", "experts", *OF_MEMORY}
        assert sizes in ({"M", "N", "K"}, {"tokens", "pass"}, {"tokens"}, {"bytes"}, {"rows"})
        assert entry["ways"]
        for way in entry["ways"].values():
            assert way["median_us"] is None or way["median_us"] > 0
            assert not way.get("wrong", False)


@pytest.mark.parametrize("path", _committed(), ids=_id)
def test_committed_reports_are_read_or_refused_by_their_op(path: Path) -> None:
    found = json.loads(path.read_text())
    if found["settings"].get("op", ALL_GATHER_MATMUL) in TIMED_OPS:
        assert len(reports.read(path)["shapes"]) == len(found["shapes"])
        return
    with pytest.raises(InvalidArgument, match=f"found op '{found['settings']['op']}' in"):
        reports.read(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "found no list of shapes"),
        ('{"shapes": []}', "found schema None"),
        ('{"shapes": [], "schema": 2}', "found schema 2"),
        ('{"shapes": [], "schema": 1, "machine": {}}', "found no settings"),
        (
            '{"shapes": [{"M": 1}], "schema": 1, "machine": {}, "settings": {}}',
            "found no M, N, K and ways in shape 0",
        ),
        (
            f'{{"shapes": [{ONE_WAY}], "schema": 1, "machine": {{}}, "settings": {{}}}}',
            "found no median_us of 'a'",
        ),
    ],
)
def test_what_is_no_report_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=words):
        reports.read(path)
    with pytest.raises(InvalidArgument, match="cannot be read"):
        reports.read(tmp_path)


def test_shapes_and_ways_are_chosen() -> None:
    report = reports.read(WAYS)
    shape = Shape(4096, 3584, 8192)
    found = reports.narrow(report, [shape], ["agmm"])
    assert [reports.shape_of(entry) for entry in found["shapes"]] == [shape]
    assert list(found["shapes"][0]["ways"]) == ["roof", "agmm"]
    assert len(report["shapes"]) > 1
    with pytest.raises(InvalidArgument, match="shape: found 1x1x1, wanted one of 512x3584x8192"):
        reports.narrow(report, [Shape(1, 1, 1)], None)
    with pytest.raises(InvalidArgument, match="way: found 'agm', wanted one of roof, unfused"):
        reports.narrow(report, None, ["agm"])
    assert reports.narrow(report, [Shape(1, 1, 1)], ["agm"], missing_ok=True)["shapes"] == []


def test_titles_of_unknown_ways_are_their_names() -> None:
    assert reports.title_of("roof") == "matmul alone (roof)"
    assert reports.title_of("cublasmp") == "cublasmp"
