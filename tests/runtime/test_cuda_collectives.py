"""Collectives on CUDA without a GPU: what the core is told, and the order of calls in the
background."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from agmm import _core
from agmm.planning.cost_model.collectives import MOST_BYTES
from agmm.runtime import cuda_collectives, groups
from agmm.runtime.cuda_collectives import SLOT_BYTES, CollectivesWorkspace
from agmm.runtime.symmetric import Buffers
from agmm.runtime.topology import Move, Schedule

Op, Method, Element = _core.CollectiveOp, _core.CollectiveMethod, _core.CollectiveElement
DEVICE = torch.device("cuda", 0)


class Gpu:
    """Streams that note what they are told, in place of torch.cuda's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.is_capturing = False
        self.capture = 7
        self.is_finished = False
        self.current = self.stream("main")
        count = 0

        def event() -> Any:
            nonlocal count
            count += 1
            made, name = mock.Mock(), f"event {count}"
            made.name = name
            made.record = lambda stream: self.done.append(f"{stream.name} records {name}")
            made.query = lambda: self.is_finished
            return made

        @contextmanager
        def on(stream: Any) -> Iterator[None]:
            before, self.current = self.current, stream
            yield
            self.current = before

        monkeypatch.setattr(torch.cuda, "Event", event)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self.stream("side"))
        monkeypatch.setattr(torch.cuda, "stream", on)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)
        monkeypatch.setattr(cuda_collectives, "stream_of", lambda device: self.current.name)
        monkeypatch.setattr(
            cuda_collectives, "capture_of", lambda device: self.capture * self.is_capturing
        )
        note = self.done.append
        monkeypatch.setattr(
            torch.Tensor, "record_stream", lambda tensor, stream: note(f"kept for {stream.name}")
        )

    def stream(self, name: str) -> Any:
        made = mock.Mock()
        made.name = name
        made.wait_stream = lambda other: self.done.append(f"{name} waits for {other.name}")
        made.wait_event = lambda event: self.done.append(f"{name} waits for {event.name}")
        return made


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


