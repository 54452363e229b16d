"""What takes a compiler long, or a reader of machine code: begun with the session, beside the
tests, two at a time, and waited for by the tests that want it, which come last. A test names it by
the mark `compiles`."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_begun: dict[Callable[[Path], Any], Future[Any]] = {}
_running: set[subprocess.Popen[str]] = set()
_pool = ThreadPoolExecutor(2)
_folder: Path | None = None
_closed = False


def begin(jobs: Iterable[Callable[[Path], Any]]) -> None:
    """Let them run, each in a folder of its own, which is there until the session's end."""
    global _folder
    for job in jobs:
        if job not in _begun:
            _folder = _folder or Path(tempfile.mkdtemp(prefix="agmm-compiles-"))
            _begun[job] = _pool.submit(job, Path(tempfile.mkdtemp(dir=_folder)))


def result(job: Callable[[Path], T]) -> T:
    """What it returned, or raised, in this session."""
    begin([job])
    found: T = _begun[job].result()
    return found


def run(
    command: Sequence[str], timeout: float, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run`, behind the tests where both want a processor, and ended by `close`."""
    with subprocess.Popen(
        ["nice", "-n", "10", *command],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        _running.add(process)
        try:
            if _closed:
                _kill(process)
            stdout, stderr = process.communicate(timeout=timeout)
        finally:
            _kill(process)
            _running.discard(process)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _kill(process: subprocess.Popen[str]) -> None:
    """With the compilers that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def close() -> None:
    """End what still runs."""
    global _closed
    _closed = True
    for process in tuple(_running):
        _kill(process)
    _pool.shutdown(cancel_futures=True)
    if _folder is not None:
        shutil.rmtree(_folder, ignore_errors=True)
