"""Measure a training step with each compression, between two hosts with a slow link.

    python benchmarks/compression.py            # as root, needs iproute2 (ip and tc)

The hosts are network namespaces with one link between them, whose rate tc limits in either
direction: `--rates 100mbit 1gbit 10gbit`. The ranks train a network of equal linear layers, and all
modes take turns in the same run:

- `none`, `bf16`, `int8`: DistributedOptimizer with that compression;
- `localsgd`: `hvd.LocalSGD(every=16)`, without compression.

`step_ms` is the median over the turns of the mean step, and `times_none` the step of `none` divided
by it: above 1 the mode pays. `megabytes` is what a rank sends to the other host in a step.

On hosts of your own, start the ranks yourself:

    hvdlite-run -np 2 -H host1:1,host2:1 python benchmarks/compression.py --worker
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from workers import add_common_arguments, hand_on, print_row

import hvdlite.torch as hvd
from hvdlite import basics

RATES = ("100mbit", "1gbit", "10gbit")
EVERY = 16  # A round of local SGD has so many steps.
PORT = 29477


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_common_arguments(parser)
    parser.add_argument("--rates", nargs="+", default=RATES, help="of the link, as tc writes them")
    parser.add_argument("--rate", default="unknown", help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, default=6, help="of the network (6)")
    parser.add_argument("--width", type=int, default=1024, help="of a layer (1024)")
    parser.add_argument("--turns", type=int, default=3, help="of each mode (3)")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rates, arguments.turns = arguments.rates[:1], 1
        arguments.layers, arguments.width = 2, 128
    if arguments.worker:
        measure(arguments)
        return 0
    if os.getuid() != 0:
        parser.error("making network namespaces needs root; see --help for hosts of your own")
    for rate in arguments.rates:
        with two_hosts(rate) as hosts:
            status = run_on(hosts, rate, arguments)
        if status != 0:
            return status
    return 0


def ip(*command: str) -> None:
    """Run `ip`."""
    subprocess.run(["ip", *command], check=True)


@contextlib.contextmanager
def two_hosts(rate: str) -> Iterator[list[str]]:
    """Make two network namespaces with a link of this rate; yield their names."""
    mark = secrets.token_hex(3)
    names = [f"hc{mark}{end}" for end in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        peer = ["peer", "name", "link0", "netns", names[1]]
        ip("-n", names[0], "link", "add", "link0", "type", "veth", *peer)
        for host, name in enumerate(names):
            ip("-n", name, "addr", "add", f"{address(host)}/24", "dev", "link0")
            ip("-n", name, "link", "set", "link0", "up")
            # What the link takes at once must last until the kernel looks again, 4 ms later.
            limit = ["tbf", "rate", rate, "burst", "8mb" if "g" in rate else "64kb"]
            shape = ["tc", "-n", name, "qdisc", "add", "dev", "link0", "root", *limit]
            subprocess.run([*shape, "latency", "50ms"], check=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)


def address(host: int) -> str:
    """Return the address of a host."""
    return f"10.78.0.{host + 1}"


def run_on(hosts: list[str], rate: str, arguments: argparse.Namespace) -> int:
    """Start the ranks, half of them on each host; return the highest exit status."""
    sizes = [f"--{name}={getattr(arguments, name)}" for name in ("layers", "width", "turns")]
    worker = [sys.executable, __file__, "--worker", "--rate", rate, *sizes]
    each, token = arguments.np // len(hosts), secrets.token_hex(32)
    ranks = []
    for rank in range(each * len(hosts)):
        host = rank // each
        variables = {
            "RANK": rank, "WORLD_SIZE": each * len(hosts),
            "LOCAL_RANK": rank % each, "LOCAL_WORLD_SIZE": each,
            "MASTER_ADDR": address(0), "MASTER_PORT": PORT, "OMP_NUM_THREADS": 1,
            "HVDLITE_HOST_ID": hosts[host], "HVDLITE_TOKEN": token,
        }  # fmt: skip
        ranks.append(
            subprocess.Popen(
                ["ip", "netns", "exec", hosts[host], *worker],
                env={**os.environ, **{name: str(value) for name, value in variables.items()}},
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
            )
        )
    try:
        assert ranks[0].stdout is not None
        for line in ranks[0].stdout:
            hand_on(line, arguments.output)
        return max(rank.wait() for rank in ranks)
    finally:
        for one in ranks:
            one.kill()
            one.wait()


class Contestant:
    """A network and its optimizer."""

    def __init__(self, mode: str, layers: int, width: int) -> None:
        torch.manual_seed(0)
        self.mode = mode
        self.model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
        self.inputs = torch.randn(16, width)
        self.seconds: list[float] = []  # A step took so long in each turn.
        self.sent: list[float] = []  # A step sent so many bytes in each turn.
        self.steps = EVERY if mode == "localsgd" else 4
        sgd = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.optimizer: Any
        if mode == "localsgd":
            self.optimizer = hvd.LocalSGD(sgd, every=EVERY)
        else:
            compression = getattr(hvd.Compression, mode)
            named = self.model.named_parameters()
            self.optimizer = hvd.DistributedOptimizer(sgd, named, compression=compression)

    def take_turn(self) -> None:
        """Train, and note the time."""
        hvd.barrier()
        before, begin = sent_bytes(), time.perf_counter()
        for _ in range(self.steps):
            self.optimizer.zero_grad()
            self.model(self.inputs).square().mean().backward()
            self.optimizer.step()
        self.seconds.append((time.perf_counter() - begin) / self.steps)
        self.sent.append((sent_bytes() - before) / self.steps)


def sent_bytes() -> int:
    """Return the bytes that this rank has sent to other hosts."""
    return basics.engine().counters()["bytes_to_other_hosts"]


def measure(arguments: argparse.Namespace) -> None:
    """Be one rank."""
    torch.set_num_threads(1)
    hvd.init()
    modes = ("none", "bf16", "int8", "localsgd")
    contestants = [Contestant(mode, arguments.layers, arguments.width) for mode in modes]
    for turn in range(arguments.turns + 1):
        for one in contestants:
            one.take_turn()
            if turn == 0:  # The first steps negotiate.
                one.seconds.clear()
                one.sent.clear()
    none = statistics.median(contestants[0].seconds)
    for one in contestants if hvd.rank() == 0 else ():
        seconds = statistics.median(one.seconds)
        print_row(
            {
                "benchmark": "compression",
                "np": hvd.size(),
                "rate": arguments.rate,
                "mode": one.mode,
                "model_megabytes": round(sum(p.nbytes for p in one.model.parameters()) / 1e6, 1),
                "step_ms": round(1000 * seconds, 1),
                "times_none": round(none / seconds, 2),
                "megabytes": round(statistics.median(one.sent) / 1e6, 2),
            }
        )
    hvd.shutdown()


if __name__ == "__main__":
    sys.exit(main())
