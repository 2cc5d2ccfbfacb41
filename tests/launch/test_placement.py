from __future__ import annotations

import pytest

from hvdlite.launch.hosts import place_as, threads_per_rank


def test_one_host() -> None:
    placements = place_as([0, 0, 0])
    assert [placement.rank for placement in placements] == [0, 1, 2]
    assert [placement.local_rank for placement in placements] == [0, 1, 2]
    assert {
        (placement.size, placement.local_size, placement.cross_size) for placement in placements
    } == {(3, 3, 1)}
    assert {placement.cross_rank for placement in placements} == {0}


def test_uneven_hosts_count_only_peers_of_the_same_local_rank() -> None:
    placements = place_as([0, 1, 1, 1, 2, 2])
    assert [placement.host for placement in placements] == [0, 1, 1, 1, 2, 2]
    assert [placement.local_rank for placement in placements] == [0, 0, 1, 2, 0, 1]
    assert [placement.cross_rank for placement in placements] == [0, 1, 0, 0, 2, 1]
    assert [placement.cross_size for placement in placements] == [3, 3, 2, 1, 3, 2]


def test_ranks_in_turns_over_hosts() -> None:
    placements = place_as([0, 1, 0, 1])
    assert [placement.local_rank for placement in placements] == [0, 0, 1, 1]
    assert [placement.cross_rank for placement in placements] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"), [(4, 2, 2), (4, 3, 1), (2, 8, 1), (8, 1, 8)]
)
def test_threads(cores: int, ranks: int, threads: int) -> None:
    assert threads_per_rank(cores, ranks) == threads
