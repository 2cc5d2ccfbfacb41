"""The parameter server without a framework: placement, clocks, and requests that are not meant."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import socket
import struct
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlite.errors import ArgumentError, HvdliteError, MismatchError
from hvdlite.parameter_server import server
from hvdlite.parameter_server.checkpoint import Snapshot, find, write
from hvdlite.parameter_server.client import Client, Rows
from hvdlite.parameter_server.clocks import Clocks
from hvdlite.parameter_server.placement import Part, place
from hvdlite.parameter_server.storage import Gradient, Slot, Storage
from hvdlite.parameter_server.tensors import TensorSpec, decode, encode
from hvdlite.parameter_server.wire import Entry, Frame, Layout, Operation, Status, receive_frame
from parameter_servers import Servers
from patience import HANG


@pytest.fixture(autouse=True)
def short_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_LINGER_SECONDS", 0.2)


class Adding:
    """A storage of float64 that adds what is pushed."""

    def __init__(self, name: str, parts: Sequence[Part]) -> None:
        self._parts = list(parts)
        self._values = [memoryview(bytearray(part.nbytes)) for part in parts]

    def read(self, part: int, into: memoryview) -> None:
        into[:] = self._values[part]

    def write(self, part: int, values: memoryview) -> None:
        self._values[part][:] = values

    def apply(self, gradients: Sequence[Gradient]) -> None:
        for part, values, rows in gradients:
            own, new = self._values[part].cast("d"), values.cast("d")
            width = self._parts[part].spec.row_bytes // 8
            for number, value in enumerate(new):
                row = number // width + self._parts[part].first if rows is None else None
                row = rows[number // width] if rows is not None else row
                assert row is not None
                own[(row - self._parts[part].first) * width + number % width] += value

    def slots(self) -> Iterator[Slot]:
        for part, values in enumerate(self._values):
            copy = memoryview(bytearray(values))
            yield Slot(part, "", "float64", self._parts[part].shape, True, copy)

    def restore(
        self, part: int, name: str, dtype: str, shape: Sequence[int], data: bytearray
    ) -> None:
        self._values[part][:] = data


def adding(name: str, parts: Sequence[Part]) -> Storage:
    return Adding(name, parts)


def numbers(*values: float) -> memoryview:
    return memoryview(bytearray(struct.pack(f"{len(values)}d", *values)))


def rows(*values: int) -> memoryview:
    return memoryview(bytearray(struct.pack(f"{len(values)}q", *values))).cast("q")


SPECS = [TensorSpec("table", "float64", (5, 2)), TensorSpec("bias", "float64", (3,))]


@given(
    st.lists(st.tuples(st.integers(0, 1 << 17), st.integers(1, 9)), min_size=1, max_size=12),
    st.integers(1, 9),
)
def test_each_row_has_one_server_and_no_server_has_much_more(
    shapes: list[tuple[int, int]], servers: int
) -> None:
    specs = [TensorSpec(str(i), "float32", shape) for i, shape in enumerate(shapes)]
    parts = place(specs, servers)
    for index, spec in enumerate(specs):
        own = [part for part in parts if part.tensor == index]
        assert sum(part.rows for part in own) == spec.rows
        ends = [0, *(part.first + part.rows for part in own)]
        assert [part.first for part in own] == ends[:-1]
    load = [sum(part.nbytes for part in parts if part.server == i) for i in range(servers)]
    total = sum(load)
    assert max(load) <= max(2.0 * total / servers, total / servers + (300 << 10)) + 9 * 64 * 4


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=60))
def test_nobody_pulls_ahead_of_the_bound(moves: list[tuple[int, int]]) -> None:
    clocks, own = Clocks(), dict.fromkeys(range(4), 0)
    for worker in own:
        clocks.join(worker)
    for worker, staleness in moves:
        clock = own[worker] + 1
        clocks.advance(worker, clock)
        own[worker] = clock
        assert clocks.may_pull(clock, staleness) == (min(own.values()) >= clock - staleness)
        assert clocks.may_pull(clock, None)


def test_values_and_rows_travel_both_ways() -> None:
    with Servers(2, adding) as running:
        client = running.client()
        first = [numbers(*range(10)), numbers(1, 2, 3)]
        remote = client.register("", SPECS, first)
        into = [numbers(*[math.nan] * 10), numbers(0, 0, 0)]
        remote.step(1, {0: Rows(rows(1, 4), numbers(10, 20, 30, 40)), 1: numbers(1, 1, 1)}, into)
        assert into[0].cast("d").tolist() == [0, 1, 12, 23, 4, 5, 6, 7, 38, 49]
        assert into[1].cast("d").tolist() == [2, 3, 4]
        report = client.report()
        assert report.servers[0].workers[2].pushes == 1
        assert "worker 2: step 1" in str(report)


def register(connection: socket.socket, said: object) -> Frame:
    body = said if isinstance(said, bytes) else json.dumps(said).encode()
    connection.sendall(Frame(Operation.REGISTER, body=len(body)).pack() + body)
    frame = receive_frame(connection)
    connection.recv(frame.body, socket.MSG_WAITALL)
    return frame


def model(**changes: object) -> dict[str, object]:
    return {"name": "", "tensors": encode(SPECS), "clock": None, "fills": False, **changes}


DENSE = Entry(1).pack()
ROWS = Entry(0, Layout.ROWS, 2).pack()
BAD_REQUESTS = {
    "another protocol": b"GET / HTTP/1.1\r\n\r\n" + bytes(40),
    "an unknown request": Frame(77).pack(),
    "an unknown collection": Frame(Operation.PUSH, 9).pack(),
    "too many parts": Frame(Operation.PUSH, 0, 99).pack(),
    "more than it announces": Frame(Operation.PUSH, 0, 1).pack(),
    "a body that is too long": Frame(Operation.PUSH, 0, 1, 1, 0, 1 << 50).pack() + DENSE,
    "a part twice": Frame(Operation.PUSH, 0, 2, 1, 0, 80).pack() + DENSE + DENSE,
    "a part that is not there": Frame(Operation.PUSH, 0, 1, 1, 0, 16).pack() + Entry(7).pack(),
    "an unknown layout": Frame(Operation.PUSH, 0, 1, 1, 0, 16).pack() + Entry(0, 9).pack(),
    "too many rows": Frame(Operation.PUSH, 0, 1, 1, 0, 16).pack() + Entry(0, 1, 6).pack(),
    "dense rows": Frame(Operation.PUSH, 0, 1, 1, 0, 16).pack() + Entry(0, 0, 2).pack(),
    "a version to come": Frame(Operation.PUSH, 0, 0, 1, 99, 0).pack(),
    "values unasked": Frame(Operation.FILL, 0, 0, 0, 0, 104).pack() + bytes(104),
    "a pull with a body": Frame(Operation.PULL, 0, 0, 0, 0, 8).pack() + bytes(8),
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
    with Servers(1, adding, workers=1) as running:
        remote = running.client().register("", SPECS, [numbers(*range(10)), numbers(1, 2, 3)])
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
    with Servers(2, adding, workers=2) as running:
        with running.connect(0, 50) as connection, running.connect(1, 50):
            connection.settimeout(HANG)
            assert register(connection, model()).kind == Status.FILL_IN
        remote = running.client().register("", SPECS, [numbers(*range(10)), numbers(1, 2, 3)])
        into = [numbers(*[0.0] * 10), numbers(0, 0, 0)]
        remote.step(1, None, into)
        assert into[0].cast("d").tolist() == list(range(10))


def test_two_models_of_one_name_are_refused() -> None:
    with Servers(1, adding, workers=2) as running:
        clients: list[Client] = [running.client(), running.client()]
        clients[0].register("", SPECS, [numbers(*range(10)), numbers(1, 2, 3)])
        with pytest.raises(MismatchError, match="'bias' is missing there|'bias' is missing here"):
            clients[1].register("", SPECS[:1], [numbers(*range(10))])


def test_a_damaged_checkpoint_is_refused(tmp_path: pytest.TempPathFactory) -> None:
    path = f"{tmp_path}/ps"
    assert find(path) is None
    for text in (b"", b"something else", b"HVLPS01\n" + bytes(8), b"HVLPS01\n" + b"\xff" * 8):
        with open(f"{path}.0-of-1", "wb") as stream:
            stream.write(text)
        with pytest.raises(ArgumentError, match="0-of-1"):
            find(path)


def test_a_checkpoint_that_lacks_rows_of_a_tensor_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "ps.ckpt")
    (whole, _) = place(SPECS, 1)
    some = dataclasses.replace(whole, rows=3)
    slot = Slot(0, "", "float64", some.shape, True, numbers(*range(6)))
    write(path, 0, 1, 1, 1, [Snapshot("", 1, 1, SPECS, [some], [slot])])
    found = find(path)
    assert found is not None
    (values,) = found.slots("", some)
    assert memoryview(values.data).cast("d").tolist() == list(range(6))
    with pytest.raises(ArgumentError, match="the checkpoint has 3 of 5 rows of tensor 'table'"):
        list(found.slots("", whole))


def test_workers_go_on_at_the_clock_of_the_server_that_is_furthest_behind(tmp_path: Path) -> None:
    path = str(tmp_path / "ps.ckpt")
    for server_index, (version, clock) in enumerate([(7, 3), (9, 5)]):
        snapshot = Snapshot("model", version, clock, [], [], [])
        write(path, server_index, 2, 1, 4 + server_index, [snapshot])
    found = find(path)
    assert found is not None
    assert (found.clock("model"), found.version("model"), found.number) == (3, 9, 4)


def test_descriptions_of_tensors_survive_the_way() -> None:
    assert decode(json.loads(json.dumps(encode(SPECS)))) == SPECS


@pytest.mark.parametrize("servers", [1, 2])
def test_an_interrupted_exchange_ends_the_worker_and_no_other(servers: int) -> None:
    def interrupted(link: object) -> None:
        raise KeyboardInterrupt

    with Servers(servers, adding, workers=2) as running:
        clients = [running.client(), running.client()]
        for client in clients:
            client.register("", SPECS, [numbers(*range(10)), numbers(1, 2, 3)])
        with pytest.raises(KeyboardInterrupt):
            clients[0].on_all(interrupted, clients[0].links)
        with pytest.raises(HvdliteError, match="was interrupted"):
            clients[0].report()
        assert len(clients[1].report().servers) == servers


def test_a_child_of_fork_leaves_the_service_alone() -> None:
    with Servers(1, adding) as running:
        client = running.client()
        client.register("", SPECS, [numbers(*range(10)), numbers(1, 2, 3)])
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
