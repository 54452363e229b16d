"""Collectives through slots: the copies and the barriers between them, with ranks that are threads
and come at any time; and the order of calls on streams."""

from __future__ import annotations

import random
import threading
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from slot_threads import Slots, Threads, is_found, run, values

from agmm.errors import Unsupported
from agmm.runtime import copies, groups


def wrong_gathers(world_size: int, calls: int, slot_bytes: int, skipped: int = 0) -> int:
    threads = Threads(world_size, 2, slot_bytes, skipped)

    def work(rank: int) -> int:
        slots, turn, wrong = Slots(threads, rank, rank), 0, 0
        for call in range(calls):
            dtype = (torch.bfloat16, torch.float32, torch.uint8)[call % 3]
            size = (1, 7, 130, 0, 33)[call % 5]
            out = torch.full((world_size * size,), 77, dtype=dtype)
            own = out.view(world_size, size)[rank] if call % 2 else torch.empty(size, dtype=dtype)
            own.copy_(values(rank, call, size, dtype))
            turn = copies.all_gather(slots, out, own, turn)
            wanted = torch.cat([values(each, call, size, dtype) for each in range(world_size)])
            wrong += not torch.equal(out, wanted)
        return wrong

    return run(world_size, work)


def wrong_replays(world_size: int, calls: int, without: str = "") -> int:
    """The wrong ones of calls that are captured or not: the captured ones come at any time, and
    some ranks have captured more than others. ``without``: a fault."""
    threads = Threads(world_size, 2, 256)
    order = random.Random(1)
    captured = [order.random() < 0.5 for _ in range(calls)]

    def work(rank: int) -> int:
        slots, turn, wrong = Slots(threads, rank, rank), 0, 0
        for call, is_captured in enumerate(captured):
            if without == "barriers":
                is_captured = False
            out, own = torch.full((world_size * 33,), 77.0), values(rank, call, 33, torch.float32)
            turn = copies.all_gather(slots, out, own, turn, is_captured=is_captured)
            if is_captured and without == "turn" and rank == 1:
                turn = 1 - turn
            wanted = torch.cat([values(each, call, 33, own.dtype) for each in range(world_size)])
            wrong += not torch.equal(out, wanted)
            if captured[call] and without == "barriers":
                turn = 0  # as a graph has it
        return wrong

    return run(world_size, work)


def wrong_scatters(
    world_size: int, calls: int, slot_bytes: int, skipped: int = 0, average: bool = False
) -> int:
    threads = Threads(world_size, world_size, slot_bytes, skipped)

    def work(rank: int) -> int:
        slots, wrong = Slots(threads, rank, rank), 0
        for call in range(calls):
            dtype = (torch.bfloat16, torch.float32, torch.float16)[call % 3]
            size = (1, 7, 130, 0, 33)[call % 5]
            given = [values(each, call, world_size * size, dtype) for each in range(world_size)]
            out = torch.full((size,), 77, dtype=dtype)
            copies.reduce_scatter(slots, out, given[rank], average=average)
            total = torch.stack(given).double().sum(0).view(world_size, size)[rank]
            wanted = (total / world_size if average else total).to(dtype)
            close = 0.0 if not average else 2.0**-7
            wrong += not torch.allclose(out.double(), wanted.double(), rtol=close, atol=close)
        return wrong

    return run(world_size, work)


@pytest.mark.parametrize("world_size", range(1, 9))
def test_gather(world_size: int) -> None:
    assert wrong_gathers(world_size, 60, 256) == 0  # in one piece and in several
    assert wrong_gathers(world_size, 15, 1 << 12) == 0


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize("average", [False, True])
def test_scatter(world_size: int, average: bool) -> None:
    assert wrong_scatters(world_size, 45, 256, average=average) == 0
    assert wrong_scatters(world_size, 15, 1 << 12, average=average) == 0


def test_a_missing_barrier_is_found() -> None:
    """The only barrier of a gather is found to be missing, and each of both of a reduce-scatter."""
    assert is_found(lambda: wrong_gathers(4, 60, 256, skipped=1))
    assert is_found(lambda: wrong_scatters(4, 60, 1 << 12, skipped=2))

    class EveryFirst(Slots):
        def barrier(self) -> None:
            self._barriers += 1
            if self._barriers % 2 == 0:
                self._threads.meeting.wait(30)

    with mock.patch(f"{__name__}.Slots", EveryFirst):
        assert is_found(lambda: wrong_scatters(4, 200, 1 << 12))


def test_captured_gathers_in_turn_with_others() -> None:
    assert wrong_replays(4, 200) == 0
    assert is_found(lambda: wrong_replays(4, 200, "barriers"))
    assert is_found(lambda: wrong_replays(4, 200, "turn"))


def test_one_slot_alone_would_not_do() -> None:
    """A gather has one barrier, so its slots have to be taken in turn."""
    gather = copies.all_gather

    def same_slot(slots: Any, out: torch.Tensor, shard: torch.Tensor, turn: int) -> int:
        gather(slots, out, shard, 0)
        return 0

    with mock.patch.object(copies, "all_gather", same_slot):
        assert is_found(lambda: wrong_gathers(4, 200, 1 << 12))


def test_sums_are_float32_inside() -> None:
    """256 + 1 + ... + 1 in bfloat16 would stay 256."""
    threads = Threads(8, 8, 256)
    given = [torch.full((8,), 256.0 if rank == 0 else 1.0).bfloat16() for rank in range(8)]
    outs = [torch.empty(1, dtype=torch.bfloat16) for _ in range(8)]

    def work(rank: int) -> int:
        copies.reduce_scatter(Slots(threads, rank, rank), outs[rank], given[rank], average=False)
        return 0

    run(8, work)
    assert [float(out) for out in outs] == [264.0] * 8


