"""Check built wheels of agmm: what is in them, and that they work in a bare environment.

Of each wheel: auditwheel's platform tag, one exported symbol, no library but the system's, the
files of the package and no others. Then it is installed with torch into a bare virtual
environment of its Python, where it has to import and to pass `tools/wheel_smoke.py`, and, with the
extra `cli` if there is one, to answer `agmm --version` and `agmm doctor` and to run `agmm demo` on
CPU ranks.

Prints a table; exits with 1 where anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from email.parser import HeaderParser
from pathlib import Path

from pythons import Python, find_python, make_environment

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCES = REPOSITORY / "python"
ENTRY = ["PyInit__core"]
TORCH = "torch==2.13.0"  # its CPU build where pip is given an index that has it

SYSTEM_LIBRARIES = re.compile(
    r"(libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+|ld-linux-x86-64)\.so\.\d+$"
)
"""What a Linux with agmm's tag has. Not libcuda: a wheel imports where there is no driver."""

_NEEDED, _STRTAB = 1, 5
_SHT_DYNAMIC, _SHT_DYNSYM, _SHT_VERNEED = 6, 11, 0x6FFFFFFE


class WheelFault(Exception):
    """What is wrong with a wheel."""


@dataclass(frozen=True)
class Elf:
    """What a 64-bit little-endian ELF library gives and takes."""

    exported: list[str]
    needed: list[str]
    versions: dict[str, str]
    """The newest version that is needed of GLIBC, GLIBCXX, …"""


def read_elf(data: bytes) -> Elf:
    """Reads the dynamic symbols, libraries and versions of a library.

    Raises:
        WheelFault: it is no such library.
    """
    if data[:6] != b"\x7fELF\x02\x01":
        raise WheelFault("the module is no 64-bit ELF library")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]

    def text(at: int) -> str:
        return data[at : data.index(b"\0", at)].decode()

    def of_type(kind: int) -> Iterator[tuple[int, int, int, int]]:
        """Offset, length and number of entries of a section, and the offset of its names."""
        for section in sections:
            if section[1] == kind:
                yield section[4], section[5], section[7], sections[section[6]][4]

    exported = []
    for offset, length, _, names in of_type(_SHT_DYNSYM):
        for at in range(offset, offset + length, 24):
            name, info, _, section = struct.unpack_from("<IBBH", data, at)
            if info >> 4 and section:  # neither local nor undefined
                exported.append(text(names + name))
    needed = []
    for offset, length, _, names in of_type(_SHT_DYNAMIC):
        for at in range(offset, offset + length, 16):
            tag, value = struct.unpack_from("<QQ", data, at)
            if tag == _NEEDED:
                needed.append(text(names + value))
    versions: dict[str, str] = {}
    for offset, _, libraries, names in of_type(_SHT_VERNEED):
        at = offset
        for _ in range(libraries):
            _, symbols, _, first, following = struct.unpack_from("<HHIII", data, at)
            entry = at + first
            for _ in range(symbols):
                _, _, _, name, after = struct.unpack_from("<IHHII", data, entry)
                kind, _, version = text(names + name).partition("_")
                versions[kind] = max(versions.get(kind, "0"), version, key=_as_numbers)
                entry += after
            at += following
    return Elf(sorted(exported), sorted(needed), versions)


def _as_numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


@dataclass
class Report:
    """A wheel and what was found."""

    wheel: Path
    python: str = "?"
    tag: str = "?"
    versions: str = "?"
    exported: str = "?"
    kernels: str = "–"
    demo: str = "–"
    faults: list[str] = field(default_factory=list)

    def row(self) -> list[str]:
        """Its line in the table."""
        size = f"{self.wheel.stat().st_size / 1e6:.1f} MB"
        cells = [self.python, self.wheel.name, self.tag, size, self.versions, self.exported]
        return [*cells, self.kernels, self.demo, "; ".join(self.faults) or "ok"]


HEAD = ["Python", "wheel", "tag", "size", "needs", "exports", "kernels", "demo", "result"]


def check_contents(wheel: Path, report: Report) -> None:
    """Notes what is in a wheel that should not be, or is not and should."""
    abi = wheel.name.split("-")[2]
    report.python = f"{abi[2]}.{abi[3:]}"
    report.tag = wheel.name.removesuffix(".whl").split("-", 4)[4]
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        libraries = [name for name in names if re.search(r"\.so(\.|$)", name)]
        if len(libraries) != 1 or not libraries[0].startswith(f"agmm/_core.cpython-{abi[2:]}-"):
            report.faults.append(f"libraries: found {libraries}, wanted the module of {abi} alone")
            return
        elf = read_elf(archive.read(libraries[0]))
    report.versions = ", ".join(
        f"{k} {v}" for k, v in sorted(elf.versions.items()) if k[:3] == "GLI"
    )
    report.exported = ", ".join(elf.exported)
    if elf.exported != ENTRY:
        report.faults.append(f"exports: found {elf.exported[:5]}, wanted {ENTRY}")
    foreign = [name for name in elf.needed if not SYSTEM_LIBRARIES.match(name)]
    if foreign:
        report.faults.append(f"linked libraries: found {foreign}, wanted the system's alone")
    suffixes = {".py", ".pyi", ".json", ".typed"}
    wanted = {
        path.relative_to(SOURCES).as_posix()
        for path in SOURCES.rglob("*")
        if path.suffix in suffixes
    }
    found = {name for name in names if ".dist-info/" not in name and name not in libraries}
    for what, which in (("missing", wanted - found), ("not the package's", found - wanted)):
        if which:
            report.faults.append(f"files: {what}: {sorted(which)[:5]}")


