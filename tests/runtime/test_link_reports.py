"""From what NVML says of each GPU to the matrix of links, and what a group makes of it."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import pytest
import torch

from agmm.runtime import devices, group_topology, groups
from agmm.runtime.topology import Kind, Link, kind_of, matrix_of, schedule_of
from agmm.testing import machines
from agmm.testing.machines import Driver, bus


def reports(driver: Driver, monkeypatch: pytest.MonkeyPatch, alone: bool) -> dict[str, Any]:
    """The reports of all GPUs; ``alone``: each by a process that sees no other."""
    monkeypatch.setattr(devices, "nvml", lambda: driver)
    names = machines.uuids(driver.links)
    found = {}
    for gpu in driver.visible:
        seen = driver.visible
        if alone:
            driver.visible = [gpu]
        report = devices.links_of(names[gpu], names)
        driver.visible = seen
        assert report is not None
        # The ranks tell each other the reports as JSON.
        found[names[gpu]] = json.loads(json.dumps(report))
    return found


ALL = ["DGX_1V", "DGX_2", "DGX_H100", "HGX_H100_4", "H100_NVL_8", "PCIE_8", "RTX_4090_4"]


@pytest.mark.parametrize("name", ALL)
def test_the_matrix_is_what_the_driver_has(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    links = machines.matrix(getattr(machines, name))
    assert matrix_of(reports(Driver(links), monkeypatch, alone=False)) == links


@pytest.mark.parametrize("name", ALL[:-1])
def test_processes_that_see_one_gpu_each_know_the_nvlinks(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It is so under Slurm: the ways over PCIe are unknown then, and so is access over them."""
    links = machines.matrix(getattr(machines, name))
    found = matrix_of(reports(Driver(links), monkeypatch, alone=True))
    assert [[link.nvlinks for link in row] for row in found] == [
        [link.nvlinks for link in row] for row in links
    ]
    assert kind_of(found) is kind_of(links)


@pytest.mark.parametrize(("gpus", "kind"), [([0, 1, 2, 3], Kind.ALL_PAIRS), ([0, 5], Kind.NONE)])
def test_links_to_hidden_gpus_do_not_count(
    monkeypatch: pytest.MonkeyPatch, gpus: list[int], kind: Kind
) -> None:
    links = machines.matrix(machines.DGX_1V)
    found = matrix_of(reports(Driver(links, gpus), monkeypatch, alone=False))
    assert found == machines.some(links, gpus) and kind_of(found) is kind


def test_switches_that_a_virtual_machine_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    links = machines.matrix(machines.DGX_A100)
    driver = Driver(links)
    driver.hidden_ends = True
    assert matrix_of(reports(driver, monkeypatch, alone=False)) == links


def test_a_link_that_is_down_at_one_end_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(machines.matrix(machines.DGX_1V))
    driver.ends[0].remove((0, bus(3)))
    found = matrix_of(reports(driver, monkeypatch, alone=False))
    assert found[0][3].nvlinks == found[3][0].nvlinks == 1


def test_a_switch_that_is_not_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The links are up, but the driver says that nothing goes over them."""
    links = machines.matrix(machines.switched(4, 12))
    driver = Driver(links)
    driver.links = [[link._replace(nvlinks=0) for link in row] for row in links]
    assert kind_of(matrix_of(reports(driver, monkeypatch, alone=False))) is Kind.PCIE


def test_what_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "nvml", lambda: None)
    assert devices.links_of("GPU-0", ["GPU-1"]) is None
    driver = Driver(machines.matrix(machines.PCIE_8))
    monkeypatch.setattr(
        driver, "device_get_topology_common_ancestor", mock.Mock(side_effect=OSError)
    )
    monkeypatch.setattr(driver, "device_get_p2p_status", mock.Mock(side_effect=OSError))
    monkeypatch.setattr(devices, "nvml", lambda: driver)
    found = devices.links_of("GPU-0", ["GPU-0", "GPU-1"])
    assert found is not None
    assert found["pcie"] == {"GPU-1": ""} and found["peer"] == {"GPU-1": None}


# --- a group ---


def agreed(
    monkeypatch: pytest.MonkeyPatch, others: dict[str, list[str]], hosts: int = 1
) -> group_topology.GroupTopology:
    """What rank 0 finds, of whose peers each says this, by topic."""
    group = mock.MagicMock(
        exchange=lambda topic, value: [value, *others[topic]],
        hosts=lambda: [str(min(rank, hosts - 1)) for rank in range(8)],
    )
    monkeypatch.setattr(groups, "of", lambda _: group)
    return group_topology.agree(mock.Mock(), "GPU-0")


def test_ranks_agree_on_a_cube_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    links = machines.matrix(machines.DGX_1V)
    found = reports(Driver(links), monkeypatch, alone=True)
    names = machines.uuids(links)
    said = [json.dumps(found[name]) for name in names[1:]]
    topology = agreed(monkeypatch, {"their GPUs": names[1:], "their links": said})
    assert topology.kind is Kind.CUBE_MESH
    assert topology.relayed == schedule_of(links)


def test_one_rank_that_does_not_know_counts_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    links = machines.matrix(machines.DGX_1V)
    names = machines.uuids(links)
    said = [json.dumps(report) for report in reports(Driver(links), monkeypatch, True).values()]
    said[5] = json.dumps({"why": "the driver's NVML does not load"})
    topology = agreed(monkeypatch, {"their GPUs": names[1:], "their links": said[1:]})
    assert (topology.kind, topology.relayed) == (None, None)
    assert topology.unknown == "rank 5 cannot ask about its GPU: the driver's NVML does not load"


def test_shared_gpus_and_several_hosts_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert agreed(monkeypatch, {"their GPUs": ["GPU-0"]}).unknown == "ranks share a GPU"
    assert agreed(monkeypatch, {}, hosts=2).unknown == "the ranks are on several hosts"


def test_full_connection_needs_no_relays() -> None:
    found = group_topology.of_matrix(machines.matrix(machines.DGX_H100))
    assert (found.kind, found.relayed) == (Kind.SWITCHED, None)
    pairs = group_topology.of_matrix(machines.matrix(machines.H100_NVL_8))
    assert (pairs.kind, pairs.relayed) == (Kind.PAIRS, None)


def test_of_cpu_ranks_nothing_is_asked() -> None:
    found = group_topology.topology_of(mock.Mock(), torch.device("cpu"))
    assert found.kind is None and found.unknown


def test_a_link_in_words() -> None:
    assert str(Link(12, True)) == "NV12"
    assert str(Link(pcie="SYS")) == "SYS"
    assert str(Link()) == "?"
    assert str(Link(pcie="PHB", peer=False)) == "PHB-"
