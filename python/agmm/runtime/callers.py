"""What a thread calls, for the errors of what is called by it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_of_thread = threading.local()


@contextmanager
def calling(call: object, *, empty: str = "") -> Iterator[None]:
    """Says meanwhile what this thread calls, for the error where ranks turn out to differ in an
    exchange.

    Args:
        call: what its ``str`` says.
        empty: what all ranks have to agree on where this rank's call has no elements, else "".
    """
    before = called()
    _of_thread.call = call, empty
    try:
        yield
    finally:
        _of_thread.call = before


def called() -> tuple[object, str]:
    """The call and what `calling` was given of it; None and "" where nothing was said."""
    found: tuple[object, str] = getattr(_of_thread, "call", (None, ""))
    return found


_GRAPHS = "_aot_autograd/runtime_wrappers.py"
_TRACED = "<eval_with_key>"


def is_in_compiled_graph() -> bool:
    """Whether a graph of torch.compile makes the call: a frame of this thread is one that runs such
    graphs, whatever compiled them, or the code of a graph itself. What a graph break has left
    outside of the graphs is not in one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_TRACED) or file.endswith(_GRAPHS):
            return True
        frame = frame.f_back
    return False
