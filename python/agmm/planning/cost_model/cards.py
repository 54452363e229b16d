"""Times of calls that the library multiplies, on cards that agmm has no matmul kernels for: from a
few numbers of each card, which its data sheet says, or its driver.

Rates of data sheets are peaks. They are multiplied by the share of its own that an H100 sustains,
by the constants of nvidia-h100-80gb-hbm3.json: no other card has been measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from agmm.planning import formats
from agmm.planning.cost_model.gpu_constants import ELEMENT_BYTES
from agmm.planning.problems import (
    ALL_GATHER_MATMUL,
    MATMUL_ALL_REDUCE,
    MATMUL_REDUCE_SCATTER,
    Problem,
    portable_pieces,
)

_MATMUL_SHARE = 0.72
"""The matmul_tflops of an H100, 713, over the 989 of its data sheet."""
_MEMORY_SHARE = 0.92
"""The matmul_gb_per_s of an H100, 3067, over the 3350 of its data sheet."""
_LINK_SHARE = 0.8
"""The push_gb_per_s of an H100, 362, over the 450 of its data sheet."""
_CALL_US = 10.0
"""The time of the barrier of a call, and of what precedes it: a guess, twice an H100's
launch_us."""
_PRODUCT_US = 5.0
"""The launch_us of an H100, which the library's matmul of each piece takes at least."""
_NETWORK_SHARE = 0.9
"""The share of its rate that a network of 400 Gb/s sustains: a guess."""
_MESSAGE_US = 20.0
"""The time of a message between hosts beside its bytes: a guess, of the size of NCCL's."""


@dataclass(frozen=True)
class Card:
    """The peaks of a card, as its data sheet or its driver says them."""

    name: str
    tflops: float
    """The rate of dense products of 16 bits, added up in float32."""
    fp8_tflops: float
    """The rate of dense products of fp8; 0 where the card has none."""
    memory_gb_per_s: float
    link_gb_per_s: float
    """What one card sends to its peers, all together, in one direction."""
    source: str

    def matmul_us(self, m: int, n: int, k: int, *, is_fp8: bool = False) -> float:
        """The time of the library's matmul."""
        tflops = self.fp8_tflops if is_fp8 and self.fp8_tflops else self.tflops
        size = 1 if is_fp8 and self.fp8_tflops else ELEMENT_BYTES
        nbytes = size * (m * k + k * n) + ELEMENT_BYTES * m * n
        computing = 2e-6 * m * n * k / (tflops * _MATMUL_SHARE)
        return _PRODUCT_US + max(computing, 1e-3 * nbytes / (self.memory_gb_per_s * _MEMORY_SHARE))

    def copy_us(self, nbytes: float) -> float:
        """The time in which one card sends so many bytes to its peers."""
        return 1e-3 * nbytes / (self.link_gb_per_s * _LINK_SHARE)

    def memory_us(self, nbytes: float) -> float:
        """The time in which a kernel reads and writes so many bytes."""
        return _PRODUCT_US + 1e-3 * nbytes / (self.memory_gb_per_s * _MEMORY_SHARE)


_BOTH_WAYS = "per direction, half of what the sheet says of both"
_SHEETS = (
    ("nvidia-a100-sxm4-80gb", 312, 0, 2039, 300, f"NVLink {_BOTH_WAYS}"),
    ("nvidia-a100-sxm4-40gb", 312, 0, 1555, 300, f"NVLink {_BOTH_WAYS}"),
    ("nvidia-a100-pcie-40gb", 312, 0, 1555, 32, "PCIe 4.0 x16, without an NVLink bridge"),
    ("nvidia-a100-80gb-pcie", 312, 0, 1935, 32, "PCIe 4.0 x16, without an NVLink bridge"),
    ("nvidia-l40s", 362, 733, 864, 32, "PCIe 4.0 x16"),
    ("nvidia-b200", 2250, 4500, 8000, 900, f"NVLink {_BOTH_WAYS}"),
    (
        "nvidia-rtx-pro-6000-blackwell-server-edition",
        *(500, 1000, 1597, 64, "PCIe 5.0 x16; TFLOPS: half of 1 and 2 PFLOPS with sparsity"),
    ),
    (
        "nvidia-rtx-pro-6000-blackwell-workstation-edition",
        *(500, 1000, 1792, 64, "PCIe 5.0 x16; TFLOPS: an eighth and a quarter of 4000 in fp4"),
    ),
)
"""The numbers of NVIDIA's data sheets: dense TFLOPS of 16 bits and of fp8 (half of those that the
sheet has with sparsity), GB/s of the memory and of the links."""

CARDS = {
    name: Card(name, tflops, fp8, memory, link, f"NVIDIA's data sheet; links: {links}")
    for name, tflops, fp8, memory, link, links in _SHEETS
}
"""The cards that have constants of their data sheets, by name."""

