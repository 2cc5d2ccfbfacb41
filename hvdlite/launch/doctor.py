"""hvdlite-run --doctor: what works on this machine, why the rest does not, and how fast it is."""

from __future__ import annotations

import array
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata

import hvdlite
from hvdlite import gpu
from hvdlite.launch.resources import available_cores, memory_bytes

_FRAMEWORKS = ("torch", "tensorflow", "keras", "numpy")
_PROBE_SECONDS = 60.0
_COPY = 64 << 20
_COPY_ROUNDS = 5


@dataclass(frozen=True)
class Finding:
    """One row: what was looked at, whether it works (None: only a fact), and what was found."""

    subject: str
    works: bool | None
    text: str


def _check(subject: str, probe: Callable[[], str]) -> Finding:
    """Run a probe; whatever goes wrong in it is the finding."""
    try:
        return Finding(subject, True, probe())
    except Exception as error:
        return Finding(subject, False, f"{type(error).__name__}: {error}")


def machine() -> list[Finding]:
    """State facts about this machine."""
    uname = platform.uname()
    return [
        Finding("hvdlite", None, hvdlite.__version__),
        Finding("python", None, f"{platform.python_version()} ({sys.executable})"),
        Finding("platform", None, f"{uname.system} {uname.release} {uname.machine}"),
        Finding("cores", None, f"{available_cores()} usable of {os.cpu_count()}"),
        Finding("memory", None, f"{memory_bytes() / 2**30:.1f} GiB"),
    ]


def frameworks() -> list[Finding]:
    """Say which frameworks are installed, without importing them."""
    wheels = metadata.packages_distributions()  # TensorFlow's may be tensorflow-cpu
    findings = []
    for name in _FRAMEWORKS:
        if name in wheels:
            findings.append(Finding(name, True, metadata.version(wheels[name][0])))
        else:
            findings.append(Finding(name, False, f"not installed (pip install {name})"))
    return findings


def _native_core() -> str:
    from hvdlite import _core

    return f"version {_core.__version__}"


def _shared_memory() -> str:
    """Pass a sealed memfd and an eventfd to ourselves over a Unix socket, and read through it."""
    memory = os.memfd_create("hvdlite-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    # os.eventfd came with Python 3.10; a kernel without it raises here.
    bell = os.eventfd(0, os.EFD_CLOEXEC)
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    received = array.array("i")
    try:
        os.ftruncate(memory, 4096)
        os.pwrite(memory, b"hvdlite", 0)
        socket.send_fds(left, [b"x"], [memory, bell])
        received.extend(socket.recv_fds(right, 1, 2)[1])
        if os.pread(received[0], 7, 0) != b"hvdlite":
            raise OSError("the passed memory holds something else")
    finally:
        for fd in (memory, bell, *received):
            os.close(fd)
        left.close()
        right.close()
    return "memfd, eventfd and passing them over a Unix socket work"


def _tcp() -> str:
    """Connect to ourselves over the loopback."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname(), timeout=2.0) as client,
    ):
        server.settimeout(2.0)
        peer, _ = server.accept()
        with peer:
            client.sendall(b"x")
            if peer.recv(1) != b"x":
                raise OSError("the loopback changed a byte")
    return "loopback works"


def data_planes() -> list[Finding]:
    """Say which ways there are between ranks."""
    return [
        _check("native core", _native_core),
        _check("shared memory", _shared_memory),
        _check("TCP", _tcp),
        *_gpus(),
    ]


def _gpus() -> list[Finding]:
    """Say whether GPU tensors can travel by NCCL; importing the core may fail like any probe."""
    try:
        return [Finding(*row) for row in gpu.report()]
    except Exception as error:
        return [Finding("NCCL", False, f"{type(error).__name__}: {error}")]


def _copy_speed() -> str:
    from hvdlite import _core

    return f"{_core.memcpy_speed(_COPY, _COPY_ROUNDS):.1f} GB/s (64 MiB, one thread)"


def _probe_command() -> list[str]:
    python = [sys.executable, "-m"]
    return [*python, "hvdlite.launch", "-np", "2", *python, "hvdlite.launch.probe"]


def _allreduce_speed(environment: Mapping[str, str]) -> str:
    """Start two ranks as any job is started, and let them measure."""
    try:
        done = subprocess.run(
            _probe_command(),
            env={"OMP_NUM_THREADS": "1", **environment},
            cwd="/",  # "-m" looks there first: a folder named hvdlite must not be in the way
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"two ranks did not finish within {_PROBE_SECONDS:.0f} s") from None
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise RuntimeError(f"two ranks ended with status {done.returncode}: {last[0].strip()}")
    row = json.loads(done.stdout.partition("[0] ")[2].splitlines()[0])
    return (
        f"{row['large_gb_per_s']:.2f} GB/s (64 MiB float32, 2 ranks), "
        f"4 KiB in {row['small_us']:.0f} us"
    )


def speeds(environment: Mapping[str, str]) -> list[Finding]:
    """Measure a plain copy and an all-reduce between two ranks."""
    return [
        _check("memcpy", _copy_speed),
        _check("all-reduce", lambda: _allreduce_speed(environment)),
    ]


def table(sections: Mapping[str, list[Finding]]) -> str:
    """Lay the findings out; pure.

    Example:
        >>> print(table({"data planes": [Finding("TCP", True, "loopback works")]}))
        data planes
          yes  TCP  loopback works
    """
    marks = {True: "yes", False: "no", None: ""}
    width = max(len(row.subject) for rows in sections.values() for row in rows)
    lines = []
    for title, rows in sections.items():
        lines.append(title)
        for row in rows:
            lines.append(f"  {marks[row.works]:3}  {row.subject:{width}}  {row.text}")
    return "\n".join(lines)


def examine(environment: Mapping[str, str]) -> int:
    """Print the table; return 0 when two ranks can train here, else 1."""
    sections = {
        "machine": machine(),
        "frameworks": frameworks(),
        "data planes": data_planes(),
        "speed": speeds(environment),
    }
    print(table(sections))
    return 0 if all(row.works for row in sections["speed"]) else 1
