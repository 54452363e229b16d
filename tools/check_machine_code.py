"""Check the machine code of the CUDA kernels in a built `agmm._core`.

Every matmul kernel must be sm_90a code that multiplies with warpgroup instructions (HGMMA, of fp8
QGMMA) and keeps its values in registers (no local memory, no LDL or STL). Those that may be
launched before the kernel ahead has ended wait for it (ACQBULK). The other kernels must be there
for sm_80 and sm_90a, in a build that has them for more than these for all of `OF_BUILDS_FOR_USE`,
and as PTX of compute_80.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

GEMM_SYMBOLS = ("PersistentAsyncInputScheduler", "16streaming_kernel", "14grouped_kernel")
EARLY_SYMBOLS = ("18async_input_kernel", "16streaming_kernel", "14grouped_kernel")
HOPPER = "sm_90a"
OF_SMALL_KERNELS = ("sm_80", HOPPER)
OF_BUILDS_FOR_USE = ("sm_80", "sm_89", HOPPER, "sm_100", "sm_120")
"""The architectures that the sets default and all have code for, as
cmake/small_architectures.cmake lists them."""
PTX = "sm_80"
"""The architecture whose PTX is in every build, as `cuobjdump -lptx` calls compute_80."""
_LINES_THAT_MATTER = r"arch = |Function |REG:|[HQ]GMMA|LDL|STL|ACQBULK"


@dataclass
class Kernel:
    """One kernel as `cuobjdump` shows it."""

    name: str
    arch: str
    registers: int = 0
    local_bytes: int = 0
    gmma: int = 0
    local_accesses: int = 0
    waits: int = 0

    @property
    def is_gemm(self) -> bool:
        """Whether it is a matmul kernel, by its mangled name."""
        return any(symbol in self.name for symbol in GEMM_SYMBOLS)

    def faults(self) -> list[str]:
        """What is wrong with it, one phrase each."""
        found = []
        if self.is_gemm and self.arch != HOPPER:
            found.append(f"built for {self.arch}, wanted {HOPPER}")
        if self.is_gemm and self.gmma == 0:
            found.append("no HGMMA or QGMMA instruction")
        if any(symbol in self.name for symbol in EARLY_SYMBOLS) and self.waits == 0:
            found.append("no ACQBULK instruction")
        if self.is_gemm and self.local_accesses:
            found.append(f"{self.local_accesses} LDL or STL instructions, wanted 0")
        if self.is_gemm and self.local_bytes:
            found.append(f"{self.local_bytes} bytes of local memory, wanted 0")
        return found


def missing(kernels: Iterable[Kernel], *, for_use: bool = False) -> list[str]:
    """What kernels that are no matmuls lack, one phrase each.

    Args:
        for_use: whether the build is one for others, which has code for all architectures; one that
            has code for more than two is taken for such a build.
    """
    built = defaultdict(set)
    for kernel in kernels:
        if not kernel.is_gemm:
            built[kernel.name].add(kernel.arch)
    found = {arch for archs in built.values() for arch in archs}
    of_all = OF_BUILDS_FOR_USE if for_use or found - {*OF_SMALL_KERNELS} else OF_SMALL_KERNELS
    return [
        f"{name}: found code for {', '.join(sorted(archs))}, wanted {arch} too"
        for name, archs in sorted(built.items())
        for arch in of_all
        if arch not in archs
    ]


def find_cuobjdump() -> Path:
    """Return `cuobjdump`: $CUOBJDUMP, on PATH, with the CUDA toolkit, or from its PyPI package.

    Raises FileNotFoundError where there is none.
    """
    named = os.environ.get("CUOBJDUMP")
    if named:
        return Path(named)
    on_path = shutil.which("cuobjdump")
    if on_path:
        return Path(on_path)
    site_packages = Path(sysconfig.get_path("purelib"))
    candidates = [
        Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "cuobjdump",
        *sorted(site_packages.glob("nvidia/cu*/bin/cuobjdump")),
    ]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise FileNotFoundError("cuobjdump not found: pip install 'agmm[sass]', or set CUOBJDUMP")


def _dump(cuobjdump: Path, option: str, library: Path) -> str:
    environment = dict(os.environ)
    # cuobjdump calls the nvdisasm beside it.
    environment["PATH"] = f"{cuobjdump.parent}{os.pathsep}{environment.get('PATH', '')}"
    with subprocess.Popen(
        [cuobjdump, option, library],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as dump:
        # Few lines of some 300 MB of machine code matter; finding them here takes as long again.
        done = subprocess.run(
            ["grep", "-E", _LINES_THAT_MATTER],
            stdin=dump.stdout,
            capture_output=True,
            env={**environment, "LC_ALL": "C"},
            text=True,
            check=False,
        )
        errors = dump.communicate()[1]
    if dump.returncode:
        raise RuntimeError(f"cuobjdump {option} {library}: {errors.strip()}")
    return done.stdout


def parse(resource_usage: str, sass: str) -> list[Kernel]:
    """Return the kernels in the output of `cuobjdump -res-usage` and `cuobjdump -sass`."""
    kernels: dict[tuple[str, str], Kernel] = {}
    arch = ""
    current: Kernel | None = None
    for line in resource_usage.splitlines():
        if match := re.match(r"arch = (\S+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function (\S+):", line):
            current = kernels.setdefault((arch, match[1]), Kernel(name=match[1], arch=arch))
        elif current and (
            match := re.match(r"\s*REG:(\d+) STACK:\d+ SHARED:\d+ LOCAL:(\d+)", line)
        ):
            current.registers, current.local_bytes = int(match[1]), int(match[2])
    for line in sass.splitlines():
        if match := re.match(r"\s*arch = (\S+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function : (\S+)", line):
            current = kernels.setdefault((arch, match[1]), Kernel(name=match[1], arch=arch))
        elif current and (match := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(\w+)", line)):
            if match[1] in ("HGMMA", "QGMMA"):
                current.gmma += 1
            elif match[1] in ("LDL", "STL"):
                current.local_accesses += 1
            elif match[1] == "ACQBULK":
                current.waits += 1
    return sorted(kernels.values(), key=lambda kernel: kernel.name)


def inspect(library: Path) -> list[Kernel]:
    """Return the kernels in `library`, a shared library or an object file.

    Raises FileNotFoundError without `cuobjdump`, RuntimeError where it refuses the file.
    """
    cuobjdump = find_cuobjdump()
    return parse(_dump(cuobjdump, "-res-usage", library), _dump(cuobjdump, "-sass", library))


def why_no_ptx(listed: str) -> str | None:
    """The reason why what `cuobjdump -lptx` lists does not serve GPUs of later architectures, or
    None."""
    found = set(re.findall(r"\.(sm_\w+)\.ptx", listed))
    if PTX in found:
        return None
    return f"found PTX of {', '.join(sorted(found)) or 'nothing'}, wanted that of {PTX}"


def list_ptx(library: Path) -> str:
    """Return what `cuobjdump -lptx` prints of a library; raises as `inspect` does."""
    command = [str(find_cuobjdump()), "-lptx", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout


def installed_core() -> Path:
    """Return the path of the installed `agmm._core`.

    Raises FileNotFoundError where agmm is not installed.
    """
    spec = importlib.util.find_spec("agmm._core")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("agmm._core is not installed")
    return Path(spec.origin)


def main() -> int:
    """Print the kernels and their faults; 1 where there is a fault or no matmul kernel."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", nargs="?", type=Path, help="default: the installed agmm._core")
    parser.add_argument("--for-use", action="store_true", help="want all architectures of wheels")
    given = parser.parse_args()
    library = given.library or installed_core()
    kernels = inspect(library)
    for kernel in kernels:
        verdict = "; ".join(kernel.faults()) or "ok"
        print(f"{kernel.arch} {kernel.registers:4} registers {kernel.gmma:5} GMMA  {verdict}")
        print(f"    {kernel.name[:160]}")
    gemms = sum(kernel.is_gemm for kernel in kernels)
    faulty, absent = sum(bool(kernel.faults()) for kernel in kernels), []
    absent += missing(kernels, for_use=given.for_use)
    absent += filter(None, [why_no_ptx(list_ptx(library))])
    for phrase in absent:
        print(phrase)
    print(f"{len(kernels)} kernels, {gemms} of them matmuls, {faulty} with faults")
    return int(faulty > 0 or gemms == 0 or bool(absent))


if __name__ == "__main__":
    sys.exit(main())
