"""Which worker runs in which slot, and which one to start next; pure, with the time as an argument.

A *slot* is a place for one worker on a host. A worker's number is never used again; its local rank
is its slot, for the life of the process. A slot whose worker died waits before the next one starts:
1, 2, 4 .. 60 s. A host on which several workers died within a minute, or that was lost, is *away*
for a while: nothing starts there. The last host that is left is never away.

In a job with parameter servers the slots are fixed, each with a rank, and a slot whose workers died
too often gets none any more. In every job nothing is started once a worker has finished its work.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hvdlite.launch.hosts import BackOff, Placement, Start, place_as

_DEATHS = 3  # so many deaths on a host in `_DEATHS_WITHIN` seconds put it away
_DEATHS_WITHIN = 60.0


@dataclass
class _Running:
    host: str
    slot: int
    since: float
    leaving: bool = False


@dataclass
class _Host:
    slots: int = 0  # how many the provider gives; 0 for a host that it does not list
    drained: bool = False
    reachable: bool = True
    died_at: deque[float] = field(default_factory=lambda: deque(maxlen=_DEATHS))
    times_away: int = 0
    away_until: float = 0.0
    slot: defaultdict[int, BackOff] = field(default_factory=lambda: defaultdict(BackOff))


class Slots:
    """The workers of a job, and the slots for more. Used by one thread."""

    def __init__(
        self,
        ranks: int,
        min_np: int,
        max_np: int | None,
        timeout: float,
        cooldown: tuple[float, float],
        jitter: Callable[[], float] = random.random,
    ) -> None:
        # `timeout` gives the seconds for which there may be fewer slots than `min_np`.
        self._ranks = ranks
        self._min_np = min_np
        self._max_np = max_np
        self._timeout = timeout
        self._cooldown = cooldown
        self._jitter = jitter
        self._hosts: dict[str, _Host] = {}
        self._running: dict[int, _Running] = {}
        self._nodes: dict[str, int] = {}
        self._next_worker = 0
        self._begun = False  # the first workers have been given out
        self._entered = False  # joiners make sense
        self._first_missing = 0  # so many of the first workers are to be replaced
        self.grows = True  # whether workers may be started: False once one has finished
        self._short_since: float | None = None
        self._fixed: dict[tuple[str, int], Placement] = {}  # Only these slots have workers.
        self._restarts = math.inf  # how many workers of a slot may die in a row until the last one

    @classmethod
    def of(cls, first: Sequence[Start], restarts: int, now: float) -> Slots:
        """Describe workers that run from now on, whose slots get others when they die."""
        slots = cls(len(first), 0, None, 0.0, (0.0, 0.0))
        slots._begun = slots._entered = True
        slots._restarts = restarts
        slots._next_worker = first[-1].worker + 1
        for one in first:
            slots._fixed[one.host, one.slot] = one.placement
            slots._hosts.setdefault(one.host, _Host()).slots = one.slot + 1
            slots._running[one.worker] = _Running(one.host, one.slot, now)
        return slots

    def offer(self, hosts: Mapping[str, int], now: float) -> list[int]:
        """Take the provider's answer; return the workers that have to leave their slots."""
        for name in hosts:
            self._hosts.setdefault(name, _Host())
        for name, host in self._hosts.items():
            host.slots = hosts.get(name, 0)
            if not host.slots:
                host.drained = False  # When it is listed again, it is a new host.
        kept = {one.host for one in self._running.values()}
        kept |= {name for name, host in self._hosts.items() if host.away_until > now}
        self._hosts = {name: self._hosts[name] for name in (*hosts, *sorted(kept - set(hosts)))}
        self._count_slots(now)
        return self._leave(lambda one: one.slot >= self._hosts[one.host].slots)

    def drain(self, host: str) -> list[int]:
        """Start nothing on a host until it is listed anew; return who has to leave."""
        self._hosts.setdefault(host, _Host()).drained = True
        return self._leave(lambda one: one.host == host)

    def _leave(self, has_to: Callable[[_Running], bool]) -> list[int]:
        found = [n for n, one in self._running.items() if not one.leaving and has_to(one)]
        for number in found:
            self._running[number].leaving = True
        return found

    def leaving(self, worker: int) -> None:
        if worker in self._running:
            self._running[worker].leaving = True

    def reach(self, host: str, reachable: bool) -> None:
        """Note whether workers can be started on a listed host now."""
        if host in self._hosts:
            self._hosts[host].reachable = reachable

    @property
    def wanted(self) -> dict[str, float]:
        """The hosts that may have workers, and from when on: 0 for those that are not away."""
        return {
            name: host.away_until
            for name, host in self._hosts.items()
            if host.slots and not host.drained
        }

    def entered(self) -> None:
        """Note that the workers can take joiners now."""
        self._entered, self._first_missing = True, 0

    def replace_first(self) -> None:
        """Start another one in the place of one of the first workers, which begin anew."""
        self._first_missing += 1

    def host_of(self, worker: int) -> str:
        return self._running[worker].host

    @property
    def size(self) -> int:
        return len(self._running)

    @property
    def waits(self) -> bool:
        """Whether there is a slot without a worker that gets one."""
        return self.grows and bool(self._open())

    def ended(self, worker: int, now: float, died: bool, blames: bool) -> float | None:
        """Free the slot of a worker; return after how many seconds it gets another, if it does."""
        # `died` says whether the slot has to wait; False if the worker has finished, or left.
        # `blames` says whether it counts as a death on this host; False after a SIGTERM, too.
        one = self._running.pop(worker)
        if not died:
            return None
        host = self._hosts[one.host]
        slot = host.slot[one.slot]
        pause = slot.failed(now, now - one.since)
        if blames:
            host.died_at.append(now)
            if len(host.died_at) == _DEATHS and now - host.died_at[0] <= _DEATHS_WITHIN:
                self._put_away(one.host, now)
        return pause if self.grows and slot.failures <= self._restarts else None

    def lost(self, host: str, now: float) -> None:
        """Put a host away, because the connection to it is lost or its ranks hang."""
        if host in self._hosts:
            self._put_away(host, now)

    def _put_away(self, name: str, now: float) -> None:
        host = self._hosts[name]
        others = [one for one in self._usable(now) if one != name]
        if not others or host.away_until > now:
            return
        shortest, longest = self._cooldown
        if now - host.away_until > longest:
            host.times_away = 0
        pause = min(shortest * 2 ** min(host.times_away, 30), longest)
        host.times_away += 1
        host.away_until = now + pause + shortest * self._jitter()
        host.died_at.clear()

    def _usable(self, now: float) -> list[str]:
        return [
            name
            for name, host in self._hosts.items()
            if host.slots and host.reachable and not host.drained and host.away_until <= now
        ]

    def due(self, now: float) -> list[Start]:
        """Return the workers to start now; they count as running from now on."""
        starts: list[Start] = []
        if not self._begun:
            if self._room(now) < self.fewest_first:
                return []
            self._begun = True
            free = self._free(now)
            starts = [self._start(*where, now=now) for where in free[: self._ranks]]
            # The first workers get the numbers that they have when all of them run.
            placements = place_as([self._nodes[start.host] for start in starts])
            return [
                replace(start, placement=replace(placement, host=self._nodes[start.host]))
                for start, placement in zip(starts, placements, strict=True)
            ]
        if not (self._waits_to_start and self.grows):
            return []
        if not self._entered:
            found = self._free(now)[: self._first_missing]
            self._first_missing -= len(found)
            return [self._start(*where, now=now) for where in found]
        staying = sum(not one.leaving for one in self._running.values())
        room = None if self._max_np is None else max(0, self._max_np - staying)
        return [self._start(*where, now=now) for where in self._free(now)[:room]]

    @property
    def _waits_to_start(self) -> bool:
        return self._entered or self._first_missing > 0

    @property
    def fewest_first(self) -> int:
        return max(1, min(self._ranks, self._min_np))

    def _free(self, now: float) -> list[tuple[str, int]]:
        """List the free slots that need not wait, in order of the hosts."""
        usable = set(self._usable(now))
        return [
            (name, number)
            for name, number in self._open()
            if name in usable and self._hosts[name].slot[number].ready_at <= now
        ]

    def _open(self) -> list[tuple[str, int]]:
        """List the slots without a worker that get one now or later."""
        slots = self._fixed or [
            (n, i) for n, host in self._hosts.items() for i in range(host.slots)
        ]
        taken = {(one.host, one.slot) for one in self._running.values()}
        return [
            (name, number)
            for name, number in slots
            if (name, number) not in taken
            and self._hosts[name].slot[number].failures <= self._restarts
        ]

    def _start(self, host: str, slot: int, now: float) -> Start:
        worker = self._next_worker
        self._next_worker += 1
        self._nodes.setdefault(host, len(self._nodes))
        self._running[worker] = _Running(host, slot, now)
        if self._fixed:
            return Start(worker, host, slot, True, self._fixed[host, slot])
        staying = [one.host for one in self._running.values() if not one.leaving]
        planned = place_as([self._nodes[name] for name in staying])[-1]
        placement = replace(
            planned,
            local_rank=slot,
            local_size=max(planned.local_size, slot + 1),
            host=self._nodes[host],
        )
        return Start(worker, host, slot, self._entered, placement)

    def _room(self, now: float) -> int:
        return sum(self._hosts[name].slots for name in self._usable(now))

    def _count_slots(self, now: float) -> None:
        if self._room(now) >= self._min_np:
            self._short_since = None
        elif self._short_since is None:
            self._short_since = now

    def shortage(self, now: float) -> str | None:
        """Return why the job has to end, if there were too few slots for too long."""
        self._count_slots(now)
        if not self.grows or self._short_since is None:
            return None
        if now < self._short_since + self._timeout:
            return None
        listed = ", ".join(f"{name}:{h.slots}" for name, h in self._hosts.items() if h.slots)
        return (
            f"for {self._timeout:g} s there have been fewer than {self._min_np} slots: "
            f"{self._room(now)} now ({listed or 'no host is listed'}); --min-np allows fewer, "
            "and --elastic-timeout a longer wait"
        )

    def wake_at(self, now: float) -> float | None:
        """Return when `due` or `shortage` may have a new answer; None if only events change it."""
        times = [host.away_until for host in self._hosts.values() if host.away_until > now]
        if self._short_since is not None:
            times.append(self._short_since + self._timeout)
        if self._begun and self._waits_to_start and self.grows:
            times += [
                slot.ready_at
                for host in self._hosts.values()
                for slot in host.slot.values()
                if slot.ready_at > now
            ]
        return min((when for when in times if when > now), default=None)
