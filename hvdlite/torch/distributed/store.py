"""How ranks meet for `dist.init_process_group` under hvdlite-run, srun and mpirun: torch's store.

Rank 0 serves torch.distributed's store as torch's TCPStore is served, but only to processes that
know the job's secret: within a host on a Unix socket, between hosts on a TCP port behind the
handshake. The values that torch puts there name addresses and decide how groups are made. The
store's address goes through hvdlite's store, as the addresses in `hvd.init()` do. Where torch sees
GPUs the store is torch's own TCPStore: NCCL's threads ask it at any time, also when Python is at
its end.
"""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from hvdlite.errors import BootstrapError
from hvdlite.rendezvous.address import (
    UNIX,
    address_of,
    interface_address,
    listen,
    listen_on_loopback,
    split_host,
)
from hvdlite.rendezvous.deadline import LONGEST_SECONDS, Deadline, is_never, seconds_of
from hvdlite.rendezvous.descriptors import leave_to_parent
from hvdlite.rendezvous.environment import WorkerEnvironment, detect
from hvdlite.rendezvous.handshake import Job
from hvdlite.rendezvous.service import Peer
from hvdlite.rendezvous.store import Store, StoreClient, serve_store

# The store's Unix address ends with it, so that a hvd.init() meanwhile has its own.
_SUFFIX = "-torch"
_OURS = "job:"  # The address of a store that is not a TCPStore begins with it.
_kept: list[JobStore] = []  # those in use


def meet(error: Exception, timeout: timedelta | None) -> tuple[Any, int, int]:
    """Return a store, this process's rank, and the size of its world, or raise a BootstrapError."""
    worker = detect()
    if worker.launcher == "none":
        # No launcher started this process, so the error of torch's own rendezvous is right.
        raise error
    if worker.elastic:
        raise BootstrapError(
            "dist.init_process_group was called in an elastic job (hvdlite-run --min-np), whose "
            "world changes; torch.distributed's does not: start without --min-np and --max-np"
        )
    timeout = timeout or distributed.default_pg_timeout
    if worker.size == 1:
        return distributed.HashStore(), 0, 1
    return _store_of(worker, timeout), worker.rank, worker.size


def _store_of(worker: WorkerEnvironment, timeout: timedelta) -> Any:
    seconds = seconds_of(timeout)
    timeout = timedelta(seconds=min(seconds, LONGEST_SECONDS))  # Torch's store needs a limit.
    if not is_never(worker.start_timeout):
        seconds = min(seconds, worker.start_timeout)
    deadline = Deadline(seconds)
    job = Job(worker.token, worker.job_id, worker.epoch)
    address = worker.rendezvous
    assert address is not None
    if worker.launcher != "hvdlite-run" and address.startswith(UNIX):
        address += _SUFFIX
    with contextlib.ExitStack() as stack:
        if worker.serves_store:
            at_address = replace(worker, rendezvous=address)
            address = stack.enter_context(serve_store(at_address, job, deadline)).address
        client = StoreClient(address, job, worker.rank, deadline)
        stack.enter_context(client)
        host = client.local_host
        if host is not None and worker.interfaces:
            host = interface_address(worker.interfaces)
        own, server = "", None
        if worker.rank == 0 and torch.cuda.is_available():
            server = _serve_tcp(worker, host, timeout)
            own = f"{server.host}:{server.port}"
        elif worker.rank == 0:
            server = KeyServer.start(worker.size, job, host and f"{host}:0")
            own = f"{_OURS}{server.address}"
        served_at = client.exchange("torch.distributed", own)[0]
    if served_at.startswith(_OURS):
        store = JobStore(served_at.removeprefix(_OURS), job, worker.rank, timeout, server)
        # Torch keeps the store's part in C++ alone. When all ranks have come to their next
        # init_process_group, none uses the former ones, unless RPC does.
        while _kept and not distributed.is_initialized() and not _is_used_by_rpc():
            _kept.pop().close()
        _kept.append(store)
        return store
    if server is not None:
        return server
    host, port = split_host(served_at)
    return distributed.TCPStore(host, port, worker.size, is_master=False, timeout=timeout)


def _is_used_by_rpc() -> bool:
    rpc = sys.modules.get("torch.distributed.rpc")
    return rpc is not None and bool(rpc._is_current_rpc_agent_set())


def _serve_tcp(worker: WorkerEnvironment, own_host: str | None, timeout: timedelta) -> Any:
    listener = listen(f"{own_host}:0") if own_host else listen_on_loopback()
    host, port = split_host(address_of(listener))
    return distributed.TCPStore(
        host,
        port,
        worker.size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=False,  # It takes no descriptor before torch 2.8.
    )


