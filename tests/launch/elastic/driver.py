"""hvdlite-run with a fake registrar, for tests of the launcher's part of elastic jobs.

The fake forms the first epoch when all first workers are expected, and another one whenever a
worker joins or dies. It writes what the launcher tells it to the file TEST_LOG. TEST_EVENTS holds
events, as Python, that it sends after the first epoch; with TEST_EVENTS_WAIT it waits for a file
`events` beside the log before. With TEST_NEVER_FORMED there is no epoch; then it sends events only
with TEST_ENTERED. A worker that has to leave finds a file `leave.N` beside the log.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from hvdlite.launch.cli import main
from hvdlite.launch.elastic import job, messages
from hvdlite.launch.elastic.messages import EpochBegun, EpochFormed, Event, Leaving, Limits
from hvdlite.rendezvous.handshake import Job
from hvdlite.rendezvous.store import Store


class FakeRegistrar:
    """A registrar to which no worker ever talks."""

    def __init__(self, job: Job, limits: Limits, address: str | None) -> None:
        # Agents check that they can reach it, as they check for a store.
        self._store = None if address is None else Store.start(1, job, address)
        self.address = "unix:/nowhere" if self._store is None else self._store.address
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._limits = limits
        self._log = Path(os.environ["TEST_LOG"])
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._epoch = -1
        self._members: list[int] = []
        seconds = f"{limits.heartbeat:g} {limits.silence:g}"
        self._note(f"limits {limits.np} {limits.min_np} {limits.max_np} {seconds}")

    @classmethod
    def start(cls, job: Job, limits: Limits, address: str | None = None) -> FakeRegistrar:
        return cls(job, limits, address)

    def _note(self, text: str) -> None:
        with self._log.open("a") as log:
            print(text, file=log)

    def _tell(self, *events: Event) -> None:
        with self._lock:
            self._events += events
            os.eventfd_write(self.fd, 1)

    def _form(self) -> None:
        self._epoch += 1
        line = f"world {self._epoch}: workers {self._members}"
        members = tuple(self._members)
        self._tell(EpochBegun(members), EpochFormed(self._epoch, members, line))

    def expect(self, worker: int, host: str, joiner: bool) -> None:
        self._note(f"expect {worker} {joiner}")
        self._members.append(worker)
        forms = "TEST_NEVER_FORMED" not in os.environ
        if joiner and forms:
            self._form()
        elif len(self._members) == self._limits.np and not joiner:
            if forms:
                self._form()
            if forms or "TEST_ENTERED" in os.environ:
                events = eval(os.environ.get("TEST_EVENTS", "[Entered()]"), vars(messages))
                if "TEST_EVENTS_WAIT" in os.environ:
                    threading.Thread(target=self._tell_later, args=events, daemon=True).start()
                else:
                    self._tell(*events)

    def _tell_later(self, *events: Event) -> None:
        while not (self._log.parent / "events").exists():
            time.sleep(0.01)
        self._tell(*events)

    def ended(self, worker: int, why: str, clean: bool) -> None:
        self._note(f"ended {worker} {clean} {why}")
        if worker in self._members and self._epoch >= 0:
            self._members.remove(worker)
            if self._members and not clean:
                self._form()

    def drain(self, worker: int, why: str) -> None:
        self._note(f"drain {worker} {why}")
        (self._log.parent / f"leave.{worker}").touch()
        self._tell(Leaving(worker))

    def stops(self) -> None:
        self._note("stops")

    def take(self) -> list[Event]:
        with self._lock:
            try:
                os.eventfd_read(self.fd)
            except BlockingIOError:
                pass
            events, self._events = self._events, []
        return events

    def __enter__(self) -> FakeRegistrar:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)
        if self._store is not None:
            self._store.close()


if __name__ == "__main__":
    job.Registrar = FakeRegistrar  # type: ignore[assignment,misc]
    sys.exit(main())
