"""What test_early_start runs in a process that has AGMM_EARLY_START=on or weights."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from agmm.ops import async_input_mm
from agmm.planning.built_kernels import kernels_of
from agmm.planning.problems import ALL_GATHER_MATMUL
from agmm.testing.reference import allowed_error, gathered_product, relative_error

M, N, K = 256, 512, 256
DRAWS = 1000
CYCLES = 40_000  # some 20 us, in which a matmul without the wait would be over
# Lets the kernel behind it start at once. Few CTAs, beside which that one has room.
LATE = r"""
extern "C" __global__ void late_copy(unsigned* to, const unsigned* from, int words, int cycles) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  long long const begin = clock64();
  while (clock64() - begin < cycles) {}
  int const thread = blockIdx.x * blockDim.x + threadIdx.x;
  for (int i = thread; i < words; i += gridDim.x * blockDim.x) to[i] = from[i];
}
"""


def words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.int32)


def late_copier() -> Callable[[torch.Tensor, torch.Tensor], None]:
    kernel = torch.cuda._compile_kernel(LATE, "late_copy", compute_capability="90")

    def copy(to: torch.Tensor, from_: torch.Tensor) -> None:
        kernel((16, 1, 1), (256, 1, 1), (words(to), words(from_), words(to).numel(), CYCLES))

    return copy


def behind_a_late_kernel(what: str, captured: bool, only_streaming: bool = False) -> None:
    """Raises AssertionError where a matmul reads or writes before the kernel ahead is done."""
    late_copy, every = late_copier(), list(kernels_of(ALL_GATHER_MATMUL, "bfloat16"))
    every = [kernel for kernel in every if kernel.is_streaming or not only_streaming]
    if not every:  # of a small build
        return
    draw = random.Random(3)

    def fresh(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").bfloat16()

    operands = {"a": fresh(M, K), "b": fresh(N, K), "bias": fresh(N)}
    sources = {name: fresh(*tensor.shape) for name, tensor in operands.items()}
    before, kept = fresh(M, N), fresh(M, N)

    def call(kernel: Any) -> tuple[torch.Tensor, int]:
        place = before.clone()  # the result's memory, as the allocator gives it again
        at = place.data_ptr()
        for name, tensor in operands.items():
            if name != what:
                tensor.copy_(sources[name])
        if what == "out":
            late_copy(kept, place)
        else:
            late_copy(operands[what], sources[what])
        del place
        out = async_input_mm.on_cuda(
            operands["a"], operands["b"].t(), None, 0, bias=operands["bias"], config=kernel
        )
        return out, at

    kernels = draw.sample(every, min(8, len(every)))
    graphs = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for kernel in kernels:
            call(kernel)
            if captured:
                graph = torch.cuda.CUDAGraph()
                torch.cuda.synchronize()
                graph.capture_begin()
                made = call(kernel)
                graph.capture_end()
                graphs.append((graph, made))
        for i in range(DRAWS):
            for tensor in (*sources.values(), before):
                tensor.normal_()
            for tensor in (*operands.values(), kept):
                tensor.fill_(torch.nan)
            one = i % len(kernels)
            if captured:
                graphs[one][0].replay()
                out, at = graphs[one][1]
            else:
                out, at = call(kernels[one])
            a, b, bias = sources["a"], sources["b"].t(), sources["bias"]
            reference = gathered_product(a, b, bias)
            allowed = allowed_error(relative_error(torch.addmm(bias, a, b), reference))
            label = f"draw {i}, {kernels[one].name}"
            assert relative_error(out, reference) <= allowed, label
            if what == "out":
                assert out.data_ptr() == at, f"{label}: the result lies elsewhere"
                assert torch.equal(kept, before), label