_FLOPS_PER_SM_AND_CLOCK = {8: 2048, 9: 4096, 10: 8192}
"""The dense FLOPs of 16 bits of one multiprocessor in a clock, by major compute capability: the
TFLOPS of the data sheets of A100, H100 and B200 over multiprocessors and boost clock."""
_OF_SMALL_SM = 1024
"""The dense FLOPs of a smaller multiprocessor in a clock, as 8.6, 8.9 and 12.x have them: those of
L40S and RTX PRO 6000, by their data sheets."""


@dataclass(frozen=True)
class DriverFacts:
    """What NVML says of a card."""

    name: str
    capability: tuple[int, int]
    sm_count: int
    sm_mhz: int
    """The highest clock of the multiprocessors."""
    memory_mhz: int
    """The highest clock of the memory, which moves two bits on each wire in a clock."""
    memory_bits: int
    """The width of the memory's bus."""
    nvlinks: int = 0
    """How many NVLinks are active."""
    pcie_gb_per_s: float = 0.0
    """What its PCIe slot moves in one direction."""


_NVLINK_GB_PER_S = {8: 25.0, 9: 25.0, 10: 50.0}
"""What one NVLink moves in one direction, by major compute capability, by NVIDIA's data sheets."""


def of_facts(facts: DriverFacts) -> Card:
    """A card of which no data sheet is known here, from what its driver says."""
    major, minor = facts.capability
    is_small = (major, minor) not in ((8, 0), (9, 0)) and major != 10
    per_clock = _OF_SMALL_SM if is_small else _FLOPS_PER_SM_AND_CLOCK.get(major, _OF_SMALL_SM)
    tflops = 1e-6 * facts.sm_count * facts.sm_mhz * per_clock
    has_fp8 = facts.capability >= (8, 9)
    nvlink = facts.nvlinks * _NVLINK_GB_PER_S.get(major, 25.0)
    return Card(
        facts.name,
        tflops,
        2 * tflops if has_fp8 else 0.0,
        2e-3 * facts.memory_mhz * facts.memory_bits / 8,
        nvlink or facts.pcie_gb_per_s or _LEAST_PCIE_GB_PER_S,
        f"its driver: {facts.sm_count} SMs at {facts.sm_mhz} MHz",
    )


_LEAST_PCIE_GB_PER_S = 16.0
"""The rate of PCIe 3.0 x16 in one direction, where the driver says nothing of the slot."""


def with_measured(card: Card, tflops: float, memory_gb_per_s: float, link: float | None) -> Card:
    """The card with rates that were measured on it, which need no share of a peak any more."""
    return replace(
        card,
        tflops=tflops / _MATMUL_SHARE,
        memory_gb_per_s=memory_gb_per_s / _MEMORY_SHARE,
        link_gb_per_s=card.link_gb_per_s if link is None else link / _LINK_SHARE,
        source="one card, measured" if link is None else "cards of this host, measured",
    )


def unfused_us(card: Card, problem: Problem) -> float:
    """The predicted time of the group's backend and the library, one after the other."""
    m, n, k, size, is_fp8 = _of(problem)
    sent = (size - 1) / size * m
    if problem.op == ALL_GATHER_MATMUL:
        shard = sent * k * (1 if is_fp8 else ELEMENT_BYTES)
        return _CALL_US + card.copy_us(shard) + card.matmul_us(m, n, k, is_fp8=is_fp8)
    steps = 2 if problem.op == MATMUL_ALL_REDUCE else 1
    sums = steps * (_CALL_US + card.copy_us(sent * n * ELEMENT_BYTES))
    return card.matmul_us(m, n, k, is_fp8=is_fp8) + sums


def portable_us(card: Card, problem: Problem) -> float:
    """The predicted time of the portable path: each copy beside the products before it."""
    m, n, k, size, is_fp8 = _of(problem)
    rows = ceil(m / size)
    if problem.op == ALL_GATHER_MATMUL:
        pieces = portable_pieces(rows)
        nbytes = rows * k * (1 if is_fp8 else ELEMENT_BYTES)
        return _gather_us(card, (rows, n, k, is_fp8), size, pieces, card.copy_us(nbytes))
    copied, product = (
        card.copy_us(rows * n * ELEMENT_BYTES),
        card.matmul_us(rows, n, k, is_fp8=is_fp8),
    )
    sent = computed = 0.0
    for _ in range(size - 1):
        computed += product
        sent = max(sent, computed) + copied
    done = max(sent, computed + product) + _CALL_US
    done += card.memory_us((size + 1) * rows * n * ELEMENT_BYTES)
    if problem.op == MATMUL_ALL_REDUCE:
        done += _CALL_US + card.copy_us((size - 1) * rows * n * ELEMENT_BYTES)
    return done