def check_tag(wheel: Path, report: Report) -> None:
    """Notes where auditwheel finds that the library needs more than the wheel's tag promises."""
    done = _run(sys.executable, "-m", "auditwheel", "show", str(wheel))
    said = " ".join(done.stdout.split())
    found = re.search(r'consistent with the following platform tag: "(\w+)"', said)
    if found is None or found[1] not in report.tag.split("."):
        report.faults.append(f"tag: found {report.tag}, auditwheel: {found[1] if found else said}")
    elif not found[1].startswith("manylinux_"):
        report.faults.append(f"tag: found {report.tag}, wanted a manylinux tag")


def check_installed(wheel: Path, report: Report, python: Python, torch: str, folder: Path) -> None:
    """Installs the wheel into a new environment in `folder` and uses it there."""
    environment = make_environment(python, folder / "venv", [])

    def install(requirement: str) -> bool:
        fault = environment.install(requirement)
        if fault:
            report.faults.append(f"{requirement} does not install: {fault}")
        return fault is None

    def use(*arguments: str, code: int = 0, says: str = "") -> str:
        done = environment.run(*arguments, cwd=folder)
        said = done.stdout + done.stderr
        if done.returncode != code or says not in said:
            last = said.strip().splitlines()[-3:]
            report.faults.append(
                f"`{' '.join(arguments[:3])}`: exit code {done.returncode}: {' '.join(last)}"
            )
        return done.stdout

    if not (install(torch) and install(str(wheel))):
        return
    version = wheel.name.split("-")[1]
    facts = use("-c", _FACTS)
    if facts:
        found = json.loads(facts)
        report.kernels = str(found["kernels"]) if found["cuda_built"] else "none (CPU)"
        if found["version"] != version or found["fault"] or found["stress_delays"]:
            report.faults.append(f"module: found {found}, wanted version {version} for use")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    use(*torchrun, str(REPOSITORY / "tools" / "wheel_smoke.py"), says="smoke test passed")

    # The commands may be an extra: then they say so where it is not installed.
    demo = ["-m", "agmm", "demo", "--device", "cpu"]
    if "cli" in _extras(wheel):
        use(*demo, code=1, says="agmm[cli]")
        if not install(f"{wheel}[cli]"):
            return
    use("-m", "agmm", "--version", says=f"agmm {version}\n")
    use("-m", "agmm", "doctor")
    before = len(report.faults)
    use(*demo)
    report.demo = "ok" if len(report.faults) == before else "FAILED"


_FACTS = """
import json
from agmm import _core
names = ("cuda_built", "fault", "stress_delays")
facts = {name: getattr(_core, name) for name in names}
facts["kernels"] = len(_core.kernel_facts())
facts["version"] = _core.__version__
print(json.dumps(facts))
"""


def _extras(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return HeaderParser().parsestr(archive.read(name).decode()).get_all("Provides-Extra", [])


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def check(wheels: Sequence[Path], pythons: Sequence[Python], torch: str, install: bool) -> bool:
    """Checks them, prints the table, and says whether all is well."""
    reports = []
    for wheel in wheels:
        report = Report(wheel)
        reports.append(report)
        try:
            check_contents(wheel, report)
            check_tag(wheel, report)
            if install:
                print(f"check: {wheel.name}, with {torch} in a bare environment", flush=True)
                python = next((p for p in pythons if p.version == report.python), None)
                python = python or find_python(report.python)
                with tempfile.TemporaryDirectory(prefix="agmm-wheel-") as folder:
                    check_installed(wheel.resolve(), report, python, torch, Path(folder))
        except (WheelFault, OSError, subprocess.SubprocessError) as error:
            report.faults.append(str(error))
    rows = [HEAD, *(report.row() for report in reports)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    for row in rows:
        print(
            "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    return not any(report.faults for report in reports)


def main() -> None:
    """Check the wheels named."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--pythons", nargs="+", default=[], help="where to find them, by path")
    parser.add_argument("--torch", default=TORCH, help="what to test them with")
    parser.add_argument("--no-install", action="store_true", help="only look into the wheels")
    given = parser.parse_args()
    pythons = [find_python(name) for name in given.pythons]
    if not check(given.wheels, pythons, given.torch, not given.no_install):
        sys.exit(1)


if __name__ == "__main__":
    main()
