"""Measure the parameter server: its throughput beside its peers, and training with a slow worker.

    python benchmarks/parameter_server.py                       # everything
    python benchmarks/parameter_server.py --part throughput     # beside torch's RPC and TensorFlow
    python benchmarks/parameter_server.py --part digits         # 8 workers, one 4x slower

`throughput` pushes 100 MB of gradients to one server and pulls 100 MB of values, in turns with the
peers: with torch's RPC a worker sends the gradients as the arguments of a call that applies them
and returns the values; with TensorFlow's ParameterServerStrategy a worker applies gradients to a
variable of a server and reads it. `gigabytes_per_second` counts both directions.

`digits` trains on handwritten digits with 8 workers, one of which takes 4 times as long for a step;
compute is `time.sleep`, so that more workers than cores do not distort. `slow_keeps` is the rate of
the other workers, as a share of their rate in a run where nobody is slow.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MEGABYTES = 100
WORKERS = 8
STEP_SECONDS = 0.02
SLOWNESS = 4
SERVERS = 2
RUNS = 3  # There are so many trainings of each kind, with other seeds.
Exchange = Callable[[], None]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=["throughput", "digits"])
    parser.add_argument("--quick", action="store_true", help="small sizes, and no peers")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role is not None:
        ROLES[arguments.role](arguments.quick)
        return 0
    if arguments.part != "digits":
        measure_throughput(arguments.quick)
    if arguments.part != "throughput":
        measure_digits(arguments.quick)
    return 0


def start(role: str, quick: bool, **environment: str) -> subprocess.Popen[str]:
    """Start this program as another process of a measurement."""
    command = [sys.executable, __file__, "--role", role, *["--quick"] * quick]
    return subprocess.Popen(command, env={**os.environ, **environment}, text=True)


@contextlib.contextmanager
def job(processes: list[tuple[str, dict[str, str]]], quick: bool) -> Iterator[None]:
    """Run processes for as long as the block lasts."""
    running = [start(role, quick, **environment) for role, environment in processes]
    try:
        yield
    finally:
        for process in running:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def variables_of(rank: int, size: int, servers: int, rendezvous: str, token: str) -> dict[str, str]:
    """Return what hvdlite-run would tell a process."""
    numbers = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size, "NODE": 0}
    numbers["SERVERS"] = servers
    named = {f"HVDLITE_{name}": str(value) for name, value in numbers.items()}
    return {**named, "HVDLITE_RENDEZVOUS": rendezvous, "HVDLITE_TOKEN": token}


def measure_throughput(quick: bool) -> None:
    """Measure all contestants in turns, and print one row."""
    count = (MEGABYTES if not quick else 1) * 1_000_000 // 4
    rounds = 3 if quick else 10
    with contextlib.ExitStack() as stack:
        contestants = {"hvdlite": hvdlite_exchange(stack, count, quick)}
        if not quick:
            contestants["hvdlite_tcp"] = hvdlite_exchange(stack, count, quick, tcp=True)
            contestants["torch_rpc"] = rpc_exchange(stack, count, quick)
            contestants["tensorflow"] = tensorflow_exchange(stack, count, quick)
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        for number in range(rounds + 2):
            for name, exchange in contestants.items():
                begun = time.perf_counter()
                exchange()
                if number >= 2:
                    seconds[name].append(time.perf_counter() - begun)
        row: dict[str, Any] = {"benchmark": "parameter_server_throughput", "bytes": 4 * count}
        for name, some in seconds.items():
            median = statistics.median(some)
            row[f"{name}_ms"] = round(1000 * median, 2)
            row[f"{name}_gigabytes_per_second"] = round(2 * 4 * count / median / 1e9, 3)
        print(json.dumps(row), flush=True)


def hvdlite_exchange(
    stack: contextlib.ExitStack, count: int, quick: bool, tcp: bool = False
) -> Exchange:
    import secrets

    import torch

    from hvdlite.rendezvous.environment import detect
    from hvdlite.torch.parameter_server import Group

    token = secrets.token_hex(32)
    rendezvous = f"127.0.0.1:{free_port()}"
    server = variables_of(0, 2, 1, rendezvous, token)
    worker = variables_of(1, 2, 1, rendezvous, token)
    if tcp:  # Processes of two hosts do not use Unix sockets.
        server["HVDLITE_HOST_ID"], worker["HVDLITE_HOST_ID"] = "a", "b"
    stack.enter_context(job([("hvdlite-server", server)], quick))
    group = stack.enter_context(Group(detect(worker, with_servers=True)))
    parameter = torch.nn.Parameter(torch.zeros(count))
    gradient = torch.ones(count)
    replica = group.replica([("parameter", parameter)])

    def exchange() -> None:
        parameter.grad = gradient
        replica.step()

    return exchange


def serve_hvdlite(quick: bool) -> None:
    import torch

    import hvdlite.torch as hvd

    with hvd.parameter_server.connect() as group:
        group.serve(lambda params: torch.optim.SGD(params, lr=0.1 / group.workers))


def rpc_exchange(stack: contextlib.ExitStack, count: int, quick: bool) -> Exchange:
    import torch
    from torch.distributed import rpc

    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    stack.enter_context(job([("rpc-server", place)], quick))
    os.environ.update(place)
    rpc.init_rpc("worker", rank=1, world_size=2)
    stack.callback(rpc.shutdown)
    gradient = torch.ones(count)
    values = torch.zeros(count)

    def exchange() -> None:
        values.copy_(rpc.rpc_sync("server", apply_by_rpc, args=(gradient,)))

    return exchange


_held: list[Any] = []  # The server of torch's RPC holds these.


def apply_by_rpc(gradient: Any) -> Any:
    """Apply a gradient on the server, and return the values."""
    import torch

    if not _held:
        parameter = torch.nn.Parameter(torch.zeros_like(gradient))
        _held.extend([parameter, torch.optim.SGD([parameter], lr=0.1)])
    parameter, optimizer = _held
    parameter.grad = gradient
    optimizer.step()
    return parameter.detach()


def serve_rpc(quick: bool) -> None:
    from torch.distributed import rpc

    rpc.init_rpc("server", rank=0, world_size=2)
    rpc.shutdown()


def tensorflow_exchange(stack: contextlib.ExitStack, count: int, quick: bool) -> Exchange:
    """Return an exchange of a worker's function, which a coordinator schedules."""
    import tensorflow as tf

    ports = [free_port() for _ in range(2)]
    cluster = {"ps": [f"127.0.0.1:{ports[0]}"], "worker": [f"127.0.0.1:{ports[1]}"]}
    tasks = [
        ("tensorflow-task", {"PEER_TASK": json.dumps({"cluster": cluster, "task": name})})
        for name in ("ps", "worker")
    ]
    running = [start(role, quick, **environment) for role, environment in tasks]
    for process in running:
        stack.callback(process.wait)
        stack.callback(process.kill)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), rpc_layer="grpc"
    )
    strategy = tf.distribute.experimental.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.experimental.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        variable = tf.Variable(tf.zeros(count))

    @tf.function
    def step() -> Any:
        variable.assign_sub(0.1 * tf.ones(count))
        return tf.reduce_sum(variable.read_value()[:1])

    def exchange() -> None:
        coordinator.schedule(step).fetch()

    return exchange


