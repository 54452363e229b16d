"""The host code of the CUDA core on a CUDA that only notes what is enqueued: no GPU needed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import compiles
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent / "cuda_host"
CORE = tuple(
    source
    for role in ("sync", "symmetric", "transport", "ops", "runtime")
    for source in (REPOSITORY / "src" / role).glob("*.cpp")
)
FAKE = HERE / "fake_cuda.cpp"
BINDINGS = (
    *(REPOSITORY / f"src/bindings/bind_{part}.cpp" for part in ("kernels", "gather", "scatter")),
    HERE / "fake_core.cpp",
)
COMPILER = shutil.which(os.environ.get("CXX", "c++"))


def _cuda_headers() -> Path | None:
    nvcc = shutil.which("nvcc")
    roots = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    if nvcc is not None:
        roots.append(str(Path(nvcc).resolve().parents[1]))
    for root in roots:
        if root and (Path(root) / "include" / "cuda_runtime_api.h").is_file():
            return Path(root) / "include"
    return None


def _compile(folder: Path, sources: Iterable[Path], *options: str) -> list[Path]:
    """Their object files, two at a time."""
    roots = (REPOSITORY / "include", REPOSITORY / "src", HERE, _cuda_headers())
    includes = [f"-I{root}" for root in roots]
    flags = ["-std=c++17", "-O0", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]

    def compile_one(source: Path) -> Path:
        target = folder / f"{source.parent.name}_{source.stem}.o"
        command = [str(COMPILER), *flags, *includes, *options, "-c", str(source), "-o", str(target)]
        done = compiles.run(command)
        assert done.returncode == 0, done.stderr[-4000:]
        return target

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compile_one, sources))


def _link(target: Path, objects: Iterable[Path], *options: str) -> Path:
    command = [str(COMPILER), *options, *map(str, objects), "-o", str(target), "-lpthread"]
    done = compiles.run(command)
    assert done.returncode == 0, done.stderr[-4000:]
    return target


def _build(folder: Path) -> dict[str, Path]:
    """The programs of checks by name, and a module of the bindings for Python."""
    import pybind11

    core = _compile(folder, [*CORE, FAKE])
    programs = {
        name: _link(folder / name, [*core, *_compile(folder, [HERE / f"{name}.cpp"])])
        for name in ("checks", "scatter_checks", "collective_checks")
    }
    includes = (sysconfig.get_path("include"), pybind11.get_include())
    objects = _compile(folder, BINDINGS, "-DAGMM_WITH_CUDA=1", *(f"-I{i}" for i in includes))
    module = folder / f"fake_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    return {**programs, "fake_core": _link(module, [*core, *objects], "-shared")}


pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler"),
    pytest.mark.skipif(_cuda_headers() is None, reason="no CUDA headers"),
    pytest.mark.compiles.with_args(_build),
    pytest.mark.timeout(600),
]


@pytest.fixture
def program() -> Path:
    """The checks."""
    return compiles.result(_build)["checks"]


@pytest.fixture
def scatter_program() -> Path:
    """The checks of matmul + reduce-scatter."""
    return compiles.result(_build)["scatter_checks"]


@pytest.fixture
def collective_program() -> Path:
    """The checks of the collectives."""
    return compiles.result(_build)["collective_checks"]


def _run(program: Path, name: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(program), name], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    "name",
    [
        "slots_of_captures",
        "precedence",
        "captures_at_once",
        "failures",
        "failures_in_captures",
        "creations",
        "sizes",
        "copies_come_first",
        "duties",
        "names",
        "scaled_push",
        "equality",
        "order_of_tiles",
        "sm_count",
        "reserved_sms",
        "peer_atomics",
        "other_device",
        "no_device",
        "late_listener",
        "forked_child",
        "split_scratch",
        "first_columns",
        "registry",
        "registry_of_threads",
        "scratch_of_added_kernels",
    ],
)
def test_host_code(program: Path, name: str) -> None:
    done = _run(program, name)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "sums",
        "sums_on_all_ranks",
        "names",
        "equality",
        "refusals",
        "failures",
        "order",
        "precedence",
        "launches",
        "reserved_sms",
        "arrivals",
        "paces",
        "splits",
    ],
)
def test_scatter(scatter_program: Path, name: str) -> None:
    done = _run(scatter_program, name)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name",
    [
        "bands",
        "layouts",
        "agreement",
        "refusals",
        "norms",
        "meetings",
        "relays",
        "order",
        "precedence",
        "creations",
        "notes",
    ],
)
def test_collectives(collective_program: Path, name: str) -> None:
    done = _run(collective_program, name)
    assert done.returncode == 0, done.stderr


def test_reports_of_two_devices_do_not_mix(program: Path) -> None:
    done = _run(program, "two_devices_report")
    assert done.returncode == 124
    assert done.stderr.startswith("agmm: rank 5 waited 0.0 s for chunk 7 from rank 6: ")
    assert done.stderr.count("\n") == 1


def test_a_report_is_described_as_asked_for(program: Path) -> None:
    done = _run(program, "describes")
    assert (done.returncode, done.stderr) == (124, "rank 5 as asked for\n")


@pytest.mark.parametrize(
    ("check", "awaited"),
    [
        ("late_waits", r"4\.0 s, since .*, for chunk 6001 from rank 6"),
        ("late_credits", r"4\.2 s, since .*, for a buffer of rank 6 to be free"),
        ("late_ranks", r"4\.2 s, since .*, for ranks 2, 6"),
    ],
)
def test_a_late_wait_is_told_once_and_goes_on(
    program: Path, check: str, awaited: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGMM_WARN_S", "3")
    done = _run(program, check)
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(rf"agmm: rank 5 has waited {awaited}; .*600.*", line), line


OTHER_THREADS_GO_ON = """
import ctypes, threading, time
from fake_core import CudaWorkspace

