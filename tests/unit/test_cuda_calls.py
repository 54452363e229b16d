"""The host side of the CUDA calls, with the core replaced: no GPU needed."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from agmm import _cuda, ops
from agmm.errors import InvalidArgument
from agmm.plan import KernelConfig

CONFIG = KernelConfig(128, 128, 64, 1, 1, "pingpong", 4, "along_n")


def test_one_rank_uses_the_config_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def matmul(a: torch.Tensor, b: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        asked.append(options["config"])
        return a @ b

    monkeypatch.setattr(_cuda, "async_input_mm", matmul)
    workspace = mock.Mock(world_size=1, _device=torch.device("cpu"))
    A, B = torch.ones(2, 3, 8).bfloat16(), torch.ones(8, 5).bfloat16()
    call = _cuda.CudaWorkspace.prepare(workspace, A, [B], return_A=True, config=CONFIG)
    gathered, (out,) = call(A, [B], [None])
    assert asked == [CONFIG]
    assert out.shape == (2, 3, 5)
    assert gathered is not None
    assert torch.equal(gathered, A)
    assert gathered.data_ptr() != A.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float8_e4m3fn])
def test_a_dtype_without_kernels_is_not_taken_for_fp16(dtype: torch.dtype) -> None:
    workspace = mock.Mock(world_size=1, _device=torch.device("cpu"))
    A, B = torch.ones(2, 8).to(dtype), torch.ones(8, 8).to(dtype)
    with pytest.raises(InvalidArgument, match=f"^A_shard: found dtype {dtype}, wanted torch.bfl"):
        _cuda.CudaWorkspace.prepare(workspace, A, [B], return_A=True, config=CONFIG)


def test_kept_calls_end_with_their_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        before = len(ops._fused_calls)
        group = dist.new_group([0])
        ops._fused_calls[group] = {}
        assert len(ops._fused_calls) == before + 1
        dist.destroy_process_group(group)
        del group
        gc.collect()
        assert len(ops._fused_calls) == before
    finally:
        dist.destroy_process_group()
