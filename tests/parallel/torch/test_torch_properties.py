"""Collective results equal those of numpy, for any mix of collectives.

One world serves all cases of a test: its ranks take cases over a socket. In a case each rank
submits the same collectives in its own order, all at once, and then waits for them.
"""

from __future__ import annotations

import functools
import pickle
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import hvdlite.torch as hvd
from harness import World
from patience import HANG
from references.sum_tree import reduce_by_tree

PRELOAD = ("torch._dynamo",)
Array = NDArray[Any]

INTEGERS = ["uint8", "int8", "int16", "int32", "int64"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
OPS = {"Sum": np.add, "Average": np.add, "Min": np.minimum, "Max": np.maximum,
       "Product": np.multiply}  # fmt: skip


@dataclass(frozen=True)
class Operation:
    """One collective of a case, over one or more tensors."""

    kind: str
    op: str
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    seed: int
    weighted: bool = False


def splits_of(operation: Operation, rank: int, size: int) -> list[int]:
    """Return the number of rows that a rank sends to each rank in an alltoall."""
    return [(operation.seed + 3 * rank + 2 * peer) % 4 for peer in range(size)]


@functools.lru_cache(maxsize=64)
def inputs_of(operation: Operation, rank: int, size: int) -> list[torch.Tensor]:
    """Make a rank's tensors. For some collectives the first dimension depends on the rank."""
    generator = np.random.default_rng([operation.seed, rank])
    tensors = []
    for dtype, shape in zip(operation.dtypes, operation.shapes, strict=True):
        if operation.kind == "allgather":
            shape = ((shape[0] if shape else 1) * rank % 4, *shape[1:])
        if operation.kind == "alltoall":
            shape = (sum(splits_of(operation, rank, size)), *shape[1:])
        if dtype == "bool":
            values = generator.integers(0, 2, shape)
        elif dtype in INTEGERS:
            low = 0 if dtype == "uint8" else -100
            values = generator.integers(low, 100, shape)
        else:
            values = generator.standard_normal(shape)
        tensors.append(torch.from_numpy(np.asarray(values)).to(getattr(torch, dtype)))
    return tensors


def weight_of(operation: Operation, rank: int) -> float | None:
    return float((operation.seed + rank) % 3) if operation.weighted else None


def start(operation: Operation, name: str) -> hvd.Handle:
    tensors = inputs_of(operation, hvd.rank(), hvd.size())
    if operation.kind == "allgather":
        return hvd.allgather_async(tensors[0], name)
    if operation.kind == "broadcast":
        return hvd.broadcast_async(tensors[0], operation.seed % hvd.size(), name)
    if operation.kind == "alltoall":
        splits = splits_of(operation, hvd.rank(), hvd.size())
        return hvd.alltoall_async(tensors[0], splits, name).then(lambda result: result[0])
    weight = weight_of(operation, hvd.rank())
    op = getattr(hvd, operation.op)
    if operation.kind == "reducescatter":
        return hvd.grouped_reducescatter_async(tensors, op=op, name=name)
    return hvd.grouped_allreduce_async(tensors, op=op, name=name, weight=weight)


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
            lists = [result if isinstance(result, list) else [result] for result in results]
            connection.send_bytes(pickle.dumps(lists))


class Ranks:
    """A world that waits for cases."""

    def __init__(self, world: World, connections: list[Connection], one_host: bool) -> None:
        self.world = world
        self.connections = connections
        self.one_host = one_host

    @property
    def size(self) -> int:
        return len(self.connections)

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
    "2 ranks": (2, None, {}),
    "3 ranks, nothing fused": (3, None, {"HVDLITE_FUSION_THRESHOLD": "1"}),
    "4 ranks, small batches": (4, None, {"HVDLITE_FUSION_THRESHOLD": "4096"}),
    "3 ranks on 2 hosts": (3, [0, 0, 1], {}),
}


@pytest.fixture(scope="module", params=WORLDS)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Ranks]:
    size, hosts, env = WORLDS[request.param]
    key = secrets.token_bytes(16)
    address = str(tmp_path_factory.mktemp("ranks") / "socket")
    with (
        Listener(address, "AF_UNIX", backlog=size, authkey=key) as listener,
        World(size, rank_body, address, key, hosts=hosts, env=env) as world,
    ):
        by_rank = {}
        for _ in range(size):
            connection = listener.accept()
            by_rank[connection.recv()] = connection
        connections = [by_rank[rank] for rank in range(size)]
        yield Ranks(world, connections, hosts is None)
        for connection in connections:
            connection.send(None)
        world.wait()
        for connection in connections:
            connection.close()


# The expected results, by numpy.


def accumulator(dtype: str) -> str:
    """16-bit floats are accumulated in float32 and rounded once."""
    return "float32" if dtype in ("float16", "bfloat16") else dtype


