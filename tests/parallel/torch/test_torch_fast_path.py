"""The fast path takes plain calls, leaves the others alone, and does what Python's way does.

The same for plain gradients, which a bucket reads in one call of the core.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import re
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hvdlite
import hvdlite.torch as hvd
from harness import run_world
from hvdlite import basics
from hvdlite.process_sets import global_process_set
from hvdlite.torch.collectives import fast_path
from hvdlite.torch.collectives.tensors import spec
from parallel.scenarios import make_tests, raises, run_all, sizes
from parallel.torch.slow_path import slow_path
from parallel.torch.small_models import Branches, backward, gradients, inputs, make, make_model

pytestmark = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="this torch has no fast path"
)
PRELOAD = ("torch._dynamo",)
PAGE = Path(__file__).resolve().parents[3] / "docs" / "architecture.md"
COPIED = [
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.uint16, torch.uint32, torch.uint64, torch.complex32, torch.complex64),
    *(torch.complex128, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]
OPS = (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product)
SHAPES = [(), (1,), (0,), (3, 0), (2, 3), (1, 1, 5)]


def mine(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Make a tensor of this rank's number plus one."""
    return torch.full(shape, hvd.rank() + 1, dtype=torch.float32).to(dtype)


def took(tensor: Any, name: str | None = "asked", **changed: Any) -> bool:
    """Ask the fast path itself for a sum, and say whether it took the call."""
    arguments = {"average": None, "name": name, "op": hvd.Sum, "prescale": 1.0, "postscale": 1.0}
    arguments |= {"process_set": global_process_set, **changed}
    return fast_path.allreduce(tensor, *arguments.values(), fast_path.IN_PLACE) is not None


def outcome(call: Callable[[], Any]) -> tuple[str, Any]:
    """Return what a call returns, or its error."""
    try:
        result = call()
    except Exception as error:
        # Which two ranks a mismatch names depends on the order in which they came.
        text = error.args[0].split(":")[0] if isinstance(error, hvd.MismatchError) else str(error)
        return type(error).__name__, text
    results = result if isinstance(result, list) else [result]
    return "returned", [(one.dtype, one.shape, one.tolist()) for one in map(plain, results)]


def plain(tensor: torch.Tensor) -> torch.Tensor:
    odd = tensor.dtype == torch.complex32 or tensor.dtype.itemsize == 1
    return (
        tensor.view(torch.uint8 if tensor.dtype.itemsize == 1 else torch.int32) if odd else tensor
    )


def same_both_ways(call: Callable[[], Any]) -> None:
    fast = outcome(call)
    with slow_path():
        slow = outcome(call)
    assert str(fast) == str(slow)


def scenario_plain_calls_are_taken() -> None:
    assert took(mine(2)) and took([mine(2), mine(3)]) and took(mine(2), None)
    assert took(mine(2), op=None) and took(mine(2), op=None, average=False)
    assert took(torch.arange(6.0).reshape(2, 3)[1]) and took(mine(2).requires_grad_().detach())
    assert took(torch.empty(3, 0).t()) and took(mine(2, 1).t())
    assert fast_path.broadcast(mine(2), 0, None, global_process_set, fast_path.NEW) is not None
    assert fast_path.barrier(global_process_set, None)


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def scenario_unusual_calls_are_left_alone() -> None:
    class Own(torch.Tensor):
        pass

    before = basics.engine().counters()["tensors"]
    parameter = torch.nn.Parameter(mine(2))
    strange = torch.ones(2, dtype=torch.complex64).conj()
    for tensor in [
        *(parameter, mine(2).requires_grad_(), mine(2).as_subclass(Own), torch.ones(2, 3).t()),
        *(strange, strange.imag, mine(2).to_sparse(), torch.ones(2, device="meta")),
        *(torch.ones(2, dtype=torch.float8_e5m2), [1.0], [], 1.0, None, (mine(2), parameter)),
    ]:
        assert not took(tensor)
    for changed in [
        *({"op": True}, {"op": 17}, {"op": torch.distributed.ReduceOp.SUM}, {"op": 1.0}),
        *({"average": True}, {"average": 1}, {"prescale": "1"}, {"postscale": torch.tensor(1.0)}),
        {"prescale": 10**400},
    ]:
        assert not took(mine(2), **changed)
    assert not took(mine(2), 5) and not took(mine(2), "\udc80")
    with Watching():
        assert not took(mine(2))
    torch.func.vmap(lambda one: [one, took(one)][0])(mine(2))
    for root in (-1, hvd.size(), 0.0, None):
        assert fast_path.broadcast(mine(2), root, "x", global_process_set, fast_path.NEW) is None
    hvd.allreduce(mine(1), name="counted")  # It ends after what was submitted before it.
    assert basics.engine().counters()["tensors"] == before + 1


