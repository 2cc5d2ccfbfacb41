"""Become a worker's command, after tying its life to the launcher's.

Run by path as `python -I -S shim.py LAUNCHER_PID COMMAND...`: it asks the kernel for a SIGKILL when
the launcher dies, then turns into the command. A program of its own rather than a `preexec_fn`,
because the launcher has threads, and code between fork and exec must not need their locks.
"""

from __future__ import annotations

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel SIGKILL this process when `parent` dies; exit when it already has."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        pass  # A Python without libffi: the guardian alone ends this process then.
    if os.getppid() != parent:
        sys.exit(1)


def main() -> None:
    """Tie, then exec the command; 127 or 126 as a shell gives when it cannot be run."""
    # Python would only note a Ctrl-C for later, and exec would forget it.
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent(int(sys.argv[1]))
    command = sys.argv[2:]
    # Python ignores these two at its start, and exec would hand that on to the command.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"hvdlite-run: cannot run {command[0]!r}: {error.strerror}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main()
