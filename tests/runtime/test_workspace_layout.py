"""Where the parts of a CUDA workspace lie: a function of two numbers, the same on every rank."""

from __future__ import annotations

import itertools

import pytest

from agmm import _core
from agmm._core import CudaWorkspace, WorkspaceLayout

WORD = 4
LINE = 128


def _parts(layout: WorkspaceLayout, slot_bytes: int, world_size: int) -> list[tuple[int, int, str]]:
    """(begin, end, name) of everything that is written, in no order."""
    parts = []
    for slot in range(layout.slots):
        shard = slot_bytes // world_size
        parts += [
            (layout.gather_buffer(slot), slot_bytes, "gathered"),
            (layout.staged_shard(slot), shard, "staged"),
            (layout.tags(slot), world_size * WORD, "tags"),
            (layout.signals(slot), world_size * layout.max_column_chunks * WORD, "signals"),
            (layout.credits(slot), world_size * WORD, "credits"),
            *((at, WORD, "single") for at in layout.single_words(slot)),
        ]
    return [(begin, begin + size, name) for begin, size, name in parts]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8, 72])
@pytest.mark.parametrize("slot_bytes", [0, 128, 384, 16384 * 8192 * 2])
def test_parts_lie_apart_and_inside(slot_bytes: int, world_size: int) -> None:
    layout = WorkspaceLayout(slot_bytes, world_size)
    parts = sorted(part for part in _parts(layout, slot_bytes, world_size) if part[0] < part[1])
    for (_, end, name), (begin, _, other) in itertools.pairwise(parts):
        assert end <= begin, (name, other)
    assert parts[-1][1] <= layout.bytes


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_data_is_aligned_and_slots_share_no_line(world_size: int) -> None:
    slot_bytes = 4096 * 128
    layout = WorkspaceLayout(slot_bytes, world_size)
    for slot in range(layout.slots):
        assert layout.gather_buffer(slot) % LINE == 0
        assert layout.staged_shard(slot) % LINE == 0
    words = [
        {
            at // LINE
            for begin, end, name in _parts(layout, slot_bytes, world_size)
            if name not in ("gathered", "staged") and (begin >= layout.tags(1)) == bool(slot)
            for at in range(begin, end, WORD)
        }
        for slot in range(2)
    ]
    assert not words[0] & words[1]


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_tags_and_signals_are_one_stretch(world_size: int) -> None:
    """The consumer resets them as one."""
    layout = WorkspaceLayout(1280, world_size)
    for slot in range(layout.slots):
        assert layout.signals(slot) == layout.tags(slot) + world_size * WORD


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_the_words_that_begin_as_1_are_the_credits(world_size: int) -> None:
    layout = WorkspaceLayout(1280, world_size)
    wanted = [
        (layout.credits(slot) - layout.words_offset) // WORD + rank
        for slot in range(layout.slots)
        for rank in range(world_size)
    ]
    assert layout.credit_words() == wanted


def test_the_workspace_has_this_layout() -> None:
    layout = WorkspaceLayout(4096, 2)
    assert CudaWorkspace.workspace_bytes(4096, 2) == layout.bytes
    assert CudaWorkspace.words_offset(4096, 2) == layout.words_offset
    assert CudaWorkspace.credit_words(2) == layout.credit_words()


def test_illegal_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^slot_bytes: found 100, wanted a multiple of 128$"):
        _core.WorkspaceLayout(100, 2)
    with pytest.raises(ValueError, match=r"^world_size: found 0, wanted at least 1$"):
        _core.WorkspaceLayout(128, 0)
