"""The errors that agmm raises."""

from __future__ import annotations


class AgmmError(RuntimeError):
    """Base of all errors of this package."""


class InvalidArgument(AgmmError, ValueError):
    """An argument that no path can serve: names it, the value found and the value wanted."""


class Unsupported(AgmmError):
    """A legal call that the fused path cannot serve. Raised under ``strict=True`` only."""
