"""Names of cases that are the same in every process and fit on a line."""

from __future__ import annotations

from typing import Any

import torch


def short(value: Any) -> str:
    """A tensor by its shape and dtype, a function by its name, of a dict or list each part."""
    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, dict):
        return ", ".join(f"{key}={short(part)}" for key, part in value.items()) or "as usual"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(short, value))}]"
    return getattr(value, "__name__", None) or str(value)
