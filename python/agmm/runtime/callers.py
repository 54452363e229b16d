"""What a thread calls, for the errors of what is called by it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

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