def as_numpy(tensor: torch.Tensor) -> Array:
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def expected_reduction(operation: Operation, size: int, index: int) -> Array:
    """Reduce by the tree."""
    dtype = operation.dtypes[index]
    arrays = [
        as_numpy(inputs_of(operation, rank, size)[index]).astype(accumulator(dtype))
        for rank in range(size)
    ]
    if operation.weighted:
        weights = [weight_of(operation, rank) or 0.0 for rank in range(size)]
        total = sum(weights) or 1.0
        arrays = [array * (w / total) for array, w in zip(arrays, weights, strict=True)]
    with np.errstate(over="ignore"):
        result = reduce_by_tree(arrays, OPS[operation.op])
    if operation.op == "Average" and not operation.weighted:
        if dtype in INTEGERS:
            exact = np.sum([a.astype("int64") for a in arrays], axis=0, dtype="int64")
            wrapped = exact.astype(dtype).astype("int64")
            return np.asarray(np.trunc(wrapped / size))
        result = result / np.asarray(size, dtype=accumulator(dtype))
    return np.asarray(result)


def check_result(operation: Operation, results: list[torch.Tensor], ranks: Ranks) -> None:
    inputs = [inputs_of(operation, rank, ranks.size) for rank in range(ranks.size)]
    if operation.kind == "allgather":
        assert torch.equal(results[0], torch.cat([tensors[0] for tensors in inputs]))
    elif operation.kind == "broadcast":
        assert torch.equal(results[0], inputs[operation.seed % ranks.size][0])
    else:
        for index, result in enumerate(results):
            check_reduction(operation, index, result, ranks)


def check_reduction(operation: Operation, index: int, result: torch.Tensor, ranks: Ranks) -> None:
    dtype = operation.dtypes[index]
    torch_dtype = getattr(torch, dtype)
    assert result.dtype == torch_dtype and tuple(result.shape) == operation.shapes[index]
    expected = torch.from_numpy(expected_reduction(operation, ranks.size, index)).to(torch_dtype)
    exact = operation.op in ("Min", "Max") or dtype in INTEGERS
    # Ranks 0 and 1 on one host and 2 on another are nodes of the tree over all of them.
    rounded_once = ranks.one_host or accumulator(dtype) == dtype
    if exact or (rounded_once and operation.op in ("Sum", "Product")):
        assert torch.equal(result, expected), (operation, result, expected)
    else:
        # One rounding per rank, or per host, of values of about one.
        bound = 8 * torch.finfo(torch_dtype).eps
        assert torch.allclose(result.double(), expected.double(), rtol=bound, atol=bound)


def check_exchange(operation: Operation, results: list[list[torch.Tensor]]) -> None:
    size = len(results)
    for receiver, (result,) in enumerate(results):
        parts = []
        for rank in range(size):
            splits = splits_of(operation, rank, size)
            parts.append(inputs_of(operation, rank, size)[0].split(splits)[receiver])
        assert torch.equal(result, torch.cat(parts)), operation


def shapes() -> st.SearchStrategy[tuple[int, ...]]:
    small = st.lists(st.integers(0, 7), max_size=4).map(tuple)
    large = st.sampled_from([(1023,), (4096,), (70_001,), (3, 50_000)])
    return st.one_of(small, small, small, large)


@st.composite
def operations(draw: st.DrawFn) -> Operation:
    kinds_of_call = [
        "allreduce",
        "allreduce",
        "allgather",
        "broadcast",
        "reducescatter",
        "alltoall",
    ]
    kind = draw(st.sampled_from(kinds_of_call))
    seed = draw(st.integers(0, 1000))
    if kind not in ("allreduce", "reducescatter"):
        dtype = draw(st.sampled_from([*INTEGERS, *FLOATS, "bool"]))
        shape = draw(shapes().filter(lambda shape: kind == "broadcast" or len(shape) > 0))
        return Operation(kind, "", (dtype,), (shape,), seed)
    op = draw(st.sampled_from(sorted(OPS)))
    weighted = kind == "allreduce" and op == "Average" and draw(st.booleans())
    kinds = FLOATS if weighted else [*INTEGERS, *FLOATS]
    count = draw(st.integers(1, 4))
    dtypes = draw(st.lists(st.sampled_from(kinds), min_size=count, max_size=count).map(tuple))
    one_shape = shapes().filter(lambda shape: kind == "allreduce" or len(shape) > 0)
    own_shapes = draw(st.lists(one_shape, min_size=count, max_size=count).map(tuple))
    return Operation(kind, op, dtypes, own_shapes, seed, weighted)


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
@given(case=cases())
def test_equal_to_numpy(ranks: Ranks, case: tuple[list[Operation], list[list[int]]]) -> None:
    every, orders = case
    results = ranks.run(every, orders)
    for number, operation in enumerate(every):
        by_rank = [result[number] for result in results]
        if operation.kind == "alltoall":
            check_exchange(operation, by_rank)
            continue
        if operation.kind == "reducescatter":
            # The shares, in order, equal the result of an allreduce.
            by_rank = [[torch.cat(parts) for parts in zip(*by_rank, strict=True)]]
        check_result(operation, by_rank[0], ranks)
        for other in by_rank[1:]:
            for a, b in zip(by_rank[0], other, strict=True):
                # The comparison is by bits: -0.0 is not 0.0, and a NaN equals itself.
                assert as_numpy(a).tobytes() == as_numpy(b).tobytes(), operation
