"""The benchmark of a decode step, on CPU ranks."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner, Result

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL = (
    "--device cpu --world-size 2 --hidden 64 --heads 4 --ffn 64 --rows 1,3 --layers 2 --samples 2"
)


@pytest.fixture
def decode(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(REPOSITORY))
    return importlib.import_module("benchmarks.decode")


def _run(decode: Any, options: str) -> Result:
    program = Typer()
    program.command()(decode.main)
    return CliRunner().invoke(program, options.split())


def test_report_and_picture(decode: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "decode.json", tmp_path / "decode.png"
    done = _run(decode, f"{SMALL} --json {path} --plot {picture}")
    assert done.exit_code == 0, done.output
    report = json.loads(path.read_text())
    assert report["settings"]["attention"] == "left out"
    assert [entry["rows"] for entry in report["shapes"]] == [1, 3]
    for entry in report["shapes"]:
        assert list(entry["ways"]) == ["backend", "agmm-parts", "agmm"]
        for way in entry["ways"].values():
            assert way["reason"] is None and way["relative_error"] < 1e-5
            assert way["median_us"] > 0 and len(way["samples_us"]) == 2
            assert way["rate_share"] > 0 and entry["read_us"] > 0
    assert "attention is left out" in done.stdout and "weights alone" in done.stdout
    assert picture.stat().st_size > 10_000


def test_it_stops_in_time(decode: Any) -> None:
    done = _run(decode, f"{SMALL} --limit-s 0")
    assert done.exit_code == 0 and "stopped after 0 of 2, at 0 s" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--ways one-shot", "ways: found 'one-shot', wanted of backend, agmm-parts, agmm"),
        ("--model deepseek-v3", "model: found 'deepseek-v3', wanted one with grouped attention"),
        ("--heads 3", "tp: found 2, wanted a divisor of 3 heads"),
    ],
)
def test_what_cannot_run_is_named(decode: Any, options: str, message: str) -> None:
    done = _run(decode, f"{SMALL} {options}")
    assert done.exit_code == 1 and message in str(done.exception or done.output) + done.output
