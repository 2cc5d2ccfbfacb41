"""Row 8: a link of 20 Mbit/s between two hosts is slow, not dead."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from faults.arrays import Array, reduce_array
from harness import World
from hvdlite import basics
from hvdlite.bootstrap.store import Store

MARK = os.getpid() % 100_000  # two runs on one machine do not meet
BRIDGE = f"hvdl-br-{MARK}"
NAMESPACE = f"hvdl-{MARK}-host"
NETWORK = f"10.213.{MARK % 256}"
BYTES = 12 << 20
PATIENCE = 2.0  # far less than the transfer takes


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def can_make_namespaces() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        return False
    probe = NAMESPACE + "-probe"
    made = subprocess.run(["ip", "netns", "add", probe], check=False, capture_output=True)
    subprocess.run(["ip", "netns", "del", probe], check=False, capture_output=True)
    return made.returncode == 0


@contextlib.contextmanager
def two_hosts(rate: str) -> Iterator[None]:
    """Two network namespaces on a bridge, `rate` from each to the other; this one is .254."""
    with contextlib.ExitStack() as undo:
        ip("link", "add", BRIDGE, "type", "bridge")
        undo.callback(ip, "link", "del", BRIDGE)
        ip("addr", "add", f"{NETWORK}.254/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        for number in range(2):
            space, outer = f"{NAMESPACE}{number}", f"hvdl-v{number}-{MARK}"
            ip("netns", "add", space)
            undo.callback(ip, "netns", "del", space)
            ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", outer, "master", BRIDGE, "up")
            ip("-n", space, "addr", "add", f"{NETWORK}.{number + 1}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")
            tbf = ["rate", rate, "burst", "32kbit", "latency", "400ms"]
            ip(
                *("netns", "exec", space, "tc"),
                *("qdisc", "add", "dev", "eth0", "root", "tbf", *tbf),
            )
        yield


def reduce_over_the_link(count: int) -> dict[str, Any]:
    basics.init()
    gradient: Array = np.full(count, basics.rank() + 1, dtype="float32")
    begin = time.monotonic()
    reduce_array(gradient, "large.gradient")
    return {
        "seconds": time.monotonic() - begin,
        "right": bool((gradient == 3).all()),
        "hosts": len(set(basics._current().host_of)),
    }


@pytest.mark.skipif(not can_make_namespaces(), reason="network namespaces need root, ip and tc")
def test_slow_link_is_not_taken_for_a_dead_rank() -> None:
    token, job_id = secrets.token_bytes(32), secrets.token_bytes(16)
    with two_hosts("20mbit"), Store.start(2, token, job_id, 0, f"{NETWORK}.254:0") as store:
        environment = {
            "HVDLITE_RENDEZVOUS": store.address,
            "HVDLITE_TOKEN": token.hex(),
            "HVDLITE_JOB_ID": job_id.hex(),
            "HVDLITE_COLLECTIVE_TIMEOUT": str(PATIENCE),
            "HVDLITE_STALL_WARNING": "1",
        }
        enter = f'exec ip netns exec {NAMESPACE}$HVDLITE_RANK "$@"'
        command = ["sh", "-c", enter, "sh"]
        body, count = reduce_over_the_link, BYTES // 4
        with World(2, body, count, env=environment, command=command) as world:
            results = world.wait()
    for result in results:
        assert result.value["right"]
        assert result.value["hosts"] == 2
        assert PATIENCE < result.value["seconds"] < 60
