"""What is asked of the driver: by NVIDIA's bindings where they are, and nothing breaks without."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import pytest

from agmm.runtime import devices

LINE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"


def _nvml(**answers: object) -> mock.Mock:
    nvml = mock.Mock(device_get_handle_by_uuid=lambda uuid: uuid)
    for name, answer in answers.items():
        getattr(nvml, name).configure_mock(
            **{"side_effect" if callable(answer) else "return_value": answer}
        )
    return nvml


@pytest.mark.parametrize("module", [LINE, ""])
def test_the_drivers_version_is_nvmls(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str
) -> None:
    monkeypatch.setattr(devices, "KERNEL_MODULE", tmp_path / "version")
    (tmp_path / "version").write_text(module)
    nvml = _nvml(system_get_driver_version="570.10")
    monkeypatch.setattr(devices, "nvml", lambda: nvml)
    assert devices.driver_version() == "570.10"


def test_without_the_bindings_the_kernel_module_says_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(devices, "KERNEL_MODULE", tmp_path / "version")
    monkeypatch.setattr(devices, "nvml", lambda: None)
    assert devices.driver_version() is None
    (tmp_path / "version").write_text(LINE)
    assert devices.driver_version() == "580.159.04"


def test_bindings_that_are_older_than_their_nvml(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch 2.11 for CUDA 13 may bring such bindings: cuda-bindings 13.0.3."""
    folder = tmp_path / "cuda" / "bindings"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    for name in [name for name in sys.modules if name.partition(".")[0] == "cuda"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert devices.nvml() is None
    assert devices.sm_clock_mhz("GPU-a") is None
    assert devices.why_unknown() == (
        "no cuda-bindings with NVML is installed (pip install 'agmm[cuda]' brings one)"
    )


def test_links_are_counted_to_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def state(gpu: str, link: int) -> int:
        if link == 4:
            raise RuntimeError("Invalid Argument")
        return int(link != 1)

    nvml = _nvml(device_get_nvlink_state=state)
    nvml.NVLINK_MAX_LINKS = 18
    monkeypatch.setattr(devices, "nvml", lambda: nvml)
    assert devices.active_nvlinks("GPU-a") == 3


def test_the_bindings_have_what_is_asked() -> None:
    nvml = pytest.importorskip("cuda.bindings.nvml", reason="needs the extra cuda")
    # Names are compared by their ends: older ones begin with the enumeration's name in C.
    assert nvml.GpuP2PCapsIndex(devices.P2P_ATOMICS).name.endswith("ATOMICS")
    assert nvml.GpuP2PCapsIndex(devices.P2P_READ).name.endswith("READ")
    assert nvml.GpuP2PCapsIndex(devices.P2P_WRITE).name.endswith("WRITE")
    assert nvml.GpuP2PCapsIndex(devices.P2P_NVLINK).name.endswith("NVLINK")
    for level in devices.PCIE_WAYS:
        assert nvml.GpuTopologyLevel(level) == level
    assert nvml.ClockType(devices.SM_CLOCK).name.endswith("SM")
    assert nvml.GpuP2PStatus(devices.OK).name.endswith("OK")
    assert nvml.EnableState(devices.NVLINK_IS_ACTIVE).name.endswith("ENABLED")
    for name in (
        "NVLINK_MAX_LINKS",
        "device_get_clock_info",
        "device_get_handle_by_uuid",
        "device_get_nvlink_state",
        "device_get_nvlink_remote_device_type",
        "device_get_nvlink_remote_pci_info_v2",
        "device_get_p2p_status",
        "device_get_pci_info_v3",
        "device_get_topology_common_ancestor",
        "init_v2",
        "shutdown",
        "system_get_driver_version",
    ):
        assert hasattr(nvml, name)
