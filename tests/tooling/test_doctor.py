"""What doctor says about machines it has not seen."""

from __future__ import annotations

import os
import platform
import re
import socket
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from agmm import _installation
from agmm.cli import doctor, doctor_links, doctor_report
from agmm.cli.app import app
from agmm.cli.findings import Finding, is_broken
from agmm.planning import tables
from agmm.runtime import devices, links
from agmm.testing import machines


def _named(findings: list[Finding], name: str) -> Finding:
    return next(f for f in findings if f.name == name)


def _core(**changes: Any) -> types.SimpleNamespace:
    values = {
        "__version__": _installation.version(),
        "CAPABILITY": 90,
        "LEAST_CAPABILITY": 80,
        "cuda_built": True,
        "fault": "",
        "stress_delays": False,
        "kernel_facts": lambda: [
            types.SimpleNamespace(
                op="all_gather_matmul", kernel="128x128x64_1x1_pingpong", is_fp8=False
            )
        ],
        "timeout_seconds": lambda: 60.0,
    }
    return types.SimpleNamespace(**{**values, **changes})


def _pretend_gpus(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], peers: bool
) -> None:
    properties = types.SimpleNamespace(
        name="A GPU",
        major=capability[0],
        minor=capability[1],
        total_memory=2**36,
        multi_processor_count=132,
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capability)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: peers)
    monkeypatch.setattr(devices, "nvml", lambda: None)


def _diagnose(monkeypatch: pytest.MonkeyPatch, core: Any) -> list[Finding]:
    monkeypatch.setattr(doctor, "load_core", lambda: (core, None))
    return doctor.diagnose()


def test_this_machine_is_not_broken() -> None:
    findings = doctor.diagnose()
    assert not is_broken(findings), [f for f in findings if f.status == "broken"]
    assert len({f.name for f in findings}) == len(findings)
    assert all(f.found and f.meaning for f in findings)


def test_core_that_does_not_load_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "load_core", lambda: (None, "ImportError: libfoo.so is missing"))
    findings = doctor.diagnose()
    assert "libfoo.so" in _named(findings, "agmm").found
    assert findings[-1].status == "broken"


def test_stale_core_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _named(_diagnose(monkeypatch, _core(__version__="0.0.1")), "agmm")
    assert (found.status, "0.0.1" in found.found) == ("broken", True)


def test_deliberate_fault_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend_gpus(monkeypatch, (9, 0), peers=True)
    findings = _diagnose(monkeypatch, _core(fault="no_fence"))
    found = _named(findings, "agmm")
    assert (found.status, "no_fence" in found.found) == ("broken", True)
    assert findings[-1].status == "broken"


def test_stress_delays_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _named(_diagnose(monkeypatch, _core(stress_delays=True)), "agmm")
    assert (found.status, "test build" in found.meaning) == ("note", True)


def test_nonsense_time_limit_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGMM_TIMEOUT_S", "soon")
    found = _named(doctor.diagnose(), "environment")
    assert found.status == "broken"
    assert "AGMM_TIMEOUT_S" in found.meaning
    assert "soon" in found.meaning


def test_unknown_variables_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGMM_CACH", "off")
    found = _named(doctor.diagnose(), "environment")
    assert found.status == "note"
    assert found.meaning.endswith("unknown: AGMM_CACH")


def test_where_tuned_plans_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AGMM_CACHE", "on")
    monkeypatch.setenv("AGMM_CACHE_DIR", str(tmp_path / "not" / "there" / "yet"))
    assert _named(doctor.diagnose(), "tuned plans").status == "ok"
    (tmp_path / "file").touch()
    monkeypatch.setenv("AGMM_CACHE_DIR", str(tmp_path / "file" / "below"))
    found = _named(doctor.diagnose(), "tuned plans")
    assert (found.status, str(tmp_path / "file") in found.found) == ("note", True)
    monkeypatch.setenv("AGMM_CACHE", "off")
    assert _named(doctor.diagnose(), "tuned plans").found == "AGMM_CACHE=off"


def test_tables_that_are_ignored_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AGMM_CACHE", "on")
    monkeypatch.setenv("AGMM_CACHE_DIR", str(tmp_path))
    tables.save("cpu", 4, [])
    assert _named(doctor.diagnose(), "tuned plans").status == "ok"
    (tmp_path / "cpu-x2.json").write_text("{bad")
    (tmp_path / "cpu-x3.json").write_text('{"schema": 99}')
    found = _named(doctor.diagnose(), "tuned plans")
    assert found.status == "note"
    assert f"{tmp_path / 'cpu-x2.json'}: found a corrupt table" in found.found
    assert f"{tmp_path / 'cpu-x3.json'}: found schema 99" in found.found
    assert "x4" not in found.found


