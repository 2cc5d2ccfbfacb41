"""hvdlite-run --doctor: check what works on this machine, why the rest does not, and its speed.

With hosts (-H), it also starts ranks on these hosts, and measures an all-reduce between them.
"""

from __future__ import annotations

import array
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

import hvdlite
from hvdlite import gpu
from hvdlite.launch.process.resources import available_cores, memory_bytes

_FRAMEWORKS = ("torch", "tensorflow", "keras", "numpy")
_PROBE_SECONDS = 60.0
_COPY = 64 << 20
_COPY_ROUNDS = 5
# What two ranks of an idle machine reach at least. Measured were a quarter of the speed of a copy
# where both ranks share one core (a third with a core for each), and 30 us for 4 KiB.
_USUAL_SHARE = 0.2
_USUAL_SMALL_US = 100.0


@dataclass(frozen=True)
class Finding:
    """One row of the table."""

    subject: str  # what was checked
    works: bool | None  # whether it works; None for a mere fact
    text: str  # what was found


def _check(subject: str, probe: Callable[[], str]) -> Finding:
    """Run a probe, and report its text, or the exception that it raises."""
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
    wheels = metadata.packages_distributions()  # The wheel of TensorFlow may be tensorflow-cpu.
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
    """Pass a memfd and an eventfd over a Unix socket, and read from the memfd that arrives."""
    memory = os.memfd_create("hvdlite-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    # os.eventfd came with Python 3.10; a kernel without it raises here.
    event = os.eventfd(0, os.EFD_CLOEXEC)
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    received = array.array("i")
    try:
        os.ftruncate(memory, 4096)
        os.pwrite(memory, b"hvdlite", 0)
        socket.send_fds(left, [b"x"], [memory, event])
        received.extend(socket.recv_fds(right, 1, 2)[1])
        if os.pread(received[0], 7, 0) != b"hvdlite":
            raise OSError("the passed memory holds something else")
    finally:
        for fd in (memory, event, *received):
            os.close(fd)
        left.close()
        right.close()
    return "memfd, eventfd and passing them over a Unix socket work"


def _tcp() -> str:
    """Connect to a port of this process over the loopback interface."""
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
    """Check every data plane that can connect ranks here."""
    return [
        _check("native core", _native_core),
        _check("shared memory", _shared_memory),
        _check("TCP", _tcp),
        *_gpus(),
    ]


def _gpus() -> list[Finding]:
    """Check whether NCCL can carry GPU tensors; the core may fail to load here."""
    try:
        return [Finding(*row) for row in gpu.report()]
    except Exception as error:
        return [Finding("NCCL", False, f"{type(error).__name__}: {error}")]


def _copy_speed() -> float:
    """Measure a copy of 64 MiB by one thread, in GB/s."""
    from hvdlite import _core

    return float(_core.memcpy_speed(_COPY, _COPY_ROUNDS))


def _probe_ranks(environment: Mapping[str, str], arguments: Sequence[str]) -> dict[str, float]:
    """Start ranks by hvdlite-run, let them measure an all-reduce, and return rank 0's results."""
    python = [sys.executable, "-m"]
    try:
        done = subprocess.run(
            [*python, "hvdlite.launch", *arguments, *python, "hvdlite.launch.command.probe"],
            env={"OMP_NUM_THREADS": "1", **environment},
            cwd="/",  # "-m" searches this folder first, and it must not have a folder hvdlite.
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"the ranks did not finish within {_PROBE_SECONDS:.0f} s") from None
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise RuntimeError(f"the ranks ended with status {done.returncode}: {last[0].strip()}")
    row: dict[str, float] = json.loads(done.stdout.partition("[0] ")[2].splitlines()[0])
    return row


def speeds(environment: Mapping[str, str]) -> list[Finding]:
    """Measure a plain copy and an all-reduce between two ranks, and judge the latter."""
    try:
        copy = _copy_speed()
    except ImportError as error:
        text = f"the native core does not load: {error}"
        return [Finding("memcpy", False, text), Finding("all-reduce", False, text)]

    def all_reduce() -> str:
        row = _probe_ranks(environment, ["-np", "2"])
        return judge(copy, row["large_gb_per_s"], row["small_us"])

    return [
        Finding("memcpy", True, f"{copy:.1f} GB/s (64 MiB, one thread)"),
        _check("all-reduce", all_reduce),
    ]


def judge(copy: float, large: float, small: float) -> str:
    """Describe how fast two ranks of one machine are, and whether that is usual; pure."""
    # `copy` is the speed of a plain copy, in GB/s.
    # `large` is the speed of an all-reduce of 64 MiB, in GB/s.
    # `small` is the time of an all-reduce of 4 KiB, in microseconds.
    found = f"{large:.2f} GB/s (64 MiB float32, 2 ranks), 4 KiB in {small:.0f} us"
    slow = []
    if large < _USUAL_SHARE * copy:
        slow.append(f"{_USUAL_SHARE * copy:.1f} GB/s, {_USUAL_SHARE:.0%} of the copy,")
    if small > _USUAL_SMALL_US:
        slow.append(f"{_USUAL_SMALL_US:.0f} us for 4 KiB")
    if slow:
        usual = " and ".join(slow).rstrip(",")
        return f"{found}: slow, {usual} would be usual; is the machine busy with something else?"
    return f"{found}: good, {large / copy:.0%} of the copy"


def between(environment: Mapping[str, str], arguments: Sequence[str], count: int) -> list[Finding]:
    """Start a rank on each host, and measure an all-reduce between them."""

    def all_reduce() -> str:
        row = _probe_ranks(environment, arguments)
        large, small = row["large_gb_per_s"], row["small_us"]
        if count == 1:
            return "a rank starts there"
        # In an all-reduce each link carries 2 (n - 1) / n of the tensor in each direction.
        link = 8 * large * 2 * (count - 1) / count
        return (
            f"{large:.2f} GB/s (64 MiB float32, {count} ranks), 4 KiB in {small:.0f} us: each "
            f"host's link carried {link:.1f} Gbit/s; compare that with what it should"
        )

    return [_check("all-reduce", all_reduce)]


def table(sections: Mapping[str, list[Finding]]) -> str:
    """Lay out the findings as a table; pure."""
    marks = {True: "yes", False: "no", None: ""}
    width = max(len(row.subject) for rows in sections.values() for row in rows)
    lines = []
    for title, rows in sections.items():
        lines.append(title)
        for row in rows:
            lines.append(f"  {marks[row.works]:3}  {row.subject:{width}}  {row.text}")
    return "\n".join(lines)


def examine(environment: Mapping[str, str], arguments: Sequence[str] = (), hosts: int = 0) -> int:
    """Print the table; return 0 if ranks can train here and on the hosts, else 1."""
    # `hosts` says how many other hosts there are; with 0, only this machine is checked.
    sections = {
        "machine": machine(),
        "frameworks": frameworks(),
        "data planes": data_planes(),
        "speed": speeds(environment),
    }
    if hosts > 0:
        sections[f"{hosts} hosts"] = between(environment, arguments, hosts)
    print(table(sections))
    ranks = [row for row in sum(sections.values(), []) if row.subject == "all-reduce"]
    return 0 if all(row.works for row in ranks) else 1
