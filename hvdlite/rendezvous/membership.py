"""The membership thread of a worker in an elastic job, which takes it from one world to the next.

It sleeps until the registrar says something, or the worker's world ends. When a member has died,
the engine *suspends* what it had in flight. The membership thread reports what this worker has
handed out, hands out what another survivor has (the *commit point*), connects to the remaining
members, and gives the rest to the next engine. The training thread sleeps in its collective
meanwhile, and sees nothing of it. At a *boundary* the training thread waits in `enter`, and ranks
may join and leave.

The registrar, in the launcher, is the one authority: this thread decides nothing alone.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hvdlite import _core
from hvdlite.errors import BootstrapError
from hvdlite.rendezvous import epochs
from hvdlite.rendezvous.client import RegistrarClient
from hvdlite.rendezvous.connection import SAME_CLOCK, Connection, UnreachableError
from hvdlite.rendezvous.deadline import Deadline, GivenUpError
from hvdlite.rendezvous.environment import WorkerEnvironment, tell_scripts
from hvdlite.rendezvous.epochs import Epoch
from hvdlite.rendezvous.handshake import Job
from hvdlite.rendezvous.mesh import Endpoint, Mesh

Message = dict[str, Any]
# `hvdlite.basics.follow`, which replaces this process's world by the next one.
Follow = Callable[
    [Connection, int, _core.PendingOperations, Sequence[int], bool], "_core.Engine | None"
]
Listener = Callable[[int, bool], None]

_NO_EPOCH = -1
# How long another host's kernel may take to answer, at least: it repeats what was lost after 1 s.
_LEAST_ANSWER_SECONDS = 2.0
_MOST_TOLD = 300  # The line about an epoch shows so many characters of an exception.
_MOST_SHOWN = 200  # The line about an epoch shows so many characters of an error.


@dataclass(frozen=True)
class Decision:
    """What a rank does after a boundary; all ranks get the same `sync` and `changed`."""

    leave: bool  # This rank ends here, without an error.
    sync: bool  # The ranks receive the state of rank 0.
    changed: bool  # The world is a new one.


_membership: MembershipThread | None = None
_listener: Listener | None = None
_received = False  # It is set when this process has received the state of the training.
_error = ""  # For this reason, in one line, the rank has restored its state the last time.


def current_membership() -> MembershipThread | None:
    return _membership


def install_membership(one: MembershipThread | None) -> None:
    global _membership, _received
    _membership, _received = one, False


def has_state() -> bool:
    """Return whether this rank has the state of the training: it began with it, or received it."""
    return _received or _membership is None or not _membership.joiner


def note_state() -> None:
    global _received
    _received = True


def note_error(error: BaseException) -> None:
    global _error
    lines = str(error).splitlines()
    _error = f"{type(error).__name__}: {lines[0][:_MOST_SHOWN]}" if lines else type(error).__name__


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call `listener` for each update of the job: with its number, and whether ranks only leave."""
    global _listener
    _listener, before = listener, _listener
    try:
        yield
    finally:
        _listener = before


def notify(version: int, removed: bool) -> None:
    """Tell the listener that an update waits for the next boundary; any thread may call it."""
    listener = _listener
    if listener is not None:
        listener(version, removed)


