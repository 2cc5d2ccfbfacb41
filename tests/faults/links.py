"""Hosts that are network namespaces, each with a virtual cable to one bridge; rank r is on host r.

The hosts of tests/multihost/bed.py also have an sshd, names and process ids of their own, which
ranks that the harness starts do not need.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from hvdlite.rendezvous.handshake import Job
from hvdlite.rendezvous.store import Store

_MARK = os.getpid() % 100_000  # It makes the names different in two runs on one machine.
_BRIDGE = f"hvdl-br-{_MARK}"
_SPACE = f"hvdl-{_MARK}-host"
_NETWORK = f"10.213.{_MARK % 256}"
ENTER = ["sh", "-c", f'exec ip netns exec {_SPACE}$HVDLITE_RANK "$@"', "sh"]


def ip(*words: str) -> None:
    """Run ip(8)."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def _can_make_namespaces() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        return False
    probe = _SPACE + "-probe"
    made = subprocess.run(["ip", "netns", "add", probe], check=False, capture_output=True)
    subprocess.run(["ip", "netns", "del", probe], check=False, capture_output=True)
    return made.returncode == 0


needs_namespaces = pytest.mark.skipif(
    not _can_make_namespaces(), reason="network namespaces need root, ip and tc"
)


@contextlib.contextmanager
def linked_hosts(count: int, rate: str | None = None) -> Iterator[None]:
    """Make the hosts; `rate` limits what each can send. This machine has the address .254."""
    with contextlib.ExitStack() as undo:
        ip("link", "add", _BRIDGE, "type", "bridge")
        undo.callback(ip, "link", "del", _BRIDGE)
        ip("addr", "add", f"{_NETWORK}.254/24", "dev", _BRIDGE)
        ip("link", "set", _BRIDGE, "up")
        for number in range(count):
            space, outer = f"{_SPACE}{number}", f"hvdl-v{number}-{_MARK}"
            ip("netns", "add", space)
            undo.callback(ip, "netns", "del", space)
            ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
            # Deleting the namespace alone would delete the cable later.
            undo.callback(ip, "link", "del", outer)
            ip("link", "set", outer, "master", _BRIDGE, "up")
            ip("-n", space, "addr", "add", f"{_NETWORK}.{number + 1}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")
            if rate is not None:
                tbf = ["rate", rate, "burst", "32kbit", "latency", "400ms"]
                enter = ("netns", "exec", space, "tc")
                ip(*enter, "qdisc", "add", "dev", "eth0", "root", "tbf", *tbf)
        yield


def cut(host: int) -> None:
    """Take down a host's network interface, as if its cable were pulled."""
    ip("-n", f"{_SPACE}{host}", "link", "set", "eth0", "down")


@contextlib.contextmanager
def served_store(count: int) -> Iterator[dict[str, str]]:
    """Serve the store of a world of `count` ranks; yield the variables for its ranks."""
    job = Job(secrets.token_bytes(32), secrets.token_bytes(16), epoch=0)
    with Store.start(count, job, f"{_NETWORK}.254:0") as store:
        yield {
            "HVDLITE_RENDEZVOUS": store.address,
            "HVDLITE_TOKEN": job.token.hex(),
            "HVDLITE_JOB_ID": job.job_id.hex(),
        }
