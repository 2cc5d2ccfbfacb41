"""Machines on which no temporary folder can be written, as in a container with a read-only root."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from harness import base_environment
from launcher import launcher_command

# The content of the folders stays readable, since this checkout may be in one of them. /mnt can be
# written, but Python does not use it for temporary files.
READ_ONLY = """
set -e
for folder in /tmp /var/tmp /usr/tmp; do
    [ ! -d $folder ] || { mount --bind $folder $folder && mount -o remount,ro,bind $folder; }
done
mount -t tmpfs none /mnt
cd /tmp
unset TMPDIR TEMP TMP
"$@"
cat /mnt/* 2>/dev/null || true
"""
BODY = """
from hvdlite import basics
basics.init()
basics.engine().barrier("all").wait()
print("well", basics.rank())
"""


def without_temporary_folder(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *("unshare", "--mount", "--propagation", "private", "sh", "-c", READ_ONLY, "sh"),
            *launcher_command("-np", "2", *arguments, sys.executable, "-c", BODY),
        ],
        env={**base_environment(), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def can_mount() -> bool:
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return os.getuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="mounting needs root")
@pytest.mark.parametrize("flags", [[], ["--timeline-filename", "/mnt/timeline.json"]])
def test_job_needs_no_temporary_folder(flags: list[str]) -> None:
    done = without_temporary_folder(*flags)
    assert done.returncode == 0, done.stderr
    assert "[0] well 0" in done.stdout and "[1] well 1" in done.stdout
    if flags:
        assert '"all"' in done.stdout, "the timeline"
