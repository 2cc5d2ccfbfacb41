"""Measure the all-reduce of hvdlite, gloo, MPICH and Open MPI, which take turns.

    python benchmarks/peers.py --np 2 --table

A row is a blocking all-reduce of one size, at once after the one before or after a pause in which
the caller sleeps, as a training step would compute; a row of 0 bytes is a barrier alone. Each
contestant has ranks of its own, because two MPI libraries cannot live in one process. Its ranks
live for the whole run and sleep while another one has its turn. MPICH and Open MPI are those of the
wheels, called through mpi4py with NumPy arrays; a contestant that is not installed is left out.

`_us` is the median time on the slowest rank, `_best_us` the shortest, and `_to_hvdlite` the ratio
of a median to hvdlite's. Rows are JSON lines; `--table` prints them as Markdown besides.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, NamedTuple

from workers import add_common_arguments, print_row

KIB, MIB = 1024, 1 << 20
SIZES = [0, 4, 4 * KIB, 16 * KIB, 128 * KIB, MIB, 8 * MIB, 64 * MIB]
PAUSED_SIZES = [4, 16 * KIB]
PAUSES_MS = [0.5, 5]
ROUNDS = 10
SECONDS = 0.1  # Each contestant runs so long in each round.
MOST_CALLS = 300
START_SECONDS, END_SECONDS = 120.0, 30.0
KEY = "HVDLITE_BENCHMARK_KEY"
BIN = Path(sys.executable).parent

Call = Callable[[], object]


# Contestants: each returns a function that makes the call which sums `size` bytes of float32 in
# place, or meets the other ranks if that is 0.


def hvdlite(store: str, ranks: int) -> Callable[[int], Call]:
    """Use hvdlite.torch, with one thread of torch per rank."""
    import torch

    import hvdlite.torch as hvd

    torch.set_num_threads(1)
    hvd.init()

    def call_of(size: int) -> Call:
        tensor = torch.zeros(size // 4)
        return lambda: hvd.allreduce_(tensor, op=hvd.Sum, name=f"peers.{size}")

    return lambda size: call_of(size) if size else hvd.barrier


def gloo(store: str, ranks: int) -> Callable[[int], Call]:
    """Use torch.distributed over gloo, with one thread of torch per rank."""
    import torch
    from turns import gloo, join_gloo

    torch.set_num_threads(1)
    join_gloo(store, int(os.environ["GLOO_RANK"]), ranks)

    def call_of(size: int) -> Call:
        tensor = torch.zeros(size // 4)
        return lambda: gloo.all_reduce(tensor)

    return lambda size: call_of(size) if size else gloo.barrier


def mpi(store: str, ranks: int) -> Callable[[int], Call]:
    """Use an MPI library through mpi4py, with NumPy arrays."""
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    assert world.size == ranks, f"{world.size} ranks instead of {ranks}"

    def call_of(size: int) -> Call:
        array = np.zeros(size // 4, np.float32)
        return lambda: world.Allreduce(MPI.IN_PLACE, array)

    return lambda size: call_of(size) if size else world.Barrier


# Each is made from the path of a file through which its ranks may meet, and their number.
CONTESTANTS = {"hvdlite": hvdlite, "gloo": gloo, "mpich": mpi, "openmpi": mpi}


def installed() -> list[str]:
    """Return the contestants that can run here."""
    has_mpi = find_spec("mpi4py") is not None
    programs = {"mpich": "mpiexec.hydra", "openmpi": "prterun"}
    return [
        name
        for name in CONTESTANTS
        if name not in programs or (has_mpi and (BIN / programs[name]).exists())
    ]


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


class Task(NamedTuple):
    """What the ranks measure in one turn."""

    size: int
    pause: float = 0.0  # seconds before each call
    calls: int = 3  # Three calls say how many fit into a turn.


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_common_arguments(parser)
    parser.add_argument("--contestants", help="comma-separated (all that are installed)")
    parser.add_argument("--table", action="store_true", help="print the rows as Markdown, too")
    parser.add_argument("--as", dest="contestant", help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(arguments)
    names = arguments.contestants.split(",") if arguments.contestants else installed()
    rows = []
    with ranks_of(names, arguments.np) as connections:
        for task in tasks(arguments.quick):
            row = measured(task, connections, 2 if arguments.quick else ROUNDS, arguments.np)
            rows.append(row)
            print_row(row)
    if arguments.table:
        print_table(rows, names)
    return 0


def tasks(quick: bool) -> Iterator[Task]:
    """Yield what is measured, one row each."""
    for size in SIZES[:3] if quick else SIZES:
        yield Task(size)
    for size in PAUSED_SIZES[:1] if quick else PAUSED_SIZES:
        for pause in PAUSES_MS:
            yield Task(size, pause / 1e3)


Connections = dict[str, list[Connection]]


@contextmanager
def ranks_of(names: list[str], ranks: int) -> Iterator[Connections]:
    """Start the ranks of all contestants, and end them."""
    key = os.urandom(16).hex()
    os.environ[KEY] = key
    with tempfile.TemporaryDirectory(prefix="hvdlite-benchmark-") as folder:
        address = f"{folder}/driver"
        started = []
        with Listener(address, "AF_UNIX", authkey=key.encode()) as listener:
            for name in names:
                script = [sys.executable, str(Path(__file__).resolve()), "--worker", "--as", name]
                worker = [*script, "--np", str(ranks), "--address", address]
                worker += ["--store", f"{folder}/{name}"]
                started += [
                    subprocess.Popen(
                        command, env=environment(name), stdin=subprocess.DEVNULL, stdout=sys.stderr
                    )
                    for command in commands(name, ranks, worker)
                ]
            try:
                connections = accepted(listener, len(names) * ranks, started)
                yield connections
                for connection in [one for own in connections.values() for one in own]:
                    connection.send(None)  # This is the end of the run.
                for process in started:
                    process.wait(END_SECONDS)
            finally:
                for process in started:
                    process.terminate()


def accepted(
    listener: Listener, expected: int, started: list[subprocess.Popen[bytes]]
) -> Connections:
    """Return the connections of all ranks, by contestant; exit if a rank does not come."""
    own_socket = listener._listener._socket  # type: ignore[attr-defined] # Listener has no timeout
    own_socket.settimeout(1.0)
    connections: Connections = {}
    deadline = time.monotonic() + START_SECONDS
    while sum(map(len, connections.values())) < expected:
        try:
            connection = listener.accept()
        except TimeoutError:
            ended = [process.args for process in started if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                sys.exit(f"ranks did not come; ended: {ended}")
            continue
        connections.setdefault(connection.recv(), []).append(connection)
    return connections


def measured(task: Task, connections: Connections, rounds: int, ranks: int) -> dict[str, Any]:
    """Let the contestants take turns, and return the row of their medians."""
    row: dict[str, Any] = {"benchmark": "peers", "np": ranks, "bytes": task.size}
    row["pause_ms"] = task.pause * 1e3
    expected = {
        name: max(map(statistics.median, turn(own, task))) for name, own in connections.items()
    }
    times: dict[str, list[list[float]]] = {name: [[] for _ in range(ranks)] for name in expected}
    for _ in range(rounds):
        for name in expected:
            fitting = int(SECONDS * 1e6 / (expected[name] + task.pause * 1e6))
            several = task._replace(calls=max(2, min(MOST_CALLS, fitting)))
            for own, new in zip(times[name], turn(connections[name], several), strict=True):
                own += new
    medians = {name: max(map(statistics.median, by_rank)) for name, by_rank in times.items()}
    for name, median in medians.items():
        row[f"{name}_us"] = round(median, 1)
        row[f"{name}_best_us"] = round(max(map(min, times[name])), 1)
        if name != "hvdlite" and "hvdlite" in medians:
            row[f"{name}_to_hvdlite"] = round(median / medians["hvdlite"], 2)
    return row


def turn(connections: list[Connection], task: Task) -> list[list[float]]:
    """Let the ranks of one contestant do the task; return the microseconds of each rank's calls."""
    for connection in connections:
        connection.send(task)
    return [connection.recv() for connection in connections]


