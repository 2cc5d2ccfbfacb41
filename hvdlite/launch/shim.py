"""The first program of every rank, which dies with the launcher and becomes the rank's command.

The launcher runs it by path as `python -I -S shim.py LAUNCHER_PID SIGNAL COMMAND...`. It asks the
kernel for this signal when the launcher dies, and then execs the command. This is a program, rather
than a `preexec_fn`, because the launcher has threads: code between fork and exec must not need
locks that these threads may hold.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def tied(command: Sequence[str], death: signal.Signals = signal.SIGKILL) -> list[str]:
    """Build the command that runs `command`, which gets `death` when the calling thread ends."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(death)), *command]


def die_with_parent(parent: int, death: int = signal.SIGKILL) -> None:
    """Have the kernel send `death` to this process when `parent` dies; exit if it has died."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(death), 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        pass  # This Python has no libffi.
    if os.getppid() != parent:
        sys.exit(1)


def main() -> None:
    """Exec the command; exit with 127 or 126, as a shell does, if that is impossible."""
    # Python's handler would only note a SIGINT for later, and exec would lose it.
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Ray starts the processes of a node with a blocked SIGINT, and the command would inherit that.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    die_with_parent(int(sys.argv[1]), int(sys.argv[2]))
    command = sys.argv[3:]
    # Python ignores these two from its start, and the command would inherit that.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"hvdlite-run: cannot run {command[0]!r}: {error.strerror}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main()
