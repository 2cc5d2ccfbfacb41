"""The tasks of `hvdlite.spark.run` on two hosts; what Spark gives to a task is faked."""

from __future__ import annotations

import pickle
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import base_environment, package_path
from hvdlite.launch.call import pack, unpack_result
from hvdlite.rendezvous.handshake import Job
from hvdlite.spark.task import Plan, Report
from multihost.bed import Bed, end
from patience import HANG

TESTS = Path(__file__).parents[1]
SCRIPT = """
import pickle, sys, time
from pathlib import Path
from types import SimpleNamespace
from hvdlite.spark.task import run_task

class Context:
    # Spark's BarrierTaskContext, whose tasks meet in a folder.
    def __init__(self, rank, addresses, folder):
        self.rank, self.addresses, self.folder, self.calls = rank, addresses, Path(folder), 0
    def partitionId(self): return self.rank
    def getTaskInfos(self): return [SimpleNamespace(address=one + ":7") for one in self.addresses]
    def resources(self): return {}
    def allGather(self, text):
        self.calls += 1
        names = [self.folder / f"{self.calls}.{rank}" for rank in range(len(self.addresses))]
        temporary = self.folder / f"new.{self.rank}"
        temporary.write_text(text)
        temporary.rename(names[self.rank])
        while not all(name.exists() for name in names):
            time.sleep(0.01)
        return [name.read_text() for name in names]

rank, folder, addresses = int(sys.argv[1]), sys.argv[2], sys.argv[3].split(",")
plan = pickle.loads(Path(folder, "plan").read_bytes())
report = run_task(plan, Context(rank, addresses, folder))
Path(folder, f"report.{rank}").write_bytes(pickle.dumps(report))
"""


def run_tasks(bed: Bed, folder: Path, fn: Any, addresses: list[str]) -> list[Report]:
    """Run a task on each host; return their reports."""
    job = Job(secrets.token_bytes(32), secrets.token_bytes(16), epoch=0)
    (folder / "plan").write_bytes(pickle.dumps(Plan(pack(fn, (), {}), job, HANG, {}, False)))
    own = {**base_environment(), "OMP_NUM_THREADS": "1"}
    own["PYTHONPATH"] = ":".join([str(TESTS), *package_path()])
    running = []
    try:
        for host in range(2):
            arguments = [str(host), str(folder), ",".join(addresses)]
            command = bed.inside(host, sys.executable, "-c", SCRIPT, *arguments)
            running.append(subprocess.Popen(command, env=own, start_new_session=True))
        for one in running:
            assert one.wait(2 * HANG) == 0
    finally:
        for one in running:
            end(one)
    assert bed.seconds_until_gone() < 5.0
    return [pickle.loads((folder / f"report.{rank}").read_bytes()) for rank in range(2)]


def numbers() -> tuple[int, int, int, float]:
    import numpy as np

    from faults.arrays import reduce_array
    from hvdlite import basics

    basics.init()
    array = np.full(10, float(basics.rank() + 1), dtype="float32")
    reduce_array(array, "x")
    return basics.rank(), basics.local_size(), basics.cross_size(), float(array[0])


def test_ranks_of_two_hosts_make_one_world(two_hosts: Bed, tmp_path: Path) -> None:
    reports = run_tasks(two_hosts, tmp_path, numbers, two_hosts.addresses)
    returned = [unpack_result(report.result) for report in reports]
    values = [pickle.loads(one.value or b"") for one in returned if one is not None]
    assert values == [(0, 1, 2, 3.0), (1, 1, 2, 3.0)]
    assert [report.failure for report in reports] == [None, None]


def test_host_that_no_other_can_reach_is_named(two_hosts: Bed, tmp_path: Path) -> None:
    reports = run_tasks(two_hosts, tmp_path, numbers, ["127.0.0.1", two_hosts.addresses[1]])
    assert reports[1].failure is None and reports[1].status == 1
    assert reports[0].failure is not None
    said = str(reports[0].failure.ending)
    assert "its executor is called 127.0.0.1, which only its own host can reach" in said
