"""How GPUs that share no memory are laid out, from facts, and how their messages are begun."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from agmm.errors import Unsupported
from agmm.runtime import cuda_hosts
from agmm.runtime import hosts as hosts_module

GPU = torch.device("cuda", 0)
NO_ACCESS = "group: cuda:0 has no peer access to cuda:1"


class Facts:
    """A group as rank 0 sees it."""

    def __init__(self, hosts: str, apart: dict[str, str], backend: str = "cuda:nccl") -> None:
        self.hosts, self.apart, self.backend = hosts, apart, backend
        self.rank, self.world_size, self.lock = 0, len(hosts), mock.MagicMock()
        self.is_in_step, self.topics = True, list[str]()

    def exchange(self, topic: str, value: str) -> list[str]:
        self.topics.append(topic)
        if topic == "whether ranks of a host are apart":
            assert value == self.apart.get(self.hosts[0], "")
            return [self.apart.get(host, "") for host in self.hosts]
        return [value] * self.world_size


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[[Facts], cuda_hosts.CudaHosts]:
    def make(facts: Facts) -> cuda_hosts.CudaHosts:
        known = mock.Mock(wraps=facts, rank=0, world_size=facts.world_size, lock=facts.lock)
        known.hosts = lambda: list(facts.hosts)
        known.exchange = facts.exchange
        monkeypatch.setattr("agmm.runtime.groups.of", lambda _: known)
        dist = mock.Mock(get_backend_config=lambda _: facts.backend, get_backend=lambda _: "gloo")
        monkeypatch.setattr(cuda_hosts, "dist", dist)
        monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
        near = [rank for rank, host in enumerate(facts.hosts) if host == facts.hosts[0]]
        local = mock.Mock() if len(near) > 1 else None
        monkeypatch.setattr(hosts_module, "local_group", lambda *_: (local, near))
        why = facts.apart.get(facts.hosts[0])
        monkeypatch.setattr(cuda_hosts, "why_apart", lambda *_: why)
        return cuda_hosts.CudaHosts(mock.Mock(), GPU)

    return make


@pytest.mark.parametrize(
    ("hosts", "apart", "layout"),
    [
        ("aabb", {}, ((0, 1), (2, 3))),
        ("abab", {}, ((0, 2), (1, 3))),
        ("abb", {}, ((0,), (1, 2))),
        ("aaaa", {"a": NO_ACCESS}, ((0,), (1,), (2,), (3,))),
        ("aabb", {"a": NO_ACCESS}, ((0,), (1,), (2,), (3,))),
        ("aabb", {"b": NO_ACCESS}, ((0,), (1,), (2,), (3,))),  # another host's cards
    ],
)
def test_ranks_that_share_no_memory_are_hosts_of_their_own(
    made: Callable[[Facts], cuda_hosts.CudaHosts],
    hosts: str,
    apart: dict[str, str],
    layout: tuple[tuple[int, ...], ...],
) -> None:
    found = made(Facts(hosts, apart))
    assert found.place.layout.hosts == layout
    assert list(found.place.near) == list(layout[0])
    assert (found.local is None) is (len(layout[0]) == 1)


def test_a_group_without_nccl_is_refused_in_one_line(
    made: Callable[[Facts], cuda_hosts.CudaHosts],
) -> None:
    with pytest.raises(Unsupported, match="found backend gloo for ranks that share no memory"):
        made(Facts("ab", {}, "cpu:gloo,cuda:gloo"))


def test_a_batch_is_one_group_of_messages_behind_what_was_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stream of its own waits for the current one; the current one waits for the mark alone."""
    told: list[Any] = []
    stream, current = mock.MagicMock(), mock.MagicMock()
    stream.wait_stream.side_effect = lambda other: told.append(("waits for", other))
    work = mock.Mock(wait=lambda: told.append("work awaited"))
    dist = mock.Mock()
    dist.P2POp.side_effect = lambda way, data, group, group_peer: (way, data, group_peer)

    def begun(batch: Any) -> list[Any]:
        told.append(batch)
        return [work]

    dist.batch_isend_irecv.side_effect = begun
    monkeypatch.setattr(cuda_hosts, "dist", dist)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current)
    monkeypatch.setattr(torch.cuda, "stream", mock.MagicMock())
    event = mock.Mock(record=lambda: told.append("recorded"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    messages = cuda_hosts.Messages(mock.Mock(), stream)
    values, scale = torch.ones(3, 4).bfloat16(), torch.ones(3, 1)
    into = torch.empty(3, 4).bfloat16(), torch.empty(3, 1)
    mark = messages.begin(0, [(2, [values, scale])], [(1, list(into))])
    order, batch, awaited, recorded = told
    assert order == ("waits for", current)
    assert [(way, peer) for way, _, peer in batch] == [
        *[(dist.isend, 2)] * 2,
        *[(dist.irecv, 1)] * 2,
    ]
    assert [data.numel() for _, data, _ in batch] == [24, 12, 24, 12]
    assert (awaited, recorded) == ("work awaited", "recorded")
    assert not current.wait_event.called
    messages.wait(mark)
    current.wait_event.assert_called_once_with(event)
    messages.finish()
    current.wait_stream.assert_called_once_with(stream)
