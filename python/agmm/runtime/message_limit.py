"""The limit of waits for messages between GPUs, which NCCL's kernels wait for without one of ours:
a thread looks at the calls that are enqueued, and ends the process where one takes too long."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Protocol

from agmm import _core, _env

_LOOK_S = 0.25
"""The time between two looks. It is a choice, small beside any limit that is of use."""


class Event(Protocol):
    """A place in a stream, as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the GPU has come there."""
        ...


class _Call(NamedTuple):
    begun: Event
    done: Event
    rank: str
    words: str


_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED, as cuda.h has it."""


def _leave_captures_alone() -> None:
    """Let this thread ask about events while another one captures a graph, which forbids that to
    all threads otherwise, and would end with an error."""
    with suppress(OSError):  # without a driver there are no captures
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))


class Watch:
    """The calls whose end is awaited. Its thread lives while there are some."""

    def __init__(
        self, end: Callable[[str], object] = _core.end_process, look_s: float = _LOOK_S
    ) -> None:
        self._calls: list[_Call] = []
        self._lock = threading.Lock()
        self._is_watching = False
        self._end, self._look_s = end, look_s

    def add(self, begun: Event, done: Event, rank: str, words: str) -> None:
        """End the process with a message where ``done`` comes later than AGMM_TIMEOUT_S behind
        ``begun``: the time before that, in which the GPU is busy with other work, does not count.

        Args:
            rank: whose call it is, in words.
            words: the call, in words.
        """
        with self._lock:
            self._calls.append(_Call(begun, done, rank, words))
            if not self._is_watching:
                self._is_watching = True
                threading.Thread(target=self._watch, name="agmm messages", daemon=True).start()

    def _watch(self) -> None:
        _leave_captures_alone()
        limit_s, since, first = _env.timeout_s(), 0.0, None
        while True:
            with self._lock:
                # A stream's calls end in their order, so the first one that has not is looked at.
                self._calls = [call for call in self._calls if not call.done.query()]
                if not self._calls:
                    self._is_watching = False
                    return
                now, call = time.monotonic(), self._calls[0]
            if call is not first or not call.begun.query():
                first, since = call, now
            elif now - since > limit_s:
                self._end(
                    f"agmm: {call.rank}: waited {limit_s:g} s for messages of other ranks in "
                    f"{call.words}, wanted the same calls on all ranks; AGMM_TIMEOUT_S sets the "
                    "limit; ending the process"
                )
                return
            time.sleep(self._look_s)


_watch = Watch()
watch = _watch.add