def scenario_dtypes_ops_and_shapes_are_the_same() -> None:
    warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
    for dtype, op in itertools.product(COPIED, OPS):
        tensor = mine(3, dtype=dtype)
        same_both_ways(lambda one=tensor, op=op: hvd.allreduce(one, op=op, name="table"))
    for dtype in COPIED:
        tensor = mine(3, dtype=dtype)
        same_both_ways(lambda one=tensor: hvd.broadcast(one, hvd.size() - 1, name="root"))
    for shape in SHAPES:
        same_both_ways(lambda shape=shape: hvd.allreduce_(mine(*shape), name="shape"))
        same_both_ways(lambda shape=shape: hvd.broadcast_(mine(*shape), 0))
        same_both_ways(lambda shape=shape: hvd.grouped_allreduce([mine(*shape), mine(4)]))


def scenario_errors_are_the_same() -> None:
    rank, last = hvd.rank(), hvd.size() - 1
    tensor = mine(4)
    calls: list[Callable[[], Any]] = [
        lambda: hvd.allreduce(mine(rank + 1), name="shapes differ"),
        lambda: hvd.allreduce(mine(2, dtype=COPIED[rank]), name="dtypes differ"),
        lambda: hvd.allreduce(mine(2), op=OPS[rank], name="ops differ"),
        lambda: hvd.broadcast(mine(2), rank, name="roots differ"),
        lambda: hvd.grouped_allreduce([tensor, tensor[1:]], name="overlap"),
        lambda: hvd.grouped_allreduce_([tensor, tensor[1:]], name="overlap"),
        lambda: hvd.allreduce(mine(2), prescale_factor=float("nan"), name="not finite"),
        lambda: hvd.allreduce(mine(2), name="x" * 600),
        lambda: hvd.broadcast(mine(2), last + 1, name="not a rank"),
        lambda: hvd.allreduce_(mine(2), process_set=hvd.ProcessSet([0])),
        lambda: hvd.barrier(hvd.ProcessSet([0]), "not registered"),
        lambda: hvd.allreduce_(torch.ones(2, 3).t(), name="not contiguous"),
    ]
    for call in calls:
        same_both_ways(call)


