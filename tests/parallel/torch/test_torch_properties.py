"""Any mix of collectives at once gives what the collective table expects of each alone.

One world serves all cases of a test: its ranks take cases over a socket. In a case each rank
submits the same collectives in its own order, all at once, and then waits for them.
"""

from __future__ import annotations

import pickle
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

import hvdlite.torch as hvd
from harness import World
from parallel.core.test_collective_table import COMBINE, agrees, given, reduced, same
from patience import HANG

PRELOAD = ("torch._dynamo",)

INTEGERS = ["uint8", "int8", "int16", "int32", "int64"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]


@dataclass(frozen=True)
class Operation:
    """One collective of a case, over one or more tensors."""

    kind: str
    op: str
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    seed: int


def splits_of(operation: Operation, rank: int, size: int) -> list[int]:
    """Return the number of rows that a rank sends to each rank in an alltoall."""
    return [(operation.seed + 3 * rank + 2 * peer) % 4 for peer in range(size)]


def inputs_of(operation: Operation, rank: int, size: int) -> list[torch.Tensor]:
    """Make a rank's tensors. For some collectives the first dimension depends on the rank."""
    tensors = []
    for dtype, shape in zip(operation.dtypes, operation.shapes, strict=True):
        if operation.kind == "allgather":
            shape = (shape[0] * rank % 4, *shape[1:])
        if operation.kind == "alltoall":
            shape = (sum(splits_of(operation, rank, size)), *shape[1:])
        tensors.append(given(rank, dtype, shape))
    return tensors


def start(operation: Operation, name: str) -> hvd.Handle:
    tensors = inputs_of(operation, hvd.rank(), hvd.size())
    if operation.kind == "allgather":
        return hvd.allgather_async(tensors[0], name)
    if operation.kind == "broadcast":
        return hvd.broadcast_async(tensors[0], operation.seed % hvd.size(), name)
    if operation.kind == "alltoall":
        splits = splits_of(operation, hvd.rank(), hvd.size())
        return hvd.alltoall_async(tensors[0], splits, name)
    op = getattr(hvd, operation.op)
    if operation.kind == "reducescatter":
        return hvd.grouped_reducescatter_async(tensors, op=op, name=name)
    return hvd.grouped_allreduce_async(tensors, op=op, name=name)


def rank_body(address: str, key: bytes) -> None:
    torch.set_num_threads(1)
    hvd.init()
    with Client(address, "AF_UNIX", authkey=key) as connection:
        connection.send(hvd.rank())
        while (case := connection.recv()) is not None:
            operations, orders = case
            handles = {i: start(operations[i], f"property.{i}") for i in orders[hvd.rank()]}
            results = [hvd.synchronize(handles[i]) for i in range(len(operations))]
            # Pickled here: the connection's own pickler would move tensors through /dev/shm.
            # An alltoall also returns how many rows came from each rank.
            firsts = [one[0] if isinstance(one, tuple) else one for one in results]
            lists = [one if isinstance(one, list) else [one] for one in firsts]
            connection.send_bytes(pickle.dumps(lists))


class Ranks:
    """A world that waits for cases."""

    def __init__(self, world: World, connections: list[Connection], hosts: list[int]) -> None:
        self.world = world
        self.connections = connections
        self.hosts = hosts

    def run(self, operations: list[Operation], orders: list[list[int]]) -> list[Any]:
        """Return the results by rank."""
        for connection in self.connections:
            connection.send((operations, orders))
        results = []
        for connection in self.connections:
            if not connection.poll(HANG):
                raise AssertionError(f"no answer; stderr: {self.world.stderr(len(results))}")
            results.append(pickle.loads(connection.recv_bytes()))
        return results


WORLDS = {
    "2 ranks": ([0, 0], {}),
    "3 ranks, nothing fused": ([0, 0, 0], {"HVDLITE_FUSION_THRESHOLD": "1"}),
    "4 ranks, small batches": ([0, 0, 0, 0], {"HVDLITE_FUSION_THRESHOLD": "4096"}),
    "3 ranks on 2 hosts": ([0, 0, 1], {}),
}


