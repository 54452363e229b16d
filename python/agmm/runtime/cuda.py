"""The CUDA backend: kernels and transports of `agmm._core` on torch's symmetric memory."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from agmm import _core, _env
from agmm.errors import AgmmError, InvalidArgument, Unsupported
from agmm.planning import call_plans, heuristics, legality, plans
from agmm.planning.plans import KernelConfig, Plan, SmPush
from agmm.runtime import calls, devices, groups

_SLOT_GRANULE = 32 << 20
"""Slots grow in steps of this many bytes, so that slightly larger calls do not grow them again."""

_STAGING_ALIGNMENT = 256

_TMA_ALIGNMENT = 16

_HOPPER = divmod(_core.CAPABILITY, 10)

_ALIGNING_CYCLES = 1_000_000
"""So long the GPU is busy before a timeline's call, so that the hosts' launches are done, and the
ranks begin when an all-reduce ends."""

_rendezvous = 0
"""How many rendezvous of symmetric memory this process has made, as far as agmm sees: its own, and
those of the workspaces that torch's ops make for themselves."""

_torch_workspaces: dict[str, int] = {}
"""The last size seen of the workspace that torch's ops have made for a group, by its name."""


def note_torch_workspaces() -> None:
    """Counts the rendezvous that torch's own ops have made since the last time: one for each
    workspace that is new or larger. To be called after each such op that agmm calls."""
    global _rendezvous
    for name, workspace in getattr(symm_mem, "_group_name_to_workspace_tensor", {}).items():
        if workspace is not None and _torch_workspaces.get(name) != workspace.numel():
            _torch_workspaces[name] = workspace.numel()
            _rendezvous += 1


def _why_no_peer_access(own: str, uuids: Sequence[str]) -> str:
    """The reason why GPUs of this host, by UUID, do not reach each other's memory, or "".

    Only those that this process sees can be asked; under Slurm or Ray that is often its own alone.
    The others are taken to be reached: their memory is mapped by handles, which does not need them
    to be visible, and where it cannot be the rendezvous says so.
    """
    visible = devices.visible()
    here = sorted({visible[uuid] for uuid in uuids if uuid in visible})
    for a in here:
        for b in here:
            if a != b and not torch.cuda.can_device_access_peer(a, b):
                return f"group: cuda:{a} has no peer access to cuda:{b}"
    return ""


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
        config.timed,
        config.splits,
    )


_CORE_DTYPES = {torch.bfloat16: _core.DType.bfloat16, torch.float16: _core.DType.float16}


def _core_dtype(name: str, tensor: torch.Tensor) -> _core.DType:
    """What the kernels call the dtype of an argument.

    Raises:
        InvalidArgument: they have no such element type.
    """
    found = _CORE_DTYPES.get(tensor.dtype)
    if found is None:
        names = " or ".join(str(dtype) for dtype in _CORE_DTYPES)
        raise InvalidArgument(f"{name}: found dtype {tensor.dtype}, wanted {names}")
    return found


def _core_transport(transport: str) -> tuple[int, int, int, int, int]:
    """As `_core.CudaWorkspace.all_gather_matmul` wants it."""
    sm_push = SmPush.parse(transport)
    if sm_push is not None:
        return 2, *sm_push
    return int(transport == "pull"), 0, 0, 0, 0


@cache
def why_unfused(device: torch.device) -> str | None:
    """The reason why this device cannot run the kernels, or None."""
    if not _core.cuda_built:
        return "this build of agmm has no CUDA kernels (AGMM_CUDA=ON builds them)"
    capability = torch.cuda.get_device_capability(device)
    if capability != _HOPPER:
        return f"{device} has compute capability {capability[0]}.{capability[1]}, wanted 9.0"
    return None


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


def _aligned_pointer(tensor: torch.Tensor, kept: list[torch.Tensor]) -> int:
    """The tensor's address, or that of a copy in ``kept`` where it is not as TMA wants it.

    A copy, not another path: addresses differ between ranks, and the path must not.
    """
    address = tensor.data_ptr()
    if address % _TMA_ALIGNMENT != 0:
        tensor = tensor.clone()
        kept.append(tensor)
        address = tensor.data_ptr()
    return address


