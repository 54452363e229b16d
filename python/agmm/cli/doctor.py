"""What this machine has, and what that means for a user of agmm."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from agmm import _env, _installation
from agmm._installation import how_to_get, load_core, version
from agmm.bench.machine import nccl_version, torch, torch_error
from agmm.bench.units import size
from agmm.cli import doctor_links
from agmm.cli.findings import Finding
from agmm.errors import InvalidArgument
from agmm.planning.kernel_table import GATHER as ALL_GATHER_MATMUL
from agmm.runtime import devices

# These stand in pyproject.toml too, which a broken installation cannot be asked for.
_OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 11)
_SHM = Path("/dev/shm")
_SMALL_SHM_BYTES = 256 * 2**20  # a container has 64 MiB unless told otherwise
_INTERESTING_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "NCCL_NVLS_ENABLE",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST",
)


def diagnose() -> list[Finding]:
    """Looks at everything in turn; never raises for what it finds. The last one is the verdict."""
    core, core_error = load_core()
    findings = [_python(), _torch(), _agmm(core, core_error), _kernels(core), _driver()]
    if torch is not None:
        findings += [_gpus(core), doctor_links.finding(core), _symmetric_memory(), _collectives()]
    findings += [_shared_memory(), _variables(core), _tuned_plans(), _plots()]
    return [*findings, _verdict(core)]


def _python() -> Finding:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.platform != "linux":
        return Finding("Python", found, "agmm runs on Linux only", "broken")
    if sys.version_info < _OLDEST_PYTHON:
        oldest = ".".join(map(str, _OLDEST_PYTHON))
        return Finding("Python", found, f"agmm needs Python {oldest} or later", "broken")
    return Finding("Python", found, "supported")


def _torch() -> Finding:
    if torch is None:
        oldest = ".".join(map(str, OLDEST_TORCH))
        meaning = f"agmm needs torch {oldest} or later: install it, or repair what is here"
        return Finding("torch", f"does not load: {torch_error}", meaning, "broken")
    found = f"{torch.__version__}, CUDA {torch.version.cuda or 'not built in'}"
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if version < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return Finding("torch", found, f"agmm needs torch {oldest} or later", "broken")
    if torch.version.cuda is None:
        return Finding("torch", found, "CPU tensors only: this torch knows no CUDA", "note")
    return Finding("torch", found, "supported")


def _agmm(core: Any, core_error: str | None) -> Finding:
    here = version() or "not installed as a package"
    if core is None:
        return Finding("agmm", f"{here}; agmm._core: {core_error}", "reinstall it", "broken")
    if core.__version__ != here:
        found = f"{here}, but agmm._core is {core.__version__}"
        return Finding("agmm", found, "the compiled part is stale: reinstall", "broken")
    if _installation.import_error is not None and torch is not None:
        return Finding("agmm", str(_installation.fault()), "reinstall it", "broken")
    if core.fault:
        found = f"{here}, built with the deliberate fault {core.fault}"
        return Finding("agmm", found, "a test build, results are wrong: reinstall it", "broken")
    if core.stress_delays:
        found = f"{here}, built with delays at random"
        return Finding("agmm", found, "a test build, slow: reinstall it", "note")
    return Finding("agmm", here, "the compiled part loads")


def _kernels(core: Any) -> Finding:
    if core is None or not core.cuda_built:
        meaning = "no fused CUDA op: CUDA tensors take all-gather + matmul; CPU tensors are served"
        if shutil.which("nvcc") is not None and devices.driver_version() is not None:
            meaning += "; nvcc is here: reinstall with AGMM_CUDA=ON for it"
        return Finding("CUDA kernels", "not built", meaning, "note")
    facts = [f for f in core.kernel_facts() if f.op == ALL_GATHER_MATMUL and not f.is_fp8]
    names = list(dict.fromkeys(f.kernel for f in facts))
    if not names:
        return Finding("CUDA kernels", "built with CUDA, 0 kernels", "reinstall it", "broken")
    found = f"{len(names)}: {', '.join(names)}"
    return Finding("CUDA kernels", found, "matmuls, built for sm_90a (Hopper)")


def _driver() -> Finding:
    found = devices.driver_version()
    if found is None:
        return Finding("NVIDIA driver", "none found", "GPUs cannot be used", "note")
    if torch is None or torch.version.cuda is None:
        return Finding("NVIDIA driver", found, "-")
    if not torch.cuda.is_available():
        meaning = "torch cannot use the GPUs: the driver may be too old for its CUDA, or hidden"
        return Finding("NVIDIA driver", found, meaning, "note")
    return Finding("NVIDIA driver", found, "torch can use it")


def _gpus(core: Any) -> Finding:
    count = torch.cuda.device_count()
    if count == 0:
        return Finding("GPUs", "none", "`agmm demo` and `agmm bench` use CPU processes", "note")
    each = []
    for i in range(count):
        p = torch.cuda.get_device_properties(i)
        path = "" if core is None else f": {_path_and_why(core, (p.major, p.minor))}"
        each.append(
            f"{i}: {p.name}, sm_{p.major}{p.minor}, {p.total_memory / 2**30:.0f} GiB, "
            f"{p.multi_processor_count} SMs{path}"
        )
    if core is None:
        return Finding("GPUs", "\n".join(each), "-")
    if not _all_hopper(core):
        paths = {_path(core, torch.cuda.get_device_capability(i)) for i in range(count)}
        meaning = (
            "fused matmuls need Hopper (sm_90); from sm_80 on copies pass beside torch's matmul "
            "(portable), and agmm's collectives and quantisers run; others take all-gather + matmul"
        )
        if len(paths) > 1:
            meaning += f"; a group of GPUs of several kinds is {_worst(paths)}"
        return Finding("GPUs", "\n".join(each), meaning, "note")
    if count == 1:
        return Finding("GPUs", each[0], "one rank fits; overlap needs at least 2", "note")
    return Finding("GPUs", "\n".join(each), "Hopper: the fused kernels run here")


def _symmetric_memory() -> Finding:
    name = "symmetric memory"
    if torch.cuda.device_count() == 0:
        return Finding(name, "POSIX shared memory (CPU)", "CPU ranks exchange chunks through it")
    try:
        from torch._C._distributed_c10d import _SymmetricMemory

        buffer = _SymmetricMemory.empty_strided_p2p(
            (1024,), (1,), torch.uint8, torch.device("cuda", torch.cuda.current_device())
        )
        del buffer
    except Exception as e:
        found = (
            f"torch cannot allocate it: {str(e).splitlines()[0] if str(e) else type(e).__name__}"
        )
        return Finding(name, found, "CUDA tensors take all-gather + matmul", "note")
    return Finding(name, "torch allocates it", "ranks on this host's GPUs can push to each other")


def _collectives() -> Finding:
    dist = torch.distributed
    if not dist.is_available():
        return Finding("collectives", "torch.distributed is missing", "no groups", "broken")
    found = [n for n, there in (("gloo", dist.is_gloo_available()),) if there]
    if dist.is_nccl_available():
        found.append(f"nccl {nccl_version() or ''}".strip())
    if "gloo" not in found:
        return Finding("collectives", ", ".join(found), "no gloo: no CPU ranks", "note")
    meaning = "groups of GPUs and of CPU processes" if len(found) > 1 else "groups of CPU processes"
    return Finding("collectives", ", ".join(found), meaning)


def _shared_memory() -> Finding:
    name = "shared memory"
    try:
        stat = os.statvfs(_SHM)
    except OSError as e:
        return Finding(name, f"{_SHM}: {e.strerror}", "CPU ranks cannot share memory", "broken")
    free, total = stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize
    found = f"{_SHM}: {size(free)} of {size(total)} free"
    meaning = "each CPU rank takes twice the gathered A"
    if free < _SMALL_SHM_BYTES:
        meaning += "; that is little here (in a container: --shm-size or --ipc=host)"
        return Finding(name, found, meaning, "note")
    return Finding(name, found, meaning)


def _variables(core: Any) -> Finding:
    set_here = {
        n: v
        for n, v in sorted(os.environ.items())
        if n.startswith("AGMM_") or n in _INTERESTING_VARIABLES
    }
    found = "\n".join(f"{n}={v}" for n, v in set_here.items()) or "none set"
    if core is None:
        return Finding("environment", found, "-")
    try:
        _env.check()
    except InvalidArgument as e:
        return Finding("environment", found, str(e), "broken")
    limit = f"a wait ends the process after {core.timeout_seconds():g} s"
    unknown = _env.unknown()
    if unknown:
        return Finding("environment", found, f"{limit}; unknown: {', '.join(unknown)}", "note")
    return Finding("environment", found, limit)


def _tuned_plans() -> Finding:
    name = "tuned plans"
    if _installation.import_error is not None:  # what reads them asks the core
        return Finding(name, "not looked at", "-")
    from agmm.planning import tables

    try:
        folder = tables.user_folder()
    except tables.TableError as e:
        return Finding(name, str(e), "`agmm tune` cannot keep its plans", "note")
    if folder is None:
        return Finding(name, "AGMM_CACHE=off", "the packaged tables and the cost model choose")
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not (there.is_dir() and os.access(there, os.W_OK)):
        found = f"{folder}: {there} is no folder that can be written to"
        return Finding(name, found, "`agmm tune` cannot keep its plans", "note")
    ignored = [why for path in sorted(folder.glob("*-x*.json")) if (why := _why_unread(path))]
    if ignored:
        meaning = "agmm ignores such a table: remove it, or tune again"
        return Finding(name, "\n".join([str(folder), *ignored]), meaning, "note")
    return Finding(name, str(folder), "where `agmm tune` keeps them")


def _why_unread(table: Path) -> str | None:
    from agmm.planning import tables

    try:
        tables.read(table)
    except (tables.TableError, FileNotFoundError) as error:
        return str(error)
    return None


def _plots() -> Finding:
    try:
        found = importlib.metadata.version("matplotlib")
    except importlib.metadata.PackageNotFoundError:
        meaning = f"`agmm demo` draws no picture; {how_to_get('matplotlib')} for it"
        return Finding("matplotlib", "not installed", meaning, "note")
    return Finding("matplotlib", found, "`agmm demo` draws its picture")


def _verdict(core: Any) -> Finding:
    name = "all in all"
    if torch is None:
        return Finding(name, "agmm does not load", "install torch", "broken")
    if core is None or _installation.import_error is not None:
        return Finding(name, "agmm does not load", "reinstall it", "broken")
    if core.fault:
        return Finding(name, "a test build with a deliberate fault", "reinstall it", "broken")
    cpu = "CPU tensors: fused, over shared memory"
    reason = _why_not_fused(core)
    if reason is None:
        return Finding(name, f"{cpu}\nCUDA tensors: fused", "`agmm demo` runs on GPUs")
    if reason == _NOT_ALL_HOPPER and not doctor_links.pairs_without_access():
        count = torch.cuda.device_count()
        capabilities = [torch.cuda.get_device_capability(i) for i in range(count)]
        if _worst({_path(core, one) for one in capabilities}) == _PATHS[1]:
            found = f"{cpu}\nCUDA tensors: portable, copies beside torch's matmul ({reason})"
            return Finding(name, found, "`agmm demo` runs on GPUs", "note")
    found = f"{cpu}\nCUDA tensors: all-gather + matmul ({reason})"
    return Finding(name, found, "`agmm demo` shows what works here", "note")


def _why_not_fused(core: Any) -> str | None:
    if torch.cuda.device_count() == 0:
        return "no GPU"
    if not core.cuda_built:
        return "kernels not built"
    if not _all_hopper(core):
        return _NOT_ALL_HOPPER
    if doctor_links.pairs_without_access():
        return "no peer access"
    return None


_NOT_ALL_HOPPER = "not all GPUs are Hopper"
_PATHS = ("fused", "portable", "unfused")
"""The paths of calls on GPUs that reach each other's memory, the best one first."""


