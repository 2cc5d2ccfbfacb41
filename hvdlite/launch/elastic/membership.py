"""Which workers make up the world of each epoch of an elastic job: a pure state machine.

It has no clock, no socket and no thread: each method takes what happened and the time, and returns
what to do. All decisions are made in `_settle`, from the state alone, so it does not matter in
which order events arrive.

    STARTING   the first workers become ready; a death here fails the job, as nothing is lost yet
    FORMED     the members of an epoch train
    GATHERING  the world broke; each member parks and says READY, or waits at a boundary
    FORMING    the members of the next epoch connect
    DONE       all workers have finished; joiners that are still to come are asked to leave
    OVER       the job has failed

Messages cross: a worker may say READY at the moment when GATHER is sent to it. A READY that says
by `heard` which GATHER it answers is not taken for the answer to a later one.

Example:
    >>> membership = Membership(Limits(np=1, min_np=1))
    >>> membership.expect(0, "a", joiner=False, now=0.0)
    []
    >>> ready = {"kind": "ready", "epoch": -1, "why": "start", "offer": {}, "commits": {}}
    >>> membership.received(0, ready, now=0.1)[0].message["kind"]
    'epoch'
    >>> membership.received(0, {"kind": "connected", "epoch": 0, "clock": []}, now=0.2)[1].line
    'epoch 0: 1 rank starts'
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from hvdlite.bootstrap.deadline import is_never
from hvdlite.launch.elastic.accusations import Accusations
from hvdlite.launch.elastic.actions import (
    Action,
    Close,
    Entered,
    EpochFormed,
    Evict,
    Failed,
    Leaving,
    Limits,
    Message,
    Refused,
    Send,
    Warn,
)
from hvdlite.launch.elastic.growth import Notices, plan
from hvdlite.launch.elastic.patience import Patience
from hvdlite.launch.elastic.roster import Change, Place, Worker, listed, mismatch, named

_FAREWELL_SECONDS = 0.3  # from a worker's clean end to a new epoch, as others may be ending, too
_RESTORED_SECONDS = 1.0  # that a restored worker waits for others that may have the same error
_WARN_SECONDS = 10.0
SILENT_SECONDS = 0.5  # beyond the heartbeat
_LOST_CONNECTION = "lost its connection to the launcher"


class Phase(enum.Enum):
    """What the job does; the module's docstring says more."""

    STARTING = "starting"
    FORMED = "formed"
    GATHERING = "gathering"
    FORMING = "forming"
    DONE = "done"
    OVER = "over"


