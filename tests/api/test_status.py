"""`agmm.status` and `agmm.record` on CPU ranks: which calls are noted, and what the file has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import status_work
import torch
import torch.distributed as dist

import agmm
from agmm.errors import InvalidArgument, forget_warnings
from agmm.ops import kept, recordings, seen
from agmm.runtime import nan_check
from agmm.testing.ranks import RankPool


@pytest.fixture
def pool(rank_pools: Callable[..., RankPool]) -> RankPool:
    return rank_pools(2)


def test_a_recording_has_the_calls_of_its_time_alone(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "calls.json"
    pool.run(status_work.recorded, str(path), 3)
    found = recordings.read(path)
    ranks = pool.world_size
    assert [
        (kind.op, kind.m, kind.n, kind.k, kind.b_layout, kind.return_A, kind.by, count)
        for kind, count in ((call.kind, call.count) for call in found)
    ] == [
        ("all_gather_matmul", 4 * ranks, (16,), 24, "column", False, "kernel", 3),
        ("all_gather_matmul", 4 * ranks, (16, 8), 24, "column", True, "kernel", 3),
        ("all_gather_matmul", 4 * ranks, (16,), 24, "column", False, "library", 3),
        ("matmul_reduce_scatter", 8, (16,), 24, "row", False, "kernel", 3),
        ("matmul_all_reduce", 7, (16,), 24, "row", False, "kernel", 3),
    ]
    assert {(call.gpu, call.kind.dtype, call.kind.world_size) for call in found} == {
        ("cpu", "float32", ranks)
    }
    assert [file.name for file in tmp_path.iterdir()] == ["calls.json"]


def test_every_rank_writes_a_file_where_the_name_asks(pool: RankPool, tmp_path: Path) -> None:
    pool.run(status_work.recorded, str(tmp_path / "calls-{rank}.json"), 1)
    files = [tmp_path / f"calls-{rank}.json" for rank in range(pool.world_size)]
    assert sorted(tmp_path.iterdir()) == files
    assert len({file.read_text() for file in files}) == 1


def test_a_recording_that_is_left_by_an_error_is_not_written(
    pool: RankPool, tmp_path: Path
) -> None:
    pool.run(status_work.raised_in_recording, str(tmp_path / "calls.json"))
    assert not list(tmp_path.iterdir())


def test_scales_are_told_apart(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "calls.json"
    pool.run(status_work.fp8_recorded, str(path))
    found = [
        (call.planned_op, call.kind.scaling, call.kind.dtype) for call in recordings.read(path)
    ]
    assert found == [
        ("all_gather_matmul", "rowwise", "float8_e4m3fn"),
        ("all_gather_matmul", "tensorwise", "float8_e4m3fn"),
    ]


def test_status_says_who_and_why_and_counts_no_kept_calls(pool: RankPool) -> None:
    of_rank_0 = pool.run(status_work.status_of, 7 * pool.world_size * 4)[0]
    reason = "scatter_dim: 1, the fused path wants another than the last"
    assert of_rank_0 == [
        ("all_gather_matmul", (16,), "agmm's CPU backend", None, 1, True),
        (
            *("matmul_reduce_scatter", (24,), "the group's backend and the library"),
            *(reason, 1, False),
        ),
    ]


def test_no_two_rows_of_the_status_look_alike(pool: RankPool) -> None:
    lines = pool.run(status_work.rows_of, 11 * pool.world_size * 4)[0]
    assert len(lines) == len(set(lines)) == 6
    for said in ("  row  ", "  column  ", "+ A returned", "+ silu", " tensorwise ", " rowwise "):
        assert any(said in line for line in lines), said


def test_kept_calls_are_wrapped_only_while_somebody_counts(group: str, tmp_path: Path) -> None:
    assert not nan_check.active
    world = dist.group.WORLD
    assert world is not None

    def call() -> int:
        return 1

    kind = _noted_kind(tmp_path)
    with agmm.record(tmp_path / "calls.json"):
        kept.keep(world, "kind", seen.noting(call, kind))
        assert kept.kept_calls[world]["kind"] is not call
        assert kept.call_kept(world, "kind") == kept.call_kept(world, "kind") == 1
    assert kept.call_kept(world, "kind") is None
    assert [one.count for one in recordings.read(tmp_path / "calls.json")] == [2]
    kept.keep(world, "kind", seen.noting(call, kind))
    assert kept.kept_calls[world]["kind"] is call
    kept.forget(world, "kind")


def _noted_kind(tmp_path: Path) -> Any:
    """The kind of a call that was just made."""
    with seen.counting() as made:
        agmm.all_gather_matmul(torch.randn(5, 11), torch.randn(11, 3))
    return next(iter(made.of))


def _record(path: Path, operands: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with agmm.record(path):
        for A, B in operands:
            agmm.all_gather_matmul(A, B)


def test_a_recording_has_room_for_kinds_whatever_came_before(
    group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_warnings()
    monkeypatch.setattr(seen, "MAX_KINDS", 2)
    path = tmp_path / "calls.json"
    operands = [(torch.randn(rows, 13), torch.randn(13, 3)) for rows in range(1, 6)]
    for A, B in operands[:3]:
        agmm.all_gather_matmul(A, B)
    _record(path, operands[3:4])
    assert [call.kind.m for call in recordings.read(path)] == [4]
    with pytest.warns(
        UserWarning, match="more than 2 kinds of calls, 3 calls of further ones are left"
    ):
        _record(path, operands)
    assert [call.kind.m for call in recordings.read(path)] == [1, 2]
    # Calls that no recording has take no room in it.
    with agmm.record(path):
        for tokens in (1, 2, 3):
            ids = torch.zeros(tokens, 1, dtype=torch.int32)
            agmm.all_gather_grouped_matmul(torch.ones(tokens, 4), torch.ones(1, 4, 4), ids)
        agmm.all_gather_matmul(*operands[4])
    assert [call.kind.m for call in recordings.read(path)] == [5]


SCRIPT = """
import logging, torch, torch.distributed as dist, agmm
logging.basicConfig(level=logging.INFO)
dist.init_process_group("gloo")
for _ in range(2):
    agmm.all_gather_matmul(torch.randn(4, 8), torch.randn(8, 16))
