"""The handle of a collective that has been begun."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Work:
    """A collective that ``async_op=True`` has begun.

    What was passed must stay as it is until `wait` has returned, and the result is there only then.
    Handles may be waited for in any order, each by one thread at a time; the calls of a group are
    carried out in the order in which they were made.
    """

    def __init__(self, finish: Callable[[], torch.Tensor], is_done: Callable[[], bool]) -> None:
        self._finish: Callable[[], torch.Tensor] | None = finish
        self._is_done = is_done
        self._found: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """The result, when it is there: on the CPU this thread waits, on CUDA the current stream.

        Returns:
            ``out`` where one was passed, else a new tensor; the same one in each call.
        """
        if self._finish is not None:
            self._found, self._finish = self._finish(), None
        assert self._found is not None
        return self._found

    def is_completed(self) -> bool:
        """Whether `wait` would return at once. Never waits."""
        return self._finish is None or self._is_done()
