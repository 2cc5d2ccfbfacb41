"""Process sets as every adapter sees them: their life, their names, and their waits."""

from __future__ import annotations

import copy
import os
import pickle
import re
import signal

import numpy as np
import pytest

from faults.arrays import submit
from harness import run_world
from hvdlite import basics, ops
from hvdlite import process_sets as sets
from hvdlite.errors import (
    ArgumentError,
    BootstrapError,
    DeadlockError,
    MismatchError,
    RankFailedError,
)
from hvdlite.objects import allgather_object, broadcast_object
from parallel.scenarios import make_tests, on_hosts, raises, run_all

PRELOAD = ("numpy",)


def last() -> int:
    return basics.size() - 1


def members_say(process_set: sets.ProcessSet) -> None:
    """Gather over a process set, if this rank is a member."""
    if process_set.included():
        assert allgather_object(basics.rank(), process_set=process_set) == process_set.ranks


def total(process_set: sets.ProcessSet, name: str, elements: int = 10) -> float:
    """Sum this rank's number over a process set."""
    return float(start(process_set, name, elements)()[-1])


def start(process_set: sets.ProcessSet, name: str, elements: int = 10):  # type: ignore[no-untyped-def]
    array = np.full(elements, float(basics.rank()), dtype="float32")
    handle = submit(array, name, process_set=sets.member_id(process_set))

    def finish() -> np.ndarray:
        handle.wait()
        return array

    finish.handle = handle  # type: ignore[attr-defined]
    return finish


def scenario_set_has_members_positions_and_a_number() -> None:
    ends = sets.ProcessSet([last(), 0])
    assert (ends.ranks, ends.size(), ends.rank(), ends.included()) == (
        [0, last()],
        None,
        None,
        None,
    )
    assert sets.add_process_set(ends) is ends
    assert ends.size() == 2
    assert sets.process_set_by_id(ends.process_set_id) is ends
    assert sets.process_sets() == [sets.global_process_set, ends]
    assert allgather_object(ends.process_set_id) == [ends.process_set_id] * basics.size()
    if basics.rank() in ends.ranks:
        assert ends.included()
        assert ends.rank() == (0 if basics.rank() == 0 else 1)
        shared = broadcast_object({"from": basics.rank()}, last(), process_set=ends)
        assert shared == {"from": last()}
    else:
        assert not ends.included()
        with raises(ArgumentError, f"rank {basics.rank()} is not a member"):
            ends.rank()
        with raises(ArgumentError, f"rank {basics.rank()} is not a member"):
            allgather_object(1, process_set=ends)
    with raises(ArgumentError, "root_rank=1 is not a member"):
        broadcast_object(1, root_rank=1, process_set=ends)
    assert copy.deepcopy(ends) is ends
    assert pickle.loads(pickle.dumps(ends)) is ends
    assert pickle.loads(pickle.dumps(sets.global_process_set)) is sets.global_process_set
    assert sets.remove_process_set(ends) is True
    assert ends.process_set_id is None
    with raises(ArgumentError, "removed"):
        allgather_object(1, process_set=ends)
    with raises(ArgumentError, "removed already"):
        sets.remove_process_set(ends)
    assert pickle.loads(pickle.dumps(ends)).ranks == ends.ranks
    members_say(sets.add_process_set(ends))
    sets.remove_process_set(ends)


def scenario_world_is_a_set_that_stays() -> None:
    world = sets.global_process_set
    assert (world.process_set_id, world.size(), world.rank()) == (0, basics.size(), basics.rank())
    assert world.included()
    assert world.ranks == list(range(basics.size()))
    assert sets.remove_process_set(world) is False
    members_say(world)


def scenario_wrong_sets_are_the_same_error_everywhere() -> None:
    pair = sets.add_process_set([0, 1])
    for ranks, text in (
        ([1, 0], "there is one of these ranks already"),
        (range(basics.size()), "already, the world"),
        ([], "at least one"),
        ([0, basics.size()], f"from 0 to {last()}"),
        ([-1, 0], "different ranks from 0"),
    ):
        with raises(ValueError, text):
            sets.add_process_set(ranks)
    with raises(ArgumentError, "registered already"):
        sets.add_process_set(pair)
    with raises(ArgumentError, "twice"):
        sets.ProcessSet([0, 0])
    with raises(ArgumentError, "numbers of its ranks"):
        sets.ProcessSet(["zero"])  # type: ignore[list-item]
    with raises(ArgumentError, "not a ProcessSet"):
        allgather_object(1, process_set=1)  # type: ignore[arg-type]
    with raises(ArgumentError, "no process set 77"):
        sets.process_set_by_id(77)
    sets.remove_process_set(pair)


