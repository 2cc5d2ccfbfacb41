"""The doubles of libcuda and libnccl between processes (test_gpu_double.cc: between threads)."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpu_double

COUNT = 1000
FLOAT32, SUM = 7, 0
REMOTE_ERROR = 6


@pytest.fixture(scope="module")
def folder() -> Path:
    return gpu_double.build()


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
        while not id_file.exists():
            time.sleep(0.01)
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
        while error.value == 0:
            self.nccl.ncclCommGetAsyncError(self.comm, ctypes.byref(error))
            time.sleep(0.01)
        return error.value


def reduce_once(rank: Rank) -> None:
    assert rank.status == 0, rank.nccl.ncclGetLastError(None)
    rank.allreduce()
    print(rank.first())
    assert rank.nccl.ncclCommDestroy(rank.comm) == 0


def show_init_error(rank: Rank) -> None:
    print(rank.status, rank.nccl.ncclGetLastError(None).decode())


def lose_rank_1(rank: Rank) -> None:
    rank.allreduce()
    rank.first()
    if rank.cuda.fake_current_device() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    rank.allreduce()
    print(rank.wait_for_async_error(), rank.nccl.ncclGetLastError(None).decode())
    assert rank.nccl.ncclCommAbort(rank.comm) == 0
    rank.first()


def run_ranks(
    body: str, size: int, id_file: Path, environments: Iterator[dict[str, str]]
) -> list[tuple[int, str]]:
    """Run `body` in processes of their own; give each one's status and output."""
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, body, str(rank), str(size), str(id_file)],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), **extra},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, extra in zip(range(size), environments, strict=False)
    ]
    try:
        outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [(rank.returncode, output) for rank, output in zip(ranks, outputs, strict=True)]


def same(environment: dict[str, str]) -> Iterator[dict[str, str]]:
    while True:
        yield environment


def test_processes_reduce(folder: Path, tmp_path: Path) -> None:
    environment = same(gpu_double.environment(folder, devices=3))
    assert run_ranks("reduce_once", 3, tmp_path / "id", environment) == [(0, "3.0\n")] * 3


def test_two_ranks_on_one_device_are_refused(folder: Path, tmp_path: Path) -> None:
    environment = same(gpu_double.environment(folder, devices=1))
    for status, output in run_ranks("show_init_error", 2, tmp_path / "id", environment):
        assert status == 0
        assert output.startswith("5 Duplicate GPU detected : rank")


def test_host_ids_let_two_ranks_share_a_device(folder: Path, tmp_path: Path) -> None:
    environments = (gpu_double.environment(folder, NCCL_HOSTID=f"host{i}") for i in range(2))
    assert run_ranks("reduce_once", 2, tmp_path / "id", environments) == [(0, "2.0\n")] * 2


def test_an_old_driver_is_refused(folder: Path, tmp_path: Path) -> None:
    environment = same(gpu_double.environment(folder, FAKE_CUDA_DRIVER_VERSION=11040))
    ((_, output),) = run_ranks("show_init_error", 1, tmp_path / "id", environment)
    assert "CUDA driver version is insufficient for CUDA runtime version" in output


def test_a_killed_peer_is_an_async_error_and_abort_frees_the_stream(
    folder: Path, tmp_path: Path
) -> None:
    environment = same(gpu_double.environment(folder, devices=2))
    survivor, killed = run_ranks("lose_rank_1", 2, tmp_path / "id", environment)
    assert killed[0] == -signal.SIGKILL
    assert survivor[0] == 0
    assert survivor[1].startswith(f"{REMOTE_ERROR} connection closed by remote peer: rank 1")


def test_an_older_version_lacks_what_came_later() -> None:
    code = (
        "import ctypes; nccl = ctypes.CDLL('libnccl.so.2'); v = ctypes.c_int(); "
        "nccl.ncclGetVersion(ctypes.byref(v)); "
        "print(v.value, hasattr(nccl, 'ncclMemAlloc'), hasattr(nccl, 'ncclAlltoAll'))"
    )
    environment = {**os.environ, **gpu_double.environment(gpu_double.build(22005))}
    shown = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert shown.stdout == "22005 True False\n"


if __name__ == "__main__":
    name, own_rank, number, path = sys.argv[1:]
    globals()[name](Rank(int(own_rank), int(number), Path(path)))
