"""The current CUDA stream, as the core takes it, and calls that are ordered on streams."""

from __future__ import annotations

from typing import Protocol

import torch

from agmm import _core


class Calls(Protocol):
    """What makes calls of a group on a GPU: a workspace of the core."""

    def precede(self, stream: int) -> None:
        """Whatever is enqueued on the stream from now on comes behind the last call made by it: the
        last eager one, or that of the capture that the stream is in."""
        ...


def stream_of(device: torch.device) -> int:
    """The current one."""
    return torch._C._cuda_getCurrentRawStream(device.index)


def capture_of(device: torch.device) -> int:
    """The capture that the current stream is in, by its id; 0: none."""
    if not torch.cuda.is_current_stream_capturing():
        return 0
    return _core.capture_of(stream_of(device))
