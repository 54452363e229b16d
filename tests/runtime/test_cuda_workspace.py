"""What the ranks of a CUDA workspace agree on, with torch's and the core's parts replaced: no GPU
needed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from agmm.errors import AgmmError, Unsupported
from agmm.runtime import cuda, groups, links, rendezvous, symmetric

MIB = 1 << 20
Answer = Callable[[str, Any], Any]


class Known:
    """A group of two as `agmm.runtime.groups.Group`, whose other rank gives these answers."""

    rank, world_size = 0, 2

    def __init__(self, answer: Answer, hosts: list[str]) -> None:
        self.lock = threading.RLock()
        self.calls = 0
        self.topics: list[str] = []
        self.all_are_over = mock.Mock()
        self.check_in_step = mock.Mock()
        self._answer, self._hosts = answer, hosts

    def hosts(self) -> list[str]:
        return self._hosts

    def exchange(self, topic: str, value: str) -> list[str]:
        self.topics.append(topic)
        try:
            said: Any = json.loads(value)
        except ValueError:
            return [value, str(self._answer(topic, value))]
        return [value, json.dumps(self._answer(topic, said))]


def same(topic: str, value: Any) -> Any:
    """A rank with the other GPU and the same wishes."""
    if topic == "the size of a workspace":
        return [value[0], "GPU-1", *value[2:]]
    return value


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[cuda.CudaWorkspace, Known]]:
    def made(
        answer: Answer = same, hosts: tuple[str, str] = ("a", "a"), visible: int = 2
    ) -> tuple[cuda.CudaWorkspace, Known]:
        known = Known(answer, list(hosts))
        monkeypatch.setattr(groups, "of", lambda group: known)
        monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
        monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
        monkeypatch.setattr(dist, "barrier", lambda *_, **__: None)
        of_torch = torch.cuda
        monkeypatch.setattr(of_torch, "Event", mock.Mock())
        monkeypatch.setattr(of_torch, "device", lambda device: mock.MagicMock())
        monkeypatch.setattr(of_torch, "synchronize", lambda device=None: None)
        monkeypatch.setattr(of_torch, "device_count", lambda: visible)
        monkeypatch.setattr(of_torch, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(of_torch, "can_device_access_peer", lambda a, b: True)
        monkeypatch.setattr(links, "visible", lambda: {f"GPU-{i}": i for i in range(visible)})
        monkeypatch.setattr(links, "uuid", lambda index: f"GPU-{index}")
        core = mock.Mock()
        core.workspace_bytes = lambda slot_bytes, world_size: 3 * slot_bytes
        monkeypatch.setattr(cuda.CudaWorkspace, "core_class", core)
        symm_mem = mock.Mock(_group_name_to_workspace_tensor={})
        monkeypatch.setattr(symmetric, "symm_mem", symm_mem)
        monkeypatch.setattr(rendezvous, "symm_mem", symm_mem)
        monkeypatch.setattr(rendezvous, "made", rendezvous.Rendezvous())
        monkeypatch.setattr("agmm.runtime.calls.be_asked", lambda: None)
        monkeypatch.setattr(
            cuda.CudaWorkspace, "open_memory", lambda self, memory, size: mock.Mock(memory=memory)
        )
        group = mock.Mock(group_name="g")
        workspace = cuda.CudaWorkspace(group, torch.device("cuda", 0))
        workspace.test_group = group  # type: ignore[attr-defined]  # kept weakly
        return workspace, known

    return made


def test_grows_in_steps_once_all_have_the_memory(make: Any) -> None:
    workspace, known = make()
    workspace.ensure(MIB)
    assert workspace.slot_bytes == 32 * MIB
    assert known.topics[-1] == "whether they have memory for a workspace"
    before = len(known.topics)
    workspace.ensure(32 * MIB)
    assert len(known.topics) == before  # collective only where it grows


def test_one_visible_gpu_in_each_process_is_no_shared_gpu(make: Any) -> None:
    """Both ranks have cuda:0, as under Slurm and Ray."""
    workspace, _ = make(visible=1)
    workspace.ensure(MIB)
    assert workspace.slot_bytes == 32 * MIB


def test_same_gpu_is_found_by_its_uuid(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGMM_SHARED_GPUS", raising=False)
    workspace, _ = make(lambda topic, value: value)
    with pytest.raises(Unsupported, match=r"found ranks \[0, 1\] on GPUs that they share"):
        workspace.ensure(MIB)


def test_two_hosts_of_one_name_are_told_apart(make: Any) -> None:
    workspace, _ = make(hosts=("a", "b"))
    for _ in range(2):
        with pytest.raises(Unsupported, match="found ranks on 2 hosts, wanted one"):
            workspace.ensure(MIB)


def test_no_access_seen_by_one_rank_counts_for_all(make: Any) -> None:
    def answer(topic: str, value: Any) -> Any:
        if topic == "whether their GPUs reach each other":
            return "group: cuda:0 has no peer access to cuda:1"
        return same(topic, value)

    workspace, _ = make(answer, visible=1)
    with pytest.raises(Unsupported, match="cuda:0 has no peer access to cuda:1"):
        workspace.ensure(MIB)


def test_no_access_is_found_by_uuid(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace, _ = make()
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: False)
    with pytest.raises(Unsupported, match="cuda:0 has no peer access to cuda:1"):
        workspace.ensure(MIB)


@pytest.mark.parametrize("which", ["own", "peer"])
def test_workspace_that_cannot_grow_keeps_what_it_had(make: Any, which: str) -> None:
    fails = False

    def answer(topic: str, value: Any) -> Any:
        if topic == "whether they have memory for a workspace":
            return "7 bytes of GPU memory: out of memory" if fails and which == "peer" else ""
        return same(topic, value)

    workspace, known = make(answer)
    workspace.ensure(MIB)
    buffers, fails = workspace.buffers, True
    if which == "own":
        vars(symmetric)["symm_mem"].empty.side_effect = torch.OutOfMemoryError("out of memory")
    rank = 0 if which == "own" else 1
    for _ in range(2):
        with pytest.raises(Unsupported, match=f"workspace: rank {rank} could not get .* of GPU m"):
            workspace.ensure(100 * MIB)
    assert workspace.buffers is buffers
    assert workspace.slot_bytes == 32 * MIB
    # The refusal is remembered: the second time nobody was asked.
    assert known.topics.count("the size of a workspace") == 2
    fails = False
    vars(symmetric)["symm_mem"].empty.side_effect = None
    workspace.ensure(64 * MIB)
    assert workspace.slot_bytes == 64 * MIB


def test_what_graphs_keep_is_less_than_what_is_in_use(make: Any) -> None:
    workspace, _ = make()
    for wanted in range(10, 400, 10):  # captures of ascending sizes
        workspace.ensure(wanted * MIB)
        workspace.captured = True
    sizes = [32 * MIB, 64 * MIB, 128 * MIB, 256 * MIB]
    assert workspace.slot_bytes == 512 * MIB
    assert len(workspace.kept) == len(sizes)
    assert sum(sizes) < workspace.slot_bytes


def test_capture_of_the_other_rank_alone_counts_too(make: Any) -> None:
    captured = False

    def answer(topic: str, value: Any) -> Any:
        found = same(topic, value)
        if topic == "the size of a workspace":
            found[3] = captured
        return found

    workspace, _ = make(answer)
    workspace.ensure(MIB)
    captured = True
    workspace.ensure(33 * MIB)
    workspace.ensure(65 * MIB)
    assert workspace.slot_bytes == 128 * MIB


def test_release_gives_back_what_no_graph_needs(make: Any) -> None:
    workspace, _ = make()
    workspace.ensure(MIB)
    workspace.release()
    assert workspace.buffers is None
    assert workspace.slot_bytes == 0
    workspace.ensure(MIB)
    assert workspace.slot_bytes == 32 * MIB


@pytest.mark.parametrize("which", ["own", "peer"])
def test_release_is_refused_while_a_graph_of_any_rank_needs_it(make: Any, which: str) -> None:
    def answer(topic: str, value: Any) -> Any:
        if topic == "whether graphs need a workspace":
            return which == "peer"
        return same(topic, value)

    workspace, _ = make(answer)
    workspace.ensure(MIB)
    workspace.captured = which == "own"
    with pytest.raises(
        AgmmError, match=rf"CUDA graphs that use it on ranks \[{which == 'peer':d}\]"
    ):
        workspace.release()
    assert workspace.slot_bytes == 32 * MIB


def test_rendezvous_of_torchs_own_ops_are_counted(make: Any) -> None:
    """Its counter is one for the process: a rank that has made more would wait for ever."""
    make()
    made = vars(symmetric)["symm_mem"]._group_name_to_workspace_tensor
    made["another group"] = torch.empty(100)
    rendezvous.made.note_torchs()
    rendezvous.made.note_torchs()
    made["another group"] = torch.empty(200)
    rendezvous.made.note_torchs()
    assert rendezvous.made.count == 2

    def answer(topic: str, value: Any) -> Any:
        found = same(topic, value)
        if topic == "the size of a workspace":
            found[2] = 0
        return found

    behind, _ = make(answer)
    vars(symmetric)["symm_mem"]._group_name_to_workspace_tensor["another group"] = torch.empty(100)
    with pytest.raises(Unsupported, match=r"found ranks that have made \[1, 0\] workspaces before"):
        behind.ensure(MIB)
