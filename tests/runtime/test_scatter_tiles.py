"""Which tile of a fused matmul + reduce-scatter is whose, and when, over many problems."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from agmm import _core

shapes = st.sampled_from(
    [
        (128, 128, 1, 1, "pingpong"),
        (128, 128, 2, 1, "pingpong"),
        (64, 128, 1, 1, "pingpong"),
        (128, 256, 2, 1, "cooperative"),
        (128, 256, 1, 2, "cooperative"),
        (256, 128, 2, 1, "cooperative"),
    ]
)
problems = st.tuples(
    st.integers(2, 8),  # ranks
    st.one_of(st.integers(1, 300), st.sampled_from([512, 1000, 1024, 1025, 2049, 5000])),
    st.integers(1, 80),  # columns, in eights
    shapes,
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from(["along_m", "along_n"]),
)


def config_of(
    shape: tuple[int, int, int, int, str], swizzle: int, raster: str
) -> _core.KernelConfig:
    tile_m, tile_n, cluster_m, cluster_n, schedule = shape
    return _core.KernelConfig(
        tile_m, tile_n, 64, cluster_m, cluster_n, schedule, max_swizzle=swizzle, raster=raster
    )


@settings(max_examples=200, deadline=None)
@given(problems)
def test_every_element_has_one_tile_and_own_tiles_come_last(
    problem: tuple[int, int, int, tuple[int, int, int, int, str], int, str],
) -> None:
    ranks, chunk_rows, eights, shape, swizzle, raster = problem
    config, n = config_of(shape, swizzle, raster), 8 * eights
    rows = ranks * chunk_rows
    part_bytes = _core.scatter_part_bytes(rows, n, ranks, config)
    for rank in {0, ranks - 1}:
        covered: set[tuple[int, int]] = set()
        for steps in _core.scatter_steps(rank, ranks, rows, n, config):
            # In the ring from the next rank on, this one last: a CTA, which takes every so-manieth
            # step, sends all that it has to send before it waits.
            turns = [(owner - rank - 1) % ranks for owner, *_ in steps]
            assert turns == sorted(turns)
            tiles: dict[int, set[int]] = {}
            for owner, a_row, of_rows, column, tile in steps:
                if of_rows == 0 or column >= n:
                    assert tile == -1
                    continue
                # No tile has rows of two owners.
                assert owner * chunk_rows <= a_row
                assert a_row + of_rows <= (owner + 1) * chunk_rows
                assert tile not in tiles.setdefault(owner, set())
                tiles[owner].add(tile)
                for row in range(a_row, a_row + of_rows, 8):
                    covered.add((row, column))
                    assert (tile + 1) * config.tile_m * config.tile_n * 2 <= part_bytes
            # Each owner gets the same tiles, by the same numbers.
            assert len({frozenset(of_owner) for of_owner in tiles.values()}) == 1
            assert len(tiles) == ranks
            assert min(tiles[rank]) == 0
            assert max(tiles[rank]) == len(tiles[rank]) - 1
        assert {column for _, column in covered} == set(range(0, n, config.tile_n))
        first = {row for row, column in covered if column == 0}
        assert all(
            row in first or any(row - d in first for d in range(1, 8)) for row in range(rows)
        )


@settings(max_examples=50, deadline=None)
@given(problems, st.integers(1, 132))
def test_an_all_reduce_computes_the_same_tiles_in_its_own_order(
    problem: tuple[int, int, int, tuple[int, int, int, int, str], int, str], sms: int
) -> None:
    ranks, chunk_rows, eights, (tile_m, tile_n, _, _, schedule), swizzle, raster = problem
    config, n = config_of((tile_m, tile_n, 1, 1, schedule), swizzle, raster), 8 * eights
    rows = ranks * chunk_rows
    plain = _core.scatter_part_bytes(rows, n, ranks, config)
    assert _core.scatter_part_bytes(rows, n, ranks, config, is_all_reduce=True) == 2 * plain
    of_rank = []
    for rank in {0, ranks - 1}:
        launches = _core.scatter_steps(rank, ranks, rows, n, config, sms)
        scattered = _core.scatter_steps(rank, ranks, rows, n, config)
        assert [sorted(steps) for steps in launches] == [sorted(steps) for steps in scattered]
        for steps in launches:
            at = {(owner, tile): step for step, (owner, _, _, _, tile) in enumerate(steps)}
            for (owner, tile), step in at.items():
                assert owner == rank or step < at[rank, tile]
        of_rank.append(
            [[((o - rank) % ranks, tile) for o, _, _, _, tile in steps] for steps in launches]
        )
    # A step is the same on all ranks: no own tile waits for one that another rank computes later.
    assert all(launches == of_rank[0] for launches in of_rank)


def test_a_launch_is_bounded() -> None:
    config = config_of((128, 128, 1, 1, "pingpong"), 1, "along_m")
    launches = _core.scatter_steps(1, 4, 16384, 512, config)
    assert len(launches) == 2
    assert _core.scatter_part_bytes(16384, 8192, 4, config) == 2048 * 8192 * 2
    assert _core.scatter_part_bytes(8192, 8192, 4, config) == 2048 * 8192 * 2
    assert _core.scatter_part_bytes(4, 8, 4, config) == 128 * 128 * 2