def scenario_names_are_used_again_with_other_tensors() -> None:
    for dtype in (torch.float32, torch.int64, torch.float16):
        for shape in ((2,), (3, 2), ()):
            for op, value in ((hvd.Sum, hvd.size() * (hvd.size() + 1) // 2), (hvd.Min, 1)):
                assert (
                    hvd.allreduce_(mine(*shape, dtype=dtype), op=op, name="same") == value
                ).all()


def scenario_numbers_go_on_through_both_ways() -> None:
    for i in range(4):
        with slow_path() if (i + hvd.rank()) % 2 else contextlib.nullcontext():
            assert hvd.allreduce(mine(1), op=hvd.Max) == hvd.size()
            hvd.barrier()


def scenario_autograd_knows_what_was_written() -> None:
    for call in (hvd.allreduce_, lambda one: hvd.synchronize(hvd.allreduce_async_(one))):
        saved = mine(2)
        version = saved._version
        loss = (torch.ones(2, requires_grad=True) * saved).sum()
        call(saved)
        assert saved._version > version
        with raises(RuntimeError, "modified by an inplace operation"):
            loss.backward()
    untouched = mine(2)
    version = untouched._version
    hvd.allreduce(untouched)
    assert untouched._version == version
    with torch.inference_mode():
        hvd.allreduce_(mine(2))
    lazy = torch._lazy_clone(untouched)  # shares the memory until somebody writes to it
    hvd.allreduce_(lazy, op=hvd.Sum)
    assert (untouched == hvd.rank() + 1).all()


def scenario_duplicate_name_in_flight_is_refused() -> None:
    if hvd.size() == 1:
        return  # Nothing is in flight in a world of one.
    ended = threading.Event()
    if hvd.rank() == 0:
        handle = hvd.allreduce_async_(mine(2), name="twice")
        with raises(hvd.DuplicateNameError, "already in flight"):
            hvd.allreduce_(mine(2), name="twice")
        ended.set()
    hvd.barrier(name="rank 0 has seen the error")
    if hvd.rank() != 0:
        handle = hvd.allreduce_async_(mine(2), name="twice")
    hvd.synchronize(handle)


def scenario_threads_go_through_at_once() -> None:
    def many(thread: int) -> None:
        for i in range(100):
            total = hvd.allreduce_(mine(64), op=hvd.Sum, name=f"thread.{thread}.{i % 3}")
            assert (total == hvd.size() * (hvd.size() + 1) / 2).all()
        right.append(thread)

    right: list[int] = []
    threads = [threading.Thread(target=many, args=(one,)) for one in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(right) == [0, 1]


def scenario_tensors_that_are_dropped_early_live_until_the_end() -> None:
    for i in range(3):
        dropped = f"rank 0 has dropped its tensor in flight {i}"
        if hvd.rank() != 0:
            hvd.barrier(name=dropped)
        tensor = mine(1 << 20)
        handle = hvd.allreduce_async_(tensor, name="early")
        hvd.allreduce_async_(mine(1 << 20), name=f"its handle too {i}")
        memory = weakref.ref(tensor.untyped_storage())
        del tensor
        if hvd.rank() == 0:
            hvd.barrier(name=dropped)
        hvd.synchronize(handle)
        del handle
        gc.collect()
        assert memory() is None
    moved = mine(4)
    handle = hvd.allreduce_async_(moved, name="moved")
    moved.data = torch.zeros(2)
    with raises(hvd.HvdliteError, "given other memory"):
        hvd.synchronize(handle)


def parameters() -> list[nn.Parameter]:
    """Make parameters with gradients of 1.0."""
    params = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4))]
    for param in params:
        param.grad = torch.ones_like(param)
    return params


def read(params: list[nn.Parameter], dtype: torch.dtype = torch.float32) -> Any:
    """Read gradients as a bucket does, for tensors of the parameters' shapes and a dtype."""
    tensors = [spec("p", torch.zeros(param.shape, dtype=dtype), None) for param in params]
    return fast_path.read_gradients(params, tensors)


def scenario_plain_gradients_are_read() -> None:
    params = parameters()
    found = read(params)
    assert all(one is param.grad for one, param in zip(found.gradients, params, strict=True))
    assert found.first_changed() == -1


def scenario_gradients_are_not_plain() -> None:
    class Own(torch.Tensor):
        pass

    unusual: list[Callable[[torch.Tensor], torch.Tensor | None]] = [
        lambda _: None,
        lambda one: torch.ones(3, 2).t() if one.dim() == 2 else None,
        lambda one: one.clone().requires_grad_(),
        lambda one: one.to_sparse(),
        lambda one: one.clone().as_subclass(Own),
        lambda one: torch.zeros_like(one, dtype=torch.complex64).imag,
    ]
    for make_gradient in unusual:
        params = parameters()
        params[0].grad = make_gradient(params[0].grad)
        assert read(params) is None
    params = parameters()
    assert read(params, torch.float64) is None
    with Watching():
        assert read(params) is None