def _bias_pointer(bias: torch.Tensor | None, kept: list[torch.Tensor]) -> int:
    if bias is None:
        return 0
    if not bias.is_contiguous():
        bias = bias.contiguous()
        kept.append(bias)
    return _aligned_pointer(bias, kept)


def why_b_unfused(b: torch.Tensor) -> str | None:
    layout = b_layout(b)
    if layout is None:
        return f"B: strides {tuple(b.stride())} are neither row-major nor column-major"
    if layout.leading % plans.ALIGNMENT != 0:
        return f"B: leading dimension {layout.leading} is not a multiple of {plans.ALIGNMENT}"
    return None


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
        a: [M, K] bf16 or fp16, row-major and contiguous; with signals, at a multiple of 16 bytes.
        b: [K, N] of the same dtype, row-major or column-major.
        a_chunk_signals: uint32 [chunks] or [chunks, chunks_k], contiguous; None: all is ready.
        pivot: the first row chunk to compute.
        config: the kernel; chosen by `agmm.planning` when None.
        bias: [N], or None.
        tile_times: uint8, where the kernel records when each tile waited and ran (timed kernels).
        sm_count: CTAs at most; 0: as many as there are multiprocessors. Fewer are launched where
            they take no longer.

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
    kept: list[torch.Tensor] = []  # copies live until the call is enqueued
    chunks_m, chunks_k = 1, 1
    if a_chunk_signals is not None:
        if a.data_ptr() % _TMA_ALIGNMENT != 0:  # a copy would be made before the chunks have come
            raise InvalidArgument(
                f"a: found address {a.data_ptr():#x}, wanted a multiple of {_TMA_ALIGNMENT} bytes"
            )
        chunks_m = a_chunk_signals.shape[0]
        chunks_k = a_chunk_signals.shape[1] if a_chunk_signals.dim() == 2 else 1
    if config is None:
        problem = call_plans.problem(m, n, k, a.dtype, a.device, column_major=layout.column_major)
        config = call_plans.planner(None, a.device).fused_plan(problem).kernel
        assert config is not None
    with torch.cuda.device(a.device):
        scratch = None if config.splits == 1 else _split_scratch(a.device)
        try:
            _core.async_input_mm(
                _aligned_pointer(a, kept),
                _aligned_pointer(b, kept),
                out.data_ptr(),
                _bias_pointer(bias, kept),
                m,
                n,
                k,
                _core_dtype("a", a),
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
                0 if scratch is None else scratch.data_ptr(),
                _stream(a.device),
            )
        except ValueError as error:
            raise InvalidArgument(str(error)) from None
    return out


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _STAGING_ALIGNMENT) * _STAGING_ALIGNMENT


def _split_scratch(device: torch.device) -> torch.Tensor:
    """What calls that split K need, for one call at a time. On the current stream."""
    scratch = torch.empty(_core.split_scratch_bytes(), dtype=torch.uint8, device=device)
    scratch[: _core.SPLIT_COUNTER_BYTES].zero_()
    return scratch


class _Buffers(NamedTuple):
    core: _core.CudaWorkspace
    memory: torch.Tensor
    handle: Any
    staging_offset: int
    """In `memory`: where `CudaWorkspace.start_all_gather` puts the own shard for the peers. Not
    where pull stages it, since a pull would have to wait until all peers have copied it."""

    def staged(self, rank: int, like: torch.Tensor) -> torch.Tensor:
        """What that rank has staged, a tensor as `like`."""
        offset = self.staging_offset // like.element_size()
        staged: torch.Tensor = self.handle.get_buffer(rank, like.shape, like.dtype, offset)
        return staged


