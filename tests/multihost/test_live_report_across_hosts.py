"""`hvdlite-run --report` of a job on several hosts, of which one has a slow link."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.test_real_job import LOOP
from multihost.bed import Bed, finish, python

pytestmark = pytest.mark.long

# So many numbers that the slow link takes most of a step.
TRAINING = LOOP.replace("1024", "100_000") + "for _ in range(40): time.sleep(0.005); step()"


def test_a_link_that_is_slow_in_one_direction_blames_no_data(
    three_hosts: Bed, tmp_path: Path
) -> None:
    path = tmp_path / "out.html"
    three_hosts.limit_rate(1, "30mbit")
    try:
        flags = ("--report", str(path), "-H", "node1,node2,node3")
        status, _, stderr, _ = finish(three_hosts.start_launcher(*flags, *python(TRAINING)))
    finally:
        three_hosts.mend()
    assert status == 0, stderr
    found = json.loads(path.with_suffix(".json").read_text())["findings"]
    rules = [finding["rule"] for finding in found]
    assert "communicating" in rules and "straggler" not in rules, found
    # Which rank is the last may differ from step to step; then no rank is named.
    links = [finding["says"] for finding in found if finding["rule"] == "slow link"]
    assert all(" late in the exchange;" in says for says in links)
