"""The built extension: the kernels' machine code, and what it is linked against."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import build_wheels
import check_machine_code
import compiles
import pytest
from cmake_at_hand import CMAKES

import agmm._core

needs_cuda_build = pytest.mark.skipif(
    not agmm._core.cuda_built, reason="agmm._core is built without CUDA"
)
needs_build_for_use = pytest.mark.skipif(
    agmm._core.fault != "" or agmm._core.stress_delays, reason="a test build may spill registers"
)


RESOURCE_USAGE = """
Fatbin elf code:
================
arch = {arch}

Resource usage:
 Common:
  GLOBAL:0
 Function gemm_PersistentAsyncInputScheduler:
  REG:168 STACK:0 SHARED:0 LOCAL:{local} CONSTANT[0]:1 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
SASS = """
arch = {arch}
		Function : gemm_PersistentAsyncInputScheduler
        /*0000*/                   MOV R1, R2 ;       /* 0x00 */
        /*1a10*/              @!P0 {instruction} ;    /* 0x00 */
"""


@pytest.mark.parametrize(
    ("arch", "local", "instruction", "faults"),
    [
        ("sm_90a", 0, "HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24", []),
        ("sm_90a", 0, "QGMMA.64x256x32.F32.E4M3.E4M3 R24, gdesc[UR8], R24", []),
        ("sm_90a", 0, "FFMA R4, R5, R6, R7", ["no HGMMA or QGMMA instruction"]),
        ("sm_90", 0, "HGMMA.64x256x16 R24, R24", ["built for sm_90, wanted sm_90a"]),
        ("sm_90a", 16, "HGMMA.64x256x16 R24, R24", ["16 bytes of local memory, wanted 0"]),
        (
            "sm_90a",
            0,
            "STL.128 [R1], R12",
            ["no HGMMA or QGMMA instruction", "1 LDL or STL instructions, wanted 0"],
        ),
    ],
)
def test_faults_are_named(arch: str, local: int, instruction: str, faults: list[str]) -> None:
    (kernel,) = check_machine_code.parse(
        RESOURCE_USAGE.format(arch=arch, local=local),
        SASS.format(arch=arch, instruction=instruction),
    )
    assert kernel.registers == 168
    assert kernel.faults() == faults


def test_a_small_kernel_is_built_for_more_than_hopper() -> None:
    def found(*archs: str) -> list[str]:
        texts = (RESOURCE_USAGE.format(arch=arch, local=8) for arch in archs)
        kernels = check_machine_code.parse(
            "".join(texts).replace("gemm_PersistentAsyncInputScheduler", "stage"), ""
        )
        assert [kernel.faults() for kernel in kernels] == [[]] * len(archs)
        return check_machine_code.missing(kernels)

    assert found("sm_80", "sm_90a") == found(*check_machine_code.OF_BUILDS_FOR_USE) == []
    assert found("sm_80", "sm_89", "sm_90a", "sm_100") == [
        "stage: found code for sm_100, sm_80, sm_89, sm_90a, wanted sm_120 too"
    ]
    assert found("sm_90a") == ["stage: found code for sm_90a, wanted sm_80 too"]
    assert found("sm_80") == ["stage: found code for sm_80, wanted sm_90a too"]


def test_the_ptx_of_ampere_is_looked_for() -> None:
    listed = "PTX file    1: _core.1.sm_80.ptx\nPTX file    2: _core.2.sm_80.ptx\n"
    assert check_machine_code.why_no_ptx(listed) is None
    for other, found in (("", "nothing"), (listed.replace("sm_80", "sm_90a"), "sm_90a")):
        wanted = f"found PTX of {found}, wanted that of sm_80"
        assert check_machine_code.why_no_ptx(other) == wanted


@pytest.mark.parametrize("cmake", CMAKES)
def test_builds_for_use_have_code_for_all_architectures(cmake: str, tmp_path: Path) -> None:
    script = tmp_path / "script.cmake"
    module = Path(__file__).resolve().parents[2] / "cmake" / "small_architectures.cmake"
    for kernels in ("ci", "default", "all"):
        script.write_text(
            f'include("{module}")\nagmm_small_architectures({kernels} found)\n'
            'message(STATUS "${found}")\n'
        )
        done = subprocess.run(
            [cmake, "-P", script], capture_output=True, text=True, check=True
        ).stdout
        found = {f"sm_{each.removesuffix('-real')}" for each in done.split()[-1].split(";")}
        of_all = check_machine_code.OF_BUILDS_FOR_USE
        assert found == {*(check_machine_code.OF_SMALL_KERNELS if kernels == "ci" else of_all)}
        assert "80;" in done  # without -real: its PTX too


