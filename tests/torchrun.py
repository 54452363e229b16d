"""torchrun with its own agent, whose ranks run programs as it runs them. All are forked from a
process that has imported torch, which each of them would do anew for seconds."""

from __future__ import annotations

import io
import multiprocessing
import os
import runpy
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from agmm.testing import ranks


class Node:
    """`torchrun OPTIONS PROGRAM` on one node; the program is a script, or "-m" and a module, with
    its arguments. Its output goes through files in `folder`."""

    def __init__(
        self,
        folder: Path,
        options: Sequence[str],
        program: Sequence[str],
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._logs = [folder / f"{uuid.uuid4().hex}.{name}" for name in ("stdout", "stderr")]
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(ranks.PRELOADED)
        self._process = context.Process(
            target=_agent,
            args=(
                [*options, "--start-method=fork"],
                list(program),
                list(map(str, self._logs)),
                {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            ),
        )
        self._process.start()

    def finish(self, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Its exit code and output; it is ended where it takes longer."""
        self._process.join(timeout_s)
        code = self._process.exitcode
        if code is None:
            self._process.terminate()  # upon which the agent ends its ranks
            self._process.join()
        texts = [log.read_text() if log.exists() else "" for log in self._logs]
        assert code is not None, f"not done within {timeout_s} s\n{texts[1]}"
        return subprocess.CompletedProcess(["torchrun"], code, *texts)


def run(
    folder: Path, options: Sequence[str], program: Sequence[str], timeout_s: float = 240
) -> subprocess.CompletedProcess[str]:
    """`torchrun --standalone OPTIONS PROGRAM`."""
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--rdzv-id={uuid.uuid4()}"]
    return Node(folder, [*rendezvous, *options], program).finish(timeout_s)


def _agent(
    options: list[str], program: list[str], logs: list[str], environment: dict[str, str]
) -> None:
    from torch.distributed import run as torchrun

    os.environ.clear()  # the server's, of when it began
    os.environ.update(environment)
    for number, log in enumerate(logs, 1):
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    arguments = torchrun.parse_args([*options, "none.py"])
    config, _, _ = torchrun.config_from_args(arguments)
    torchrun.elastic_launch(config, _rank)(program)


def _rank(program: list[str]) -> None:
    torch.set_num_threads(1)
    # Ranks share a file: a line and its end in one write, also under PYTHONUNBUFFERED=1.
    for stream in (sys.stdout, sys.stderr):
        cast(io.TextIOWrapper, stream).reconfigure(line_buffering=True, write_through=False)
    try:
        if program[0] == "-m":
            sys.argv = program[1:]
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = program
            runpy.run_path(program[0], run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
