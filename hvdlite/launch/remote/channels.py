"""How the launcher reaches the agents on other hosts.

A *remote launcher*, such as ssh, starts the agent on a host and opens a *channel* to it.
The launcher reads and writes the channel's two descriptors, and does not know what is between them
and the agent. `ProcessChannel` is the channel of a command that runs here, such as ssh's, whose
stdin and stdout are those of the agent.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hvdlite.launch import shim
from hvdlite.launch.process import nameless_file, signal_group

_LONGEST_END = 5.0  # seconds that a command may take to end when its channel has been closed
_MOST_SAID = 1 << 16  # bytes of its stderr that are read


class LaunchError(OSError):
    """The job cannot run on a host; the message says which host, why, and what to do."""


class AbsentError(LaunchError):
    """A host cannot be reached, or has not answered in time."""


class Channel(Protocol):
    """The connection to the agent on one host; it may still be in the making."""

    # The launcher's threads call the methods; none is called after `hang_up` but `cut`, `end` and
    # `said`.

    @property
    def read_fd(self) -> int:
        """The descriptor of what the agent sends; at its end when the channel is broken."""

    @property
    def write_fd(self) -> int:
        """The descriptor of what is sent to the agent; it may be the same one, or blocking."""

    @property
    def pid(self) -> int | None:
        """The process here, and its group, that has to die with the launcher; None without one."""

    def said(self) -> str:
        """Return what the channel has told about itself, as a failing ssh does on its stderr."""

    def cut(self) -> None:
        """Break the channel at once; a thread that reads then finds the end."""

    def hang_up(self) -> None:
        """Close the two descriptors."""

    def end(self) -> int | None:
        """Wait until the channel's process has ended; return its status, None without a process."""


class RemoteLauncher(Protocol):
    """How the agents of a job are reached."""

    @property
    def carries_secrets(self) -> bool:
        """Whether environment and secret of the job may travel on its channels."""
        # Otherwise the agents have their own.

    @property
    def connect_seconds(self) -> float:
        """How long a host may take to answer; see `deadline.is_never`."""

    def reachable(self, host: str) -> bool:
        """Return whether it makes sense to connect to a host that was lost, or is new, now."""

    def open(self, host: str) -> Channel:
        """Begin to connect to the agent on a host; this does not wait for the host."""
        # Raises OSError if nothing can be started here.

    def explain(self, host: str, said: str, status: int | None) -> str:
        """Describe why a channel ended before its agent answered, and what to do."""

    def host_address(self, host: str, hello: Mapping[str, Any]) -> str:
        """Return the IP address by which this host reaches another one whose agent has answered."""
        # Raises OSError if the address is not known.


def last_line(said: str) -> str:
    """Return the last line that a channel has told about itself; "" if it has told nothing."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1] if lines else ""


class ProcessChannel:
    """The channel of a command that runs here; the command ends with the thread that made this."""

    def __init__(self, command: Sequence[str], *, death: signal.Signals = signal.SIGKILL) -> None:
        """Start the command in a session of its own. Raises OSError if it cannot be started."""
        # `death` is the signal that the command gets when this thread ends.
        self._stderr = nameless_file("hvdlite-channel-stderr")
        self._said: str | None = None
        try:
            self._process = subprocess.Popen(
                shim.tied(command, death),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                start_new_session=True,
                bufsize=0,
            )
        except BaseException:
            os.close(self._stderr)
            raise
        assert self._process.stdin is not None and self._process.stdout is not None
        self.read_fd = self._process.stdout.fileno()
        self.write_fd = self._process.stdin.fileno()
        self.pid = self._process.pid

    def said(self) -> str:
        """Return what the command has printed to its stderr."""
        try:
            return self._read_stderr() if self._said is None else self._said
        except OSError:
            return self._said or ""  # Another thread has called `end` meanwhile.

    def _read_stderr(self) -> str:
        return os.pread(self._stderr, _MOST_SAID, 0).decode(errors="replace")

    def cut(self) -> None:
        """Kill the command and its children."""
        if self._process.returncode is None:  # Nobody else has its number then.
            signal_group(self.pid, signal.SIGKILL)

    def hang_up(self) -> None:
        """Close the pipes."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def end(self) -> int:
        """Wait until the command has ended, kill it if that takes too long; return its status."""
        try:
            status = self._process.wait(_LONGEST_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        if self._said is None:
            self._said = self._read_stderr()
            os.close(self._stderr)
        return status