class CudaWorkspace:
    """Gather buffers, signals and credits of one group on one device.

    Every rank of the group must make the same calls in the same order, as with any collective.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group_ref = weakref.ref(group)
        self._known = groups.of(group)
        self.lock = self._known.lock
        self._device = device
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.slot_bytes = 0
        self._buffers: _Buffers | None = None
        self._captured = False
        self._kept: list[_Buffers] = []  # read by CUDA graphs that may be replayed
        self._why_unfused: str | None = None
        self._refused: tuple[int, str] | None = None
        self._shares_gpu = False
        calls.be_asked()
        self._gather_stream: torch.cuda.Stream | None = None
        self._gathered = torch.cuda.Event()  # of the last eager gather by copies
        self._unfinished: torch.Tensor | None = None  # kept while copies may be written to it

    @property
    def _group(self) -> dist.ProcessGroup:
        group = self._group_ref()
        if group is None:
            raise AgmmError("group: found a destroyed one, wanted one that is alive")
        return group

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
        """Grow the slots to at least ``slot_bytes``. Collective where they have to grow.

        Raises:
            Unsupported: the GPUs cannot reach each other's memory, or one has too little left; all
                ranks raise, and the slots are as they were.
        """
        with self.lock:
            if self._why_unfused is not None:
                raise Unsupported(self._why_unfused)
            if slot_bytes <= self.slot_bytes or self.world_size == 1:
                return
            if self._refused is not None and slot_bytes > self._refused[0]:
                raise Unsupported(self._refused[1])
            if torch.cuda.is_current_stream_capturing():
                raise AgmmError(
                    f"workspace: found slots of {self.slot_bytes} bytes during CUDA graph capture, "
                    f"wanted {slot_bytes}; call once with this shape before the capture, or "
                    "agmm.reserve"
                )
            with torch.cuda.device(self._device):
                self._grow(slot_bytes)

    def release(self) -> None:
        """Give the memory back; the next call takes it anew. Collective.

        Raises:
            AgmmError: a CUDA graph was captured with this memory, which it may use at any time; all
                ranks raise.
        """
        with self.lock:
            if self.world_size == 1:
                return
            captured = self._captured or bool(self._kept)
            found = self._known.exchange("whether graphs need a workspace", json.dumps(captured))
            ranks = [rank for rank, told in enumerate(found) if json.loads(told)]
            if ranks:
                raise AgmmError(
                    f"workspace: found CUDA graphs that use it on ranks {ranks}, wanted none: a "
                    "graph may be replayed as long as the group is there"
                )
            if self._buffers is None:
                return
            with torch.cuda.device(self._device):
                self._finish_calls()
            self._buffers, self.slot_bytes, self._refused = None, 0, None

    def _finish_calls(self) -> None:
        """Behind this no rank reads or writes the buffers any more."""
        torch.cuda.synchronize(self._device)
        dist.barrier(self._group, device_ids=[self._device.index])

    def _grow(self, slot_bytes: int) -> None:
        wanted = slot_bytes
        is_captured = self._agree(slot_bytes)
        if is_captured:
            # The old buffers stay for the graphs. All that stay are smaller than the new ones.
            slot_bytes = max(slot_bytes, 2 * self.slot_bytes)
        slot_bytes = -(-slot_bytes // _SLOT_GRANULE) * _SLOT_GRANULE
        memory = self._allocate(wanted, slot_bytes)
        self._finish_calls()
        if self._buffers is not None and self._captured:
            self._kept.append(self._buffers)
        self._buffers = None
        self._captured = False
        self.slot_bytes = 0
        self._buffers = self._open(memory, slot_bytes)
        self.slot_bytes = slot_bytes

    def _sizes(self, slot_bytes: int) -> tuple[int, int]:
        """The staging place's offset in a workspace, and the size of all."""
        size = _core.CudaWorkspace.workspace_bytes(slot_bytes, self.world_size)
        staging_offset = _aligned(size)
        return staging_offset, staging_offset + _aligned(-(-slot_bytes // self.world_size))

    def _allocate(self, wanted: int, slot_bytes: int) -> torch.Tensor:
        """This rank's part, before anything is given up. All ranks raise where one has no room."""
        memory, error = None, ""
        _, size = self._sizes(slot_bytes)
        try:
            memory = symm_mem.empty(size, dtype=torch.uint8, device=self._device)
        except RuntimeError as e:
            error = f"{size} bytes of GPU memory: {e}".splitlines()[0]
        errors = self._known.exchange("whether they have memory for a workspace", error)
        for rank, found in enumerate(errors):
            if found:
                reason = f"workspace: rank {rank} could not get {found}"
                self._refused = wanted - 1, reason
                raise Unsupported(reason)
        assert memory is not None
        return memory

    def _open(self, memory: torch.Tensor, slot_bytes: int) -> _Buffers:
        staging_offset, _ = self._sizes(slot_bytes)
        global _rendezvous
        _rendezvous += 1
        handle = symm_mem.rendezvous(memory, self._group.group_name)
        first_word = _core.CudaWorkspace.words_offset(slot_bytes, self.world_size)
        words = memory[first_word:].view(torch.int32)
        words.zero_()
        words[torch.tensor(_core.CudaWorkspace.credit_words(self.world_size))] = 1
        places = list(handle.buffer_ptrs)
        if places[self.rank] != memory.data_ptr():
            raise AgmmError(
                f"workspace: found it {memory.data_ptr() - places[self.rank]} bytes inside another "
                "allocation of torch's pool for symmetric memory, wanted one of its own; "
                "TORCH_SYMMMEM_IMPLICIT_POOL=0 does without the pool"
            )
        reserved = call_plans.group_facts(self._group, self._device).reserved_sms
        core = _core.CudaWorkspace(self.rank, places, slot_bytes, reserved)
        torch.cuda.synchronize(self._device)
        dist.barrier(self._group, device_ids=[self._device.index])
        return _Buffers(core, memory, handle, staging_offset)

    def _agree(self, slot_bytes: int) -> bool:
        """All ranks want the same slots, and their GPUs reach each other; else all ranks raise.

        Returns:
            Whether a rank has captured calls with the present ones.
        """
        note_torch_workspaces()
        own = devices.uuid(self._device.index)
        told = json.dumps([slot_bytes, own, _rendezvous, self._captured])
        found = [json.loads(each) for each in self._known.exchange("the size of a workspace", told)]
        sizes = sorted({entry[0] for entry in found})
        if len(sizes) > 1:
            raise AgmmError(
                f"workspace: found ranks that want slots of {sizes} bytes, wanted the same calls "
                "with the same shapes on all ranks"
            )
        uuids = [entry[1] for entry in found]
        made = [entry[2] for entry in found]
        hosts = len(set(self._known.hosts()))
        self._shares_gpu = len(set(uuids)) < len(uuids)
        reason = ""
        if hosts > 1:
            reason = f"group: found ranks on {hosts} hosts, wanted one"
        elif self._shares_gpu and not _env.is_on(_env.SHARED_GPUS):
            shared = [rank for rank, uuid in enumerate(uuids) if uuids.count(uuid) > 1]
            reason = f"group: found ranks {shared} on GPUs that they share, wanted one each"
        elif len(set(made)) > 1:
            # torch numbers the exchanges of a rendezvous with one counter per process; ranks whose
            # counters differ would wait for each other's keys forever (seen with torch 2.11).
            reason = (
                f"group: found ranks that have made {made} workspaces before, wanted equally many: "
                "torch's rendezvous would hang; call in the group with more ranks first"
            )
        else:
            reason = _why_no_peer_access(own, uuids)
        # Ranks may see different GPUs.
        reasons = self._known.exchange("whether their GPUs reach each other", reason)
        self._why_unfused = next((each for each in reasons if each), None)
        if self._why_unfused is not None:
            raise Unsupported(self._why_unfused)
        return any(entry[3] for entry in found)

    def prepare(
        self,
        A_shard: torch.Tensor,
        Bs: Sequence[torch.Tensor],
        *,
        return_A: bool,
        config: KernelConfig | None = None,
        transport: str | None = None,
    ) -> FusedCall:
        """Everything about a call that depends on shapes, dtypes and layouts alone.

        Args:
            A_shard: [M_local, ..., K], contiguous, the same shape and dtype on all ranks.
            Bs: weights [K, N], N free for each of them, row-major or column-major.
            return_A: whether A is wanted, in a tensor of its own.
            config: the kernel; chosen by `agmm.planning` when None.
            transport: "push", "pull" or the name of an `SmPush`; that of the first weight's plan
                when None.

        Raises:
            InvalidArgument: a weight is neither row-major nor column-major; the first weight's
                kernel does not go with the transport.
        """
        k = A_shard.shape[-1]
        rows = A_shard.numel() // k
        m = self.world_size * rows
        leading = (self.world_size * A_shard.shape[0], *A_shard.shape[1:-1])
        weights: list[_Weight] = []
        for B in Bs:
            layout = b_layout(B)
            if layout is None:
                raise InvalidArgument(
                    f"B: found strides {tuple(B.stride())}, wanted row-major or column-major"
                )
            n = B.shape[1]
            problem = call_plans.problem(
                m,
                n,
                k,
                A_shard.dtype,
                self._device,
                world_size=self.world_size,
                return_A=return_A,
                column_major=layout.column_major,
                group=self._group,
            )
            if config is None:
                chosen = call_plans.planner(self._group, self._device).fused_plan(problem)
            else:
                chosen = Plan(legality.copy_transports(problem, config)[0], config)
            assert chosen.kernel is not None
            if not weights:
                transport = transport or chosen.transport
                reason = legality.why_transport_illegal(problem, chosen.kernel, transport)
                if reason is not None:
                    raise InvalidArgument(
                        f"config: {chosen.kernel.kernel}, return_A={return_A}: {reason}"
                    )
            weights.append(
                _Weight(
                    layout.leading,
                    layout.column_major,
                    n,
                    (*leading, n),
                    chosen.kernel,
                    _core_config(chosen.kernel),
                )
            )
        return FusedCall(
            self,
            rows,
            k,
            _core_dtype("A_shard", A_shard),
            m * k * 2,
            _core_transport(transport or "push"),
            (*leading, k) if return_A else None,
            tuple(weights),
        )

    @torch.no_grad()
    def start_all_gather(self, shard: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to gather ``shard`` along dimension 0 by copy engines. Collective.

        A matmul beside it keeps its multiprocessors, which NCCL's kernel would take from it: each
        rank stages its shard, and after a barrier copies the others' from where they lie (so does
        torch's ``symm_mem._low_contention_all_gather``, in the workspace that torch's fused ops use
        at the same time). One gather of a group at a time: eager calls are ordered on whichever
        streams they come; those of a capture, and replays, the caller has to order.

        Invariant: a rank stages its shard after the first barrier, which every rank reaches after
        it has finished its previous gather; and copies after the second, which every rank reaches
        after it has staged. Both barriers are on the caller's stream: beside a matmul that fills
        the GPU they would not begin before its end.

        Args:
            shard: [M_local, ...], contiguous, the same shape and dtype on all ranks. It may be
                written as soon as this returns.

        Returns:
            A function to call once, on the same stream, which returns the gathered tensor
            [world_size * M_local, ...].

        Raises:
            Unsupported: the GPUs of the group cannot reach each other's memory; all ranks raise.
            AgmmError: the slots are smaller than the gathered tensor during CUDA graph capture.
        """
        with self.lock:
            return self._start_all_gather(shard)

    def _start_all_gather(self, shard: torch.Tensor) -> Callable[[], torch.Tensor]:
        buffers = self._enter(shard.nbytes * self.world_size)
        stream = torch.cuda.current_stream(self._device)
        is_captured = torch.cuda.is_current_stream_capturing()
        if is_captured:
            self._captured = True
        else:
            stream.wait_event(self._gathered)
        if self._gather_stream is None:
            self._gather_stream = torch.cuda.Stream(self._device)
        limit_ms = math.ceil(_env.timeout_s() * 1e3)
        gathered = shard.new_empty(self.world_size * shard.shape[0], *shard.shape[1:])
        buffers.handle.barrier(channel=0, timeout_ms=limit_ms)
        buffers.staged(self.rank, shard).copy_(shard)
        buffers.handle.barrier(channel=0, timeout_ms=limit_ms)
        self._gather_stream.wait_stream(stream)
        done = torch.cuda.Event()
        # Until it is finished, or until the next one, which waits for the copies, where an
        # exception keeps the caller from that.
        self._unfinished = gathered
        with torch.cuda.stream(self._gather_stream):
            parts = gathered.chunk(self.world_size)
            for i in range(self.world_size):  # the own one last: nobody waits for its links
                source = (self.rank + 1 + i) % self.world_size
                parts[source].copy_(buffers.staged(source, shard))
            done.record()
        if not is_captured:
            self._gathered = done

        def finish() -> torch.Tensor:
            torch.cuda.current_stream(self._device).wait_event(done)
            self._unfinished = None
            return gathered

        return finish

    def _enter(self, slot_bytes: int) -> _Buffers:
        if slot_bytes > self.slot_bytes:
            self.ensure(slot_bytes)
        assert self._buffers is not None
        return self._buffers


class _Weight(NamedTuple):
    leading: int
    column_major: bool
    n: int
    out_shape: tuple[int, ...]
    config: KernelConfig
    core_config: _core.KernelConfig


class FusedCall(NamedTuple):
    """A call that is ready to be made any number of times with tensors of the same kind."""

    workspace: CudaWorkspace
    rows: int
    k: int
    dtype: _core.DType
    slot_bytes: int
    transport: tuple[int, int, int, int, int]
    gathered_shape: tuple[int, ...] | None
    weights: tuple[_Weight, ...]

    def __call__(
        self,
        A_shard: torch.Tensor,
        Bs: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        tile_times: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """Gather and multiply. Collective.

        Args:
            A_shard, Bs: as given to `CudaWorkspace.prepare`.
            biases: for each weight a bias [N] or None.
            tile_times: uint8, see `async_input_mm`; of the first weight's tiles.

        Returns:
            A or None, and out [world_size * M_local, ..., N] for each weight.

        Raises:
            InvalidArgument: the kernel cannot take the operands; nothing was enqueued.
        """
        workspace, rows, k, dtype, slot_bytes, transport, gathered_shape, weights = self
        if workspace.world_size == 1:
            outs = [
                async_input_mm(A_shard.view(rows, k), B, None, 0, config=w.config, bias=bias)
                for w, B, bias in zip(weights, Bs, biases, strict=True)
            ]
            outs = [
                torch.ops.aten._unsafe_view(out, w.out_shape)
                for w, out in zip(weights, outs, strict=True)
            ]
            return (None if gathered_shape is None else A_shard.clone()), outs
        with workspace.lock:
            workspace._known.calls += 1
            buffers = workspace._enter(slot_bytes)
            A = None if gathered_shape is None else A_shard.new_empty(gathered_shape)
            kept: list[torch.Tensor] = []  # copies live until the call is enqueued
            outs = []
            arguments = []
            for w, B, bias in zip(weights, Bs, biases, strict=True):
                out = A_shard.new_empty(w.out_shape)
                outs.append(out)
                arguments.append(
                    (
                        _aligned_pointer(B, kept),
                        w.leading,
                        w.column_major,
                        w.n,
                        _bias_pointer(bias, kept),
                        out.data_ptr(),
                        w.core_config,
                    )
                )
            captured = True  # also where the call fails half-way
            try:
                captured = buffers.core.all_gather_matmul(
                    _aligned_pointer(A_shard, kept),
                    rows,
                    k,
                    dtype,
                    arguments,
                    transport,
                    0 if A is None else A.data_ptr(),
                    0 if tile_times is None else tile_times.data_ptr(),
                    _stream(A_shard.device),
                )
            except ValueError as error:
                captured = False  # nothing was enqueued
                raise InvalidArgument(str(error)) from None
            finally:
                if captured:
                    workspace._captured = True
        return A, outs


def timeline(
    A_shard: torch.Tensor, B: torch.Tensor, group: dist.ProcessGroup
) -> list[dict[str, int]]:
    """When each chunk arrived and when its tiles were computed, in one fused call. Collective.

    Uses the timed kernel, which reads the GPU's global timer in the warp that loads the tiles.

    Args:
        A_shard: [M_local, K] bf16, contiguous.
        B: [K, N] bf16, column-major.

    Returns:
        For each tile a dict with ``chunk`` (the last one it needs, in the order of arrival),
        ``source`` (its rank), ``row`` and ``column`` (of tiles), ``sm`` (the multiprocessor) and,
        in ns of the GPU's timer, ``arrived_ns`` (when a tile first found all of the chunk there),
        ``wait_begin_ns``, ``start_ns`` and ``end_ns`` (of the tile's loads), and ``called_ns``
        (when the stream came to the call).

    Raises:
        AgmmError: this build has no timed kernel.
    """
    timed = [KernelConfig.of(kernel) for kernel in _core.kernels() if kernel.timed]
    if not timed:
        raise AgmmError("config: found no timed kernel in this build, wanted one")
    config = timed[0]
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    m_local = A_shard.shape[0]
    m, n = world_size * m_local, B.shape[1]
    tiles_m, tiles_n = -(-m // config.tile_m), -(-n // config.tile_n)
    times = torch.zeros(
        tiles_m * tiles_n, _core.TILE_TIMES_BYTES, dtype=torch.uint8, device=A_shard.device
    )
    workspace = CudaWorkspace.create(group, m * A_shard.shape[1] * 2, A_shard.device)
    problem = call_plans.problem(
        m, n, A_shard.shape[1], A_shard.dtype, A_shard.device, world_size=world_size, group=group
    )
    # The transport of the call that is looked at, as it goes with this kernel.
    wants_sm_push = SmPush.parse(
        call_plans.planner(group, A_shard.device).fused_plan(problem).transport
    )
    usual = [p.transport for p in heuristics.usual_plans(problem, config)]
    transport = usual[-1] if wants_sm_push else usual[0]
    token = torch.zeros(1, device=A_shard.device)
    called = torch.zeros(1, dtype=torch.int64, device=A_shard.device)
    stream = torch.cuda.current_stream(A_shard.device).cuda_stream
    call = workspace.prepare(A_shard, [B], return_A=False, config=config, transport=transport)
    for _ in range(3):  # the first calls pay for loading the kernel
        torch.cuda.synchronize(A_shard.device)
        dist.barrier(group, device_ids=[A_shard.device.index])
        torch.cuda._sleep(_ALIGNING_CYCLES)
        dist.all_reduce(token, group=group)
        _core.record_time(called.data_ptr(), stream)
        call(A_shard, [B], [None], times)
    words = times.cpu().view(torch.int64).view(tiles_m, tiles_n, -1)
    arrived: dict[int, int] = {}
    tiles = []
    for i in range(tiles_m):
        first, end = _core.chunks_of_rows(
            m, world_size, i * config.tile_m, min((i + 1) * config.tile_m, m)
        )
        chunk = max(range(first, end), key=lambda c: (c - rank) % world_size)
        for j in range(tiles_n):
            wait_begin, start, found, stop, sm = (int(v) for v in words[i, j, :5])
            arrived[chunk] = min(arrived.get(chunk, found), found)
            tiles.append(
                {
                    "chunk": chunk,
                    "source": chunk,
                    "wait_begin_ns": wait_begin,
                    "start_ns": wait_begin if chunk == rank else start,
                    "end_ns": stop,
                    "sm": sm & 0xFFFFFFFF,
                    "row": i,
                    "column": j,
                }
            )
    called_ns = int(called.item())
    return [
        {**tile, "arrived_ns": arrived[tile["chunk"]], "called_ns": called_ns} for tile in tiles
    ]