@pytest.mark.parametrize(
    ("version", "status"),
    [("2.10.1", "broken"), ("2.11.0+cu130", "ok"), ("2.13.0+cpu", "ok"), ("3.0.0a0", "ok")],
)
def test_torch_version(monkeypatch: pytest.MonkeyPatch, version: str, status: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert _named(doctor.diagnose(), "torch").status == status


def test_hopper_with_kernels_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend_gpus(monkeypatch, (9, 0), peers=True)
    findings = _diagnose(monkeypatch, _core())
    assert findings[-1].status == "ok"
    assert "CUDA tensors: fused" in findings[-1].found
    assert _named(findings, "GPUs").status == "ok"


@pytest.mark.parametrize(
    ("capability", "peers", "built", "reason"),
    [
        ((8, 0), True, True, "not all GPUs are Hopper"),
        ((9, 0), False, True, "no peer access"),
        ((9, 0), True, False, "kernels not built"),
    ],
)
def test_what_stands_against_fusion_is_said(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    peers: bool,
    built: bool,
    reason: str,
) -> None:
    _pretend_gpus(monkeypatch, capability, peers)
    verdict = _diagnose(monkeypatch, _core(cuda_built=built))[-1]
    assert verdict.status == "note"
    assert reason in verdict.found


@pytest.mark.parametrize(
    ("capability", "peers", "path"),
    [
        ((8, 0), True, "portable"),
        ((8, 9), True, "portable"),
        ((12, 0), True, "portable"),
        ((10, 0), False, "all-gather + matmul"),
        ((7, 5), True, "all-gather + matmul"),
    ],
)
def test_other_cards_are_told_what_they_get(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], peers: bool, path: str
) -> None:
    _pretend_gpus(monkeypatch, capability, peers)
    findings = _diagnose(monkeypatch, _core())
    assert f"CUDA tensors: {path}" in findings[-1].found
    assert ("SMs: unfused" in _named(findings, "GPUs").found) == (capability < (8, 0))


def test_a_group_of_several_kinds_takes_the_path_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend_gpus(monkeypatch, (9, 0), peers=True)
    kinds = [(9, 0), (8, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: kinds[i])
    findings = _diagnose(monkeypatch, _core())
    assert "several kinds is portable" in _named(findings, "GPUs").meaning
    assert "CUDA tensors: portable" in findings[-1].found


def test_pairs_without_atomics_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend_gpus(monkeypatch, (9, 0), peers=True)
    monkeypatch.setattr("agmm.runtime.links._core.peer_atomics", lambda a, b: a < b)
    finding = _named(_diagnose(monkeypatch, _core()), "GPU links")
    assert "no native atomics between 1-0" in finding.found
    assert finding.meaning == "such groups take copy engines, never SM push"
    assert finding.status == "note"


def test_pairs_without_peer_access_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend_gpus(monkeypatch, (9, 0), peers=False)
    assert "0-1, 1-0" in _named(doctor.diagnose(), "GPU links").found


def test_small_shared_memory_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def statvfs(path: Path) -> types.SimpleNamespace:
        return types.SimpleNamespace(f_bavail=16, f_blocks=16, f_frsize=2**20)

    monkeypatch.setattr(os, "statvfs", statvfs)
    found = _named(doctor.diagnose(), "shared memory")
    assert found.status == "note"
    assert "--shm-size" in found.meaning


def _pretend_machine(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """GPUs with such links; peer access over NVLink and where the text has no "-"."""
    matrix = machines.matrix(text)
    _pretend_gpus(monkeypatch, (9, 0), peers=True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(matrix))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: bool(matrix[a][b].peer))
    monkeypatch.setattr(links, "uuid", lambda index: f"GPU-{index}")
    monkeypatch.setattr(devices, "nvml", lambda: machines.Driver(matrix))
    monkeypatch.setattr("agmm.runtime.links._core.peer_atomics", lambda a, b: True)


@pytest.mark.parametrize(
    ("text", "found", "meaning", "status"),
    [
        (machines.DGX_H100, "fully connected by NVSwitch", "can push to peers", "ok"),
        (machines.HGX_H100_4, "fully connected, NVLinks between all", "can push to peers", "ok"),
        (
            machines.DGX_1V,
            "hybrid cube mesh of 0-1-2-3, 4-5-6-7; pairs without NVLink have a GPU between them",
            "such pairs take all-gather + matmul; ranks of one half reach",
            "note",
        ),
        (
            machines.H100_NVL_4,
            "peer access between all pairs; NVLink pairs of 0-1, 2-3",
            "the two ranks of a pair reach each other over NVLink, larger groups not",
            "note",
        ),
        (machines.PCIE_8, "PCIe only", "slower than plans take NVLink to be", "note"),
        (machines.RTX_4090_4, "no peer access", "such pairs take all-gather + matmul", "note"),
    ],
    ids=["H100", "H100 of four", "V100", "NVL", "PCIe", "4090"],
)
def test_links_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, text: str, found: str, meaning: str, status: str
) -> None:
    _pretend_machine(monkeypatch, text)
    finding = _named(_diagnose(monkeypatch, _core()), "GPU links")
    assert found in finding.found
    assert meaning in finding.meaning
    assert finding.status == status


