"""The protocol's parts in one process: several `_core.CpuWorkspace` objects that act as ranks."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import quick
import torch

from agmm import _core
from agmm.runtime import cpu_async_input

TAG = 7
SHM = Path("/dev/shm")

# The core alone, which needs no torch: that takes seconds to import.
CORE = f"""
import ctypes, importlib.util, os, sys, time
spec = importlib.util.spec_from_file_location("agmm._core", {_core.__file__!r})
_core = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_core)
"""

CONNECTED_PAIR = (
    CORE
    + """
pair = [_core.CpuWorkspace(r, 2, 4096, 1, float(os.environ.get("AGMM_TIMEOUT_S", 60)))
        for r in (0, 1)]
for one in pair:
    one.connect([other.name for other in pair])
for one in pair:
    one.take_memory()
shard = ctypes.create_string_buffer(16)
def push(one, slot=0):
    one.push(slot, ctypes.addressof(shard), 16, 16, 7)
"""
)


@contextmanager
def connected(
    world_size: int, slot_bytes: int = 4096, chunks_per_shard: int = 1, timeout_s: float = 30
) -> Iterator[list[_core.CpuWorkspace]]:
    ranks = [
        _core.CpuWorkspace(rank, world_size, slot_bytes, chunks_per_shard, timeout_s)
        for rank in range(world_size)
    ]
    try:
        for rank in ranks:
            rank.connect([other.name for other in ranks])
        for rank in ranks:
            rank.take_memory()
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


def words(address: int, count: int) -> list[int]:
    return list((ctypes.c_uint32 * count).from_address(address))


def read(workspace: _core.CpuWorkspace, slot: int, offset: int, size: int) -> bytes:
    return ctypes.string_at(workspace.slot_ptr(slot) + offset, size)


def run_script(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_push_delivers_data_signals_and_times() -> None:
    with connected(3, chunks_per_shard=2) as ranks:
        shards = [torch.full((5,), 10 + rank, dtype=torch.uint8) for rank in range(3)]
        before = time.monotonic_ns()
        for workspace, shard in zip(ranks, shards, strict=True):
            workspace.push(1, shard.data_ptr(), 5, 3, TAG)
        for rank, workspace in enumerate(ranks):
            for chunk in range(6):
                if chunk // 2 != rank:
                    workspace.wait_chunk(1, chunk, TAG)
            after = time.monotonic_ns()
            for source in range(3):
                if source != rank:
                    assert read(workspace, 1, 5 * source, 5) == bytes([10 + source] * 5)
            mine = [TAG if chunk // 2 != rank else 0 for chunk in range(6)]
            assert words(workspace.signals_ptr(1), 6) == mine
            assert words(workspace.signals_ptr(0), 6) == [0] * 6
            for chunk, arrived in enumerate(workspace.arrival_ns(1)):
                assert arrived == 0 if chunk // 2 == rank else before <= arrived <= after
        for workspace in ranks:
            workspace.wait_pushed()
            workspace.release(1)
            assert words(workspace.signals_ptr(1), 6) == [0] * 6


def test_fewer_pieces_than_chunks_still_signal_every_chunk() -> None:
    with connected(2, chunks_per_shard=4) as (first, second):
        shard = torch.arange(2, dtype=torch.uint8)
        first.push(0, shard.data_ptr(), 2, 1, TAG)
        for chunk in range(4):
            second.wait_chunk(0, chunk, TAG)
        assert read(second, 0, 0, 2) == bytes([0, 1])


def test_sender_waits_for_the_credit_before_it_overwrites() -> None:
    with connected(2) as (first, second):
        old, new = torch.full((8,), 1, dtype=torch.uint8), torch.full((8,), 2, dtype=torch.uint8)
        first.push(0, old.data_ptr(), 8, 8, TAG)
        first.push(0, new.data_ptr(), 8, 8, TAG + 1)
        second.wait_chunk(0, 0, TAG)
        time.sleep(0.1)
        assert read(second, 0, 0, 8) == bytes([1] * 8)
        second.release(0)
        second.wait_chunk(0, 0, TAG + 1)
        assert read(second, 0, 0, 8) == bytes([2] * 8)
        first.wait_pushed()


def test_wait_pushed_waits_for_a_delayed_push() -> None:
    with connected(2, chunks_per_shard=4) as (first, second):
        first.set_push_delay_us(20000)
        shard = torch.arange(4, dtype=torch.uint8)
        first.push(0, shard.data_ptr(), 4, 1, TAG)
        first.wait_pushed()
        assert words(second.signals_ptr(0), 4) == [TAG] * 4


def send(
    workspace: _core.CpuWorkspace, owner: int, index: int, piece: torch.Tensor, offset: int
) -> None:
    size = piece.numel()
    workspace.send(1, owner, index, piece.data_ptr(), size, 5, offset, TAG)


def test_send_delivers_each_owner_its_own_part() -> None:
    with connected(3, chunks_per_shard=2) as ranks:
        kept = []
        for rank, workspace in enumerate(ranks):
            workspace.take_credits(1)
            for owner in {0, 1, 2} - {rank}:
                part = torch.full((5,), 10 * rank + owner, dtype=torch.uint8)
                kept.append(part)
                send(workspace, owner, 0, part[:3], 0)
                send(workspace, owner, 1, part[3:], 3)
        for rank, workspace in enumerate(ranks):
            for chunk in range(6):
                if chunk // 2 != rank:
                    workspace.wait_chunk(1, chunk, TAG)
            sources = [(rank + 1) % 3, (rank + 2) % 3]
            wanted = [value for source in sources for value in [10 * source + rank] * 5]
            assert read(workspace, 1, 0, 10) == bytes(wanted)
            mine = [TAG if chunk // 2 != rank else 0 for chunk in range(6)]
            assert words(workspace.signals_ptr(1), 6) == mine
        for workspace in ranks:
            workspace.wait_pushed()
            workspace.release(1)


def test_no_piece_is_sent_before_all_credits_are_there() -> None:
    with connected(3) as (first, second, third):
        old, new = torch.full((5,), 1, dtype=torch.uint8), torch.full((5,), 2, dtype=torch.uint8)
        for piece in (old, new):
            first.take_credits(1)
            send(first, 1, 0, piece, 0)
            send(first, 2, 0, piece, 0)
        second.wait_chunk(1, 0, TAG)
        third.wait_chunk(1, 0, TAG)
        second.release(1)
        time.sleep(0.1)  # rank 2 still reads, so that rank 1 gets nothing new either
        assert read(second, 1, 5, 5) == read(third, 1, 0, 5) == bytes([1] * 5)
        third.release(1)
        second.wait_chunk(1, 0, TAG)
        third.wait_chunk(1, 0, TAG)
        assert read(second, 1, 5, 5) == read(third, 1, 0, 5) == bytes([2] * 5)
        first.wait_pushed()


def test_close_drops_pieces_that_wait_for_credits() -> None:
    with connected(2) as (first, second):
        piece = torch.full((5,), 3, dtype=torch.uint8)
        for _ in range(2):
            first.take_credits(1)
            send(first, 1, 0, piece, 0)
        second.wait_chunk(1, 0, TAG)
        started = time.monotonic()
        first.close()
        assert time.monotonic() - started < 2
        with pytest.raises(RuntimeError, match="send: the workspace is closed"):
            send(first, 1, 0, piece, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slot": 2}, "slot: found 2, wanted 0 or 1"),
        ({"owner": 0}, "owner: found 0, wanted another rank of 3"),
        ({"owner": 3}, "owner: found 3, wanted another rank of 3"),
        ({"index": 2}, "index: found 2, wanted 0 <= index < 2"),
        (
            {"part_bytes": 33},
            r"part_bytes: found 33, wanted 0 to slot_bytes / \(world_size - 1\) = 32",
        ),
        ({"offset": 9}, "offset: found 9, wanted 0 to part_bytes = 8"),
        ({"piece_bytes": 5}, "piece_bytes: found 5, wanted 0 to 4"),
        ({"tag": 0}, "tag: found 0, wanted a nonzero value"),
    ],
)
def test_bad_send_arguments(change: dict[str, int], message: str) -> None:
    piece = torch.zeros(64, dtype=torch.uint8)
    call = {"slot": 0, "owner": 1, "index": 0, "piece_ptr": piece.data_ptr(), "piece_bytes": 4}
    call |= {"part_bytes": 8, "offset": 4, "tag": TAG, **change}
    with (
        connected(3, slot_bytes=64, chunks_per_shard=2) as (first, *_),
        pytest.raises(ValueError, match=message),
    ):
        first.send(**call)


def test_waits_let_other_threads_run() -> None:
    with connected(2) as (first, second):
        shard = torch.zeros(1, dtype=torch.uint8)
        timer = threading.Timer(0.2, lambda: first.push(0, shard.data_ptr(), 1, 1, TAG))
        timer.start()
        second.wait_chunk(0, 0, TAG)  # would never end if the thread could not run
        timer.join()


def test_waits_of_other_threads_end_before_a_close() -> None:
    with connected(2) as (first, second):
        shard = torch.ones(16, dtype=torch.uint8)
        for _ in (0, 1):  # the second one finds no credit
            second.push(0, shard.data_ptr(), 16, 16, TAG)
        waits: list[Callable[[], None]] = [
            lambda: first.wait_chunk(1, 1, TAG),
            second.wait_pushed,
        ]
        with ThreadPoolExecutor(2) as threads:
            found = [threads.submit(wait) for wait in waits]
            time.sleep(0.05)
            assert not any(future.done() for future in found)
            for rank in (first, second):
                rank.end_waits()
            for future in found:
                with pytest.raises(
                    RuntimeError, match="wait: this workspace is about to be closed"
                ):
                    future.result(10)
        with pytest.raises(RuntimeError, match="about to be closed"):
            first.wait_chunk(0, 1, TAG)  # though it is there


def test_close_drops_a_push_that_waits_for_a_credit() -> None:
    with connected(2) as (first, _):
        shard = torch.zeros(1, dtype=torch.uint8)
        for _ in range(3):
            first.push(0, shard.data_ptr(), 1, 1, TAG)
        started = time.monotonic()
        first.close()
        assert time.monotonic() - started < 2
        with pytest.raises(RuntimeError, match="push: the workspace is closed"):
            first.push(0, shard.data_ptr(), 1, 1, TAG)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0, 64, 1, 1.0), "world_size: found 0, wanted >= 1"),
        ((2, 2, 64, 1, 1.0), "rank: found 2, wanted 0 <= rank < world_size = 2"),
        ((-1, 2, 64, 1, 1.0), "rank: found -1, wanted 0 <= rank"),
        ((0, 2, -1, 1, 1.0), "slot_bytes: found -1, wanted a size >= 0"),
        ((0, 2, 64, 0, 1.0), "chunks_per_shard: found 0, wanted 1 to 1073741823"),
        ((0, 3, 64, 2**30, 1.0), "chunks_per_shard: found 1073741824, wanted 1 to 715827882"),
        ((0, 2, 64, 1, 0.0), "timeout_s: found 0.0+, wanted a number of seconds > 0"),
        ((0, 2, 64, 1, float("nan")), "timeout_s: found -?nan, wanted a number of seconds > 0"),
    ],
)
def test_bad_workspace_arguments(arguments: tuple[int, int, int, int, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _core.CpuWorkspace(*arguments)


@pytest.mark.parametrize(
    ("slot", "shard_bytes", "chunk_bytes", "tag", "message"),
    [
        (2, 8, 8, TAG, "slot: found 2, wanted 0 or 1"),
        (0, 33, 33, TAG, "shard_bytes: found 33, wanted 0 to slot_bytes / world_size = 32"),
        (0, 8, 3, TAG, "chunk_bytes: found 3, wanted enough that 2 chunks hold 8 bytes"),
        (0, 8, 0, TAG, "chunk_bytes: found 0, wanted enough"),
        (0, 8, 8, 0, "tag: found 0, wanted a nonzero value"),
    ],
)
def test_bad_push_arguments(
    slot: int, shard_bytes: int, chunk_bytes: int, tag: int, message: str
) -> None:
    shard = torch.zeros(64, dtype=torch.uint8)
    with (
        connected(2, slot_bytes=64, chunks_per_shard=2) as (first, _),
        pytest.raises(ValueError, match=message),
    ):
        first.push(slot, shard.data_ptr(), shard_bytes, chunk_bytes, tag)


def test_bad_wait_arguments() -> None:
    with connected(2, chunks_per_shard=2) as (first, _):
        with pytest.raises(ValueError, match="chunk: found 4, wanted 0 <= chunk < 4"):
            first.wait_chunk(0, 4, TAG)
        with pytest.raises(ValueError, match="chunk: found 1, wanted a chunk of another rank"):
            first.wait_chunk(0, 1, TAG)
    with pytest.raises(ValueError, match="ptr: found 0, wanted the address of a uint32"):
        _core.cpu_wait_signal(0, 1, 0, 0, 0, 1.0)


def test_connect_refuses_what_does_not_fit() -> None:
    workspace = _core.CpuWorkspace(0, 2, 64, 1, 1.0)
    other = _core.CpuWorkspace(1, 2, 1 << 20, 1, 1.0)
    with pytest.raises(ValueError, match="names: found 1, wanted 2 of them"):
        workspace.connect([workspace.name])
    with pytest.raises(RuntimeError, match="opening a peer's segment /agmm-none: No such file"):
        workspace.connect([workspace.name, "/agmm-none"])
    with pytest.raises(RuntimeError, match=rf"{other.name}: found \d+ bytes, wanted \d+"):
        workspace.connect([workspace.name, other.name])
    with pytest.raises(RuntimeError, match="push: call connect first"):
        workspace.push(0, 0, 0, 0, TAG)
    names = [workspace.name, other.name]
    assert all((SHM / name[1:]).exists() for name in names)
    workspace.close()
    del other
    assert not any((SHM / name[1:]).exists() for name in names)


def test_too_little_shared_memory_is_an_error_that_leaves_nothing() -> None:
    room = os.statvfs(SHM)
    if room.f_blocks == 0:
        pytest.skip("/dev/shm has no size limit on this machine")
    before = set(SHM.glob(f"agmm-{os.getpid()}-*"))
    workspace = _core.CpuWorkspace(0, 1, room.f_blocks * room.f_frsize, 1, 1.0)
    workspace.connect([workspace.name])
    with pytest.raises(RuntimeError, match=r"shared memory: reserving \d+ bytes in /dev/shm: No"):
        workspace.take_memory()
    assert set(SHM.glob(f"agmm-{os.getpid()}-*")) == before


def test_a_name_has_next_to_no_memory() -> None:
    """Whoever is killed while there is one leaves it behind."""
    workspace = _core.CpuWorkspace(0, 2, 64 << 20, 1, 1.0)
    named = SHM / workspace.name[1:]
    other = _core.CpuWorkspace(1, 2, 64 << 20, 1, 1.0)
    workspace.connect([workspace.name, other.name])
    assert 0 < 512 * named.stat().st_blocks < 1 << 16
    with named.open("rb") as file:
        workspace.take_memory()
        assert not named.exists()
        assert 512 * os.fstat(file.fileno()).st_blocks >= 128 << 20
    workspace.take_memory()  # harmless when called again
    workspace.close()
    other.close()


def test_name_of_a_killed_process_is_swept_and_one_in_use_is_not() -> None:
    script = (
        CORE
        + """
