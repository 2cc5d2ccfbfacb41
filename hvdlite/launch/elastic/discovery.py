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

from hvdlite.errors import ArgumentError
from hvdlite.launch.hosts import Host, HostProvider, checked_slots, is_here, lines_of, read_host
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
        pass


class ScriptHosts:
    """The provider for --host-discovery-script: a command that prints a line for each host."""

    def __init__(self, script: str, slots: int) -> None:
        """Keep the command: the path of an executable file, or a command for the shell."""
        self._name = f"host discovery script {script!r}"
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

    def _run(self) -> tuple[int, bytes, bytes]:
        """Run the script in a session of its own, so that Ctrl-C does not make it fail."""
        with self._lock:
            if self._closed:
                raise DiscoveryError(f"{self._name} is not run any more")
            try:
                process = self._running = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            except OSError as error:
                raise DiscoveryError(f"{self._name} cannot be run: {error.strerror}") from None
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


def parse_hosts(text: str, slots: int, source: str) -> dict[str, int]:
    """Read lines of `host[:slots]`, without comments (#); the slots of a host's lines add up."""
    found: dict[str, int] = {}
    for number, words in lines_of(text):
        try:
            host = read_host(words, slots)
            count = checked_slots(host, found.get(host.name, 0))
        except ArgumentError as error:
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


class Discovery(contextlib.AbstractContextManager["Discovery"]):
    """Asks a provider again and again on its own thread; a context manager.

    The owner's thread calls the methods, and `take` when `fd` is readable.
    """

    def __init__(
        self,
        provider: HostProvider,
        period: float = PERIOD,
        interrupt_fd: int | None = None,
        is_here: Callable[[str], bool] = is_here,
        start_timeout: float = 0.0,
    ) -> None:
        """Ask for the first time, and wait for the answer.

        The provider belongs to this from now on. The first answer may take `start_timeout` seconds,
        0 for no limit, until a DiscoveryError; a byte at `interrupt_fd` is a KeyboardInterrupt.
        """
        self._here: dict[str, bool] = {}
        self._is_here = is_here
        self._provider = provider
        self._period = period
        self._lock = threading.Lock()
        self._news: list[News] = []
        self._ending = threading.Event()
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        answer: Future[dict[str, int]] = Future()
        ended, told = os.pipe2(os.O_CLOEXEC)
        threading.Thread(
            target=self._run, args=(answer, told), name="hvdlite-hosts", daemon=True
        ).start()
        watched = [ended] if interrupt_fd is None else [ended, interrupt_fd]
        ready, _, _ = select.select(watched, [], [], start_timeout or None)
        os.close(ended)
        if not answer.done():
            self._close()
            if ready:
                raise KeyboardInterrupt
            raise DiscoveryError(
                f"--start-timeout ({start_timeout:g} s) is over, and the first question for the "
                "hosts has no answer yet"
            )
        try:  # The slots by host of the first answer, and of the last one.
            self.first = self.last = answer.result()
        except BaseException:
            os.close(self.fd)
            raise

    def __exit__(self, *_: object) -> None:
        """End the thread, which may still wait for the provider: nothing waits for the thread."""
        self._close()

    def _close(self) -> None:
        with self._lock:
            self._ending.set()
            os.close(self.fd)
        self._provider.close()

    def take(self) -> list[News]:
        with self._lock:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.fd)
            news, self._news = self._news, []
        return news

    def _run(self, answer: Future[dict[str, int]], told: int) -> None:
        try:
            answer.set_result(self._hosts())
        except BaseException as error:
            answer.set_exception(error)
            return
        finally:
            os.close(told)
        last = News(answer.result())
        while not self._ending.wait(self._period):
            news = self._ask()
            hosts_changed = news.hosts is not None and (
                news.hosts != last.hosts or list(news.hosts) != list(last.hosts or ())
            )
            if hosts_changed or news.warning not in ("", last.warning):
                with self._lock:
                    if not self._ending.is_set():
                        self._news.append(news)
                        os.eventfd_write(self.fd, 1)
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
