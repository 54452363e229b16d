"""vLLM's own linears and its own compiler pass over agmm's plugin, with its released files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import vllm_work

from agmm.testing.ranks import RankPool

FILES = Path(sys.prefix) / "vllm"
"""Each version of vLLM has a folder here, which `make test-clients` makes."""


def _needs(version: str) -> list[pytest.MarkDecorator]:
    return [
        pytest.mark.clients,
        pytest.mark.skipif(
            not (FILES / version).is_dir(),
            reason=f"needs the files of vllm {version}, which `make test-clients` installs",
        ),
    ]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("version", "work"),
    [
        pytest.param("0.33.0", vllm_work.linears, marks=_needs("0.33.0")),
        pytest.param("0.32.0", vllm_work.linears, marks=_needs("0.32.0")),
        pytest.param("0.31.0", vllm_work.fused_by_a_pass, marks=_needs("0.31.0")),
    ],
)
def test_vllm(tmp_path: Path, version: str, work: Callable[..., Any], world_size: int) -> None:
    with RankPool(world_size, "cpu") as pool:  # of its own: a process imports one vLLM
        found = pool.run(work, tmp_path, FILES / version)
    assert found == [[]] * world_size