import signal
print(_core.CpuWorkspace(0, 1, 64, 1, 1.0).name, flush=True)
w = _core.CpuWorkspace(0, 1, 64, 1, 1.0)
print(w.name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    process = run_script(script)
    assert process.returncode == -signal.SIGKILL
    closed, stale = (SHM / name[1:] for name in process.stdout.split())
    assert not closed.exists()
    living = _core.CpuWorkspace(0, 1, 64, 1, 1.0)
    # Tests of other processes may have swept it already.
    assert not stale.exists()
    another = _core.CpuWorkspace(0, 1, 64, 1, 1.0)
    assert (SHM / living.name[1:]).exists()
    living.close()
    another.close()


def test_chunk_wait_over_its_limit_ends_the_process() -> None:
    process = run_script(CONNECTED_PAIR + "pair[1].wait_chunk(0, 0, 7)", AGMM_TIMEOUT_S="0.5")
    assert process.returncode == _core.TIMEOUT_EXIT_CODE == 124
    assert process.stderr == _core.timeout_message(1, 0, 0, 0, 7, 0.5, 0.5) + "\n"
    assert process.stderr == (
        "agmm: rank 1 waited 0.5 s for chunk 0 from rank 0: signal is 0, wanted 7; "
        "ending the process (AGMM_TIMEOUT_S=0.5)\n"
    )


def test_credit_wait_over_its_limit_ends_the_process() -> None:
    script = CONNECTED_PAIR + "push(pair[0]); push(pair[0]); pair[0].wait_pushed()"
    process = run_script(script, AGMM_TIMEOUT_S="0.5")
    assert process.returncode == 124
    assert process.stderr == (
        "agmm: rank 0 waited 0.5 s for buffer 0 of rank 1 to be free: credit is 0, "
        "wanted 1; ending the process (AGMM_TIMEOUT_S=0.5)\n"
    )


def test_another_tag_ends_the_process_at_once() -> None:
    process = run_script(CONNECTED_PAIR + "push(pair[0]); pair[1].wait_chunk(0, 0, 8)")
    assert process.returncode == 124
    assert process.stderr == _core.mismatch_message(1, 0, 0, 7, 8) + "\n"


def test_ctrl_c_interrupts_a_wait() -> None:
    script = CONNECTED_PAIR + "print('ready', flush=True); pair[1].wait_chunk(0, 0, 7)"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=10)
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in stderr


