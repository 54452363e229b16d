"""The layout of weights of 4 bits for CUDA, read as the kernel reads it."""

from __future__ import annotations

import pytest
import torch

import agmm
from agmm.runtime import cuda_packed


def read(packed: torch.Tensor, tile_n: int, tile_k: int, groups: int) -> torch.Tensor:
    """The [64, 128] values of an atom, times their scales, as `PackedAtom` and the wgmma take
    them."""
    atom = packed[tile_n, tile_k]
    words = atom[:4096].view(torch.int32).tolist()
    dtype = torch.float32 if groups == 1 else torch.bfloat16
    scales = atom[4096:].view(dtype).float().view(groups, 64)
    found = torch.zeros(64, 128)
    for thread in range(128):
        for step in range(8):
            word = words[step // 4 * 512 + thread * 4 + step % 4] & 0xFFFFFFFF
            for i in range(8):
                register = i % 4
                row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (register % 2)
                k = 16 * step + 2 * (thread % 4) + 8 * (register // 2) + i // 4
                value = (word >> 4 * i & 15) - 8
                found[row, k] = value * scales[k * groups // 128, row]
    return found


@pytest.mark.parametrize(
    ("n", "k", "group_size", "columns", "dtype", "named"),
    [
        (64, 128, 16, 8, torch.uint8, "group_size"),
        (64, 144, 48, 3, torch.uint8, "group_size"),
        (64, 128, 32, 2, torch.uint8, "scales"),
        (60, 128, 32, 4, torch.uint8, "K, N"),
        (64, 128, 32, 4, torch.int32, "weight"),
    ],
)
def test_what_is_refused(
    n: int, k: int, group_size: int, columns: int, dtype: torch.dtype, named: str
) -> None:
    weight, scales = torch.zeros(n, k // 2, dtype=dtype), torch.ones(n, columns)
    with pytest.raises(agmm.InvalidArgument, match=f"{named}: found"):
        cuda_packed.pack(weight, scales, group_size)


@pytest.mark.parametrize(("n", "k", "group_size"), [(64, 128, 128), (72, 256, 32), (8, 200, 200)])
def test_atoms(n: int, k: int, group_size: int) -> None:
    generator = torch.Generator().manual_seed(n)
    values = torch.randint(-8, 8, (n, k), generator=generator)
    scales = torch.rand(n, k // group_size, generator=generator).bfloat16().float()
    stored = (values + 8).to(torch.uint8)
    found = cuda_packed.pack(stored[:, ::2] | stored[:, 1::2] << 4, scales, group_size)
    sizes = cuda_packed.Sizes(k, n, group_size)
    assert found.shape == sizes.packed_shape
    whole = torch.zeros(-(-n // 64) * 64, -(-k // 128) * 128)
    whole[:n, :k] = values * scales.repeat_interleave(group_size, 1)
    for i in range(found.shape[0]):
        for j in range(found.shape[1]):
            wanted = whole[64 * i : 64 * i + 64, 128 * j : 128 * j + 128]
            assert torch.equal(read(found, i, j, sizes.groups), wanted)
