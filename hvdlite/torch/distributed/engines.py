"""Connects the members of a process group, and starts their engine.

The first member serves a store (`hvdlite.rendezvous.store`) while the members connect. Its address
goes through torch.distributed's store, which under torchrun any process may read and write. So no
secret goes there: the members prove to each other that they know HVDLITE_TOKEN. Without a token all
members have to be on one host, where the kernel tells them that their peers are of this user.

A group is an engine of its own, and not a process set of one engine: all ranks of a world have to
add a set, while torch.distributed calls a group's members alone; two sets cannot have the same
ranks; and the first failure or timeout in one set ends the world.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import hmac
import json
import secrets
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

from torch import distributed

from hvdlite import _core
from hvdlite.basics import describe_error, make_world, tell_also
from hvdlite.errors import BootstrapError
from hvdlite.live import observed
from hvdlite.rendezvous.address import fresh_unix_address, interface_address, resolve, route_to
from hvdlite.rendezvous.connection import Connection
from hvdlite.rendezvous.deadline import LONGEST_SECONDS, Deadline
from hvdlite.rendezvous.environment import WorkerEnvironment, surroundings
from hvdlite.rendezvous.handshake import JOB_ID_BYTES, Job
from hvdlite.rendezvous.mesh import connect, host_identity
from hvdlite.rendezvous.store import Store
from hvdlite.torch.distributed.work import stop_waiter


class Membership(NamedTuple):
    """What torch.distributed tells a member of a process group."""

    store: Any
    rank: int
    size: int
    name: str
    timeout: timedelta


def make_engine(member: Membership) -> _core.Engine:
    """Connect to the other members, or raise a BootstrapError; start the group's own engine."""
    deadline = Deadline(member.timeout.total_seconds())
    if member.size == 1:
        return _start(member, Connection(), deadline, bytes(JOB_ID_BYTES))
    around = surroundings()
    store = _store_of(member)
    with contextlib.ExitStack() as stack:
        store.set(f"host/{member.rank}", host_identity(around.host_id))
        if member.rank == 0:
            hosts = [_read(store, f"host/{i}", i, member, deadline) for i in range(member.size)]
            invitation = _invite(member, around, hosts, stack)
            store.set("invitation", json.dumps(invitation))
        else:
            invitation = json.loads(_read(store, "invitation", 0, member, deadline))
        if "refusal" in invitation:
            raise BootstrapError(invitation["refusal"])
        worker = replace(
            around,
            rank=member.rank,
            size=member.size,
            rendezvous=invitation["address"],
            token=_token_of(member, around, invitation),
            job_id=bytes.fromhex(invitation["job_id"]),
        )
        connection = connect(worker, _core.create_segment, _core.agreed_knobs(), deadline)
    return _start(member, connection, deadline, worker.job_id)


def _start(
    member: Membership, connection: Connection, deadline: Deadline, job_id: bytes
) -> _core.Engine:
    """Start the engine; that of the first group, the default one, is reported to a view."""
    engine = make_world(connection, deadline, job_id, records=False).engine
    observed.follow_unless_busy(engine, member.rank, member.size)
    with _lock:
        _engines[engine] = member.rank
        _install_hooks()
    return engine


def _store_of(member: Membership) -> Any:
    """Return the part of torch.distributed's store that belongs to this start of this group."""
    # A group of the same name may have lived in the same store before. So keys have the number of
    # the start, which every member counts separately: all members start a group equally often.
    if not member.timeout:  # To hvdlite it means no limit, and to torch's store no time.
        member.store.set_timeout(timedelta(seconds=LONGEST_SECONDS))
    start = member.store.add(f"hvdlite/starts/{member.rank}", 1)
    return distributed.PrefixStore(f"hvdlite/{start}", member.store)


_QUIET_SECONDS = 10.0  # A member waits so long for another one before it says so.