def test_interpreter_exit_does_not_hang_on_open_work() -> None:
    script = CONNECTED_PAIR + "push(pair[0]); push(pair[0]); kept = pair; sys.exit(3)"
    started = time.monotonic()
    assert run_script(script).returncode == 3
    assert time.monotonic() - started < 30


def test_forked_child_leaves_the_parents_workspace_alone() -> None:
    script = (
        CONNECTED_PAIR
        + """
child = os.fork()
if child == 0:
    for one in pair:
        one.close()
    sys.exit(5)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
push(pair[0])
pair[1].wait_chunk(0, 0, 7)
sys.exit(4)
"""
    )
    process = run_script(script)
    assert process.returncode == 4, process.stderr


@pytest.mark.parametrize("text", ["abc", "0", "-1", "nan", "inf", "1s"])
def test_nonsense_limit_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("AGMM_TIMEOUT_S", text)
    wanted = f"AGMM_TIMEOUT_S: found '{text}', wanted a number of seconds > 0"
    with pytest.raises(ValueError, match=wanted):
        _core.timeout_seconds()


def test_limit_is_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGMM_TIMEOUT_S", raising=False)
    assert _core.timeout_seconds() == 600
    monkeypatch.setenv("AGMM_TIMEOUT_S", "2.5")
    assert _core.timeout_seconds() == 2.5
    monkeypatch.setenv("AGMM_TIMEOUT_S", "")
    assert _core.timeout_seconds() == 600