def _gather_us(
    card: Card, product: tuple[int, int, int, bool], size: int, pieces: int, shard_us: float
) -> float:
    rows, n, k, is_fp8 = product
    computed = _CALL_US + card.matmul_us(rows, n, k, is_fp8=is_fp8)
    piece = card.matmul_us(ceil(rows / pieces), n, k, is_fp8=is_fp8)
    for i in range((size - 1) * pieces):
        come = _CALL_US + (i + 1) * shard_us / pieces
        computed = max(computed, come) + piece
    return computed


def between_hosts_us(card: Card, problem: Problem, hosts: int, network_gb_per_s: float) -> float:
    """The predicted time of a call by messages, of ranks on several hosts of as many ranks each, on
    paper: nobody has measured one.

    Args:
        network_gb_per_s: what each rank sends to other hosts, in one direction.
    """
    if problem.op != ALL_GATHER_MATMUL:
        return _sum_between_hosts_us(card, problem, hosts, network_gb_per_s)
    m, n, k, size, is_fp8 = _of(problem)
    rows, local = m // size, size // hosts
    pieces = portable_pieces(rows)
    nbytes = rows * k * (1 if is_fp8 else ELEMENT_BYTES)
    product = rows, n, k, is_fp8
    # The own host's rows, as on one host.
    computed = _gather_us(card, product, local, pieces, card.copy_us(nbytes))
    message = _sent_us(nbytes * (hosts - 1) / pieces, network_gb_per_s)
    piece = card.matmul_us(ceil(rows / pieces), n, k, is_fp8=is_fp8)
    for i in range(pieces):
        come = _CALL_US + (i + 1) * (message + _MESSAGE_US)
        for _ in range(hosts - 1):
            # A chunk is shared inside the host, then those of all its ranks are multiplied.
            shared = max(come, computed) + _CALL_US
            computed = shared + piece
            for j in range(1, local):
                computed = max(computed, shared + j * card.copy_us(nbytes / pieces)) + piece
    return computed


def _sum_between_hosts_us(card: Card, problem: Problem, hosts: int, network: float) -> float:
    """The predicted time of a sum by messages: each host adds up for the ranks of the others first,
    and sends while it goes on."""
    m, n, k, size, is_fp8 = _of(problem)
    rows, local = m // size, size // hosts
    nbytes = rows * n * ELEMENT_BYTES
    # What one rank of each host gets of this one: products for all ranks of a host, then their sum.
    inside = replace(problem, m=rows * local, op=MATMUL_REDUCE_SCATTER, world_size=local)
    alone = card.matmul_us(rows, n, k, is_fp8=is_fp8)
    round_us = portable_us(card, inside) if local > 1 else alone
    computed = sent = 0.0
    for _ in range(hosts - 1):
        computed += round_us
        sent = max(sent, computed) + _MESSAGE_US + _sent_us(nbytes, network)
    done = max(sent, computed + round_us) + card.memory_us((hosts + 1) * nbytes)
    if problem.op == MATMUL_ALL_REDUCE:
        done += _exchange_us(card, size * nbytes, size, hosts, network)
    return done


def unfused_between_hosts_us(
    card: Card, problem: Problem, hosts: int, network_gb_per_s: float
) -> float:
    """The predicted time of the library's matmul and a collective over several hosts."""
    m, n, k, size, is_fp8 = _of(problem)
    is_gather = problem.op == ALL_GATHER_MATMUL
    nbytes = m * k * (1 if is_fp8 else ELEMENT_BYTES) if is_gather else m * n * ELEMENT_BYTES
    steps = 2 if problem.op == MATMUL_ALL_REDUCE else 1
    exchange = _exchange_us(card, nbytes, size, hosts, network_gb_per_s)
    return steps * exchange + card.matmul_us(m, n, k, is_fp8=is_fp8)


def _sent_us(nbytes: float, network_gb_per_s: float) -> float:
    return 1e-3 * nbytes / (network_gb_per_s * _NETWORK_SHARE)


def _exchange_us(
    card: Card, nbytes: float, size: int, hosts: int, network_gb_per_s: float
) -> float:
    """The time of a collective of so many bytes of all ranks: along rails, all ranks at a time, of
    which each brings in its share of the other hosts' rows."""
    network = _sent_us(nbytes * (hosts - 1) / hosts / (size // hosts), network_gb_per_s)
    return _MESSAGE_US + max(network, card.copy_us((size - hosts) / size * nbytes))


def _of(problem: Problem) -> tuple[int, int, int, int, bool]:
    is_fp8 = problem.format.startswith("float8") or _kind(problem) == formats.FP8
    return problem.m, problem.n, problem.k, problem.world_size, is_fp8


def _kind(problem: Problem) -> str:
    return formats.of(problem.format).kind
