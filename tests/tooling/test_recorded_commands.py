"""The commands with a file of recorded calls, on CPU ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import agmm

from agmm.planning import tables
from agmm.planning.problems import CPU

CALL = {
    "op": "all_gather_matmul",
    "m": 16,
    "n": [8],
    "k": 24,
    "dtype": "float32",
    "b_layout": "column",
    "return_A": False,
    "scaling": None,
    "dim": 0,
    "products": 1,
    "world_size": 2,
    "gpu": "cpu",
    "by": "kernel",
    "reason": None,
    "count": 3,
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AGMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("AGMM_CACHE", raising=False)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


def written(path: Path, *calls: dict[str, Any]) -> str:
    body = {"kind": "agmm calls", "version": 1, "calls": [CALL | call for call in calls]}
    path.write_text(json.dumps(body))
    return str(path)


@pytest.mark.slow
def test_tune_takes_each_call_as_it_was_made(tmp_path: Path, folder: Path) -> None:
    file = written(
        tmp_path / "calls.json",
        {"n": [8, 16], "return_A": True},
        {"op": "matmul_reduce_scatter", "b_layout": "row"},
        {"op": "matmul_all_reduce"},
        {"world_size": 4},
    )
    done = agmm("tune", "--device", "cpu", "--tp", "2", "--file", file)
    assert done.returncode == 0, done.stderr
    assert "left out matmul_all_reduce 16x8x24 float32: device: found cpu with" in done.stderr
    assert (
        "left out all_gather_matmul 16x8x24 float32: call: found 4 ranks, this run has 2"
        in done.stderr
    )
    found = {
        (key.op, key.n, key.k, key.return_A, key.b_layout)
        for key in tables.read(folder / tables.file_name(CPU, 2)).by_key
    }
    assert found == {
        ("all_gather_matmul", 24, 24, True, "column"),
        ("all_gather_matmul", 8, 24, True, "column"),
        ("all_gather_matmul", 16, 24, True, "column"),
        ("matmul_reduce_scatter", 8, 24, False, "row"),
    }


@pytest.mark.slow
def test_bench_measures_each_op(tmp_path: Path) -> None:
    file = written(tmp_path / "calls.json", {}, {"op": "matmul_reduce_scatter"})
    arguments = ["bench", "--device", "cpu", "--samples", "1", "--ways", "agmm", "--file", file]
    done = agmm(*arguments)
    assert done.returncode == 0, done.stderr
    assert "matmul_reduce_scatter, 2 ranks" in done.stdout
    report = tmp_path / "report.json"
    refused = agmm(*arguments, "--json", str(report))
    assert refused.returncode == 2 and not report.exists()
    assert "found calls of 2 ops and kinds of operands, wanted one for --json" in refused.stderr
    one = agmm(*arguments, "--json", str(report), "--op", "matmul_reduce_scatter")
    assert one.returncode == 0, one.stderr
    assert json.loads(report.read_text())["settings"]["op"] == "matmul_reduce_scatter"


@pytest.mark.filterwarnings("ignore:agmm passes over rows")  # of a build without these kernels
def test_explain_says_each_call(tmp_path: Path) -> None:
    file = written(
        tmp_path / "calls.json",
        {"gpu": "nvidia-h200", "dtype": "bfloat16", "m": 4096, "n": [3584], "k": 8192},
        {"b_layout": "packed"},
        {"by": "library", "reason": "K is odd"},
        {"gpu": "nvidia-h200", "dtype": "float8_e4m3fn", "m": 64, "n": [2056, 2056], "k": 2048},
        {"gpu": "nvidia-h200", "dtype": "float8_e4m3fn", "m": 32768, "n": [2056], "k": 1024},
    )
    done = agmm("explain", "--file", file)
    assert done.returncode == 0, done.stderr
    for text in (
        "3 × all_gather_matmul 4096x3584x8192 bfloat16, served by: kernel\n",
        "2 ranks on nvidia-h200",
        "not explained: call: agmm has one way for weights of 4 bits",
        "not by agmm's kernel: K is odd",
        "agmm's gather, then agmm's matmul; ",
        "fused, since torch._scaled_mm cannot compute it: B: found 2056 columns",
    ):
        assert text in done.stdout


@pytest.mark.parametrize("command", [["tune", "--device", "cpu"], ["bench"], ["explain"]])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"kind": "agmm calls", "version": 2, "calls": []}, "found version 2 in"),
        ({"kind": "agmm calls", "version": 1, "calls": []}, "found no such calls in"),
        ({"kind": "agmm calls", "version": 1, "calls": [{}]}, "found no op, m, n, k, "),
    ],
)
def test_other_files_are_refused_before_anything_is_done(
    tmp_path: Path, folder: Path, command: list[str], body: dict[str, Any], message: str
) -> None:
    path = tmp_path / "calls.json"
    path.write_text(json.dumps(body))
    done = agmm(*command, "--file", str(path))
    assert done.returncode == 2 and message in done.stderr
    assert not folder.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tune", "--device", "cpu"], "found none with calls of 2, 4 ranks"),
        (["tune", "--device", "cpu", "--return-a"], "--return-a: found with recorded calls"),
        (["tune", "--device", "cpu", "--shapes", "8x8x8"], "found 2 ways to name them"),
        (["bench", "--device", "cpu"], "found none with calls of 2, 4 ranks"),
        (["explain", "--m", "8"], "found it with --m, --n or --k"),
        (["tune", "--device", "cpu", "--b-layout", "column"], "--b-layout: found with recorded"),
        (
            ["explain", "--op", "matmul_reduce_scatter", "--dtype", "bf16"],
            "--op, --dtype: found with recorded calls, wanted none: each call says it",
        ),
        (
            ["explain", "--scaling", "block", "--return-a", "--b-layout", "column"],
            "--scaling, --return-a, --b-layout: found with recorded calls, wanted none",
        ),
        (["explain", "--tp", "3"], "found no such calls"),
    ],
)
def test_options_that_do_not_go_with_the_file_are_named(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    file = written(tmp_path / "calls.json", {}, {"world_size": 4})
    done = agmm(*arguments, "--file", file)
    assert done.returncode == 2 and message in done.stderr


def test_a_call_with_its_activation_in_the_kernel(tmp_path: Path) -> None:
    gated = {"m": 4096, "n": [3584, 3584], "k": 8192, "dtype": "bfloat16", "gpu": "nvidia-h200"}
    file = written(tmp_path / "calls.json", gated | {"activation": "silu_mul", "products": 2})
    done = agmm("explain", "--file", file)
    assert done.returncode == 0, done.stderr
    assert "gate in the kernel" in done.stdout
    assert "measured: not yet (AGMM_LEARN=on does it)" in done.stdout
    done = agmm("tune", "--device", "cpu", "--tp", "2", "--file", file)
    assert "AGMM_LEARN=on alone tries plans of kernels with an activation" in done.stderr
