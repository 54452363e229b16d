"""A program for one GPU: a matmul that splits K in global memory is at work on a stream that is
destroyed, and the next one comes on a stream that has the same handle. Their parts of K must not be
counted together."""

from __future__ import annotations

import ctypes

import torch
from test_async_input_mm import assert_close, randn, splitting

from agmm.ops import async_input_mm

M, N, K, CHUNKS_OF_K = 128, 256, 2048, 8
MOST_STREAMS = 8
"""The most streams that are made beside a kernel that waits. With more the driver waits for it."""


def new_stream() -> torch.cuda.ExternalStream:
    handle = ctypes.c_void_p()
    assert torch.cuda.cudart().cudaStreamCreate(ctypes.addressof(handle)) == 0
    return torch.cuda.ExternalStream(handle.value)


def destroy(stream: torch.cuda.ExternalStream) -> None:
    assert torch.cuda.cudart().cudaStreamDestroy(stream.cuda_stream) == 0


def main() -> None:
    config = next((c for c in splitting(M, N, K) if not c.splits_in_cluster), None)
    if config is None:
        print("skipped: no kernel of this build splits K in global memory")
        return
    a, b = randn(M, K, dtype=torch.bfloat16), randn(N, K, dtype=torch.bfloat16).t()
    other = randn(M, K, dtype=torch.bfloat16)
    all_there = torch.ones(1, CHUNKS_OF_K, dtype=torch.int32, device="cuda")
    all_but_one = all_there.clone()
    all_but_one[0, -1] = 0
    # What a first call sets up waits for the device.
    async_input_mm.on_cuda(a, b, all_there.view(torch.uint32), 0, config=config)
    feeder = torch.cuda.Stream()
    torch.cuda.synchronize()

    first, begun = new_stream(), torch.cuda.Event()
    streams = []
    with torch.cuda.stream(first):
        begun.record()
        early = async_input_mm.on_cuda(a, b, all_but_one.view(torch.uint32), 0, config=config)
    try:
        begun.synchronize()
        destroy(first)
        streams.append(new_stream())
        while streams[-1].cuda_stream != first.cuda_stream and len(streams) < MOST_STREAMS:
            streams.append(new_stream())
        found = streams[-1].cuda_stream == first.cuda_stream
        with torch.cuda.stream(streams[-1]):
            late = async_input_mm.on_cuda(other, b, all_there.view(torch.uint32), 0, config=config)
        streams[-1].synchronize()
    finally:
        with torch.cuda.stream(feeder):
            all_but_one.fill_(1)
        torch.cuda.synchronize()
        for stream in streams:
            destroy(stream)
    assert_close(late, other, b, "on the second stream")
    assert_close(early, a, b, "on the first one")
    print("done" if found else "skipped: the driver gave no handle a second time")


if __name__ == "__main__":
    main()
