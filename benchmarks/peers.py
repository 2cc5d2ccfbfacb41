"""Measure the all-reduce of hvdlite, gloo, MPICH and Open MPI, which take turns.

    python benchmarks/peers.py --np 2 --table

One kind of row is a blocking all-reduce of one size, at once after the one before or after a pause
in which the caller sleeps, as a training step would compute. The other kind is 222 tensors of
4 KiB: one by one, all in flight before the first is waited for, or in one group, which only hvdlite
has. Each contestant has ranks of its own, which live for the whole run and sleep while another one
has its turn. MPICH and Open MPI are those of the wheels, called through mpi4py with NumPy arrays.

`_us` is the median time on the slowest rank, of a call or of all 222 tensors. Rows are JSON lines;
`--table` prints them as Markdown besides, which is how the tables of docs/performance.md are made.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, NamedTuple

from contestants import CONTESTANTS, Call, Contestant, commands, environment
from workers import add_common_arguments, print_row

KIB, MIB = 1024, 1 << 20
SIZES = [4, 4 * KIB, 16 * KIB, 128 * KIB, MIB, 8 * MIB, 64 * MIB]
PAUSED_SIZES = [4, 16 * KIB]
PAUSES_MS = [0.5, 5]
TENSORS, BYTES_EACH = 222, 4 * KIB
WAYS = ["one by one", "in flight", "grouped"]
ROUNDS = 10
SECONDS = 0.1  # Each contestant runs so long in each round.
MOST_CALLS = 300
START_SECONDS, END_SECONDS = 120.0, 30.0
KEY = "HVDLITE_BENCHMARK_KEY"


class Task(NamedTuple):
    """What the ranks measure in one turn."""

    size: int
    pause: float = 0.0  # seconds before each call
    way: str = ""  # One tensor has no way.
    calls: int = 0  # With 0, three calls say how many fit into a turn.


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_common_arguments(parser)
    parser.add_argument(
        "--contestants", default=",".join(CONTESTANTS), help="comma-separated (all four)"
    )
    parser.add_argument("--table", action="store_true", help="print the rows as Markdown, too")
    parser.add_argument("--as", dest="contestant", help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(arguments)
    names = arguments.contestants.split(",")
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
    for size in SIZES[:2] if quick else SIZES:
        yield Task(size)
    for size in PAUSED_SIZES[:1] if quick else PAUSED_SIZES:
        for pause in PAUSES_MS:
            yield Task(size, pause / 1e3)
    for way in WAYS:
        yield Task(BYTES_EACH, way=way)


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
    if task.way:
        row.update(tensors=TENSORS, way=task.way)
    else:
        row.update(tensors=1, pause_ms=task.pause * 1e3)
    expected = {
        name: max(map(statistics.median, turn(own, task)))
        for name, own in taking_part(task, connections)
    }
    times: dict[str, list[list[float]]] = {name: [[] for _ in range(ranks)] for name in expected}
    for _ in range(rounds):
        for name in expected:
            fitting = int(SECONDS * 1e6 / (expected[name] + task.pause * 1e6))
            several = task._replace(calls=max(2, min(MOST_CALLS, fitting)))
            for own, new in zip(times[name], turn(connections[name], several), strict=True):
                own += new
    for name, by_rank in times.items():
        row[f"{name}_us"] = round(max(map(statistics.median, by_rank)), 1)
        row[f"{name}_best_us"] = round(max(map(min, by_rank)), 1)
    return row


def taking_part(task: Task, connections: Connections) -> list[tuple[str, list[Connection]]]:
    """Return the contestants that can do the task."""
    if task.way == "grouped":
        return [("hvdlite", connections["hvdlite"])] if "hvdlite" in connections else []
    return list(connections.items())


def turn(connections: list[Connection], task: Task) -> list[list[float]]:
    """Let the ranks of one contestant do the task; return the microseconds of each rank's calls."""
    for connection in connections:
        connection.send(task)
    return [connection.recv() for connection in connections]


def work(arguments: argparse.Namespace) -> int:
    """Be a rank of a contestant: do one task after another until the driver ends."""
    contestant = CONTESTANTS[arguments.contestant](arguments.store, arguments.np)
    driver = Client(arguments.address, "AF_UNIX", authkey=os.environ[KEY].encode())
    driver.send(arguments.contestant)
    prepared: dict[tuple[int, str], Call | None] = {}
    while (task := driver.recv()) is not None:
        key = (task.size, task.way)
        if key not in prepared:
            prepared = {key: call_of(contestant, task)}  # Only this one's memory is kept.
        call = prepared[key]
        assert call is not None
        driver.send(times_of(contestant, call, task))
    return 0


def call_of(contestant: Contestant, task: Task) -> Call | None:
    """Return the call that a task measures."""
    if not task.way:
        return contestant.blocking(task.size)
    if task.way == "one by one":
        return contestant.one_by_one(TENSORS, task.size)
    if task.way == "in flight":
        return contestant.in_flight(TENSORS, task.size)
    return contestant.grouped(TENSORS, task.size)


def times_of(contestant: Contestant, call: Call, task: Task) -> list[float]:
    """Return the microseconds of each call."""
    contestant.barrier()
    call()  # This one is not measured: the turn before affects it.
    times = []
    for _ in range(task.calls or 3):
        if task.pause:
            time.sleep(task.pause)
        begin = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - begin) / 1e3)
    return times


def print_table(rows: list[dict[str, Any]], names: list[str]) -> None:
    """Print the rows as a Markdown table, microseconds."""
    print("| what | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 1) + "|")
    for row in rows:
        cells = [f"{row[f'{name}_us']:,.0f}" if f"{name}_us" in row else "" for name in names]
        print(f"| {title(row)} | " + " | ".join(cells) + " |")


def title(row: dict[str, Any]) -> str:
    """Say in words what a row measured."""
    size = row["bytes"]
    text = (
        f"{size} B" if size < KIB else f"{size // KIB} KiB" if size < MIB else f"{size // MIB} MiB"
    )
    if "way" in row:
        return f"{row['tensors']} x {text}, {row['way']}"
    return f"{text} after {row['pause_ms']:g} ms" if row["pause_ms"] else text


if __name__ == "__main__":
    sys.exit(main())