def work(arguments: argparse.Namespace) -> int:
    """Be a rank of a contestant: do one task after another until the driver ends."""
    call_of = CONTESTANTS[arguments.contestant](arguments.store, arguments.np)
    meet = call_of(0)
    driver = Client(arguments.address, "AF_UNIX", authkey=os.environ[KEY].encode())
    driver.send(arguments.contestant)
    prepared: dict[int, Call] = {}
    while (task := driver.recv()) is not None:
        if task.size not in prepared:
            prepared = {task.size: call_of(task.size)}  # Only this one's memory is kept.
        driver.send(times_of(prepared[task.size], task, meet))
    return 0


def times_of(call: Call, task: Task, meet: Call) -> list[float]:
    """Return the microseconds of each call."""
    meet()
    call()  # This one is not measured: the turn before affects it.
    times = []
    for _ in range(task.calls):
        time.sleep(task.pause) if task.pause else None
        begin = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - begin) / 1e3)
    return times


def print_table(rows: list[dict[str, Any]], names: list[str]) -> None:
    """Print the rows as a Markdown table, microseconds."""
    print("| what | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 1) + "|")
    for row in rows:
        cells = [f"{row[f'{name}_us']:,.0f}" for name in names]
        print(f"| {title(row)} | " + " | ".join(cells) + " |")


def title(row: dict[str, Any]) -> str:
    """Say in words what a row measured."""
    size = row["bytes"]
    text = (
        f"{size} B" if size < KIB else f"{size // KIB} KiB" if size < MIB else f"{size // MIB} MiB"
    )
    after = f" after {row['pause_ms']:g} ms" if row["pause_ms"] else ""
    return (text if size else "a barrier") + after


if __name__ == "__main__":
    sys.exit(main())
