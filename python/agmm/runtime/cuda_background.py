"""The background of calls on CUDA: they are enqueued on a stream of their own, beside what the
caller does."""

from __future__ import annotations

from collections.abc import Callable

import torch

from agmm.runtime.streams import capture_of


class CudaBackground:
    """A call that was enqueued on a stream of its own."""

    def __init__(
        self, device: torch.device, sent: torch.Tensor, out: torch.Tensor, *, is_captured: bool
    ) -> None:
        """Makes the handle of a call. It has to be made after the call is enqueued, with the call's
        stream as the current one."""
        stream = torch.cuda.current_stream(device)
        self._device = device
        self._is_captured = is_captured
        self._done = torch.cuda.Event()
        self._done.record(stream)
        self._sent_and_out: tuple[torch.Tensor, ...] = (sent, out)
        if not is_captured:
            for tensor in (sent, out):  # whose memory may be freed before it ends
                tensor.record_stream(stream)

    def wait(self) -> None:
        """Make the current stream wait for the call."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._done)
        if not self._is_captured:
            # The caller reads the result on this stream, which may be another.
            for out in self._sent_and_out[1:]:
                out.record_stream(stream)
        self._sent_and_out = ()

    def is_done(self) -> bool:
        return not self._is_captured and self._done.query()


class BackgroundStreams:
    """The streams of background calls. Eager calls have another stream than those of a capture,
    which may go on meanwhile, or be given up."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[int, torch.cuda.Stream] = {}  # by capture

    def start(
        self, enqueue: Callable[[], None], sent: torch.Tensor, out: torch.Tensor
    ) -> CudaBackground:
        """Let ``enqueue`` make its call on another stream, after the work of the current one."""
        stream = self.of_capture()
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            enqueue()
            is_captured = capture_of(self._device) != 0
            return CudaBackground(self._device, sent, out, is_captured=is_captured)

    def of_capture(self) -> torch.cuda.Stream:
        """The stream for calls of the capture that the current stream is in, or for eager ones."""
        capture = capture_of(self._device)
        if capture not in self._streams:
            eager = self._streams.get(0)
            self._streams = {} if eager is None else {0: eager}
            self._streams[capture] = torch.cuda.Stream(self._device)
        return self._streams[capture]
