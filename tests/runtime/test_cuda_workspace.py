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
from agmm.runtime import cuda, groups, links, rendezvous, sharing, symmetric
from agmm.runtime.group_gpus import GroupFacts

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


def handle_of(memory: torch.Tensor) -> mock.Mock:
    return mock.Mock(buffer_ptrs=[memory.data_ptr(), 0])


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[cuda.CudaWorkspace, Known]]:
    def made(
        answer: Answer = same, hosts: tuple[str, str] = ("a", "a"), visible: int = 2
    ) -> tuple[cuda.CudaWorkspace, Known]:
        known = Known(answer, list(hosts))
        monkeypatch.setattr(groups, "of", lambda group: known)
        monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
        monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
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
        monkeypatch.setattr(symmetric, "group_facts", lambda group, device: GroupFacts(70, 8))
        properties = mock.Mock(multi_processor_count=132)
        monkeypatch.setattr(of_torch, "get_device_properties", lambda device: properties)
        monkeypatch.setattr("agmm._core.load_quantizers", core.load_quantizers)
        core.words_offset = lambda slot_bytes, world_size: 0
        core.credit_words = lambda world_size: [0]
        symm_mem.empty = mock.Mock(side_effect=lambda *_, **__: torch.zeros(8, dtype=torch.uint8))
        symm_mem.rendezvous = mock.Mock(side_effect=lambda memory, name: handle_of(memory))
        group = mock.Mock(group_name="g")
        workspace = cuda.CudaWorkspace(group, torch.device("cuda", 0))
        workspace.test_group = group  # type: ignore[attr-defined]  # kept weakly
        return workspace, known

    return made


def test_grows_in_steps_once_all_have_the_memory(make: Any) -> None:
    workspace, known = make()
    workspace.ensure(MIB)
    assert workspace.slot_bytes == 32 * MIB
    core: Any = cuda.CudaWorkspace.core_class
    assert core.load_quantizers.called  # kernels that load later would wait for those that run
    assert known.topics[-1] == "whether their workspaces are ready"
    before = len(known.topics)
    workspace.ensure(32 * MIB)
    assert len(known.topics) == before  # collective only where it grows


def test_all_ranks_have_the_multiprocessors_of_the_smallest_gpu(make: Any) -> None:
    """There are 132 here, and 78 on the other rank, of which 8 are set aside."""
    workspace, _ = make()
    workspace.ensure(MIB)
    (made,) = vars(cuda.CudaWorkspace)["core_class"].call_args_list
    assert made.args[0] == 0 and made.args[2:] == (32 * MIB, 132 - 70)


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


@pytest.mark.parametrize("name", ["CUDA drivers", "versions of torch"])
@pytest.mark.parametrize("hosts", [("a", "a"), ("a", "b")])
def test_ranks_of_several_versions_share_no_memory(
    make: Any, monkeypatch: pytest.MonkeyPatch, name: str, hosts: tuple[str, str]
) -> None:
    """Ranks of several hosts share none anyway, whatever their versions are."""
    own = {"CUDA drivers": "13.0", "versions of torch": "2.11"}
    monkeypatch.setattr(sharing, "versions", lambda: own)

    def answer(topic: str, value: Any) -> Any:
        found = same(topic, value)
        return [*found[:5], own | {name: "2.7"}] if topic == "the size of a workspace" else found

    workspace, _ = make(answer, hosts=hosts)
    words = "found ranks on 2 hosts"
    if hosts == ("a", "a"):
        words = f"group: found {name} {own[name]} on rank 0, 2.7 on rank 1, wanted one: "
    for _ in range(2):
        with pytest.raises(Unsupported, match=words):
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


