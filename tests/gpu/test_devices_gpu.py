"""What NVML says of the GPUs at hand, beside what torch and the core say."""

from __future__ import annotations

import pytest
import torch

from agmm import _core
from agmm.runtime import devices, links, topology

pytestmark = pytest.mark.skipif(
    devices.nvml() is None, reason="needs the extra cuda (cuda-bindings with NVML)"
)


def test_gpus_are_known_by_torchs_uuids() -> None:
    assert devices.why_unknown() is None
    assert devices.driver_version() is not None
    for index in range(torch.cuda.device_count()):
        clock = devices.sm_clock_mhz(links.uuid(index))
        assert clock is not None and 100 < clock < 4000
        assert devices.active_nvlinks(links.uuid(index)) is not None


def test_nvml_and_the_driver_agree_on_atomics() -> None:
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs 2 GPUs")
    for index in range(1, count):
        by_nvml = devices.have_atomics(links.uuid(0), links.uuid(index))
        assert by_nvml == _core.peer_atomics(0, index)


def test_links_of_this_machine() -> None:
    """The links are as many as there are, with an end each, look the same from both ends, and are
    no longer ways than torch sees."""
    uuids = [links.uuid(index) for index in range(torch.cuda.device_count())]
    reports = {uuid: devices.links_of(uuid, uuids) for uuid in uuids}
    for uuid, report in reports.items():
        assert report is not None
        assert report["bus"].count(":") == 2
        assert len(report["nvlinks"]) == devices.active_nvlinks(uuid)
        assert {end for end, _ in report["nvlinks"]} <= {"gpu", "switch", "unknown"}
    found = topology.matrix_of({uuid: report for uuid, report in reports.items() if report})
    for a in range(len(uuids)):
        for b in range(a):
            assert found[a][b] == found[b][a]
            assert found[a][b].peer == torch.cuda.can_device_access_peer(a, b)
