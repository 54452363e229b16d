"""What the ranks of a group agree on before they plan: links, and multiprocessors set aside."""

from __future__ import annotations

import json
import platform
import socket
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import rank_work
import torch
import torch.distributed as dist

import agmm
from agmm import _env
from agmm.errors import InvalidArgument
from agmm.runtime import devices, group_gpus, groups, links
from agmm.testing.ranks import RankPool

GPU = torch.device("cuda", 0)
H100, H200, H20 = "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA H20"


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This rank's GPU is GPU-a; nothing was asked for."""
    monkeypatch.delenv(_env.RESERVED_SMS.name, raising=False)
    properties = mock.Mock(multi_processor_count=132)
    properties.name = H200
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(links, "uuid", lambda index: "GPU-a")
    monkeypatch.setattr(links, "visible", lambda: {"GPU-a": 0, "GPU-b": 1})
    monkeypatch.setattr("agmm.runtime.links._core.peer_atomics", lambda a, b: True)
    yield
    agmm.reserve_sms(None)


def facts(
    monkeypatch: pytest.MonkeyPatch,
    peer: tuple[str, int, int],
    peers_links: str = "",
    host: str = "a",
    gpu: str = H200,
) -> group_gpus.GroupFacts:
    """The facts of a group of two, whose other rank says this."""
    said = iter([json.dumps([*peer, gpu]), peers_links])
    group = mock.MagicMock(
        exchange=lambda topic, value: [value, next(said)], hosts=lambda: ["a", host]
    )
    monkeypatch.setattr(groups, "of", lambda _: group)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    return group_gpus.group_facts(mock.Mock(), GPU)


def test_two_gpus_over_nvlink(monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts(monkeypatch, ("GPU-b", 132, 0)) == (132, 0, True, H200)


@pytest.mark.parametrize("by", ["the driver", "the peer", "NVML"])
def test_one_link_without_atomics_counts_for_all(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    peers_links = ""
    if by == "the driver":
        monkeypatch.setattr("agmm.runtime.links._core.peer_atomics", lambda a, b: False)
    elif by == "the peer":
        peers_links = "the link from GPU-b to GPU-a has no native atomics"
    else:
        monkeypatch.setattr(links, "visible", lambda: {"GPU-a": 0})
        monkeypatch.setattr(devices, "have_atomics", lambda own, peer: False)
    with pytest.warns(
        UserWarning, match="^agmm takes no SM push: the link from GPU-. to GPU-. has"
    ):
        assert facts(monkeypatch, ("GPU-b", 132, 0), peers_links) == (132, 0, False, H200)


def test_a_link_that_cannot_be_asked_about_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "visible", lambda: {"GPU-a": 0})
    monkeypatch.setattr(devices, "nvml", lambda: None)
    with pytest.warns(
        UserWarning,
        match="the link from GPU-a to GPU-b has native atomics is unknown: no "
        "cuda-bindings with NVML is installed .pip install 'agmm.cuda.'",
    ):
        assert not facts(monkeypatch, ("GPU-b", 132, 0)).peer_atomics


def test_links_to_another_host_are_not_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "visible", lambda: {"GPU-a": 0})
    monkeypatch.setattr(devices, "have_atomics", lambda own, peer: None)
    assert facts(monkeypatch, ("GPU-b", 132, 0), host="b").peer_atomics


def test_hosts_are_told_apart_by_their_boot_not_their_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = set()
    for boot, name in (("first", "node"), ("second", "node"), ("second", "another")):
        (tmp_path / boot).write_text(f"{boot}\n")
        monkeypatch.setattr(groups, "BOOT_ID", tmp_path / boot)
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        monkeypatch.setattr(platform, "node", lambda name=name: name)
        found.add(groups.host_id())
    assert found == {"first", "second"}
    monkeypatch.undo()
    assert groups.host_id() == groups.host_id() != ""


@pytest.mark.parametrize(("status", "wanted"), [(0, None), (5, "has no native atomics")])
def test_nvml_is_asked_of_gpus_that_are_not_seen(
    monkeypatch: pytest.MonkeyPatch, status: int, wanted: str | None
) -> None:
    monkeypatch.setattr(links, "visible", lambda: {"GPU-a": 0})
    nvml = mock.Mock(device_get_handle_by_uuid=lambda uuid: uuid)
    nvml.device_get_p2p_status.return_value = status
    monkeypatch.setattr(devices, "nvml", lambda: nvml)
    reason = links.why_no_atomics("GPU-a", ["GPU-a", "GPU-b"])
    assert (reason or "").endswith(wanted or "") and bool(reason) == bool(wanted)
    nvml.device_get_p2p_status.assert_called_once_with("GPU-a", "GPU-b", 3)
    assert nvml.init_v2.call_count == nvml.shutdown.call_count == 1


def test_what_nvml_does_not_know_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = mock.Mock()
    nvml.device_get_handle_by_uuid.side_effect = RuntimeError("Not Found")
    monkeypatch.setattr(devices, "nvml", lambda: nvml)
    assert devices.have_atomics("GPU-a", "GPU-b") is None
    assert nvml.shutdown.call_count == 1
    nvml.init_v2.side_effect = RuntimeError("Driver Not Loaded")
    assert devices.active_nvlinks("GPU-a") is None
    assert devices.why_unknown() == "the driver's NVML does not load"
    assert nvml.shutdown.call_count == 1


