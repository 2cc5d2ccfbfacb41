"""Which workers make up the world of each epoch of an elastic job: a pure state machine.

It has no clock, no socket and no thread: each method takes what happened and the time, and returns
what to do. What happened only changes the state. All decisions are made from the state alone, in
`_settle`, so they do not depend on the order in which things happened.

    STARTING   the first workers become ready; one that is killed here, or in the first FORMING, is
               replaced, and a script that fails fails the job
    FORMED     the members of an epoch train
    GATHERING  the world broke; each member suspends its engine and says READY, or is at a boundary
    FORMING    the members of the next epoch connect
    DONE       all workers have finished; joiners that are still to come are asked to leave
    OVER       the job has failed

Messages cross: a worker may say READY at the moment when GATHER is sent to it. A READY that says
by `heard` which GATHER it answers is not taken for the answer to a later one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hvdlite.launch.elastic import messages
from hvdlite.launch.elastic.messages import Action, Limits, Message
from hvdlite.launch.elastic.state import (
    Change,
    Formed,
    Phase,
    Record,
    Stage,
    Worker,
    mismatch,
    named,
)
from hvdlite.launch.elastic.verdicts import BrokenLinks, Notices, Progress
from hvdlite.rendezvous.deadline import is_never

_FAREWELL_SECONDS = 0.3  # from a worker's clean end to a new epoch, as others may be ending, too
_EXPLAINED_SECONDS = 0.25  # usually, from the end of a connection, or a goodbye, to the process's
_WARN_SECONDS = 10.0  # from the beginning of a wait to a warning, and to the next one
LOST_CONNECTION = "lost its connection to the launcher"


class Membership:
    """The state machine; a public method for each thing that happens."""

    def __init__(self, limits: Limits) -> None:
        self.phase = Phase.STARTING  # what the job does
        self.epoch = -1  # the last one that was announced; -1 before the first
        self.members: list[Worker] = []  # Its living members, in the order of their ranks.
        self._limits = limits
        self._workers: dict[int, Worker] = {}  # all that live
        self._departed: dict[int, Worker] = {}  # gone, but for their processes
        self._out: list[Action] = []
        self._now = 0.0
        # The epoch that was formed last.
        self._formed = -1
        self._world: frozenset[int] = frozenset()
        self._record = Record()
        self._last: Formed | None = None  # the epoch before is to be shown
        # What comes next.
        self._mode = "start"
        self._gather_at: float | None = None
        self._restoring = False
        self._short_since: float | None = None  # when a boundary began to wait for joiners
        self._broken_links = BrokenLinks()
        # The whole job.
        self._start_by: float | None = None
        self._script_fails = False  # whether a worker has failed, and was not killed
        self._entered = False
        self._growing = True
        self._stops = False  # whether all workers are asked to stop
        self._notices = Notices()
        self._progress = Progress(limits.reset_limit)
        self._waits_for = ""  # for whom the job waits, as `_wait` says
        self._warn_at: float | None = None  # when to warn of that; None if it does not wait

    def wake_at(self) -> float | None:
        """Return when `tick` must be called if nothing happens before; None for never."""
        if self.phase is Phase.OVER:
            return None
        times = [one.end_due for one in self._departed.values() if one.end_due < math.inf]
        times += [self._last.at + _EXPLAINED_SECONDS] if self._last is not None else []
        others = [self._gather_at, self._broken_links.verdict_at, self._give_up_at()]
        others += [self._warn_at, self._notices.complete_at]
        # What was due at the last settling was either done, or it waits for something else.
        return min((at for at in [*times, *others] if at and at > self._now), default=None)

    def knows(self, worker: int) -> bool:
        return worker in self._workers

    def expect(self, worker: int, host: str, joiner: bool, now: float) -> list[Action]:
        """A process is about to be started as this worker."""
        one = Worker(worker, host, joiner, synced=not joiner, expected_at=now)
        self._workers[worker] = one
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
                    one.connected, one.clock = True, message["clock"]
            elif kind == "unreachable":
                self._unreachable(one, message, now)
            elif kind == "raised":
                self._raised(one, message["what"], now)
            elif kind == "drain":
                if one.draining is None and not self._stops:
                    one.wishes = True
                    self._drain(one, message["why"])
            elif kind == "bye":
                self._record.report(message)
                self._depart(one, _left(one, "left"), now)
                self._out.append(messages.Goodbye(worker))
        return self._settle(now)

    def ended(self, worker: int, why: str, clean: bool, now: float) -> list[Action]:
        """The process of a worker has ended; `clean` if it exited with 0 or was drained."""
        departed = self._departed.pop(worker, None)
        one = self._workers.get(worker)
        if departed is not None and departed.raised:
            why = departed.raised
            self._script_fails = True
        elif why.startswith("exit status"):
            why = f"ended with {why}"
            self._script_fails |= not clean
        if departed is not None:
            self._learn(departed, why, clean, now)
        elif one is not None and clean:
            self._stop_growing(one, one in self.members)
            self._remove(one, _left(one, why), now)
        elif one is not None:
            self._remove(one, Change(one.name, why, worker), now)
        return self._settle(now)

    def connection_lost(self, worker: int, now: float) -> list[Action]:
        """The connection of a worker ended; without BYE before it, this is its death."""
        one = self._workers.get(worker)
        if one is not None:
            change = Change(one.name, LOST_CONNECTION, worker)
            self._depart(one, change, now, now + self._limits.heartbeat)
        return self._settle(now)

    def drain(self, worker: int, why: str, now: float) -> list[Action]:
        """This worker is to leave at the next boundary."""
        one = self._workers.get(worker)
        if one is not None:
            self._drain(one, why)
        return self._settle(now)

    def stops(self, now: float) -> list[Action]:
        """All workers are asked to stop: none joins, and none leaves by its own wish before."""
        self._stops, self._growing = True, False
        for one in self._workers.values():
            if one.wishes:
                one.draining, one.wishes = None, False
        return self._settle(now)

    def evict(self, worker: int, why: str, now: float) -> list[Action]:
        """A verdict: this worker is not a member any more, and is to be killed."""
        one = self._workers.get(worker)
        if one is not None:
            self._evict(one, why, now)
        return self._settle(now)

    def tick(self, now: float) -> list[Action]:
        return self._settle(now)

    # What workers say.

    def _ready(self, one: Worker, message: Message, now: float) -> None:
        if one.number in self._world and message["epoch"] != self._formed:
            # It crossed GO: the loss and the commits are of a former epoch, the boundary is not.
            if message["why"] == "lost":
                return
        else:
            self._record.report(message)
        if one.joiner:
            one.synced = message["synced"]
        if one not in self.members:
            if message["heard"] >= one.asked:
                self._arrived(one, message, now)
            return
        if self.phase is not Phase.FORMING and message.get("suspect") is not None:
            self._broken_links.add(one.number, message["suspect"], message.get("reason", ""), now)
        if message["heard"] < one.asked:
            return  # It crossed a GATHER, whose answer will come.
        if message["why"] != "lost":
            self._came(one, message, now)
        elif self.phase is Phase.GATHERING:
            self._suspended(one, message)
        elif self.phase is Phase.FORMED:
            self._suspended(one, message)
            self._record.whole = False  # A link broke, or one of the next world was not made.
            self._record.sign(now)
            self._gather_by(now)

    def _arrived(self, one: Worker, message: Message, now: float) -> None:
        """A worker is ready to start or to join, or repeats it."""
        if one.stage is Stage.STARTING:
            one.ready_at = now
        one.stage, one.endpoint = Stage.WAITING, message["endpoint"]
        if not one.joiner:
            return
        if one.draining is not None:
            self._leave(one)
        elif self._world:
            different = mismatch(one, self.members[0]) if self.members else None
            if different:
                reason = f"{different}; give every worker the same settings"
                self._send(one, {"kind": "refused", "reason": reason})
                self._out.append(messages.Refused(one.number, reason))
                del self._workers[one.number]

    def _came(self, one: Worker, message: Message, now: float) -> None:
        """A member is at a boundary, or says so again."""
        if self.phase is Phase.FORMING and self._mode != "resume":
            return  # It waits at this boundary for the epoch; this READY is an older one.
        if not self._entered:
            self._entered = True
            self._out.append(messages.Entered())
        one.stage, one.stuck = Stage.BOUNDARY, None
        one.endpoint = message["endpoint"]
        self._record.sign(now)
        if message.get("restored") and not one.restored:
            one.restored = True
            why = f"restored its last commit: {message.get('reason') or 'an error'}"
            self._record.symptom(one.name, why)

    def _suspended(self, one: Worker, message: Message) -> None:
        one.stage, one.endpoint = Stage.SUSPENDED, message["endpoint"]
        one.stuck = message.get("stuck")
        self._record.symptom(one.name, f"lost its world: {message.get('reason') or 'a link broke'}")

    def _unreachable(self, one: Worker, message: Message, now: float) -> None:
        if message["epoch"] != self.epoch or one not in self.members:
            return
        suspect = next((w for w in self.members if w.number == message["worker"]), None)
        silent = message.get("silent", False)
        # After GATHER members hang up to each other. Before the first epoch a death may explain it.
        counts = self.phase is Phase.FORMING or (silent and self.phase is Phase.GATHERING)
        if suspect is None or not counts:
            return
        why = f"cannot reach {suspect.name}: {message.get('reason', '')}"
        self._broken_links.add(one.number, suspect.number, why, now, anew=True, mutual=silent)
        self._record.symptom(one.name, why)
        self._record.sign(now)

    # Who goes.

    def _remove(self, one: Worker, change: Change, now: float) -> None:
        del self._workers[one.number]
        if one in self.members:
            self.members.remove(one)
        elif one.joiner:
            return
        self._record.went(change, now)
        if change.trouble:
            self._out.append(messages.Went(one.number, now))
        self._broken_links.explain()
        self._notices.deal_anew = self._entered
        self._gather_by(now if change.counts else now + _FAREWELL_SECONDS)

    def _evict(self, one: Worker, why: str, now: float) -> None:
        self._out.append(messages.Evict(one.number, why))
        self._remove(one, Change(one.name, f"was evicted: {why}", one.number), now)

    def _leave(self, one: Worker) -> None:
        self._send(one, {"kind": "leave"})
        self._out.append(messages.Leaving(one.number))
        del self._workers[one.number]
        if one in self.members:
            self.members.remove(one)
            change = Change(one.name, f"left: {one.draining}", one.number, trouble=False)
            self._record.went(change, self._now)

    def _gather_by(self, when: float) -> None:
        self._gather_at = when if self._gather_at is None else min(when, self._gather_at)

    def _drain(self, one: Worker, why: str) -> None:
        if one.draining is None:
            one.draining = why
            if one in self._waiting():
                self._leave(one)

    def _raised(self, one: Worker, what: str, now: float) -> None:
        """The script of a worker has failed; its process may take a while to end."""
        # Its membership thread still answers, perhaps for long: Python waits for the script's other
        # threads.
        one.raised = what
        self._out.append(messages.Raised(one.number, what))
        self._depart(one, Change(one.name, what, one.number), now)

    def _depart(self, one: Worker, change: Change, now: float, due: float = math.inf) -> None:
        """Only the process of a worker is left; its end will tell more."""
        one.was_member = one in self.members or not one.joiner
        one.departed_at, one.end_due = now, due
        self._departed[one.number] = one
        self._remove(one, change, now)

    def _learn(self, one: Worker, why: str, clean: bool, now: float) -> None:
        """The process of a worker that had departed has ended, which tells how it departed."""
        # A script that raises says goodbye, too, before its process ends. Who is killed after a
        # goodbye has finished its work.
        trouble = not clean and (one.end_due < math.inf or why.startswith("ended with"))
        trouble = trouble or bool(one.raised)
        drained = clean and one.draining is not None
        if drained:
            why = f"left: {one.draining}"
        elif clean and one.end_due == math.inf:
            why = "finished"
        if clean:
            self._stop_growing(one, one.was_member)
        elif one.was_member:
            self._out.append(messages.Went(one.number, one.departed_at))
        if self._last is not None:
            self._last.record.learn(one.number, why, trouble, counts=drained or not clean)
        known = self._record.learn(one.number, why, trouble, counts=drained or not clean)
        if known and not clean and self.phase is Phase.FORMED:
            self._gather_by(now)

    def _stop_growing(self, one: Worker, member: bool) -> None:
        """A process has ended well: if the script is done, nobody takes its place."""
        if one.draining is None and (member or not one.joiner):
            self._growing = False

    # What follows.

    def _settle(self, now: float) -> list[Action]:
        self._now = now
        for number, departed in list(self._departed.items()):
            if now >= departed.end_due:
                del self._departed[number]
                self._out.append(messages.Evict(number, LOST_CONNECTION))
        self._show_if_explained(now)
        while self._step(now):
            pass
        self._show_if_explained(now)
        self._notify()
        self._warn_of_wait(self._wait(), now)
        out, self._out = self._out, []
        return out

    def _warn_of_wait(self, wait: str, now: float) -> None:
        if wait == self._waits_for and (self._warn_at is None or now < self._warn_at):
            return
        if wait == self._waits_for and self.phase is not Phase.OVER:
            self._out.append(messages.Warn(wait))
        self._waits_for, self._warn_at = wait, now + _WARN_SECONDS if wait else None

    def _step(self, now: float) -> bool:
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
        first = self._first()
        if len(first) < self._limits.np or any(one.stage is not Stage.WAITING for one in first):
            return False
        self._announce("start", first, sync=False)
        return True

    def _first(self) -> list[Worker]:
        found = [one for one in self._workers.values() if not one.joiner]
        return sorted(found, key=lambda one: one.number)

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
            self._out += [
                messages.Warn(f"{change.text}, and is replaced before the first step"),
                messages.Replace(),
            ]
        for one in self.members:
            one.stage, one.asked = Stage.STARTING, self.epoch + 1
            self._send(one, {"kind": "gather", "epoch": one.asked, "gone": [], "reason": ""})
        self.members, self.phase, self._gather_at = [], Phase.STARTING, None
        self._record = Record()
        self._broken_links.begin()

    def _start_without(self) -> bool:
        """Before the first epoch a worker has gone: replace it, or fail, unless all just end."""
        if any(one.was_member for one in self._departed.values()):
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
        if any(one.was_member for one in self._departed.values()):
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
        suspect = self._broken_links.worst({one.number for one in self.members})
        if suspect is not None:
            if not self._broken_links.due(now):
                return False
            worker, why = suspect
            self._evict(self._workers[worker], why, now)
            return True
        suspended = [one for one in self.members if one.stage is Stage.SUSPENDED]
        if not suspended:
            return self._boundary(now)
        if not any(one.synced for one in self.members):
            self._fail(f"no worker is left that has the state of the job: {self._reason()}")
        elif len(suspended) < len(self.members) or self._hopeless():
            self._call_to_boundary(suspended)
        elif self._too_few_in_place():
            return self._waits_for_more(now)
        elif self._short_since is not None and self._gather_at is not None:
            self._short_since = None
            self._gather()  # A member has gone meanwhile, which may make others stuck.
        elif self._worth_it():
            self._announce("resume", self.members, sync=False)
        return True

    def _waits_for_more(self, now: float) -> bool:
        """Begin or go on to wait for joiners; return whether the time for that is over already."""
        self._short_since = now if self._short_since is None else self._short_since
        return self._give_up_at() == now

    def _too_few_in_place(self) -> bool:
        """Return whether the step must wait: with those that wait to join there are too few."""
        # Those wait already who join at the boundary to which a notice calls before GO. Before the
        # workers have entered `hvd.elastic.run` there is no training, and nobody can join.
        if not (self._entered and self._growing):
            return False
        return len(self.members) + len(self._fitting(self._waiting())) < self._limits.min_np

    def _hopeless(self) -> bool:
        """Return whether the collectives of suspended members cannot be redone."""
        stuck = (one.stage is Stage.SUSPENDED and one.stuck is not None for one in self.members)
        self._restoring |= any(stuck) or any(one.restored for one in self.members)
        return self._restoring

    def _call_to_boundary(self, suspended: list[Worker]) -> None:
        stuck = next((one.stuck for one in suspended if one.stuck is not None), None)
        if self._hopeless():
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
        leavers, joiners, missing = self._plan()
        for one in leavers:
            self._leave(one)
        if missing:
            return self._waits_for_more(now) or bool(leavers)
        members = sorted(self.members, key=lambda one: not one.synced) + joiners
        sync = any(one.fresh or one.restored or not one.synced for one in members)
        restored = [one for one in members if one.restored]
        if restored:
            self._record.accept_symptom()
        stays = self._record.whole and not joiners
        if (stays and not restored) or self._worth_it(joiners):
            if stays:
                self._continue(sync)
            else:
                self._announce("boundary", members, sync)
        return True

    def _plan(self) -> tuple[list[Worker], list[Worker], int]:
        """Say who leaves in any case, who joins if the others go on, and how many are missing."""
        # A member that shall leave stays as long as nobody else has the job's state: it first hands
        # the state over, in an epoch with joiners, or another one if a joiner has died. A job that
        # does not grow any more, because some worker has finished, goes on with any number.
        staying = [one for one in self.members if one.draining is None]
        joiners = self._fitting(self._waiting())
        if not any(one.synced for one in staying):
            return [], joiners, 0 if staying or joiners or not self._growing else 1
        leavers = [one for one in self.members if one.draining is not None]
        short = self._limits.min_np - len(staying) - len(joiners) if self._growing else 0
        return leavers, joiners, max(0, short)

    def _fitting(self, waiting: list[Worker]) -> list[Worker]:
        """Return those of the joiners, in their order, for whom there is room at a boundary."""
        if not self._growing or self._limits.max_np is None:
            return waiting if self._growing else []
        staying = sum(one.draining is None for one in self.members)
        return waiting[: max(0, self._limits.max_np - staying)]

    def _continue(self, sync: bool) -> None:
        """All are at a boundary, and the engine stays."""
        for one in self.members:
            one.stage, one.fresh, one.restored = Stage.RUNNING, False, False
            self._send(one, {"kind": "continue", "epoch": self._formed, "sync": sync})
        self._notices.begin(at_boundary=True)
        self._progress.formed(counts=False)
        self._forget()

    def _announce(self, mode: str, members: list[Worker], sync: bool) -> None:
        """Tell the members of the next epoch about each other; they connect."""
        self._show()
        self.epoch += 1
        self.members = list(members)
        self._mode = mode
        self._gather_at = self._short_since = None
        self._broken_links.begin()
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
        if self._gather_at is not None or self._broken_links.due(now):
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
        self._out.append(messages.EpochBegun(workers))
        self._last = Formed(self.epoch, workers, self._joined(), self._record, now)
        counts = not self._record.quiet or bool(self._joined())
        self._progress.formed(counts=self._formed >= 0 and counts)
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
        self._broken_links.forget()

    def _worth_it(self, joiners: Sequence[Worker] = ()) -> bool:
        record = self._record
        if record.quiet and not joiners:
            return True
        trouble = record.trouble is not None or not (record.whole or record.changed)
        reason = record.reason(joiners)
        complaint = self._progress.judge(record.commit_point, record.steps, reason, trouble)
        if complaint:
            self._fail(complaint)
        return complaint is None

    def _fail(self, reason: str) -> None:
        self._show()
        self._out.append(messages.Failed(reason))
        self.phase = Phase.OVER

    # What the user and the members are told.

    def _show(self) -> None:
        if self._last is not None:
            self._out.append(self._last.event())
            self._last = None

    def _show_if_explained(self, now: float) -> None:
        """Show it, unless the end of a process is about to tell why the epoch was formed."""
        if self._last is not None:
            silent = {number for number, one in self._departed.items() if not one.raised}
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
        self._out.append(messages.Send(one.number, message))

    def _notify(self) -> None:
        if self.phase is not Phase.FORMED or not (self._entered and self._record.whole):
            return
        due = self._notices.due(self.members, self._fitting(self._joining()), self._now)
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
        limits = self._limits
        if self._formed < 0:
            return (
                f"{limits.np} workers were not connected within --start-timeout "
                f"({limits.start_timeout:g} s): {self._wait()}"
            )
        return (
            f"too few workers for --elastic-timeout ({limits.elastic_timeout:g} s): "
            f"{living} of at least {limits.min_np} (--min-np)"
        )

    def _wait(self) -> str:
        """Say for whom the job waits; "" if it does not."""
        if self.phase is Phase.STARTING:
            late = [one for one in self._first() if one.stage is not Stage.WAITING]
            return f"waits for {named(late)} to call hvd.init()" if late else ""
        if self._short_since is not None:
            living = len(self.members) + len(self._waiting())
            return f"{living} of at least {self._limits.min_np} workers wait for others to join"
        if self.phase is Phase.FORMING:
            late = [one for one in self.members if not one.connected]
            return f"world {self.epoch} waits for {named(late)} to connect" if late else ""
        late = [one for one in self.members if not one.answered]
        if self.phase is Phase.GATHERING and late:
            coming = any(one.stage is Stage.COMING for one in late)
            what = "come to the boundary" if coming else "leave the epoch that has ended"
            return f"waits for {named(late)} to {what}"
        if self.phase is Phase.FORMED and 0 < len(late) < len(self.members):
            return f"a boundary waits for {named(late)}"
        return ""


def _left(one: Worker, why: str) -> Change:
    """A worker has left without an error, as far as is known."""
    drained = one.draining is not None
    why = f"left: {one.draining}" if drained else why
    return Change(one.name, why, one.number, trouble=False, counts=drained)
