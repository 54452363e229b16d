"""The plugins for vLLM and SGLang. vLLM's classes are those of a double (`vllm_double`), which is
there at once; test_vllm has vLLM's own. The files of SGLang that the plugin meets are SGLang's."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import serving_work

from agmm.testing.ranks import RankPool

Pools = Callable[..., RankPool]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("options", "compiled"),
    [
        ({}, False),
        ({"bias": False}, True),
        ({"skip_bias_add": True}, False),
        ({"return_bias": False, "input_is_parallel": False}, True),
        ({"bias": False, "reduce_results": False}, False),
        ({"disable_tp": True}, False),
    ],
)
def test_a_row_parallel_linear_of_vllm(
    rank_pools: Pools, tmp_path: Path, options: dict[str, Any], compiled: bool, world_size: int
) -> None:
    found = rank_pools(world_size).run(serving_work.vllm_layer, tmp_path, options, compiled)
    assert found == [[]] * world_size


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("quantised", "its weight is that of QuantizedLinearMethod"),
        ("batch invariant", "VLLM_BATCH_INVARIANT is set"),
    ],
)
def test_what_stays_with_vllm_is_named(
    rank_pools: Pools, tmp_path: Path, kind: str, reason: str
) -> None:
    found = rank_pools(2).run(serving_work.vllm_left, tmp_path, kind)
    assert found == [[f"agmm leaves a linear to vLLM: {reason}"]] * 2


_NOT = "agmm does not serve this process: "
_LINEAR = "agmm.integrations.vllm_linear"


@pytest.mark.parametrize(
    ("version", "value", "other", "said", "served"),
    [
        ("0.33.0", "1", False, "", _LINEAR),
        ("0.32.1", "1", False, "", _LINEAR),
        ("0.31.0", "1", False, "", "async_tp"),
        ("0.33.0", "0", False, "", ""),
        ("0.30.0", "1", False, _NOT + "vllm: found version 0.30.0, wanted 0.31 to 0.33", ""),
        ("0.34.0", "1", False, _NOT + "vllm: found version 0.34.0, wanted 0.31 to 0.33", ""),
        ("0.33.0", "yes", False, _NOT + "AGMM_VLLM: found 'yes', wanted '1' or '0'", ""),
        (
            "0.33.0",
            "1",
            True,
            _NOT + "plugin: found types.SimpleNamespace in place of vLLM's RowParallelLinear, "
            "wanted vLLM's own",
            "types",
        ),
    ],
)
def test_the_plugin_of_vllm(
    rank_pools: Pools,
    tmp_path: Path,
    version: str,
    value: str,
    other: bool,
    said: str,
    served: str,
) -> None:
    found = rank_pools(2).run(serving_work.vllm_plugin, tmp_path, version, value, other)
    assert found == [([said] if said else [], served)] * 2


@pytest.mark.parametrize("value", ["", "0"])
def test_plugins_that_are_off_import_nothing(value: str) -> None:
    program = (
        "import sys; before = set(sys.modules)\n"
        "import agmm_plugins; agmm_plugins.vllm(); agmm_plugins.sglang()\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(*new - set(sys.stdlib_module_names))"
    )
    environment = {**os.environ, "AGMM_VLLM": value, "AGMM_SGLANG": value}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.split() == ["agmm_plugins"]


@pytest.mark.clients
@pytest.mark.skipif(
    not importlib.util.find_spec("sglang"),
    reason="needs the files of sglang 0.5.23, which `make test-clients` installs",
)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(("rows", "on"), [(12, True), (13, True), (12, False)])
def test_linears_of_sglang(
    rank_pools: Pools, tmp_path: Path, rows: int, on: bool, world_size: int
) -> None:
    found = rank_pools(world_size).run(serving_work.sglang_layers, tmp_path, rows, on)
    assert found == [[]] * world_size