def _path(core: Any, capability: tuple[int, int]) -> str:
    """The path of calls between GPUs of that compute capability."""
    if not core.cuda_built or capability < divmod(core.LEAST_CAPABILITY, 10):
        return _PATHS[2]
    return _PATHS[0] if capability == divmod(core.CAPABILITY, 10) else _PATHS[1]


def _path_and_why(core: Any, capability: tuple[int, int]) -> str:
    """The path of calls between GPUs of that compute capability, and what it comes from."""
    path, found = _path(core, capability), ".".join(map(str, capability))
    if not core.cuda_built:
        return f"{path}, since no kernels are built"
    if path == _PATHS[0]:
        return f"{path}, by matmul kernels for {found}"
    if path == _PATHS[1]:
        return f"{path}, since no matmul kernels are for {found}"
    least = ".".join(map(str, divmod(core.LEAST_CAPABILITY, 10)))
    return f"{path}, since {found} is below {least}"


def _worst(paths: set[str]) -> str:
    """The path of a group whose ranks have those."""
    return max(paths, key=_PATHS.index)


def _all_hopper(core: Any) -> bool:
    wanted = divmod(core.CAPABILITY, 10)
    return all(
        torch.cuda.get_device_capability(i) == wanted for i in range(torch.cuda.device_count())
    )
