"""The rank spawner itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import rank_work
import torch

from agmm.testing.ranks import RankError, RankPool, ctrl_c_held


def test_results_come_by_rank(pool: RankPool) -> None:
    assert pool.run(rank_work.own_rank) == list(range(5))
    results = pool.run(rank_work.echo, torch.tensor([1, 2]), factor=10)
    assert [result.tolist() for result in results] == [[10 + r, 20 + r] for r in range(5)]


def test_remote_exception_names_rank_and_place_and_leaves_the_pool_usable(pool: RankPool) -> None:
    with pytest.raises(RankError, match="rank 2: Traceback") as caught:
        pool.run(rank_work.raise_in, 2)
    assert "in raise_in" in str(caught.value)
    assert "ValueError: a fault on purpose" in str(caught.value)
    assert caught.value.ranks == [2]
    assert caught.value.exit_codes == {}
    assert pool.run(rank_work.own_rank) == list(range(5))


def test_ended_rank_is_reported_with_code_and_stderr_and_the_rest_killed() -> None:
    with RankPool(2, env={"AGMM_TEST_VALUE": "a"}) as pool:
        assert pool.run(rank_work.environment_value, "AGMM_TEST_VALUE") == ["a", "a"]
        started = time.monotonic()
        with pytest.raises(
            RankError, match=r"rank 1: ended with exit code 9\nlast words"
        ) as caught:
            pool.run(rank_work.exit_in, 1, 9)
        assert time.monotonic() - started < 20
        assert caught.value.ranks == [1]
        assert caught.value.exit_codes == {1: 9}
        assert not any(process.is_alive() for process in pool.processes)
        with pytest.raises(RankError, match="processes have ended"):
            pool.run(rank_work.own_rank)


def test_rank_that_does_not_answer_is_reported() -> None:
    with RankPool(2) as pool:
        pool.timeout_s = 1
        with pytest.raises(RankError, match="rank 0: did not answer within 1 s"):
            pool.run(rank_work.sleep_in, 0)
        assert not any(process.is_alive() for process in pool.processes)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="world_size: found 0, wanted >= 1"):
        RankPool(0)
    with pytest.raises(ValueError, match="device: found 'tpu', wanted 'cpu' or 'cuda'"):
        RankPool(1, "tpu")


def test_ctrl_c_waits_for_the_start_of_processes() -> None:
    """A thread that does not block SIGINT takes it; the block still runs to its end."""
    other_threads_end = threading.Event()
    other_thread = threading.Thread(target=other_threads_end.wait)
    other_thread.start()
    show_mask = (
        "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    )
    reached = ""

    @ctrl_c_held()
    def start() -> None:
        nonlocal reached
        os.kill(os.getpid(), signal.SIGINT)
        reached = subprocess.run(
            [sys.executable, "-c", show_mask], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        with pytest.raises(KeyboardInterrupt):
            start()
    finally:
        other_threads_end.set()
        other_thread.join()
    assert reached == "True"  # the child was started after the signal, with SIGINT blocked
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
