"""How an operation of a process group begins: its name, its timeout, and what the caller gets."""

from __future__ import annotations

import collections
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch import distributed

from hvdlite import _core
from hvdlite.errors import CollectiveTimeoutError
from hvdlite.rendezvous.deadline import seconds_of
from hvdlite.torch.distributed import origins
from hvdlite.torch.distributed.engines import Membership, make_engine
from hvdlite.torch.distributed.engines import end as end_engine
from hvdlite.torch.distributed.origins import Origin
from hvdlite.torch.distributed.work import Finish, Work

# torch.distributed matches operations by their order, and the engine by name. A name is the
# operation's *signature* (kind, reduce operation, dtype, number of elements), which all members
# know, and the number of the operation among those of its signature, modulo 8. So names repeat from
# step to step, and the engine's response cache knows them. And members that submit operations of
# different signatures in different orders still get the right results. A counter stays for each
# signature.
#
# What a callback of a future starts has names of its own (`origins`). These do not repeat, nor do
# those of transfers between two ranks, any number of which may be in flight. They begin with "#",
# so that the engine's cache does not keep them.
SLOTS = 8
_LOOKS = 2  # Each new name looks whether so many others have ended.


class Numbering:
    """The names of one process group. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._in_flight: dict[str, _core.Handle] = {}

    def next(self, signature: str, seconds: float | None = None) -> Origin:
        """Name the next collective; wait `seconds`, or raise, while its text is in flight."""
        with self._lock:
            origin = self._origin(signature)
            earlier = self._in_flight.get(origin.text)
        if earlier is not None:
            try:
                earlier.wait(seconds)
            except (RuntimeError, TimeoutError):
                # The thread that waits for that operation gets its error.
                if not earlier.done():
                    raise
        return origin

    def _origin(self, signature: str) -> Origin:
        around = origins.current()
        if around is not None and around.group is self:
            text = around.next(signature)
            return Origin(self, text, f"{around.kind}/{signature}", f"#{text}")
        if around is not None:
            signature = f"{around.kind}/{signature}"
        count = self._count(signature)
        return Origin(self, f"{signature}#{count}", signature, f"{signature}#{count % SLOTS}")

    def next_of_pair(self, way: str) -> str:
        with self._lock:
            return f"#{way}#{self._count(way)}"

    def _count(self, signature: str) -> int:
        count = self._counts.get(signature, 0)
        self._counts[signature] = count + 1
        return count

    def started(self) -> int:
        with self._lock:
            return sum(self._counts.values())

    def note(self, name: str, handle: _core.Handle) -> None:
        """Note the operation that has this name now, and forget some that have ended."""
        with self._lock:
            # A noted handle keeps the memory of its operation.
            noted = self._in_flight
            for _ in range(min(_LOOKS, len(noted))):
                oldest = next(iter(noted))
                one = noted.pop(oldest)
                if not one.done():
                    noted[oldest] = one
            noted[name] = handle

    def in_flight(self) -> list[_core.Handle]:
        with self._lock:
            return [one for one in self._in_flight.values() if not one.done()]


# Torch's C++ code may hold a `Work`, of which it holds only its own half: without the Python half a
# wait would never end. C++ does not tell what it holds. But it reads results of few elements only
# (in DistributedDataParallel's join), so that the last operations with such results live on.
_KEPT = 256
_KEPT_BYTES = 1 << 16
# Torch 2.6 and older hold only that half of all that Python returns to C++, as to
# DistributedDataParallel's.
_OWNS_WORK = hasattr(distributed.ProcessGroup, "shutdown")


class Submissions:
    """One member of a process group, and its engine."""

    def __init__(self, member: Membership) -> None:
        self._member = member
        self._own_rank = member.rank
        self._members = member.size
        self._title = member.name
        self._timeout = member.timeout
        self._engine = make_engine(member)
        if not _OWNS_WORK:
            # There destroy_process_group calls no shutdown(). A thread of its own may wait for
            # locks, which the collector's thread may hold.
            ending = threading.Thread(target=end_engine, args=(self._engine,), daemon=True)
            weakref.finalize(self, ending.start).atexit = False
        self._numbering = Numbering()
        self._kept: collections.deque[Work] = collections.deque(maxlen=_KEPT)
        self._groups_of_torch: dict[str, Any] = {}  # by the device of their tensors
        # Seconds that operations get besides; each until the first one with them has completed.
        self._extensions: list[tuple[float, list[_core.Handle]]] = []

    def _start(
        self,
        signature: str,
        submit: Callable[[str, bool], _core.Handle],
        outputs: Sequence[torch.Tensor],
        finish: Finish | None,
        options: Any,
    ) -> Work:
        """Submit a collective; wait for it unless the caller wants to do so.

        `submit` gets a name, see `Numbering`, and the engine's hint `blocking`. `finish` copies the
        results to the outputs; it is None if the engine writes there.
        """
        timeout = options.timeout
        seconds = self._extended(self._timeout if timeout.days < 0 else timeout)
        try:
            origin = self._numbering.next(signature, seconds)
        except TimeoutError:
            self._give_up(signature, seconds)
        blocking = not getattr(options, "asyncOp", True)  # torch 2.7 and older do not tell.
        handle = self._note(origin.text, submit(origin.text, blocking))
        give_up = functools.partial(self._give_up, signature, seconds)
        line = self._numbering, None
        work = Work(handle, outputs, finish, seconds, give_up, origin, line)
        if blocking:
            work.wait()  # The engine expects this thread to do the work.
        elif outputs and (
            not _OWNS_WORK or sum(one.numel() * one.itemsize for one in outputs) <= _KEPT_BYTES
        ):
            self._kept.append(work)
        return work

    def _start_transfer(
        self,
        way: str,
        submit: Callable[[str], _core.Handle],
        outputs: Sequence[torch.Tensor],
        finish: Finish | None,
    ) -> Work:
        name = self._numbering.next_of_pair(way)
        seconds = self._extended(self._timeout)
        handle = self._note(name, submit(name))
        give_up = functools.partial(self._give_up, way, seconds)
        return Work(handle, outputs, finish, seconds, give_up, None, (self._numbering, way))

    def _extended(self, timeout: timedelta) -> float:
        """Return the seconds of an operation that begins now."""
        self._extensions = [e for e in self._extensions if not any(h.done() for h in e[1])]
        return seconds_of(timeout) + sum(seconds for seconds, _ in self._extensions)

    def _note(self, name: str, handle: _core.Handle) -> _core.Handle:
        for _, first in self._extensions:
            first[:] = first or [handle]
        self._numbering.note(name, handle)
        return handle

    # A backend that is a `ProcessGroup` itself, as this one is, is the whole group to
    # torch.distributed, which drops the backends that were named for other devices, as in
    # "cuda:nccl,cpu:hvdlite". So the group makes those itself.

    def _of_torch(self, device: str, backend: str) -> Any:
        """Return a group of torch's own for what hvdlite does not carry; all members come here."""
        if device in self._groups_of_torch:
            return self._groups_of_torch[device]
        rank, size, kinds = self._own_rank, self._members, distributed.ProcessGroup.BackendType
        store = distributed.PrefixStore(f"hvdlite/{device}/", self._member.store)
        sets_kind = hasattr(distributed.ProcessGroup, "_set_default_backend")
        # Before torch 2.6 the options have the kind.
        kind_first = () if sets_kind else (distributed.ProcessGroup.Options(backend),)
        group = distributed.ProcessGroup(store, rank, size, *kind_first)
        if backend == "nccl":
            kind, options = kinds.NCCL, distributed.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            made = distributed.ProcessGroupNCCL(store, rank, size, options)
        else:
            kind = kinds.GLOO
            made = distributed.ProcessGroupGloo(store, rank, size, timeout=self._timeout)
        if sets_kind:
            group._set_default_backend(kind)
        group._register_backend(torch.device(device), kind, made)
        self._groups_of_torch[device] = group
        return group

    def _give_up(self, signature: str, seconds: float) -> NoReturn:
        """End the group, because an operation takes longer than its timeout."""
        text = (
            f"rank {self._own_rank} of process group '{self._title}' waited {seconds:g} s for "
            f"{signature}, the timeout of the group: some rank did not call it, or calls other "
            "operations, or is slow; give a longer timeout= to init_process_group or new_group"
        )
        self._engine.abort(text)
        raise CollectiveTimeoutError(text)
