"""`hvdlite.spark.run` on a real Spark: results, failures, and what it refuses at once."""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hvdlite.spark
from clusters import spark_sessions
from faults.arrays import noted_time
from hvdlite.errors import ArgumentError, RankFailedError
from hvdlite.launch.process import processes_with
from patience import HANG, Stopwatch, wait_until

pytestmark = spark_sessions.MARKS
_GONE_SECONDS = 30.0
# What does not depend on where the tasks run is tested with one executor.
on_one_host = pytest.mark.parametrize("session", ["local[2]"], indirect=True)


@pytest.fixture(scope="module", params=["local[2]", "local-cluster[2,1,512]"])
def session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("spark")
    gpus = spark_sessions.gpus(folder, "4") if "cluster" in request.param else {}
    with spark_sessions.spark(request.param, folder, **gpus) as running:
        yield running


@pytest.fixture
def mark(session: Any) -> Iterator[dict[str, str]]:
    """Variables for the ranks; no process that has them is left after the test."""
    own = {"HVDLITE_TEST_MARK": secrets.token_hex(8)}
    yield own
    text = f"HVDLITE_TEST_MARK={own['HVDLITE_TEST_MARK']}"
    watch = Stopwatch()
    wait_until(lambda: not processes_with(text), "the end of all ranks")
    assert watch.seconds() <= _GONE_SECONDS


def numbers(factor: int, plus: int = 0) -> tuple[int, int, int, int, float]:
    """Sum all ranks; return this rank times `factor` plus `plus`, its placement, and the sum."""
    import numpy as np

    from faults.arrays import reduce_array
    from hvdlite import basics

    basics.init()
    array = np.full(10, float(basics.rank()), dtype="float32")
    reduce_array(array, "x")
    place = (basics.size(), basics.local_rank(), basics.local_size())
    return (basics.rank() * factor + plus, *place, float(array[0]))


def test_results_come_in_rank_order_and_again_in_the_same_application(
    mark: dict[str, str],
) -> None:
    for factor in (10, 20):
        results = hvdlite.spark.run(numbers, (factor,), {"plus": 1}, num_proc=2, env=mark)
        assert results == [(1, 2, 0, 2, 1.0), (factor + 1, 2, 1, 2, 1.0)]


@pytest.mark.parametrize("session", ["local-cluster[2,1,512]"], indirect=True)
def test_rank_sees_the_gpus_that_spark_gives_to_its_task(mark: dict[str, str]) -> None:
    found = hvdlite.spark.run(os.getenv, ("CUDA_VISIBLE_DEVICES",), num_proc=2, env=mark)
    assert found == ["4", "4"]  # Each executor has one, of the same number.


def fail_on_rank_1(how: str, path: str = "") -> None:
    """Fail in rank 1; rank 0 does not notice by itself, because it only sleeps."""
    from faults.arrays import note_time
    from hvdlite import basics

    basics.init()
    basics.engine().barrier("all are here").wait()
    if basics.rank() == 1:
        note_time(path)
        print("last words", flush=True, file=__import__("sys").stderr)
        if how == "raise":
            raise ValueError("boom")
        os.kill(os.getppid() if how == "task" else os.getpid(), signal.SIGKILL)
    time.sleep(600)


def test_exception_is_raised_with_its_traceback(mark: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="^boom$") as raised:
        hvdlite.spark.run(fail_on_rank_1, ("raise", str(tmp_path / "at")), num_proc=2, env=mark)
    shown = "".join(traceback.format_exception(raised.value))
    assert "rank 1:" in shown and "in fail_on_rank_1" in shown


def test_killed_rank_is_named_with_its_last_lines_in_time(
    mark: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(RankFailedError, match=r"rank 1 .* killed by SIGKILL") as raised:
        hvdlite.spark.run(fail_on_rank_1, ("kill", str(tmp_path / "at")), num_proc=2, env=mark)
    seconds = noted_time(tmp_path / "at").seconds()
    assert raised.value.failed_rank == 1
    assert "last words" in str(raised.value)
    assert seconds < 15, "the other rank slept on"
    print(f"the killed rank was reported after {seconds:.1f} s")


def test_lost_task_is_named_and_not_begun_again_in_silence(
    mark: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "at"
    with pytest.raises(RankFailedError, match="Spark lost the task of rank 1, or its") as raised:
        hvdlite.spark.run(fail_on_rank_1, ("task", str(path)), num_proc=2, env=mark)
    assert raised.value.failed_rank == 1
    begun = path.read_bytes()
    time.sleep(2)
    assert path.read_bytes() == begun


def test_cancelled_job_ends_its_ranks(session: Any, mark: dict[str, str]) -> None:
    text = f"HVDLITE_TEST_MARK={mark['HVDLITE_TEST_MARK']}"

    def cancel() -> None:
        wait_until(lambda: len(processes_with(text)) >= 2, "two ranks", 2 * HANG)
        session.sparkContext.cancelAllJobs()

    canceller = threading.Thread(target=cancel)
    canceller.start()
    with pytest.raises(Exception, match="cancel"):
        hvdlite.spark.run(time.sleep, (600,), num_proc=2, env=mark)
    canceller.join()


@on_one_host
def test_too_few_slots_are_refused_at_once(session: Any) -> None:
    with pytest.raises(ArgumentError, match="num_proc=3, but Spark has 2 slots"):
        hvdlite.spark.run(numbers, (1,), num_proc=3)
