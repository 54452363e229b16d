"""Random mixtures of experts against the unfused model in float64, as many as are asked for: more
than a test has time for. ``python tests/api/moe_many.py --cases 100000`` in the repository.

Each case is a forward, the same again for its bits, and the gradients of all operands in float64. A
number names the cases of a batch, so that a fault can be found again.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))  # as pytest does

import moe_work as work

from agmm.ops import seen
from agmm.testing import ranks

BATCH = 50
OPTIONS: tuple[dict[str, bool], ...] = (
    {},
    {"save_gathered": True},
    {"return_gathered": True},
    {"save_preactivation": False, "return_gathered": True, "save_gathered": True},
)


def faults_of(world_size: int, seed: int, strict: bool, device: str) -> list[str]:
    """The faults of one batch on this rank."""
    seen.MAX_KINDS = 1 << 20
    group = dist.group.WORLD
    work.ids_of.cache_clear()
    work.routing_of.cache_clear()
    cases = work.random_cases(world_size, seed, BATCH)
    found = work.forward_faults(world_size, cases, group, strict=strict, device=device)
    options = OPTIONS[seed % len(OPTIONS)]
    wrong = work.gradient_faults(world_size, cases, options, group, device=device)
    return [*(found or []), *(wrong or [])]


def main() -> int:
    """Runs the batches in turn on groups of each size, and says how many cases went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--ranks", default="2,3,4,1,5,8", help="sizes of the groups, in turn")
    parser.add_argument("--first", type=int, default=1_000_000, help="the first batch")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    sizes = [int(size) for size in given.ranks.split(",")]
    batches = -(-given.cases // BATCH)
    wrong, done, begun = 0, 0, time.monotonic()
    for place, size in enumerate(sizes):
        numbers = range(given.first + place, given.first + batches, len(sizes))
        with ranks.RankPool(size, given.device, timeout_s=600) as pool:
            for seed in numbers:
                found = pool.run(faults_of, size, seed, given.device == "cpu", given.device)
                lines = [line for of_rank in found for line in of_rank]
                for line in lines:
                    print(f"batch {seed}: {line}", flush=True)
                wrong, done = wrong + len(lines), done + BATCH
                if done % 1000 == 0:
                    took = time.monotonic() - begun
                    print(f"{done} cases, {wrong} faults, {took:.0f} s", flush=True)
    print(f"{done} cases on {given.ranks} ranks: {wrong} faults", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
