"""Build the fake libcuda.so.1 and libnccl.so.2 for tests in Python (README.md says what they do).

folder = fake_gpu.build()
run_world(2, body, environment=fake_gpu.environment(folder, devices=2))
"""

from __future__ import annotations

import concurrent.futures
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_CSRC = _HERE.parents[2] / "csrc"
_CACHE = _HERE.parents[2] / "build" / "fake_gpu"
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-pthread")

# What each version of NCCL lacks, by the version that brought it.
_LATER = {21900: "since_2_19", 22700: "since_2_27", 22800: "since_2_28"}


def build(nccl_version: int = 22807) -> Path:
    """Compile both libraries, unless these sources were compiled before.

    Args:
        nccl_version: the version that libnccl.so.2 reports; it lacks what came later.

    Returns:
        The folder that holds libcuda.so.1 and libnccl.so.2.
    """
    sources = _CACHE / _digest()
    objects = _made_once(sources / "objects", _compile)
    return _made_once(sources / str(nccl_version), lambda to: _link(objects, to, nccl_version))


def environment(folder: Path, devices: int = 1, **options: str | int) -> dict[str, str]:
    """Give the variables under which a process loads the fakes, with options of README.md."""
    return {
        "LD_LIBRARY_PATH": str(folder),
        "FAKE_CUDA_DEVICES": str(devices),
        **{name: str(value) for name, value in options.items()},
    }


def _made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Let `make` fill a folder that appears only when it is complete; other processes wait."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f"{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
            try:
                make(unfinished)
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _digest() -> str:
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    core = [*_CSRC.glob("cuda/kernels/*.cu"), *_CSRC.glob("cuda/*_args.h")]
    for path in sorted([*_HERE.rglob("*.cc"), *_HERE.rglob("*.h"), *_CSRC.glob("base/*.h"), *core]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(objects: Path) -> None:
    def compile_one(source: Path) -> None:
        name = f"{source.parent.name}-{source.stem}.o"
        _run(*("-c", f"-I{_CSRC}", f"-I{_HERE}"), str(source), "-o", str(objects / name))

    sources = [path for path in _HERE.glob("*/*.cc") if path.stem != "version"]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, sources))


def _link(objects: Path, folder: Path, nccl_version: int) -> None:
    shared = ("-shared", "-Wl,-z,nodelete")
    cuda = map(str, objects.glob("cuda-*.o"))
    later = {name for version, name in _LATER.items() if version > nccl_version}
    nccl = [str(path) for path in objects.glob("nccl-*.o") if path.stem[5:] not in later]
    _run(*shared, "-Wl,-soname,libcuda.so.1", "-o", f"{folder}/libcuda.so.1", *cuda)
    _run(
        *(*shared, "-Wl,-soname,libnccl.so.2", "-Wl,-rpath,$ORIGIN"),
        *("-o", f"{folder}/libnccl.so.2", *nccl),
        *(f"-DFAKE_NCCL_VERSION={nccl_version}", f"-I{_HERE}", f"{_HERE}/nccl/version.cc"),
        *(f"-L{folder}", "-l:libcuda.so.1"),
    )


def _run(*arguments: str) -> None:
    command = ["g++", *_FLAGS, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(result.stderr)
