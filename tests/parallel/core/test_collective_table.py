"""Every collective x dtype x shape x op x form x process set, with 1 to 5 ranks on 1 to 3 hosts.

The rarer dtypes come in two forms of each collective.
Each rank computes the inputs of all ranks and the expected results: integers exactly, floats to the
bit in the order of accumulation that csrc/host/backend.h states. `test_torch_properties` draws
mixes of such calls; here nothing is left to chance.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from parallel.scenarios import Later, make_tests, run_all
from references.sum_tree import reduce_by_tree

PRELOAD = ("torch._dynamo",)

torch: Any = Later("torch")
hvd: Any = Later("hvdlite.torch")
Array = NDArray[Any]

UNSIGNED = ["uint8", "uint16", "uint32", "uint64"]
INTEGERS = [*UNSIGNED, "int8", "int16", "int32", "int64"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]
COPIED = ["bool", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
          "float8_e8m0fnu", "complex32"]  # fmt: skip
ANY = [*INTEGERS, *FLOATS, *COMPLEX, *COPIED]
IN_EVERY_FORM = ["uint8", "int8", "int16", "int32", "int64", *FLOATS, "bool"]
SHAPES = [(), (0,), (1,), (7,), (5, 3), (2, 0, 3), (257, 33)]
ROWS = [shape for shape in SHAPES if shape]
COMBINE = {"Sum": np.add, "Average": np.add, "Min": np.minimum, "Max": np.maximum,
           "Product": np.multiply}  # fmt: skip
# By name: the number of ranks, and the host of each.
WORLDS: dict[str, tuple[int, list[int] | None]] = {
    "1 rank": (1, None),
    "4 ranks": (4, None),
    "2 ranks, 2 hosts": (2, [0, 1]),
    "3 ranks, 2 hosts": (3, [0, 1, 1]),
    "5 ranks, 3 hosts": (5, [0, 0, 1, 2, 2]),
}

Place = tuple[Any, list[int], list[int]]  # a process set, its ranks, and the host of each
place_of: dict[str, Place] = {}


def start(hosts: Sequence[int]) -> None:
    """Begin the world, with a process set beside that of all ranks if there can be one."""
    torch.set_num_threads(1)
    hvd.init()
    everyone = list(range(hvd.size()))
    place_of["all ranks"] = (hvd.global_process_set, everyone, list(hosts))
    if len(everyone) > 2:
        some = hvd.add_process_set(everyone[1:])
        place_of["all but rank 0"] = (some, everyone[1:], list(hosts[1:]))


def places() -> Iterator[Place]:
    """Return the process sets of which this rank is a member."""
    for process_set, ranks, hosts in place_of.values():
        if hvd.rank() in ranks:
            yield process_set, ranks, hosts


@functools.lru_cache(maxsize=512)
def given(rank: int, dtype: str, shape: tuple[int, ...]) -> Any:
    generator = np.random.default_rng([rank, len(dtype), *shape])
    if dtype == "bool":
        values = generator.integers(0, 2, shape)
    elif dtype in INTEGERS:
        values = generator.integers(0 if dtype in UNSIGNED else -100, 100, shape)
    else:
        values = generator.standard_normal(shape)
        if dtype.startswith("complex"):
            values = values + 1j * generator.standard_normal(shape)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
        return torch.from_numpy(np.asarray(values)).to(getattr(torch, dtype))


def wide(tensor: Any) -> Array:
    """Widen 16-bit floats to float32, in which they are accumulated."""
    is_narrow = tensor.dtype in (torch.float16, torch.bfloat16)
    return np.asarray((tensor.float() if is_narrow else tensor).numpy())


def reduced(tensors: Sequence[Any], hosts: Sequence[int], op: str) -> Any:
    """Reduce as the contract says: by the tree, rounded on each host and at the end.

    An average of floats is still to be divided.
    """

    def narrow(total: Array) -> Any:
        return torch.from_numpy(np.asarray(total)).to(tensors[0].dtype)

    with np.errstate(over="ignore"):
        arrays = [wide(tensor) for tensor in tensors]
        total = reduce_by_tree(arrays, COMBINE[op], hosts, lambda total: wide(narrow(total)))
        result = narrow(total)
    if op != "Average":
        return result
    if not is_inexact(result):
        return torch.from_numpy(np.asarray(np.trunc(result.numpy() / len(tensors)))).to(
            result.dtype
        )
    return result


def agrees(result: Any, expected: Any, ranks: Sequence[int], op: str) -> bool:
    """Compare to the bit, but allow an average of floats one more or one less rounding.

    The same for a product of complex numbers: NumPy fuses its multiplications and additions.
    What is expected comes from `reduced`.
    """
    if not is_inexact(result) or (
        op != "Average" and not (result.is_complex() and op == "Product")
    ):
        return same(result, expected)
    bound = 4 * torch.finfo(result.dtype).eps
    exact = torch.complex128 if result.is_complex() else torch.float64
    expected = expected.to(exact) / (len(ranks) if op == "Average" else 1)
    return bool(torch.allclose(result.to(exact), expected, rtol=bound, atol=bound))


def is_inexact(tensor: Any) -> bool:
    """Return whether the elements of this dtype are rounded."""
    return bool(tensor.is_floating_point() or tensor.is_complex())


def with_op() -> Iterator[tuple[Place, str, str]]:
    """Yield every process set with every dtype and every op that can reduce it."""
    for place, dtype, op in itertools.product(places(), INTEGERS + FLOATS + COMPLEX, COMBINE):
        if dtype not in COMPLEX or op not in ("Min", "Max"):
            yield place, dtype, op


def same(a: Any, b: Any) -> bool:
    """Compare dtype, shape and bits."""
    if a.dtype != b.dtype or a.shape != b.shape or a.numel() == 0:
        return bool(a.dtype == b.dtype and a.shape == b.shape)
    return bool(torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (a, b))))


# Each form takes a list of tensors, and returns the list of results.
ALLREDUCE_FORMS: dict[str, Callable[..., list[Any]]] = {
    "allreduce": lambda ts, **k: [hvd.allreduce(t, **k) for t in ts],
    "allreduce_": lambda ts, **k: [hvd.allreduce_(t.clone(), **k) for t in ts],
    "allreduce_async": lambda ts, **k: finish([hvd.allreduce_async(t, **k) for t in ts]),
    "allreduce_async_": lambda ts, **k: finish([hvd.allreduce_async_(t.clone(), **k) for t in ts]),
    "grouped_allreduce": lambda ts, **k: hvd.grouped_allreduce(ts, **k),
    "grouped_allreduce_": lambda ts, **k: hvd.grouped_allreduce_(clones(ts), **k),
    "grouped_allreduce_async": lambda ts, **k: hvd.grouped_allreduce_async(ts, **k).wait(),
    "grouped_allreduce_async_": (
        lambda ts, **k: hvd.grouped_allreduce_async_(clones(ts), **k).wait()
    ),
}
SCATTER_FORMS: dict[str, Callable[..., list[Any]]] = {
    "reducescatter": lambda ts, **k: [hvd.reducescatter(t, **k) for t in ts],
    "reducescatter_async": lambda ts, **k: finish([hvd.reducescatter_async(t, **k) for t in ts]),
    "grouped_reducescatter": lambda ts, **k: hvd.grouped_reducescatter(ts, **k),
    "grouped_reducescatter_async": lambda ts, **k: hvd.grouped_reducescatter_async(ts, **k).wait(),
}
GATHER_FORMS: dict[str, Callable[..., list[Any]]] = {
    "allgather": lambda ts, **k: [hvd.allgather(t, **k) for t in ts],
    "allgather_async": lambda ts, **k: finish([hvd.allgather_async(t, **k) for t in ts]),
    "grouped_allgather": lambda ts, **k: hvd.grouped_allgather(ts, **k),
    "grouped_allgather_async": lambda ts, **k: hvd.grouped_allgather_async(ts, **k).wait(),
}
BROADCAST_FORMS: dict[str, Callable[..., list[Any]]] = {
    "broadcast": lambda ts, **k: [hvd.broadcast(t, **k) for t in ts],
    "broadcast_": lambda ts, **k: [hvd.broadcast_(t.clone(), **k) for t in ts],
    "broadcast_async": lambda ts, **k: finish([hvd.broadcast_async(t, **k) for t in ts]),
    "broadcast_async_": lambda ts, **k: finish([hvd.broadcast_async_(t.clone(), **k) for t in ts]),
}


def forms_of(dtype: str, forms: dict[str, Callable[..., list[Any]]]) -> list[tuple[str, Any]]:
    """Choose the forms for a dtype: all of them, or the plainest and the least plain one."""
    every = list(forms.items())
    return every if dtype in IN_EVERY_FORM else [every[0], every[-1]]


def finish(handles: Sequence[Any]) -> list[Any]:
    """Wait for handles from the last to the first."""
    return [hvd.synchronize(handle) for handle in reversed(handles)][::-1]


def clones(tensors: Sequence[Any]) -> list[Any]:
    """Copy tensors that will be overwritten."""
    return [tensor.clone() for tensor in tensors]


def scenario_allreduce() -> None:
    for (process_set, ranks, hosts), dtype, op in with_op():
        mine = [given(hvd.rank(), dtype, shape) for shape in SHAPES]
        wanted = [
            reduced([given(rank, dtype, shape) for rank in ranks], hosts, op) for shape in SHAPES
        ]
        for name, form in forms_of(dtype, ALLREDUCE_FORMS):
            results = form(mine, op=getattr(hvd, op), process_set=process_set)
            for shape, result, expected in zip(SHAPES, results, wanted, strict=True):
                assert agrees(result, expected, ranks, op), (name, dtype, op, shape, ranks)


def scenario_reducescatter() -> None:
    for (process_set, ranks, hosts), dtype, op in with_op():
        position = ranks.index(hvd.rank())
        mine = [given(hvd.rank(), dtype, shape) for shape in ROWS]
        parts = [
            [given(rank, dtype, shape).tensor_split(len(ranks))[position] for rank in ranks]
            for shape in ROWS
        ]
        wanted = [reduced(own, hosts, op) for own in parts]
        for name, form in forms_of(dtype, SCATTER_FORMS):
            results = form(mine, op=getattr(hvd, op), process_set=process_set)
            for shape, result, expected in zip(ROWS, results, wanted, strict=True):
                assert agrees(result, expected, ranks, op), (name, dtype, op, shape, ranks)


def cut(values: Any, factor: float, dtype: str) -> Any:
    """Multiply integers in float64, round towards zero, and clamp to the range of the type."""
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    return np.clip(np.trunc(values.astype(np.float64) * factor), least, most).astype(dtype)


def scenario_factors_on_integers() -> None:
    small = [dtype for dtype in INTEGERS if not dtype.endswith("64")]
    for (process_set, ranks, _), dtype in itertools.product(places(), [*small, "int64"]):
        for op, before, after in [("Sum", 0.3, 2.5), ("Average", 2.6, 1.0), ("Sum", 1.0, -0.7),
                                  ("Max", 1.7, 0.5), ("Sum", 3.0, 1e9)]:  # fmt: skip
            factors = {"prescale_factor": before, "postscale_factor": after}
            for shape in [(7,), (257, 33)]:
                scaled = [cut(given(rank, dtype, shape).numpy(), before, dtype) for rank in ranks]
                with np.errstate(over="ignore"):
                    total = functools.reduce(COMBINE[op], scaled)
                if op == "Average":
                    total = np.trunc(total / len(ranks)).astype(dtype)
                expected = torch.from_numpy(cut(total, after, dtype))
                mine = given(hvd.rank(), dtype, shape)
                for name, form in [
                    *forms_of(dtype, ALLREDUCE_FORMS),
                    *forms_of(dtype, SCATTER_FORMS),
                ]:
                    (result,) = form(
                        [mine], op=getattr(hvd, op), process_set=process_set, **factors
                    )
                    own = expected
                    if name in SCATTER_FORMS:
                        own = expected.tensor_split(len(ranks))[ranks.index(hvd.rank())]
                    assert same(result, own), (name, dtype, op, before, after, shape)


SCALES = [(0.5, 1.0), (1.0, 0.25), (-2.0, 3.0), (1 / 3, 3.0)]
EXACTLY = {"Sum": np.sum, "Average": np.mean, "Min": np.min, "Max": np.max, "Product": np.prod}


def scenario_factors_on_floats() -> None:
    """An input is scaled, all are reduced, an average is divided, and the result is scaled."""
    members, position = range(hvd.size()), hvd.rank()
    for dtype, op, (pre, post) in itertools.product(FLOATS, EXACTLY, SCALES):
        mine = given(hvd.rank(), dtype, (257, 33))
        exact = [given(rank, dtype, (257, 33)).double().numpy() * pre for rank in members]
        whole = torch.from_numpy(EXACTLY[op](np.stack(exact), axis=0) * post)
        parts = whole.tensor_split(len(members))
        factors = {"prescale_factor": pre, "postscale_factor": post}
        bound = 8 * torch.finfo(mine.dtype).eps
        bound *= max(1.0, abs(post), abs(pre * post) ** len(members))
        for name, form in [*ALLREDUCE_FORMS.items(), *SCATTER_FORMS.items()]:
            (result,) = form([mine], op=getattr(hvd, op), **factors)
            expected = parts[position] if name in SCATTER_FORMS else whole
            close = torch.allclose(result.double(), expected, rtol=bound, atol=bound)
            assert close and result.dtype == mine.dtype, (name, dtype, op, pre, post)


def scenario_views_of_other_memory_are_sent_as_they_read() -> None:
    number = hvd.rank() + 1
    views = [torch.full((3,), complex(number, 2 * number)).conj(), torch.ones(3)._neg_view()]
    sums = [sum(complex(r + 1, -2 * (r + 1)) for r in range(hvd.size())), -hvd.size()]
    for view, total in zip(views, sums, strict=True):
        assert hvd.allreduce(view, op=hvd.Sum).tolist() == [total] * 3
        assert hvd.reducescatter(view.repeat(hvd.size()), op=hvd.Sum).tolist() == [total] * 3
        assert hvd.allgather(view)[-1] == hvd.broadcast(view, hvd.size() - 1)[0]
        parameter = view.clone()[:] if hvd.rank() == 0 else view
        hvd.broadcast_parameters({"view": parameter}, root_rank=0)
        assert len(set(hvd.allgather(parameter.clone()).tolist())) == 1
        with pytest.raises(hvd.ArgumentError, match="'flipped' is a negated or .*resolve_conj"):
            hvd.allreduce_(view, name="flipped", op=hvd.Sum)


def rows_of(rank: int, dtype: str, shape: tuple[int, ...]) -> Any:
    """Make a tensor whose number of rows depends on the rank."""
    return given(rank, dtype, (shape[0] * rank % 5, *shape[1:]))


def scenario_allgather() -> None:
    for (process_set, ranks, _), dtype in itertools.product(places(), ANY):
        mine = [rows_of(hvd.rank(), dtype, shape) for shape in ROWS]
        wanted = [torch.cat([rows_of(rank, dtype, shape) for rank in ranks]) for shape in ROWS]
        for name, form in forms_of(dtype, GATHER_FORMS):
            results = form(mine, process_set=process_set)
            for shape, result, expected in zip(ROWS, results, wanted, strict=True):
                assert same(result, expected), (name, dtype, shape, ranks)


def scenario_broadcast() -> None:
    for (process_set, ranks, _), dtype in itertools.product(places(), ANY):
        for (name, form), root in itertools.product(forms_of(dtype, BROADCAST_FORMS), ranks):
            mine = [given(hvd.rank(), dtype, shape) for shape in SHAPES]
            results = form(mine, root_rank=root, process_set=process_set)
            for shape, result in zip(SHAPES, results, strict=True):
                assert same(result, given(root, dtype, shape)), (name, dtype, shape, root)


def splits_of(rank: int, members: int) -> list[int]:
    """Return the number of rows that a rank sends to each member."""
    return [(rank + 2 * receiver) % 4 for receiver in range(members)]


def scenario_alltoall() -> None:
    for (process_set, ranks, _), dtype, shape in itertools.product(places(), ANY, ROWS):
        position, members = ranks.index(hvd.rank()), len(ranks)
        sent = {
            rank: given(rank, dtype, (sum(splits_of(rank, members)), *shape[1:])) for rank in ranks
        }
        parts = [sent[rank].split(splits_of(rank, members))[position] for rank in ranks]
        splits = splits_of(hvd.rank(), members)
        for result, received in (
            hvd.alltoall(sent[hvd.rank()], splits, process_set=process_set),
            hvd.alltoall_async(sent[hvd.rank()], splits, process_set=process_set).wait(),
        ):
            assert same(result, torch.cat(parts)), (dtype, shape, ranks)
            assert received.tolist() == [len(part) for part in parts]
        even = {rank: given(rank, dtype, (2 * members, *shape[1:])) for rank in ranks}
        parts = [even[rank].split(2)[position] for rank in ranks]
        result = hvd.alltoall(even[hvd.rank()], process_set=process_set)
        assert same(result, torch.cat(parts)), (dtype, shape, ranks)


def scenario_barrier() -> None:
    for process_set, _, _ in places():
        hvd.barrier(process_set)


def one_apart(shape: tuple[int, ...] = (2,), other: tuple[int, ...] = (3,)) -> Any:
    """Make a tensor whose shape differs on the last rank."""
    return torch.ones(other if hvd.rank() == hvd.size() - 1 else shape)


def typed() -> Any:
    """Make a tensor whose dtype differs on the last rank."""
    return torch.ones(2, dtype=torch.int32 if hvd.rank() == hvd.size() - 1 else torch.float32)


def last(one: Any, others: Any) -> Any:
    """Choose by whether this is the last rank."""
    return one if hvd.rank() == hvd.size() - 1 else others


# How the last rank's call differs from the others, and the text of the error.
DISAGREEMENTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "allreduce: dtype": ("dtype", lambda: hvd.allreduce(typed(), name="wrong")),
    "allreduce: shape": ("shape", lambda: hvd.allreduce(one_apart(), name="wrong")),
    "allreduce: op": (
        "reduce op",
        lambda: hvd.allreduce(torch.ones(2), op=last(hvd.Max, hvd.Sum), name="wrong"),
    ),
    "allreduce: number": (
        "number of tensors",
        lambda: hvd.grouped_allreduce([torch.ones(2)] * last(3, 2), name="wrong"),
    ),
    "allreduce: weight": (
        "weight",
        lambda: hvd.allreduce(torch.ones(2), weight=last(None, 1.0), name="wrong"),
    ),
    "allgather: shape": (
        "shape",
        lambda: hvd.allgather(one_apart((1, 2), (1, 3)), name="wrong"),
    ),
    "broadcast: root": (
        "root",
        lambda: hvd.broadcast(torch.ones(2), last(1, 0), name="wrong"),
    ),
    "alltoall: splits": (
        "rows",
        lambda: hvd.alltoall(torch.ones(3), last([9] * hvd.size(), [0] * hvd.size()), name="wrong"),
    ),
    "another collective": (
        "operation",
        lambda: last(hvd.allgather, hvd.allreduce)(torch.ones(2), name="wrong"),
    ),
}


def scenario_disagreements_end_in_one_error() -> None:
    if hvd.size() == 1:
        return
    for name, (about, call) in DISAGREEMENTS.items():
        with pytest.raises((hvd.MismatchError, hvd.ArgumentError), match=about) as caught:
            call()
        texts = hvd.allgather_object((type(caught.value).__name__, str(caught.value)))
        assert len(set(texts)) == 1, (name, texts)
        assert "wrong" in texts[0][1] and "rank" in texts[0][1], (name, texts)
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum, name="wrong")[0] == hvd.size(), name


def body(hosts: list[int]) -> dict[str, str]:
    return run_all(globals(), start=lambda: start(hosts))


test_table = make_tests(
    body,
    {
        name: {"n": size, "args": [hosts or [0] * size], "hosts": hosts}
        for name, (size, hosts) in WORLDS.items()
    },
    quick=("3 ranks, 2 hosts",),
)
