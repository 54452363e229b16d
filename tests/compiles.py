"""What takes a compiler long, or a reader of machine code: begun with the session, beside the
tests, two at a time, and waited for by the tests that want it, which come last. A test names it by
the mark `compiles`.

Where several processes run the tests (pytest-xdist) each function runs in one of them: the one that
makes its folder. What it returned, or raised, is left there for the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_AT_A_TIME = 2
_WAIT_S = 600.0
"""The time for what another process does; the tests that ask have that limit too."""
_POLL_S = 0.2
_COMMAND_S = 1800.0
"""The time for a command. It has what the tests leave of the processors, and some take minutes."""

_begun: dict[Callable[[Path], Any], Future[Any]] = {}
_running: set[subprocess.Popen[str]] = set()
_pool: ThreadPoolExecutor | None = None
_folder: Path | None = None
_closed = False


def open_folder() -> Path:
    """The session's, made by the process that starts the others."""
    global _folder
    if _folder is None:
        _folder = Path(tempfile.mkdtemp(prefix="agmm-compiles-"))
    return _folder


def share(folder: Path, processes: int) -> None:
    """This is one of so many processes, whose session has that folder."""
    global _folder, _pool
    _folder = folder
    _pool = ThreadPoolExecutor(max(1, _AT_A_TIME // processes))


def begin(jobs: Iterable[Callable[[Path], Any]]) -> None:
    """Let them run, each in a folder of its own, which is there until the session's end."""
    global _pool
    _pool = _pool or ThreadPoolExecutor(_AT_A_TIME)
    for job in jobs:
        if job not in _begun:
            _begun[job] = _pool.submit(_run_once, job, _folder_of(job))


def result(job: Callable[[Path], T]) -> T:
    """What it returned, or raised, in this session.

    Raises:
        TimeoutError: another process has not answered in time.
    """
    begin([job])
    answer = _folder_of(job) / "answer"
    deadline = time.monotonic() + _WAIT_S
    _begun[job].result()
    while not answer.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{job.__qualname__}: no answer within {_WAIT_S:g} s")
        time.sleep(_POLL_S)
    found, error = pickle.loads(answer.read_bytes())
    if error is not None:
        raise error
    return found  # type: ignore[no-any-return]


def _folder_of(job: Callable[[Path], Any]) -> Path:
    name = f"{job.__module__}.{job.__qualname__}"
    return open_folder() / hashlib.sha256(name.encode()).hexdigest()[:12]


def _run_once(job: Callable[[Path], Any], folder: Path) -> None:
    """Leaves its answer in the folder, unless another process has taken it on."""
    try:
        folder.mkdir()
    except FileExistsError:
        return
    work = folder / "work"
    work.mkdir()
    answer: tuple[Any, Exception | None]
    try:
        answer = job(work), None
    except Exception as error:
        answer = None, error
    part = folder / "part"
    try:
        part.write_bytes(pickle.dumps(answer))
    except Exception as error:  # or the others would wait for it
        part.write_bytes(pickle.dumps((None, RuntimeError(f"{answer}: {error}"))))
    part.rename(folder / "answer")


def run(
    command: Sequence[str], env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command behind the tests where both want a processor; `close` ends it."""
    with subprocess.Popen(
        ["nice", "-n", "10", *command],
        # With CI scikit-build-core waits 20 s for cmake to say its version, not 5.
        env={**(os.environ if env is None else env), "CI": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        _running.add(process)
        try:
            if _closed:
                _kill(process)
            stdout, stderr = process.communicate(timeout=_COMMAND_S)
        finally:
            _kill(process)
            _running.discard(process)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _kill(process: subprocess.Popen[str]) -> None:
    """With the compilers that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def finish() -> None:
    """Wait for what this process has taken on: another one may ask for it after its last test."""
    if _pool is not None:
        _pool.shutdown()


def close() -> None:
    """End what still runs."""
    global _closed
    _closed = True
    for process in tuple(_running):
        _kill(process)
    if _pool is not None:
        _pool.shutdown(cancel_futures=True)


def remove_folder() -> None:
    """By the process that made it, after the others."""
    if _folder is not None:
        shutil.rmtree(_folder, ignore_errors=True)