class MembershipThread:
    """One worker's membership in an elastic job."""

    # The training thread calls `begin`, `attach`, `enter` and `leave`. Everything else runs in the
    # membership thread.

    def __init__(
        self,
        worker: WorkerEnvironment,
        agreed: Mapping[str, str],
        follow: Follow,
        stay: Callable[[], None],
    ) -> None:
        """Prepare; `begin` starts the thread."""
        # `agreed` has, by variable, the settings that must be equal on every rank. `stay` is called
        # at a boundary where the world stays as it is.
        self.pending = _core.PendingOperations()
        self.joiner = worker.joiner  # whether this rank joins a job that runs already
        self._worker = worker
        self._agreed = dict(agreed)
        self._follow = follow
        self._stay = stay
        self._inbox = _Inbox(self.pending.lost_fd)
        self._thread = threading.Thread(target=self._run, name="hvdlite-membership", daemon=True)
        self._endpoint: Endpoint | None = None
        self._client: RegistrarClient | None = None
        # Only the membership thread uses these, once it runs.
        self._epoch = _NO_EPOCH  # The last world that was formed has this epoch.
        self._members: list[int] = []  # These are its workers by rank.
        self._engine: _core.Engine | None = None
        self._suspended = False
        self._heard = _NO_EPOCH  # The last GATHER was for this epoch.
        self._attempt: Deadline | None = None  # The connecting that runs has this deadline.
        self._steps_before = 0  # The process had committed so many when the world was formed.
        self._called_off: float = _NO_EPOCH  # No epoch before this one is formed any more.
        # The membership thread and the training thread share these; `_changed` guards them.
        self._changed = threading.Condition()
        self._boundary: bool | None = None  # The waiting rank has restored, or not; None: no rank.
        self._decision: Decision | None = None
        self._first: Connection | None = None
        self._over: str | None = None  # For this reason the job is over for this worker.
        self._failed = False  # It is set when the script has raised.

    # The training thread calls these methods.

    def begin(self, deadline: Deadline) -> Connection:
        """Register this worker, and wait for its first world; a joiner gets a world of one."""
        assert self._worker.rendezvous is not None
        try:
            self._client = RegistrarClient(
                self._worker.rendezvous,
                Job(self._worker.token, self._worker.job_id, 0),
                self._worker.elastic_worker,
                deadline,
                self._hear,
                self._lose_registrar,
                self._worker.heartbeat,
            )
            self._endpoint = Endpoint(self._worker, self._client.local_host, self._agreed)
            if self.joiner:
                return Connection()
            self._thread.start()
            with self._changed:
                while self._first is None and self._over is None:
                    self._changed.wait(deadline.check())
                if self._first is None:
                    raise BootstrapError(self._over or "the job has ended")
                return self._first
        except BaseException:
            self.leave({})
            raise

    def attach(self, engine: _core.Engine) -> None:
        self.pending.resume(engine, [])
        with self._changed:
            self._engine = engine
            self._changed.notify_all()
        if self.joiner:
            self._thread.start()
        install_membership(self)

    def enter(self, restored: bool) -> Decision:
        """Wait at the boundary until a world has been formed."""
        # `restored` says that a HorovodInternalError led this rank here.
        with self._changed:
            self._boundary, self._decision = restored, None
            self._inbox.put({"kind": "at boundary"})
            while self._decision is None and self._over is None:
                self._changed.wait()
            self._boundary = None
            if self._decision is None:
                raise BootstrapError(self._over or "the job has ended")
            return self._decision

    def ask_to_leave(self, why: str) -> None:
        # The line that tells of the next epoch shows `why`.
        try:
            self._send({"kind": "drain", "why": why})
        except BootstrapError:
            pass  # The job is over, which the membership thread will tell.

    def break_off(self, what: str) -> None:
        """End without a goodbye, because the script has failed; `what` it did is for the user."""
        self._failed = True
        with contextlib.suppress(BootstrapError):  # The registrar has gone, and with it the job.
            self._send({"kind": "raised", "what": what[:_MOST_TOLD]})

    def leave(self, commits: Mapping[int, int]) -> None:
        # `commits` has, by process set, the engine's count of commits.
        install_membership(None)
        with self._changed:
            self._over = self._over or "hvdlite was shut down"
            self._changed.notify_all()
        self._stop_connecting(math.inf)
        self._inbox.put({"kind": "end"})
        self.pending.fail("hvdlite was shut down on this rank")
        with contextlib.suppress(BootstrapError):  # The registrar has gone, and with it the job.
            if not self._failed:
                self._send({"kind": "bye", "commits": dict(commits), "status": "done"})
        if self._client is not None:
            self._client.close()
        if self._endpoint is not None:
            self._endpoint.close()

    # The thread that reads from the registrar calls these methods.

    def _hear(self, message: Message) -> None:
        if message["kind"] == "gather":
            self._stop_connecting(message["epoch"])
        self._inbox.put(message)

    def _lose_registrar(self, reason: str) -> None:
        self._inbox.put({"kind": "refused", "reason": reason})
        self._stop_connecting(math.inf)

    def _stop_connecting(self, before: float) -> None:
        """Give up all epochs before this one, also one whose connecting begins in this moment."""
        self._called_off = before
        attempt = self._attempt
        if attempt is not None:
            attempt.give_up()

    # The membership thread calls these methods.

    def _run(self) -> None:
        handle: dict[str, Callable[[Message], None]] = {
            "lost": self._on_lost,
            "at boundary": self._on_boundary,
            "gather": self._on_gather,
            "epoch": self._on_epoch,
            "continue": self._on_continue,
            "commit_point": lambda message: self.pending.deliver(
                _as_numbers(message["commit_point"])
            ),
            "restore": lambda message: self.pending.fail(
                message.get("reason") or "see the launcher"
            ),
            "notice": lambda message: notify(message["version"], message["removed"]),
            "leave": lambda _: self._decide(Decision(leave=True, sync=False, changed=False)),
            "refused": self._on_refused,
        }
        try:
            if not self.joiner:
                self._ready("start")
            while self._over is None:
                message = self._inbox.take()
                if message["kind"] in handle:
                    handle[message["kind"]](message)
        except BootstrapError as error:  # The registrar is out of reach: the job is over.
            self._on_refused({"reason": str(error)})
        except Exception as error:  # Whatever it is, the training thread must not wait for ever.
            self._on_refused({"reason": f"its membership thread failed: {error!r}"})

    def _on_boundary(self, _: Message) -> None:
        if self._boundary is not None:  # A GATHER may have been answered, and decided upon, before.
            self._ready_at_boundary()

    def _on_lost(self, _: Message) -> None:
        if self._boundary is not None and self._heard > self._epoch:
            return  # The GATHER that it has answered from the boundary ends all engines.
        # The end of a former world may have been told by a GATHER before, and this one lives.
        if self.pending.report([])["reason"] and not self._suspended:
            self._suspended = True
            self._ready("lost")

    def _on_gather(self, message: Message) -> None:
        self._heard = message["epoch"]
        if self._boundary is not None:
            self._ready_at_boundary()
        elif self._engine is None:
            self._ready("start")
        else:
            if not self._suspended:
                self._suspended = True
                self._engine.suspend(message["reason"])
            self._ready("lost", [worker for worker, _ in message["gone"]])

    def _ready_at_boundary(self) -> None:
        self._ready("join" if self._epoch == _NO_EPOCH else "boundary")

    def _ready(self, why: str, gone: Sequence[int] = ()) -> None:
        """Say where this worker is, and what it has handed out."""
        assert self._endpoint is not None
        ranks = [rank for rank, worker in enumerate(self._members) if worker in gone]
        report = self.pending.report(ranks) if self._suspended else None
        commits = report["commits"] if report else {}
        if report is None and self._engine is not None:
            commits = self._engine.commit_counts()
        progress = epochs.progress()
        # Where nobody reports steps, the registrar counts commits.
        made = {"steps": progress.committed - self._steps_before} if progress.announced else {}
        self._send(
            {
                **made,
                "kind": "ready",
                "epoch": self._epoch,
                "why": why,
                "heard": self._heard,
                "synced": has_state() or not self.joiner,
                "endpoint": self._endpoint.description,
                "commits": dict(commits),
                "stuck": report["stuck"] if report else None,
                "suspect": self._suspect(report["suspect"]) if report else None,
                "reason": report["reason"] if report else _error if self._boundary else "",
                "restored": bool(self._boundary),
            }
        )

    def _suspect(self, rank: int | None) -> int | None:
        """Return the worker of the rank that failed, unless it is this one."""
        if rank is None or rank >= len(self._members):
            return None
        worker = self._members[rank]
        return None if worker == self._worker.elastic_worker else worker

    def _on_epoch(self, message: Message) -> None:
        members = [worker for worker, _ in message["members"]]
        if message["mode"] == "resume":
            self.pending.deliver(_as_numbers(message["commit_point"]))
        elif self._engine is not None:
            self._engine.shutdown()
        try:
            self._adopt(message, members, self._connect(message, members))
        except GivenUpError:
            pass  # A GATHER, or the end, is in the inbox.
        except UnreachableError as error:
            report = {"worker": members[error.rank], "reason": str(error), "silent": error.silent}
            self._send({"kind": "unreachable", "epoch": message["epoch"], **report})
        except BootstrapError as error:
            self._fail(str(error))

    def _connect(self, message: Message, members: Sequence[int]) -> Connection:
        assert self._endpoint is not None
        epoch: int = message["epoch"]
        attempt = self._attempt = Deadline(self._worker.start_timeout)
        if epoch < self._called_off:
            attempt.give_up()

        def meet(clock: Any) -> list[Any]:
            self._send({"kind": "connected", "epoch": epoch, "clock": clock})
            return self._await_go(epoch)

        try:
            if len(members) == 1:
                meet(list(SAME_CLOCK))
                return Connection(local_rank=self._worker.local_rank or 0)
            # A member may be late, but a kernel is not, once the processes live and listen.
            answer_seconds = max(self._worker.heartbeat, _LEAST_ANSWER_SECONDS)
            mesh = Mesh(
                self._endpoint,
                message["rank"],
                [endpoint for _, endpoint in message["members"]],
                Job(self._worker.token, self._worker.job_id, epoch),
                _core.create_segment,
                attempt,
                0.0 if message["mode"] == "start" else answer_seconds,
            )
            return mesh.connect(meet)
        finally:
            self._attempt = None

    def _await_go(self, epoch: int) -> list[Any]:
        others: list[Message] = []
        try:
            while True:
                message = self._inbox.take()
                if message["kind"] == "go" and message["epoch"] == epoch:
                    clocks: list[Any] = message["clocks"]
                    return clocks
                if message["kind"] == "notice":
                    # The first step in the new world may be the last one before a boundary.
                    notify(message["version"], message["removed"])
                    continue
                others.append(message)
                if message["kind"] in ("gather", "refused", "end"):
                    raise GivenUpError("another member was lost while this world was formed")
        finally:
            for message in reversed(others):
                self._inbox.put_back(message)

    def _adopt(self, message: Message, members: list[int], connection: Connection) -> None:
        epoch = Epoch(message["epoch"], tuple(members), self._worker.elastic_worker,
                      message["reason"])  # fmt: skip
        rank_of = [members.index(one) if one in members else -1 for one in self._members]
        self._epoch, self._members, self._suspended = epoch.number, members, False
        epochs.record(epoch)
        self._steps_before = epochs.progress().committed
        if message["mode"] == "start":
            with self._changed:
                self._first = connection
                self._changed.notify_all()
                while self._engine is None and self._over is None:
                    self._changed.wait()
        else:
            resumes = message["mode"] == "resume"
            self._engine = self._follow(connection, epoch.number, self.pending, rank_of, resumes)
        tell_scripts(
            RANK=connection.rank,
            SIZE=connection.size,
            LOCAL_SIZE=connection.local_size,
            CROSS_RANK=connection.cross_rank,
            CROSS_SIZE=connection.cross_size,
        )
        # After the start the training thread may be at its first boundary before this line runs.
        if self._boundary is not None and message["mode"] == "boundary":
            self._decide(Decision(leave=False, sync=message["sync"], changed=True))

    def _on_continue(self, message: Message) -> None:
        self._stay()
        self._decide(Decision(leave=False, sync=message["sync"], changed=False))

    def _decide(self, decision: Decision) -> None:
        with self._changed:
            self._decision, self._boundary = decision, None
            self._changed.notify_all()

    def _fail(self, reason: str) -> None:
        """The worker cannot go on: its waiting operations raise, and it ends."""
        with self._changed:
            self._over = self._over or reason
            self._changed.notify_all()
        if self._engine is not None:
            self._engine.suspend(reason)
        self.pending.fail(reason)

    def _on_refused(self, message: Message) -> None:
        self._fail(f"worker {self._worker.elastic_worker} is out of the job: {message['reason']}")

    def _send(self, message: Message) -> None:
        if self._client is not None:
            self._client.send(message)


def _as_numbers(counts: Mapping[str, int]) -> dict[int, int]:
    return {int(process_set): count for process_set, count in counts.items()}


class _Inbox:
    """A queue of messages from any thread to the membership thread."""

    def __init__(self, lost_fd: int) -> None:
        """Make an empty inbox; it brings "lost" when the borrowed eventfd `lost_fd` is written."""
        self._messages: deque[Message] = deque()
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lost_fd = lost_fd

    def put(self, message: Message) -> None:
        self._messages.append(message)
        os.eventfd_write(self._event, 1)

    def put_back(self, message: Message) -> None:
        """Add a message before the others, which the membership thread has taken too early."""
        self._messages.appendleft(message)
        os.eventfd_write(self._event, 1)

    def take(self) -> Message:
        poller = select.poll()
        poller.register(self._event, select.POLLIN)
        poller.register(self._lost_fd, select.POLLIN)
        while True:
            with contextlib.suppress(IndexError):
                return self._messages.popleft()
            ready = [fd for fd, _ in poller.poll()]
            for fd in ready:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(fd)
            if self._lost_fd in ready:
                self._messages.append({"kind": "lost"})