def scenario_ranks_that_disagree_hear_of_it_and_go_on() -> None:
    rank = basics.rank()
    with raises(MismatchError, re.escape(f"rank {last()} has [1]")):
        sets.add_process_set([0] if rank < last() else [1])
    with raises(MismatchError, f"rank {last()} has barrier"):
        if rank < last():
            sets.add_process_set([0])
        else:
            basics.engine().barrier(ops.next_name("barrier"), blocking=True).wait()
    first, second = sets.add_process_set([0]), sets.add_process_set([1])
    with raises(MismatchError, f"rank {last()} has {re.escape('[1]')}"):
        sets.remove_process_set(first if rank < last() else second)
    with raises(MismatchError, "remove_process_set"):
        if rank < last():
            sets.remove_process_set(first)
        else:
            sets.add_process_set([0, 1])
    members_say(first)
    members_say(second)
    sets.remove_process_set(first)
    sets.remove_process_set(second)


def scenario_removal_while_a_member_waits_is_an_error_for_both() -> None:
    pair = sets.add_process_set([0, 1])
    with raises(DeadlockError, "rank 0 waits for rank 1 in remove_process_set"):
        if basics.rank() == 1:
            total(pair, "late")
        sets.remove_process_set(pair)
    if basics.rank() == 1:
        with raises(DeadlockError, "in remove_process_set"):
            sets.remove_process_set(pair)
    members_say(pair)
    sets.remove_process_set(pair)


def scenario_unnamed_operations_match_after_some_in_subsets() -> None:
    subsets = [sets.add_process_set([0, 1]), sets.add_process_set([1, last()])]
    for times in range(3):
        for process_set in subsets:
            for _ in range(times + basics.size() - 2):
                members_say(process_set)
        members_say(sets.global_process_set)
    for process_set in subsets:
        sets.remove_process_set(process_set)
        assert not [key for key in ops._counts if key[0] == process_set.process_set_id]


def _scenarios() -> dict[str, str]:
    return run_all(globals())


test_scenario = make_tests(_scenarios, on_hosts([0, 0, 0], [0, 1, 1, 0]))


def _static() -> list[object]:
    seen: list[object] = []
    pair, everybody = sets.ProcessSet([2, 0]), sets.ProcessSet(range(3))
    basics.init(process_sets=[pair, [1], everybody, [0, 2]])
    seen.append([one.ranks for one in sets.process_sets()])
    members_say(pair)
    members_say(everybody)
    assert everybody.process_set_id == 0
    basics.shutdown()
    assert pair.process_set_id is None
    assert everybody.process_set_id is None
    with raises(ValueError, "hvd.init"):
        allgather_object(1, process_set=pair)
    basics.init(process_sets="dynamic")
    seen.append([one.ranks for one in sets.process_sets()])
    with raises(ArgumentError, "not registered"):
        allgather_object(1, process_set=pair)
    basics.shutdown()
    basics.init(process_sets=[pair])
    members_say(pair)
    basics.shutdown()
    for wrong in ([[0, 3]], "static", [["a"]]):
        with raises(ArgumentError, ""):
            basics.init(process_sets=wrong)
        assert not basics.is_initialized()
    return seen


def test_static_sets_live_as_long_as_their_world() -> None:
    for result in run_world(3, _static):
        assert result.value == [[[0, 1, 2], [0, 2], [1]], [[0, 1, 2]]]


def _different_static_sets() -> str:
    wanted = [[0, 1]] if int(os.environ["HVDLITE_RANK"]) < 2 else []
    with pytest.raises(BootstrapError) as caught:
        basics.init(process_sets=wanted)
    return str(caught.value)


def test_different_static_sets_are_refused_on_every_rank() -> None:
    for result in run_world(3, _different_static_sets):
        assert "rank 0 has process_sets=[[0, 1]], rank 2 has process_sets=[]" in result.value


def _kill_a_member() -> str:
    basics.init()
    first, second = sets.add_process_set([0, 1]), sets.add_process_set([2, 3])
    own = first if first.included() else second
    members_say(sets.global_process_set)  # all of them are members of both
    try:
        for step in range(100_000):
            if step == 100 and basics.rank() == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            total(own, "x")
    except RankFailedError as error:
        return f"{error.failed_rank}: {error}"
    return "went on"


def test_killed_member_of_one_set_ends_the_world_of_all() -> None:
    results = run_world(4, _kill_a_member, expect_failure=True)
    for result in results[:3]:
        assert re.search("^3: rank 3 (died|was lost)", result.value or result.stderr)
