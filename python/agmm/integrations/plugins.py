"""Entry points that serving frameworks load in each of their processes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

from agmm import _core, _env
from agmm.errors import InvalidArgument


def start(variable: _env.Variable, enable: Callable[[], None]) -> None:
    """Calls ``enable`` where the variable is on. It never raises: a framework that has loaded a
    plugin goes on without it, and one warning says why."""
    value = os.environ.get(variable.name) or variable.default
    if value == "0":
        return
    try:
        if value != "1":
            raise InvalidArgument(f"{variable.name}: found {value!r}, wanted '1' or '0'")
        enable()
    except Exception as error:
        message = f"agmm does not serve this process: {error}"
        try:
            warnings.warn(message, stacklevel=2)
        except Warning:  # the process makes errors of warnings
            _core.write_line(message)
