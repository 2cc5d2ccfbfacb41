"""Who am I: every launcher's variables, and what is wrong with them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hvdlite.bootstrap.environment import detect
from hvdlite.bootstrap.topology import place_ranks
from hvdlite.errors import BootstrapError

OWN = {
    "HVDLITE_RANK": "1",
    "HVDLITE_SIZE": "4",
    "HVDLITE_LOCAL_RANK": "1",
    "HVDLITE_LOCAL_SIZE": "4",
    "HVDLITE_RENDEZVOUS": "unix:name",
    "HVDLITE_TOKEN": "ab" * 32,
    "HVDLITE_JOB_ID": "cd" * 16,
    "HVDLITE_EPOCH": "2",
}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "run",
}


def test_nobody_makes_a_world_of_one() -> None:
    worker = detect({"PATH": "/bin"})
    assert (worker.rank, worker.size, worker.rendezvous, worker.launcher) == (0, 1, None, "none")


def test_hvdlite_run_is_recognised_first() -> None:
    worker = detect({**TORCHRUN, **OWN})
    assert (worker.rank, worker.size, worker.epoch) == (1, 4, 2)
    assert worker.rendezvous == "unix:name"
    assert worker.token == bytes.fromhex("ab" * 32)
    assert worker.token.hex() not in repr(worker)


def test_torchrun_ranks_agree_on_everything_but_who_serves() -> None:
    first, second = detect({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0"}), detect(TORCHRUN)
    assert (first.rendezvous, first.token, first.job_id) == (
        second.rendezvous,
        second.token,
        second.job_id,
    )
    assert first.serves_store and not second.serves_store


def test_torchrun_jobs_do_not_meet() -> None:
    assert detect(TORCHRUN).rendezvous != detect({**TORCHRUN, "MASTER_PORT": "1"}).rendezvous


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"HVDLITE_RANK": "x"}, "HVDLITE_RANK=x"),
        ({"HVDLITE_RANK": "4"}, "HVDLITE_RANK=4 and HVDLITE_SIZE=4"),
        ({"HVDLITE_SIZE": ""}, "HVDLITE_SIZE is not set"),
        ({"HVDLITE_TOKEN": "ab"}, "HVDLITE_TOKEN"),
        ({"HVDLITE_JOB_ID": "zz"}, "HVDLITE_JOB_ID"),
        ({"HVDLITE_RENDEZVOUS": ""}, "HVDLITE_RENDEZVOUS"),
        ({"HVDLITE_START_TIMEOUT": "soon"}, "HVDLITE_START_TIMEOUT=soon"),
    ],
)
def test_bad_variable_is_named(change: dict[str, str], message: str) -> None:
    with pytest.raises(BootstrapError, match=message):
        detect({**OWN, **change})


def test_torchrun_on_several_hosts_says_what_to_do() -> None:
    with pytest.raises(BootstrapError, match="hvdlite-run"):
        detect({**TORCHRUN, "WORLD_SIZE": "4"})


def test_import_takes_the_secret_out_of_the_environment() -> None:
    code = "import hvdlite, os; print('HVDLITE_TOKEN' in os.environ)"
    environment = {**os.environ, "HVDLITE_TOKEN": "ab" * 32}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == "False"


def test_places_follow_from_hosts() -> None:
    hosts = ["b", "a", "b", "b", "a"]
    places = [place_ranks(hosts, rank) for rank in range(5)]
    assert {place.host_of for place in places} == {(0, 1, 0, 0, 1)}
    assert [place.local_rank for place in places] == [0, 0, 1, 2, 1]
    assert [place.local_size for place in places] == [3, 2, 3, 3, 2]
    assert [place.cross_rank for place in places] == [0, 1, 0, 0, 1]
    assert [place.cross_size for place in places] == [2, 2, 2, 1, 2]
