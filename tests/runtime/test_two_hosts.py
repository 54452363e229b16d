"""Jobs on two hosts, played by CPU ranks that take themselves to be on different ones."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import two_hosts_work

from agmm.testing.ranks import RankPool

HERE = Path(__file__).parent


@pytest.mark.parametrize("world_size", [2, 4])
def test_tensor_parallelism_inside_each_host(world_size: int) -> None:
    with RankPool(world_size, env={"AGMM_TIMEOUT_S": "30"}) as pool:
        pool.submit(on_own_host)
        assert pool.collect() == [[]] * world_size
        assert "agmm:" not in "".join(pool.stderr(rank) for rank in range(world_size))


def on_own_host() -> list[str]:
    import torch.distributed as dist

    return two_hosts_work.job(dist.get_rank() // (dist.get_world_size() // 2))


def test_job_of_two_nodes_as_torchrun_starts_it() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "AGMM_TIMEOUT_S": "60",
    }
    nodes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2"),
                *("--nproc-per-node=2", f"--node-rank={node}"),
                *("--master-addr=127.0.0.1", f"--master-port={port}"),
                str(HERE / "two_hosts_work.py"),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in (0, 1)
    ]
    try:
        found = [node.communicate(timeout=150) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    assert [node.returncode for node in nodes] == [0, 0], found
    lines = sorted(line for out, _ in found for line in out.splitlines())
    assert lines == [f"rank {rank} on node {rank // 2}: []" for rank in range(4)]
