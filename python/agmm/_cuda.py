"""The CUDA backend: kernels and transports of `agmm._core` on torch's symmetric memory."""

from __future__ import annotations

import socket
from datetime import timedelta
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.distributed.distributed_c10d import _get_process_group_store

from agmm import _core, plan
from agmm.errors import AgmmError, InvalidArgument, Unsupported
from agmm.plan import KernelConfig

_SLOT_GRANULE = 32 << 20
"""Slots grow in steps of this many bytes, so that slightly larger calls do not grow them again."""

_HOPPER = (9, 0)


@cache
def kernels() -> tuple[KernelConfig, ...]:
    """The kernels of this build."""
    return tuple(KernelConfig.of(kernel) for kernel in _core.kernels())


@lru_cache(maxsize=4096)
def _core_config(config: KernelConfig) -> _core.KernelConfig:
    return _core.KernelConfig(
        config.tile_m,
        config.tile_n,
        config.tile_k,
        config.cluster_m,
        config.cluster_n,
        config.schedule,
        config.max_swizzle,
        config.raster,
    )


@cache
def why_unfused(device: torch.device) -> str | None:
    """The reason why this device cannot run the kernels, or None."""
    if not _core.cuda_built:
        return "this build of agmm has no CUDA kernels (AGMM_CUDA=ON builds them)"
    capability = torch.cuda.get_device_capability(device)
    if capability != _HOPPER:
        return f"{device} has compute capability {capability[0]}.{capability[1]}, wanted 9.0"
    return None


@cache
def _sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


class _Layout(NamedTuple):
    column_major: bool
    leading: int


def b_layout(b: torch.Tensor) -> _Layout | None:
    """Row-major or column-major with its leading dimension; None where B is neither."""
    rows, columns = b.stride()
    if rows == 1 and columns >= b.shape[0]:
        return _Layout(True, columns)
    if columns == 1 and rows >= b.shape[1]:
        return _Layout(False, rows)
    # A direction of length 1 may have any stride.
    if b.shape[1] == 1:
        return _Layout(True, b.shape[0]) if rows == 1 else None
    if b.shape[0] == 1:
        return _Layout(False, b.shape[1]) if columns == 1 else None
    return None


def why_operand_unfused(name: str, tensor: torch.Tensor) -> str | None:
    if tensor.data_ptr() % 16 != 0:
        return f"{name}: its address is no multiple of 16 bytes (TMA alignment)"
    return None


def why_b_unfused(b: torch.Tensor) -> str | None:
    layout = b_layout(b)
    if layout is None:
        return f"B: strides {tuple(b.stride())} are neither row-major nor column-major"
    if layout.leading % plan.ALIGNMENT != 0:
        return f"B: leading dimension {layout.leading} is not a multiple of {plan.ALIGNMENT}"
    return why_operand_unfused("B", b)


def choose(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    world_size: int = 1,
    return_A: bool = False,
) -> KernelConfig:
    name = str(dtype).removeprefix("torch.")
    problem = plan.Problem(m, n, k, name, world_size, return_A, _sm_count(device))
    return plan.choose(problem, kernels())


def _stream(device: torch.device) -> int:
    return torch._C._cuda_getCurrentRawStream(device.index)


