"""The parameter server without a framework: clocks, files, and requests that are not meant."""

from __future__ import annotations

import json
import math
import os
import random
import socket
import struct
import threading
import time
import warnings
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlite.errors import ArgumentError, HvdliteError
from hvdlite.parameter_server import server
from hvdlite.parameter_server.checkpoint import file_of, find, write
from hvdlite.parameter_server.client import Client, Rows
from hvdlite.parameter_server.collection import Collection
from hvdlite.parameter_server.tensors import Gradient, Slot, TensorSpec, encode, place
from hvdlite.parameter_server.wire import Entry, Frame, Layout, Operation, Status, receive_frame
from parameter_servers import Servers
from patience import HANG, wait_until


@pytest.fixture(autouse=True)
def short_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_LINGER_SECONDS", 0.2)


class Adding:
    """A storage of float64 that adds what is pushed."""

    def __init__(self, tensors: Sequence[TensorSpec]) -> None:
        self._specs = list(tensors)
        self._values = [memoryview(bytearray(one.nbytes)) for one in tensors]

    def read(self, tensor: int, into: memoryview) -> None:
        into[:] = self._values[tensor]

    def write(self, tensor: int, values: memoryview) -> None:
        self._values[tensor][:] = values

    def apply(self, gradients: Sequence[Gradient]) -> None:
        for tensor, values, rows in gradients:
            own, new = self._values[tensor].cast("d"), values.cast("d")
            width = self._specs[tensor].row_bytes // 8
            for number, value in enumerate(new):
                row = number // width if rows is None else rows[number // width]
                own[row * width + number % width] += value

    def slots(self) -> Iterator[Slot]:
        for tensor, values in enumerate(self._values):
            copy = memoryview(bytearray(values))
            yield Slot(tensor, "", "float64", self._specs[tensor].shape, copy)

    def restore(self, slot: Slot) -> None:
        self.write(slot.tensor, slot.data)


def numbers(*values: float) -> memoryview:
    return memoryview(bytearray(struct.pack(f"{len(values)}d", *values)))


def rows(*values: int) -> memoryview:
    return memoryview(bytearray(struct.pack(f"{len(values)}q", *values))).cast("q")


SPECS = [TensorSpec("table", "float64", (5, 2)), TensorSpec("bias", "float64", (3,))]


@given(
    st.lists(st.tuples(st.integers(0, 1 << 17), st.integers(1, 9)), min_size=1, max_size=12),
    st.integers(1, 9),
)
def test_each_tensor_has_one_server_and_no_server_has_much_more(
    shapes: list[tuple[int, int]], servers: int
) -> None:
    specs = [TensorSpec(str(i), "float32", shape) for i, shape in enumerate(shapes)]
    server_of = place(specs, servers)
    load = [0] * servers
    for spec, server_index in zip(specs, server_of, strict=True):
        load[server_index] += spec.nbytes
    assert max(load) <= sum(load) / servers + max(spec.nbytes for spec in specs)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=60))
def test_nobody_pulls_ahead_of_the_bound(moves: list[tuple[int, int]]) -> None:
    collection, own = Collection(SPECS, 0, 1, Adding), dict.fromkeys(range(4), 0)
    for worker in own:
        collection.join(worker)
    for worker, staleness in moves:
        clock = own[worker] + 1
        collection.push(worker, clock, 0, [])
        own[worker] = clock
        assert collection.may_pull(clock, staleness) == (min(own.values()) >= clock - staleness)
        assert collection.may_pull(clock, None)


def test_values_and_rows_travel_both_ways() -> None:
    with Servers(2, Adding) as running:
        client = running.client(SPECS, [numbers(*range(10)), numbers(1, 2, 3)])
        into = [numbers(*[math.nan] * 10), numbers(0, 0, 0)]
        client.step(1, {0: Rows(rows(1, 4), numbers(10, 20, 30, 40)), 1: numbers(1, 1, 1)}, into)
        assert into[0].cast("d").tolist() == [0, 1, 12, 23, 4, 5, 6, 7, 38, 49]
        assert into[1].cast("d").tolist() == [2, 3, 4]
        report = client.report()
        assert report.servers[0].workers[2].pushes == 1
        assert "worker 2: step 1, 1 pushes, 1 pulls, age 0.0 (at most 0)" in str(report)


