"""Parameters of tests of which the first show enough for `make test`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first(count: int, values: Iterable[Any]) -> list[Any]:
    """The values, those behind the first ``count`` marked slow. A tuple stands for several
    arguments."""
    found: list[Any] = []
    for i, value in enumerate(values):
        given = value if isinstance(value, tuple) else (value,)
        found.append(pytest.param(*given, marks=pytest.mark.slow) if i >= count else value)
    return found