def async_input_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_chunk_signals: torch.Tensor | None,
    pivot: int,
    *,
    config: KernelConfig | None = None,
    bias: torch.Tensor | None = None,
    tile_times: torch.Tensor | None = None,
    sm_count: int = 0,
) -> torch.Tensor:
    """``a @ b (+ bias)``, each row chunk of ``a`` once its signal is 1.

    Args:
        a: [M, K] bf16 or fp16, row-major and contiguous.
        b: [K, N] of the same dtype, row-major or column-major.
        a_chunk_signals: uint32 [chunks] or [chunks, chunks_k], contiguous; None: all is ready.
        pivot: the first row chunk to compute.
        config: the kernel; chosen by `agmm.plan` when None.
        bias: [N], or None.
        tile_times: uint8, where the kernel records when each tile waited and ran (timed kernels).
        sm_count: CTAs at most; 0: one per multiprocessor.

    Raises:
        InvalidArgument: the kernel cannot take the operands; the message says why.
    """
    m, k = a.shape
    n = b.shape[1]
    layout = b_layout(b)
    if layout is None:
        raise InvalidArgument(
            f"b: found strides {tuple(b.stride())}, wanted row-major or column-major"
        )
    out = a.new_empty(m, n)
    if m == 0:
        return out
    chunks_m, chunks_k = 1, 1
    if a_chunk_signals is not None:
        chunks_m = a_chunk_signals.shape[0]
        chunks_k = a_chunk_signals.shape[1] if a_chunk_signals.dim() == 2 else 1
    if config is None:
        config = choose(m, n, k, a.dtype, a.device)
    with torch.cuda.device(a.device):
        try:
            _core.async_input_mm(
                a.data_ptr(),
                b.data_ptr(),
                out.data_ptr(),
                0 if bias is None else bias.data_ptr(),
                m,
                n,
                k,
                a.dtype == torch.bfloat16,
                layout.column_major,
                layout.leading,
                0 if a_chunk_signals is None else a_chunk_signals.data_ptr(),
                chunks_m,
                chunks_k,
                pivot,
                _core_config(config),
                dist.get_rank() if dist.is_initialized() else 0,
                sm_count,
                0 if tile_times is None else tile_times.data_ptr(),
                _stream(a.device),
            )
        except ValueError as error:
            raise InvalidArgument(str(error)) from None
    return out


class _Buffers(NamedTuple):
    core: _core.CudaWorkspace
    memory: torch.Tensor
    handle: Any


