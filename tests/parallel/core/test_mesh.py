"""hvd.mesh: every rank's process sets, coordinates and neighbours, and what it refuses."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from harness import run_world
from hvdlite import basics, process_sets
from hvdlite.errors import ArgumentError, MismatchError
from hvdlite.mesh import Coordinates, Mesh, mesh
from hvdlite.objects import allgather_object
from parallel.scenarios import make_tests, run_all, sizes

PRELOAD = ("numpy",)

SHAPES = [(dp, tp, pp) for dp, tp, pp in itertools.product((1, 2, 4, 8), repeat=3)]


def raises(kind: type[Exception], text: str) -> pytest.RaisesExc[Exception]:
    return pytest.raises(kind, match=text)


def check(made: Mesh, dp: int, tp: int, pp: int) -> None:
    """Compare with an array of the ranks, whose axes are stage, replica and tensor parallel."""
    ranks = np.arange(dp * tp * pp).reshape(pp, dp, tp)
    (stage,), (replica,), (part,) = np.where(ranks == basics.rank())
    assert made.coordinates == Coordinates(replica, part, stage)
    assert made.tp.ranks == ranks[stage, replica].tolist()
    assert made.dp.ranks == ranks[stage, :, part].tolist()
    assert made.pp.ranks == ranks[:, replica, part].tolist()
    assert made.previous == (ranks[stage - 1, replica, part] if stage else None)
    assert made.next == (ranks[stage + 1, replica, part] if stage + 1 < pp else None)
    for axis, coordinate in made.coordinates._asdict().items():
        process_set = getattr(made, axis)
        assert process_set.rank() == coordinate
        assert allgather_object(basics.rank(), process_set=process_set) == process_set.ranks


def scenario_every_shape() -> None:
    for shape in SHAPES:
        if np.prod(shape) == basics.size():
            check(mesh(*shape), *shape)


def scenario_what_is_left_of_the_world() -> None:
    size = basics.size()
    check(mesh(), size, 1, 1)
    check(mesh(tp=-1, dp=1), 1, size, 1)
    check(mesh(pp=-1, dp=size), size, 1, 1)


def scenario_process_sets_that_exist_are_used() -> None:
    first = mesh(dp=1, tp=basics.size())
    assert first.tp is process_sets.global_process_set
    known = len(process_sets.process_sets())
    assert mesh(dp=1, tp=basics.size()).dp is first.dp
    assert len(process_sets.process_sets()) == known


def scenario_sizes_that_cannot_be() -> None:
    size = basics.size()
    for wrong in ({"tp": size + 1}, {"dp": size, "pp": 2}, {"tp": 2 * size, "dp": 1}):
        with raises(ArgumentError, f"does not have the {size} ranks of this world"):
            mesh(**wrong)
    for wrong in ({"tp": 0}, {"tp": -2}, {"tp": -1}):
        with raises(ArgumentError, "each size is 1 or more, and one of them may be -1"):
            mesh(**wrong)
    with raises(ArgumentError, r"hvd.mesh\(dp=-1, tp='2', pp=1\): give whole numbers"):
        mesh(tp="2")  # type: ignore[arg-type]


def scenario_ranks_that_ask_for_different_meshes() -> None:
    if basics.size() == 1:
        return
    last = basics.size() - 1
    with raises(MismatchError, rf"rank 0 calls .*tp=1.* and rank {last} .*tp={last + 1}"):
        mesh(tp=basics.size() if basics.rank() == last else 1)
    check(mesh(), basics.size(), 1, 1)


def body() -> dict[str, str]:
    return run_all(globals())


test_mesh = make_tests(body, sizes(1, 4, 8))


def refused_across_hosts() -> tuple[list[int], str]:
    basics.init()
    own = mesh(tp=2, pp=2).tp.ranks
    with raises(ArgumentError, "are on different hosts") as refused:
        mesh(dp=1, tp=4)
    basics.shutdown()
    return own, str(refused.value)


def test_tensor_parallel_ranks_stay_on_a_host() -> None:
    results = run_world(4, refused_across_hosts, hosts=[0, 0, 1, 1])
    assert [result.value[0] for result in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    for result in results:
        assert "ranks 0 and 2 of the tensor parallel group [0, 1, 2, 3]" in result.value[1]
