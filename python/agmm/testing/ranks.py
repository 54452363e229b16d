"""Processes that act as the ranks of a group: started once, used for many calls."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from agmm import _env

PRELOADED = [__name__]
"""Modules that CPU ranks find imported, for a program to add to before its first pool. One process
imports them, of which all its CPU ranks are forked."""

_HOST = "127.0.0.1"
_TAIL_BYTES = 4000
# How long the others may take to answer or to end by themselves, once one rank has failed.
_GRACE_S = 3.0
# Ctrl-C does not end a wait when another thread of this process takes the signal (torch's store
# runs some), or when it comes just before the wait: it is seen between two waits.
_WAIT_S = 0.5


class RankError(RuntimeError):
    """A rank raised an exception, ended, or did not answer in time.

    Attributes:
        ranks: the ranks that failed.
        exit_codes: exit code of each rank that has ended (negative: minus the signal), by rank.
    """

    def __init__(self, message: str, ranks: list[int], exit_codes: dict[int, int]) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.exit_codes = exit_codes


class RankPool:
    """``world_size`` processes on this host, with ``torch.distributed`` initialised in each.

    CPU ranks use gloo and one thread each; CUDA ranks use nccl, rank i on device i. With
    ``AGMM_SHARED_GPUS=on`` there may be more CUDA ranks than GPUs: rank i is on device i modulo
    their number, and gloo is used, since nccl wants a GPU for each. What the ranks write to stderr
    is kept, see :meth:`stderr`. After a failure that leaves ranks out of step the processes are
    killed and the pool is of no more use, see :attr:`alive`.

    Args:
        world_size: number of ranks, >= 1.
        device: "cpu" or "cuda".
        timeout_s: limit in seconds for the start and for each :meth:`run`.
        env: environment variables for the ranks, on top of this process's.

    Raises:
        ValueError: an argument that cannot be.
        RankError: a rank did not start.
    """

    def __init__(
        self,
        world_size: int,
        device: str = "cpu",
        timeout_s: float = 120,
        env: Mapping[str, str] | None = None,
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size: found {world_size}, wanted >= 1")
        if device not in ("cpu", "cuda"):
            raise ValueError(f"device: found {device!r}, wanted 'cpu' or 'cuda'")
        if device == "cuda":
            gpus = torch.cuda.device_count()
            if gpus < world_size and not (gpus and _env.is_on(_env.SHARED_GPUS)):
                raise ValueError(
                    f"world_size: found {world_size}, wanted at most {gpus}, the GPUs here"
                )
        self.world_size = world_size
        self.device = device
        self.timeout_s = timeout_s
        self.processes: list[BaseProcess] = []
        self._pipes: list[multiprocessing.connection.Connection] = []
        self._busy = True  # until they have started
        self._directory = Path(tempfile.mkdtemp(prefix="agmm-ranks-"))
        # Importing torch takes seconds: CPU ranks are forked from a process that has done it once.
        # Those of GPUs import it anew, since what it does with CUDA does not outlive a fork.
        context: Any = multiprocessing.get_context("spawn" if device == "cuda" else "forkserver")
        if device == "cpu":
            context.set_forkserver_preload(PRELOADED)
        defaults = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} if device == "cpu" else {}
        try:
            # This process serves the store, so that it outlives every rank.
            self._store = _tcp_store(0, world_size, is_master=True)
            port = self._store.port
            with _environment({**defaults, **(env or {})}), ctrl_c_held():
                for rank in range(world_size):
                    ours, theirs = context.Pipe()
                    process = context.Process(
                        target=_rank_main,
                        args=(
                            rank,
                            world_size,
                            device,
                            timeout_s,
                            port,
                            theirs,
                            self._stderr_path(rank),
                            dict(os.environ),
                        ),
                        name=f"agmm-rank-{rank}",
                        daemon=True,
                    )
                    process.start()
                    theirs.close()
                    self.processes.append(process)
                    self._pipes.append(ours)
            self.collect()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether all ranks are there to take a call."""
        return bool(self._pipes) and all(process.is_alive() for process in self.processes)

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` in every rank and return the results by rank.

        ``fn`` must be a function of an importable module; arguments and results are pickled,
        tensors by value.

        Raises:
            RankError: with the rank's traceback, or its exit code and the end of its stderr.
        """
        self.submit(fn, *args, **kwargs)
        return self.collect()

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Start ``fn`` in every rank without waiting; :meth:`collect` fetches the results."""
        if not self.alive:
            raise RankError("the pool's processes have ended", [], self._exit_codes())
        if self._busy:
            raise RuntimeError("submit: the last call's results have not been collected")
        call = pickle.dumps((sys.path, pickle.dumps((fn, args, kwargs))))
        for pipe in self._pipes:
            pipe.send_bytes(call)
        self._busy = True

    def collect(self, is_stuck: Callable[[], bool] | None = None) -> list[Any]:
        """Results of the last :meth:`submit` by rank. Raises as :meth:`run`.

        ``is_stuck`` takes the place of the limit: it is asked at least every half second whether
        to give up.
        """
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + self.timeout_s
        waiting = set(range(self.world_size))
        failed = False
        while waiting:
            if is_stuck is None or failed:
                if time.monotonic() >= deadline:
                    break
            elif is_stuck():
                break
            handles: list[Any] = [self._pipes[rank] for rank in waiting]
            handles += [self.processes[rank].sentinel for rank in waiting]
            limit = _WAIT_S
            if is_stuck is None or failed:
                limit = min(_WAIT_S, max(0.0, deadline - time.monotonic()))
            multiprocessing.connection.wait(handles, limit)
            for rank in sorted(waiting):
                answer = self._answer(rank)
                if answer is None:
                    continue
                waiting.remove(rank)
                kind, value = answer
                if kind == "result":
                    results[rank] = value
                    continue
                errors[rank] = value
                if not failed:
                    failed = True
                    grace = time.monotonic() + _GRACE_S
                    deadline = grace if is_stuck else min(deadline, grace)
        if waiting and not failed:
            within = "in time" if is_stuck else f"within {self.timeout_s} s"
            for rank in waiting:
                errors[rank] = f"did not answer {within}\n{self.stderr(rank)}"
        self._busy = False
        if not errors:
            return [results[rank] for rank in range(self.world_size)]
        exit_codes = self._exit_codes()
        if waiting or exit_codes:
            self.kill()
        message = "\n".join(f"rank {rank}: {errors[rank].rstrip()}" for rank in sorted(errors))
        raise RankError(message, sorted(errors), exit_codes)

    def join(self, timeout_s: float) -> list[int | None]:
        """Wait until all ranks have ended, at most ``timeout_s``; exit codes by rank, or None."""
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def stderr(self, rank: int) -> str:
        """The end of what the rank has written to stderr."""
        try:
            text = self._stderr_path(rank).read_bytes()
        except FileNotFoundError:
            return ""
        return text[-_TAIL_BYTES:].decode(errors="replace")

    def kill(self) -> None:
        """End all ranks at once."""
        for process in self.processes:
            process.kill()
        self.join(10)

    def close(self) -> None:
        """Let the ranks end, or kill them when they are in a call, and clean up."""
        if self.alive and not self._busy:
            for pipe in self._pipes:
                with contextlib.suppress(OSError):
                    pipe.send_bytes(b"")
            self.join(10)
        self.kill()
        for pipe in self._pipes:
            pipe.close()
        self._pipes = []
        shutil.rmtree(self._directory, ignore_errors=True)

    def _stderr_path(self, rank: int) -> Path:
        return self._directory / f"rank-{rank}.stderr"

    def _exit_codes(self) -> dict[int, int]:
        codes = {rank: process.exitcode for rank, process in enumerate(self.processes)}
        return {rank: code for rank, code in codes.items() if code is not None}

    def _answer(self, rank: int) -> tuple[str, Any] | None:
        process, pipe = self.processes[rank], self._pipes[rank]
        ended = not process.is_alive()  # before the pipe is read: what it sent last is in there
        try:
            if pipe.poll():
                kind, value = pickle.loads(pipe.recv_bytes())
                return kind, value
        except (EOFError, OSError):
            process.join(_GRACE_S)
            ended = True
        if ended:
            return "died", f"ended with exit code {process.exitcode}\n{self.stderr(rank)}"
        return None


def _tcp_store(port: int, world_size: int, *, is_master: bool) -> Any:
    return dist.TCPStore(_HOST, port, world_size, is_master=is_master, wait_for_workers=False)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def ctrl_c_held() -> Iterator[None]:
    """Ctrl-C waits for the end of this block; processes begun in it have SIGINT blocked at first.

    The mask is what they inherit; any other thread of this process still takes the signal, and
    Python then runs the handler in the main thread, half-way through the start of a process.
    """
    pressed: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    # Only the main thread may set a handler, and only it is interrupted.
    held = handler is not None and threading.current_thread() is threading.main_thread()
    if held:
        signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        resource_tracker.ensure_running()  # its start unblocks SIGINT in this thread
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    finally:
        if held:
            signal.signal(signal.SIGINT, handler)
            if pressed:
                signal.raise_signal(signal.SIGINT)


def _rank_main(
    rank: int,
    world_size: int,
    device: str,
    timeout_s: float,
    port: int,
    pipe: multiprocessing.connection.Connection,
    stderr_path: Path,
    environment: Mapping[str, str],
) -> None:
    os.environ.clear()  # the server's, of when it began
    os.environ.update(environment)
    log = os.open(stderr_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the pool's owner
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        store = _tcp_store(port, world_size, is_master=False)
        limit = timedelta(seconds=timeout_s)
        if device == "cuda":
            gpus = torch.cuda.device_count()
            shared = world_size > gpus and _env.is_on(_env.SHARED_GPUS)
            index = rank % gpus if shared else rank
            torch.cuda.set_device(index)
            dist.init_process_group(
                "gloo" if shared else "nccl",
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=limit,
                device_id=None if shared else torch.device("cuda", index),
            )
        else:
            torch.set_num_threads(1)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world_size, timeout=limit
            )
        _reply(pipe, None)
        while call := _next_call(pipe):
            _reply(pipe, call)
    except BaseException:
        with contextlib.suppress(OSError):
            pipe.send_bytes(pickle.dumps(("error", traceback.format_exc())))
        raise
    if dist.is_initialized():
        dist.destroy_process_group()


def _next_call(pipe: multiprocessing.connection.Connection) -> bytes:
    try:
        return pipe.recv_bytes()
    except EOFError:  # the owner is gone
        return b""


def _run_call(call: bytes) -> Any:
    path, body = pickle.loads(call)
    sys.path.extend(entry for entry in path if entry not in sys.path)
    fn, args, kwargs = pickle.loads(body)
    return fn(*args, **kwargs)


def _reply(pipe: multiprocessing.connection.Connection, call: bytes | None) -> None:
    try:
        answer = pickle.dumps(("result", None if call is None else _run_call(call)))
    except Exception:
        answer = pickle.dumps(("error", traceback.format_exc()))
    pipe.send_bytes(answer)
