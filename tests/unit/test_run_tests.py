"""The program behind `make test`: parts side by side, their sum, and an end on Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import run_tests
from patience import HANG, wait_until

PYTEST = "echo '= 5 passed, 2 skipped, 7 deselected, 1 warning in 3.20s (0:00:03) ='"
CPP = "echo '12 passed, 0 failed'"
# A part that writes its process id and that of a child, and ends at an interrupt as Python does.
PATIENT = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
try:
    open(sys.argv[1], "w").write(f"{os.getpid()} {child.pid}\\n")
    while True:
        time.sleep(0.05)
finally:
    child.kill()
    open(sys.argv[1] + ".cleaned", "w").close()
"""


def summary(outcomes: Sequence[run_tests.Outcome], seconds: float) -> str:
    """Sum up parts as if each of them had taken 0.4 s, however busy the machine is."""
    assert all(0 < one.seconds < HANG for one in outcomes)
    return run_tests.summary([replace(one, seconds=0.4) for one in outcomes], seconds)


def test_parts_are_summed_up(capfd: pytest.CaptureFixture[str]) -> None:
    outcomes = run_tests.run({"C++": ["sh", "-c", CPP], "Python": ["sh", "-c", PYTEST]})
    text = summary(outcomes, 61.0)
    assert "C++: 12 passed, 0 failed in 0 s" in text
    assert "7 long tests" in text
    assert text.endswith("all in 1 min 1 s\n17 passed, 0 failed, 2 skipped")
    shown = capfd.readouterr().out
    assert shown.index("12 passed") >= 0
    assert shown.index("5 passed") >= 0


def test_each_kind_of_failure_is_counted(capfd: pytest.CaptureFixture[str]) -> None:
    lines = {
        "failed": "echo '= 1 failed, 3 passed in 1s ='; exit 1",
        "an error in a fixture": "echo '= 3 passed, 2 errors in 1s ='; exit 1",
        "crashed": "echo 'no such program'; exit 127",
    }
    outcomes = run_tests.run({name: ["sh", "-c", line] for name, line in lines.items()})
    assert {outcome.name: outcome.status for outcome in outcomes} == {
        "failed": 1,
        "an error in a fixture": 1,
        "crashed": 127,
    }
    text = summary(outcomes, 1.0)
    assert "crashed: no test in 0 s, exit status 127" in text
    assert text.endswith("6 passed, 3 failed, 0 skipped")
    assert "make test-all" not in text


def test_the_parts_of_both_commands_are_all_tests_once() -> None:
    """Each test is in one part: the marks exclude each other, and so do the folders."""
    quick, rest = (run_tests.parts_of(name, 2) for name in ("test", "rest"))
    (python, long) = quick["Python"], rest["long tests"]
    assert python[python.index("-m", 3) :] == ["-m", "not long", "tests"]
    assert long[long.index("-m", 3) :] == ["-m", "long", "tests"]
    assert f"--ignore={run_tests.CLUSTERS}" in python
    assert f"--ignore={run_tests.CLUSTERS}" in long
    assert rest["cluster systems"][-1] == run_tests.CLUSTERS


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_lets_all_parts_clean_up(tmp_path: Path, number: int) -> None:
    started = [tmp_path / "one", tmp_path / "two"]
    program = (
        f"import sys; sys.path.insert(0, {str(Path(run_tests.__file__).parent)!r})\n"
        "import run_tests\n"
        f"files, code = {[str(file) for file in started]!r}, {PATIENT!r}\n"
        "run_tests.parts_of = lambda *_: {f: [sys.executable, '-c', code, f] for f in files}\n"
        "sys.argv[1:] = ['test']\n"
        "sys.exit(run_tests.main())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    try:
        wait_until(
            lambda: all(f.exists() and f.read_text().endswith("\n") for f in started), "parts"
        )
        process.send_signal(number)
        _, errors = process.communicate(timeout=HANG)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors.endswith("interrupted\n")
    for file in started:
        assert file.with_name(f"{file.name}.cleaned").exists()
        for pid in map(int, file.read_text().split()):
            wait_until(lambda pid=pid: not alive(pid), f"the end of process {pid}")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_part_that_ignores_the_interrupt_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_tests, "TO_CLEAN_UP", 0.2)
    deaf = "trap '' INT; : > \"$0\"; while :; do sleep 1; done"
    part = run_tests.Part("deaf", ["sh", "-c", deaf, str(tmp_path / "ready")], streams=False)
    wait_until((tmp_path / "ready").exists, "the part to ignore interrupts")
    run_tests.end([part])
    assert part.ended()