class KeyServer(Store):
    """A store with torch's operations; values are base64 texts, as messages are JSON."""

    name = "hvdlite-torch-store"

    def __init__(self, job: Job, size: int, listener: socket.socket) -> None:
        super().__init__(job, size, listener)
        self._listener = listener
        self._values: dict[str, str] = {}
        self._waiting: list[tuple[float, Peer, list[str]]] = []
        leave_to_parent(self)

    def close_in_child(self) -> None:
        """Close the child's copies, so that the other ranks notice the death of the parent."""
        self._listener.close()
        for peer in self._peers:
            peer.connection.close()

    def _take(self, peer: Peer, body: bytes) -> None:
        message = json.loads(body)
        kind, key, value = message["kind"], message["key"], message["value"]
        if kind == "get":
            self._waiting.append((time.monotonic() + message["patience"], peer, value))
        else:
            try:
                self._answer([peer], "given", self._do(kind, key, value))
            except ValueError:
                self._answer([peer], "failed", f"{kind}: the value of {key} is no number")

    def _do(self, kind: str, key: str, value: Any) -> Any:
        values, present = self._values, self._values.get(key)
        if kind == "set":
            values |= value
        elif kind == "append":
            values[key] = _text(_bytes(present or "") + _bytes(value))
        elif kind == "add":
            total = int(_bytes(present) if present else 0) + value
            values[key] = _text(str(total))
            return total
        elif kind == "compare":
            expected, desired = value
            if present == expected or (present is None and not expected):
                values[key] = desired
            return values.get(key, expected)
        elif kind == "delete":
            return values.pop(key, None) is not None
        elif kind == "check":
            return all(one in values for one in value)
        return len(values)

    def _tick(self, asleep: float) -> None:
        """Answer those whose keys are there, and those who have waited for long enough."""
        waiting, self._waiting = self._waiting, []
        for until, peer, keys in waiting:
            missing = [key for key in keys if key not in self._values]
            if not missing:
                self._answer([peer], "given", [self._values[key] for key in keys])
            elif asleep >= until:
                self._answer([peer], "failed", f"no rank has set {', '.join(missing)} in time")
            else:
                self._waiting.append((until, peer, keys))

    def _left(self, peer: Peer) -> None:
        self._waiting = [one for one in self._waiting if one[1] is not peer]


class JobStore(distributed.Store):  # type: ignore[misc]
    """One rank's face of the store, as torch.distributed uses it. Any thread may call it."""

    # Operations of one rank follow each other, as those of a TCPStore do. torch calls some methods
    # by the names that they have in C++.

    def __init__(
        self, address: str, job: Job, rank: int, timeout: timedelta, server: Store | None
    ) -> None:
        """Connect; `server` is kept, on the rank that serves."""
        super().__init__()
        self.set_timeout(timeout)
        if not address.startswith(UNIX):
            self.host, self.port = split_host(address)
        self._server = server
        self._client = StoreClient(address, job, rank, Deadline(timeout.total_seconds()))
        self._lock = threading.Lock()
        leave_to_parent(self)

    def close_in_child(self) -> None:
        self._client.close()

    def close(self) -> None:
        self._client.close()
        if self._server is not None:
            self._server.close()

    def _ask(self, kind: str, key: str = "", value: Any = None, wait: float = 0.0) -> Any:
        # Rank 0 answers late where its threads get no turn.
        deadline = Deadline(wait + self.timeout.total_seconds())
        try:
            with self._lock:
                return self._client.ask(kind, key, value, wait, deadline)
        except BootstrapError as error:
            raise distributed.DistStoreError(
                f"torch.distributed's store, which rank 0 serves: {error}"
            ) from None

    def set(self, key: str, value: Any) -> None:
        self._ask("set", value={key: _text(value)})

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        self._ask("set", value=dict(zip(keys, map(_text, values), strict=True)))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str], timeout: timedelta | None = None) -> list[bytes]:
        timeout = self.timeout if timeout is None else timeout
        values = self._ask("get", value=list(keys), wait=timeout.total_seconds())
        return [_bytes(one) for one in values]

    wait = multi_get  # Torch does not look at what it returns.

    def append(self, key: str, value: Any) -> None:
        self._ask("append", key, _text(value))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return _bytes(self._ask("compare", key, [_text(expected), _text(desired)]))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", value=list(keys)))

    def deleteKey(self, key: str) -> bool:
        return bool(self._ask("delete", key))

    def getNumKeys(self) -> int:
        return int(self._ask("count"))

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> JobStore:
        return self


def _text(value: Any) -> str:
    data = value.encode() if isinstance(value, str) else bytes(value)
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
