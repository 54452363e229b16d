"""Work that a thread of its own does, one piece after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Task(Generic[_T]):
    """One piece of work. It raises where it is awaited what it raised when it ran."""

    def __init__(self, run: Callable[[], _T]) -> None:
        self._run: Callable[[], _T] | None = run
        self._done = threading.Event()
        self._found: list[_T] = []
        self._error: BaseException | None = None

    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> _T:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._found[0]

    def do(self) -> None:
        run, self._run = self._run, None  # what it holds ends with it
        assert run is not None
        try:
            self._found.append(run())
        except BaseException as error:
            self._error = error
        self._done.set()

    def settle(self) -> None:
        """Waits for its end, whatever that is."""
        self._done.wait()


class Worker:
    """A thread that does what it is given in this order. It starts with the first piece."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Task[object] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Task[object] | None = None

    def add(self, run: Callable[[], _T]) -> Task[_T]:
        """Queues a task. One thread at a time may call this, `wait_idle` and `stop`."""
        task = Task(run)
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self._queue,), name="agmm-collectives", daemon=True
            )
            self._thread.start()
        self._last = task  # type: ignore[assignment]  # which is not called for what it returns
        self._queue.put(task)  # type: ignore[arg-type]
        return task

    def is_idle(self) -> bool:
        return self._last is None or self._last.is_done()

    def wait_idle(self) -> None:
        """Returns when all that was added is done."""
        if self._last is not None:
            self._last.settle()
            self._last = None

    def stop(self) -> None:
        """Ends the thread once it has done what it was given; that should not wait any more."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            if thread is not threading.current_thread():  # as where its last task held the rest
                thread.join()


def _work(queue: SimpleQueue[Task[object] | None]) -> None:
    while (task := queue.get()) is not None:
        task.do()
        del task  # and what it returned
