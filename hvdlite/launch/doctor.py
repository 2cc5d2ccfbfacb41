"""hvdlite-run --doctor: check what works on this machine, and why the rest does not.

With hosts (-H), it also starts a rank on each of these hosts.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata

import hvdlite
from hvdlite.launch.resources import available_cores, memory_bytes

_FRAMEWORKS = ("torch", "tensorflow", "keras", "numpy")
_LONGEST_MEETING = 60.0  # seconds
_MEET = "from hvdlite import basics; basics.init(); basics.shutdown()"


@dataclass(frozen=True)
class Finding:
    subject: str  # what was checked
    works: bool | None  # whether it works; None for a mere fact
    text: str  # what was found


def _check(subject: str, probe: Callable[[], str]) -> Finding:
    try:
        return Finding(subject, True, probe())
    except Exception as error:
        return Finding(subject, False, f"{type(error).__name__}: {error}")


def machine() -> list[Finding]:
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


def _gpus() -> list[Finding]:
    """Check whether NCCL can carry GPU tensors; the core may fail to load here."""
    try:
        from hvdlite import _core, basics

        return [Finding(*row) for row in _core.gpu_report(basics.nccl_folders())]
    except Exception as error:
        return [Finding("NCCL", False, f"{type(error).__name__}: {error}")]


def _meet(environment: Mapping[str, str], arguments: Sequence[str]) -> str:
    python = sys.executable
    try:
        done = subprocess.run(
            [python, "-m", "hvdlite.launch", *arguments, python, "-c", _MEET],
            env={"OMP_NUM_THREADS": "1", **environment},
            cwd="/",  # "-m" searches this folder first, and it must not have a folder hvdlite.
            capture_output=True,
            text=True,
            timeout=_LONGEST_MEETING,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"the ranks did not meet within {_LONGEST_MEETING:.0f} s") from None
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise RuntimeError(f"the ranks ended with status {done.returncode}: {last[0].strip()}")
    return "they start and connect"


def table(sections: Mapping[str, list[Finding]]) -> str:
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
    ranks = {"ranks": [_check("2 ranks here", lambda: _meet(environment, ["-np", "2"]))]}
    if hosts > 0:
        there = _check("a rank on each host", lambda: _meet(environment, arguments))
        ranks[f"{hosts} hosts"] = [there]
    planes = [
        _check("native core", lambda: f"version {import_module('hvdlite._core').__version__}"),
        *_gpus(),
    ]
    sections = {"machine": machine(), "frameworks": frameworks(), "data planes": planes, **ranks}
    print(table(sections))
    return 0 if all(row.works for rows in ranks.values() for row in rows) else 1
