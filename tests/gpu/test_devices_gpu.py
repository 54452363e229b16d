"""What NVML says of the GPUs at hand, beside what torch and the core say."""

from __future__ import annotations

import pytest
import torch

from agmm import _core
from agmm.runtime import devices, links

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