@pytest.fixture(scope="module", params=WORLDS)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Ranks]:
    hosts, env = WORLDS[request.param]
    key = secrets.token_bytes(16)
    address = str(tmp_path_factory.mktemp("ranks") / "socket")
    with (
        Listener(address, "AF_UNIX", backlog=len(hosts), authkey=key) as listener,
        World(len(hosts), rank_body, address, key, hosts=hosts, env=env) as world,
    ):
        by_rank = {}
        for _ in hosts:
            connection = listener.accept()
            by_rank[connection.recv()] = connection
        connections = [by_rank[rank] for rank in range(len(hosts))]
        yield Ranks(world, connections, hosts)
        for connection in connections:
            connection.send(None)
        world.wait()
        for connection in connections:
            connection.close()


def check(operation: Operation, results: list[list[torch.Tensor]], hosts: list[int]) -> None:
    """Compare the results of all ranks with what each of the collectives gives alone."""
    size = len(hosts)
    inputs = [inputs_of(operation, rank, size) for rank in range(size)]
    if operation.kind == "alltoall":
        for receiver, (result,) in enumerate(results):
            parts = [
                sent.split(splits_of(operation, rank, size))[receiver]
                for rank, (sent,) in enumerate(inputs)
            ]
            assert same(result, torch.cat(parts)), operation
        return
    if operation.kind == "reducescatter":  # The shares, in order, are the result of an allreduce.
        results = [[torch.cat(parts) for parts in zip(*results, strict=True)]]
    for result in results:
        for index, mine in enumerate(result):
            given_by = [tensors[index] for tensors in inputs]
            if operation.kind == "allgather":
                assert same(mine, torch.cat(given_by)), operation
            elif operation.kind == "broadcast":
                assert same(mine, given_by[operation.seed % size]), operation
            else:
                expected = reduced(given_by, hosts, operation.op)
                assert agrees(mine, expected, range(size), operation.op), operation
                assert same(mine, results[0][index]), operation


def shapes(least: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw shapes of at least so many dimensions."""
    small = st.lists(st.integers(0, 7), min_size=least, max_size=4).map(tuple)
    large = st.sampled_from([(1023,), (4096,), (70_001,), (3, 50_000)])
    return st.one_of(small, small, small, large)


@st.composite
def operations(draw: st.DrawFn) -> Operation:
    kinds = ["allreduce", "allreduce", "allgather", "broadcast", "reducescatter", "alltoall"]
    kind, seed = draw(st.sampled_from(kinds)), draw(st.integers(0, 1000))
    shape = shapes(0 if kind in ("allreduce", "broadcast") else 1)
    if kind not in ("allreduce", "reducescatter"):
        dtype = draw(st.sampled_from([*INTEGERS, *FLOATS, "bool"]))
        return Operation(kind, "", (dtype,), (draw(shape),), seed)
    count = draw(st.integers(1, 4))
    dtypes = draw(st.tuples(*[st.sampled_from([*INTEGERS, *FLOATS])] * count))
    own_shapes = draw(st.tuples(*[shape] * count))
    return Operation(kind, draw(st.sampled_from(sorted(COMBINE))), dtypes, own_shapes, seed)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Operation], list[list[int]]]:
    """Draw operations, and for each of up to four ranks the order in which it submits them."""
    every = draw(st.lists(operations(), min_size=1, max_size=6))
    orders = [draw(st.permutations(range(len(every)))) for _ in range(4)]
    return every, orders


@settings(
    max_examples=50,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@hypothesis.given(case=cases())
def test_a_mix_gives_what_each_gives_alone(
    ranks: Ranks, case: tuple[list[Operation], list[list[int]]]
) -> None:
    every, orders = case
    results = ranks.run(every, orders)
    for number, operation in enumerate(every):
        check(operation, [result[number] for result in results], ranks.hosts)