def test_links_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    from agmm.cli.app import app

    _pretend_machine(monkeypatch, machines.DGX_1V)
    monkeypatch.setattr(doctor, "diagnose", lambda: [Finding("a", "b", "c")])
    monkeypatch.setattr(_installation, "load_core", lambda: (_core(), None))
    lines = [line.split() for line in CliRunner().invoke(app, ["doctor"]).stdout.splitlines()]
    assert ["0", "X", "NV1", "NV1", "NV2", "NV2", "SYS-", "SYS-", "SYS-"] in lines
    assert ["7", "SYS-", "SYS-", "SYS-", "NV1", "NV2", "NV1", "NV2", "X"] in lines


def test_links_that_cannot_be_asked_about_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend_machine(monkeypatch, machines.DGX_1V)
    monkeypatch.setattr(devices, "nvml", lambda: None)
    assert doctor_links.gpu_links(_core()) is None
    assert "active NVLinks per GPU: unknown" in doctor_links.finding(_core()).found


def test_a_report_names_no_host_and_no_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It has what an issue needs all the same."""
    monkeypatch.setattr(socket, "gethostname", lambda: "node17.example.org")
    monkeypatch.setattr(platform, "node", lambda: "node17")
    monkeypatch.setenv("AGMM_CACHE_DIR", str(tmp_path / "plans of node17"))
    monkeypatch.setenv("AGMM_REPORT", "calls of node17.txt")
    monkeypatch.setenv("AGMM_WARN_S", "7")
    result = CliRunner().invoke(app, ["doctor", "--report"])
    assert result.exit_code == 0, result.output
    said = result.output
    assert said.startswith("agmm doctor --report\nmachine: ")
    assert f"torch {torch.__version__}" in said and "AGMM_WARN_S=7" in said
    assert "AGMM_CACHE_DIR=<path>" in said and "AGMM_REPORT=<path>" in said
    assert "/dev/shm" in said
    assert not re.search(r"node17|/tmp|/home|/root|/usr", said)


def test_names_in_a_text_are_replaced() -> None:
    text = "GPU-12345678-9abc of /opt/a/b.json: ~/x/y, 3/4 of and/or; /dev/shm: /home"
    assert doctor_report.without_names(text) == (
        "<gpu> of <path>: <path>, 3/4 of and/or; /dev/shm: <path>"
    )
    assert (
        doctor_report.without_names("in '/a b/c d' or file:///x/y z") == "in '<path>' or <path> z"
    )


def test_each_form_of_an_issue_asks_for_the_report() -> None:
    yaml = pytest.importorskip("yaml")
    folder = Path(__file__).resolve().parents[2] / ".github" / "ISSUE_TEMPLATE"
    forms = [path for path in folder.glob("*.yml") if path.name != "config.yml"]
    assert {form.stem for form in forms} == {"wrong-result", "hang", "slow-shape"}
    for form in forms:
        fields = yaml.safe_load(form.read_text())["body"]
        labels = [field["attributes"].get("label") for field in fields]
        assert "What `agmm doctor --report` prints" in labels, form.name


@pytest.mark.parametrize(("driver", "advised"), [(None, False), ("580.1", True)])
def test_nvcc_is_a_reason_to_reinstall_only_beside_a_driver(
    monkeypatch: pytest.MonkeyPatch, driver: str | None, advised: bool
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: "/bin/nvcc")
    monkeypatch.setattr(devices, "driver_version", lambda: driver)
    found = _named(_diagnose(monkeypatch, None), "CUDA kernels")
    assert ("AGMM_CUDA=ON" in found.meaning) == advised
