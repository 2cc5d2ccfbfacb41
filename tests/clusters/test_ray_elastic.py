"""`hvdlite.ray.run` of an elastic job: nodes of Ray die and come, and no step is lost."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import hvdlite.ray
import patience
from clusters.ray_clusters import Nodes, several_nodes
from hvdlite.errors import BootstrapError
from patience import HANG, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]

_NO_ACTOR = r"cannot start on Ray's node .*: Ray (has not started its actor within 1 s|says)"


@pytest.fixture(scope="module")
def shared_nodes() -> Iterator[Nodes]:
    """A cluster for all tests of this file."""
    pytest.importorskip("ray")
    for module in (sys.modules[__name__], patience):
        cloudpickle.register_pickle_by_value(module)
    with several_nodes() as started:
        yield started


@pytest.fixture
def nodes(shared_nodes: Nodes) -> Nodes:
    """Two nodes with two CPUs each; Ray may still list nodes that earlier tests have killed."""
    shared_nodes.other = shared_nodes.other or shared_nodes.add()
    return shared_nodes


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
            settings = {"blacklist_cooldown_range": (1.0, 2.0), "elastic_timeout": 120}
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

    def wait_for_size(self, size: int) -> None:
        """Wait until the latest step was done by so many ranks."""
        wait_until(
            lambda: not self.is_alive() or [one[1] for one in self.journal()[-1:]] == [size],
            f"a step of {size} ranks",
            2 * HANG,
        )
        assert self.is_alive(), self.error

    def finish(self) -> list[Any]:
        """Let the job end, and return its results."""
        self._done.touch()
        self.join(2 * HANG)
        assert not self.is_alive()
        assert self.error is None, self.error
        return self.results


def agents() -> list[str]:
    """List the processes of agents and ranks that run here."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            is_agent = b"HVDLITE_AGENT_TOKEN=" in entry.with_name("environ").read_bytes()
            if is_agent or "hvdlite.launch.call" in line:
                found.append(line)
    return found


def living() -> int:
    """Return how many nodes Ray lists as alive."""
    import ray

    return sum(node["Alive"] for node in ray.nodes())


def test_job_goes_on_without_a_node_that_died_and_grows_onto_a_new_one(
    nodes: Nodes, tmp_path: Path
) -> None:
    import ray

    job = Job(tmp_path)
    job.wait_for_size(4)
    before = living()
    nodes.kill_other()
    job.wait_for_size(2)
    # Ray notices it after more than 10 s: the ranks have noticed it by their sockets.
    assert living() == before
    nodes.other = nodes.add()
    job.wait_for_size(4)
    results = job.finish()
    for journal in job.journals():  # No worker has lost a step, or done one twice.
        assert [step for step, _, _ in journal] == list(range(journal[0][0], journal[-1][0] + 1))
    last = results[0][0]
    assert {step for step, _, _ in job.journal()} == set(range(1, last + 1))
    assert results == [(last, 4, last * 0.5)] * 4
    wait_until(lambda: not agents(), "the end of all agents and ranks")
    wait_until(lambda: ray.available_resources().get("CPU") == 4, "the CPUs to be free")


def test_exception_of_a_rank_is_raised_although_ray_still_lists_a_dead_node(
    nodes: Nodes, capfd: pytest.CaptureFixture[str]
) -> None:
    def raises() -> None:
        import hvdlite.numpy as hvd

        hvd.init()
        raise KeyError("planted")  # on all: one that returned last would make the job a success

    dead = nodes.kill_other()
    with pytest.raises(KeyError, match="planted") as caught:
        hvdlite.ray.run(raises, num_workers=2, min_np=2, max_np=2)
    assert "in raises" in str(caught.value.__cause__)
    line = rf"host {dead} (has not answered yet; the job starts without|takes no part now)"
    assert re.search(line, capfd.readouterr().err)
    wait_until(lambda: not agents(), "the end of all agents and ranks")


def variables() -> tuple[str | None, ...]:
    names = "PLANTED", "RAY_JOB_ID", "OMP_NUM_THREADS"
    return tuple(os.environ.get(name) for name in names)


def test_job_starts_without_a_busy_node_unless_it_is_needed(
    nodes: Nodes, capfd: pytest.CaptureFixture[str]
) -> None:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    class Holder:
        def there(self) -> bool:
            return True

    there = NodeAffinitySchedulingStrategy(nodes.other.node_id, soft=False)
    holder = ray.remote(Holder).options(num_cpus=1, scheduling_strategy=there).remote()
    assert ray.get(holder.there.remote())
    try:
        results = hvdlite.ray.run(variables, min_np=1, max_np=4, env={"PLANTED": "yes"})
        assert results == [("yes", None, "1")] * 2, "theirs, and not the actor's"
        line = f"host 127.0.0.1/{nodes.other.node_id[:8]} has not answered yet; the job starts"
        assert line in capfd.readouterr().err
        with pytest.raises(BootstrapError, match=_NO_ACTOR):
            hvdlite.ray.run(variables, min_np=100, max_np=100, num_workers=100, start_timeout=1)
    finally:
        ray.kill(holder)
