from __future__ import annotations

import re

from harness import base_environment
from hvdlite.launch import doctor
from launcher import run_launcher


def test_doctor_says_what_works() -> None:
    result = run_launcher("--doctor")
    assert result.returncode == 0, result.stdout + result.stderr
    for word in ("python", "cores", "memory", "torch", "native core", "NCCL"):
        assert word in result.stdout
    assert re.search(r"yes  2 ranks here +they start and connect", result.stdout)


def test_frameworks_are_found_whatever_their_wheels_are_called() -> None:
    for finding in doctor.frameworks():  # the tests have all of them, tensorflow-cpu for one
        assert finding.works and re.match(r"\d+\.\d+", finding.text), finding


def test_ranks_that_do_not_start_are_a_finding() -> None:
    environment = {**base_environment(), "HVDLITE_FUSION_THRESHOLD": "a lot"}
    finding = doctor._check("ranks", lambda: doctor._meet(environment, ["-np", "2"]))
    assert not finding.works
    assert "HVDLITE_FUSION_THRESHOLD=a lot cannot be used" in finding.text
