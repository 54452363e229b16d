"""The files of tuned plans: what is written is read, and nothing that goes wrong loses rows."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tune_work

from agmm.errors import forget_warnings
from agmm.planning import cost_model, tables
from agmm.planning.cost_model import default_kernels
from agmm.planning.legality import why_illegal
from agmm.planning.planner import Planner
from agmm.planning.plans import UNFUSED, Plan, Row
from agmm.planning.problems import (
    MATMUL_REDUCE_SCATTER,
    MAX_CHUNKS_PER_SHARD,
    MAX_SIZE,
    KernelConfig,
    Problem,
)
from agmm.planning.tables import Key, NewerSchema, OtherTable, TableError
from agmm.testing.ranks import RankPool

GPU = "nvidia-h200"
KERNEL = KernelConfig.parse("128x128x64_1x1_pingpong/swizzle4/along_n")
PROBLEM = Problem(4096, 3584, 8192, world_size=4)
KEY = Key.of(PROBLEM)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AGMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("AGMM_CACHE", raising=False)
    forget_warnings()
    return tmp_path / "cache"


def row(m: int, us: float = 10.0) -> Row:
    return Row(m, Plan("push", KERNEL), us, 9.5, None, "0.1.0")


def saved_ms() -> list[int]:
    table = tables.user(GPU, 4)
    return [] if table is None else [found.m for found in table.rows(PROBLEM)]


def test_what_is_saved_is_read(folder: Path) -> None:
    other = Key("all_gather_matmul", "float16", "row", 8, 16, True)
    rows = [
        (KEY, row(4096)),
        (KEY, Row(64, UNFUSED, 3.25, None, 3.25, "0.1.0")),
        (other, Row(6, Plan("pull", KERNEL, 2), 1.5)),
    ]
    path = tables.save(GPU, 4, rows)
    assert path == folder / "nvidia-h200-x4.json"
    table = tables.user(GPU, 4)
    assert table is not None
    assert table.name == str(path)
    assert table.rows(PROBLEM) == [rows[1][1], rows[0][1]]
    assert table.by_key[other] == {6: rows[2][1]}
    assert tables.user(GPU, 2) is None
    assert Planner(lambda op, name: [KERNEL], [table]).choose(PROBLEM).row == rows[0][1]


def test_rows_are_found_by_everything_but_m() -> None:
    tables.save(GPU, 4, [(KEY, row(4096))])
    table = tables.user(GPU, 4)
    assert table is not None
    assert len(table.rows(replace(PROBLEM, m=8, sm_count=7))) == 1
    scatter = {"op": "matmul_reduce_scatter"}
    for other in ({"n": 8}, {"k": 8}, {"format": "float16"}, {"b_layout": "row"}, scatter):
        assert not table.rows(replace(PROBLEM, **other))
    assert not table.rows(replace(PROBLEM, return_A=True))


def test_a_later_row_replaces_an_earlier_one_and_no_other() -> None:
    tables.save(GPU, 4, [(KEY, row(1, 5.0)), (KEY, row(2, 5.0))])
    tables.save(GPU, 4, [(KEY, row(2, 6.0)), (KEY, row(3, 6.0))])
    table = tables.user(GPU, 4)
    assert table is not None
    assert [(r.m, r.us) for r in table.rows(PROBLEM)] == [(1, 5.0), (2, 6.0), (3, 6.0)]


def test_gpu_names() -> None:
    assert tables.gpu_name("NVIDIA H200") == "nvidia-h200"
    assert tables.gpu_name("NVIDIA H100 80GB HBM3 ") == "nvidia-h100-80gb-hbm3"


def test_known_gpus() -> None:
    assert tables.known_gpus() <= set(cost_model.known_gpus())
    tables.save("a-gpu-x2", 16, [(KEY, row(1))])
    assert "a-gpu-x2" in tables.known_gpus()


def test_packaged_files_are_sound() -> None:
    for gpu in cost_model.known_gpus():
        constants = cost_model.constants(gpu)
        assert constants.gpu == gpu
        assert all(KernelConfig.parse(name).kernel == name for name in constants.tflops_per_sm)
    for path in Path(tables.__file__).parent.glob("*-x*.json"):
        assert tables.read(path).by_key


def test_packaged_plans_are_legal() -> None:
    paths = list(Path(tables.__file__).parent.glob("*-x*.json"))
    assert paths
    for path in paths:
        gpu, _, world_size = path.stem.rpartition("-x")
        for key, rows in tables.read(path).by_key.items():
            for row in rows.values():
                problem = Problem(m=row.m, **key._asdict(), world_size=int(world_size), gpu=gpu)
                kernels = default_kernels(key.op, key.format)
                assert why_illegal(problem, row.plan, kernels) is None, (key, row)


# --- the folder ---


def test_off_switch(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    tables.save(GPU, 4, [(KEY, row(1))])
    monkeypatch.setenv("AGMM_CACHE", "off")
    assert tables.user(GPU, 4) is None
    with pytest.raises(TableError, match=r"^AGMM_CACHE: found 'off', wanted 'on'"):
        tables.save(GPU, 4, [(KEY, row(2))])
    monkeypatch.setenv("AGMM_CACHE", "on")
    assert saved_ms() == [1]


def test_bad_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGMM_CACHE", "0")
    with pytest.warns(UserWarning, match="AGMM_CACHE: found '0', wanted 'on' or 'off'"):
        assert tables.user(GPU, 4) is None


def test_default_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AGMM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tables.user_folder() == tmp_path / "agmm"


@pytest.mark.parametrize("kind", ["below a file", "in /proc"])
def test_a_folder_that_cannot_be_written(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    unwritable = {"below a file": tmp_path / "file" / "cache", "in /proc": Path("/proc/agmm")}
    monkeypatch.setenv("AGMM_CACHE_DIR", str(unwritable[kind]))
    with pytest.raises(TableError, match=r"nvidia-h200-x4\.json: cannot be written \("):
        tables.save(GPU, 4, [(KEY, row(1))])


def test_a_folder_that_may_only_be_read(folder: Path) -> None:
    path = tables.save(GPU, 4, [(KEY, row(1))])
    path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
    folder.chmod(0o500)
    try:
        try:
            (folder / "probe").touch()
        except OSError:
            with pytest.raises(TableError, match=r"cannot be written \("):
                tables.save(GPU, 4, [(KEY, row(2))])
        else:
            pytest.skip("this user may write everywhere")
        assert saved_ms() == [1]
    finally:
        folder.chmod(0o700)


@pytest.mark.slow
def test_a_full_disk_loses_no_rows(pool: RankPool, folder: Path) -> None:
    path = tables.save(GPU, 4, [(KEY, row(1))])
    before = path.read_bytes()
    message = pool.run(tune_work.save_on_a_full_disk, str(folder), GPU, 4, KEY)[0]
    assert "cannot be written (File too large)" in message
    assert path.read_bytes() == before
    assert not list(folder.glob("*.new"))
    tables.save(GPU, 4, [(KEY, row(2))])
    assert saved_ms() == [1, 2]


# --- several processes ---


def test_processes_that_save_at_once_lose_no_rows(pool: RankPool, folder: Path) -> None:
    count, seen = 15, 0

    def looks() -> bool:
        nonlocal seen
        now = len(saved_ms())  # a reader never finds half a file
        assert now >= seen
        seen = now
        return False

    pool.submit(tune_work.save_rows, str(folder), GPU, 4, KEY, count)
    pool.collect(is_stuck=looks)
    assert saved_ms() == list(range(1, 1 + 5 * count))


# --- files that are no tables ---


KEY_NAMES = ["op", "format", "b_layout", "n", "k", "return_A"]
NO_FORMAT = {"format": "absent", "world_size": "absent"}
"""The fields that rows of old schemas did not have."""


def _text(schema: int = tables.SCHEMA, **changes: Any) -> str:
    entry = json.loads(tables.to_text(GPU, 4, {KEY: {1: row(1)}}))["rows"][0]
    plan = {**entry["plan"], **changes.pop("plan", {})}
    entry = {name: v for name, v in {**entry, "plan": plan, **changes}.items() if v != "absent"}
    head = {"schema": schema, "gpu": GPU, "world_size": 4}
    return json.dumps({**head, "rows": [entry]})


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"schema": 1}',
        '{"schema": "1", "rows": []}',
        '{"schema": 0, "rows": []}',
        '{"schema": 1, "rows": []}',
        '{"schema": 2, "rows": []}',
        '{"schema": 3, "rows": []}',
        '{"schema": 4, "rows": []}',
        '{"schema": 5, "rows": []}',
        '{"schema": true, "rows": []}',
        f'{{"schema": 1, "gpu": "{GPU}", "world_size": 4}}',
        f'{{"schema": 1, "gpu": "{GPU}", "world_size": 4, "rows": [3]}}',
        _text(us=-1.0),
        _text(us="fast"),
        _text(us="absent"),
        _text(m=0),
        _text(m=1.5),
        _text(n="absent"),
        _text(return_A=0),
        _text(op=1),
        _text(op="absent"),
        _text(format="absent"),
        _text(world_size=2),
        _text(world_size="absent"),
        _text(schema=3),
        _text(schema=3, dtype="bfloat16"),
        _text(roof_us=0),
        _text(plan={"kernel": "128x128"}),
        _text(plan={"chunks_per_shard": 0}),
        _text(plan={"transport": None}),
        b"\xff\xfe",
        pytest.param("[" * 200_000, id="nested lists"),
        pytest.param('{"rows": ' * 200_000, id="nested objects"),
        _text(us=math.inf),
        _text(us=math.nan),
        pytest.param(_text(us=10**400), id="us of 401 digits"),
        pytest.param(_text(us=0).replace('"us": 0', '"us": ' + "9" * 5000), id="us of 5000 digits"),
        _text(us=1e300),
        _text(roof_us=math.nan),
        _text(unfused_us=math.inf),
        _text(us=True),
        _text(m=2**31),
        _text(m=10**30),
        _text(n=2**31),
        _text(n=0),
        _text(k=-8),
        _text(plan={"chunks_per_shard": 2**31}),
        _text(plan={"chunks_per_shard": 1025}),
        _text(plan={"kernel": "128x128x99999999999_1x1_pingpong"}),
        _text(plan={"kernel": "128x128x64_1x1_pingpong/split99999999999"}),
        pytest.param(_text(plan={"kernel": "9" * 5000 + "x128x64_1x1_pingpong"}), id="long kernel"),
    ],
)
def test_a_corrupt_file_is_reported_once_ignored_and_kept_aside(
    content: str | bytes, folder: Path
) -> None:
    folder.mkdir()
    path = folder / tables.file_name(GPU, 4)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.warns(UserWarning, match="ignores a table of plans: .*found a corrupt table"):
        assert tables.user(GPU, 4) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tables.user(GPU, 4) is None
    with pytest.warns(UserWarning, match=r"keeps the corrupt .* as nvidia-h200-x4\.json\.corrupt"):
        tables.save(GPU, 4, [(KEY, row(2))])
    assert saved_ms() == [2]
    kept = path.with_name(f"{path.name}.corrupt").read_bytes()
    assert kept == (content if isinstance(content, bytes) else content.encode())


def test_the_text_that_the_corrupt_ones_are_made_of_is_sound(folder: Path) -> None:
    folder.mkdir()
    (folder / tables.file_name(GPU, 4)).write_text(_text())
    assert saved_ms() == [1]


def test_a_table_from_before_there_were_several_ops_is_of_the_first(folder: Path) -> None:
    folder.mkdir()
    path = folder / tables.file_name(GPU, 4)
    path.write_text(_text(schema=1, op="absent", dtype="bfloat16", **NO_FORMAT))
    before = tables.read(path).by_key
    assert before == {KEY: {1: row(1)}} and KEY.op == "all_gather_matmul"
    scattered = Key.of(replace(PROBLEM, op="matmul_reduce_scatter"))
    tables.save(GPU, 4, [(scattered, Row(8, UNFUSED, 4.0))])
    entries = json.loads(path.read_text())
    assert entries["schema"] == tables.SCHEMA
    assert [entry["op"] for entry in entries["rows"]] == [KEY.op, scattered.op]
    assert tables.read(path).by_key == {**before, scattered: {8: Row(8, UNFUSED, 4.0)}}


def test_a_table_from_before_there_were_rows_of_fp8_has_none(folder: Path) -> None:
    folder.mkdir()
    path = folder / tables.file_name(GPU, 4)
    path.write_text(_text(schema=2, dtype="bfloat16", **NO_FORMAT))
    assert tables.read(path).by_key == {KEY: {1: row(1)}} and KEY.format == "bfloat16"


@pytest.mark.parametrize(
    ("dtype", "accumulation", "wanted"),
    [
        ("bfloat16", "", "bfloat16"),
        ("float8_e4m3fn_float8_e4m3fn", "fast", "float8_e4m3fn_float8_e4m3fn fast"),
    ],
)
def test_a_table_from_before_there_were_formats_has_them(
    folder: Path, dtype: str, accumulation: str, wanted: str
) -> None:
    folder.mkdir()
    path = folder / tables.file_name(GPU, 4)
    path.write_text(_text(schema=3, dtype=dtype, accumulation=accumulation, **NO_FORMAT))
    before = {KEY._replace(format=wanted): {1: row(1)}}
    assert tables.read(path).by_key == before
    tables.save(GPU, 4, [(KEY, row(2))])
    assert tables.read(path).by_key == before | {KEY: {**before.get(KEY, {}), 2: row(2)}}
    (entry, *_) = json.loads(path.read_text())["rows"]
    assert list(entry)[:8] == [*KEY_NAMES[:3], "world_size", "m", *KEY_NAMES[3:]]
    assert (entry["format"], entry["world_size"]) in ((wanted, 4), ("bfloat16", 4))


@pytest.mark.parametrize(("gpu", "world_size"), [(GPU, 2), ("nvidia-h100", 4)])
def test_a_table_for_something_else_is_ignored(folder: Path, gpu: str, world_size: int) -> None:
    folder.mkdir()
    text = tables.to_text(gpu, world_size, {KEY: {1: row(1)}})
    (folder / tables.file_name(GPU, 4)).write_text(text)
    said = f"found a table for {gpu} and {world_size} ranks, wanted one for {GPU} and 4"
    with pytest.warns(UserWarning, match=said):
        assert tables.user(GPU, 4) is None
    with pytest.raises(OtherTable, match=said):
        tables.save(GPU, 4, [(KEY, row(2))])
    assert (folder / tables.file_name(GPU, 4)).read_text() == text


def test_a_file_of_a_newer_schema_is_left_alone(folder: Path) -> None:
    folder.mkdir()
    path = folder / tables.file_name(GPU, 4)
    content = json.dumps({"schema": tables.SCHEMA + 1, "rows": {"in": "another way"}})
    path.write_text(content)
    with pytest.warns(UserWarning, match="found schema 6, wanted at most 5"):
        assert tables.user(GPU, 4) is None
    with pytest.raises(NewerSchema, match="found schema 6, wanted at most 5"):
        tables.save(GPU, 4, [(KEY, row(1))])
    assert path.read_text() == content


def test_a_folder_in_the_files_place_is_reported(folder: Path) -> None:
    (folder / tables.file_name(GPU, 4)).mkdir(parents=True)
    with pytest.warns(UserWarning, match="cannot be read"):
        assert tables.user(GPU, 4) is None
    with pytest.raises(TableError, match="cannot be read"):
        tables.save(GPU, 4, [(KEY, row(1))])


@pytest.mark.parametrize("op", ["all_gather_matmul", MATMUL_REDUCE_SCATTER])
@pytest.mark.parametrize("m", [1, 2048, 4096, MAX_SIZE])
@pytest.mark.parametrize(
    "plan",
    [
        *(
            Plan(transport, KERNEL)
            for transport in ("", "teleport", "sm9999x999999999", "sm16x128+9999", "sm16x128h9999")
        ),
        *(
            Plan(transport, KernelConfig.parse(name))
            for transport in ("push", "sm64x64h1")
            for name in (
                "9999x9999x9999_9999x9999_cooperative",
                "1x1x1_3x3_pingpong_swapped/split9999",
                "64x128x64_1x1_cooperative_swapped/split9",
                "128x128x64_1x1_pingpong_timed/split9999",
            )
        ),
        Plan("push", KERNEL, MAX_CHUNKS_PER_SHARD),
        Plan("push"),
    ],
    ids=lambda plan: plan.name if isinstance(plan, Plan) else None,
)
@pytest.mark.filterwarnings("ignore:agmm passes over rows")
def test_a_row_that_no_build_can_run_stops_no_call(op: str, m: int, plan: Plan) -> None:
    """Every row is passed over whose plan no build can run, as long as the file is a table."""
    built = default_kernels(op)
    for us in (0.01, 1e9):
        tables.save(GPU, 4, [(KEY._replace(op=op), Row(m, plan, us, None, None, "0.1.0"))])
        table = tables.user(GPU, 4)
        assert table is not None and table.by_key
        planner = Planner(lambda op, name: built, [table])
        for rows in (64, 2048, 4096):
            problem = replace(PROBLEM, m=rows, op=op)
            chosen = planner.plan(problem)
            assert why_illegal(problem, chosen, built) is None
