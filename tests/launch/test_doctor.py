from __future__ import annotations

import re

import pytest

from harness import base_environment
from hvdlite.launch.command import doctor
from hvdlite.launch.command.doctor import Finding, judge, table
from launcher import run_launcher


def test_doctor_measures_copy_and_all_reduce() -> None:
    result = run_launcher("--doctor")
    assert result.returncode == 0, result.stdout + result.stderr
    for word in ("python", "cores", "memory", "torch", "shared memory", "TCP", "NCCL"):
        assert word in result.stdout
    assert re.search(r"yes  memcpy +[\d.]+ GB/s", result.stdout)
    assert re.search(
        r"yes  all-reduce +[\d.]+ GB/s .*4 KiB in \d+ us: (good|slow), ", result.stdout
    )


def test_doctor_says_whether_speeds_are_good() -> None:
    assert judge(20.0, 8.0, 6.0).endswith("6 us: good, 40% of the copy")
    slow = judge(20.0, 1.18, 67.0)
    assert "slow, 4.0 GB/s, 20% of the copy would be usual; is the machine busy" in slow
    late = judge(20.0, 8.0, 700.0)
    assert "700 us: slow, 100 us for 4 KiB would be usual" in late


def test_frameworks_are_found_whatever_their_wheels_are_called() -> None:
    for finding in doctor.frameworks():  # the tests have all of them, tensorflow-cpu for one
        assert finding.works and re.match(r"\d+\.\d+", finding.text), finding


def test_doctor_says_why_something_does_not_work() -> None:
    def probe() -> str:
        raise PermissionError("memfd_create is forbidden here")

    finding = doctor._check("shared memory", probe)
    assert finding == Finding(
        "shared memory", False, "PermissionError: memfd_create is forbidden here"
    )


def test_table_is_aligned() -> None:
    rows = {"speed": [Finding("a", True, "1"), Finding("long name", False, "2")]}
    assert table(rows).splitlines() == ["speed", "  yes  a          1", "  no   long name  2"]


def test_all_reduce_that_fails_says_why() -> None:
    environment = {**base_environment(), "HVDLITE_FUSION_THRESHOLD": "a lot"}
    finding = doctor._check("all-reduce", lambda: doctor._probe_ranks(environment, ["-np", "2"]))
    assert not finding.works
    assert "HVDLITE_FUSION_THRESHOLD=a lot cannot be used" in finding.text


def test_core_that_does_not_load_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> float:
        raise ImportError("libstdc++.so.6: version `GLIBCXX_3.4.30' not found")

    monkeypatch.setattr(doctor, "_copy_speed", load)
    findings = doctor.speeds(base_environment())
    assert [(row.subject, row.works) for row in findings] == [
        ("memcpy", False),
        ("all-reduce", False),
    ]
    assert all("GLIBCXX_3.4.30" in row.text for row in findings)
