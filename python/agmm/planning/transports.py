"""The ways in which data moves between the ranks of a call, and what is known of each: its name,
what it needs of a group, what it serves, when it is legal, how long it takes, and what the core is
told of it. This module needs no torch.

A transport is a value: frozen, hashable, and equal to every other one of its name. The core has an
object for each `FusedGather` too (``src/transport/gather_transport.hpp``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from agmm.planning import cost_model, formats
from agmm.planning.cost_model import At, Load, Tiling
from agmm.planning.problems import (
    ALIGNMENT,
    ALL_GATHER_MATMUL,
    CPU,
    MATMUL_ALL_REDUCE,
    MATMUL_REDUCE_SCATTER,
    MAX_COLUMN_CHUNKS,
    MAX_PUSH_PARTS,
    MAX_PUSH_RANKS,
    MAX_SCATTER_TILES,
    PLAIN,
    KernelConfig,
    Problem,
)

ADDRESSABLE_PEERS = "addressable peers"
"""The need of a transport whose ranks write into each other's memory, or read it."""
MESSAGES = "messages"
"""The need of a transport that goes by the group's backend, which every group has."""

_ANY_KIND = (formats.BITS_16, formats.FP8)

CoreArguments = tuple[int, int, int, int, int]
"""A transport as `_core.GatherProblem` takes it."""


class Transport(ABC):
    """A way in which data moves between ranks."""

    needs: str = ADDRESSABLE_PEERS
    """The ability that a group has to have: `ADDRESSABLE_PEERS` or `MESSAGES`."""
    ops: tuple[str, ...] = ()
    """The ops that have the transport, beside the unfused path, which every op has."""
    kinds: tuple[str, ...] = (formats.BITS_16,)
    """The kinds of formats for which these ops have it on a GPU."""
    why_not_fp8: str = ""
    """The reason why operands of fp8 do not have the transport that operands of 16 bits have.
    Scales travel where the core's `GatherTransport::carries_scales` says so."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The transport's name in tables, plans and messages."""

    @property
    def family(self) -> str:
        """The name that transports share which differ in how a shard is cut alone."""
        return self.name

    def serves(self, problem: Problem) -> bool:
        """Whether the problem's op has the transport on a GPU for the problem's format."""
        return problem.op in self.ops and formats.of(problem.format).kind in self.kinds

    def of_fp8(self, problem: Problem) -> str:
        """`why_not_fp8` behind a colon, of operands of fp8; empty where nothing is to be said."""
        is_fp8 = formats.of(problem.format).kind == formats.FP8
        return f": {self.why_not_fp8}" if is_fp8 and self.why_not_fp8 else ""

    def why_illegal(self, problem: Problem, kernel: KernelConfig | None) -> str | None:
        """The reason why a call whose operands agmm can multiply cannot use the transport, or None.

        Args:
            problem: of an op of which the transport is one, or of an all-gather -> matmul.
            kernel: the matmul's; None where it is not agmm's.
        """
        copying = copy_transports(problem, kernel)
        if self in copying:
            return None
        wanted = " or ".join(one.name for one in copying) or "another kernel"
        return f"found transport {self.name}, wanted {wanted}{self.of_fp8(problem)}"

    def predicted_us(self, problem: Problem, kernel: KernelConfig | None) -> float | None:
        """The predicted time of a legal call in µs, on a GPU and of a format with kernels; None
        where nothing is known of it."""
        return None

    def gain(self, world_size: int) -> float:
        """The share of the time of another way to compute a matmul + all-reduce that this one may
        be predicted to take at most, to be chosen instead."""
        return 1.0


def _why_no_tiles_are_sent(problem: Problem) -> str | None:
    """The reason why a kernel cannot send its tiles to the other ranks, or None."""
    found, most = problem.world_size, MAX_PUSH_RANKS
    return None if 1 < found <= most else f"group: found {found} ranks, wanted 2 to {most}"