@pytest.mark.parametrize(
    ("own", "peer", "wanted"),
    [
        ((132, H200), (132, H100), (132, H100)),
        ((132, H100), (132, H200), (132, H100)),
        ((132, H100), (78, H20), (78, H20)),
        ((78, H20), (132, H100), (78, H20)),
        ((114, "NVIDIA H100 PCIe"), (132, H100), (114, "NVIDIA H100 PCIe")),
        ((132, H200), (132, H200), (132, H200)),
    ],
    ids=str,
)
def test_ranks_of_two_kinds_agree_on_one(
    monkeypatch: pytest.MonkeyPatch,
    own: tuple[int, str],
    peer: tuple[int, str],
    wanted: tuple[int, str],
) -> None:
    properties = mock.Mock(multi_processor_count=own[0])
    properties.name = own[1]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    found = facts(monkeypatch, ("GPU-b", peer[0], 8), gpu=peer[1])
    assert found == (wanted[0] - 8, 8, True, wanted[1]) and found.all_sms == wanted[0]


@pytest.mark.parametrize("order", [1, -1])
def test_ranks_of_two_kinds_plan_alike(order: int) -> None:
    """Over real exchanges, of ranks that say they have these GPUs."""
    kinds = [(H100, 132), (H200, 132)][::order]
    with RankPool(2, env={"AGMM_TIMEOUT_S": "20"}) as pool:
        first, second = pool.run(rank_work.plans_of_two_kinds_of_gpu, kinds)
    assert first == second
    assert {problem.gpu for problem in first["problems"]} == {"nvidia-h100-80gb-hbm3"}
    assert {problem.sm_count for problem in first["problems"]} == {132}
    assert first["tables"] == ["packaged table nvidia-h100-80gb-hbm3-x2.json"]


@pytest.mark.parametrize("other", [(7, 5), (8, 0), (10, 0)], ids=str)
def test_a_gpu_without_kernels_counts_for_all_ranks(other: tuple[int, int]) -> None:
    """Else that rank would call the backend, and the others wait for it in an exchange. Collectives
    have kernels for more GPUs."""
    with RankPool(2, env={"AGMM_TIMEOUT_S": "20"}) as pool:
        first, second = pool.run(rank_work.reasons_of_a_group_with_one_hopper, other)
    own = f"device: found cuda:0 of compute capability {other[0]}.{other[1]}, wanted"
    of_matmuls = f"{own} 9.0 for agmm's matmuls"
    of_collectives = f"{own} at least 8.0 for agmm's collectives" if other < (8, 0) else None
    ops = ("gather", "scatter", "fp8", "reserve")
    assert second == {name: of_matmuls if name in ops else of_collectives for name in second}
    assert (
        len(second) == 7
        and {name: reason and reason.removeprefix("rank 1: ") for name, reason in first.items()}
        == second
    )
    assert all(reason is None or reason.startswith("rank 1: ") for reason in first.values())


def test_links_that_cannot_be_asked_about_are_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait for an answer, whatever the driver says here."""
    ask = mock.Mock(side_effect=RuntimeError("invalid device ordinal"))
    monkeypatch.setattr("agmm.runtime.links._core.peer_atomics", ask)
    with pytest.warns(UserWarning, match="native atomics is unknown: invalid device ordinal"):
        assert not facts(monkeypatch, ("GPU-b", 132, 0)).peer_atomics


def test_the_largest_number_counts_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_env.RESERVED_SMS.name, "4")
    assert facts(monkeypatch, ("GPU-b", 132, 12)) == (120, 12, True, H200)
    agmm.reserve_sms(16)
    assert facts(monkeypatch, ("GPU-b", 130, 12)) == (114, 16, True, H200)


def test_ranks_that_share_a_gpu_leave_room_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts(monkeypatch, ("GPU-a", 132, 0)) == (130, 2, True, H200)
    assert facts(monkeypatch, ("GPU-a", 132, 6)) == (126, 6, True, H200)


def test_no_more_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    agmm.reserve_sms(131)
    with pytest.raises(
        InvalidArgument, match=r"reserve_sms: found 131, wanted at most 130 of 132 multiprocessors$"
    ):
        facts(monkeypatch, ("GPU-b", 132, 0))


@pytest.mark.parametrize("count", [-1, 1.5, "8", True])
def test_nonsense_is_refused(count: object) -> None:
    with pytest.raises(InvalidArgument, match=r"^count: found "):
        agmm.reserve_sms(count)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("backend", "size", "wanted"),
    [("cuda:nccl", 2, 8), ("cpu:gloo,cuda:nccl", 4, 8), ("cuda:nccl", 1, 0), ("cpu:gloo", 2, 0)],
)
def test_other_groups_are_found(
    monkeypatch: pytest.MonkeyPatch, backend: str, size: int, wanted: int
) -> None:
    own, other = mock.Mock(), mock.Mock()
    other.size.return_value = size
    world = mock.Mock(pg_map={own: None, other: None})
    monkeypatch.setattr(dist.distributed_c10d, "_world", world)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backend)
    assert group_gpus.wanted_sms(own) == wanted
    monkeypatch.setenv(_env.RESERVED_SMS.name, "2")
    assert group_gpus.wanted_sms(own) == 2


def test_the_default_group_does_not_count() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.new_group([0])
        with mock.patch.object(dist, "get_backend_config", return_value="cuda:nccl"):
            assert not group_gpus.has_other_groups(group)
            with mock.patch.object(type(group), "size", return_value=2):
                assert not group_gpus.has_other_groups(group)
                everyone = dist.group.WORLD
                assert everyone is not None
                assert group_gpus.has_other_groups(everyone)
    finally:
        dist.destroy_process_group()