def test_warning_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGMM_WARN_S", raising=False)
    assert _core.warn_seconds() == 30
    for text, wanted in (("0", 0), ("1.5", 1.5), ("", 30)):
        monkeypatch.setenv("AGMM_WARN_S", text)
        assert _core.warn_seconds() == wanted
    monkeypatch.setenv("AGMM_WARN_S", "-1")
    with pytest.raises(
        ValueError, match="AGMM_WARN_S: found '-1', wanted a number of seconds >= 0"
    ):
        _core.warn_seconds()


_SINCE = r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


def test_long_wait_says_once_what_it_waits_for() -> None:
    script = (
        CONNECTED_PAIR
        + """
import threading
threading.Timer(1.0, lambda: push(pair[0])).start()
pair[1].wait_chunk(0, 0, 7)
"""
    )
    process = run_script(script, AGMM_WARN_S="0.3")
    assert process.returncode == 0
    assert re.fullmatch(
        rf"agmm: rank 1 has waited 0\.\d s, {_SINCE}, for chunk 0 from rank 0: signal is 0, "
        r"wanted 7; waiting until it is 60 s \(AGMM_TIMEOUT_S\)\n",
        process.stderr,
    )
    assert run_script(script, AGMM_WARN_S="0").stderr == ""


def test_long_wait_for_a_buffer_and_for_a_signal_say_it_too() -> None:
    script = CONNECTED_PAIR + "push(pair[0]); push(pair[0]); pair[0].wait_pushed()"
    lines = run_script(script, AGMM_TIMEOUT_S="0.8", AGMM_WARN_S="0.2").stderr.splitlines()
    assert len(lines) == 2
    assert re.match(
        rf"agmm: rank 0 has waited 0\.\d s, {_SINCE}, for buffer 0 of rank 1 to be free: "
        "credit is 0, wanted 1; ",
        lines[0],
    )
    script = (
        CORE
        + """
word = ctypes.c_uint32(0)
_core.cpu_wait_signal(ctypes.addressof(word), 1, -1, -1, 2, 0.8)
"""
    )
    lines = run_script(script, AGMM_WARN_S="0.2").stderr.splitlines()
    assert len(lines) == 2
    assert re.match(rf"agmm: has waited 0\.\d s, {_SINCE}, for chunk 2: signal is 0, ", lines[0])


