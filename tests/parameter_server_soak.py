"""A long test of parameter servers: `python tests/parameter_server_soak.py --seconds 600`.

Two server processes train for workers that come, are killed at random moments, and come again under
new numbers. Every push adds 1 to all values of a server, so a worker that pulls unequal values of
one server has seen half of a push. The servers' memory, descriptors and threads must stay flat.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hvdlite.launch.process.local import job_environment
from hvdlite.launch.process.placement import place
from hvdlite.parameter_server.checkpoint import file_of
from hvdlite.parameter_server.group import Group
from hvdlite.parameter_server.tensors import TensorSpec
from hvdlite.rendezvous.environment import detect
from hvdlite.rendezvous.handshake import Job
from hvdlite.rendezvous.store import Store

SERVERS = 2
WORKERS = 4
RANKS = SERVERS + WORKERS
ELEMENTS = 60_000
WARM_UP = 0.25  # share of the time after which figures count
MOST_GROWTH_KIB = 24 << 10
HALF_A_PUSH = 3
PATIENCE = 120.0  # seconds for the processes to start


def serve(folder: str) -> None:
    """Be a server, until it gets SIGTERM."""
    import torch

    from hvdlite.torch import parameter_server

    torch.set_num_threads(1)
    with parameter_server.connect() as group:
        group.serve(lambda params: torch.optim.SGD(params, lr=1.0), f"{folder}/ps", save_every=1.0)


def work() -> None:
    """Push and pull until something kills this process."""
    with Group(detect(with_servers=True)) as group:
        specs = [TensorSpec(f"w{one}", "float32", (ELEMENTS,)) for one in range(SERVERS)]
        values = [memoryview(bytearray(4 * ELEMENTS)) for _ in specs]
        ones = memoryview(bytearray(struct.pack("f", -1.0) * ELEMENTS))
        remote = group.client.register(specs, values)
        for clock in range(remote.clock + 1, 1 << 40):
            remote.step(clock, dict.fromkeys(range(SERVERS), ones), values, staleness=5)
            for one in values:
                if one[4:] != one[:-4]:
                    os._exit(HALF_A_PUSH)


def resources(pid: int) -> tuple[int, int, int]:
    """Return memory in KiB, descriptors and threads of a process."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    fields = dict(line.split(":", 1) for line in status.splitlines())
    memory = int(fields["VmRSS"].split()[0]) - int(fields["RssShmem"].split()[0])
    return memory, len(os.listdir(f"/proc/{pid}/fd")), int(fields["Threads"])


class Soak:
    """The processes of one soak."""

    def __init__(self, folder: str, store: str, job: Job) -> None:
        self._folder = folder
        self._environments = [
            {**job_environment(one, job, store), "HVDLITE_SERVERS": str(SERVERS)}
            for one in place([RANKS])
        ]
        self._next = RANKS
        self.kills = 0
        self.servers = [self._start(rank, rank) for rank in range(SERVERS)]
        self.workers = {rank: self._start(rank, rank) for rank in range(SERVERS, RANKS)}

    def _start(self, rank: int, number: int) -> subprocess.Popen[bytes]:
        role = "server" if rank < SERVERS else "worker"
        command = [sys.executable, __file__, "--role", role, "--folder", self._folder]
        environment = {**self._environments[rank], "HVDLITE_WORKER": str(number)}
        return subprocess.Popen(command, env={**os.environ, **environment})

    def wait_for_training(self) -> None:
        """Wait until each server has written a checkpoint."""
        files = [Path(file_of(f"{self._folder}/ps", one, SERVERS)) for one in range(SERVERS)]
        end = time.monotonic() + PATIENCE
        while not all(file.exists() for file in files):
            if time.monotonic() > end:
                raise SystemExit("the training has not begun")
            time.sleep(0.1)

    def kill_one(self, chance: random.Random) -> None:
        """Kill a worker, and start another one at its rank."""
        rank = chance.choice(list(self.workers))
        worker = self.workers[rank]
        if worker.poll() is not None:
            raise SystemExit(f"a worker ended by itself, with status {worker.returncode}")
        worker.kill()
        worker.wait()
        self.workers[rank] = self._start(rank, self._next)
        self._next += 1
        self.kills += 1

    def close(self) -> list[int]:
        """End all processes, and return the exit statuses of the servers."""
        for worker in self.workers.values():
            worker.kill()
            worker.wait()
        for server in self.servers:
            server.send_signal(signal.SIGTERM)
        return [server.wait(60) for server in self.servers]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role is not None:
        serve(arguments.folder) if arguments.role == "server" else work()
        return 0
    chance = random.Random(arguments.seed)
    job = Job(secrets.token_bytes(32), secrets.token_bytes(16), epoch=0)
    with tempfile.TemporaryDirectory() as folder, Store.start(RANKS, job) as store:
        soak = Soak(folder, store.address, job)
        soak.wait_for_training()
        end = time.monotonic() + arguments.seconds
        counted_from = end - (1 - WARM_UP) * arguments.seconds
        samples: list[list[tuple[int, int, int]]] = []
        while time.monotonic() < end:
            time.sleep(chance.uniform(0.2, 1.5))
            soak.kill_one(chance)
            if time.monotonic() > counted_from:
                samples.append([resources(server.pid) for server in soak.servers])
        statuses = soak.close()
    return judge(samples, statuses, soak.kills)


def judge(samples: list[list[tuple[int, int, int]]], statuses: list[int], kills: int) -> int:
    """Compare the first and the last quarter of the samples, and print a row."""
    quarter = max(1, len(samples) // 4)
    rows = []
    for server in range(SERVERS):
        early = [max(one[server][i] for one in samples[:quarter]) for i in range(3)]
        late = [max(one[server][i] for one in samples[-quarter:]) for i in range(3)]
        rows.append({"early": early, "late": late})
    flat = all(
        row["late"][0] - row["early"][0] < MOST_GROWTH_KIB
        and row["late"][1] - row["early"][1] <= WORKERS
        and row["late"][2] - row["early"][2] <= WORKERS
        for row in rows
    )
    well = flat and statuses == [0] * SERVERS
    print(json.dumps({"soak": "parameter_server", "kills": kills, "servers": rows, "well": well}))
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