RANKS, SLOT_BYTES = 2, 4096
memory = [ctypes.create_string_buffer(CudaWorkspace.workspace_bytes(SLOT_BYTES, RANKS) + 128)
          for _ in range(RANKS)]
places = [(ctypes.addressof(m) + 127) // 128 * 128 for m in memory]
moments = []

def note():
    while True:
        time.sleep(0.001)
        moments.append(time.monotonic())

thread = threading.Thread(target=note, daemon=True)
thread.start()
for step in ("made", "dropped"):
    begin = time.monotonic()
    if step == "made":
        workspace = CudaWorkspace(0, places, SLOT_BYTES)
    else:
        del workspace
    end = time.monotonic()
    assert end - begin > 0.2, f"{step} in {end - begin} s: the device was not busy"
    inside = sum(begin + 0.05 < moment < end - 0.05 for moment in moments)
    assert inside > 5, f"{step}: another thread of Python ran {inside} times in {end - begin:.1f} s"
"""


def test_other_threads_go_on_while_the_device_is_waited_for() -> None:
    """A workspace loads kernels when it is made, and frees memory when it is dropped."""
    folder = compiles.result(_build)["fake_core"].parent
    done = subprocess.run(
        [sys.executable, "-c", OTHER_THREADS_GO_ON],
        env={**os.environ, "PYTHONPATH": str(folder), "FAKE_CUDA_BUSY_MS": "300"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


WHICH_ADDRESS_IS_WHICH = """
import ctypes, sys
import fake_core as core

RANKS, SLOT_BYTES = 2, 1 << 20
what, is_fp8, wrong = sys.argv[1], sys.argv[2] == "fp8", int(sys.argv[3])
kept = ctypes.create_string_buffer(1 << 20)
tensors = (ctypes.addressof(kept) + 255) // 256 * 256
tile_k, schedule = (128, "pingpong") if is_fp8 else (64, "cooperative")
config = core.KernelConfig(128, 128, tile_k, 1, 1, schedule)
plain = core.Format(core.DType.bfloat16)
if is_fp8:
    scales = core.ScaleLayout(a_per_row=True, b_per_column=True)
    plain = core.Format(
        core.DType.float8_e4m3fn_float8_e4m3fn, core.Accumulation.slow, scales
    )

def workspace(kind):
    kept = [ctypes.create_string_buffer(kind.workspace_bytes(SLOT_BYTES, RANKS) + 128)
            for _ in range(RANKS)]
    places = [(ctypes.addressof(memory) + 127) // 128 * 128 for memory in kept]
    return kind(0, places, SLOT_BYTES), kept

def call(addresses):
    if what == "matmul":
        problem = core.MatmulProblem((128, 128, 256), (True, 256), plain, config)
        return core.async_input_mm(problem, addresses, 1)
    if what == "gather":
        weight = core.GatherWeight(128, (True, 256), plain, config)
        made, memory = workspace(core.CudaWorkspace)
        return made.all_gather_matmul(core.GatherProblem(128, 256, [weight]), addresses, 1)
    of_scatter = core.KernelConfig(128, 128, 64, 1, 1, "pingpong")
    made, memory = workspace(core.CudaScatterWorkspace)
    problem = core.ScatterProblem(256, 128, plain, [(256, 256, 256)], of_scatter)
    return made.matmul_reduce_scatter(problem, addresses, 1)

addresses = [tensors] * {"matmul": 7, "gather": 8, "scatter": 7}[what]
if what == "scatter" and is_fp8:
    addresses[5] = 0  # fp8 has no residual
call(addresses)
addresses[wrong] = 0 if is_fp8 else tensors + 2
try:
    call(addresses)
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("matmul", ["A", "B", "scale_a", "scale_b", "bias", "out", ""]),
        ("gather", ["A_shard", "scale_a", "A", "", "B", "scale_b", "bias", "out"]),
        ("scatter", ["A", "B", "scale_a", "scale_b", "bias", "residual", "out"]),
    ],
)
def test_addresses_come_in_the_order_of_the_spec(what: str, names: list[str]) -> None:
    """An address that the call cannot take is refused by the name of its argument: one that is not
    aligned, or of fp8 one that is missing. Scales may lie anywhere, and are of fp8 alone."""
    folder = compiles.result(_build)["fake_core"].parent
    for i, name in enumerate(names):
        kind = "fp8" if name.startswith("scale") else "bf16"
        done = subprocess.run(
            [sys.executable, "-c", WHICH_ADDRESS_IS_WHICH, what, kind, str(i)],
            env={**os.environ, "PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        if name:
            wrong = "null" if kind == "fp8" else "an address that is no multiple of 16 bytes"
            assert done.stdout.startswith(f"{name}: found {wrong}"), (i, done.stdout)
        else:
            assert done.stdout == ""
