"""Builds `scheduler/plain_gemm.cu`: the public scheduler in a CUTLASS program of a user's."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import shutil
from pathlib import Path

import compiles

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).parent / "scheduler" / "plain_gemm.cu"
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
SCHEDULES = ("cooperative", "pingpong")


def cutlass_headers() -> Path | None:
    """The headers of CUTLASS_DIR or of the package; None where there are none."""
    given = os.environ.get("CUTLASS_DIR")
    if given:
        folder = Path(given)
        return folder / "include" if (folder / "include").is_dir() else folder
    try:
        package = importlib.metadata.distribution("nvidia-cutlass")
    except importlib.metadata.PackageNotFoundError:
        return None
    return Path(str(package.locate_file("cutlass_library/source/include")))


def why_not() -> str | None:
    """The reason why it cannot be built here, or None."""
    if NVCC is None:
        return "no nvcc"
    return "no CUTLASS headers" if cutlass_headers() is None else None


def build(folder: Path) -> Path:
    """The shared library.

    Raises:
        RuntimeError: nvcc refuses it.
    """
    library = folder / "plain_gemm.so"
    done = compiles.run(
        [
            str(NVCC),
            "-O3",
            "-std=c++17",
            "--generate-code=arch=compute_90a,code=[sm_90a]",
            "--expt-relaxed-constexpr",
            "-diag-suppress=3288",
            "-Xcompiler=-fPIC",
            f"-I{REPOSITORY / 'include'}",
            f"-I{REPOSITORY / 'src'}",
            "-isystem",
            str(cutlass_headers()),
            "-shared",
            str(SOURCE),
            "-o",
            str(library),
        ],
    )
    if done.returncode != 0:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-4000:])
    return library


def function(library: Path, schedule: str) -> ctypes._NamedFuncPointer:
    """``f(a, b, out, m, n, k, signals, tiles_per_chunk, pivot_tile, sm_count, stream)``: 0 where it
    is enqueued. Pointers are device addresses."""
    found: ctypes._NamedFuncPointer = getattr(ctypes.CDLL(str(library)), schedule)
    pointer, number = ctypes.c_void_p, ctypes.c_int
    found.argtypes = [*[pointer] * 3, *[number] * 3, pointer, *[number] * 3, pointer]
    return found