def register(connection: socket.socket, said: object) -> Frame:
    body = said if isinstance(said, bytes) else json.dumps(said).encode()
    connection.sendall(Frame(Operation.REGISTER, body=len(body)).pack() + body)
    frame = receive_frame(connection)
    connection.recv(frame.body, socket.MSG_WAITALL)
    return frame


def model(**changes: object) -> dict[str, object]:
    return {"tensors": encode(SPECS), "clock": None, "fills": False, **changes}


DENSE = Entry(1).pack()
ROWS = Entry(0, Layout.ROWS, 2).pack()
BAD_REQUESTS = {
    "another protocol": b"GET / HTTP/1.1\r\n\r\n" + bytes(40),
    "an unknown request": Frame(77).pack(),
    "too many parts": Frame(Operation.PUSH, 99).pack(),
    "more than it announces": Frame(Operation.PUSH, 1).pack(),
    "a body that is too long": Frame(Operation.PUSH, 1, 1, 0, 1 << 50).pack() + DENSE,
    "a part twice": Frame(Operation.PUSH, 2, 1, 0, 80).pack() + DENSE + DENSE,
    "a part that is not there": Frame(Operation.PUSH, 1, 1, 0, 16).pack() + Entry(7).pack(),
    "an unknown layout": Frame(Operation.PUSH, 1, 1, 0, 16).pack() + Entry(0, 9).pack(),
    "too many rows": Frame(Operation.PUSH, 1, 1, 0, 16).pack() + Entry(0, 1, 6).pack(),
    "dense rows": Frame(Operation.PUSH, 1, 1, 0, 16).pack() + Entry(0, 0, 2).pack(),
    "a version to come": Frame(Operation.PUSH, 0, 1, 99, 0).pack(),
    "values unasked": Frame(Operation.FILL, 0, 0, 0, 104).pack() + bytes(104),
    "a pull with a body": Frame(Operation.PULL, 0, 0, 0, 8).pack() + bytes(8),
    "a long report": Frame(Operation.REPORT, body=1 << 40).pack(),
    "a long list": Frame(Operation.REGISTER, body=1 << 40).pack(),
}
BAD_MODELS: dict[str, object] = {
    "bytes": b"\xff\xfe",
    "a list": [],
    "no tensors": model(tensors=[]),
    "a dtype": model(tensors=[["a", "int8", [2]]]),
    "a shape": model(tensors=[["a", "float32", [-2]]]),
    "a huge shape": model(tensors=[["a", "float32", [1 << 40, 1 << 40]]]),
    "a name": model(tensors=[["", "float32", [2]]]),
    "two of a name": model(tensors=[["a", "float32", [2]], ["a", "float32", [2]]]),
    "too many fields": model(tensors=[["a", "float32", [2], [1]]]),
    "a clock": model(clock="now"),
}


def test_bad_requests_get_a_reason_and_harm_nobody() -> None:
    with Servers(1, Adding, workers=1) as running:
        remote = running.client(SPECS, [numbers(*range(10)), numbers(1, 2, 3)])
        for what, request in BAD_REQUESTS.items():
            with running.connect(0, 50) as connection:
                connection.settimeout(HANG)
                assert register(connection, model()).kind == Status.DONE, what
                connection.sendall(request)
                frame = receive_frame(connection)
                text = connection.recv(frame.body, socket.MSG_WAITALL).decode()
                assert frame.kind == Status.REFUSED, what
                assert text.startswith("parameter server 0: ") and "worker 50" in text, text
        for what, said in BAD_MODELS.items():
            with running.connect(0, 50) as connection:
                connection.settimeout(HANG)
                assert register(connection, said).kind == Status.REFUSED, what
        into = [numbers(*[0.0] * 10), numbers(0, 0, 0)]
        remote.step(1, None, into)
        assert into[1].cast("d").tolist() == [1, 2, 3]