class CudaWorkspace:
    """Gather buffers, signals and credits of one group on one device.

    Every rank of the group must make the same calls in the same order, as with any collective.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.slot_bytes = 0
        self._generation = 0
        self._buffers: _Buffers | None = None
        self._captured = False
        self._kept: list[_Buffers] = []  # read by CUDA graphs that may be replayed
        self._why_unfused: str | None = None

    @classmethod
    def create(
        cls, group: dist.ProcessGroup, slot_bytes: int, device: torch.device | None = None
    ) -> CudaWorkspace:
        """Make the workspace of ``group``. Collective.

        Raises:
            Unsupported: the GPUs of the group cannot reach each other's memory; all ranks raise.
            AgmmError: not all ranks came within AGMM_TIMEOUT_S.
        """
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device())
        workspace = cls(group, device)
        workspace.ensure(slot_bytes)
        return workspace

    def ensure(self, slot_bytes: int) -> None:
        """Grow the slots to at least ``slot_bytes``. Collective where they have to grow."""
        if self._why_unfused is not None:
            raise Unsupported(self._why_unfused)
        if slot_bytes <= self.slot_bytes or self.world_size == 1:
            return
        if torch.cuda.is_current_stream_capturing():
            raise AgmmError(
                f"workspace: found slots of {self.slot_bytes} bytes during CUDA graph capture, "
                f"wanted {slot_bytes}; call once with this shape before the capture"
            )
        slot_bytes = -(-slot_bytes // _SLOT_GRANULE) * _SLOT_GRANULE
        self._agree(slot_bytes)
        torch.cuda.synchronize(self._device)
        dist.barrier(self._group, device_ids=[self._device.index])
        if self._buffers is not None and self._captured:
            self._kept.append(self._buffers)
        self._buffers = None
        self._captured = False
        self._buffers = self._open(slot_bytes)
        self.slot_bytes = slot_bytes

    def _open(self, slot_bytes: int) -> _Buffers:
        size = _core.CudaWorkspace.workspace_bytes(slot_bytes, self.world_size)
        memory = symm_mem.empty(size, dtype=torch.uint8, device=self._device)
        handle = symm_mem.rendezvous(memory, self._group.group_name)
        words = memory[2 * slot_bytes :].view(torch.int32)
        words.zero_()
        words[torch.tensor(_core.CudaWorkspace.credit_words(self.world_size))] = 1
        core = _core.CudaWorkspace(self.rank, list(handle.buffer_ptrs), slot_bytes)
        torch.cuda.synchronize(self._device)
        dist.barrier(self._group, device_ids=[self._device.index])
        return _Buffers(core, memory, handle)

    def _agree(self, slot_bytes: int) -> None:
        """All ranks want the same slots, and their GPUs reach each other; else all ranks raise."""
        self._generation += 1
        store = _get_process_group_store(self._group)
        prefix = f"agmm/{self._group.group_name}/{self._device.type}/{self._generation}"
        own = f"{slot_bytes};{socket.gethostname()};{self._device.index}"
        store.set(f"{prefix}/{self.rank}", own)
        keys = [f"{prefix}/{peer}" for peer in range(self.world_size)]
        limit_s = _core.timeout_seconds()
        try:
            store.wait(keys, timedelta(seconds=limit_s))
        except RuntimeError:
            missing = [p for p, key in enumerate(keys) if not store.check([key])]
            raise AgmmError(
                f"workspace: rank {self.rank} wants slots of {slot_bytes} bytes, but ranks "
                f"{missing} did not ask for any in {limit_s:g} s; wanted the same calls with the "
                "same shapes on all ranks"
            ) from None
        found = [store.get(key).decode().split(";") for key in keys]
        sizes = sorted({int(size) for size, _, _ in found})
        if len(sizes) > 1:
            raise AgmmError(
                f"workspace: found ranks that want slots of {sizes} bytes, wanted the same calls "
                "with the same shapes on all ranks"
            )
        hosts = {host for _, host, _ in found}
        devices = [int(index) for _, _, index in found]
        if len(hosts) > 1:
            self._why_unfused = f"group: found ranks on {len(hosts)} hosts, wanted one"
        elif len(set(devices)) < len(devices):
            self._why_unfused = f"group: found ranks on the same GPU {devices}, wanted one each"
        elif all(index < torch.cuda.device_count() for index in devices):
            for a in devices:
                for b in devices:
                    if a != b and not torch.cuda.can_device_access_peer(a, b):
                        self._why_unfused = f"group: cuda:{a} has no peer access to cuda:{b}"
        if self._why_unfused is not None:
            raise Unsupported(self._why_unfused)

    def all_gather_matmul(
        self,
        A_shard: torch.Tensor,
        Bs: list[torch.Tensor],
        biases: list[torch.Tensor | None],
        *,
        return_A: bool,
        config: KernelConfig | None = None,
        tile_times: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """Gather ``A_shard`` and multiply it by each of ``Bs``. Collective.

        Args:
            A_shard: [M_local, K], contiguous, the same shape and dtype on all ranks.
            Bs: weights [K, N], N free for each of them, row-major or column-major.
            biases: for each weight a bias [N] or None.
            return_A: whether A [M, K] is wanted, in a tensor of its own (the pull transport).
            config: the kernel; chosen by `agmm.plan` when None.
            tile_times: uint8, see `async_input_mm`; of the first weight's tiles.

        Returns:
            A or None, and out [M, N] for each weight.

        Raises:
            InvalidArgument: the kernel cannot take the operands; nothing was enqueued.
        """
        rows, k = A_shard.shape
        m = self.world_size * rows
        device = self._device
        if self.world_size == 1:
            outs = [
                async_input_mm(A_shard, B, None, 0, config=config, bias=bias)
                for B, bias in zip(Bs, biases, strict=True)
            ]
            return (A_shard.clone() if return_A else None), outs
        if m * k * 2 > self.slot_bytes:
            self.ensure(m * k * 2)
        assert self._buffers is not None
        if not self._captured and torch.cuda.is_current_stream_capturing():
            self._captured = True
        A = A_shard.new_empty(m, k) if return_A else None
        outs = []
        weights = []
        for B, bias in zip(Bs, biases, strict=True):
            layout = b_layout(B)
            if layout is None:
                raise InvalidArgument(
                    f"B: found strides {tuple(B.stride())}, wanted row-major or column-major"
                )
            n = B.shape[1]
            chosen = config or choose(
                m, n, k, A_shard.dtype, device, world_size=self.world_size, return_A=return_A
            )
            out = A_shard.new_empty(m, n)
            outs.append(out)
            weights.append(
                (
                    B.data_ptr(),
                    layout.leading,
                    layout.column_major,
                    n,
                    0 if bias is None else bias.data_ptr(),
                    out.data_ptr(),
                    _core_config(chosen),
                )
            )
        try:
            self._buffers.core.all_gather_matmul(
                A_shard.data_ptr(),
                rows,
                k,
                A_shard.dtype == torch.bfloat16,
                weights,
                0 if A is None else A.data_ptr(),
                0 if tile_times is None else tile_times.data_ptr(),
                _stream(device),
            )
        except ValueError as error:
            raise InvalidArgument(str(error)) from None
        return A, outs
