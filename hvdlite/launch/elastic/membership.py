"""Which workers make up the world of each epoch of an elastic job: a pure state machine.

It has no clock, no socket and no thread: each method takes what happened and the time, and returns
what to do. What happened only changes the state. All decisions are made from the state alone, in
`epochs.Epochs`, so they do not depend on the order in which things happened.

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

from hvdlite.launch.elastic.actions import (
    Action,
    Close,
    Entered,
    Goodbye,
    Message,
    Raised,
    Refused,
    Went,
)
from hvdlite.launch.elastic.epochs import LOST_CONNECTION, Epochs
from hvdlite.launch.elastic.record import Change
from hvdlite.launch.elastic.roster import Departed, Phase, Stage, Worker, mismatch


class Membership(Epochs):
    """The state machine; a method for each thing that happens."""

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
                self._asks_to_leave(one, message["why"])
            elif kind == "bye":
                self._record.report(message)
                self._part(one, math.inf, now)
                self._finished(one, "left", now)
                self._out.append(Goodbye(worker))
        return self._settle(now)

    def ended(self, worker: int, why: str, clean: bool, now: float) -> list[Action]:
        """The process of a worker has ended; `clean` if it exited with 0 or was drained."""
        departed = self._departed.pop(worker, None)
        one = self._workers.get(worker)
        if departed is not None and departed.worker.raised:
            why = departed.worker.raised
            self._script_fails = True
        elif why.startswith("exit status"):
            why = f"ended with {why}"
            self._script_fails |= not clean
        if departed is not None:
            self._learn(departed, why, clean, now)
        elif one is not None and clean:
            self._stop_growing(one, one in self.members)
            self._finished(one, why, now)
        elif one is not None:
            self._remove(one, Change(one.name, why, worker), now)
        return self._settle(now)

    def connection_lost(self, worker: int, now: float) -> list[Action]:
        """The connection of a worker ended; without BYE before it, this is its death."""
        one = self._workers.get(worker)
        if one is not None:
            self._part(one, now + self._limits.heartbeat, now)
            self._remove(one, Change(one.name, LOST_CONNECTION, worker), now)
        return self._settle(now)

    def heartbeat_lost(self, worker: int, now: float) -> list[Action]:
        """A connected worker has said nothing for `Limits.silence`."""
        return self.evict(worker, f"sent nothing for {self._limits.silence:g} s", now)

    def drain(self, worker: int, why: str, now: float) -> list[Action]:
        """A worker shall leave at the next boundary."""
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

    def give_up(self, reason: str, now: float) -> list[Action]:
        """The job cannot go on, for a reason outside of this state machine."""
        if self.phase is not Phase.OVER:
            self._fail(reason)
        return self._settle(now)

    def tick(self, now: float) -> list[Action]:
        """The time has come that `wake_at` named, or any other time."""
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
            self._suspicions.add(one.number, message["suspect"], message["reason"], now)
        if message["heard"] < one.asked:
            return  # It crossed a GATHER, whose answer will come.
        if message["why"] != "lost":
            self._came(one, message, now)
        elif self.phase is Phase.GATHERING:
            self._suspended(one, message)
        elif self.phase is Phase.FORMED:
            self._suspended(one, message)
            self._break(now)

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
        one.stage, one.stuck = Stage.BOUNDARY, None
        one.endpoint = message["endpoint"]
        self._record.sign(now)
        if message.get("restored") and not one.restored:
            one.restored = True
            why = f"restored its last commit: {message['reason'] or 'an error'}"
            self._record.symptom(one.name, why)

    def _suspended(self, one: Worker, message: Message) -> None:
        one.stage, one.endpoint = Stage.SUSPENDED, message["endpoint"]
        one.stuck = message.get("stuck")
        self._record.symptom(one.name, f"lost its world: {message['reason'] or 'a link broke'}")

    def _unreachable(self, one: Worker, message: Message, now: float) -> None:
        if message["epoch"] != self.epoch or one not in self.members:
            return
        suspect = next((w for w in self.members if w.number == message["worker"]), None)
        silent = message.get("silent", False)
        # After GATHER members hang up to each other. Before the first epoch a death may explain it.
        counts = self.phase is Phase.FORMING or (silent and self.phase is Phase.GATHERING)
        if suspect is None or not counts:
            return
        why = f"cannot reach {suspect.name}: {message['reason']}"
        self._suspicions.add(one.number, suspect.number, why, now, anew=True, mutual=silent)
        self._record.symptom(one.name, why)
        self._record.sign(now)

    # Who goes.

    def _asks_to_leave(self, one: Worker, why: str) -> None:
        if one.draining is None and not self._stops:
            one.wishes = True
            self._drain(one, why)

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
        self._out.append(Raised(one.number, what))
        self._part(one, math.inf, now)
        self._remove(one, Change(one.name, what, one.number), now)

    def _part(self, one: Worker, due: float, now: float) -> None:
        """Only the process of a worker is left; its end will tell more."""
        member = one in self.members or not one.joiner
        self._departed[one.number] = Departed(one, due, member, now)

    def _finished(self, one: Worker, why: str, now: float) -> None:
        """A worker has left without an error, as far as is known."""
        drained = one.draining is not None
        why = f"left: {one.draining}" if drained else why
        change = Change(one.name, why, one.number, trouble=False, counts=drained)
        self._remove(one, change, now)

    def _learn(self, departed: Departed, why: str, clean: bool, now: float) -> None:
        """The process of a worker that had departed has ended, which tells how it departed."""
        # A script that raises says goodbye, too, before its process ends.
        one = departed.worker
        # Who is killed after a goodbye has finished its work.
        trouble = not clean and (departed.due < math.inf or why.startswith("ended with"))
        trouble = trouble or bool(one.raised)
        drained = clean and one.draining is not None
        if drained:
            why = f"left: {one.draining}"
        elif clean and departed.due == math.inf:
            why = "finished"
        if clean:
            self._stop_growing(one, departed.member)
        elif departed.member:
            self._out.append(Went(one.number, departed.at))
        if self._last is not None:
            self._last.record.learn(one.number, why, trouble, counts=drained or not clean)
        known = self._record.learn(one.number, why, trouble, counts=drained or not clean)
        if known and not clean and self.phase is Phase.FORMED:
            self._gather_by(now)

    def _stop_growing(self, one: Worker, member: bool) -> None:
        """A process has ended well: if the script is done, nobody takes its place."""
        if one.draining is None and (member or not one.joiner):
            self._growing = False
