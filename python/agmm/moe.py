"""Which rows the experts of a rank multiply, for mixtures of experts."""

from __future__ import annotations

from agmm.ops.routing import Routing, route

__all__ = ["Routing", "route"]
