"""The host side of the CUDA calls, with the core replaced: no GPU needed."""

from __future__ import annotations

import gc
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

import agmm
from agmm import InvalidArgument, _core
from agmm.ops import async_input_mm, plain_scatter
from agmm.ops.gather import GatherSettings
from agmm.ops.plain_gather import PlainGather
from agmm.planning.problems import KernelConfig
from agmm.planning.transports import PUSH
from agmm.runtime import cuda_calls

CONFIG = KernelConfig(128, 128, 64, 1, 1, "pingpong", 4, "along_n")


def test_one_rank_uses_the_config_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    core = mock.Mock(wraps=_core, async_input_mm=mock.Mock())
    monkeypatch.setattr(cuda_calls, "_core", core)
    monkeypatch.setattr(cuda_calls, "stream_of", mock.Mock(return_value=0))
    monkeypatch.setattr(cuda_calls, "is_on_current_gpu", lambda tensor: False)
    monkeypatch.setattr(torch.cuda, "device", mock.MagicMock())
    workspace = mock.Mock(world_size=1, device=torch.device("cpu"))
    A, B = torch.ones(2, 3, 8).bfloat16(), torch.ones(8, 5).bfloat16()
    gathered, scales, (out,) = _ready(workspace, A, B)(A, [B], [None])
    problem, addresses, *_ = core.async_input_mm.call_args.args
    assert repr(problem).endswith(f"{CONFIG.core})")
    assert addresses[:4] == (A.data_ptr(), B.data_ptr(), 0, 0)
    assert (out.shape, scales) == ((2, 3, 5), None)
    assert gathered is not None
    assert torch.equal(gathered, A)
    assert gathered.data_ptr() != A.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float8_e4m3fn])
def test_a_dtype_without_kernels_is_not_taken_for_fp16(dtype: torch.dtype) -> None:
    workspace = mock.Mock(world_size=1, device=torch.device("cpu"))
    A, B = torch.ones(2, 8).to(dtype), torch.ones(8, 8).to(dtype)
    with pytest.raises(InvalidArgument, match=f"^A_shard: found dtype {dtype}, wanted torch.bfl"):
        _ready(workspace, A, B)


def _ready(workspace: Any, A: torch.Tensor, B: torch.Tensor) -> Any:
    """The call of one rank that returns A."""
    group: Any = mock.Mock(**{"size.return_value": 1})
    call = PlainGather(A, [B], [None], group, GatherSettings(return_A=True))
    return call.ready_on_cuda(workspace, [CONFIG], PUSH)


def test_kept_calls_end_with_their_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.new_group([0])
        alive = weakref.ref(group)
        A, B = torch.ones(2, 3), torch.ones(3, 4)
        for _ in range(2):
            agmm.all_gather_matmul(A, B, group)
            agmm.matmul_reduce_scatter(A, B, group)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        assert alive() is None
    finally:
        dist.destroy_process_group()


def test_an_a_that_chunks_still_come_to_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy, which TMA's alignment would ask for, would be of what lies there before."""
    core = mock.Mock(wraps=_core, async_input_mm=mock.Mock())
    monkeypatch.setattr(cuda_calls, "_core", core)
    monkeypatch.setattr(cuda_calls, "stream_of", mock.Mock(return_value=0))
    monkeypatch.setattr(cuda_calls, "is_on_current_gpu", lambda tensor: False)
    monkeypatch.setattr(torch.cuda, "device", mock.MagicMock())
    memory = torch.zeros(4 * 8 + 8, dtype=torch.bfloat16)
    shift = next(i for i in range(8) if memory[i:].data_ptr() % 16 == 2)
    a, b = memory[shift : shift + 32].view(4, 8), torch.zeros(8, 16, dtype=torch.bfloat16)
    signals = torch.ones(2, dtype=torch.uint32)
    with pytest.raises(InvalidArgument, match=r"^a: found address 0x\w+, wanted a multiple of 16 "):
        async_input_mm.on_cuda(a, b, signals, 0, config=CONFIG)
    core.async_input_mm.assert_not_called()
    async_input_mm.on_cuda(a, b, None, 0, config=CONFIG)  # there already: a copy will do
    _, addresses, *_ = core.async_input_mm.call_args.args
    assert addresses[0] % 16 == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_misaligned_part_of_a_wider_weight_keeps_its_strides(dtype: torch.dtype) -> None:
    """The kernel gets the leading dimension of the caller's tensor."""
    wide = torch.arange(6 * 64).view(6, 64).remainder(7).to(dtype)
    B = wide[:, 4:36].t()
    kept: list[torch.Tensor] = []
    address = cuda_calls.aligned_pointer(B, kept)
    assert address % 16 == 0 and [copy.data_ptr() for copy in kept] == [address]
    assert kept[0].stride() == B.stride()
    assert torch.equal(kept[0].float(), B.float())


def test_what_a_graph_writes_to_outlives_a_larger_call(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch frees the workspace of its fused matmul + reduce-scatter when a call needs more."""
    world = dist.group.WORLD
    assert world is not None
    workspaces: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(symm_mem, "_group_name_to_workspace_tensor", workspaces)
    is_capturing = mock.Mock()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", is_capturing)
    cuda = torch.device("cuda", 0)
    alive = []
    for size, captured in ((8, True), (8, True), (16, False), (32, True)):
        if group not in workspaces or workspaces[group].numel() < size:
            workspaces[group] = torch.empty(size)
            alive.append(weakref.ref(workspaces[group]))
        is_capturing.return_value = captured
        plain_scatter.keep_for_graph(cuda, world)
    gc.collect()
    assert [workspace() is not None for workspace in alive] == [True, False, True]
    workspaces.clear()
    gc.collect()
    assert [workspace() is not None for workspace in alive] == [True, False, True]