@pytest.mark.parametrize(("instruction", "faults"), [("ACQBULK", 0), ("NOP", 1)])
def test_a_kernel_that_starts_early_has_to_wait(instruction: str, faults: int) -> None:
    name = "_ZN4agmm18async_input_kernelI29PersistentAsyncInputScheduler"
    (kernel,) = check_machine_code.parse(
        RESOURCE_USAGE.format(arch="sm_90a", local=0).replace(
            "gemm_PersistentAsyncInputScheduler", name
        ),
        SASS.format(arch="sm_90a", instruction=instruction).replace(
            "gemm_PersistentAsyncInputScheduler", name
        )
        + "        /*1a20*/                   HGMMA.64x256x16 R24, R24 ;\n",
    )
    assert kernel.faults() == ["no ACQBULK instruction"] * faults


@pytest.mark.parametrize(
    ("local", "instruction", "fault"),
    [
        (0, "HGMMA.64x256x16 R24, R24", None),
        (16, "HGMMA.64x256x16 R24, R24", "16 bytes of local memory, wanted 0"),
        (None, "NOP", "found no matmul kernel, wanted some"),
    ],
)
def test_no_wheel_is_made_of_faulty_kernels(
    monkeypatch: pytest.MonkeyPatch, local: int | None, instruction: str, fault: str | None
) -> None:
    kernels = check_machine_code.parse(
        RESOURCE_USAGE.format(arch="sm_90a", local=local),
        SASS.format(arch="sm_90a", instruction=instruction),
    )
    found = [] if local is None else kernels
    monkeypatch.setattr(check_machine_code, "inspect", lambda library: found)
    monkeypatch.setattr(check_machine_code, "list_ptx", lambda library: "core.1.sm_80.ptx")
    wanted = pytest.raises(build_wheels.BuildFailed, match=f"^core.a: (?s:.*){fault}$")
    with contextlib.nullcontext() if fault is None else wanted:
        build_wheels.read_machine_code(Path("core.a"))


def _inspected(folder: Path) -> list[Any]:
    return list(check_machine_code.inspect(check_machine_code.installed_core()))


@needs_cuda_build
@needs_build_for_use
@pytest.mark.machine_code
@pytest.mark.compiles.with_args(_inspected)
@pytest.mark.slow
def test_matmuls_are_hopper_code_in_registers() -> None:
    kernels = compiles.result(_inspected)
    assert {k.name: k.faults() for k in kernels if k.faults()} == {}
    assert check_machine_code.missing(kernels) == []
    matmuls = [kernel for kernel in kernels if kernel.is_gemm]
    of_all_reduces = [kernel for kernel in matmuls if "LaggedMainloop" in kernel.name]
    facts = agmm._core.kernel_facts()
    built = Counter(each.op for each in facts)
    assert len(of_all_reduces) >= built["matmul_all_reduce"]
    # Full and lean; streaming kernels with a gate are lean alone, plain ones of 16 bits sum over
    # the ranks too. Those that scatter, and grouped ones; weights of 4 bits are in no row.
    streaming = [each for each in facts if "streaming" in each.kernel]
    gates = sum(each.epilogue == "gate" for each in streaming)
    sums = sum(each.epilogue == "bias" and not each.is_fp8 for each in streaming)
    packed = sum("packed" in kernel.name.lower() for kernel in matmuls)
    others = built["matmul_reduce_scatter"] + built["grouped_matmul"] + packed
    wanted = 2 * built["all_gather_matmul"] - gates + sums + others
    assert len(matmuls) - len(of_all_reduces) == wanted > 0


def test_links_neither_driver_nor_runtime() -> None:
    core = check_machine_code.installed_core()
    dynamic = subprocess.run(
        ["readelf", "--dynamic", core], capture_output=True, text=True, check=True
    ).stdout
    needed = [line for line in dynamic.splitlines() if "(NEEDED)" in line]
    assert any("libc.so" in line for line in needed)
    assert [line for line in needed if "libcuda" in line or "torch" in line] == []


def test_imports_with_no_gpu_and_no_torch() -> None:
    program = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('_core', sys.argv[1])\n"
        "core = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(core)\n"
        "maps = open('/proc/self/maps').read()\n"
        "assert 'libcuda' not in maps, maps\n"
        "assert 'torch' not in sys.modules\n"
        "core.kernel_facts()\n"
    )
    core = check_machine_code.installed_core()
    done = subprocess.run(
        [sys.executable, "-c", program, core],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
