"""Fork ranks from a process that has imported their framework, because imports take long.

If a test file has `PRELOAD = ("tensorflow",)` at its top, `harness.World` forks its ranks from a
process that has imported these modules, pytest and, with PyTorch, hvdlite.torch. Such ranks differ
from others in four ways: they hash strings alike, their memory has the same addresses, /proc does
not show their environment, and they end without taking apart Python's modules
(`worker_main.leave`). What hvdlite-run starts begins and ends as users' ranks do, unless its test
takes a `python` that forks (see `forking_python`): then some other run of the script or the worker
does.

A *nursery* is such a process.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from hvdlite.launch import shim
from hvdlite.launch.process import Ending, signal_group

_WORKER_MAIN = Path(__file__).with_name("worker_main.py")
_KEPT = 3  # how many nurseries are kept; one with TensorFlow takes half a gigabyte
_ANSWERS_WITHIN = 200.0  # seconds, including the imports on a busy machine


class Nursery:
    """A process that has imported some modules and forks ranks; it dies with this process."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the process, which answers once it has imported the modules."""
        self.ranks: set[int] = set()  # process ids of ranks that are not reaped yet
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_ANSWERS_WITHIN)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        tied = shim.tied([sys.executable])
        with theirs:
            self._process = subprocess.Popen(
                [*tied, str(_WORKER_MAIN), "--fork", str(theirs.fileno()), *modules],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )

    def fork(
        self, folder: Path, environment: Mapping[str, str], outputs: Sequence[BinaryIO]
    ) -> int:
        """Start a rank with this environment, stdout and stderr; return its process id."""
        descriptors = [output.fileno() for output in outputs]
        answer = self._ask({"folder": str(folder), "environment": dict(environment)}, descriptors)
        pid = int(answer["pid"])
        self.ranks.add(pid)
        return pid

    def ending(self, pid: int) -> Ending:
        """Return how a rank ended, which must have ended; this does not reap it."""
        return Ending(**self._ask({"ending": pid}))

    def reap(self, pid: int) -> None:
        """Reap a rank that was killed or has ended."""
        self.ranks.remove(pid)
        self._ask({"reap": pid})

    def _ask(self, question: Mapping[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        answer = b""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
            socket.send_fds(self._socket, [json.dumps(question).encode()], descriptors)
            answer = self._socket.recv(1 << 16)
        if not answer:  # An import has failed, or hangs.
            self._process.kill()
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace")
            raise AssertionError(said or f"no answer within {_ANSWERS_WITHIN} s")
        decoded: dict[str, Any] = json.loads(answer)
        return decoded

    def close(self) -> None:
        """End the process, and the ranks that it still has."""
        self._socket.close()
        self._process.kill()
        self._process.wait()
        self._errors.close()


class ForkedRank:
    """A forked rank, with the methods of `hvdlite.launch.process.Worker` that World uses."""

    def __init__(self, number: int, nursery: Nursery, pid: int) -> None:
        self.number = number
        self.pid = pid
        self.ending: Ending | None = None
        self._nursery = nursery
        self._pidfd = os.pidfd_open(pid)

    def look(self) -> Ending | None:
        """Return how the rank ended; None while it runs."""
        if self.ending is None and select.select([self._pidfd], [], [], 0)[0]:
            self.ending = self._nursery.ending(self.pid)
        return self.ending

    def send_signal(self, number: int) -> None:
        """Send a signal to the rank and its children."""
        signal_group(self.pid, number)

    def reap(self) -> None:
        """Kill what is left of the rank, and reap it."""
        self.send_signal(signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # The rank may not have a group yet.
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        os.close(self._pidfd)
        self._nursery.reap(self.pid)


_nurseries: OrderedDict[tuple[object, ...], Nursery] = OrderedDict()


def fork_rank(
    rank: int,
    modules: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    outputs: Sequence[BinaryIO],
) -> ForkedRank:
    """Start a rank from a process that has imported these modules under this environment."""
    # hvdlite and gloo read their variables when a rank begins, and not when they are imported.
    of_modules = {
        name: value
        for name, value in environment.items()
        if not name.startswith(("HVDLITE_", "HOROVOD_", "GLOO_"))
    }
    key = (tuple(modules), tuple(sorted(of_modules.items())))
    if key not in _nurseries:
        _close_all_but(_KEPT - 1)
        _nurseries[key] = Nursery(modules, of_modules)
    _nurseries.move_to_end(key)
    nursery = _nurseries[key]
    return ForkedRank(rank, nursery, nursery.fork(folder, environment, outputs))


def close_nurseries() -> None:
    """End the processes that fork ranks."""
    _close_all_but(0)


def _close_all_but(kept: int) -> None:
    """End the least recently used nurseries that have no ranks, until only `kept` are left."""
    for key, nursery in list(_nurseries.items()):
        if len(_nurseries) > kept and not nursery.ranks:
            _nurseries.pop(key).close()