def test_waits_at_a_time_warn_once() -> None:
    script = (
        CONNECTED_PAIR
        + """
import threading, time
push(pair[0]); push(pair[0])  # its copy thread waits for a buffer
threading.Thread(target=pair[0].wait_chunk, args=(0, 1, 7), daemon=True).start()
pair[1].wait_chunk(1, 0, 7)
"""
    )
    process = run_script(script, AGMM_TIMEOUT_S="0.8", AGMM_WARN_S="0.5")
    assert process.stderr.count(" has waited ") == 1


def test_mismatch_names_both_calls_where_they_can_be_looked_up() -> None:
    script = (
        CONNECTED_PAIR
        + """
_core.note_call(8, "a call")
_core.set_call_lookup(lambda rank, source, tag, own: (own + " of mine", f"{rank} {source} {tag}"))
push(pair[0]); pair[1].wait_chunk(0, 0, 8)
"""
    )
    process = run_script(script)
    assert process.returncode == 124
    assert process.stderr == (
        "agmm: rank 1: chunk 0 from rank 0 carries tag 0x7 but this rank expects 0x8: the ranks "
        "made different calls; this rank: a call of mine; rank 0: 1 0 8; ending the process\n"
    )


@pytest.mark.parametrize(
    "lookup", quick.first(1, ["lambda *a: 1 / 0", "lambda *a: time.sleep(100)"])
)
def test_mismatch_is_told_without_the_other_call_where_that_cannot_be_had(lookup: str) -> None:
    script = (
        CONNECTED_PAIR
        + f"""
_core.note_call(8, "a call")
_core.set_call_lookup({lookup})
push(pair[0]); pair[1].wait_chunk(0, 0, 8)
"""
    )
    started = time.monotonic()
    process = run_script(script)
    assert process.returncode == 124
    assert time.monotonic() - started < 30
    assert "; this rank: a call; ending the process\n" in process.stderr


