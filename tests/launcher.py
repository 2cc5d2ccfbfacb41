"""Run hvdlite-run in tests as a user would, and always end it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import base_environment
from patience import HANG


@dataclass(frozen=True)
class LauncherResult:
    """How a run of hvdlite-run ended."""

    returncode: int
    stdout: str
    stderr: str


PROGRAM = ("-m", "hvdlite.launch")


def launcher_command(*arguments: str, program: Sequence[str] = PROGRAM) -> list[str]:
    """Build the command of hvdlite-run, or of another program, in this Python."""
    return [sys.executable, *program, *arguments]


def start_launcher(
    *arguments: str,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    program: Sequence[str] = PROGRAM,
    **options: Any,
) -> subprocess.Popen[bytes]:
    """Start hvdlite-run in a process group of its own; the caller ends it (see `end_launcher`)."""
    options.setdefault("stdout", subprocess.PIPE)
    options.setdefault("stderr", subprocess.PIPE)
    return subprocess.Popen(
        launcher_command(*arguments, program=program),
        cwd=tempfile.gettempdir() if cwd is None else cwd,
        env={**base_environment(), **(env or {})},
        start_new_session=True,
        **options,
    )


def end_launcher(process: subprocess.Popen[bytes]) -> None:
    """Kill a launcher (its ranks die with it) and close its pipes."""
    if process.poll() is None:
        process.kill()
    process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def run_launcher(
    *arguments: str,
    timeout: float = 4 * HANG,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
) -> LauncherResult:
    """Run hvdlite-run with these arguments to its end.

    Raises:
        AssertionError: hvdlite-run took longer than `timeout` seconds.
    """
    process = start_launcher(*arguments, cwd=cwd, env=env)
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"hvdlite-run took more than {timeout} s: {error.stderr!r}") from None
    finally:
        end_launcher(process)
    return LauncherResult(
        process.returncode,
        stdout.decode(errors="replace"),
        stderr.decode(errors="replace"),
    )
