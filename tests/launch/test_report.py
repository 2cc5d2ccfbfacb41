from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import hvdlite
from hvdlite.launch.process import Ending
from hvdlite.launch.report import Failure, describe, last_lines, root_failure

CONSEQUENCE = b"""Traceback (most recent call last):
  File "train.py", line 3, in <module>
hvdlite.errors.RankFailedError: rank 2 (host a, pid 13) died
"""
BOOM = b"""Traceback (most recent call last):
  File "train.py", line 3, in <module>
ValueError: boom
"""


def failed(
    rank: int, at: float, stderr: bytes, status: int = 1, by_signal: bool = False
) -> Failure:
    return Failure(rank, 100 + rank, Ending(status, by_signal), at, stderr, "node7")


def test_first_failure_wins() -> None:
    assert root_failure([failed(1, 5.1, BOOM), failed(0, 5.0, BOOM)]).rank == 0


def by_torch(stderr: bytes) -> bytes:
    """Write an error as a program that uses torch.distributed does."""
    return b"".join(b"[rank1]: " + line for line in stderr.splitlines(keepends=True))


def test_consequence_does_not_hide_its_slower_cause() -> None:
    follows = by_torch(CONSEQUENCE)
    failures = [failed(0, 5.0, CONSEQUENCE), failed(1, 5.1, follows), failed(2, 5.2, BOOM)]
    assert root_failure(failures).rank == root_failure(failures[1:]).rank == 2


def test_the_lowest_rank_tells_of_an_error_that_several_got() -> None:
    both = CONSEQUENCE.replace(b"RankFailedError", b"DeadlockError")
    assert root_failure([failed(1, 5.0, both), failed(0, 5.1, by_torch(both))]).rank == 0
    assert root_failure([failed(1, 5.0, BOOM), failed(0, 5.1, both)]).rank == 1


def test_cause_after_the_window_is_another_story() -> None:
    assert root_failure([failed(0, 5.0, CONSEQUENCE), failed(2, 6.6, BOOM)]).rank == 0


def test_rank_killed_by_a_signal_is_a_cause_whatever_it_printed() -> None:
    killed = failed(2, 5.01, CONSEQUENCE, status=9, by_signal=True)
    assert root_failure([failed(0, 5.0, CONSEQUENCE), killed]).rank == 2


def test_only_consequences_gives_the_first() -> None:
    assert root_failure([failed(0, 5.1, CONSEQUENCE), failed(1, 5.0, CONSEQUENCE)]).rank == 1


def test_long_traceback_is_shown_from_its_start() -> None:
    deep = ["noise"] * 50 + ["Traceback (most recent call last):"] + ["  frame"] * 30 + ["E: x"]
    lines = last_lines("\n".join(deep).encode())
    assert lines[0].startswith("Traceback")
    assert lines[-1] == "E: x"


def test_last_lines_are_bounded() -> None:
    assert len(last_lines(b"line\n" * 1000)) == 20


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("horovod", "runs unchanged with `hvdlite-run --compat`"),
        ("hvdlite", f"install it there, or name the one of hvdlite-run, {sys.executable}"),
        ("horovod.mxnet", None),
        ("horovodx", None),
    ],
)
def test_module_that_is_missing_is_explained(name: str, remedy: str | None) -> None:
    stderr = f"Traceback ...\nModuleNotFoundError: No module named '{name}'\n".encode()
    text = describe(failed(0, 5.0, stderr))
    said = [line for line in text.splitlines() if line.startswith("hvdlite-run: ")]
    assert len(said) == (2 if remedy is None else 3)
    assert remedy is None or remedy in text


def test_progress_bar_is_one_of_the_last_lines() -> None:
    bars = "".join(f"\r{percent}%" for percent in range(100))
    text = f"Traceback (most recent call last):\n{bars}\nE: x"
    assert last_lines(text.encode()) == ["Traceback (most recent call last):", "99%", "E: x"]


def test_report_names_rank_host_pid_and_status() -> None:
    text = describe(failed(2, 5.0, BOOM, status=3))
    assert "rank 2 (host node7, pid 102) failed first: exit status 3" in text
    assert text.endswith("    ValueError: boom\n")


LONG = b"""Traceback (most recent call last):
  File "train.py", line 9, in <module>
    loss.backward()
  File "/env/lib/python3.11/site-packages/torch/_tensor.py", line 623, in backward
    torch.autograd.backward(
    ^^^^^^^^^^^^^^^^^^^^^^^^
  File "OURS/torch/reducer.py", line 305, in _wait
    raise failure
hvdlite.errors.DeadlockError: deadlock: rank 0 waits for rank 1
  in two lines
"""


@pytest.mark.parametrize("written", [bytes, by_torch])
def test_report_leaves_out_the_frames_of_libraries(written: Callable[[bytes], bytes]) -> None:
    ours = str(Path(hvdlite.__file__).parent)
    text = describe(failed(1, 5.0, written(LONG.replace(b"OURS", ours.encode()))))
    assert text.partition("stderr, without the frames of libraries:\n")[2] == (
        "    Traceback (most recent call last):\n"
        '      File "train.py", line 9, in <module>\n'
        "        loss.backward()\n"
        "    hvdlite.errors.DeadlockError: deadlock: rank 0 waits for rank 1\n"
        "      in two lines\n"
    )


def test_a_traceback_of_libraries_alone_is_shown() -> None:
    alone = b"\n".join(LONG.splitlines()[:1] + LONG.splitlines()[3:6])
    text = describe(failed(1, 5.0, alone))
    assert "site-packages/torch/_tensor.py" in text and "without" not in text


@pytest.mark.parametrize("error", [b"DeadlockError", b"MismatchError", b"StalledError"])
def test_nobody_is_blamed_for_an_error_that_several_ranks_get(error: bytes) -> None:
    text = describe(failed(1, 5.0, b"hvdlite.errors." + error + b": text\n"))
    assert "failed first" not in text
    assert "pid 101) ended by an error that several ranks got: exit status 1" in text


def test_report_of_a_sigkill_speaks_of_memory() -> None:
    killed = describe(failed(2, 5.0, b"", status=9, by_signal=True))
    assert "SIGKILL" in killed and "may have" in killed
    for_memory = describe(Failure(2, 102, Ending(9, by_signal=True, oom_killed=True), 5.0, b""))
    assert "was at work" in for_memory
    assert "wrote nothing to stderr" in for_memory


def test_exit_codes_are_a_shells() -> None:
    assert Ending(3, by_signal=False).code == 3
    assert Ending(11, by_signal=True).code == 139
    assert str(Ending(11, by_signal=True)) == "killed by SIGSEGV"