def test_another_worker_fills_when_the_first_one_dies() -> None:
    with Servers(2, Adding, workers=2) as running:
        with running.connect(0, 50) as connection, running.connect(1, 50):
            connection.settimeout(HANG)
            assert register(connection, model()).kind == Status.FILL_IN
        remote = running.client(SPECS, [numbers(*range(10)), numbers(1, 2, 3)])
        into = [numbers(*[0.0] * 10), numbers(0, 0, 0)]
        remote.step(1, None, into)
        assert into[0].cast("d").tolist() == list(range(10))


def test_a_damaged_checkpoint_is_refused(tmp_path: pytest.TempPathFactory) -> None:
    path = f"{tmp_path}/ps"
    assert find(path, 0, 1) is None
    for text in (b"", b"something else", b"HVLPS02\n" + bytes(8), b"HVLPS02\n" + b"\xff" * 8):
        with open(f"{path}.0-of-1", "wb") as stream:
            stream.write(text)
        with pytest.raises(ArgumentError, match="0-of-1"):
            find(path, 0, 1)


def written(path: Path, *holds: int) -> None:
    """Write a checkpoint of servers that hold so many of the tensors, from the first one on."""
    for index, count in enumerate(holds):
        slots = [
            Slot(i, "", "float64", one.shape, numbers(*range(one.nbytes // 8)))
            for i, one in enumerate(SPECS[:count])
        ]
        numbered = {"number": 4, "version": 7, "clock": 3}
        write(file_of(str(path), index, len(holds)), numbered, SPECS, SPECS, slots)


def test_a_checkpoint_without_a_tensor_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "ps", 1)
    found = find(str(tmp_path / "ps"), 0, 1)
    assert found is not None
    assert (found.number, found.version, found.clock, found.specs) == (4, 7, 3, SPECS)
    (values,) = found.slots(SPECS[:1])
    assert values.data.cast("d").tolist() == list(range(10))
    with pytest.raises(ArgumentError, match="0-of-1 has no values of tensor 'bias'"):
        list(found.slots(SPECS))


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "ps", 2)
    file = tmp_path / "ps.0-of-1"
    file.write_bytes(file.read_bytes()[:-1])
    found = find(str(tmp_path / "ps"), 0, 1)
    assert found is not None
    with pytest.raises(ArgumentError, match="0-of-1 is shorter than its header says"):
        list(found.slots(SPECS))


def test_a_checkpoint_of_another_number_of_servers_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "ps")
    written(tmp_path / "ps", 2, 2)
    message = "ps' has the files of 2 servers, and this job has 3: start it with --servers 2"
    for index in range(3):
        with pytest.raises(ArgumentError, match=message):
            find(path, index, 3)
    (tmp_path / "ps.1-of-2").unlink()  # It is not complete, so that servers begin anew.
    assert find(path, 0, 3) is None and find(path, 0, 2) is None


def test_workers_that_come_and_die_leave_nothing() -> None:
    values = [numbers(*range(10)), numbers(1, 2, 3)]

    def live_and_die(clock: int) -> None:
        client = running.client(SPECS, values)
        client.step(clock, {1: numbers(1, 1, 1)}, values, None)
        client.close(goodbye=False)

    def held() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    with Servers(1, Adding) as running:
        stays = running.client(SPECS, values)
        before = held()
        for clock in range(1, 21):
            live_and_die(clock)
        with running.connect() as connection:
            connection.settimeout(HANG)
            assert register(connection, model()).kind == Status.DONE
            half = numbers(1, 1, 1)[:12]
            connection.sendall(Frame(Operation.PUSH, 1, 1, 0, 24).pack() + DENSE + half)
        wait_until(lambda: held() == before, "as many threads and descriptors as before")
        stays.step(1, None, values, None)
        assert values[1].cast("d").tolist() == [21, 22, 23]


