"""What follows from the state of an elastic job: the decisions of `membership.Membership`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hvdlite.launch.elastic import waits
from hvdlite.launch.elastic.actions import (
    Action,
    Close,
    EpochBegun,
    Evict,
    Failed,
    Leaving,
    Limits,
    Message,
    Replace,
    Send,
    Warn,
    Went,
)
from hvdlite.launch.elastic.growth import Notices, fitting, plan
from hvdlite.launch.elastic.patience import Patience
from hvdlite.launch.elastic.record import Change, Formed, Record
from hvdlite.launch.elastic.roster import Departed, Phase, Stage, Worker
from hvdlite.launch.elastic.suspicions import Suspicions
from hvdlite.rendezvous.deadline import is_never

_FAREWELL_SECONDS = 0.3  # from a worker's clean end to a new epoch, as others may be ending, too
_EXPLAINED_SECONDS = 0.25  # usually, from the end of a connection, or a goodbye, to the process's
LOST_CONNECTION = "lost its connection to the launcher"


class Epochs:
    """The state of a job, and every decision that is made from it alone, in `_settle`."""

    def __init__(self, limits: Limits) -> None:
        self.phase = Phase.STARTING  # what the job does
        self.epoch = -1  # the last one that was announced; -1 before the first
        self.members: list[Worker] = []  # Its living members, in the order of their ranks.
        self._limits = limits
        self._workers: dict[int, Worker] = {}  # all that live
        self._departed: dict[int, Departed] = {}  # gone, but for their processes
        self._out: list[Action] = []
        self._now = 0.0
        # These are about the epoch that was formed last.
        self._formed = -1
        self._world: frozenset[int] = frozenset()
        self._record = Record()
        self._last: Formed | None = None  # the epoch before is to be shown
        # These are about what comes next.
        self._mode = "start"
        self._gather_at: float | None = None
        self._restoring = False
        self._short_since: float | None = None  # when a boundary began to wait for joiners
        self._suspicions = Suspicions()
        # These are about the whole job.
        self._start_by: float | None = None
        self._script_fails = False  # whether a worker has failed, and was not killed
        self._entered = False
        self._growing = True
        self._stops = False  # whether all workers are asked to stop
        self._notices = Notices()
        self._patience = Patience(limits.reset_limit)
        self._watch = waits.Watch()

    def wake_at(self) -> float | None:
        """Return when `tick` must be called if nothing happens before; None for never."""
        if self.phase is Phase.OVER:
            return None
        times = [departed.due for departed in self._departed.values() if departed.due < math.inf]
        later = [self._gather_at, self._suspicions.verdict_at, self._give_up_at()]
        later += [self._watch.due_at, self._notices.complete_at]
        later.append(self._last.at + _EXPLAINED_SECONDS if self._last is not None else None)
        times += [when for when in later if when is not None]
        # What was due at the last settling was either done, or it waits for something else.
        return min((when for when in times if when > self._now), default=None)

    def knows(self, worker: int) -> bool:
        """Return whether this worker was announced and still lives."""
        return worker in self._workers

    # Who goes.

    def _remove(self, one: Worker, change: Change, now: float) -> None:
        del self._workers[one.number]
        if one in self.members:
            self.members.remove(one)
        elif one.joiner:
            return
        self._record.went(change, now)
        if change.trouble:
            self._out.append(Went(one.number, now))
        self._suspicions.dismiss()
        self._notices.deal_anew = self._entered
        self._gather_by(now if change.counts else now + _FAREWELL_SECONDS)

    def _evict(self, one: Worker, why: str, now: float) -> None:
        self._out += [Evict(one.number, why), Close(one.number)]
        self._remove(one, Change(one.name, f"was evicted: {why}", one.number), now)

    def _leave(self, one: Worker) -> None:
        self._send(one, {"kind": "leave"})
        self._out.append(Leaving(one.number))
        del self._workers[one.number]
        if one in self.members:
            self.members.remove(one)
            change = Change(one.name, f"left: {one.draining}", one.number, trouble=False)
            self._record.went(change, self._now)

    def _break(self, now: float) -> None:
        """A link of the present world broke, or one of the next world could not be made."""
        self._record.whole = False
        self._record.sign(now)
        self._gather_by(now)

    def _gather_by(self, when: float) -> None:
        self._gather_at = when if self._gather_at is None else min(when, self._gather_at)

    # What follows.

    def _settle(self, now: float) -> list[Action]:
        self._now = now
        for number, departed in list(self._departed.items()):
            if now >= departed.due:
                del self._departed[number]
                self._out.append(Evict(number, LOST_CONNECTION))
        self._show_if_explained(now)
        while self._step(now):
            pass
        self._show_if_explained(now)
        self._notify()
        self._warn(now)
        out, self._out = self._out, []
        return out

    def _step(self, now: float) -> bool:
        """Take the next step, if there is one; return whether there was."""
        if self.phase is Phase.OVER:
            return False
        give_up = self._give_up_at()
        if give_up is not None and now >= give_up:
            if not self._start_with_those_there(now):
                self._fail(self._why_given_up())
        elif self.phase is Phase.DONE:
            return self._dismiss_joiners()
        elif self._formed < 0 and self._record.changed:
            return self._start_without()
        elif self.phase is Phase.STARTING:
            return self._start()
        elif not self.members:
            return self._finish()
        elif not self._growing and self._dismiss_joiners():
            return True
        elif self.phase is Phase.FORMED:
            return self._look(now)
        elif self.phase is Phase.GATHERING:
            return self._answers(now)
        elif self.phase is Phase.FORMING:
            return self._connections(now)
        return False

    def _start(self) -> bool:
        first = [one for one in self._workers.values() if not one.joiner]
        if len(first) < self._limits.np or any(one.stage is not Stage.WAITING for one in first):
            return False
        self._announce("start", sorted(first, key=lambda one: one.number), sync=False)
        return True

    def _start_with_those_there(self, now: float) -> bool:
        """Begin without those of the first workers that are late, if enough are there."""
        there = [one for one in self._workers.values() if one.stage is Stage.WAITING]
        if self.phase is not Phase.STARTING or len(there) < max(1, self._limits.min_np):
            return False
        seconds = self._limits.start_timeout
        for one in [one for one in self._workers.values() if one not in there]:
            self._evict(one, f"was not ready within --start-timeout ({seconds:g} s)", now)
        self._record, self._start_by = Record(), now + seconds
        self._announce("start", sorted(there, key=lambda one: one.number), sync=False)
        return True

    def _start_anew(self, dead: Sequence[Change]) -> None:
        """Before the first epoch: have others take the places of the dead."""
        for change in dead:
            self._out += [Warn(f"{change.text}, and is replaced before the first step"), Replace()]
        for one in self.members:
            one.stage, one.asked = Stage.STARTING, self.epoch + 1
            self._send(one, {"kind": "gather", "epoch": one.asked, "gone": [], "reason": ""})
        self.members, self.phase, self._gather_at = [], Phase.STARTING, None
        self._record = Record()
        self._suspicions.begin()

    def _start_without(self) -> bool:
        """Before the first epoch a worker has gone: replace it, or fail, unless all just end."""
        if any(departed.member for departed in self._departed.values()):
            return False  # Its end is about to tell why.
        waiting = any(one.stage is not Stage.STARTING for one in self._workers.values())
        trouble, killed = self._record.trouble, self._record.killed
        fails = self._script_fails or self._stops or len(self._workers) < self._limits.min_np
        if killed and self._workers and not fails:
            self._start_anew(killed)
        elif trouble or waiting:
            what = trouble.text if trouble else self._record.reason()
            self._fail(f"{what} before all workers were connected")
        elif not self._workers:
            self.phase = Phase.DONE
        else:
            return False
        return True

    def _finish(self) -> bool:
        """No member is left: the job is done, or has failed."""
        if any(departed.member for departed in self._departed.values()):
            return False  # Their ends tell whether they failed.
        if self._record.trouble or self._growing:
            self._fail(self._record.nobody_left())
        else:
            self.phase = Phase.DONE
        return True

    def _dismiss_joiners(self) -> bool:
        waiting = self._waiting()
        for one in waiting:
            one.draining = one.draining or "the job is ending"
            self._leave(one)
        return bool(waiting)

    def _look(self, now: float) -> bool:
        """FORMED: all members at a boundary, or something that ends the epoch."""
        if all(one.stage is Stage.BOUNDARY for one in self.members):
            return self._boundary(now)
        if any(one.restored for one in self.members):
            self._gather_by(now)  # The others wait for it in their collectives.
        if self._gather_at is None or now < self._gather_at:
            return False
        self._gather()
        return True

    def _gather(self) -> None:
        """Tell all members to suspend their engines, and wait for their answers."""
        self._show()
        asked = self.epoch + 1
        gone = [[worker, why] for worker, why in self._record.gone]
        for one in self.members:
            one.stage, one.asked = Stage.RUNNING, asked
            reason = self._reason()
            self._send(one, {"kind": "gather", "epoch": asked, "gone": gone, "reason": reason})
        self.phase = Phase.GATHERING
        self._record.whole = False  # The engines end by it.
        self._gather_at = None

    def _answers(self, now: float) -> bool:
        """GATHERING: decide once all members have answered."""
        if not all(one.answered for one in self.members):
            return False
        suspect = self._suspicions.worst({one.number for one in self.members})
        if suspect is not None:
            if not self._suspicions.ripe(now):
                return False
            worker, why = suspect
            self._evict(self._workers[worker], why, now)
            return True
        suspended = [one for one in self.members if one.stage is Stage.SUSPENDED]
        if not suspended:
            return self._boundary(now)
        if not any(one.synced for one in self.members):
            self._fail(f"no worker is left that has the state of the job: {self._reason()}")
        elif len(suspended) < len(self.members) or self._hopeless(suspended):
            self._call_to_boundary(suspended)
        elif self._too_few_in_place():
            self._short_since = now if self._short_since is None else self._short_since
            return self._give_up_at() == now
        elif self._short_since is not None and self._gather_at is not None:
            self._short_since = None
            self._gather()  # A member has gone meanwhile, which may make others stuck.
        elif self._worth_it():
            self._announce("resume", self.members, sync=False)
        return True

    def _too_few_in_place(self) -> bool:
        """Return whether the step must wait: with those that wait to join there are too few."""
        # Those wait already who join at the boundary to which a notice calls before GO. Before the
        # workers have entered `hvd.elastic.run` there is no training, and nobody can join.
        if not (self._entered and self._growing):
            return False
        joiners = fitting(self._limits, self.members, self._waiting())
        return len(self.members) + len(joiners) < self._limits.min_np

    def _hopeless(self, suspended: list[Worker]) -> bool:
        """Return whether the collectives of suspended members cannot be redone."""
        self._restoring = (
            self._restoring
            or any(one.stuck is not None for one in suspended)
            or any(one.restored for one in self.members)
        )
        return self._restoring

    def _call_to_boundary(self, suspended: list[Worker]) -> None:
        stuck = next((one.stuck for one in suspended if one.stuck is not None), None)
        if self._hopeless(suspended):
            message: Message = {"kind": "restore", "reason": stuck or self._reason()}
        else:
            message = {"kind": "commit_point", "commit_point": dict(self._record.commit_point)}
        for one in suspended:
            one.stage = Stage.COMING
            self._send(one, message)

    def _boundary(self, now: float) -> bool:
        """All members are at a boundary: who leaves, who joins, and whether it is enough."""
        if not any(one.synced for one in self.members):
            self._fail(f"no worker is left that has the state of the job: {self._reason()}")
            return True
        planned = plan(self._limits, self.members, self._waiting(), self._growing)
        for one in planned.leavers:
            self._leave(one)
        if planned.missing:
            self._short_since = now if self._short_since is None else self._short_since
            return bool(planned.leavers) or self._give_up_at() == now
        members = sorted(self.members, key=lambda one: not one.synced) + planned.joiners
        sync = any(one.fresh or one.restored or not one.synced for one in members)
        restored = [one for one in members if one.restored]
        if restored:
            self._record.accept_symptom()
        stays = self._record.whole and not planned.joiners
        if stays and not restored:
            self._continue(sync)
        elif self._worth_it(planned.joiners):
            if stays:
                self._continue(sync)
            else:
                self._announce("boundary", members, sync)
        return True

    def _continue(self, sync: bool) -> None:
        """All are at a boundary, and the engine stays."""
        for one in self.members:
            one.stage, one.fresh, one.restored = Stage.RUNNING, False, False
            self._send(one, {"kind": "continue", "epoch": self._formed, "sync": sync})
        self._notices.begin(at_boundary=True)
        self._patience.formed(counts=False)
        self._forget()

    def _announce(self, mode: str, members: list[Worker], sync: bool) -> None:
        """Tell the members of the next epoch about each other; they connect."""
        self._show()
        self.epoch += 1
        self.members = list(members)
        self._mode = mode
        self._gather_at = self._short_since = None
        self._suspicions.begin()
        common = {
            "kind": "epoch",
            "epoch": self.epoch,
            "members": [[one.number, one.endpoint] for one in members],
            "commit_point": dict(self._record.commit_point) if mode == "resume" else {},
            "mode": mode,
            "sync": sync,
            "reason": self._reason(),
        }
        for rank, one in enumerate(members):
            one.connected = False
            if mode == "boundary":
                one.stage = Stage.BOUNDARY  # A joiner waits there, too.
            self._send(one, {**common, "rank": rank})
        self.phase = Phase.FORMING

    def _connections(self, now: float) -> bool:
        """FORMING: all members are connected, or one of them has gone."""
        # GATHER ends the attempts of the others, who may have something to say about it, too.
        if self._gather_at is not None or self._suspicions.ripe(now):
            if self._formed < 0:
                self._fail(self._record.reason())
            else:
                self._gather()
            return True
        if not all(one.connected for one in self.members):
            return False
        if self._mode == "resume" and self._too_few_in_place():
            self._gather()  # Who was to join has gone.
            return True
        clocks = [one.clock for one in self.members]
        self._formed_now(now)
        self._notify()  # before GO: its step may be the last one before a boundary
        for one in self.members:
            self._send(one, {"kind": "go", "epoch": self.epoch, "clocks": clocks})
        return True

    def _formed_now(self, now: float) -> None:
        workers = tuple(one.number for one in self.members)
        self._out.append(EpochBegun(workers))
        self._last = Formed(self.epoch, workers, self._joined(), self._record, now)
        counts = not self._record.quiet or bool(self._joined())
        self._patience.formed(counts=self._formed >= 0 and counts)
        for one in self.members:
            if self._mode != "resume" or one.stage is not Stage.BOUNDARY:
                one.stage = Stage.RUNNING
            if self._mode == "boundary":
                one.fresh = one.restored = False
        self._formed = self.epoch
        self._world = frozenset(workers)
        self.phase = Phase.FORMED
        self._notices.begin(at_boundary=self._mode != "resume")
        self._forget()

    def _forget(self) -> None:
        """Begin an epoch, or go on in it, with nothing to hold against it."""
        self._record = Record()
        self._gather_at, self._restoring, self._short_since = None, False, None
        self._suspicions.forget()

    def _worth_it(self, joiners: Sequence[Worker] = ()) -> bool:
        """Return whether another epoch is worth it; fail if it is not."""
        record = self._record
        if record.quiet and not joiners:
            return True
        trouble = record.trouble is not None or not (record.whole or record.changed)
        reason = record.reason(joiners)
        complaint = self._patience.judge(record.commit_point, record.steps, reason, trouble)
        if complaint:
            self._fail(complaint)
        return complaint is None

    def _fail(self, reason: str) -> None:
        self._show()
        self._out.append(Failed(reason))
        self.phase = Phase.OVER

    # What the user and the members are told.

    def _show(self) -> None:
        """Show the epoch that was formed last, if it has not been shown."""
        if self._last is not None:
            self._out.append(self._last.event())
            self._last = None

    def _show_if_explained(self, now: float) -> None:
        """Show it, unless the end of a process is about to tell why the epoch was formed."""
        if self._last is not None:
            silent = {number for number, one in self._departed.items() if not one.worker.raised}
            explained = silent.isdisjoint(worker for worker, _ in self._last.record.gone)
            if explained or now >= self._last.at + _EXPLAINED_SECONDS:
                self._show()

    def _waiting(self) -> list[Worker]:
        return [one for one in self._joining() if one.stage is Stage.WAITING]

    def _joining(self) -> list[Worker]:
        """Return who waits to join, and behind them who still starts."""
        found = [one for one in self._workers.values() if one.joiner and one not in self.members]
        return sorted(found, key=lambda one: (one.stage is not Stage.WAITING, one.number))

    def _send(self, one: Worker, message: Message) -> None:
        self._out.append(Send(one.number, message))

    def _notify(self) -> None:
        if self.phase is not Phase.FORMED or not (self._entered and self._record.whole):
            return
        joining, now = self._joining(), self._now
        due = self._notices.due(self._limits, self.members, joining, self._growing, now)
        if due is not None:
            version, removed = due
            for one in self.members:
                self._send(one, {"kind": "notice", "version": version, "removed": removed})

    def _joined(self) -> list[Worker]:
        world = self._world
        return [one for one in self.members if world and one.number not in world]

    def _reason(self) -> str:
        return self._record.reason(self._joined())

    def _give_up_at(self) -> float | None:
        if self.phase is Phase.DONE:
            return None
        if self._formed < 0 and self._start_by is not None:
            return None if is_never(self._limits.start_timeout) else self._start_by
        if self._short_since is None or is_never(self._limits.elastic_timeout):
            return None
        return self._short_since + self._limits.elastic_timeout

    def _why_given_up(self) -> str:
        if self._formed >= 0 and not self.members:
            return self._record.nobody_left()  # Its process is still there.
        living = len(self.members) + len(self._waiting())
        return waits.given_up(self._limits, self._formed < 0, living, self._wait())

    def _wait(self) -> str:
        """Say for whom the job waits; "" if it does not."""
        if self.phase is Phase.STARTING:
            return waits.describe_start([one for one in self._workers.values() if not one.joiner])
        if self._short_since is not None:
            living = len(self.members) + len(self._waiting())
            return waits.describe_shortage(living, self._limits.min_np)
        return waits.describe(self.phase, self.epoch, self.members)

    def _warn(self, now: float) -> None:
        wait = self._wait()
        if self._watch.due(wait, now) and self.phase is not Phase.OVER:
            self._out.append(Warn(wait))
