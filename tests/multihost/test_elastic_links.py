"""Links of an elastic job on three hosts break; the side of hvdlite-run goes on, and it says why.

The launcher and worker 0 are on the first host, worker 1 on the second, workers 2 and 3 on the
third, whose links break.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from elastic.journals import Journey, check_core_job, read_journals
from elastic.plans import Plan
from multihost.bed import MARK, Bed, end, finish
from patience import HANG, wait_until

WORKER = Path(__file__).parents[1] / "elastic" / "core_worker.py"
HOSTS = ("-H", "node1:1,node2:1,node3:2", "--min-np", "1")
STEPS = 60
FIRST = 10  # steps before something happens
THIRD = 2


@dataclass
class Training:
    """A job that trains on all hosts."""

    launcher: subprocess.Popen[bytes]
    folder: Path
    planned: int

    def come_to(self, step: int) -> None:
        """Wait until all four workers have made so many steps."""

        def made() -> bool:
            runs = self.launcher.poll() is None  # first: it may end after its last step
            there = [step <= done for done in self.steps()] == [True] * 4
            assert runs or there, "the job has ended"
            return there

        wait_until(made, f"{step} steps of all workers")

    def steps(self) -> list[int]:
        """Return how many steps each worker has made so far."""
        return [path.read_text().count('"kind": "done"') for path in self.folder.glob("worker.*")]

    def end(self) -> tuple[list[str], dict[int, Journey]]:
        """Wait for the end; return the launcher's lines about epochs, and what workers wrote."""
        status, stdout, stderr, _ = finish(self.launcher)
        assert status == 0, f"{stdout}\n{stderr}"
        assert "AssertionError" not in stderr, stderr
        journeys = read_journals(self.folder)
        check_core_job(journeys, self.planned)
        lines = [line.partition(": ")[2] for line in stderr.splitlines()]
        return [line for line in lines if line.startswith("world ")], journeys


@pytest.fixture
def start(bed: Bed, tmp_path: Path) -> Iterator[Callable[..., Training]]:
    """Start a job with this heartbeat, and wait until its workers have made a few steps.

    With `hold_until`, the workers wait after a few steps more for that epoch.
    """
    trainings: list[Training] = []

    def start_job(
        heartbeat: str,
        *more: str,
        steps: int = STEPS,
        peer_timeout: str = "60",
        pause: float = 0.01,
        hold_until: int = 0,
    ) -> Training:
        hold = {"hold_at": 2 * FIRST, "hold_until": hold_until} if hold_until else {}
        plan = Plan(str(tmp_path), steps, hosts=0, pause=pause, **hold)
        command = (sys.executable, str(WORKER), plan.as_json())
        flags = (*HOSTS, "--elastic-heartbeat", heartbeat, *more)
        env = {"HVDLITE_PEER_TIMEOUT": peer_timeout}
        trainings.append(Training(bed.start_launcher(*flags, *command, env=env), tmp_path, steps))
        trainings[-1].come_to(FIRST)
        return trainings[-1]

    yield start_job
    for training in trainings:
        end(training.launcher)


Start = Callable[..., Training]


def test_link_that_is_down_for_less_than_the_heartbeat_changes_nothing(
    bed: Bed, start: Start
) -> None:
    training = start("60", pause=0.03)
    bed.set_link(THIRD, up=False)
    time.sleep(1.0)
    bed.set_link(THIRD, up=True)
    lines, journeys = training.end()
    assert lines == ["world 0: 4 ranks start"]
    assert [len(one.steps) for one in journeys.values()] == [STEPS] * 4


@pytest.mark.long
@pytest.mark.parametrize("how", ["down", "input", "output"])
def test_host_that_is_cut_off_is_given_up_after_the_heartbeat(
    bed: Bed, start: Start, how: str
) -> None:
    training = start("2", hold_until=1)
    if how == "down":
        bed.set_link(THIRD, up=False)
    else:
        bed.drop(THIRD, how)
    lines, journeys = training.end()
    check_third_host_is_lost(lines, journeys)
    # The launcher cannot reach that host, so the agent there ends its workers, after 20 heartbeats.
    if how != "down":
        for pid in bed.processes(THIRD, "hvdlite.launch.agent"):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not bed.processes(THIRD, MARK), "the end of the workers", 4 * HANG)


def test_host_that_only_ssh_reaches_is_given_up_after_the_heartbeat(bed: Bed, start: Start) -> None:
    """Its agent is heard all the time, over another network than that of its workers."""
    # A worker that is silent for 20 heartbeats is given up, too: that would be later than a hang.
    training = start("4", hold_until=1)
    bed.drop(THIRD, "input", "output", but_ssh=True)
    lines, journeys = training.end()
    check_third_host_is_lost(lines, journeys)
    assert "lost its connection" in "".join(lines)
    wait_until(lambda: not bed.processes(THIRD, MARK), "the end of the workers")


def check_third_host_is_lost(lines: list[str], journeys: dict[int, Journey]) -> None:
    """Check that the workers of the other two hosts, and only they, went on to the end."""
    assert [number for number, one in journeys.items() if one.end is not None] == [0, 1]
    assert all(len(journeys[number].steps) == STEPS for number in (0, 1)), lines
    assert all(journeys[number].restored == 0 for number in (0, 1)), lines
    assert journeys[0].end is not None
    epochs = journeys[0].end["history"]
    assert [tuple(workers) for _, workers in epochs][-1] == (0, 1), lines


@pytest.mark.long
def test_link_between_two_hosts_costs_one_of_them_its_workers(bed: Bed, start: Start) -> None:
    """Both hosts hear hvdlite-run, so their workers have to say that the link is broken."""
    steps = 400  # long enough for other workers to begin, which must not
    flags = ("--start-timeout", "80", "--blacklist-cooldown-range", "60", "600")
    training = start("3", *flags, steps=steps, peer_timeout="2", hold_until=1)
    bed.drop(THIRD, "input", "output", peer=1)
    lines, journeys = training.end()
    evicted = next(line for line in lines if "was evicted" in line)
    assert "has not answered for 2 s" in evicted or "cannot reach worker" in evicted
    # The time to connect to a host that does not answer comes from the heartbeat.
    for took in re.findall(r"after (\d+) ms", "".join(lines)):
        assert int(took) < 40_000, lines
    # One end of the link is lost, and not the other, and gets nothing new while it cools down.
    assert sorted(journeys) == [0, 1, 2, 3], lines
    ended = [number for number, one in journeys.items() if one.end is not None]
    assert ended in ([0, 1], [0, 2, 3]), lines
    assert [len(journeys[number].steps) for number in ended] == [steps] * len(ended)
    assert [journeys[number].restored for number in ended] == [0] * len(ended)