@pytest.fixture
def workspace(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> CollectivesWorkspace:
    """Of rank 0 of 2, with its memory."""
    known = mock.Mock(lock=threading.RLock(), calls=0, background=None, captured_background=None)
    monkeypatch.setattr(groups, "of", lambda group: known)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr("agmm.runtime.calls.be_asked", lambda: None)
    group = mock.Mock()
    monkeypatch.setattr(CollectivesWorkspace, "group", group)
    made = CollectivesWorkspace(group, DEVICE)
    assert not made.is_ready
    core = mock.Mock()

    def call(*arguments: Any) -> bool:
        gpu.done.append(f"call on {arguments[-1]}")
        return gpu.is_capturing

    core.call = mock.Mock(side_effect=call)
    made.buffers = Buffers(core, torch.empty(0), None)
    made.slot_bytes = SLOT_BYTES
    return made


def core_of(workspace: CollectivesWorkspace) -> mock.Mock:
    assert workspace.buffers is not None
    core: mock.Mock = workspace.buffers.core
    return core


def test_what_the_core_is_told(workspace: CollectivesWorkspace) -> None:
    x, part = torch.zeros(6, dtype=torch.float16), torch.zeros(3, dtype=torch.float16)
    workspace.call(Op.reduce_scatter, Method.blocks, x, part, is_average=True)
    core_of(workspace).call.assert_called_with(
        Op.reduce_scatter,
        Method.blocks,
        Element.float16,
        x.data_ptr(),
        part.data_ptr(),
        3,
        True,
        "main",
    )
    numbers, gathered = torch.zeros(5, dtype=torch.int64), torch.zeros(10, dtype=torch.int64)
    workspace.call(Op.all_gather, Method.one_shot, numbers, gathered)
    told = core_of(workspace).call.call_args.args
    assert told[2] == Element.uint8 and told[5:7] == (40, False)
    assert workspace.is_ready and not workspace.captured and workspace.known.calls == 2


def test_no_call_makes_the_slots_grow() -> None:
    """A launch of blocks has room for whatever is not NCCL's."""
    for world_size in range(2, _core.MAX_COLLECTIVE_RANKS + 1):
        room = _core.collective_bytes(Method.blocks, SLOT_BYTES, world_size)
        assert room >= MOST_BYTES // world_size + 16


def test_a_call_in_the_background_precedes_what_follows(
    workspace: CollectivesWorkspace, gpu: Gpu
) -> None:
    x = torch.zeros(4)
    begun = workspace.start(Op.all_reduce, Method.one_shot, x, x)
    wanted = ["side waits for main", "call on side", "side records event 1"]
    assert gpu.done == [*wanted, "kept for side", "kept for side"]
    assert not begun.is_done()
    gpu.done.clear()
    workspace.call(Op.all_reduce, Method.one_shot, x, x)
    assert gpu.done == ["main waits for event 1", "call on main"]
    gpu.done.clear()
    gpu.is_finished = True
    assert begun.is_done()
    workspace.call(Op.all_reduce, Method.one_shot, x, x)
    workspace.call(Op.all_reduce, Method.one_shot, x, x)
    assert gpu.done == ["main waits for event 1", "call on main", "call on main"]
    gpu.done.clear()
    begun.wait()
    assert gpu.done == ["main waits for event 1", "kept for main"]  # which may be another stream


def test_two_in_the_background_do_not_hold_up_the_caller(
    workspace: CollectivesWorkspace, gpu: Gpu
) -> None:
    x = torch.zeros(4)
    for _ in range(2):
        workspace.start(Op.all_reduce, Method.one_shot, x, x)
    assert not any(entry.startswith("main waits") for entry in gpu.done)
    assert gpu.done.count("call on side") == 2


def test_captured_calls_and_eager_ones_are_the_callers_to_order(
    workspace: CollectivesWorkspace, gpu: Gpu
) -> None:
    x = torch.zeros(4)
    workspace.start(Op.all_reduce, Method.one_shot, x, x)
    gpu.done.clear()
    gpu.is_capturing = True
    workspace.call(Op.all_reduce, Method.one_shot, x, x)
    assert gpu.done == ["call on main"] and workspace.captured
    gpu.done.clear()
    begun = workspace.start(Op.all_reduce, Method.one_shot, x, x)
    assert "kept for side" not in gpu.done and not begun.is_done()
    assert [one is x for one in begun.kept] == [True, True]
    workspace.call(Op.all_reduce, Method.one_shot, x, x)
    assert gpu.done[-2:] == ["main waits for event 2", "call on main"]
    begun.wait()
    assert begun.kept == () and gpu.done[-1] == "main waits for event 2"
    gpu.done.clear()
    workspace.call(Op.all_reduce, Method.one_shot, x, x)  # perhaps of another graph
    assert gpu.done == ["call on main"]
    workspace.start(Op.all_reduce, Method.one_shot, x, x)
    gpu.is_capturing = False
    gpu.done.clear()
    workspace.call(Op.all_reduce, Method.one_shot, x, x)
    assert gpu.done == ["main waits for event 1", "call on main"]  # the eager one, which still runs
    assert workspace.known.captured_background is None


def test_a_capture_that_was_given_up_holds_up_no_other(
    workspace: CollectivesWorkspace, gpu: Gpu
) -> None:
    x = torch.zeros(4)
    gpu.is_capturing = True
    workspace.start(Op.all_reduce, Method.one_shot, x, x)
    gpu.capture += 1
    gpu.done.clear()
    workspace.call(Op.all_reduce, Method.one_shot, x, x)
    assert gpu.done == ["call on main"] and workspace.known.captured_background is None


def test_a_captured_call_does_not_take_the_place_of_an_eager_one(
    workspace: CollectivesWorkspace, gpu: Gpu
) -> None:
    x = torch.zeros(4)
    workspace.start(Op.all_reduce, Method.one_shot, x, x)
    gpu.is_capturing = True
    workspace.start(Op.all_reduce, Method.one_shot, x, x)
    gpu.is_capturing = False
    gpu.done.clear()
    workspace.call(Op.all_reduce, Method.one_shot, x, x)
    assert gpu.done == ["main waits for event 1", "call on main"]


def test_a_norm_and_relays(
    workspace: CollectivesWorkspace, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = torch.zeros(6, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)
    core = core_of(workspace)
    core.all_reduce_rms_norm.return_value = False
    workspace.all_reduce_rms_norm(Method.two_shot, x, x, weight, x, x, 1e-6)
    told = core.all_reduce_rms_norm.call_args.args
    assert told[:2] == (Method.two_shot, Element.bfloat16)
    assert told[-4:] == (6, 3, 1e-6, "main") and not workspace.captured
    schedule = Schedule(2, (Move(0, 0, 1), Move(1, 1, 0)), ())
    monkeypatch.setattr(cuda_collectives, "relays_of", lambda group, device: schedule)
    for _ in range(2):
        workspace.call(Op.all_reduce, Method.relayed, x, x)
    core.relay_over.assert_called_once_with([(0, 0, 1), (1, 1, 0)])