def test_messages_leave_out_what_is_not_known() -> None:
    assert _core.timeout_message(-1, -1, 3, 2, 1, 60.04, 60) == (
        "agmm: waited 60.0 s for chunk 3: signal is 2, wanted 1; "
        "ending the process (AGMM_TIMEOUT_S=60)"
    )


def test_a_wait_for_the_own_shard_is_told_apart() -> None:
    assert _core.timeout_message(2, 2, 2, 0, 1, 15.04, 15) == (
        "agmm: rank 2 waited 15.0 s for its own chunk 2 to be staged or sent: signal is 0, "
        "wanted 1; ending the process (AGMM_TIMEOUT_S=15)"
    )


def test_tag_tells_calls_apart() -> None:
    calls = [
        (m, k, dtype, return_A)
        for m in (1, 2, 64)
        for k in (1, 2, 64)
        for dtype in ("bfloat16", "float16")
        for return_A in (False, True)
    ]
    tags = {_core.call_tag(*call) for call in calls}
    assert len(tags) == len(calls)
    assert 0 not in tags
    assert {_core.call_tag(*call) for call in calls} == tags


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("chunks", "pivot"), [(1, 0), (4, 2), (7, 6)])
def test_async_input_mm_waits_for_each_chunk(dtype: torch.dtype, chunks: int, pivot: int) -> None:
    rows = 3
    wanted = torch.randn(chunks * rows, 17, dtype=dtype)
    a = torch.full_like(wanted, torch.nan)
    b = torch.randn(17, 5, dtype=dtype)
    signals = torch.full((chunks,), 2, dtype=torch.uint32)  # neither 0 nor 1: not ready

    def deliver() -> None:  # against the ring, so that the first chunk to be computed comes last
        for step in reversed(range(chunks)):
            chunk = (pivot + step) % chunks
            time.sleep(0.01)
            a[chunk * rows : (chunk + 1) * rows] = wanted[chunk * rows : (chunk + 1) * rows]
            signals[chunk] = 1

    sender = threading.Thread(target=deliver)
    sender.start()
    out = cpu_async_input.async_input_mm(a, [b], signals, pivot)
    sender.join()
    torch.testing.assert_close(out, wanted @ b)


def test_other_threads_run_while_the_memory_is_taken() -> None:
    """On a busy machine the other thread may not get a processor in time: so several times."""
    assert any(_ticks_while_memory_is_taken() > 3 for _ in range(10))


def _ticks_while_memory_is_taken() -> int:
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(1e-4)

    other = threading.Thread(target=tick)
    other.start()
    try:
        workspace = _core.CpuWorkspace(0, 1, 128 << 20, 1, 1.0)
        workspace.connect([workspace.name])
        begin = time.perf_counter()
        workspace.take_memory()
        end = time.perf_counter()
    finally:
        done.set()
        other.join()
    workspace.close()
    # The interpreter may switch by itself before and after the call.
    margin = 0.2 * (end - begin)
    return sum(begin + margin < t < end - margin for t in ticks)
