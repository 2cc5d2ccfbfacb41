"""A process that can open too few files says so, and how many it needs."""

from __future__ import annotations

import subprocess
import sys

from harness import base_environment
from hvdlite.launch.elastic.job import died_of
from hvdlite.launch.process import Ending
from launcher import end_launcher, start_launcher
from patience import HANG

MEMORY = """
import os, resource
from hvdlite import _core
files = len(os.listdir("/proc/self/fd")) - 1
resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
_core.create_segment(2)
"""
LAUNCHER = """
import resource, sys
from hvdlite.launch.cli import main
resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
sys.exit(main())
"""
REMEDY = "raise the limit, for example by `ulimit -n 4096`"


def test_shared_memory_without_a_file_names_the_limit_and_not_a_container() -> None:
    command = [sys.executable, "-c", MEMORY]
    done = subprocess.run(command, env=base_environment(), capture_output=True, text=True)
    assert done.returncode == 1
    assert REMEDY in done.stderr and "Too many open files" in done.stderr
    assert "seccomp" not in done.stderr


def test_launcher_with_too_few_files_names_the_limit() -> None:
    job = start_launcher("-np", "8", sys.executable, "-c", "pass", program=("-c", LAUNCHER))
    try:
        stderr = job.communicate(timeout=HANG)[1].decode()
    finally:
        end_launcher(job)
    assert job.returncode == 1
    assert f"Too many open files: this process may open 24; {REMEDY}" in stderr
    assert "seccomp" not in stderr and "Traceback" not in stderr


def test_worker_that_the_kernel_killed_for_memory_is_said_to_be() -> None:
    assert died_of(Ending(9, by_signal=True)) == "died of SIGKILL"
    killed = Ending(9, by_signal=True, oom_killed=True)
    assert died_of(killed) == "died of SIGKILL (the kernel's out-of-memory killer)"
