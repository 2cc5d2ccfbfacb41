"""The hosts of a job, their slots, and which rank starts where; pure, except `is_here`.

A *placement* is the host and the numbers that a rank gets. Hosts are indexes in it. `local_rank`
counts the ranks of a host, and `cross_rank` the hosts that have a rank of the same local rank.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hvdlite.errors import ArgumentError

# The name is an argument of ssh, so it must not look like an option, or have meaning in a shell.
_NAME = re.compile(
    r"(?:[A-Za-z0-9_][A-Za-z0-9._-]*@)?(?P<host>[A-Za-z0-9:][A-Za-z0-9._:-]*)(?:%[A-Za-z0-9._-]+)?"
)
MOST_SLOTS = 10_000  # More on one host is a mistake that would end only when memory does.
_FIRST_WAIT = 1.0  # seconds after the first failure
_LONGEST_WAIT = 60.0
_GOOD_LIFE = 60.0  # seconds after which earlier failures do not count any more


@dataclass(frozen=True)
class Host:
    name: str
    slots: int  # how many ranks it takes
    here: bool | None = None  # whether it is this machine; None if its name tells that


class HostProvider(Protocol):
    """What knows the hosts of a job: a script, a fixed list, or a cluster's own software."""

    def hosts(self) -> Mapping[str, int]:
        """Return the slots of each host that there is now, by name, in order of preference."""

    def close(self) -> None:
        """Give up a question that is under way on another thread; none follows."""


def read_hosts(text: str) -> list[Host]:
    """Read `host:slots,...`, the argument of -H; a host without a number has one slot."""
    return _merged([read_host(part.strip()) for part in text.split(",") if part.strip()], "-H")


def read_hostfile(text: str, path: str) -> list[Host]:
    """Read a file with lines of `host slots=n`, as for Open MPI and Horovod, or `host:n`."""
    hosts = []
    for number, words in lines_of(text):
        try:
            hosts.append(_read_words(words.split()))
        except ArgumentError as error:
            raise ArgumentError(f"{path}, line {number}: {error}") from None
    return _merged(hosts, path)


def _read_words(words: Sequence[str]) -> Host:
    host = read_host(words[0])
    # Open MPI's upper limit changes nothing: no host gets more ranks than slots.
    options = [word for word in words[1:] if not re.fullmatch(r"max[_-]slots=\d+", word)]
    if len(words) == 1:
        return host
    has_number = host.name != words[0].strip("[]")
    if has_number or len(options) != 1 or not options[0].startswith("slots="):
        raise ArgumentError(
            f"{' '.join(words)!r} is not a line of a hostfile; write `{host.name} slots=2`, or "
            f"`{host.name}:2`, for 2 ranks on {host.name}"
        )
    return Host(host.name, _slots(options[0].removeprefix("slots="), host.name))


def lines_of(text: str) -> Iterator[tuple[int, str]]:
    """Give the number of each line that has more than a comment, and what it has."""
    # Some people's editors begin a file with a byte-order mark.
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        if words := line.partition("#")[0].strip():
            yield number, words


def read_host(text: str, default: int = 1) -> Host:
    """Read `host[:slots]`; a host without a number has `default` slots."""
    name, slots = text, str(default)
    before, colon, after = text.rpartition(":")
    if colon and ("]" in text or ":" not in before):
        name, slots = (text, slots) if text.endswith("]") else (before, after)
    name = name.strip("[]")
    found = _NAME.fullmatch(name)
    if found is None or not _is_address_if_it_looks_so(found["host"]):
        raise ArgumentError(f"{name!r} is not a name of a host")
    return Host(name, _slots(slots, name))


def _is_address_if_it_looks_so(host: str) -> bool:
    """Return whether what has colons is an IPv6 address, and not a name with two numbers."""
    if ":" not in host:
        return True
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def _slots(text: str, name: str) -> int:
    # So many digits that int() refuses them are out of range, too.
    if not re.fullmatch(r"\d{1,9}", text) or not 1 <= int(text) <= MOST_SLOTS:
        raise ArgumentError(
            f"{name} has {text[:20]!r} slots; write a number from 1 to {MOST_SLOTS}"
        )
    return int(text)


def checked_slots(host: Host, before: int) -> int:
    """Return the slots of a host with those of its lines before; they add up."""
    if before + host.slots > MOST_SLOTS:
        raise ArgumentError(f"the lines of {host.name} add up to more than {MOST_SLOTS} slots")
    return before + host.slots


def _merged(hosts: Sequence[Host], where: str) -> list[Host]:
    if not hosts:
        raise ArgumentError(f"{where} names no host")
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = checked_slots(host, slots.get(host.name, 0))
    return [Host(name, count) for name, count in slots.items()]


def spread(hosts: Sequence[Host], ranks: int) -> list[int]:
    """Fill the hosts in order, and return, by rank, the index of its host."""
    host_of_slot = [index for index, host in enumerate(hosts) for _ in range(host.slots)]
    if ranks > len(host_of_slot):
        raise ArgumentError(
            f"{ranks} ranks are more than the {len(host_of_slot)} slots of "
            f"{', '.join(f'{host.name}:{host.slots}' for host in hosts)}"
        )
    return host_of_slot[:ranks]


def is_here(name: str) -> bool:
    """Return whether a name means this machine, so that no ssh is needed."""
    own = socket.gethostname()
    if name in ("localhost", own, own.partition(".")[0]):
        return True
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False  # It may be an alias that only ssh's configuration knows.
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return True
    return False


@dataclass(frozen=True)
class Placement:
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    host: int  # the index of its host, in order of first appearance


def place_as(hosts: Sequence[int]) -> list[Placement]:
    """Place ranks in any order: rank r on host `hosts[r]`."""
    local_sizes: dict[int, int] = {}
    local_ranks = []
    for host in hosts:
        local_ranks.append(local_sizes.get(host, 0))
        local_sizes[host] = local_ranks[-1] + 1
    order = {host: index for index, host in enumerate(dict.fromkeys(hosts))}
    placements = []
    for rank, host in enumerate(hosts):
        peers = [h for h in order if local_sizes[h] > local_ranks[rank]]
        placements.append(
            Placement(
                rank=rank,
                size=len(hosts),
                local_rank=local_ranks[rank],
                local_size=local_sizes[host],
                cross_rank=peers.index(host),
                cross_size=len(peers),
                host=order[host],
            )
        )
    return placements


def threads_per_rank(cores: int, local_size: int) -> int:
    """Share the cores of a host among its ranks; at least one thread each."""
    return max(1, cores // local_size)


@dataclass(frozen=True)
class Start:
    worker: int  # its number, which is never used again
    host: str  # the name of its host
    slot: int  # its slot there, from 0
    joiner: bool  # whether it is started after the first ones
    # The numbers that its environment gets; in an elastic job, those that it will probably have.
    placement: Placement


class BackOff:
    """When the next attempt is made in a place where earlier ones have failed, later and later."""

    def __init__(self) -> None:
        self.failures = 0  # how many have failed in a row; one after a good life is the first again
        self.ready_at = 0.0  # when the next attempt may be made, in seconds

    def failed(self, now: float, lived: float = 0.0) -> float:
        """Note a failure after `lived` seconds; return the pause until the next attempt."""
        self.failures = 1 if lived >= _GOOD_LIFE else self.failures + 1
        pause = min(_FIRST_WAIT * 2.0 ** min(self.failures - 1, 10), _LONGEST_WAIT)
        self.ready_at = now + pause
        return pause
