"""Tests which kernels a build gets by AGMM_KERNELS, and what is rendered from their table."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import generate_kernels
import pytest
from cmake_at_hand import CMAKES

from agmm import _core
from agmm._core import Accumulation
from agmm.planning import cost_model, kernel_table, problems
from agmm.planning.cost_model import constants, default_kernels
from agmm.planning.problems import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER, KernelConfig

REPOSITORY = Path(__file__).resolve().parents[2]
SETS = kernel_table.SETS

SCRIPT = """
cmake_policy(VERSION 3.25)
set(Python_EXECUTABLE "{python}")
include("{module}")
agmm_generate_kernels({kernels} "{directory}" sources)
message(STATUS "${{sources}}")
"""
ENTRY = re.compile(
    r"(?P<op>kernel|fp8|scatter|fp8_scatter|lagged|grouped)"
    r"_(?P<config>\d+x\d+x\d+_\dx\d_[a-z]+?(_swapped)?)"
    r"(?P<timed>_timed)?(_(?P<accumulation>fast|slow|block|block1x128))?"
    r"(_(?P<epilogue>activation|gate_fp8|gate))?"
    r"_(?P<dtype>bf16|fp16|e\dm\d(_e\dm\d)?)_(?P<layout>row|col)"
)


@dataclass(frozen=True)
class Entry:
    """The kernel that a translation unit instantiates, for one dtype and one layout of B."""

    op: str
    config: KernelConfig
    timed: bool
    accumulation: str | None
    epilogue: str | None
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
            found["epilogue"],
            found["dtype"],
            found["layout"],
        )

    @property
    def name(self) -> str:
        return self.config.kernel + "_timed" * self.timed

    def kinds(self) -> set[tuple[object, ...]]:
        """The paths that the kernel takes through the templates of `src/gemm/sm90`, each with all
        that decides on it there."""
        config = self.config
        schedule = (config.schedule, config.swapped)
        if config.is_streaming:  # whose template is another
            return {
                ("dtypes", schedule, self.dtype, self.accumulation),
                ("layout", schedule, self.layout),
                ("CTAs that share A", config.cluster_n > 1),
                ("several MMAs", config.tile_n > 64),
                ("epilogues", schedule, self.epilogue),
            }
        if self.op == "grouped":  # as is theirs
            return {
                ("dtypes", self.op, self.dtype),
                ("layout", self.op, self.epilogue, self.layout),
                ("clusters", self.op, schedule, config.cluster_n),
            }
        # In a swapped kernel the tile's rows are columns of the MMA.
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
            ("epilogues", self.op, self.epilogue),
            (
                "halves of B",
                self.epilogue == "gate" and (config.cluster_m, self.layout),
            ),
        }


def _entries(kernels: str) -> set[Entry]:
    """The kernels of the table that a build gets, each of which one unit has."""
    files = generate_kernels.render(kernel_table.rows(), kernels)
    entries = re.findall(r"extern \w+ const (\w+);", files["kernel_table.cpp"])
    units = "".join(text for name, text in files.items() if name.endswith(".cu"))
    assert sorted(re.findall(r"^\w+ const (\w+) =", units, re.MULTILINE)) == sorted(entries)
    return {Entry.parse(entry) for entry in entries}


def _names(entries: set[Entry], op: str) -> set[str]:
    return {entry.name for entry in entries if entry.op == op}


@pytest.fixture(scope="module")
def sets() -> dict[str, set[Entry]]:
    return {kernels: _entries(kernels) for kernels in SETS}


def test_each_set_holds_the_smaller_one(sets: dict[str, set[Entry]]) -> None:
    minimal, ci, default, every = (sets[kernels] for kernels in SETS)
    assert minimal < default < every and ci < every
    names = [_names(entries, "kernel") for entries in (minimal, ci, default, every)]
    assert names[0] < names[1] < names[3] and names[0] < names[2] < names[3]
    for entry in every:
        config = entry.config
        is_swapped = config.swapped or config.is_streaming
        rows, columns = (config.tile_m, config.tile_n)[:: -1 if is_swapped else 1]
        assert (rows % 64, columns % 8) == (0, 0)
        assert config.cluster_m * config.cluster_n <= 2
    # The tiles and clusters that tensor-parallel layers are usually tried with.
    tiles = {name.rsplit("x64_", 1)[0] for name in names[3]}
    assert tiles >= {"64x256", "128x128", "128x160", "128x192", "128x256", "256x128", "256x192"}
    clusters = {name.split("_")[1] for name in names[3]}
    assert clusters == {"1x1", "2x1", "1x2"}


def test_ci_has_a_kernel_of_each_kind(sets: dict[str, set[Entry]]) -> None:
    """Kernels that a default build compiles and CI does not differ from what CI compiles in numbers
    alone."""
    found, wanted = (set().union(*(e.kinds() for e in sets[s])) for s in ("ci", "default"))
    assert wanted - found == set()
    # CI also compiles the code whose kernels a default build leaves out.
    ways = [{(e.op, e.accumulation, e.dtype) for e in sets[s]} for s in ("ci", "all")]
    assert ways[0] == ways[1]
    assert 2 * len(sets["ci"]) < len(sets["default"])


def test_plans_without_a_build_are_of_its_kernels(sets: dict[str, set[Entry]]) -> None:
    default = {e for e in sets["default"] if not e.timed and e.epilogue is None}
    for name, op in (
        ("kernel", problems.ALL_GATHER_MATMUL),
        ("scatter", problems.MATMUL_REDUCE_SCATTER),
        ("lagged", problems.MATMUL_ALL_REDUCE),
    ):
        assert _names(default, name) == {kernel.kernel for kernel in default_kernels(op)}
    for name, op in (("fp8", ALL_GATHER_MATMUL), ("fp8_scatter", MATMUL_REDUCE_SCATTER)):
        for accumulation in Accumulation.__members__:
            found = default_kernels(op, f"float8_e4m3fn_float8_e4m3fn {accumulation}")
            wanted = {
                entry.config.kernel
                for entry in default
                if (entry.op, entry.dtype) == (name, "e4m3")
                and entry.accumulation == accumulation.replace("_", "")
            }
            assert {kernel.kernel for kernel in found} == wanted


@pytest.mark.parametrize("gpu", cost_model.known_gpus())
def test_each_default_kernel_has_its_speed(gpu: str) -> None:
    known = constants(gpu)
    names = [kernel.kernel for kernel in default_kernels() if not kernel.is_streaming]
    assert [name for name in names if name not in known.tflops_per_sm] == []
    scatters = {kernel.kernel for kernel in default_kernels(problems.MATMUL_REDUCE_SCATTER)}
    assert scatters == set(known.scatter_tile_us)


def test_a_table_may_be_empty(sets: dict[str, set[Entry]]) -> None:
    """Kernels of all-reduces are not in minimal builds."""
    found = [sum(entry.op == "lagged" for entry in sets[kernels]) for kernels in SETS]
    assert found == [0, 2, 4, 4]


@pytest.mark.skipif(not _core.cuda_built, reason="agmm._core is built without CUDA")
def test_this_build_is_one_of_them(sets: dict[str, set[Entry]]) -> None:
    facts = _core.kernel_facts()
    built = {f.kernel for f in facts if f.op == ALL_GATHER_MATMUL and not f.is_fp8}
    assert built in [_names(entries, "kernel") for entries in sets.values()]


# --- what is rendered ---


@pytest.mark.parametrize("cmake", CMAKES)
def test_cmake_gets_the_files_of_a_build(tmp_path: Path, cmake: str) -> None:
    script = tmp_path / "generate.cmake"
    module = REPOSITORY / "cmake" / "generate_kernels.cmake"
    build = tmp_path / "kernels"
    script.write_text(
        SCRIPT.format(python=sys.executable, module=module, kernels="ci", directory=build)
    )

    def run() -> list[str]:
        command = [cmake, "-P", str(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.removeprefix("-- ").strip().split(";")

    sources = run()
    files = generate_kernels.render(kernel_table.rows(), "ci")
    assert sources == [str(build / name) for name in files]
    assert {path.name: path.read_text() for path in build.iterdir()} == files
    # What is as it was is not compiled again.
    written = {path: path.stat().st_mtime_ns for path in build.iterdir()}
    (build / "pingpong_0.cu").write_text("")
    assert run() == sources
    assert (build / "pingpong_0.cu").read_text() == files["pingpong_0.cu"]
    changed = {path.name for path, time in written.items() if path.stat().st_mtime_ns != time}
    assert changed == {"pingpong_0.cu"}


def test_the_page_lists_the_kernels_of_the_table() -> None:
    """`python tools/generate_kernels.py --docs` writes it."""
    assert generate_kernels.PAGE.read_text() == generate_kernels.page(kernel_table.rows())


# --- wrong rows ---

RIGHT = {
    "op": "all_gather_matmul",
    "tile": "128x256x64",
    "cluster": "2x1",
    "schedule": "cooperative",
    "sets": ["default", "all"],
}
FP8: dict[str, Any] = {"formats": ["e4m3"], "b_layouts": ["column"], "tile": "128x256x128"}
STREAMING: dict[str, Any] = {"schedule": "streaming", "tile": "8x64x128", "cluster": "1x2"}
GROUPED: dict[str, Any] = {"op": "grouped_matmul", "swapped": True, "cluster": "1x2"}
DEFAULTS = json.loads(kernel_table.TABLE.read_text())["defaults"]


def _parsed(*given: dict[str, Any]) -> tuple[kernel_table.KernelRow, ...]:
    table = json.dumps({"defaults": DEFAULTS, "kernels": given})
    return kernel_table.parse(table, "kernels.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"op": "matmul"}, "op: found 'matmul', wanted one of all_gather_matmul, "),
        ({"tile": "128x256"}, "tile: found '128x256', wanted 3 sizes, such as 128x256x64"),
        ({"tile": [128, 256, 64]}, r"tile: found \[128, 256, 64\], wanted 3 sizes"),
        ({"tile": "96x256x64"}, "tile: found '96x256x64', wanted a multiple of 64 in rows"),
        ({"swapped": True, "tile": "60x128x64"}, "tile: .* columns \\(swapped\\)"),
        ({"cluster": "2x2"}, "cluster: found '2x2', wanted at most 2 CTAs"),
        ({"schedule": "Pingpong"}, "schedule: found 'Pingpong', wanted one of cooperative, pingp"),
        ({"sets": []}, r"sets: found \[\], wanted a list of some of minimal, ci, default, all"),
        ({"sets": ["default"]}, r"sets: found \['default'\], wanted all among them"),
        ({"sets": ["minimal", "all"]}, "sets: .*, wanted all and default among them"),
        ({"formats": ["fp32"]}, r"formats: found \['fp32'\], wanted a list of some of bf16, fp16"),
        ({"formats": ["bf16", "bf16"]}, "formats: found "),
        (FP8 | {"formats": ["bf16", "e4m3"]}, "formats: .*, wanted all of 16 bits, or all of fp8"),
        (FP8 | {"tile": "128x256x64"}, "tile: found '128x256x64', wanted 128 of K with fp8"),
        (FP8 | {"b_layouts": ["row"]}, r"b_layouts: found \['row'\], wanted \['column'\] with fp8"),
        (FP8 | {"timed": True}, "timed: found True, wanted false with fp8"),
        ({"accumulation": "slow"}, "accumulation: found 'slow', wanted fast with operands of 16"),
        ({"op": "matmul_reduce_scatter", "swapped": True}, "swapped: found True, wanted false"),
        ({"op": "matmul_all_reduce"}, "schedule: found 'cooperative', wanted pingpong"),
        (
            STREAMING | {"tile": "64x8x128"},
            "tile: found '64x8x128', wanted a multiple of 64 in rows",
        ),
        (
            STREAMING | {"tile": "8x64x64"},
            "tile: found '8x64x64', wanted 128 of K, in clusters of 1",
        ),
        (STREAMING | {"cluster": "2x1"}, "tile: .*, in clusters of 1x1 or 1x2, with streaming"),
        (STREAMING | {"timed": True}, "schedule: found 'streaming', wanted another where the row"),
        (
            STREAMING | {"formats": ["e4m3"], "b_layouts": ["column"]},
            "cluster: found '1x2', wanted 1x1 with fp8 and streaming",
        ),
        (GROUPED | {"swapped": False}, "swapped: found False, wanted true with grouped_matmul"),
        (GROUPED | {"cluster": "2x1"}, "cluster: found '2x1', wanted 1x1 or 1x2 with grouped_"),
        (GROUPED | {"tile": "72x128x64"}, "tile: found '72x128x64', wanted multiples of 64 rows"),
        (GROUPED | {"epilogue": "activation"}, "epilogue: .*, wanted plain or gate with grouped"),
        (GROUPED | {"timed": True}, "formats: .*, wanted operands of 16 bits or e4m3, not timed,"),
        ({"swapped": "yes"}, "swapped: found 'yes', wanted true or false"),
        (
            {"epilogue": "gelu"},
            "epilogue: found 'gelu', wanted one of plain, activation, gate, gate",
        ),
        ({"epilogue": "gate", "timed": True}, "epilogue: found 'gate', wanted plain but for all_"),
        (
            FP8 | {"epilogue": "gate", "accumulation": "slow", "tile": "128x128x128"},
            "tile: found '128x128x128', wanted 256 columns with a gate and slow sums",
        ),
        ({"epilogue": "gate", "cluster": "1x2"}, "epilogue: found 'gate', wanted no gate with sw"),
        ({"epilogue": "gate", "tile": "128x192x64"}, "tile: .*, wanted a multiple of 128 columns"),
        ({"tiles": "128x256x64"}, "tiles: found it, wanted only op, tile, cluster, "),
    ],
    ids=str,
)
def test_a_wrong_row_is_named(change: dict[str, Any], message: str) -> None:
    assert len(_parsed(RIGHT)) == 1
    with pytest.raises(ValueError, match=f'^kernels.json: row 2, {{"op": ".*…: {message}'):
        _parsed(RIGHT | {"tile": "128x128x64"}, RIGHT | change)


def test_a_row_wants_all_fields_and_its_kernels_once() -> None:
    with pytest.raises(ValueError, match=r"row 1, .*: cluster: found none, wanted one"):
        _parsed({name: value for name, value in RIGHT.items() if name != "cluster"})
    with pytest.raises(ValueError, match=r"row 2, .*: tile: found a kernel of an earlier row"):
        _parsed(RIGHT, RIGHT | {"formats": ["fp16"]})
    others = RIGHT | FP8, RIGHT | {"timed": True}, RIGHT | {"epilogue": "gate"}
    assert len(_parsed(RIGHT, *others)) == 4


def test_a_wrong_table_stops_a_build(tmp_path: Path) -> None:
    table = tmp_path / "kernels.json"
    wrong = json.dumps({"defaults": DEFAULTS, "kernels": [RIGHT | {"cluster": "4x1"}]})
    for text, message in ((wrong, "row 1, "), ("{", "found Expecting"), ("{}", "found []")):
        table.write_text(text)
        command = [sys.executable, str(generate_kernels.__file__), "--table", str(table)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
        assert done.returncode == 1 and done.stderr.startswith(f"{table}: {message}")
