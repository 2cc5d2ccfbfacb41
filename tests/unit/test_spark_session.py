"""What `hvdlite.spark.run` refuses before it asks Spark for anything; no Spark is needed here."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

import hvdlite.spark
from hvdlite.errors import ArgumentError, RankFailedError, UnsupportedError
from hvdlite.spark import driver
from hvdlite.spark.driver import raise_lost
from hvdlite.spark.task import Report


class FakeSession:
    """A session with settings and so many slots; None for one of Spark Connect."""

    def __init__(self, slots: int | None = None, **settings: str) -> None:
        values = {name.replace("__", "."): value for name, value in settings.items()}
        self.conf = types.SimpleNamespace(get=lambda name, default: values.get(name, default))
        if slots is not None:
            profiles = types.SimpleNamespace(defaultResourceProfile=lambda: None)
            context = types.SimpleNamespace(
                resourceProfileManager=lambda: profiles,
                maxNumConcurrentTasks=lambda profile: slots,
            )
            java = types.SimpleNamespace(sc=lambda: context)
            self.sparkContext = types.SimpleNamespace(_jsc=java)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"spark__dynamicAllocation__enabled": "true"}, "spark.dynamicAllocation.enabled is true"),
        ({"spark__ssl__enabled": "true"}, "spark.ssl.enabled is true, .* allow_plain=True"),
        ({"spark__network__crypto__enabled": "True"}, "spark.network.crypto.enabled is true"),
    ],
)
def test_settings_that_exclude_ranks_are_named(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        driver.check_settings(FakeSession(**settings), allow_plain=False)
    driver.check_settings(FakeSession(), allow_plain=False)


def test_plain_traffic_may_be_allowed() -> None:
    driver.check_settings(FakeSession(spark__ssl__enabled="true"), allow_plain=True)


def test_missing_pyspark_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark.sql", None)
    with pytest.raises(ImportError, match=r"needs PySpark .*pip install 'hvdlite\[spark\]'"):
        hvdlite.spark.run(print)


def choose(session: FakeSession, num_proc: int | None) -> int:
    return driver.choose_ranks(session, num_proc)


def test_number_of_ranks_is_that_of_the_slots() -> None:
    assert choose(FakeSession(3, spark__master="local[3]"), None) == 3
    assert choose(FakeSession(3, spark__master="local[3]"), 2) == 2


def test_too_few_slots_of_one_process_are_refused_at_once() -> None:
    with pytest.raises(ArgumentError, match="num_proc=3, but Spark has 2 slots"):
        choose(FakeSession(2, spark__master="local[2]"), 3)


def test_spark_itself_waits_for_executors_that_may_still_come() -> None:
    assert choose(FakeSession(1, spark__master="yarn"), 4) == 4
    with pytest.raises(ArgumentError, match="num_proc=1, but Spark has 0 slots"):
        choose(FakeSession(0, spark__master="yarn"), None)


def test_spark_connect_needs_a_number_of_ranks() -> None:
    assert choose(FakeSession(), 5) == 5
    with pytest.raises(ArgumentError, match="num_proc is needed here"):
        choose(FakeSession(), None)
    with pytest.raises(ArgumentError, match="num_proc=0: at least one rank is needed"):
        choose(FakeSession(), 0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"use_mpi": True}, r"hvdlite.spark.run\(use_mpi=...\): no MPI is used"),
        ({"nics": ["eth0"]}, "HVDLITE_NETWORK_INTERFACES"),
        ({"stdout": print}, "in the executors' logs"),
        ({"executable": "python3"}, "spark.pyspark.python"),
    ],
)
def test_arguments_of_horovod_are_refused_with_the_reason(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        hvdlite.spark.run(print, **given)


def test_arguments_that_are_no_ones_and_those_that_change_nothing() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'ranks'"):
        hvdlite.spark.run(print, ranks=2)
    driver.refuse_horovods({"use_gloo": True, "use_mpi": None, "nics": None, "mpi_args": ""})


def test_number_out_of_range_is_named() -> None:
    with pytest.raises(ArgumentError, match="start_timeout=-1"):
        hvdlite.spark.run(print, start_timeout=-1)


def test_what_spark_says_of_a_lost_task() -> None:
    said = (
        "Job aborted due to stage failure: Could not recover from a failed barrier ResultStage. "
        "Most recent failure reason: Stage failed because barrier task ResultTask(3, 1) finished "
        "unsuccessfully.\nExecutorLostFailure (executor 1 exited)\n\tat more"
    )
    with pytest.raises(RankFailedError, match="the task of rank 1, or its executor") as raised:
        raise_lost(ValueError(said))
    assert raised.value.failed_rank == 1
    assert "ExecutorLostFailure (executor 1 exited); the logs" in str(raised.value)
    raise_lost(ValueError("Job 3 cancelled"))


def test_large_reports_travel_in_parts() -> None:
    report = Report(rank=1, result=bytes(3 << 20))
    parts = list(report.parts())
    assert len(parts) == 4
    assert Report.joined(parts) == report