# --- the workspace ---


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done on streams, in order."""
    noted: list[str] = []
    stream = mock.Mock()
    stream.wait_event.side_effect = lambda event: noted.append("wait")
    event = mock.Mock()
    event.record.side_effect = lambda stream=None: noted.append("record")
    monkeypatch.setattr(groups, "of", lambda group: mock.Mock(lock=threading.RLock()))
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr("agmm.runtime.calls.be_asked", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def gather(slots: object, out: object, shard: object, turn: int, *, is_captured: bool) -> int:
        noted.append("captured gather" if is_captured else f"gather {turn}")
        return 1 - turn

    monkeypatch.setattr(copies, "all_gather", gather)
    monkeypatch.setattr(copies, "reduce_scatter", lambda *_, **__: noted.append("scatter"))
    return noted


def test_calls_are_ordered_on_any_stream(events: list[str]) -> None:
    buffers_of, ensured = mock.Mock(), mock.Mock()
    for kind in (copies.GatherCopies, copies.ScatterCopies):
        workspace = kind(mock.MagicMock(), torch.device("cuda", 0))
        with mock.patch.multiple(workspace, buffers_of=buffers_of, ensure=ensured):
            if isinstance(workspace, copies.GatherCopies):
                for _ in range(2):
                    workspace.all_gather(torch.zeros(200), torch.zeros(100))
            else:
                big = torch.empty((copies.MOST_BYTES + 4) // 4)
                workspace.reduce_scatter(big, torch.empty(2 * len(big)), average=False)
    calls = ["gather 0", "gather 1", "scatter"]
    assert events == [event for call in calls for event in ("wait", call, "record")]
    for each in (buffers_of, ensured):
        found = [call.args for call in each.call_args_list]
        assert found == [(512,), (512,), (copies.MOST_BYTES,)]


def test_calls_in_turn_are_awaited_up_to_their_last_barrier(
    events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = mock.Mock(rank=0, world_size=2)
    handle.get_buffer = lambda rank, size, dtype: torch.zeros(size, dtype=dtype)
    handle.barrier = lambda **_: events.append("barrier")

    def reduce_scatter(slots: Any, *_: Any, **__: Any) -> None:
        slots.barrier()
        events.append("copies")
        slots.barrier()
        events.append("sum")

    monkeypatch.setattr(copies, "reduce_scatter", reduce_scatter)
    workspace = copies.ScatterCopies(mock.MagicMock(), torch.device("cuda", 0))
    slots = mock.Mock(core=copies.CudaSlots(handle, 512, 2))
    workspace.slot_bytes = 512
    x, out, ordered = torch.zeros(200), torch.zeros(100), mock.Mock()
    with mock.patch.multiple(workspace, buffers_of=lambda _: slots, come_in_turn=ordered):
        workspace.reduce_scatter(out, x, average=False, in_turn=True)
        in_turn = ["wait", "barrier", "record", "copies", "barrier", "record", "sum", "record"]
        assert events == in_turn
        barriers = ordered.call_args.args[0]
        events.clear()
        barriers.precede(0)
        assert events == ["wait"]
        workspace.reduce_scatter(out, x, average=False)
    assert ordered.call_count == 1
    assert events[1:] == ["wait", "barrier", "copies", "barrier", "sum", "record"]


def test_captured_calls_leave_the_order_to_the_caller(
    monkeypatch: pytest.MonkeyPatch, events: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    workspace = copies.GatherCopies(mock.MagicMock(), torch.device("cuda", 0))
    with pytest.raises(Unsupported, match=r"found slots of 0 bytes for copies .* wanted 512"):
        workspace.all_gather(torch.zeros(200), torch.zeros(100))
    workspace.slot_bytes = 512
    with mock.patch.object(workspace, "buffers_of", mock.Mock()):
        workspace.all_gather(torch.zeros(200), torch.zeros(100))
    assert events == ["captured gather"] and workspace.captured


def test_slots_lie_in_the_memory_of_each_rank(events: list[str]) -> None:
    del events
    group, device = mock.MagicMock(), torch.device("cuda", 0)
    handle = mock.Mock(rank=0, world_size=2)
    handle.get_buffer = lambda rank, size, dtype: torch.zeros(size, dtype=dtype)
    for kind, count in ((copies.GatherCopies, 2), (copies.ScatterCopies, 2)):
        workspace = kind(group, device)
        assert workspace.memory_bytes(512) == count * 512
        slots = workspace.core_of([0, 0], handle, 512)
        assert slots.of(1).shape == (count, 512)
        slots.barrier()
    assert handle.barrier.call_args.kwargs["timeout_ms"] > 0


def test_a_gather_that_is_waited_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copies are behind what the current stream has done, and the stream that waits goes on
    behind them."""
    from agmm.integrations import fsdp

    noted: list[str] = []
    own = mock.MagicMock()
    own.wait_stream.side_effect = noted.append
    event = mock.Mock()
    event.record.side_effect = lambda: noted.append("record")
    event.wait.side_effect = lambda: noted.append("wait")
    workspace = mock.Mock()
    workspace.all_gather.side_effect = lambda out, shard: noted.append("gather")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: own)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the current one")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: mock.MagicMock())
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(fsdp, "goes_by_copies", lambda tensor: True)
    monkeypatch.setattr("agmm.runtime.workspaces.gather_copies", lambda group, device: workspace)
    gather = fsdp.AllGather()
    out = torch.zeros(4)
    work = gather(out, out[:2], mock.Mock(), async_op=True)
    assert noted == ["the current one", "gather", "record"]
    assert isinstance(work, torch.distributed.Work) and work.wait()
    assert noted[3:] == ["wait"]
    assert gather(out, out[:2], mock.Mock()) is None
    assert noted[4:] == ["gather"]
