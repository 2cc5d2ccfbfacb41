"""Ray for tests: a cluster without a network, whose files are its own, and that leaves nothing."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_CLONE_NEWNET = 0x40000000
# Ray Train looks at its workers every two seconds by default. Ray starts workers with a niceness of
# 15, so that beside other busy processes a test would hardly get a core.
_VARIABLES = {
    "RAY_AUTH_MODE": "disabled",  # else it writes a token to the home folder
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_worker_niceness": "0",
    "OMP_NUM_THREADS": "1",
}
_MEMORY = 100 << 20  # bytes of the object store of a node
INIT = {"include_dashboard": False, "object_store_memory": _MEMORY, "log_to_driver": False}


def why_not() -> str:
    """Return why no cluster can be started here; "" if one can."""
    if os.getuid() != 0:
        return "a network namespace needs root"
    probe = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return "" if probe.returncode == 0 else "this kernel or container forbids network namespaces"


@contextlib.contextmanager
def no_network() -> Iterator[None]:
    """Give this thread, and what it starts, a network of its own with nothing but loopback."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    if libc.unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    try:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        yield
    finally:
        libc.setns(before, _CLONE_NEWNET)
        os.close(before)


@contextlib.contextmanager
def quiet_surroundings() -> Iterator[Path]:
    """Set Ray's variables and a short temporary folder, and put all back at the end."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # a socket's path is short
    patch = pytest.MonkeyPatch()
    for name, value in {**_VARIABLES, "RAY_TMPDIR": str(folder)}.items():
        patch.setenv(name, value)
    # Ray cannot start a worker that has a runtime_env with a Python whose path has a space in it.
    (folder / "venv").symlink_to(sys.prefix)
    patch.setattr(sys, "executable", str(folder / "venv" / "bin" / Path(sys.executable).name))
    interrupt = signal.getsignal(signal.SIGINT)  # Ray Train keeps it
    try:
        with no_network():
            yield folder
    finally:
        signal.signal(signal.SIGINT, interrupt)
        patch.undo()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def cluster(cpus: int, gpus: int = 0) -> Iterator[Path]:
    """Start a cluster of one node, to which this process belongs; give its temporary folder."""
    ray = pytest.importorskip("ray")
    with quiet_surroundings() as folder:
        try:
            _start(lambda: ray.init(num_cpus=cpus, num_gpus=gpus, **INIT), ray.shutdown)
            yield folder
        finally:
            ray.shutdown()


def _start(start: Callable[[], Any], give_up: Callable[[], Any]) -> None:
    """Start Ray, which gives a node 30 s; on busy processors that is not always enough."""
    for attempt in range(3):
        try:
            start()
            return
        except Exception:  # Ray raises a bare Exception.
            give_up()
            if attempt == 2:
                raise


class Nodes:
    """A cluster whose head has no CPUs, with a node of two that stays, and one that dies.

    `other` is the node that dies, if it runs.
    """

    def __init__(self) -> None:
        self.other: Any = None
        self._cluster: Any = None

    def start(self) -> None:
        """Start the head and the node that stays, and connect to them."""
        import ray
        from ray.cluster_utils import Cluster

        self._cluster = Cluster()
        self._cluster.add_node(num_cpus=0, include_dashboard=False, object_store_memory=_MEMORY)
        self.add()
        ray.init(address=self._cluster.address, log_to_driver=False)

    def shutdown(self) -> None:
        import ray

        ray.shutdown()
        if self._cluster.head_node is not None:
            self._cluster.shutdown()

    def add(self) -> Any:
        """Start another node with two CPUs."""
        return self._cluster.add_node(num_cpus=2, object_store_memory=_MEMORY)

    def kill_other(self) -> str:
        """Kill all processes of the other node, which Ray notices much later; return its name."""
        doomed, self.other = self.other, None
        self._cluster.remove_node(doomed, allow_graceful=False)
        return f"127.0.0.1/{doomed.node_id[:8]}"


@contextlib.contextmanager
def several_nodes() -> Iterator[Nodes]:
    """Start a cluster with nodes that can be killed; this process belongs to its head."""
    pytest.importorskip("ray")
    terminate = signal.getsignal(signal.SIGTERM)
    with quiet_surroundings():
        nodes = Nodes()
        try:
            _start(nodes.start, nodes.shutdown)
            yield nodes
        finally:
            nodes.shutdown()
            signal.signal(signal.SIGTERM, terminate)