@pytest.mark.parametrize("servers", [1, 2])
def test_an_interrupted_exchange_ends_the_worker_and_no_other(servers: int) -> None:
    def interrupted(link: object) -> None:
        raise KeyboardInterrupt

    with Servers(servers, Adding, workers=2) as running:
        values = [numbers(*range(10)), numbers(1, 2, 3)]
        clients = [running.client(SPECS, values), running.client(SPECS, values)]
        with pytest.raises(KeyboardInterrupt):
            clients[0].on_all(interrupted)
        with pytest.raises(HvdliteError, match="was interrupted"):
            clients[0].report()
        assert len(clients[1].report().servers) == servers


def test_a_child_of_fork_leaves_the_service_alone() -> None:
    with Servers(1, Adding) as running:
        client = running.client(SPECS, [numbers(*range(10)), numbers(1, 2, 3)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of fork() beside threads
            child = os.fork()
        if child == 0:
            try:
                client.report()
            except HvdliteError as error:
                os._exit(0 if "child of fork" in str(error) else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        assert client.report().servers[0].version == 0
        running.client().report()  # The listener still accepts.


WORKERS, STEPS = 4, 12
STARTS = range(0, 64 * WORKERS, 64)


@pytest.mark.parametrize("staleness", [None, 0, 2])
def test_each_push_counts_once_and_nobody_sees_less_than_its_bound(staleness: int | None) -> None:
    # Each worker adds 1 to its own row of all tensors, so that the values of a row are the number
    # of its pushes. Unequal values of a row, or of two tensors of a server, are half of a push.
    specs = [TensorSpec(name, "float64", (WORKERS, 64)) for name in "abc"]
    size = specs[0].nbytes
    errors: list[str] = []

    def work(row: int, remote: Client) -> None:
        naps = random.Random(row)
        gradient = memoryview(bytearray(size))
        gradient.cast("d")[64 * row : 64 * (row + 1)] = memoryview(array("d", [1.0] * 64))
        into = [memoryview(bytearray(size)) for _ in specs]
        for clock in range(1, STEPS + 1):
            time.sleep(naps.random() * 0.004)
            remote.step(clock, dict.fromkeys(range(3), gradient), into, staleness)
            seen = [one.cast("d").tolist() for one in into]
            if seen[0] != seen[2] or any(len(set(seen[0][at : at + 64])) > 1 for at in STARTS):
                errors.append(f"half a push: {seen}")
            least = 0 if staleness is None else clock - staleness
            if seen[0][64 * row] != clock or min(seen[0]) < least or min(seen[1]) < least:
                errors.append(f"worker {row} at clock {clock} saw {seen}")

    with Servers(2, Adding, workers=WORKERS) as running:
        zeros = [memoryview(bytearray(size)) for _ in specs]
        remotes = [running.client(specs, zeros) for _ in range(WORKERS)]
        threads = [
            threading.Thread(target=work, args=(row, remote)) for row, remote in enumerate(remotes)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        remotes[0].step(STEPS, None, zeros)
        assert all(set(one.cast("d")) == {float(STEPS)} for one in zeros)
        for server_report in remotes[0].report().servers:
            assert server_report.version == WORKERS * STEPS
            assert [one.pushes for one in server_report.workers.values()] == [STEPS] * WORKERS


def test_the_age_of_a_push_is_what_its_worker_had_not_seen() -> None:
    with Servers(1, Adding, workers=2) as running:
        values = [numbers(*range(10)), numbers(1, 2, 3)]
        slow, fast = running.client(SPECS, values), running.client(SPECS, values)
        for clock in (1, 2, 3):
            fast.step(clock, {1: numbers(1, 1, 1)}, values)
        slow.step(1, {1: numbers(1, 1, 1)}, values)
        slow.step(2, {1: numbers(1, 1, 1)}, None)
        report = slow.report()
        ages = {key: (one.age_mean, one.age_max) for key, one in report.servers[0].workers.items()}
        assert ages == {1: (1.5, 3), 2: (0.0, 0)}
        assert (report.age_mean, report.age_max) == (0.6, 3)
