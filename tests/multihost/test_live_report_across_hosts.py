"""`hvdlite-run --report` of jobs on two hosts: a slow link, and a slow host."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from multihost.bed import Bed, finish, python

pytestmark = pytest.mark.long

TRAINING = """
import ctypes, sys, time
from hvdlite import _core, basics
basics.init()
count, steps = int(sys.argv[1]), int(sys.argv[2])
memory = (ctypes.c_float * count)(1.0)
address = ctypes.addressof(memory)
tensor = _core.Tensor("g", _core.DTYPES["float32"], [count], address, address)
for step in range(steps):
    # Two late ranks are the last in turn, also where a busy machine always delays one of them.
    late = 0.03 + 0.02 * ((step + basics.rank()) % 2)
    time.sleep(late if basics.rank() in eval(sys.argv[3]) else 0.005)
    basics.engine().allreduce("g", [tensor], _core.REDUCE_OPS["average"], keep=memory).wait()
"""


@pytest.fixture
def hosts(two_hosts: Bed) -> Iterator[Bed]:
    """Two undisturbed hosts."""
    yield two_hosts
    two_hosts.mend()


def findings(hosts: Bed, path: Path, placement: str, *arguments: object) -> list[dict[str, Any]]:
    """Run the training with a report; return its findings."""
    command = python(TRAINING, *arguments)
    launcher = hosts.start_launcher("--report", str(path), "-H", placement, *command)
    status, _, stderr, _ = finish(launcher)
    assert status == 0, stderr
    assert f"report in {path}: " in stderr
    assert path.read_text().startswith("<!DOCTYPE html>")
    return list(json.loads(path.with_suffix(".json").read_text())["findings"])


def test_a_slow_link_is_the_first_finding(hosts: Bed, tmp_path: Path) -> None:
    for host in range(2):
        hosts.limit_rate(host, "30mbit")
    first = findings(hosts, tmp_path / "out.html", "node1,node2", 100_000, 20, "[]")[0]
    assert first["rule"] == "communicating", first
    assert "kB a step" in first["says"]
    assert "Compression.bf16" in first["remedy"]


def test_a_link_that_is_slow_in_one_direction_blames_no_data(
    three_hosts: Bed, tmp_path: Path
) -> None:
    three_hosts.limit_rate(1, "30mbit")
    try:
        found = findings(three_hosts, tmp_path / "out.html", "node1,node2,node3", 100_000, 40, "[]")
    finally:
        three_hosts.mend()
    rules = [finding["rule"] for finding in found]
    assert "communicating" in rules and "straggler" not in rules, found
    # Which rank is the last may differ from step to step; then no rank is named.
    links = [finding["says"] for finding in found if finding["rule"] == "slow link"]
    assert all(" late in the exchange;" in says for says in links)


def test_a_straggler_on_another_host_is_the_first_finding(hosts: Bed, tmp_path: Path) -> None:
    first = findings(hosts, tmp_path / "out.html", "node1:2,node2:1", 1000, 60, "[2]")[0]
    assert (first["rule"], first["rank"]) == ("straggler", 2), first
    assert first["says"].startswith("rank 2 on node2 holds the others up")
    assert " late in data or forward;" in first["says"]


def test_the_ranks_of_a_slow_host_are_the_first_finding(hosts: Bed, tmp_path: Path) -> None:
    first = findings(hosts, tmp_path / "out.html", "node1:2,node2:2", 1000, 60, "[2, 3]")[0]
    assert (first["rule"], first["rank"]) == ("slow host", None), first
    assert first["says"].startswith("the ranks on node2 hold the others up")
