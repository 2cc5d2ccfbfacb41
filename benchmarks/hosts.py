"""Measure collectives between hosts, beside plain sockets and gloo.

    python benchmarks/hosts.py --table
    python benchmarks/hosts.py --link hosts --table
    python benchmarks/hosts.py --link hosts --rate 1gbit --table
    python benchmarks/hosts.py --np 3 --link hosts --table

Each rank is alone on its host. With `--link loopback` the ranks are on one network, and only act as
if they were on different hosts; with `--link hosts` every rank has a network namespace of its own,
and a bridge between them, whose links may have a rate. This needs root.

All contestants take turns in the same processes: hvdlite, torch's gloo, and plain sockets that send
and receive as many bytes as the collective has to, with 1, 2 and 4 connections between each two
ranks (`plain_sockets.py`). `bytes` is the size of the tensor; that of an allgather is what one rank
gives. The results of an allgather and an alltoall lie in new memory, those of the sockets too; gloo
is given the same memory again and again. `_us` is the median time on the slowest rank, and
`of_sockets` how fast hvdlite is beside the fastest of the plain sockets: 1.0 is as fast.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from workers import add_common_arguments, print_row, run_on_hosts, run_ranks

MIB = 1 << 20
SIZES = [64 * 1024, MIB, 16 * MIB, 64 * MIB]
QUICK_SIZES = [64 * 1024, MIB]
VERBS = ["allreduce", "allgather", "alltoall"]
CONNECTIONS = [1, 2, 4]
ROUNDS = 8
QUICK_ROUNDS = 2
SECONDS = 0.4  # Each contestant runs so long in each round.
MOST_CALLS = 40
Call = Callable[[], object]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_common_arguments(parser)
    parser.add_argument("--link", choices=["loopback", "hosts"], default="loopback")
    parser.add_argument("--rate", default="", help="at which a host sends, as tc has it (1gbit)")
    parser.add_argument("--sizes", default="", help="comma-separated sizes in bytes")
    parser.add_argument("--verbs", default=",".join(VERBS), help="comma-separated collectives")
    parser.add_argument("--table", action="store_true", help="print the rows as Markdown, too")
    arguments = parser.parse_args()
    if arguments.worker:
        measure_all(arguments)
        return 0
    passed_on = ["--verbs", arguments.verbs, "--link", arguments.link, "--np", str(arguments.np)]
    passed_on += ["--sizes", arguments.sizes] if arguments.sizes else []
    passed_on += ["--rate", arguments.rate] if arguments.rate else []
    passed_on += ["--quick"] * arguments.quick + ["--table"] * arguments.table
    if arguments.link == "loopback":
        return run_ranks(__file__, arguments.np, arguments.output, passed_on)
    own = arguments.np, arguments.np, arguments.output, passed_on
    return run_on_hosts(__file__, *own, rate=arguments.rate)


def measure_all(arguments: argparse.Namespace) -> None:
    """Run one rank: measure every collective at every size, and print the rows on rank 0."""
    loopback = arguments.link == "loopback"
    if loopback:
        os.environ["HVDLITE_HOST_ID"] = os.environ["HVDLITE_RANK"]
    import torch
    from plain_sockets import PlainSockets
    from turns import costs_of, gloo, join_gloo

    import hvdlite.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    rank, ranks = hvd.rank(), hvd.size()
    join_gloo(arguments.store, rank, ranks)
    address = "127.0.0.1" if loopback else socket.gethostbyname(socket.gethostname())
    store = gloo.FileStore(f"{arguments.store}.plain", ranks)
    sockets = PlainSockets(store, address, rank, ranks, max(CONNECTIONS))
    sizes = [int(size) for size in arguments.sizes.split(",") if size]
    rows = []
    for verb in arguments.verbs.split(","):
        for size in sizes or (QUICK_SIZES if arguments.quick else SIZES):
            calls = {
                "hvdlite": with_hvdlite(verb, size, ranks),
                "gloo": with_gloo(verb, size, ranks),
                **with_sockets(sockets, verb, size, ranks),
            }
            rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
            costs = costs_of(calls, rounds, SECONDS, most=MOST_CALLS)
            if rank == 0:
                medians = {name: cost.us for name, cost in costs.items()}
                rows.append(row_of(arguments, verb, size, medians))
                print_row(rows[-1])
    if rank == 0 and arguments.table:
        print_table(rows)
    hvd.shutdown()


def row_of(
    arguments: argparse.Namespace, verb: str, size: int, medians: dict[str, float]
) -> dict[str, Any]:
    """Return the row of one collective and size."""
    link = {"link": arguments.link, "rate": arguments.rate}
    best = min(time for name, time in medians.items() if name.startswith("sockets"))
    return {
        "benchmark": "hosts",
        "np": arguments.np,
        **link,
        "verb": verb,
        "bytes": size,
        **{f"{name}_us": round(median) for name, median in medians.items()},
        "of_sockets": round(best / medians["hvdlite"], 2),
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the rows as Markdown."""
    columns = [name for name in rows[0] if name.endswith("_us")]
    titles = ["collective", "bytes", *(name[:-3] for name in columns), "of sockets"]
    print("| " + " | ".join(titles) + " |\n" + "|---" * len(titles) + "|")
    for row in rows:
        times = (f"{row[name] / 1e3:,.1f}" for name in columns)
        print(f"| {row['verb']} | {row['bytes']:,} | {' | '.join(times)} | {row['of_sockets']} |")


def with_hvdlite(verb: str, size: int, ranks: int) -> Call:
    """Return hvdlite's call of a collective."""
    import torch

    import hvdlite.torch as hvd

    tensor = torch.zeros(size // 4)
    name = f"hosts.{verb}.{size}"
    if verb == "allreduce":
        return lambda: hvd.allreduce_(tensor, op=hvd.Sum, name=name)
    if verb == "allgather":
        return lambda: hvd.allgather(tensor, name=name)
    even = tensor[: len(tensor) // ranks * ranks]
    return lambda: hvd.alltoall(even, name=name)


def with_gloo(verb: str, size: int, ranks: int) -> Call:
    """Return gloo's call of a collective."""
    import torch
    from turns import gloo

    tensor = torch.zeros(size // 4)
    if verb == "allreduce":
        return lambda: gloo.all_reduce(tensor)
    if verb == "allgather":
        parts = [torch.empty_like(tensor) for _ in range(ranks)]
        return lambda: gloo.all_gather(parts, tensor)
    even = tensor[: len(tensor) // ranks * ranks]
    output = torch.empty_like(even)
    return lambda: gloo.all_to_all_single(output, even)


def with_sockets(sockets: Any, verb: str, size: int, ranks: int) -> dict[str, Call]:
    """Return exchanges of what the collective has to move between each two ranks."""
    import torch

    shares = {"allreduce": 2 * size // ranks, "allgather": size, "alltoall": size // ranks}
    share = shares[verb]

    def memory(size: int) -> memoryview:
        return memoryview(torch.empty(size, dtype=torch.uint8).numpy())

    outgoing = memory(share)
    outgoing[:] = bytes(share)
    kept = memory(ranks * share) if verb == "allreduce" else None

    def call(connections: int) -> Call:
        return lambda: sockets.exchange(outgoing, kept or memory(ranks * share), connections)

    return {f"sockets_{count}": call(count) for count in CONNECTIONS}


if __name__ == "__main__":
    sys.exit(main())
