"""Which kernels a build gets by AGMM_KERNELS."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from cmake_at_hand import CMAKE, CMAKES

from agmm import _core
from agmm.planning.cost_model import default_all_reduce_kernels
from agmm.planning.plans import KernelConfig

TABLE = Path(__file__).resolve().parents[2] / "src" / "gemm" / "kernels.cmake"

SCRIPT = """
include("{table}")
agmm_generate_kernels({kernels} "{directory}" sources)
"""


def _generated(kernels: str, folder: Path, cmake: str | None = CMAKE) -> set[str]:
    """The names of the kernels in the table that CMake writes, each of which one unit has."""
    script = folder / "generate.cmake"
    script.write_text(SCRIPT.format(table=TABLE, kernels=kernels, directory=folder / kernels))
    done = subprocess.run(
        [str(cmake), "-P", str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    table = (folder / kernels / "kernel_table.cpp").read_text()
    entries = re.findall(r"extern \w+ const (\w+);", table)
    units = "".join(unit.read_text() for unit in (folder / kernels).glob("*.cu"))
    assert sorted(re.findall(r"^\w+ const (\w+) =", units, re.MULTILINE)) == sorted(entries)
    return set(re.findall(r"\bkernel_(\w+)_bf16_col\b", "\n".join(entries)))


@pytest.mark.skipif(CMAKE is None, reason="no cmake")
@pytest.mark.parametrize("cmake", CMAKES)
def test_each_set_holds_the_smaller_one(tmp_path: Path, cmake: str) -> None:
    sets = ("minimal", "default", "all")
    minimal, default, every = (_generated(s, tmp_path, cmake) for s in sets)
    assert minimal < default < every
    for name in every:
        config = KernelConfig.parse(name.removesuffix("_timed"))
        rows, columns = (config.tile_m, config.tile_n)[:: -1 if config.swapped else 1]
        assert (rows % 64, columns % 8) == (0, 0)
        assert config.cluster_m * config.cluster_n <= 2
    # The tiles and clusters that tensor-parallel layers are usually tried with.
    tiles = {name.rsplit("x64_", 1)[0] for name in every}
    assert tiles >= {"64x256", "128x128", "128x160", "128x192", "128x256", "256x128", "256x192"}
    clusters = {name.split("_")[1] for name in every}
    assert clusters == {"1x1", "2x1", "1x2"}


@pytest.mark.skipif(CMAKE is None, reason="no cmake")
def test_a_table_may_be_empty(tmp_path: Path) -> None:
    """Kernels of all-reduces are not in minimal builds."""
    for kernels, wanted in (("minimal", 0), ("default", 4)):
        _generated(kernels, tmp_path)
        table = (tmp_path / kernels / "kernel_table.cpp").read_text()
        names = re.findall(r"&lagged_(\w+)_(?:bf16|fp16)_(?:row|col),", table)
        assert len(names) == wanted
        assert set(names) <= {kernel.kernel for kernel in default_all_reduce_kernels()}


@pytest.mark.skipif(CMAKE is None, reason="no cmake")
@pytest.mark.skipif(not _core.cuda_built, reason="agmm._core is built without CUDA")
def test_this_build_is_one_of_them(tmp_path: Path) -> None:
    built = {kernel.name for kernel in _core.kernels()}
    assert built in [_generated(s, tmp_path) for s in ("minimal", "default", "all")]
