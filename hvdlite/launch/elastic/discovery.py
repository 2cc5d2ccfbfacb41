"""Which hosts there are now, and how many slots each has.

A `HostProvider` knows it. `Discovery` asks the provider every second on a thread of its own,
because a provider may be slow, and wakes the launcher's loop when an answer has changed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from hvdlite.launch.hosts import (
    Host,
    HostProvider,
    HostsError,
    checked_slots,
    is_here,
    lines_of,
    read_host,
)
from hvdlite.launch.report import last_lines

PERIOD = 1.0  # seconds between two questions to the provider
_LONGEST_ANSWER = 60.0  # seconds that the script may take
_SHOWN = 200  # characters of the script's stderr in a message


class DiscoveryError(OSError):
    """The provider does not know the hosts now; the message says why."""


class StaticHosts:
    """The provider for hosts that do not change: those of -H, or this machine alone."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = {host.name: host.slots for host in hosts}

    def hosts(self) -> Mapping[str, int]:
        return self._hosts

    def close(self) -> None:
        """Do nothing: the hosts are known at once."""


class ScriptHosts:
    """The provider for --host-discovery-script: a command that prints a line for each host."""

    def __init__(self, script: str, slots: int) -> None:
        """Keep the command: the path of an executable file, or a command for the shell."""
        self._script = script
        is_file = Path(script).is_file()
        self._command = [str(Path(script).absolute())] if is_file else ["/bin/sh", "-c", script]
        self._slots = slots
        self._had_hosts = False  # in its last answer
        self._lock = threading.Lock()
        self._closed = False  # guarded by the lock
        self._running: subprocess.Popen[bytes] | None = None  # guarded by the lock, until reaped

    def hosts(self) -> Mapping[str, int]:
        status, stdout, stderr = self._run()
        if status:
            said = last_lines(stderr)
            why = f": {said[-1][:_SHOWN]}" if said else ""
            raise DiscoveryError(f"{self._name} failed with exit status {status}{why}")
        found = parse_hosts(stdout.decode(errors="replace"), self._slots, self._name)
        if self._had_hosts and not found:
            # `kubectl ... | awk ...` ends with status 0 although its first half has failed.
            raise DiscoveryError(f"{self._name} printed no host; the last answer stays")
        self._had_hosts = bool(found)
        return found

    def close(self) -> None:
        """Kill the script if it runs, and all that it has started in its session."""
        with self._lock:
            self._closed = True
            if self._running is not None:
                with contextlib.suppress(ProcessLookupError):  # It has ended in this moment.
                    os.killpg(self._running.pid, signal.SIGKILL)

    @property
    def _name(self) -> str:
        return f"host discovery script {self._script!r}"

    def _run(self) -> tuple[int, bytes, bytes]:
        """Run the script in a session of its own, so that Ctrl-C does not make it fail."""
        process = self._start()
        try:
            stdout, stderr = process.communicate(timeout=_LONGEST_ANSWER)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise DiscoveryError(
                f"{self._name} has not ended within {_LONGEST_ANSWER:g} s"
            ) from None
        finally:
            with self._lock:
                self._running = None
        return process.returncode, stdout, stderr

    def _start(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._closed:
                raise DiscoveryError(f"{self._name} is not run any more")
            try:
                self._running = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            except OSError as error:
                raise DiscoveryError(f"{self._name} cannot be run: {error.strerror}") from None
            return self._running


def parse_hosts(text: str, slots: int, source: str) -> dict[str, int]:
    """Read lines of `host[:slots]`; empty lines and comments (#) do not count."""
    # Returns the slots by host; the sum, for a host that has several lines.
    # Raises DiscoveryError if a line cannot be read.
    found: dict[str, int] = {}
    for number, line in enumerate(lines_of(text), 1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        try:
            host = read_host(words, slots)
            count = checked_slots(host, found.get(host.name, 0))
        except HostsError as error:
            raise DiscoveryError(
                f"{source} printed {words!r} in line {number}, which is not host[:slots]: {error}"
            ) from None
        found[host.name] = count
    return found


@dataclass(frozen=True)
class News:
    """What has changed: the hosts, or that the provider fails."""

    hosts: Mapping[str, int] | None  # the slots by host; None if the last answer stays
    warning: str = ""  # why the provider failed; "" if it did not


class Discovery:
    """Asks a provider again and again on its own thread; a context manager."""

    # The owner's thread calls the methods, and reads `take` when `fd` is readable.

    def __init__(
        self,
        provider: HostProvider,
        period: float = PERIOD,
        interrupt_fd: int | None = None,
        is_here: Callable[[str], bool] = is_here,
        start_timeout: float = 0.0,
    ) -> None:
        """Ask for the first time, and wait for the answer."""
        # `provider` is asked; this owns it, and closes it at the end.
        # `period` gives the seconds between two questions.
        # `interrupt_fd` is readable when the wait for the first answer is to be given up; borrowed.
        # `is_here` returns whether a host that is listed is this machine.
        # `start_timeout` gives the seconds that the first answer may take; 0 for no limit.
        # Raises DiscoveryError if the provider fails, or its first answer takes too long.
        # Raises KeyboardInterrupt if the wait was given up.
        self._here: dict[str, bool] = {}
        self._is_here = is_here
        self._provider = provider
        # The slots by host of the first answer.
        # Those of the last answer.
        self.first = self.last = self._first_answer(interrupt_fd, start_timeout)
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._period = period
        self._lock = threading.Lock()
        self._news: list[News] = []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvdlite-hosts", daemon=True)

    def __enter__(self) -> Discovery:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread, which may still wait for the provider: nothing waits for the thread."""
        with self._lock:
            self._ending.set()
            os.close(self.fd)
        self._provider.close()

    def _first_answer(self, interrupt_fd: int | None, start_timeout: float) -> dict[str, int]:
        answer: Future[dict[str, int]] = Future()
        ended, told = os.pipe2(os.O_CLOEXEC)

        def ask() -> None:
            try:
                answer.set_result(self._hosts())
            except BaseException as error:
                answer.set_exception(error)
            finally:
                os.close(told)

        asking = threading.Thread(target=ask, name="hvdlite-first-hosts", daemon=True)
        asking.start()
        watched = [ended] if interrupt_fd is None else [ended, interrupt_fd]
        ready, _, _ = select.select(watched, [], [], start_timeout or None)
        os.close(ended)
        if not answer.done():
            self._provider.close()
            if ready:
                raise KeyboardInterrupt
            raise DiscoveryError(
                f"--start-timeout ({start_timeout:g} s) is over, and the first question for the "
                "hosts has no answer yet"
            )
        asking.join()
        return answer.result()

    def take(self) -> list[News]:
        """Return what has changed since the last call, in order."""
        with self._lock:
            try:
                os.eventfd_read(self.fd)
            except BlockingIOError:
                pass
            news, self._news = self._news, []
        return news

    def _run(self) -> None:
        last: News = News(self.first)
        while not self._ending.wait(self._period):
            news = self._ask()
            hosts_changed = news.hosts is not None and (
                news.hosts != last.hosts or list(news.hosts) != list(last.hosts or ())
            )
            if hosts_changed or news.warning not in ("", last.warning):
                self._tell(news)
            last = News(last.hosts if news.hosts is None else news.hosts, news.warning)

    def here(self, name: str) -> bool:
        return self._here[name]

    def _hosts(self) -> dict[str, int]:
        """Ask the provider, and find out which hosts are this machine, which may take a while."""
        hosts = dict(self._provider.hosts())
        for name in hosts:
            if name not in self._here:
                self._here[name] = self._is_here(name)
        return hosts

    def _ask(self) -> News:
        try:
            self.last = self._hosts()
            return News(self.last)
        except Exception as error:  # A provider of the user may raise anything.
            return News(None, str(error) or type(error).__name__)

    def _tell(self, news: News) -> None:
        with self._lock:
            if not self._ending.is_set():
                self._news.append(news)
                os.eventfd_write(self.fd, 1)
