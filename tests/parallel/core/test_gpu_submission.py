"""GPU tensors through the Python binding, with the fakes of the driver and NCCL.

torch cannot make tensors with the fakes: these tests use the binding as a framework would, with
their own streams and memory. The fake NCCL joins no processes: so these are ranks alone, and what
several ranks make of it is in tests/cpp/gpu.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from typing import Any

import pytest

from fakes import gpu as fake_gpu
from harness import run_world
from hvdlite import _core, basics, process_sets
from hvdlite.errors import HorovodInternalError
from parallel.scenarios import make_tests, run_all, sizes
from patience import wait_until

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


class Kept:
    """Tells when it is no longer kept alive."""

    alive = 0

    def __init__(self) -> None:
        Kept.alive += 1

    def __del__(self) -> None:
        Kept.alive -= 1


def start(gpu: Gpu, address: int, count: int, keep: object = None, process_set: int = 0) -> Any:
    spec = _core.Tensor("x", FLOAT32, [count], address, address, gpu.ordinal)
    return basics.engine().allreduce(
        "x", [spec], SUM, keep=keep, stream=gpu.stream, process_set=process_set
    )


def scenario_consumer_waits_and_the_host_does_not() -> None:
    gpu = Gpu(0)
    address = gpu.tensor([3.0] * 100)
    gpu.hold(gpu.stream, True)
    handle = start(gpu, address, 100, keep=address)
    consumer = gpu.new_stream()
    handle.wait(timeout=240, stream=consumer)
    assert handle.done()
    assert not handle.released()
    gpu.hold(gpu.stream, False)
    assert gpu.read(address, 100, consumer) == [3.0] * 100


def scenario_gathered_rows_are_copied_to_memory_of_the_caller() -> None:
    gpu = Gpu(0)
    given = gpu.tensor([1.0, 2.0])
    spec = _core.Tensor("x", FLOAT32, [2], given, 0, gpu.ordinal)
    handle = basics.engine().allgather("x", [spec], stream=gpu.stream)
    handle.wait(timeout=240, stream=gpu.stream)
    assert handle.first_dimensions == [2]
    result = gpu.tensor([-1.0] * 2)
    handle.copy_output(0, result, gpu.stream)
    assert gpu.read(result, 2) == [1.0, 2.0]


def scenario_without_a_stream_the_caller_waits_for_the_device() -> None:
    gpu = Gpu(0)
    address = gpu.tensor([1.0] * 10)
    gpu.hold(gpu.stream, True)
    handle = start(gpu, address, 10)
    with pytest.raises(TimeoutError):
        handle.wait(timeout=0.2)
    gpu.hold(gpu.stream, False)
    handle.wait(timeout=240)
    assert gpu.read(address, 10) == [1.0] * 10


def scenario_memory_is_kept_until_the_device_is_done() -> None:
    gpu = Gpu(0)
    address = gpu.tensor([1.0] * 10)
    gpu.hold(gpu.stream, True)
    handle = start(gpu, address, 10, keep=Kept())
    wait_until(handle.done, "the end on the host")
    del handle
    basics.engine().barrier("submitted").wait(timeout=240)
    assert Kept.alive == 1
    gpu.hold(gpu.stream, False)
    gpu.call("cuCtxSynchronize")
    basics.engine().barrier("released").wait(timeout=240)
    basics.engine().barrier("asked").wait(timeout=240)
    assert Kept.alive == 0


# The last one: its memory is freed with the next operation, which then waits for all streams.
def scenario_outputs_in_gradient_memory_are_reduced_there() -> None:
    gpu = Gpu(0)
    memory = basics.engine().allocate_gradient_memory(gpu.ordinal, 4 * 12)
    interface = memory.__cuda_array_interface__
    begin, read_only = interface.pop("data")
    assert not read_only
    assert begin % 16 == 0
    assert interface == {"shape": (48,), "typestr": "|u1", "strides": None, "version": 3}
    inputs = [gpu.tensor([1.0] * 5), gpu.tensor([2.0] * 4)]
    outputs = [begin, begin + 32]
    for sources in (inputs, outputs):
        specs = [
            _core.Tensor("x", FLOAT32, [count], source, output, gpu.ordinal)
            for count, source, output in zip((5, 4), sources, outputs, strict=True)
        ]
        handle = basics.engine().allreduce("x", specs, SUM, keep=memory, stream=gpu.stream)
        handle.wait(timeout=240, stream=gpu.stream)
        assert gpu.read(begin, 5) + gpu.read(begin + 32, 4) == [1.0] * 5 + [2.0] * 4
    del handle, memory  # waits for the device, not for ever


def body() -> dict[str, str]:
    return run_all(globals())


test_gpu_submission = make_tests(body, sizes(1), env=fake_gpu.environment())


def die_while_a_rank_waits_for_its_device() -> str:
    basics.init()
    alone = process_sets.add_process_set([0])
    if basics.rank() == 1:
        basics.engine().barrier("submitted").wait(timeout=240)
        os._exit(7)
    gpu = Gpu(0)
    address = gpu.tensor([1.0])
    gpu.hold(gpu.stream, True)
    handle = start(gpu, address, 1, process_set=process_sets.member_id(alone))
    basics.engine().barrier("submitted").wait(timeout=240)
    with pytest.raises(HorovodInternalError):
        basics.engine().barrier("never").wait(timeout=240)
    threading.Timer(0.2, gpu.hold, (gpu.stream, False)).start()
    try:
        handle.wait(timeout=600)
    except HorovodInternalError as error:
        return str(error)
    return "no error"


def test_a_wait_for_the_device_ends_with_the_error_of_a_dead_peer() -> None:
    environment = fake_gpu.environment()
    results = run_world(
        2, die_while_a_rank_waits_for_its_device, env=environment, expect_failure=True
    )
    assert "rank 1 died" in results[0].value