class FusedGather(Transport):
    """A transport of A to a matmul that computes each chunk once it is there."""

    @abstractmethod
    def us_at(self, at: At, tiling: Tiling, load: Load) -> float:
        """The predicted time in µs of an all-gather -> matmul."""

    @abstractmethod
    def core_arguments(self) -> CoreArguments:
        """The transport as the core takes it."""

    def predicted_us(self, problem: Problem, kernel: KernelConfig | None) -> float | None:
        assert kernel is not None
        at, tiling = At(problem), Tiling(problem, kernel)
        return self.us_at(at, tiling, at.load(tiling))


@dataclass(frozen=True)
class Push(FusedGather):
    """Each rank writes what it has to the others: its shard by the copy engines, the tiles of a
    matmul + reduce-scatter by the kernel that computes them, and on CPU ranks by a thread."""

    name = "push"
    ops = (ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER)
    kinds = _ANY_KIND

    def why_illegal(self, problem: Problem, kernel: KernelConfig | None) -> str | None:
        if problem.op == ALL_GATHER_MATMUL or problem.gpu == CPU:
            return super().why_illegal(problem, kernel)
        return _why_no_tiles_are_sent(problem)

    def us_at(self, at: At, tiling: Tiling, load: Load) -> float:
        return at.fused_us(tiling, load, is_pull=False)

    def predicted_us(self, problem: Problem, kernel: KernelConfig | None) -> float | None:
        if problem.op == ALL_GATHER_MATMUL:
            return super().predicted_us(problem, kernel)
        return None if kernel is None else cost_model.tile_push_scatter_us(problem, kernel)

    def core_arguments(self) -> CoreArguments:
        return 0, 0, 0, 0, 0


@dataclass(frozen=True)
class Pull(FusedGather):
    """Each rank copies the others' shards into the A that is returned, by the copy engines."""

    name = "pull"
    ops = (ALL_GATHER_MATMUL,)
    why_not_fp8 = "it copies rows of A without their scales"

    def us_at(self, at: At, tiling: Tiling, load: Load) -> float:
        return at.fused_us(tiling, load, is_pull=True)

    def core_arguments(self) -> CoreArguments:
        return 1, 0, 0, 0, 0


