"""Whether agmm served torch's ops, as a user sees it: by its warnings of what it left alone."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from agmm.errors import forget_warnings
from agmm.integrations import async_tp


@contextmanager
def enabled() -> Iterator[list[str]]:
    """agmm serves torch's ops in it. The list has afterwards why it left calls to torch: one reason
    for each kind, also where it was given before in this process."""
    forget_warnings()  # a user is told once
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught, async_tp.enable():
        warnings.simplefilter("always")
        yield said
    said += [str(w.message) for w in caught if str(w.message).startswith("agmm leaves symm_mem.")]
