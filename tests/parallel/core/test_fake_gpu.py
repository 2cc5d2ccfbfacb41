"""The fake libcuda and libnccl between processes (test_fake_gpu.cc: between threads)."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

import pytest

from fakes import gpu as fake_gpu
from harness import run_world
from patience import wait_until

PRELOAD = ("numpy",)

pytestmark = pytest.mark.long

COUNT = 1000
FLOAT32, SUM = 7, 0
INVALID_USAGE, REMOTE_ERROR = 5, 6


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


class Rank:
    """One rank with a communicator, a stream and a buffer of ones, through ctypes."""

    def __init__(self, rank: int, size: int, id_file: Path) -> None:
        self.cuda, self.nccl = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libnccl.so.2")
        self.nccl.ncclGetLastError.restype = ctypes.c_char_p
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.stream, self.buffer, self.comm = (
            ctypes.c_void_p(),
            ctypes.c_uint64(),
            ctypes.c_void_p(),
        )
        assert self.cuda.cuInit(0) == 0
        self.cuda.cuDeviceGetCount(ctypes.byref(device))
        assert self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), rank % device.value) == 0
        assert self.cuda.cuCtxSetCurrent(context) == 0
        assert self.cuda.cuStreamCreate(ctypes.byref(self.stream), 1) == 0
        assert self.cuda.cuMemAlloc_v2(ctypes.byref(self.buffer), ctypes.c_size_t(COUNT * 4)) == 0
        ones = (ctypes.c_float * COUNT)(*[1.0] * COUNT)
        assert self.cuda.fake_write(self.buffer, ones, ctypes.c_size_t(COUNT * 4)) & 1
        unique = self._agree_on_id(rank, id_file)
        self.status = self.nccl.ncclCommInitRank(ctypes.byref(self.comm), size, unique, rank)

    def _agree_on_id(self, rank: int, id_file: Path) -> UniqueId:
        unique = UniqueId()
        if rank == 0:
            assert self.nccl.ncclGetUniqueId(ctypes.byref(unique)) == 0
            id_file.with_suffix(".new").write_bytes(bytes(unique))
            id_file.with_suffix(".new").rename(id_file)
        wait_until(id_file.exists, "the identifier of rank 0")
        return UniqueId.from_buffer_copy(id_file.read_bytes())

    def allreduce(self) -> None:
        count = ctypes.c_size_t(COUNT)
        status = self.nccl.ncclAllReduce(
            *(self.buffer, self.buffer, count, FLOAT32, SUM, self.comm, self.stream)
        )
        assert status == 0

    def first(self) -> float:
        assert self.cuda.cuStreamSynchronize(self.stream) == 0
        value = ctypes.c_float()
        assert self.cuda.fake_read(self.buffer, ctypes.byref(value), ctypes.c_size_t(4)) & 1
        return value.value

    def wait_for_async_error(self) -> int:
        error = ctypes.c_int()

        def failed() -> bool:
            self.nccl.ncclCommGetAsyncError(self.comm, ctypes.byref(error))
            return error.value != 0

        wait_until(failed, "an error of the communicator")
        return error.value


def join(size: int, id_file: str) -> Rank:
    return Rank(int(os.environ["HVDLITE_RANK"]), size, Path(id_file))


def reduce_once(size: int, id_file: str) -> float:
    rank = join(size, id_file)
    assert rank.status == 0, rank.nccl.ncclGetLastError(None)
    rank.allreduce()
    value = rank.first()
    assert rank.nccl.ncclCommDestroy(rank.comm) == 0
    return value


def init_error(size: int, id_file: str) -> tuple[int, str]:
    rank = join(size, id_file)
    return rank.status, rank.nccl.ncclGetLastError(None).decode()


def lose_rank_1(size: int, id_file: str) -> tuple[int, str]:
    rank = join(size, id_file)
    rank.allreduce()
    rank.first()
    if rank.cuda.fake_current_device() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    rank.allreduce()
    error = rank.wait_for_async_error()
    text = rank.nccl.ncclGetLastError(None).decode()
    assert rank.nccl.ncclCommAbort(rank.comm) == 0
    rank.first()
    return error, text


def test_processes_reduce(tmp_path: Path) -> None:
    env = fake_gpu.environment(devices=3)
    results = run_world(3, reduce_once, 3, str(tmp_path / "id"), env=env)
    assert [result.value for result in results] == [3.0, 3.0, 3.0]


def test_two_ranks_on_one_device_are_refused(tmp_path: Path) -> None:
    env = fake_gpu.environment(devices=1)
    for result in run_world(2, init_error, 2, str(tmp_path / "id"), env=env):
        assert result.value[0] == INVALID_USAGE
        assert "Duplicate GPU detected : rank" in result.value[1]


def test_host_ids_let_two_ranks_share_a_device(tmp_path: Path) -> None:
    def env(rank: int) -> dict[str, str]:
        return fake_gpu.environment(NCCL_HOSTID=f"host{rank}")

    results = run_world(2, reduce_once, 2, str(tmp_path / "id"), env=env)
    assert [result.value for result in results] == [2.0, 2.0]


def test_an_old_driver_is_refused(tmp_path: Path) -> None:
    env = fake_gpu.environment(FAKE_CUDA_DRIVER_VERSION=11040)
    (result,) = run_world(1, init_error, 1, str(tmp_path / "id"), env=env)
    assert "CUDA driver version is insufficient for CUDA runtime version" in result.value[1]


def test_a_killed_peer_is_an_async_error_and_abort_frees_the_stream(tmp_path: Path) -> None:
    env = fake_gpu.environment(devices=2)
    id_file = str(tmp_path / "id")
    survivor, killed = run_world(2, lose_rank_1, 2, id_file, env=env, expect_failure=True)
    assert killed.returncode == -signal.SIGKILL
    error, text = survivor.value
    assert error == REMOTE_ERROR
    assert text == "connection closed by remote peer: rank 1 is gone"
