"""GPU tensors through the Python binding, with the fakes of the driver and NCCL.

torch cannot make tensors with the fakes: these tests use the binding as a framework would, with
their own streams and memory.
"""

from __future__ import annotations

import ctypes
import struct
import time
from typing import Any

import pytest

from fakes import gpu as fake_gpu
from harness import run_world
from patience import Stopwatch, wait_until

PRELOAD = ("numpy",)

FLOAT32 = 7
SUM = 1


class Gpu:
    """A device of the fake driver: a stream, and float32 tensors."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.cuda = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
        self.call("cuCtxSetCurrent", context)
        self.stream = self.new_stream()

    def call(self, name: str, *arguments: Any) -> None:
        assert getattr(self.cuda, name)(*arguments) == 0, name

    def new_stream(self) -> int:
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), 1)
        assert stream.value is not None
        return stream.value

    def hold(self, stream: int, held: bool) -> None:
        hold = self.cuda.fake_hold_stream
        hold.restype = ctypes.c_bool
        assert hold(ctypes.c_void_p(stream), ctypes.c_bool(held))

    def tensor(self, values: list[float]) -> int:
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(4 * len(values)))
        data = struct.pack(f"{len(values)}f", *values)
        self.call("cuMemcpyHtoDAsync_v2", address, data, ctypes.c_size_t(len(data)), self.handle())
        self.call("cuStreamSynchronize", self.handle())
        return address.value

    def handle(self, stream: int | None = None) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.stream if stream is None else stream)

    def read(self, address: int, count: int, stream: int | None = None) -> list[float]:
        data = ctypes.create_string_buffer(4 * count)
        self.call(
            "cuMemcpyDtoHAsync_v2",
            data,
            ctypes.c_uint64(address),
            ctypes.c_size_t(4 * count),
            self.handle(stream),
        )
        self.call("cuStreamSynchronize", self.handle(stream))
        return list(struct.unpack(f"{count}f", data.raw))


def _environment(**options: str) -> dict[str, str]:
    return fake_gpu.environment(devices=4, **options)


def reduce_on_gpus(ordinal: int | None) -> tuple[list[float], bool, bool]:
    """Reduce; return the result, and whether the host was free while the producer was held."""
    from hvdlite import _core, basics

    basics.init()
    gpu = Gpu(basics.rank() if ordinal is None else ordinal)
    address = gpu.tensor([float(basics.rank() + 1)] * 100)
    spec = _core.Tensor("x", FLOAT32, [100], address, address, gpu.ordinal)
    gpu.hold(gpu.stream, True)
    handle = basics.engine().allreduce(
        "x", [spec], SUM, keep=address, blocking=True, stream=gpu.stream
    )
    consumer = gpu.new_stream()
    handle.wait(timeout=240, stream=consumer)
    free, busy = handle.done(), not handle.released()
    gpu.hold(gpu.stream, False)
    result = gpu.read(address, 100, consumer)
    basics.shutdown()
    return result, free, busy


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_consumer_waits_and_the_host_does_not(ranks: int) -> None:
    for result in run_world(ranks, reduce_on_gpus, None, env=_environment()):
        assert result.value == ([ranks * (ranks + 1) / 2] * 100, True, True)


def gather_on_gpus() -> list[float]:
    from hvdlite import _core, basics

    basics.init()
    rank = basics.rank()
    gpu = Gpu(rank)
    given = gpu.tensor([float(rank)] * (rank + 1))
    spec = _core.Tensor("x", FLOAT32, [rank + 1], given, 0, gpu.ordinal)
    handle = basics.engine().allgather("x", [spec], stream=gpu.stream)
    handle.wait(timeout=240, stream=gpu.stream)
    rows = sum(handle.first_dimensions)
    result = gpu.tensor([-1.0] * rows)
    handle.copy_output(0, result, gpu.stream)
    values = gpu.read(result, rows)
    basics.shutdown()
    return values


def test_gathered_rows_are_copied_to_memory_of_the_caller() -> None:
    for result in run_world(3, gather_on_gpus, env=_environment()):
        assert result.value == [0.0, 1.0, 1.0, 2.0, 2.0, 2.0]


def wait_without_a_stream() -> tuple[bool, list[float]]:
    from hvdlite import _core, basics

    basics.init()
    gpu = Gpu(basics.rank())
    address = gpu.tensor([1.0] * 10)
    spec = _core.Tensor("x", FLOAT32, [10], address, address, gpu.ordinal)
    gpu.hold(gpu.stream, True)
    handle = basics.engine().allreduce("x", [spec], SUM, stream=gpu.stream)
    timed_out = False
    try:
        handle.wait(timeout=0.2)
    except TimeoutError:
        timed_out = True
    gpu.hold(gpu.stream, False)
    handle.wait(timeout=240)
    values = gpu.read(address, 10)
    basics.shutdown()
    return timed_out, values


def test_without_a_stream_the_caller_waits_for_the_device() -> None:
    for result in run_world(2, wait_without_a_stream, env=_environment()):
        assert result.value == (True, [2.0] * 10)


def reduce_in_gradient_memory() -> tuple[list[float], list[float], int]:
    from hvdlite import _core, basics

    basics.init()
    gpu = Gpu(basics.rank())
    memory = basics.engine().allocate_gradient_memory(gpu.ordinal, 4 * 12)
    interface = memory.__cuda_array_interface__
    begin, read_only = interface.pop("data")
    assert not read_only
    assert interface == {"shape": (48,), "typestr": "|u1", "strides": None, "version": 3}
    inputs = [gpu.tensor([1.0] * 5), gpu.tensor([2.0] * 4)]
    outputs = [begin, begin + 32]
    results = []
    for sources in (inputs, outputs):
        specs = [
            _core.Tensor("x", FLOAT32, [count], source, output, gpu.ordinal)
            for count, source, output in zip((5, 4), sources, outputs, strict=True)
        ]
        handle = basics.engine().allreduce("x", specs, SUM, keep=memory, stream=gpu.stream)
        handle.wait(timeout=240, stream=gpu.stream)
        results.append(gpu.read(begin, 5) + gpu.read(begin + 32, 4))
    del handle, memory  # waits for the device, not for ever
    basics.shutdown()
    return *results, begin % 16


def test_outputs_in_gradient_memory_are_reduced_there() -> None:
    for result in run_world(2, reduce_in_gradient_memory, env=_environment()):
        assert result.value == ([2.0] * 5 + [4.0] * 4, [4.0] * 5 + [8.0] * 4, 0)


class Kept:
    """Tells when it is no longer kept alive."""

    alive = 0

    def __init__(self) -> None:
        Kept.alive += 1

    def __del__(self) -> None:
        Kept.alive -= 1


def drop_a_handle() -> tuple[int, int]:
    from hvdlite import _core, basics

    basics.init()
    gpu = Gpu(basics.rank())
    address = gpu.tensor([1.0] * 10)
    spec = _core.Tensor("x", FLOAT32, [10], address, address, gpu.ordinal)
    gpu.hold(gpu.stream, True)
    handle = basics.engine().allreduce("x", [spec], SUM, keep=Kept(), stream=gpu.stream)
    wait_until(handle.done, "the end on the host")
    del handle
    basics.engine().barrier("submitted").wait(timeout=240)
    during = Kept.alive
    gpu.hold(gpu.stream, False)
    gpu.call("cuCtxSynchronize")
    basics.engine().barrier("released").wait(timeout=240)
    basics.engine().barrier("asked").wait(timeout=240)
    after = Kept.alive
    basics.shutdown()
    return during, after


def test_memory_is_kept_until_the_device_is_done() -> None:
    for result in run_world(2, drop_a_handle, env=_environment()):
        assert result.value == (1, 0)


def die_while_a_peer_waits() -> tuple[str, float]:
    import os

    from hvdlite import _core, basics
    from hvdlite.errors import HorovodInternalError

    basics.init()
    gpu = Gpu(basics.rank())
    address = gpu.tensor([1.0])
    spec = _core.Tensor("x", FLOAT32, [1], address, address, gpu.ordinal)
    basics.engine().allreduce("first", [spec], SUM, stream=gpu.stream).wait(timeout=240)
    if basics.rank() == 1:
        gpu.hold(gpu.stream, True)
    handle = basics.engine().allreduce("x", [spec], SUM, stream=gpu.stream)
    wait_until(handle.done, "the end on the host")
    if basics.rank() == 1:
        time.sleep(0.2)
        os._exit(7)
    watch = Stopwatch()
    try:
        handle.wait(timeout=600)
    except HorovodInternalError as error:
        return str(error), watch.seconds()
    return "no error", 0.0


@pytest.mark.parametrize("silent", ["0", "1"])
def test_death_of_a_peer_ends_a_wait_for_the_device(silent: str) -> None:
    environment = _environment(FAKE_NCCL_SILENT_PEERS=silent)
    results = run_world(2, die_while_a_peer_waits, env=environment, expect_failure=True)
    message, seconds = results[0].value
    assert "rank 1 died" in message
    assert seconds < 5
