"""Predicts calls of groups that span hosts, on paper: two hosts of eight GPUs, of which each sends
400 Gb/s to the other host. Prints the rows of the tables of docs/howto/several-hosts.md."""

from __future__ import annotations

from collections.abc import Iterator

from agmm.planning.cost_model.cards import (
    CARDS,
    Card,
    between_hosts_us,
    unfused_between_hosts_us,
)
from agmm.planning.problems import (
    ALL_GATHER_MATMUL,
    MATMUL_ALL_REDUCE,
    MATMUL_REDUCE_SCATTER,
    Problem,
)

HOSTS = 2
RANKS = 16
NETWORK_GB_PER_S = 50.0
"""What 400 Gb/s are."""
H200 = Card("nvidia-h200", 989, 1979, 4800, 450, "NVIDIA's data sheet")
"""An H200, whose matmuls between hosts are the library's, as those of other cards."""
SHAPES = {
    ALL_GATHER_MATMUL: [(8192, 3584, 8192), (16384, 3584, 8192), (65536, 3584, 8192)],
    MATMUL_REDUCE_SCATTER: [(8192, 8192, 1792), (16384, 8192, 1792), (65536, 8192, 1792)],
    MATMUL_ALL_REDUCE: [(16384, 8192, 1792)],
}
"""M x N x K on each rank: an MLP of hidden size 8192 and inner size 28672 over 16 ranks, gate and
up in one."""


def rows() -> Iterator[str]:
    """The rows of the table."""
    for card in (CARDS["nvidia-a100-sxm4-80gb"], H200):
        short = card.name.split("-")[1].upper()
        for op, shapes in SHAPES.items():
            for m, n, k in shapes:
                problem = Problem(m, n, k, op=op, world_size=RANKS)
                alone = card.matmul_us(m, n, k)
                unfused = unfused_between_hosts_us(card, problem, HOSTS, NETWORK_GB_PER_S)
                messages = between_hosts_us(card, problem, HOSTS, NETWORK_GB_PER_S)
                times = " | ".join(f"{us / 1e3:.2f}" for us in (alone, unfused, messages))
                what = op.replace("_", "-").removeprefix("matmul-").removesuffix("-matmul")
                yield (
                    f"| {short} | {what} | {m} x {n} x {k} | {times} | {messages / unfused:.2f} |"
                )


if __name__ == "__main__":
    print("\n".join(rows()))
