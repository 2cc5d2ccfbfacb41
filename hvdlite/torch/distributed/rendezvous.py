"""Finds the other ranks for `dist.init_process_group` under hvdlite-run, srun and mpirun.

Rank 0 serves torch's store to the processes of the job alone (see `store`), and its address goes
through hvdlite's store, as the addresses in `hvd.init()` do. Where torch sees GPUs the store is
torch's own TCPStore: NCCL's threads ask it at any time, also when Python is at its end.
"""

from __future__ import annotations

import contextlib
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
from hvdlite.rendezvous.environment import WorkerEnvironment, detect
from hvdlite.rendezvous.handshake import Job
from hvdlite.rendezvous.serving import serve_store
from hvdlite.rendezvous.store import StoreClient
from hvdlite.torch.distributed.store import JobStore, KeyServer

# The store's Unix address ends with it, so that a hvd.init() meanwhile has its own.
_SUFFIX = "-torch"
_OURS = "job:"  # The address of a store that is not a TCPStore begins with it.
_kept: list[JobStore] = []  # It has the present one.


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
            server = KeyServer(job, worker.size, host and f"{host}:0")
            own = f"{_OURS}{server.address}"
        served_at = client.exchange("torch.distributed", own)[0]
    if served_at.startswith(_OURS):
        store = JobStore(served_at.removeprefix(_OURS), job, worker.rank, timeout, server)
        # Torch keeps the store's part in C++ alone. When all ranks have come to their next
        # init_process_group, none uses the former one.
        while _kept:
            _kept.pop().close()
        _kept.append(store)
        return store
    if server is not None:
        return server
    host, port = split_host(served_at)
    return distributed.TCPStore(host, port, worker.size, is_master=False, timeout=timeout)


def _serve_tcp(worker: WorkerEnvironment, own_host: str | None, timeout: timedelta) -> Any:
    """Serve torch's store at a free port of the address at which the other ranks reach this one."""
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
    )