@dataclass(frozen=True)
class SmPush(FusedGather):
    """Spare warps of the matmul write the shard, ``chunk_columns`` columns at a time, each chunk in
    ``parts`` parts of its rows; the ``first_peers`` nearest consumers get the whole shard before
    the others get any of it. With ``head_chunks`` they write so many chunks only, and CTAs of their
    own, on multiprocessors that have no tile, write the others.

    Its name, in configs and tables: ``sm16x128``, ``sm16x128+1`` with one first peer, ``sm64x96h4``
    with 4 chunks in the head.
    """

    parts: int
    chunk_columns: int
    first_peers: int = 0
    head_chunks: int = 0

    ops = (ALL_GATHER_MATMUL,)
    kinds = _ANY_KIND

    @property
    def name(self) -> str:
        first = f"+{self.first_peers}" if self.first_peers else ""
        head = f"h{self.head_chunks}" if self.head_chunks else ""
        return f"sm{self.parts}x{self.chunk_columns}{first}{head}"

    @property
    def family(self) -> str:
        return "sm push"

    def has_ctas(self, k: int) -> bool:
        """Whether CTAs of their own push some of K columns."""
        return 0 < self.head_chunks * self.chunk_columns < k

    def why_illegal(self, problem: Problem, kernel: KernelConfig | None) -> str | None:
        has_it = problem.gpu != CPU and self.serves(problem)
        if kernel is None or not has_it or PUSH not in copy_transports(problem, kernel):
            return super().why_illegal(problem, kernel)
        if not kernel.can_push:
            return f"sm push: found {kernel.kernel}, wanted a kernel with spare warps"
        if not 1 < problem.world_size <= MAX_PUSH_RANKS:
            return f"sm push: found {problem.world_size} ranks, wanted 2 to {MAX_PUSH_RANKS}"
        if not problem.peer_atomics:
            return "sm push: found links without native atomics, wanted NVLink between all GPUs"
        if self.first_peers >= problem.world_size:
            return (
                f"sm push: found {self.first_peers} first peers of {problem.world_size} ranks, "
                f"wanted at most {problem.world_size - 1}"
            )
        if self.has_ctas(problem.k) and cost_model.free_sms(problem, kernel) < 1:
            return f"sm push: found {kernel.kernel} on all multiprocessors, wanted free ones"
        return self.why_wrongly_cut(problem.k)

    def why_wrongly_cut(self, k: int) -> str | None:
        """The reason why a shard of K columns cannot be cut so, or None."""
        if not 0 < self.parts <= MAX_PUSH_PARTS or self.parts & (self.parts - 1):
            return f"sm push: found {self.parts} parts, wanted a power of 2 up to {MAX_PUSH_PARTS}"
        if self.chunk_columns < 1 or self.chunk_columns % ALIGNMENT != 0:
            return f"sm push: found {self.chunk_columns} columns, wanted a multiple of {ALIGNMENT}"
        if self.first_peers and self.head_chunks:
            return f"sm push: found first peers and a head in {self.name}, wanted one of them"
        chunks = -(-k // self.chunk_columns)
        if chunks > MAX_COLUMN_CHUNKS:
            return f"sm push: found {chunks} chunks, wanted at most {MAX_COLUMN_CHUNKS}"
        return None

    def us_at(self, at: At, tiling: Tiling, load: Load) -> float:
        cut = self.chunk_columns, self.parts, self.first_peers
        return at.sm_push_us(tiling, load, *cut, self.has_ctas(at.problem.k))

    def core_arguments(self) -> CoreArguments:
        return 2, self.parts, self.chunk_columns, self.first_peers, self.head_chunks


@dataclass(frozen=True)
class Gather(Transport):
    """A kernel of agmm gathers A with its scales; then the library or another kernel multiplies."""

    name = "gather"
    ops = (ALL_GATHER_MATMUL,)
    kinds = _ANY_KIND

    def why_illegal(self, problem: Problem, kernel: KernelConfig | None) -> str | None:
        if problem.gpu != CPU and not self.serves(problem):
            return f"plan: found gather of {problem.format}, wanted another transport"
        return cost_model.why_not_gathered(problem)

    def predicted_us(self, problem: Problem, kernel: KernelConfig | None) -> float | None:
        return cost_model.gathered_us(problem, kernel)


@dataclass(frozen=True)
class Streamed(Transport):
    """A streaming kernel multiplies few rows. Behind a gather by packets it reads its weight while
    they are on their way; the sums that are scattered it sends itself."""

    name = "streamed"
    ops = (ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER)
    why_not_fp8 = "it is taken for bfloat16 and float16"

    def why_illegal(self, problem: Problem, kernel: KernelConfig | None) -> str | None:
        if problem.gpu == CPU or kernel is None or not self.serves(problem):
            return super().why_illegal(problem, kernel)
        if not kernel.is_streaming or problem.epilogue != PLAIN:
            return f"streamed: found {kernel.kernel}, wanted a streaming one without activation"
        if not problem.peer_atomics:
            return "streamed: found links without native atomics, wanted NVLink between all GPUs"
        if problem.op == ALL_GATHER_MATMUL:
            return cost_model.why_not_gathered(problem)
        return cost_model.why_no_streamed_scatter(problem)

    def predicted_us(self, problem: Problem, kernel: KernelConfig | None) -> float | None:
        assert kernel is not None
        if problem.op == ALL_GATHER_MATMUL:
            return cost_model.streamed_gather_us(problem, kernel)
        return cost_model.streamed_scatter_us(problem, kernel)


@dataclass(frozen=True)
class Portable(Transport):
    """Copy engines move data beside the library's matmul of each piece; on CPU ranks a `Push`."""

    name = "portable"
    ops = (ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER, MATMUL_ALL_REDUCE)
    kinds = _ANY_KIND


@dataclass(frozen=True)
class Backend(Transport):
    """The group's backend gathers A, scatters the sum or makes it, and the library multiplies."""

    name = "unfused"
    needs = MESSAGES

    def why_illegal(self, problem: Problem, kernel: KernelConfig | None) -> str | None:
        return None if kernel is None else super().why_illegal(problem, kernel)

    def predicted_us(self, problem: Problem, kernel: KernelConfig | None) -> float | None:
        if problem.op == ALL_GATHER_MATMUL:
            return cost_model.unfused_us(problem)
        if problem.op == MATMUL_REDUCE_SCATTER:
            return cost_model.matmul_reduce_scatter_us(problem)
        return cost_model.matmul_all_reduce_us(problem)


@dataclass(frozen=True)
class Torch(Transport):
    """Torch's fused op multiplies and scatters, by the symmetric memory of torch."""

    name = "torch"
    ops = (MATMUL_REDUCE_SCATTER,)
    why_not_fp8 = "it is taken for bfloat16 and float16"

    def why_illegal(self, problem: Problem, kernel: KernelConfig | None) -> str | None:
        if kernel is not None:
            return super().why_illegal(problem, kernel)
        if not self.serves(problem):
            return f"A: dtype={problem.format}, torch's fused op is taken for bfloat16 and float16"
        if problem.world_size == 1:
            return "group: found 1 rank, torch's fused op wants several"
        return None

    def predicted_us(self, problem: Problem, kernel: KernelConfig | None) -> float | None:
        return cost_model.fused_matmul_reduce_scatter_us(problem)


@dataclass(frozen=True)
class Lagged(Transport):
    """The kernel of a matmul + all-reduce sends its tiles to their owners, and those that are
    finished to all ranks, a lag behind."""

    name = "lagged"
    ops = (MATMUL_ALL_REDUCE,)
    why_not_fp8 = "no kernel sends finished tiles of fp8"

    def why_illegal(self, problem: Problem, kernel: KernelConfig | None) -> str | None:
        if problem.op != MATMUL_ALL_REDUCE or kernel is None:
            return super().why_illegal(problem, kernel)
        reason = _why_no_tiles_are_sent(problem)
        if reason is not None:
            return reason
        tiles, most = cost_model.scatter_tiles(problem, kernel), MAX_SCATTER_TILES // 2
        if tiles > most:  # each has a signal for its sums and one when it is finished
            return f"plan: found {tiles} tiles in a chunk, wanted at most {most}"
        return None

    def predicted_us(self, problem: Problem, kernel: KernelConfig | None) -> float | None:
        return None if kernel is None else cost_model.lagged_all_reduce_us(problem, kernel)

    def gain(self, world_size: int) -> float:
        """Return 0.95 between 4 ranks, as six of eight calls on 4 H100 show; 0.9 is a guess."""
        return 0.95 if world_size == 4 else 0.9


@dataclass(frozen=True)
class Scatter(Transport):
    """The kernel of a matmul + reduce-scatter sends its tiles to their owners, and an all-gather
    then makes the sum one of all ranks."""

    name = "scatter"
    ops = (MATMUL_ALL_REDUCE,)
    kinds = _ANY_KIND

    def why_illegal(self, problem: Problem, kernel: KernelConfig | None) -> str | None:
        if problem.op != MATMUL_ALL_REDUCE or kernel is None:
            return super().why_illegal(problem, kernel)
        return _why_no_tiles_are_sent(problem)

    def predicted_us(self, problem: Problem, kernel: KernelConfig | None) -> float | None:
        return None if kernel is None else cost_model.scatter_all_reduce_us(problem, kernel)

    def gain(self, world_size: int) -> float:
        """Return 0.97, within which six calls on 4 H200 were predicted."""
        return 0.97


PUSH, PULL = Push(), Pull()
GATHER, BACKEND, TORCH = Gather(), Backend(), Torch()
LAGGED, SCATTER = Lagged(), Scatter()
PORTABLE, STREAMED = Portable(), Streamed()


def copy_transports(
    problem: Problem, kernel: KernelConfig | None = None
) -> tuple[FusedGather, ...]:
    """The legal transports by copies of a fused call with this kernel, the usual one first; none
    where the kernel cannot serve the call.

    Pull copies A into the tensor that is returned. With push the kernel writes that tensor, if it
    can (`KernelConfig.stores_A`).
    """
    if problem.gpu == CPU:
        return (PUSH,)
    has_pull = PULL.serves(problem)
    if not problem.return_A or not (has_pull or problem.world_size > 1):  # one rank has all of A
        return (PUSH,)
    stores_A = kernel is None or problem.b_layout in kernel.stores_A
    return ((PUSH,) if stores_A else ()) + ((PULL,) if has_pull else ())
