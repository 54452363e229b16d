"""What one GPU does by itself, measured in less than a minute: the rates that `agmm explain` needs
of a card that agmm has no matmul kernels for."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from agmm.planning.card_rates import Rates

SIZE = 8192
"""M, N and K of the product that is timed: large enough for the rate of long calls."""
COPIED_BYTES = 1 << 30
"""The bytes of a copy: more than any cache holds."""
SECONDS = 2.0
"""The least time for which each rate is measured, so that clocks have come to rest. A choice."""


def seconds_of(call: Callable[[], object], wait: Callable[[], object]) -> float:
    """The time of one call, of as many as take `SECONDS`, behind one that does not count."""
    call()
    wait()
    count, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < SECONDS or not count:
        for _ in range(4):
            call()
        wait()
        count += 4
    return (time.perf_counter() - begin) / count


def measure(device: torch.device, peer: torch.device | None) -> Rates:
    """The rates of a GPU: TFLOPS of the library's matmul in bfloat16, GB/s of its memory, and GB/s
    of copies to a peer, None without one that it reaches."""

    def wait() -> None:
        torch.cuda.synchronize(device)

    A, B = (torch.randn(SIZE, SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(A)
    tflops = 2e-12 * SIZE**3 / seconds_of(lambda: torch.mm(A, B, out=out), wait)
    given, taken = (torch.empty(COPIED_BYTES, device=device, dtype=torch.uint8) for _ in range(2))
    # A copy reads and writes each byte.
    memory = 2e-9 * COPIED_BYTES / seconds_of(lambda: taken.copy_(given), wait)
    link = None
    if peer is not None:
        there = torch.empty_like(taken, device=peer)
        link = 1e-9 * COPIED_BYTES / seconds_of(lambda: there.copy_(given), wait)
    return tflops, memory, link


def peer_of(index: int) -> torch.device | None:
    """The first other GPU of this process whose memory a GPU reaches, or None."""
    for other in range(torch.cuda.device_count()):
        if other != index and torch.cuda.can_device_access_peer(index, other):
            return torch.device("cuda", other)
    return None
