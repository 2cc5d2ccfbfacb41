"""Read TF_CONFIG, in which cluster software describes the tasks of a TensorFlow job.

The variable is JSON: the addresses of all tasks by type, and which of them this process is. The
chief and the workers train. They become the ranks in this order, and rank 0 serves the store at its
own address, which TensorFlow's server would use otherwise. In a job with parameter servers the
tasks of the type `ps` come first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hvdlite.errors import BootstrapError
from hvdlite.rendezvous.address import split_host

_TRAIN = ("chief", "master", "worker")  # `master` is what TensorFlow 1 calls the chief.
_SERVE = ("ps",)
_DO_NOT_TRAIN = ("ps", "evaluator")
# What a task may call, without and with parameter servers.
_WHERE = (
    "hvd.init() in the chief and the workers alone",
    "hvd.parameter_server.connect() in the chief, the workers and the tasks of the type 'ps' alone",
)
_SHOWN = 200  # characters of the variable that a message shows


class TfRanks(NamedTuple):
    rank: int  # this process's rank
    addresses: tuple[str, ...]  # Each rank has its "host:port".
    servers: int = 0  # how many of the first ranks are parameter servers

    @property
    def hosts(self) -> list[str]:
        return [split_host(address)[0].lower() for address in self.addresses]


def ranks_of(text: str, with_servers: bool = False) -> TfRanks | None:
    """Return the ranks that TF_CONFIG describes; None if there is only one process that trains."""
    # `with_servers` says whether the tasks of the type `ps` are ranks, too: the first ones.
    try:
        return _ranks_of(text, _SERVE if with_servers else ())
    except ValueError as error:
        shown = text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
        raise BootstrapError(
            f"TF_CONFIG={shown} cannot be used: {error}; correct it, or clear it and start the "
            "script with hvdlite-run; HVDLITE_SIZE=1 insists on a world of one"
        ) from None


def _ranks_of(text: str, serve: Sequence[str]) -> TfRanks | None:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from None
    if not isinstance(config, dict):
        raise ValueError("it is not an object of JSON")
    cluster = config.get("cluster") or {}
    if not isinstance(cluster, dict):
        raise ValueError("its cluster is not an object of JSON")
    kinds = (*serve, *_TRAIN)
    lists = {kind: _addresses(kind, cluster[kind]) for kind in kinds if kind in cluster}
    addresses = tuple(address for one in lists.values() for address in one)
    task = config.get("task") or {}
    kind = task.get("type") if isinstance(task, dict) else None
    if kind in _DO_NOT_TRAIN and kind not in serve:
        raise ValueError(
            f"this process is a task of the type {kind!r}, which is not a rank, because it does "
            f"not train; call {_WHERE[bool(serve)]}"
        )
    if len(addresses) < 2:
        return None
    for address in addresses:
        if addresses.count(address) > 1:
            raise ValueError(f"two tasks have the address {address}")
    if not isinstance(kind, str) or kind not in lists:
        raise ValueError(f"it does not say which task of {_listed(lists)} this process is")
    before = sum(len(lists[earlier]) for earlier in list(lists)[: list(lists).index(kind)])
    servers = sum(len(lists[one]) for one in serve if one in lists)
    return TfRanks(before + _index(kind, task.get("index"), len(lists[kind])), addresses, servers)


def _addresses(kind: str, given: Any) -> list[str]:
    """Read the addresses of one type of task: a list, or an object whose names are the indexes."""
    if isinstance(given, dict):
        given = [given.get(str(index)) for index in range(len(given))]
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        raise ValueError(f"its {kind} is not a list of addresses")
    for address in given:
        try:
            split_host(address)
        except BootstrapError as error:
            raise ValueError(str(error)) from None
    return given


def _index(kind: str, given: Any, count: int) -> int:
    """Read the index of this task, which some software writes as a text."""
    index = int(given) if isinstance(given, str) and given.isdecimal() else given
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < count:
        raise ValueError(f"this process is {kind} {given!r}, and the cluster has {count} of them")
    return index


def _listed(lists: Mapping[str, Sequence[str]]) -> str:
    return " and ".join(f"{len(one)} {kind}" for kind, one in lists.items() if one)
