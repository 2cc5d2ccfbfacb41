"""Random schedules of an elastic job around the real Membership, with workers as tiny models.

A model worker has a script, a membership thread and a share of a data plane. The script runs
numbered operations: one is *executed* when all members of the world have entered it, and each
member then *completes* it when it likes, which hands out its result and counts as a commit. A
result carries the newest notice that any member knew, so all members go to the next boundary after
the same operation. Messages travel in order, and as late as the scheduler likes. Faults: deaths,
broken links, silent workers, drains, wishes to leave, joiners, clean ends, exceptions.

    python tests/membership_model.py --schedules 1000000
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from typing import Any

from hvdlite.launch.elastic.membership import Membership
from hvdlite.launch.elastic.messages import (
    Entered,
    EpochBegun,
    EpochFormed,
    Evict,
    Failed,
    Goodbye,
    Leaving,
    Limits,
    Refused,
    Replace,
    Send,
)
from hvdlite.launch.elastic.state import Phase
from membership_workers import Model, World

LAST_STATE = 6  # operations until a script ends
UNREDOABLE = 5  # every so many operations, one cannot be redone
MOST_STEPS = 6000


class Job:
    """One schedule. `run` raises AssertionError where an invariant does not hold."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        pick = self.random
        self.size = pick.randint(1, 4)
        min_np = pick.randint(1, self.size)
        max_np = pick.choice([None, self.size, self.size + 1])
        self.limits = Limits(self.size, min_np, max_np, pick.choice([5.0, 600.0]))
        self.membership = Membership(self.limits)
        self.counts_steps = pick.random() < 0.5
        self.now = 0.0
        self.workers: dict[int, Model] = {}
        self.endings: list[tuple[int, str, bool]] = []  # that the launcher has not reported yet
        self.faults = pick.randint(0, 5)
        self.joiners = pick.randint(0, 3)
        self.worlds: dict[int, World] = {}
        self.gathered = False  # since the last epoch was formed
        self.sync_of: dict[int, bool] = {}
        self.formed: tuple[int, ...] | None = None
        self.begun: tuple[int, ...] = ()
        self.entered = False
        self.before_run = pick.choice([0, 0, 2])  # operations before the scripts enter run()
        self.expected_gone: set[int] = set()  # with a verdict, a death, or a clean end
        self.leavers: set[int] = set()  # who are to leave at the next boundary
        self.ended_well = False  # whether a worker has, so that nobody takes its place
        self.failed: str | None = None
        self.trace: list[str] = []
        for number in range(self.size):
            self.start(number, joiner=False)

    # The launcher and the network.

    def start(self, number: int, joiner: bool) -> None:
        self.workers[number] = Model(number, joiner, state=None if joiner else (number, 0))
        self.obey(self.membership.expect(number, "a", joiner, self.now))

    def obey(self, actions: list[Any]) -> None:
        for action in actions:
            self.trace.append(f"  {action}")
            assert self.failed is None, "nothing follows Failed"
            if isinstance(action, Send):
                self.check_send(action.worker, action.message)
                worker = self.workers[action.worker]
                if worker.alive:
                    worker.inbox.append(action.message)
            elif isinstance(action, Evict):
                self.expected_gone.add(action.worker)
                self.die(self.workers[action.worker])
            elif isinstance(action, Leaving | Refused):
                self.expected_gone.add(action.worker)
            elif isinstance(action, EpochFormed):
                self.check_formed(action)
            elif isinstance(action, EpochBegun):
                self.begun = action.workers
            elif isinstance(action, Failed):
                self.failed = action.reason
                self.check_failed(action.reason)
            elif isinstance(action, Entered):
                self.entered = True
            elif isinstance(action, Replace):
                assert self.formed is None, "a first worker after the first epoch"
                self.start(len(self.workers), joiner=False)

    def die(self, worker: Model) -> None:
        if not worker.alive:
            return
        worker.alive = False
        self.expected_gone.add(worker.number)
        self.endings.append((worker.number, "died of SIGKILL", False))

    # What must hold.

    def check_send(self, number: int, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "epoch":
            members = [member for member, _ in message["members"]]
            assert members[message["rank"]] == number
            world = World(message["epoch"], tuple(members), message["mode"])
            world = self.worlds.setdefault(message["epoch"], world)
            assert world.members == tuple(members), "two memberships of one epoch"
            assert message["epoch"] == max(self.worlds), "an older epoch"
            if self.formed is not None:
                old = [member for member in members if member in self.formed]
                assert old == [m for m in self.formed if m in members], "ranks lost their order"
                assert members[: len(old)] == old, "joiners come last"
                missing = set(self.formed) - set(members) - self.expected_gone
                assert not missing, f"{missing} dropped without a verdict"
                if message["mode"] == "boundary":
                    self.check_leavers(old, set(members) - set(old))
                    most = self.limits.max_np
                    assert most is None or len(set(members) - self.leavers) <= most
            self.sync_of[message["epoch"]] = message["sync"]
            if message["mode"] == "resume":
                for member in members:
                    model = self.workers[member]
                    assert not model.alive or model.commits <= message["commit_point"]["0"], (
                        "commit point too low"
                    )
        elif kind == "go":
            self.check_go(self.worlds[message["epoch"]], message)
        elif kind == "gather":
            self.gathered = True
        elif kind == "continue":
            assert not self.gathered, "CONTINUE to engines that GATHER has ended"
            world = self.worlds[message["epoch"]]
            members = [m for m in map(self.workers.__getitem__, world.members) if m.alive]
            assert all(m.script == "boundary" for m in members)
            self.check_leavers([member.number for member in members], set())
            if members:
                self.share_state(members, message["sync"])

    def check_leavers(self, old: list[int], joiners: set[int]) -> None:
        """Check who goes on behind a boundary: leavers only if nobody else has the state."""
        leavers = self.leavers.intersection([*old, *joiners])
        assert not leavers or self.leavers.issuperset(old), f"{leavers} do not leave"

    def check_go(self, world: World, message: dict[str, Any]) -> None:
        self.gathered, members = False, [self.workers[member] for member in world.members]
        assert len(message["clocks"]) == len(members)
        assert {m.connected for m in members} == {world.epoch}, "GO to one that is not connected"
        if world.mode == "resume":
            assert len({member.commits for member in members}) == 1, (
                "unequal after the commit point"
            )
            # The next boundary may have come at once, where some leave and others join.
            waiting = [*self.membership._waiting(), *self.membership.members]
            enough = len({*world.members, *(one.number for one in waiting)}) >= self.limits.min_np
            assert enough or not self.entered or self.ended_well, "a step below min-np"
        elif world.mode == "boundary":
            assert all(member.script == "boundary" for member in members)
            self.share_state(members, self.sync_of[world.epoch])

    def share_state(self, members: list[Model], sync: bool) -> None:
        """What sync() does, and what must be equal without it; the members are at a boundary."""
        acted = max(member.acted for member in members)
        assert members[0].state is not None, "rank 0 has no state"
        for member in members:
            assert sync or member.state == members[0].state, "different states, and no sync"
            member.state, member.acted, member.synced = members[0].state, acted, True

    def check_failed(self, reason: str) -> None:
        """Check that the job has failed for this reason."""
        assert self.membership.phase is Phase.OVER
        alive = [one for one in self.workers.values() if one.alive and one.script != "new"]
        begun = set(self.begun) - self.expected_gone  # Who was told to leave may still live.
        members = [one for one in alive if one.number in begun]
        if "that has the state" in reason:
            assert not [one for one in members if one.synced]
        elif "no worker is left" in reason:
            assert not members
        elif "(--min-np)" in reason:
            staying = [one for one in alive if one.number not in self.leavers]
            assert len(staying) < self.limits.min_np and not self.ended_well
        elif "worlds in a row" not in reason:
            assert self.formed is None, "a failure of the first workers"

    def check_formed(self, action: EpochFormed) -> None:
        assert action.workers == self.worlds[action.epoch].members == self.begun
        assert action.epoch == max(self.worlds), "two epochs at a time"
        self.formed = action.workers

    # The membership thread.

    def ready(self, worker: Model, why: str) -> None:
        message = worker.ready(why)
        if why == "lost":
            redoable = (worker.commits + 1) % UNREDOABLE
            if worker.entered and not redoable and not worker.raising:
                message["stuck"] = "an alltoall"
            if worker.world is not None and self.random.random() < 0.3:
                message["suspect"] = self.random.choice(worker.world.members)
        if self.counts_steps:
            message["steps"] = worker.commits
        worker.outbox.append(message)

    def suspend(self, worker: Model) -> None:
        worker.suspended = True
        worker.connecting = None

    def deliver(self, worker: Model, commit_point: int) -> None:
        if commit_point > worker.commits:
            assert commit_point == worker.commits + 1, "more than one commit behind"
            assert worker.world is not None and worker.world.executed(commit_point), (
                "never executed"
            )
            self.complete(worker)

    def complete(self, worker: Model) -> None:
        assert worker.world is not None
        worker.commits += 1
        worker.entered = False
        worker.state = (worker.state[0], worker.state[1] + 1)
        worker.at_end = worker.world.result(worker.commits) > worker.acted

    def receive(self, worker: Model) -> None:
        message = worker.inbox.popleft()
        kind = message["kind"]
        if kind == "gather":
            worker.heard = message["epoch"]
            worker.suspended, worker.connecting = True, None
            self.ready(worker, "boundary" if worker.script == "boundary" else "lost")
        elif kind == "epoch":
            worker.connecting = message
            if message["mode"] == "resume":
                self.deliver(worker, message["commit_point"]["0"])
        elif kind == "go":
            self.go(worker, self.worlds[message["epoch"]])
        elif kind == "continue":
            assert worker.script == "boundary"
            self.pass_boundary(worker)
        elif kind == "commit_point" and worker.script != "boundary":
            self.deliver(worker, message["commit_point"]["0"])
            assert self.ends(worker), "handed out all, and is not at its boundary"
        elif kind == "restore" and worker.script != "boundary":
            worker.raising, worker.entered = True, False
        elif kind == "notice":
            assert message["version"] > worker.notice
            worker.notice = message["version"]
        elif kind == "leave":
            assert worker.script == "boundary"
            self.finish(worker)
        elif kind == "refused":
            self.die(worker)

    def go(self, worker: Model, world: World) -> None:
        assert worker.connected == world.epoch
        worker.world, worker.epoch, worker.suspended = world, world.epoch, False
        worker.connecting = None
        if world.mode == "boundary":
            worker.commits = 1000 * world.epoch  # a new engine may count anew
            self.pass_boundary(worker)
        elif world.mode == "start":
            worker.script = "training"
        elif worker.entered:
            world.entered.setdefault(worker.commits + 1, {})[worker.number] = worker.notice

    def pass_boundary(self, worker: Model) -> None:
        worker.script, worker.in_run = "training", True
        worker.at_end = worker.restored = worker.raising = worker.entered = False
        worker.saved = worker.state

    # The script.

    def ends(self, worker: Model) -> bool:
        """Whether the script submits nothing before its next boundary or its end."""
        if not worker.in_run:
            return worker.commits >= self.before_run
        return worker.at_end or worker.raising or worker.state[1] >= LAST_STATE

    def advance(self, worker: Model) -> None:
        """Take the script's next step; the caller knows that there is one."""
        if worker.script == "new":
            worker.script = "boundary" if worker.joiner else "init"
            self.ready(worker, "join" if worker.joiner else "start")
        elif worker.raising or (self.ends(worker) and worker.state[1] < LAST_STATE):
            worker.restored = worker.raising
            if worker.raising and worker.saved is not None:
                worker.state = worker.saved
            worker.script = "boundary"
            self.ready(worker, "boundary")
        elif self.ends(worker):
            self.finish(worker)
        elif not worker.entered:
            worker.entered = True
            if not worker.suspended and worker.world is not None:
                entered = worker.world.entered.setdefault(worker.commits + 1, {})
                entered[worker.number] = worker.notice
        else:
            self.complete(worker)

    def can_advance(self, worker: Model) -> bool:
        if worker.script == "new":
            return True
        if worker.script != "training":
            return False
        if not worker.entered or worker.raising:
            return True
        world = worker.world
        return not worker.suspended and world is not None and world.executed(worker.commits + 1)

    def finish(self, worker: Model, status: int = 0) -> None:
        """The script ends: BYE, then the process. An exception is told, or leads to BYE, too."""
        if status and self.random.random() < 0.5:
            worker.outbox.append({"kind": "raised", "what": "raised ValueError"})
        else:
            worker.outbox.append({"kind": "bye", "commits": {"0": worker.commits}})
        worker.alive, worker.script = False, "done"
        self.expected_gone.add(worker.number)
        self.endings.append((worker.number, f"exit status {status}", status == 0))

    def connect(self, worker: Model) -> None:
        message, worker.connecting = worker.connecting, None
        assert message is not None
        epoch = message["epoch"]
        dead = [m for m, _ in message["members"] if not self.workers[m].alive]
        others = [m for m, _ in message["members"] if m != worker.number]
        if dead and self.random.random() < 0.7:
            if self.random.random() < 0.5:
                self.unreachable(worker, epoch, self.random.choice(dead))
            return  # It tries until GATHER comes.
        if others and self.faults and self.random.random() < 0.03:
            self.faults -= 1
            self.unreachable(worker, epoch, self.random.choice(others))
            return
        worker.connected = epoch
        worker.outbox.append({"kind": "connected", "epoch": epoch, "clock": [worker.number]})

    def unreachable(self, worker: Model, epoch: int, other: int) -> None:
        text = {"worker": other, "reason": "refused", "silent": self.random.random() < 0.5}
        worker.outbox.append({"kind": "unreachable", "epoch": epoch, **text})

    # The scheduler.

    def broken(self, worker: Model) -> bool:
        world = worker.world
        if world is None or worker.suspended or worker.script in ("done", "new"):
            return False
        return world.broken or not all(self.workers[m].alive for m in world.members)

    def fault(self) -> None:
        self.faults -= 1
        pick = self.random
        worker = pick.choice(list(self.workers.values()))
        kind = pick.choice("kill kill link silent drain asks finish raise error".split())  # noqa: SIM905
        self.trace.append(f"{kind} {worker.number}")
        if not worker.alive:
            return
        if kind == "kill":
            self.die(worker)
        elif kind == "link" and worker.world is not None:
            worker.world.broken = True
        elif kind == "silent":
            self.obey(self.membership.evict(worker.number, "sent nothing", self.now))
        elif kind == "drain":
            self.leavers.add(worker.number)
            self.obey(self.membership.drain(worker.number, "its host is drained", self.now))
        elif kind == "asks" and worker.world is not None:
            worker.outbox.append({"kind": "drain", "why": "it got SIGTERM"})
        elif kind == "error" and worker.in_run and worker.script == "training":
            worker.raising = not worker.entered  # An error of this script alone.
        elif kind in ("finish", "raise") and worker.script == "training":
            self.finish(worker, int(kind == "raise"))

    def end(self, ending: tuple[int, str, bool]) -> None:
        self.endings.remove(ending)
        number, _, clean = ending
        if clean and number not in self.leavers:
            self.ended_well = True
        self.obey(self.membership.ended(*ending, self.now))

    def hang_up(self, worker: Model) -> None:
        worker.hung_up = True
        self.obey(self.membership.connection_lost(worker.number, self.now))

    def hear(self, worker: Model) -> None:
        message, known = worker.outbox.popleft(), self.membership.knows(worker.number)
        if message["kind"] == "drain":
            self.leavers.add(worker.number)
        actions = self.membership.received(worker.number, message, self.now)
        if message["kind"] == "bye" and known:
            assert Goodbye(worker.number) in actions
        self.obey(actions)

    def lose(self, worker: Model) -> None:
        """The engine has ended by itself."""
        worker.suspended = True
        self.ready(worker, "lost")

    def join(self) -> None:
        self.joiners -= 1
        self.start(len(self.workers), joiner=True)

    def choices(self) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = [(self.end, ending) for ending in self.endings]
        for worker in self.workers.values():
            if worker.outbox:
                found.append((self.hear, worker))
            elif not worker.alive and not worker.hung_up:
                found.append((self.hang_up, worker))
            if not worker.alive:
                continue
            if worker.inbox:
                found.append((self.receive, worker))
            if worker.connecting is not None:
                found.append((self.connect, worker))
            if self.can_advance(worker):
                found.append((self.advance, worker))
            if self.broken(worker):
                found.append((self.lose, worker))
        if self.joiners and self.entered and self.membership.phase is not Phase.DONE:
            found.append((self.join,))
        return found

    def run(self) -> str:
        """Run the schedule to the end of the job; return how it ended."""
        idle = 0
        for _ in range(MOST_STEPS):
            found = self.choices()
            if self.failed is not None:
                return self.failed
            likely = 0.05 if self.formed else 0.01  # one before the first epoch may end the job
            if self.faults and found and self.random.random() < likely:
                self.fault()
            elif found:
                call, *arguments = self.random.choice(found)
                self.trace.append(f"{call.__name__} {[getattr(a, 'number', a) for a in arguments]}")
                call(*arguments)
                self.now += self.random.random() * 0.04
            elif self.membership.phase is Phase.DONE:
                assert not any(worker.alive for worker in self.workers.values())
                assert self.entered or not any(one.in_run for one in self.workers.values())
                return "done"
            else:
                wake_at = self.membership.wake_at()
                assert wake_at is not None and wake_at > self.now, "nothing will ever happen"
                self.now = wake_at
                idle += 1
                assert idle < 200, f"nothing happens: {self.membership.phase}"
            wake_at = self.membership.wake_at()
            if wake_at is not None and wake_at <= self.now:
                self.obey(self.membership.tick(self.now))
        raise AssertionError("the job neither ends nor fails")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--trace", action="store_true", help="show the first schedule's steps")
    arguments = parser.parse_args()
    endings = Counter[str]()
    for seed in range(arguments.first, arguments.first + arguments.schedules):
        job = Job(seed)
        try:
            how = job.run()
        except Exception:
            print("\n".join(job.trace if arguments.trace else job.trace[-30:]))
            print(f"--first {seed} --schedules 1: {job.size} workers, {job.limits}")
            raise
        kinds = ("has the state", "before all", "no worker", "epochs in", "cannot", "min-np")
        endings[next((kind for kind in kinds if kind in how), how)] += 1
    for how, count in endings.most_common():
        print(f"{count:8} {how}")


if __name__ == "__main__":
    main()