def trained(**options: Any) -> list[torch.Tensor]:
    """Return the parameters of a model after four steps."""
    model = make_model()
    optimizer = make(model, bucket_cap_mb=1e-4, **options)
    for _ in range(4):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def scenario_both_ways_give_the_same_bits() -> None:
    for options in (
        {},
        {"overlap": False},
        {"op": hvd.Sum},
        {"compression": hvd.Compression.bf16},
        {"weight": 1.0 + hvd.rank()},
        {"gradient_predivide_factor": 2.0},
    ):
        fast = trained(**options)
        with slow_path():
            slow = trained(**options)
        assert all(map(torch.equal, fast, slow)), options


def scenario_a_missing_gradient_makes_one_step_special_on_one_rank() -> None:
    model = Branches()
    optimizer = make(model)
    for step in range(4):
        optimizer.zero_grad()
        rare = step % 2 == 0 or hvd.rank() == 0
        (model(inputs(), rare).sum() + 0 * model.never(inputs()).sum()).backward()
        found = gradients(model)
        assert len(found) == 6
        for mine in found:
            assert (hvd.allgather(mine.reshape(1, -1)) == mine.reshape(1, -1)).all()
        optimizer.step()


def scenario_errors_of_signal_handlers_are_raised() -> None:
    def give_up(*_: object) -> None:
        raise TimeoutError("the user's own")

    if hvd.size() > 1:
        return  # The ranks would be interrupted at different calls.
    before = signal.signal(signal.SIGALRM, give_up)
    for _ in range(20):
        with raises(TimeoutError, "the user's own"):
            signal.setitimer(signal.ITIMER_REAL, 0.002)
            while True:
                hvd.barrier()
    signal.signal(signal.SIGALRM, before)


def scenario_next_world_is_another_one() -> None:
    for world in range(3):
        assert (hvd.allreduce_(mine(2), op=hvd.Max, name="kept") == hvd.size()).all(), world
        hvd.shutdown()
        with raises(hvd.NotInitializedError, "init"):
            hvd.allreduce_(torch.ones(2), name="kept")
        hvd.init()


def scenario_a_gradient_passes_the_files_that_the_page_names() -> None:
    if hvd.size() == 1:
        return
    model = make_model()
    optimizer = make(model)
    package, passed = Path(hvdlite.__file__).parent, set()

    def look(frame: Any, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(package):
            passed.add(path.name)

    for profile in (None, look):  # The first step has more to do.
        optimizer.zero_grad()
        loss = model(inputs()).square().mean()
        sys.setprofile(profile)
        loss.backward()
        sys.setprofile(None)
        optimizer.step()
    text = PAGE.read_text(encoding="utf-8").partition("In Python a gradient passes through")[2]
    text = text.partition("In C++")[0]
    other = passed ^ set(re.findall(r"`(?:\w+/)?(\w+\.py)`", text))
    assert not other, other
    assert text.startswith(f" {len(passed)} files")


def body() -> dict[str, str]:
    return run_all(globals())


test_fast_path = make_tests(body, sizes(1, 3))


def forked_then_killed() -> str:
    hvd.init()
    hvd.allreduce_(torch.ones(4), name="parent")
    child = os.fork()
    if child == 0:
        with raises(hvd.ForkedError, "fork"):
            hvd.allreduce_(torch.ones(4), name="parent")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    hvd.allreduce_(torch.ones(4), name="parent")
    if hvd.rank() == 1:
        time.sleep(0.1)  # The others wait in the collective.
        os.kill(os.getpid(), signal.SIGKILL)
    with raises(hvd.RankFailedError, "rank 1") as caught:
        hvd.allreduce_(torch.ones(4), name="never")
    assert isinstance(caught.value, hvd.RankFailedError) and caught.value.failed_rank == 1
    with raises(hvd.RankFailedError, "submitted afterwards"):
        hvd.allreduce_async_(torch.ones(4), name="after")
    return str(caught.value)


def test_child_of_a_fork_and_survivors_of_a_death_get_the_errors() -> None:
    results = run_world(3, forked_then_killed, expect_failure=True)
    survivors = [result.rank for result in results if "rank 1" in str(result.value)]
    assert survivors == [0, 2], results
