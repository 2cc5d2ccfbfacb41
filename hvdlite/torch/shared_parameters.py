"""One copy of the parameters for all ranks of a host, which each rank updates in its part.

The memory is an anonymous file that the first rank of the host makes and the others map; it ends
with the last process that has mapped it, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from hvdlite import basics
from hvdlite.errors import ArgumentError, HvdliteError, MismatchError
from hvdlite.objects import gather_json
from hvdlite.process_sets import ProcessSet
from hvdlite.torch.bucket_memory import Place

_Said = dict[str, Any]  # What one rank tells the others about the memory.
ALIGNMENT = 64  # The unit is bytes; no two parameters share a cache line.


def check_shareable(params: Collection[torch.Tensor]) -> None:
    elsewhere = {str(param.device) for param in params if param.device.type != "cpu"}
    if elsewhere:
        raise ArgumentError(
            f"share_parameters=True needs parameters on CPUs, and some are on {min(elsewhere)}; "
            "leave it out"
        )


class _Shared:
    def __init__(self, param: torch.Tensor, memory: mmap.mmap, begin: int) -> None:
        flat = torch.frombuffer(memory, dtype=param.dtype, count=param.numel(), offset=begin)
        size = param.element_size()
        middle = begin + param.numel() // 2 * size
        self._param = param
        self._view = Place(param, flat).view
        self._memory = memory
        self._middle = slice(middle, middle + size)

    def fill(self) -> None:
        self._view.copy_(self._param.detach())

    def settle(self) -> None:
        self._param.data = self._view

    def unsettle(self) -> None:
        if self.settled():
            self._param.data = self._view.clone()

    def settled(self) -> bool:
        return bool(self._param.data_ptr() == self._view.data_ptr())

    def element(self) -> bytes:
        return self._memory[self._middle]


class SharedParameters:
    """The parameters of one optimizer on one host. Used by the training thread."""

    def __init__(
        self,
        name: str,
        process_set: ProcessSet,
        members: Sequence[int],
        names: Mapping[torch.Tensor, str],
    ) -> None:
        self.params: list[torch.Tensor] = []  # The next step updates these.
        self._name = name
        self._process_set = process_set
        self._names = names  # The parameters have these names.
        self._first = members[0]
        self._shared: dict[torch.Tensor, _Shared] = {}
        self._left: list[bytes] = []  # The last step has left these elements of `_shared`.

    def run(self, update: Callable[[], None]) -> None:
        """Share parameters that are not shared yet, and update: every rank its own ones."""
        # A change outside step() would be made by every rank of the host, on the same memory. So
        # one element of each parameter is compared with what the last step has left.
        changed = [
            self._names.get(param, "a parameter")
            for (param, one), left in zip(self._shared.items(), self._left, strict=False)
            if one.element() != left
        ]
        with torch.no_grad():
            if self._together("before", changed):
                self._share()
        update()
        with torch.no_grad():
            for one in self._shared.values():
                if not one.settled():  # The optimizer has given the parameter new memory.
                    one.fill()
                    one.settle()
            self._together("after", [])
        self._left = [one.element() for one in self._shared.values()]

    def unshare(self) -> None:
        """Give this rank copies of its own, until the next step."""
        for one in self._shared.values():
            one.unsettle()
        self._shared, self._left = {}, []

    def _together(self, when: str, changed: Sequence[str]) -> bool:
        """Wait for all ranks; return whether one of them has parameters that are not shared."""
        # They wait before the update, because a rank may still read the parameters, and after it,
        # because the next forward needs all parts.
        ranks = self._process_set.ranks
        shared = {param for param, one in self._shared.items() if one.settled()}
        new = any(param.numel() > 0 and param not in shared for param in self.params)
        told = len(self.params), new, changed[:3]
        by_rank = gather_json(told, f"{self._name}.{when}", self._process_set)
        joined = [rank for rank in ranks if rank not in by_rank]
        counts = {count: rank for rank, (count, _, _) in by_rank.items()}
        if joined or len(counts) > 1:
            steps = " and ".join(f"rank {rank} with {count}" for count, rank in counts.items())
            what = f"rank {joined[0]}, which has joined, does not step" if joined else steps
            raise MismatchError(
                f"'{self._name}': a step updates parameters that the ranks of a host share, and "
                f"{what}; make, freeze, thaw and add parameters alike on every rank, and give "
                "every rank as many steps, without hvd.join()"
            )
        finders = {rank: names for rank, (_, _, names) in by_rank.items() if names}
        if finders:
            rank, names = max(finders.items())
            raise HvdliteError(
                f"rank {rank} has found that {', '.join(names)} changed outside step(). With "
                "share_parameters=True all ranks of a host change the same memory, so that a "
                "change by each of them counts several times; call "
                "optimizer.unshare_parameters() before you change parameters"
            )
        return any(new for _, new, _ in by_rank.values())

    def _share(self) -> None:
        """Move the parameters into memory of the host, with the values of its first rank."""
        params = self.params
        check_shareable(params)
        begins, size = [], 0
        for param in params:
            begins.append(size)
            size += -(-param.numel() * param.element_size() // ALIGNMENT) * ALIGNMENT
        memory = self._map(max(size, ALIGNMENT))
        moved = {
            param: _Shared(param, memory, begin)
            for param, begin in zip(params, begins, strict=True)
            if param.numel() > 0
        }
        if self._first == basics.rank():
            for one in moved.values():
                one.fill()
        self._tell({})
        for one in moved.values():
            one.settle()
        self._shared, self._left = moved, []  # A step that fails leaves no elements.
        # The system gets the memory in which the parameters lay; glibc would keep it, and other C
        # libraries give it back themselves.
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)

    def _map(self, size: int) -> mmap.mmap:
        """Map memory that the first rank of the host makes; raise on every rank if one cannot."""
        is_first = self._first == basics.rank()
        memory, file, said = _make(size) if is_first else (None, -1, {})
        try:
            told = self._tell(said)[self._first]
            if not is_first and "error" not in told:
                memory, said = _open(told, size)
            results = self._tell(said)
        finally:
            if file >= 0:
                os.close(file)  # The memory lives on.
        failed = {rank: one["error"] for rank, one in results.items() if "error" in one}
        if failed:
            rank, why = min(failed.items())
            raise HvdliteError(
                f"share_parameters=True: rank {rank} cannot map {size:,} bytes that the ranks of "
                f"its host share: {why}"
            )
        assert memory is not None
        return memory

    def _tell(self, said: _Said) -> dict[int, _Said]:
        return gather_json(said, f"{self._name}.memory", self._process_set)


def _make(size: int) -> tuple[mmap.mmap | None, int, _Said]:
    """Make memory of a size, all of which there is; return it, its file, and what to tell."""
    file = -1
    try:
        file = os.memfd_create("hvdlite parameters", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.posix_fallocate(file, 0, size)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        memory = mmap.mmap(file, size)
        inode = os.fstat(file).st_ino
        return memory, file, {"process": os.getpid(), "file": file, "inode": inode}
    except OSError as error:
        return None, file, {"error": str(error)}


def _open(told: _Said, size: int) -> tuple[mmap.mmap | None, _Said]:
    """Open what another process of this host has made; return it, and what to tell."""
    try:
        file = os.open(f"/proc/{told['process']}/fd/{told['file']}", os.O_RDWR | os.O_CLOEXEC)
        try:
            found = os.fstat(file)
            if (found.st_ino, found.st_size) != (told["inode"], size):
                raise OSError("the ranks of the host are in different PID namespaces")
            return mmap.mmap(file, size), {}
        finally:
            os.close(file)
    except OSError as error:
        return None, {"error": str(error)}
