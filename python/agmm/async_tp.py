"""agmm as the backend of PyTorch's async tensor parallelism. Importing this changes nothing."""

from __future__ import annotations

from agmm.integrations.async_tp import disable, enable, is_enabled

__all__ = ["disable", "enable", "is_enabled"]
