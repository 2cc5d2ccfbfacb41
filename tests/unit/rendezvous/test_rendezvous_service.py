"""A process learns whether it serves or trains, and a script that asks for the other is refused."""

from __future__ import annotations

import pytest

from hvdlite.errors import BootstrapError
from hvdlite.rendezvous.environment import detect

JOB = {
    "HVDLITE_SIZE": "4",
    "HVDLITE_SERVERS": "1",
    "HVDLITE_RENDEZVOUS": "unix:x",
    "HVDLITE_TOKEN": "ab" * 32,
    "HVDLITE_JOB_ID": "cd" * 16,
}


def test_numbers_of_a_worker_that_took_the_place_of_another() -> None:
    first = detect({**JOB, "HVDLITE_RANK": "2"}, with_servers=True)
    assert (first.servers, first.rank, first.process, first.joiner) == (1, 2, 2, False)
    variables = {**JOB, "HVDLITE_RANK": "2", "HVDLITE_WORKER": "7", "HVDLITE_JOINER": "1"}
    second = detect(variables, with_servers=True)
    assert (second.rank, second.process, second.joiner) == (2, 7, True)


def test_other_launchers_may_have_servers() -> None:
    open_mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"}
    found = detect({**open_mpi, "HVDLITE_SERVERS": "1"}, with_servers=True)
    assert (found.servers, found.rank, found.process) == (1, 1, 1)


@pytest.mark.parametrize(("rank", "kind"), [("0", "server"), ("1", "worker")])
def test_init_in_a_job_with_servers_says_what_to_call(rank: str, kind: str) -> None:
    message = rf"rank {rank} is a {kind} of a job with parameter servers.*parameter_server\.connect"
    with pytest.raises(BootstrapError, match=message):
        detect({**JOB, "HVDLITE_RANK": rank})


@pytest.mark.parametrize("variables", [{}, {"HVDLITE_SIZE": "1"}])
def test_connect_without_servers_says_how_to_start_them(variables: dict[str, str]) -> None:
    with pytest.raises(BootstrapError, match=r"no parameter servers; start it with hvdlite-run --"):
        detect(variables, with_servers=True)