dist.destroy_process_group()
"""


def test_variables_write_at_the_end_of_the_process(tmp_path: Path) -> None:
    calls, report = tmp_path / "calls.json", tmp_path / "report.txt"
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        env={
            **os.environ,
            "AGMM_RECORD": str(calls),
            "AGMM_REPORT": str(report),
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert [(call.kind.m, call.count) for call in recordings.read(calls)] == [(4, 2)]
    assert report.read_text().splitlines()[1].split()[:6] == [
        *("all_gather_matmul", "4", "x", "16", "x", "8"),
    ]
    assert "INFO:agmm:calls of 1 kinds so far: 2 by agmm's CPU backend" in done.stderr


CALL = {
    "op": "all_gather_matmul",
    "m": 8,
    "n": [16],
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "found no recording in"),
        (json.dumps({"kind": "agmm calls", "version": 2, "calls": []}), "found version 2 in"),
        (json.dumps({"kind": "agmm calls", "version": 1}), "found no list of calls in"),
        ({"k": None}, "found k None in call 0 of"),
        ({"n": []}, "found n [] in call 0 of"),
        ({"op": "matmul"}, "found op 'matmul' in call 0 of"),
        ({"dtype": 3}, "found dtype 3 in call 0 of"),
    ],
)
def test_files_that_are_no_recordings_are_named(
    tmp_path: Path, text: str | dict[str, Any], message: str
) -> None:
    path = tmp_path / "calls.json"
    if isinstance(text, dict):
        text = json.dumps({"kind": "agmm calls", "version": 1, "calls": [CALL | text]})
    path.write_text(text)
    with pytest.raises(InvalidArgument) as raised:
        recordings.read(path)
    assert message in str(raised.value) and str(path) in str(raised.value)


def test_a_call_without_a_field_is_named(tmp_path: Path) -> None:
    path = tmp_path / "calls.json"
    call = {name: value for name, value in CALL.items() if name not in ("k", "by")}
    path.write_text(json.dumps({"kind": "agmm calls", "version": 1, "calls": [call]}))
    with pytest.raises(InvalidArgument, match="found no k, by in call 0"):
        recordings.read(path)


def test_a_folder_that_is_missing_is_refused_at_once(tmp_path: Path) -> None:
    recording = agmm.record(tmp_path / "none" / "calls.json")
    with pytest.raises(InvalidArgument, match="a folder that is there"), recording:
        pytest.fail("the context began")
