"""The errors that agmm raises, and its warnings, each of which it gives once in a process."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_warned: set[str] = set()


class AgmmError(RuntimeError):
    """Base of all errors of this package."""


class InvalidArgument(AgmmError, ValueError):
    """An argument that no path can serve. The message names it, the value found and the value
    wanted."""


class Unsupported(AgmmError):
    """A legal call that the fused path cannot serve. It is raised under ``strict=True`` only."""


def reason_of(error: Exception) -> str:
    """The first line of an error's message, or its type where that is empty: what other ranks are
    told."""
    return next(filter(None, str(error).splitlines()), type(error).__name__)


def why_unread(error: OSError | UnicodeDecodeError) -> str:
    """Why a file could not be read, without its name."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def warn_once(message: str) -> None:
    """Gives a warning once in a process, whatever the filters say, at the line that called agmm."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=_levels_to_caller())


def fall_back(reason: str, strict: bool) -> None:
    """Warns that a call takes the unfused path, once in a process for each reason.

    Raises:
        Unsupported: ``strict``.
    """
    if strict:
        raise Unsupported(f"{reason}; strict=True refuses the unfused path")
    warn_once(f"agmm takes the unfused path: {reason}")


def take_portable(reason: str) -> None:
    """Warns that the library multiplies the pieces of a call, beside copies, once in a process for
    each reason."""
    warn_once(f"agmm takes the portable path: {reason}")


def compose(reason: str, strict: bool) -> None:
    """Warns that torch's ops compute a part of a call behind agmm's kernel, once in a process for
    each reason.

    Raises:
        Unsupported: ``strict``.
    """
    if strict:
        raise Unsupported(f"{reason}; strict=True refuses what is computed behind the kernel")
    warn_once(f"agmm computes a part behind the kernel: {reason}")


def forget_warnings() -> None:
    """Makes every warning new again, for tests, which do not know what ran before them."""
    _warned.clear()


def _levels_to_caller() -> int:
    """The number of stack levels from the caller, a function that warns, up to the code that called
    agmm. The dispatcher and autograd may lie between."""
    frame: FrameType | None = sys._getframe(1)
    levels = 0
    while frame is not None:
        levels += 1
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in ("agmm", "torch"):
            break
        frame = frame.f_back
    return levels
