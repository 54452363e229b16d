"""Jobs on two hosts, played by CPU ranks that take themselves to be on different ones."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torchrun
import two_hosts_work

from agmm.testing.ranks import RankPool


@pytest.mark.parametrize("world_size", [2, 4])
def test_tensor_parallelism_inside_each_host(world_size: int) -> None:
    with RankPool(world_size, env={"AGMM_TIMEOUT_S": "30"}) as pool:
        pool.submit(on_own_host)
        assert pool.collect() == [[]] * world_size
        assert "agmm:" not in "".join(pool.stderr(rank) for rank in range(world_size))


def on_own_host() -> list[str]:
    import torch.distributed as dist

    return two_hosts_work.job(dist.get_rank() // (dist.get_world_size() // 2))


def test_job_of_two_nodes_as_torchrun_starts_it(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here = ["--master-addr=127.0.0.1", f"--master-port={port}"]
    env = {"GLOO_SOCKET_IFNAME": "lo", "AGMM_TIMEOUT_S": "60"}
    nodes = [
        torchrun.Node(
            tmp_path,
            ["--nnodes=2", "--nproc-per-node=2", f"--node-rank={node}", *here],
            [two_hosts_work.__file__],
            env,
        )
        for node in (0, 1)
    ]
    found = [node.finish(150) for node in nodes]
    assert [done.returncode for done in found] == [0, 0], found
    lines = sorted(line for done in found for line in done.stdout.splitlines())
    assert lines == [f"rank {rank} on node {rank // 2}: []" for rank in range(4)]