class Membership:
    """The state machine. `phase`, `epoch` and `members` are for its caller to read."""

    def __init__(self, limits: Limits) -> None:
        self.phase = Phase.STARTING
        self.epoch = -1  # the last one that was announced
        self.members: list[Worker] = []  # of that epoch, living, in the order of their ranks
        self._limits = limits
        self._workers: dict[int, Worker] = {}  # all that live
        self._unburied: dict[int, tuple[Worker, float]] = {}  # lost; their end is due at the time
        self._out: list[Action] = []
        self._now = 0.0
        # Of the epoch that was formed last:
        self._formed = -1
        self._world: frozenset[int] = frozenset()
        self._whole = True  # nobody has gone since, and no link broke
        self._changes: list[Change] = []
        self._symptom: Change | None = None  # what a worker reported, if nobody is to blame
        self._cut: dict[str, int] = {}
        self._steps: int | None = None
        self._sign: float | None = None  # when the first sign came that another one must follow
        # Of what comes next:
        self._mode = "start"
        self._gather_at: float | None = None
        self._restoring = False
        self._short_since: float | None = None  # when a boundary began to wait for joiners
        self._accusations = Accusations()
        # Of the whole job:
        self._start_by: float | None = None
        self._entered = False
        self._growing = True
        self._notices = Notices()
        self._patience = Patience(limits.reset_limit)
        self._warned: tuple[str, float] = ("", 0.0)  # the wait, and when to warn of it

    # What happened.

    def expect(self, worker: int, host: str, joiner: bool, now: float) -> list[Action]:
        """A process is about to be started as this worker."""
        self._workers[worker] = Worker(worker, host, joiner, synced=not joiner)
        if self._start_by is None:
            self._start_by = now + self._limits.start_timeout
        return self._settle(now)

    def received(self, worker: int, message: Message, now: float) -> list[Action]:
        """A living worker sent this message, which is well-formed."""
        one = self._workers.get(worker)
        if one is not None and self.phase is not Phase.OVER:
            kind = message["kind"]
            if kind == "ready":
                self._ready(one, message, now)
            elif kind == "connected":
                if self.phase is Phase.FORMING and message["epoch"] == self.epoch:
                    one.clock = message["clock"]
            elif kind == "unreachable":
                self._unreachable(one, message, now)
            elif kind == "bye":
                self._report(message)
                self._finished(one, "finished", now)
        return self._settle(now)

    def ended(self, worker: int, why: str, clean: bool, now: float) -> list[Action]:
        """The process of a worker has ended; `clean` if it exited with 0 or was drained."""
        why = f"ended with {why}" if why.startswith("exit status") else why
        lost, _ = self._unburied.pop(worker, (None, 0.0))
        one = self._workers.get(worker)
        if lost is not None:
            self._learn(lost, why, clean)
        elif one is not None and clean:
            self._finished(one, why, now)
        elif one is not None:
            self._remove(one, Change(one.name, why, worker), now)
        return self._settle(now)

    def connection_lost(self, worker: int, now: float) -> list[Action]:
        """The connection of a worker ended; without BYE before it, this is its death."""
        one = self._workers.get(worker)
        if one is not None:
            self._unburied[worker] = (one, now + self._limits.heartbeat)
            self._remove(one, Change(one.name, _LOST_CONNECTION, worker), now)
        return self._settle(now)

    def heartbeat_lost(self, worker: int, now: float) -> list[Action]:
        """A connected worker has said nothing for the heartbeat and half a second."""
        silence = self._limits.heartbeat + SILENT_SECONDS
        return self.evict(worker, f"sent nothing for {silence:g} s", now)

    def drain(self, worker: int, why: str, now: float) -> list[Action]:
        """A worker shall leave at the next boundary."""
        one = self._workers.get(worker)
        if one is not None and one.draining is None:
            one.draining = why
            if one in self._waiting():
                self._leave(one)
        return self._settle(now)

    def evict(self, worker: int, why: str, now: float) -> list[Action]:
        """A verdict: this worker is not a member any more, and is to be killed."""
        one = self._workers.get(worker)
        if one is not None:
            self._evict(one, why, now)
        return self._settle(now)

    def tick(self, now: float) -> list[Action]:
        """The time has come that `wake_at` named, or any other time."""
        return self._settle(now)

    def wake_at(self) -> float | None:
        """Return when `tick` must be called if nothing happens before; None for never."""
        if self.phase is Phase.OVER:
            return None
        times = [when for _, when in self._unburied.values()]
        times += [self._warned[1]] if self._warned[0] else []
        later = [self._gather_at, self._accusations.verdict_at, self._give_up_at()]
        times += [when for when in later if when is not None]
        # What was due at the last settling was either done, or it waits for something else.
        return min((when for when in times if when > self._now), default=None)

    def knows(self, worker: int) -> bool:
        """Return whether this worker was announced and still lives."""
        return worker in self._workers

    # What workers say.

    def _ready(self, one: Worker, message: Message, now: float) -> None:
        self._report(message)
        one.tells_heard = "heard" in message
        if one.joiner and "synced" in message:
            one.tells_synced, one.synced = True, message["synced"]
        if one not in self.members:
            self._arrived(one, message)
            return
        if self.phase is not Phase.FORMING and message.get("accused") is not None:
            self._accusations.add(one.number, message["accused"], message["reason"], now)
        if message.get("heard", one.asked) < one.asked:
            return  # It crossed a GATHER, whose answer will come.
        if message["why"] != "lost":
            self._came(one, message, now)
        elif self.phase is Phase.GATHERING:
            self._parked(one, message)
        elif self.phase is Phase.FORMED and message["epoch"] == self._formed:
            self._parked(one, message)
            self._break(now, now)

    def _arrived(self, one: Worker, message: Message) -> None:
        """A worker is ready to start or to join, or repeats it."""
        one.place, one.offer = Place.WAITING, message["offer"]
        if not one.joiner:
            return
        if one.draining is not None:
            self._leave(one)
        elif self._world:
            different = next(filter(None, (mismatch(one, w) for w in self.members[:1])), None)
            if different:
                reason = f"{different}; give every worker the same settings"
                self._send(one, {"kind": "refused", "reason": reason})
                self._out += [Close(one.number), Refused(one.number, reason)]
                del self._workers[one.number]

    def _came(self, one: Worker, message: Message, now: float) -> None:
        """A member is at a boundary, or says so again."""
        if self.phase is Phase.FORMING and self._mode != "resume":
            return  # It waits at this boundary for the epoch; this READY is an older one.
        if not self._entered:
            self._entered = True
            self._out.append(Entered())
        one.place, one.stuck = Place.BOUNDARY, None
        one.offer = message["offer"]
        self._sign = now if self._sign is None else self._sign
        if message.get("restored") and not one.restored:
            one.restored = True
            why = f"restored its last commit: {message['reason'] or 'an error'}"
            self._symptom = self._symptom or Change(one.name, why)
            if self.phase is Phase.FORMED:
                self._gather_by(now + _RESTORED_SECONDS)

    def _parked(self, one: Worker, message: Message) -> None:
        one.place, one.offer = Place.PARKED, message["offer"]
        one.stuck = message.get("stuck")
        if self._symptom is None:
            self._symptom = Change(one.name, f"lost its world: {message['reason'] or 'unknown'}")

    def _unreachable(self, one: Worker, message: Message, now: float) -> None:
        if message["epoch"] != self.epoch or one not in self.members:
            return
        accused = next((w for w in self.members if w.number == message["worker"]), None)
        if self.phase not in (Phase.FORMING, Phase.GATHERING) or accused is None:
            return
        why = f"cannot reach {accused.name}: {message['reason']}"
        self._accusations.add(one.number, accused.number, why, now)
        self._symptom = self._symptom or Change(one.name, why)
        if self.phase is Phase.FORMING:
            self._break(now, now)

    def _report(self, message: Message) -> None:
        """Note what a worker has handed out: the cut is never below it.

        Reports of workers that die afterwards count, too. Who completed a commit knows that all
        members have executed what is in it, so the others can hand it out.
        """
        commits: Mapping[str, int] = message.get("commits") or {}
        for name, count in commits.items():
            self._cut[name] = max(count, self._cut.get(name, count))
        if "steps" in message:
            self._steps = max(message["steps"], self._steps or 0)

    # Who goes.

    def _finished(self, one: Worker, why: str, now: float) -> None:
        """A worker ended without an error: nobody takes its place, unless it was drained."""
        drained = one.draining is not None
        if not drained and (one in self.members or self._formed < 0):
            self._growing = False
        change = Change(
            one.name,
            f"left: {one.draining}" if drained else why,
            one.number,
            trouble=False,
            counts=drained,
        )
        self._remove(one, change, now)

    def _learn(self, lost: Worker, why: str, clean: bool) -> None:
        """The end of a worker that had lost its connection tells more."""
        drained = clean and lost.draining is not None
        known = any(change.worker == lost.number for change in self._changes)
        if clean and not drained and known:
            self._growing = False
        self._changes = [
            Change(lost.name, why, lost.number, trouble=not clean, counts=drained or not clean)
            if change.worker == lost.number
            else change
            for change in self._changes
        ]

    def _remove(self, one: Worker, change: Change, now: float) -> None:
        del self._workers[one.number]
        if one in self.members:
            self.members.remove(one)
        elif one.joiner:
            return
        self._changes.append(change)
        self._accusations.dismiss()
        self._notices.deal_anew = self._entered
        self._break(now, now if change.trouble or change.counts else now + _FAREWELL_SECONDS)

    def _evict(self, one: Worker, why: str, now: float) -> None:
        self._out += [Evict(one.number, why), Close(one.number)]
        self._remove(one, Change(one.name, f"was evicted: {why}", one.number), now)

    def _leave(self, one: Worker) -> None:
        self._send(one, {"kind": "leave"})
        self._out.append(Leaving(one.number))
        del self._workers[one.number]
        if one in self.members:
            self.members.remove(one)
            self._whole = False
            why = f"left: {one.draining}"
            self._changes.append(Change(one.name, why, one.number, trouble=False))

    def _break(self, now: float, gather_at: float) -> None:
        self._whole = False
        self._sign = now if self._sign is None else self._sign
        self._gather_by(gather_at)

    def _gather_by(self, when: float) -> None:
        self._gather_at = when if self._gather_at is None else min(when, self._gather_at)

    # What follows.

    def _settle(self, now: float) -> list[Action]:
        self._now = now
        for number, (one, due) in list(self._unburied.items()):
            if now >= due:
                del self._unburied[number]
                self._out.append(Evict(one.number, _LOST_CONNECTION))
        while self._step(now):
            pass
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
            self._fail(self._why_given_up())
        elif self._formed < 0 and self._changes:
            return self._start_without()
        elif self.phase is Phase.STARTING:
            return self._start()
        elif self.phase is not Phase.DONE and not self.members:
            return self._finish()
        elif not self._growing and self._dismiss_joiners():
            return True
        elif self.phase is Phase.FORMED:
            return self._watch(now)
        elif self.phase is Phase.GATHERING:
            return self._answers(now)
        elif self.phase is Phase.FORMING:
            return self._connections(now)
        return False

    def _start(self) -> bool:
        first = [one for one in self._workers.values() if not one.joiner]
        if len(first) < self._limits.np or any(one.place is not Place.WAITING for one in first):
            return False
        self._announce("start", sorted(first, key=lambda one: one.number), sync=False)
        return True

    def _start_without(self) -> bool:
        """Fail if a worker has gone before the first epoch was formed, unless all just end."""
        if self._unburied:
            return False  # Its end is about to tell why.
        waiting = any(one.place is not Place.STARTING for one in self._workers.values())
        trouble = [change for change in self._changes if change.trouble]
        if trouble or waiting:
            change = (trouble or self._changes)[0]
            self._fail(f"{change.text} before all workers were connected")
        elif not self._workers:
            self.phase = Phase.DONE
        else:
            return False
        return True

    def _finish(self) -> bool:
        """No member is left: the job is done, or has failed."""
        if self._unburied:
            return False  # Their ends are about to tell whether they failed.
        trouble = [change for change in self._changes if change.trouble]
        if trouble:
            self._fail(f"no worker is left; the first that went: {trouble[0].text}")
        elif self._growing:
            self._fail(f"no worker is left: {self._reason()}")
        else:
            self.phase = Phase.DONE
        return True

    def _dismiss_joiners(self) -> bool:
        waiting = self._waiting()
        for one in waiting:
            one.draining = one.draining or "the job is ending"
            self._leave(one)
        return bool(waiting)

    def _watch(self, now: float) -> bool:
        """FORMED: all members at a boundary, or something that ends the epoch."""
        if all(one.place is Place.BOUNDARY for one in self.members):
            return self._boundary(now)
        if self._gather_at is None or now < self._gather_at:
            return False
        self._gather()
        return True

    def _gather(self) -> None:
        """Tell all members to park, and wait for their answers."""
        asked = self.epoch + 1
        gone = [
            [change.worker, change.why] for change in self._changes if change.worker is not None
        ]
        for one in self.members:
            # Who has parked by itself and cannot say which GATHER it answers has answered already.
            early = self.phase is Phase.FORMED and one.place is Place.PARKED
            if one.tells_heard or not early:
                one.place = Place.RUNNING
            one.asked = asked
            reason = self._reason()
            self._send(one, {"kind": "gather", "epoch": asked, "gone": gone, "reason": reason})
        self.phase = Phase.GATHERING
        self._gather_at = None

    def _answers(self, now: float) -> bool:
        """GATHERING: decide once all members have answered."""
        if not all(one.answered for one in self.members):
            return False
        accused = self._accusations.worst({one.number for one in self.members})
        if accused is not None and self._accusations.verdict_at is not None:
            if now < self._accusations.verdict_at:
                return False
            worker, why = accused
            self._evict(self._workers[worker], why, now)
            return True
        parked = [one for one in self.members if one.place is Place.PARKED]
        if not parked:
            return self._boundary(now)
        if not any(one.synced for one in self.members):
            self._fail(f"no worker is left that has the state of the job: {self._reason()}")
        elif len(parked) < len(self.members) or self._hopeless(parked):
            self._call_to_boundary(parked)
        elif self._worth_it():
            self._announce("resume", self.members, sync=False)
        return True

    def _hopeless(self, parked: list[Worker]) -> bool:
        """Return whether the collectives of parked members cannot be redone."""
        self._restoring = (
            self._restoring
            or any(one.stuck is not None for one in parked)
            or any(one.restored for one in self.members)
        )
        return self._restoring

    def _call_to_boundary(self, parked: list[Worker]) -> None:
        stuck = next((one.stuck for one in parked if one.stuck is not None), None)
        if self._hopeless(parked):
            message: Message = {"kind": "restore", "reason": stuck or self._reason()}
        else:
            message = {"kind": "cut", "cut": dict(self._cut)}
        for one in parked:
            one.place = Place.COMING
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
        if restored and self._symptom is not None and not self._changes:
            self._changes.append(self._symptom)
        if self._whole and not planned.joiners:
            if not restored or self._worth_it():
                self._continue(sync)
        elif planned.joiners or self._worth_it():
            self._announce("boundary", members, sync)
        return True

    def _continue(self, sync: bool) -> None:
        """All are at a boundary, and the engine stays."""
        for one in self.members:
            one.place, one.fresh, one.restored = Place.RUNNING, False, False
            one.synced = one.synced or not one.tells_synced
            self._send(one, {"kind": "continue", "epoch": self._formed, "sync": sync})
        self._notices.begin(at_boundary=True)
        self._patience.formed(counts=False)
        self._forget()

    def _announce(self, mode: str, members: list[Worker], sync: bool) -> None:
        """Tell the members of the next epoch about each other; they connect."""
        self.epoch += 1
        self.members = list(members)
        self._mode = mode
        self._gather_at = self._short_since = None
        self._accusations.begin()
        common = {
            "kind": "epoch",
            "epoch": self.epoch,
            "members": [[one.number, one.offer] for one in members],
            "cut": dict(self._cut) if mode == "resume" else {},
            "mode": mode,
            "sync": sync,
            "reason": self._reason(),
        }
        for rank, one in enumerate(members):
            one.clock = None
            if mode == "boundary":
                one.place = Place.BOUNDARY  # A joiner waits there, too.
            self._send(one, {**common, "rank": rank})
        self.phase = Phase.FORMING

    def _connections(self, now: float) -> bool:
        """FORMING: all members are connected, or one of them has gone."""
        if self._gather_at is not None:
            if self._formed < 0:
                symptom = self._symptom
                self._fail(symptom.text if symptom else "the workers cannot connect")
            else:
                self._gather()
            return True
        if any(one.clock is None for one in self.members):
            return False
        clocks = [one.clock for one in self.members]
        for one in self.members:
            self._send(one, {"kind": "go", "epoch": self.epoch, "clocks": clocks})
        self._formed_now(now)
        return True

    def _formed_now(self, now: float) -> None:
        line = self._line(now)
        workers = tuple(one.number for one in self.members)
        self._out.append(EpochFormed(self.epoch, workers, line))
        counts = self._formed >= 0 and (
            not self._changes or any(change.counts for change in self._changes)
        )
        self._patience.formed(counts)
        for one in self.members:
            if self._mode != "resume" or one.place is not Place.BOUNDARY:
                one.place = Place.RUNNING
            if self._mode == "boundary":
                one.fresh = one.restored = False
                one.synced = one.synced or not one.tells_synced
        self._formed = self.epoch
        self._world = frozenset(workers)
        self.phase = Phase.FORMED
        self._notices.begin(at_boundary=self._mode != "resume")
        self._forget()

    def _forget(self) -> None:
        """Begin an epoch, or go on in it, with nothing to hold against it."""
        self._whole, self._changes, self._symptom = True, [], None
        self._cut, self._steps, self._sign = {}, None, None
        self._gather_at, self._restoring, self._short_since = None, False, None
        self._accusations.begin()

    def _worth_it(self) -> bool:
        """Return whether another epoch is worth it; fail if it is not."""
        if self._changes and not any(change.counts for change in self._changes):
            return True
        trouble = not self._changes or any(change.trouble for change in self._changes)
        complaint = self._patience.judge(self._cut, self._steps, self._reason(), trouble)
        if complaint:
            self._fail(complaint)
        return complaint is None

    def _fail(self, reason: str) -> None:
        self._out.append(Failed(reason))
        self.phase = Phase.OVER

    # What the user and the members are told.

    def _waiting(self) -> list[Worker]:
        waiting = [
            one
            for one in self._workers.values()
            if one.joiner and one.place is Place.WAITING and one not in self.members
        ]
        return sorted(waiting, key=lambda one: one.number)

    def _send(self, one: Worker, message: Message) -> None:
        self._out.append(Send(one.number, message))

    def _notify(self) -> None:
        if self.phase is not Phase.FORMED or not (self._entered and self._whole):
            return
        due = self._notices.due(self._limits, self.members, self._waiting(), self._growing)
        if due is not None:
            version, removed = due
            for one in self.members:
                self._send(one, {"kind": "notice", "version": version, "removed": removed})

    def _reason(self) -> str:
        """Say why the next epoch follows."""
        texts = [change.text for change in self._changes]
        if not texts and self._symptom is not None:
            texts = [self._symptom.text]
        if self._world:
            joined = [one for one in self.members if one.number not in self._world]
            texts += [f"{one.name} joined" for one in joined]
        return listed(texts, "; ")

    def _line(self, now: float) -> str:
        count = len(self.members)
        ranks = "1 rank" if count == 1 else f"{count} ranks"
        if self._formed < 0:
            return f"epoch {self.epoch}: {ranks} start{'s' if count == 1 else ''}"
        verb = "goes" if count == 1 else "go"
        took = 1000 * (now - (now if self._sign is None else self._sign))
        return f"epoch {self.epoch}: {self._reason()}; {ranks} {verb} on after {took:.0f} ms"

    def _give_up_at(self) -> float | None:
        if self._formed < 0 and self._start_by is not None:
            return None if is_never(self._limits.start_timeout) else self._start_by
        if self._short_since is None or is_never(self._limits.elastic_timeout):
            return None
        return self._short_since + self._limits.elastic_timeout

    def _why_given_up(self) -> str:
        if self._formed >= 0:
            return (
                f"{len(self.members)} workers have waited at a boundary for --elastic-timeout "
                f"({self._limits.elastic_timeout:g} s), and --min-np is {self._limits.min_np}"
            )
        return (
            f"{self._limits.np} workers were not connected within --start-timeout "
            f"({self._limits.start_timeout:g} s): {self._wait()}"
        )

    def _wait(self) -> str:
        """Say for whom or what the job waits; "" if it does not."""
        if self.phase is Phase.STARTING:
            first = [one for one in self._workers.values() if not one.joiner]
            late = [one for one in first if one.place is not Place.WAITING]
            return f"waits for {named(late)} to call hvd.init()" if late else ""
        if self.phase is Phase.FORMING:
            late = [one for one in self.members if one.clock is None]
            return f"epoch {self.epoch} waits for {named(late)} to connect" if late else ""
        if self._short_since is not None:
            count = len(self.members)
            return f"{count} of at least {self._limits.min_np} workers wait for others to join"
        late = [one for one in self.members if not one.answered]
        if self.phase is Phase.GATHERING:
            coming = any(one.place is Place.COMING for one in late)
            what = "come to the boundary" if coming else "stop the epoch that has ended"
            return f"waits for {named(late)} to {what}" if late else ""
        if self.phase is Phase.FORMED and len(late) < len(self.members):
            return f"a boundary waits for {named(late)}"
        return ""

    def _warn(self, now: float) -> None:
        """Every 10 s say for whom the job waits."""
        wait = "" if self.phase is Phase.OVER else self._wait()
        text, when = self._warned
        if wait != text:
            self._warned = (wait, now + _WARN_SECONDS)
        elif wait and now >= when:
            self._out.append(Warn(wait))
            self._warned = (wait, now + _WARN_SECONDS)