def _read(store: Any, key: str, author: int, member: Membership, deadline: Deadline) -> str:
    def wait(most: float) -> None:
        seconds = max(0.001, min(deadline.seconds_left, most))
        store.wait([key], timedelta(seconds=seconds))

    try:
        try:
            wait(_QUIET_SECONDS)
        except RuntimeError:
            if deadline.passed:
                raise
            print(
                f"hvdlite [{member.rank}] warning: rank {member.rank} makes process group "
                f"'{member.name}', and rank {author} has not come to it for {_QUIET_SECONDS:g} s: "
                "every member has to call init_process_group or new_group",
                file=sys.stderr,
                flush=True,
            )
            wait(LONGEST_SECONDS)
        return store.get(key).decode()
    except RuntimeError as error:
        raise BootstrapError(
            f"rank {member.rank} of process group '{member.name}' did not hear of rank {author} "
            f"within {member.timeout.total_seconds():g} s, the timeout of the group: "
            f"{str(error).splitlines()[0]}; every member has to call init_process_group or "
            "new_group"
        ) from error


def _invite(
    member: Membership,
    around: WorkerEnvironment,
    hosts: Sequence[str],
    stack: contextlib.ExitStack,
) -> dict[str, str]:
    """Serve the store in the first member; return where it is, or why the members cannot meet."""
    one_host = len(set(hosts)) == 1
    invitation = {"job_id": secrets.token_hex(JOB_ID_BYTES)}
    if not one_host and not around.token:
        other = next(rank for rank, host in enumerate(hosts) if host != hosts[0])
        invitation["refusal"] = (
            f"process group '{member.name}': ranks 0 and {other} are on different hosts; to meet "
            "there they need the same HVDLITE_TOKEN (64 random hexadecimal digits: openssl rand "
            "-hex 32) in every rank's environment, or start them with hvdlite-run"
        )
    else:
        invitation["address"] = fresh_unix_address() if one_host else _own_address(member, around)
        token = _token_of(member, around, invitation)
        job = Job(token, bytes.fromhex(invitation["job_id"]), epoch=0)
        store = stack.enter_context(Store.start(member.size, job, invitation["address"]))
        invitation["address"] = store.address
    return invitation


def _token_of(
    member: Membership, around: WorkerEnvironment, invitation: Mapping[str, str]
) -> bytes:
    """Derive the secret of a group; without a token it is public, and the kernel guards the way."""
    label = b"torch.distributed|" + member.name.encode()
    if around.token:
        return hmac.digest(around.token, label, hashlib.sha256)
    return hashlib.sha256(label + invitation["job_id"].encode()).digest()


def _own_address(member: Membership, around: WorkerEnvironment) -> str:
    """Return an address, with port 0, at which members on other hosts reach this one."""
    # The environment names the address or the interface. Otherwise it is the address from which
    # this host reaches torch.distributed's store.
    if around.bind_address is not None:
        return f"{around.bind_address}:0"
    if around.interfaces:
        return f"{interface_address(around.interfaces)}:0"
    store = member.store
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", socket.gethostname()), getattr(store, "port", 1)
    _, target = resolve(f"{host}:{port}")[0]
    return f"{route_to(target[0])}:0"


# At the exit of the interpreter all engines are shut down, and the thread that completes futures
# ends, also where a script forgets to. When an exception ends the script, the other members get its
# text, as after `hvd.init()`.
_lock = threading.Lock()
# These engines are open; the values are this process's ranks.
_engines: dict[_core.Engine, int] = {}


@functools.cache
def _install_hooks() -> None:
    atexit.register(_end_all)
    tell_also(_tell_peers)


def end(engine: _core.Engine) -> None:
    """Leave a group cleanly; does nothing the second time."""
    with _lock:
        known = _engines.pop(engine, None) is not None
        last = not _engines
    if known:
        engine.shutdown()
        if last:
            stop_waiter()


def _end_all() -> None:
    for engine in list(_engines):
        end(engine)


def _tell_peers(error: BaseException) -> None:
    for engine, rank in list(_engines.items()):
        engine.abort(f"rank {rank} {describe_error(error)}")