def test_a_gpu_that_cannot_be_asked_is_told_of(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait for an answer, whatever the driver says here."""
    workspace, known = make()
    ask = mock.Mock(side_effect=RuntimeError("invalid device\nat a line"))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", ask)
    with pytest.raises(Unsupported, match=r"^group: invalid device$"):
        workspace.ensure(MIB)
    assert known.topics[-1] == "whether their GPUs reach each other"


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
    empty = vars(symmetric)["symm_mem"].empty
    if which == "own":
        allocates, empty.side_effect = empty.side_effect, torch.OutOfMemoryError("out of memory")
    rank = 0 if which == "own" else 1
    for _ in range(2):
        with pytest.raises(Unsupported, match=f"workspace: rank {rank} could not get .* of GPU m"):
            workspace.ensure(100 * MIB)
    assert workspace.buffers is buffers
    assert workspace.slot_bytes == 32 * MIB
    # The refusal is remembered: the second time nobody was asked.
    assert known.topics.count("the size of a workspace") == 2
    fails = False
    if which == "own":
        empty.side_effect = allocates
    workspace.ensure(64 * MIB)
    assert workspace.slot_bytes == 64 * MIB


@pytest.mark.parametrize("party", ["rendezvous", "words", "places", "core", "GPU after", "peer"])
@pytest.mark.parametrize("error", [RuntimeError("it broke\nhere"), ValueError("no"), MemoryError()])
def test_a_rank_that_cannot_open_its_memory_is_told_of_by_all(
    make: Any, monkeypatch: pytest.MonkeyPatch, party: str, error: Exception
) -> None:
    """All keep what they had, whichever step fails, and the refusal is remembered."""
    broken, synchronized = "", 0
    said = str(error).partition("\n")[0] or type(error).__name__

    def answer(topic: str, value: Any) -> Any:
        if topic == "whether their workspaces are ready" and broken == "peer":
            return said
        return same(topic, value)

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    def synchronize(device: torch.device) -> None:
        nonlocal synchronized
        synchronized += 1
        if broken == "GPU after" and synchronized == 2:  # the first one ends earlier calls
            raise error

    workspace, known = make(answer)
    workspace.ensure(MIB)
    buffers = workspace.buffers
    synchronized, broken = 0, party
    symm_mem = vars(symmetric)["symm_mem"]
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    if party == "rendezvous":
        symm_mem.rendezvous.side_effect = error
    elif party == "words":
        monkeypatch.setattr(cuda.CudaWorkspace.core_class, "credit_words", fail)
    elif party == "places":
        said = "found it 64 bytes inside another allocation of torch's pool"
        symm_mem.rendezvous.side_effect = lambda memory, _: mock.Mock(
            buffer_ptrs=[memory.data_ptr() - 64, 0]
        )
    elif party == "core":
        vars(cuda.CudaWorkspace)["core_class"].side_effect = error
    rank = int(party == "peer")
    for wanted in (100, 200, 40):
        with pytest.raises(
            Unsupported, match=f"^workspace: rank {rank} could not get ready: {said}"
        ):
            workspace.ensure(wanted * MIB)
    assert workspace.buffers is buffers and buffers is not None
    assert workspace.slot_bytes == 32 * MIB and not workspace.retained
    workspace.ensure(32 * MIB)
    assert known.topics.count("the size of a workspace") == 2


def test_after_a_failed_rendezvous_no_other_is_begun(make: Any) -> None:
    """torch counts the exchanges of a process, so the next one might wait for ever."""
    first, _ = make()
    vars(symmetric)["symm_mem"].rendezvous.side_effect = RuntimeError("no handle")
    with pytest.raises(Unsupported, match="rank 0 could not get ready: no handle"):
        first.ensure(MIB)
    made = rendezvous.made
    second, known = make()
    rendezvous.made.failed = made.failed
    with pytest.raises(Unsupported, match=r"rendezvous of rank 0 that failed \(no handle\)"):
        second.ensure(MIB)
    assert "whether they have memory for a workspace" not in known.topics


@pytest.mark.parametrize("which", ["own", "peer"])
def test_calls_that_do_not_end_leave_what_there_was(
    make: Any, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    broken = False

    def answer(topic: str, value: Any) -> Any:
        if topic == "whether their GPUs have finished":
            return "an illegal address" if broken and which == "peer" else ""
        return same(topic, value)

    def synchronize(device: torch.device) -> None:
        if broken and which == "own":
            raise torch.AcceleratorError("an illegal address")

    workspace, _ = make(answer)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    workspace.ensure(MIB)
    buffers, broken = workspace.buffers, True
    for change in (lambda: workspace.ensure(100 * MIB), workspace.release):
        with pytest.raises(
            AgmmError, match=f"workspace: rank {which == 'peer':d} could not finish: "
        ):
            change()
        assert workspace.buffers is buffers and workspace.slot_bytes == 32 * MIB


def test_what_graphs_keep_is_less_than_what_is_in_use(make: Any) -> None:
    workspace, _ = make()
    for wanted in range(10, 400, 10):  # captures of ascending sizes
        workspace.ensure(wanted * MIB)
        workspace.captured = True
    sizes = [32 * MIB, 64 * MIB, 128 * MIB, 256 * MIB]
    assert workspace.slot_bytes == 512 * MIB
    assert len(workspace.retained) == len(sizes)
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
