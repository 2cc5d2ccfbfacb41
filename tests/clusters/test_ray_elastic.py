"""`hvdlite.ray.run` of an elastic job: nodes of Ray die and come, and no step is lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import hvdlite.ray
from clusters.ray_clusters import quiet_surroundings
from hvdlite.errors import BootstrapError

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]

_MEMORY = 100 << 20


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without CPUs, and a node with two of them."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    terminate = signal.getsignal(signal.SIGTERM)
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": _MEMORY}
    with quiet_surroundings():
        made = Cluster(initialize_head=True, head_node_args=head)
        try:
            made.add_node(num_cpus=2, object_store_memory=_MEMORY)
            ray.init(address=made.address, log_to_driver=False)
            yield made
        finally:
            ray.shutdown()
            made.shutdown()
            signal.signal(signal.SIGTERM, terminate)


def train(journal: str, done: str) -> tuple[int, int, float]:
    """Step until the file `done` exists; each step adds the sum of a half over all ranks."""
    import torch

    import hvdlite.torch as hvd

    hvd.init()
    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, step=0, over=0.0)

    @hvd.elastic.run
    def steps(state: Any) -> None:
        while not state.over:
            optimizer.zero_grad()
            model(-torch.ones(1, 1)).sum().backward()  # the gradient is -1 on every rank
            optimizer.step()
            state.step += 1
            over = torch.tensor([float(os.path.exists(done))])  # noqa: PTH110
            state.over = hvd.allreduce(over, op=hvd.Max).item()
            with open(f"{journal}.{os.getpid()}", "a") as file:
                file.write(json.dumps([state.step, hvd.size(), time.monotonic()]) + "\n")
            state.commit()
            time.sleep(0.05)

    steps(state)
    return state.step, hvd.size(), model.weight.item()


class Job(threading.Thread):
    """An elastic job that runs beside the test."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self._journal, self._done = folder / "journal", folder / "done"
        self.results: list[Any] = []
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Run the job to its end."""
        try:
            arguments = str(self._journal), str(self._done)
            settings = {"blacklist_cooldown_range": (1.0, 2.0), "elastic_timeout": 60}
            self.results = hvdlite.ray.run(train, arguments, min_np=1, max_np=4, **settings)
        except BaseException as error:
            self.error = error

    def journals(self) -> list[list[tuple[int, int, float]]]:
        """Return, by worker, step, size and time of each of its steps."""
        files = self._journal.parent.glob("journal.*")
        texts = [one.read_text().rpartition("\n")[0] for one in files]
        return [[tuple(json.loads(line)) for line in text.splitlines()] for text in texts]

    def journal(self) -> list[tuple[int, int, float]]:
        """Return the steps of all workers, in order of time."""
        return sorted((one for each in self.journals() for one in each), key=lambda one: one[2])

    def wait_for_size(self, size: int, seconds: float = 60.0) -> float:
        """Wait until the latest step was done by so many ranks; return its time."""
        wait_until(
            lambda: not self.is_alive() or [one[1] for one in self.journal()[-1:]] == [size],
            seconds,
        )
        assert self.is_alive(), self.error
        return next(at for _, n, at in reversed(self.journal()) if n == size)

    def finish(self) -> list[Any]:
        """Let the job end, and return its results."""
        self._done.touch()
        self.join(60.0)
        assert not self.is_alive()
        assert self.error is None, self.error
        return self.results


def wait_until(true: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def agents() -> list[str]:
    """List the processes of agents and ranks that run here."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if "hvdlite.launch.dialling" in line or "hvdlite.launch.call" in line:
                found.append(line)
    return found


def test_job_goes_on_without_a_node_that_died_and_grows_onto_a_new_one(
    cluster: Any, tmp_path: Path
) -> None:
    import ray

    doomed = cluster.add_node(num_cpus=2, object_store_memory=_MEMORY)
    job = Job(tmp_path)
    job.wait_for_size(4)
    before = time.monotonic()
    cluster.remove_node(doomed, allow_graceful=False)
    job.wait_for_size(2)
    shrunk = next(at for _, n, at in job.journal() if n == 2 and at > before)
    assert shrunk - before < 20.0  # 13 s is Ray's own notice at the latest; ours is far earlier
    cluster.add_node(num_cpus=2, object_store_memory=_MEMORY)
    job.wait_for_size(4)
    results = job.finish()
    for journal in job.journals():  # No worker has lost a step, or done one twice.
        assert [step for step, _, _ in journal] == list(range(journal[0][0], journal[-1][0] + 1))
    last = results[0][0]
    assert {step for step, _, _ in job.journal()} == set(range(1, last + 1))
    assert results == [(last, 4, last * 0.5)] * 4
    wait_until(lambda: not agents())
    wait_until(lambda: ray.available_resources().get("CPU") == 4)
    # Ray takes seconds to notice the death, and a job does not begin with a node that is dead.
    wait_until(lambda: sum(one["Alive"] for one in ray.nodes()) == 3)


def test_exception_of_a_rank_is_raised_and_nothing_is_left(cluster: Any) -> None:
    import ray

    def raises() -> None:
        import hvdlite.torch as hvd

        hvd.init()
        if hvd.rank() == 0:
            raise KeyError("planted")

    with pytest.raises(KeyError, match="planted") as caught:
        hvdlite.ray.run(raises, num_workers=2, min_np=2, max_np=2)
    assert "in raises" in str(caught.value.__cause__)
    wait_until(lambda: not agents())
    wait_until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources().get("CPU"))


def test_ranks_have_the_variables_and_not_those_of_the_actor(cluster: Any) -> None:
    def seen() -> tuple[str | None, ...]:
        names = "PLANTED", "RAY_JOB_ID", "OMP_NUM_THREADS"
        return tuple(os.environ.get(name) for name in names)

    results = hvdlite.ray.run(seen, max_np=1, min_np=1, env={"PLANTED": "yes"})
    assert results == [("yes", None, "1")]


def test_node_whose_processors_are_busy_is_named(cluster: Any) -> None:
    import ray

    class Holder:
        def there(self) -> bool:
            return True

    every = int(ray.cluster_resources()["CPU"])
    holders = [ray.remote(Holder).options(num_cpus=1).remote() for _ in range(every)]
    assert all(ray.get([one.there.remote() for one in holders]))
    try:
        with pytest.raises(BootstrapError, match="Ray has not started its actor within 3 s"):
            hvdlite.ray.run(print, min_np=1, max_np=2, start_timeout=3)
    finally:
        for one in holders:
            ray.kill(one)
