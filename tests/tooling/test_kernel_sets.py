"""Which kernels a build gets by AGMM_KERNELS."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
from cmake_at_hand import CMAKE, CMAKES

from agmm import _core
from agmm._core import Accumulation
from agmm.planning.cost_model import default_kernels, known_gpus
from agmm.planning.plans import (
    ALL_GATHER_MATMUL,
    DEFAULT_GPU,
    MATMUL_ALL_REDUCE,
    MATMUL_REDUCE_SCATTER,
    KernelConfig,
)

REPOSITORY = Path(__file__).resolve().parents[2]
TABLE = REPOSITORY / "src" / "gemm" / "kernels.cmake"
SETS = ("minimal", "ci", "default", "all")

SCRIPT = """
include("{table}")
agmm_generate_kernels({kernels} "{directory}" sources)
"""
ENTRY = re.compile(
    r"(?P<op>kernel|fp8|scatter|fp8_scatter|lagged)_(?P<config>\d+x\d+x\d+_\dx\d_[a-z]+?(_swapped)?)"
    r"(?P<timed>_timed)?(_(?P<accumulation>fast|slow|block|block1x128))?"
    r"_(?P<dtype>bf16|fp16|e\dm\d(_e\dm\d)?)_(?P<layout>row|col)"
)


@dataclass(frozen=True)
class Entry:
    """What a translation unit instantiates: a kernel for one dtype and one layout of B."""

    op: str
    config: KernelConfig
    timed: bool
    accumulation: str | None
    dtype: str
    layout: str

    @classmethod
    def parse(cls, name: str) -> Entry:
        found = ENTRY.fullmatch(name)
        assert found is not None, name
        return cls(
            found["op"],
            KernelConfig.parse(found["config"]),
            found["timed"] is not None,
            found["accumulation"],
            found["dtype"],
            found["layout"],
        )

    @property
    def name(self) -> str:
        return self.config.kernel + "_timed" * self.timed

    def kinds(self) -> set[tuple[object, ...]]:
        """The ways that it takes through the templates of `src/gemm/sm90`, each with all that
        decides on it there."""
        config = self.config
        schedule = (config.schedule, config.swapped)
        # Swapped, the tile's rows are columns of the MMA.
        rows, columns = (config.tile_m, config.tile_n)[:: -1 if config.swapped else 1]
        steps = (64,) if config.schedule == "pingpong" and rows >= 128 else ()
        splits = config.can_split and not (self.timed or self.op in ("lagged", "fp8_scatter"))
        return {
            ("dtypes", self.op, self.dtype, self.accumulation),
            ("layout", self.op, self.layout),
            ("clusters", self.op, schedule, config.cluster_m, config.cluster_n, self.accumulation),
            ("splits of K", self.op, schedule, splits, splits and config.splits_in_cluster),
            ("times", self.op, self.timed),
            ("rows of an MMA", schedule, rows),
            ("promoted MMAs", self.accumulation, columns > 128),
            (
                "columns stored at a time",
                schedule,
                next(step for step in (*steps, 32, 48, 16, 8) if columns % step == 0),
            ),
            (
                "A stored",
                schedule,
                self.layout,
                ("row" if self.layout == "row" else "column") in config.stores_A,
            ),
            ("k", schedule, config.tile_k, self.accumulation is None),
        }


def _entries(kernels: str, folder: Path, cmake: str | None = CMAKE) -> set[Entry]:
    """What is in the table that CMake writes, each of which one unit has."""
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
    return {Entry.parse(entry) for entry in entries}


def _names(entries: set[Entry], op: str) -> set[str]:
    return {entry.name for entry in entries if entry.op == op}


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[Entry]]:
    folder = tmp_path_factory.mktemp("sets")
    return {kernels: _entries(kernels, folder) for kernels in SETS}


needs_cmake = pytest.mark.skipif(CMAKE is None, reason="no cmake")


@needs_cmake
@pytest.mark.parametrize("cmake", CMAKES)
def test_each_set_holds_the_smaller_one(tmp_path: Path, cmake: str) -> None:
    minimal, ci, default, every = (_entries(kernels, tmp_path, cmake) for kernels in SETS)
    assert minimal < default < every and ci < every
    names = [_names(entries, "kernel") for entries in (minimal, ci, default, every)]
    assert names[0] < names[1] < names[2] < names[3]
    for entry in every:
        config = entry.config
        rows, columns = (config.tile_m, config.tile_n)[:: -1 if config.swapped else 1]
        assert (rows % 64, columns % 8) == (0, 0)
        assert config.cluster_m * config.cluster_n <= 2
    # The tiles and clusters that tensor-parallel layers are usually tried with.
    tiles = {name.rsplit("x64_", 1)[0] for name in names[3]}
    assert tiles >= {"64x256", "128x128", "128x160", "128x192", "128x256", "256x128", "256x192"}
    clusters = {name.split("_")[1] for name in names[3]}
    assert clusters == {"1x1", "2x1", "1x2"}


@needs_cmake
def test_ci_has_a_kernel_of_each_kind(sets: dict[str, set[Entry]]) -> None:
    """What a default build compiles and CI does not differs from what CI compiles in numbers."""
    found, wanted = (set().union(*(e.kinds() for e in sets[s])) for s in ("ci", "default"))
    assert wanted - found == set()
    # Nor does code without kernels in a default build go uncompiled.
    ways = [{(e.op, e.accumulation, e.dtype) for e in sets[s]} for s in ("ci", "all")]
    assert ways[0] == ways[1]
    assert 2 * len(sets["ci"]) < len(sets["default"])


@needs_cmake
def test_the_default_kernels_are_those_that_the_cost_model_knows(
    sets: dict[str, set[Entry]],
) -> None:
    default = {entry for entry in sets["default"] if not entry.timed}
    for op, known in (
        ("kernel", ALL_GATHER_MATMUL),
        ("scatter", MATMUL_REDUCE_SCATTER),
        ("lagged", MATMUL_ALL_REDUCE),
    ):
        found = default_kernels(DEFAULT_GPU, known, "bfloat16")
        assert _names(default, op) == {kernel.kernel for kernel in found}
    for op, known in (("fp8", ALL_GATHER_MATMUL), ("fp8_scatter", MATMUL_REDUCE_SCATTER)):
        for gpu, accumulation in product(known_gpus(), Accumulation.__members__):
            found = default_kernels(gpu, known, f"float8_e4m3fn_float8_e4m3fn {accumulation}")
            wanted = {
                entry.name
                for entry in default
                if (entry.op, entry.dtype) == (op, "e4m3")
                and entry.accumulation == accumulation.replace("_", "")
            }
            assert {kernel.kernel for kernel in found} == wanted


@needs_cmake
def test_a_table_may_be_empty(sets: dict[str, set[Entry]]) -> None:
    """Kernels of all-reduces are not in minimal builds."""
    found = [sum(entry.op == "lagged" for entry in sets[kernels]) for kernels in SETS]
    assert found == [0, 2, 4, 4]


@needs_cmake
@pytest.mark.skipif(not _core.cuda_built, reason="agmm._core is built without CUDA")
def test_this_build_is_one_of_them(sets: dict[str, set[Entry]]) -> None:
    built = {kernel.name for kernel in _core.kernels()}
    assert built in [_names(entries, "kernel") for entries in sets.values()]
