"""Programs that start functions, not programs, give every rank its assignment."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hvdlite.errors import ArgumentError
from hvdlite.rendezvous.assignments import Place, assignment_for, assignments, start_store
from hvdlite.rendezvous.environment import WorkerEnvironment, assign_rank, detect, with_own_settings
from hvdlite.rendezvous.handshake import JOB_ID_BYTES, TOKEN_BYTES, Job

TOKEN = bytes(range(TOKEN_BYTES))  # in names of tests, which must not vary
JOB = Job(TOKEN, secrets.token_bytes(JOB_ID_BYTES), epoch=3)
A, B = Place("a", "127.0.0.1"), Place("b", "127.0.0.2")


@pytest.fixture
def no_assignment_afterwards() -> Iterator[None]:
    yield
    assign_rank(None)


def test_local_rank_is_the_number_of_earlier_ranks_of_the_node() -> None:
    given = assignments([A, B, A, A, B], "unix:name", JOB)
    assert [(one.rank, one.size, one.epoch) for one in given] == [(r, 5, 3) for r in range(5)]
    assert [one.local_rank for one in given] == [0, 0, 1, 2, 1]
    assert [one.local_size for one in given] == [3, 2, 3, 3, 2]
    assert [one.node for one in given] == [0, 1, 0, 0, 1]
    assert {one.rendezvous for one in given} == {"unix:name"}
    assert not any(one.serves_store for one in given)
    assert given[4] == assignment_for([A, B, A, A, B], 4, "unix:name", JOB)


def test_store_listens_where_all_ranks_reach_it() -> None:
    with start_store([A, A], JOB) as store:
        assert store.address.startswith("unix:")
    with start_store([A, B], JOB) as store:
        assert store.address.startswith("127.0.0.1:")
        assert not store.address.endswith(":0")


@pytest.mark.parametrize(
    ("places", "rank", "token", "epoch", "message"),
    [
        ([], 0, TOKEN, 0, "`places` is empty"),
        ([A], 1, TOKEN, 0, "rank 1 has no assignment: there are places for 1 ranks"),
        ([A], -1, TOKEN, 0, "rank -1 has no assignment"),
        ([A], 0, b"short", 0, "a token of 32 and a job id of 16 random bytes; these have 5 and 16"),
        ([A], 0, TOKEN, 1 << 32, "epoch 4294967296 cannot be used"),
        ([A], 0, TOKEN, -1, "epoch -1 cannot be used"),
    ],
)
def test_what_makes_no_assignment_is_named(
    places: list[Place], rank: int, token: bytes, epoch: int, message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        assignment_for(places, rank, "unix:name", Job(token, JOB.job_id, epoch))


def test_assignment_given_by_python_is_detected_without_a_variable(
    monkeypatch: pytest.MonkeyPatch, no_assignment_afterwards: None
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")  # Another program's, as under torchrun.
    before = dict(os.environ)
    assignment = replace(assignment_for([A, B], 1, "unix:name", JOB), start_timeout=5.0)
    assign_rank(assignment)
    assert detect() == assignment
    assert dict(os.environ) == before
    assert detect({}) == WorkerEnvironment()
    assign_rank(None)
    assert detect().rendezvous is None


def test_assignment_keeps_what_the_variables_say_of_its_own_host(
    monkeypatch: pytest.MonkeyPatch, no_assignment_afterwards: None
) -> None:
    monkeypatch.setenv("HVDLITE_HOST_ID", "one")
    monkeypatch.setenv("HVDLITE_NETWORK_INTERFACES", "eth1")
    monkeypatch.setenv("HVDLITE_START_TIMEOUT", "7")
    assignment = assignment_for([A, B], 1, "unix:name", JOB)
    assign_rank(assignment)
    given = detect()
    assert (given.host_id, given.interfaces, given.start_timeout) == ("one", ("eth1",), 7.0)
    chosen = replace(assignment, host_id="two", interfaces=("lo",), start_timeout=3.0)
    assert with_own_settings(chosen) == chosen