def serve_tensorflow(quick: bool) -> None:
    import tensorflow as tf

    said = json.loads(os.environ["PEER_TASK"])
    cluster = tf.train.ClusterSpec(said["cluster"])
    tf.distribute.Server(cluster, job_name=said["task"], task_index=0, protocol="grpc").join()


ROLES: dict[str, Callable[[bool], None]] = {
    "hvdlite-server": serve_hvdlite,
    "rpc-server": serve_rpc,
    "tensorflow-task": serve_tensorflow,
}


def measure_digits(quick: bool) -> None:
    """Train without and with a slow worker; print the means of all runs for each bound."""
    seeds = range(1 if quick else RUNS)
    alone = [train_digits(None, 1, quick, seed) for seed in seeds]
    for staleness in (None, 3):
        rows = [train_digits(staleness, SLOWNESS, quick, seed) for seed in seeds]
        means = {
            key: round(statistics.mean(row[key] for row in rows), 4)
            for key in ("accuracy", "steps_per_second", "age_mean", "age_max")
        }
        rate = statistics.mean(row["steps_per_second"] for row in alone)
        row = {
            "benchmark": "parameter_server_digits",
            "workers": WORKERS,
            "staleness": staleness,
            "runs": len(seeds),
            **means,
            "accuracy_without_slow": round(statistics.mean(one["accuracy"] for one in alone), 4),
            "slow_keeps": round(means["steps_per_second"] / rate, 3),
        }
        print(json.dumps(row), flush=True)


def train_digits(staleness: int | None, slowest: int, quick: bool, seed: int) -> dict[str, Any]:
    """Train with 8 workers, the last `slowest` times as slow; servers and workers are threads."""
    import torch
    from sklearn.datasets import load_digits

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from hvdlite.torch.parameter_server import Replica
    from parameter_servers import Servers, storage_of

    torch.set_num_threads(1)
    images, labels = load_digits(return_X_y=True)
    data, target = torch.tensor(images / 16.0, dtype=torch.float32), torch.tensor(labels)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    training, held_out = order[:1440], order[1440:]
    steps = 150 if quick else 440
    rates: list[float] = []

    def model_of() -> torch.nn.Module:
        torch.manual_seed(seed)
        return torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
        )

    def work(number: int, replica: Replica, model: torch.nn.Module) -> None:
        draw = torch.Generator().manual_seed(100 * seed + number)
        slowness = slowest if number == WORKERS - 1 else 1
        own = steps // slowness if staleness is None else steps
        begun = time.monotonic()
        for _ in range(own):
            some = training[torch.randint(len(training), (8,), generator=draw)]
            time.sleep(STEP_SECONDS * slowness)
            torch.nn.functional.cross_entropy(model(data[some]), target[some]).backward()
            replica.step()
        if number < WORKERS - 1:
            rates.append(own / (time.monotonic() - begun))

    def make_optimizer(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1 / WORKERS, momentum=0.9)

    with Servers(SERVERS, storage_of(make_optimizer), workers=WORKERS) as running:
        models = [model_of() for _ in range(WORKERS)]
        clients = [running.client() for _ in models]
        replicas = [
            Replica(client, model.named_parameters(), staleness)
            for client, model in zip(clients, models, strict=True)
        ]
        threads = [
            threading.Thread(target=work, args=(number, replicas[number], models[number]))
            for number in range(WORKERS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        replicas[0].pull()
        report = clients[0].report()
    with torch.no_grad():
        found = models[0](data[held_out]).argmax(1)
    accuracy = float((found == target[held_out]).float().mean())
    rate = statistics.mean(rates)
    return {
        "accuracy": accuracy,
        "steps_per_second": rate,
        "age_mean": report.age_mean,
        "age_max": report.age_max,
    }


if __name__ == "__main__":
    sys.exit(main())
