"""What hvdlite-run makes of ranks that never meet, and what torch's variables say to them."""

from __future__ import annotations

import json
import re
import secrets
import socket
import sys

import pytest

from hvdlite.launch.hosts import Placement
from hvdlite.launch.process import (
    torch_master,
    torchrun_environment,
    without_outer_job,
)
from launcher import run_launcher

ALONE = {"HVDLITE_INDEPENDENT": "0"}
ELASTIC = ("--min-np", "2")
JOIN = "from hvdlite import basics; basics.init(); print('joined', basics.size())"
SHOW = "import json, os; print('has', json.dumps(dict(os.environ)))"
JOB = bytes(16)
# At Python's ordinary end, a thread of gloo now and then aborts the process.
BY_GLOO = """
import os, torch
from torch import distributed
distributed.init_process_group("gloo")
total = torch.ones(3)
distributed.all_reduce(total)
print("total", total.tolist(), flush=True)
os._exit(0)
"""


def variables(stdout: str) -> list[dict[str, str]]:
    return [json.loads(found) for found in re.findall(r"has (\{.*\})", stdout)]


@pytest.mark.parametrize("flags", [(), ELASTIC])
def test_ranks_that_never_joined_a_world_end_the_job_with_an_error(flags: tuple[str, ...]) -> None:
    result = run_launcher("-np", "2", *flags, sys.executable, "-c", "print('trained')", env=ALONE)
    assert result.returncode == 1
    assert result.stdout.count("trained") == 2
    assert "hvd.init() was never called: 2 independent copies" in result.stderr


@pytest.mark.parametrize("flags", [(), ELASTIC])
def test_ranks_that_joined_a_world_have_met(flags: tuple[str, ...]) -> None:
    result = run_launcher("-np", "2", *flags, sys.executable, "-c", JOIN, env=ALONE)
    assert (result.returncode, result.stdout.count("joined 2")) == (0, 2), result.stderr
    assert "no gradient was averaged" not in result.stderr, "no framework trains here"


SGD = "torch.optim.SGD([torch.ones(2)], 0.1); "
WEIGHTS = SGD + "hvd.broadcast(torch.ones(2), 0)"
LOSS = SGD + "hvd.allreduce(torch.ones(2))"
FINE = [LOSS, SGD + "hvd.add_process_set([1])", SGD + "hvd.join()", SGD + "1 / 0", "exit()"]


@pytest.mark.parametrize(("then", "warnings"), [(WEIGHTS, 1), *((one, 0) for one in FINE)])
def test_ranks_that_averaged_nothing_are_told_so_once(then: str, warnings: int) -> None:
    code = f"import torch, hvdlite.torch as hvd; hvd.init(); {then}"
    result = run_launcher("-np", "2", sys.executable, "-c", code)
    assert result.stderr.count("no gradient was averaged") == warnings, result.stderr


@pytest.mark.parametrize("flags", [("-np", "1"), ("-np", "2", "--independent")])
def test_ranks_that_need_nothing_of_each_other_may_end_well(flags: tuple[str, ...]) -> None:
    result = run_launcher(*flags, sys.executable, "-c", "print('trained')", env=ALONE)
    assert (result.returncode, result.stderr.count("joined")) == (0, 0)


def test_each_rank_has_the_variables_of_torchrun() -> None:
    ranks = variables(run_launcher("-np", "2", sys.executable, "-c", SHOW).stdout)
    assert sorted(rank["RANK"] for rank in ranks) == ["0", "1"]
    for rank in ranks:
        assert rank["LOCAL_RANK"] == rank["RANK"] == rank["HVDLITE_RANK"]
        assert rank["WORLD_SIZE"] == rank["LOCAL_WORLD_SIZE"] == "2"
        assert rank["GROUP_RANK"] == "0"
    assert len({(rank["MASTER_ADDR"], rank["MASTER_PORT"]) for rank in ranks}) == 1
    assert ranks[0]["MASTER_ADDR"] == "127.0.0.1"


def test_script_for_torchrun_stays_as_it_is() -> None:
    result = run_launcher("-np", "2", sys.executable, "-c", BY_GLOO)
    assert result.stdout.count("total [2.0, 2.0, 2.0]") == 2, result.stderr


def test_address_that_the_user_chose_is_kept() -> None:
    env = {"MASTER_ADDR": "10.1.2.3", "MASTER_PORT": "4567", "RANK": "9"}
    ranks = variables(run_launcher("-np", "2", sys.executable, "-c", SHOW, env=env).stdout)
    assert {(rank["MASTER_ADDR"], rank["MASTER_PORT"]) for rank in ranks} == {("10.1.2.3", "4567")}
    assert sorted(rank["RANK"] for rank in ranks) == ["0", "1"]
    assert all("HVDLITE_TORCH_MASTER" not in rank for rank in ranks)


@pytest.mark.parametrize("flags", [ELASTIC, ("--compat",)])
def test_elastic_jobs_and_scripts_for_horovod_have_none_of_them(flags: tuple[str, ...]) -> None:
    ranks = variables(run_launcher("-np", "2", *flags, sys.executable, "-c", SHOW).stdout)
    assert len(ranks) == 2
    assert not any({"RANK", "WORLD_SIZE", "MASTER_ADDR", "LOCAL_RANK"} & set(one) for one in ranks)


def test_variables_of_an_outer_job_do_not_count() -> None:
    placement = Placement(1, 4, 1, 2, 0, 2, 0)
    master = torch_master({"HOME": "/h"}, "127.0.0.1", True, JOB)
    inner = {"HOME": "/h", **torchrun_environment(placement, JOB), **master}
    assert inner["MASTER_PORT"] == master["MASTER_PORT"]
    assert without_outer_job(inner) == {"HOME": "/h"}
    own = {"RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}  # of Kubernetes, for example
    assert without_outer_job(own) == own


def test_port_is_free() -> None:
    # Two test runs at a time would ask for the ports of one job at the same moment.
    job = secrets.token_bytes(16)
    first = torch_master({}, "127.0.0.1", True, job)
    with socket.create_server(("127.0.0.1", int(first["MASTER_PORT"]))):
        second = torch_master({}, "127.0.0.1", True, job)
        elsewhere = torch_master({}, "127.0.0.1", False, job)
    assert first["MASTER_PORT"] != second["MASTER_PORT"]
    assert elsewhere == first  # Of another host's ports nothing is known.
