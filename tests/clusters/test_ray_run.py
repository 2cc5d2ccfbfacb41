"""`hvdlite.ray.run` and `RayExecutor` on a Ray cluster: results, failures, reuse.

Most workers use NumPy: a worker that imports PyTorch computes four times as long. The files on
examples, Ray Train and elastic jobs have workers with PyTorch.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import hvdlite.ray
from clusters.ray_clusters import cluster
from hvdlite.errors import ArgumentError, BootstrapError, RankFailedError
from hvdlite.ray.group import Failure, Group
from patience import HANG, Stopwatch, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[Any]:
    """A cluster with 4 CPUs and 4 imagined GPUs, whose workers know the functions of this file."""
    ray = pytest.importorskip("ray")
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with cluster(cpus=4, gpus=4):
        yield ray


@pytest.fixture
def executor() -> Iterator[hvdlite.ray.RayExecutor]:
    """Two workers."""
    executor = hvdlite.ray.RayExecutor(num_workers=2)
    executor.start()
    yield executor
    executor.shutdown()


def reduced(factor: int = 1) -> tuple[int, int, int, float]:
    import numpy as np

    import hvdlite.numpy as hvd

    hvd.init()
    total = hvd.allreduce(np.array([hvd.rank() + 1.0]), op=hvd.Sum)
    return hvd.rank() * factor, hvd.local_rank(), hvd.local_size(), total.item()


def raises_on_rank_1() -> None:
    import numpy as np

    import hvdlite.numpy as hvd

    hvd.init()
    if hvd.rank() == 1:
        raise KeyError("planted")
    hvd.allreduce(np.ones(1))


def killed_on_rank_1() -> None:
    import numpy as np

    import hvdlite.numpy as hvd

    hvd.init()
    hvd.barrier()
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.allreduce(np.ones(1))


def test_results_are_in_rank_order() -> None:
    results = hvdlite.ray.run(reduced, (10,), num_workers=3)
    assert results == [(0, 0, 3, 6.0), (10, 1, 3, 6.0), (20, 2, 3, 6.0)]


def test_run_leaves_nothing_in_the_cluster(ray: Any) -> None:
    hvdlite.ray.run(reduced, num_workers=2, kwargs={"factor": 2})
    wait_until(lambda: ray.available_resources().get("CPU") == 4, "the CPUs to be free")
    table = ray.util.placement_group_table()
    assert {one["state"] for one in table.values()} == {"REMOVED"}


def test_exception_comes_with_its_traceback_and_workers_can_be_used_again(
    executor: hvdlite.ray.RayExecutor,
) -> None:
    with pytest.raises(KeyError, match="planted") as caught:
        executor.run(raises_on_rank_1)
    assert "rank 1:" in str(caught.value.__cause__)
    assert "in raises_on_rank_1" in str(caught.value.__cause__)
    assert [result[3] for result in executor.run(reduced)] == [3.0, 3.0]


def test_killed_worker_is_named_soon_after_ray_has_noticed(
    executor: hvdlite.ray.RayExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    noticed: list[Stopwatch] = []
    no_answer = Group._no_answer

    def note(group: Group, rank: int, error: Any) -> Failure:
        noticed.append(Stopwatch())
        return no_answer(group, rank, error)

    monkeypatch.setattr(Group, "_no_answer", note)
    with pytest.raises(RankFailedError, match=r"rank 1 \(pid \d+ on node 127.0.0.1\)") as caught:
        executor.run(killed_on_rank_1)
    assert noticed[0].seconds() < 3.0
    assert caught.value.failed_rank == 1
    with pytest.raises(ArgumentError, match="its workers do not run"):
        executor.run(reduced)
    executor.start()
    assert len(executor.run(reduced)) == 2


def test_exit_status_becomes_an_error() -> None:
    def ends() -> None:
        sys.exit(3)

    with pytest.raises(RankFailedError, match=r"rank 0 called sys.exit\(3\) in a function"):
        hvdlite.ray.run(ends, num_workers=1, start_timeout=0)  # without a limit


def test_workers_see_the_variables_and_the_gpus_of_their_node() -> None:
    def seen() -> tuple[str, str]:
        return os.environ["PLANTED"], os.environ["CUDA_VISIBLE_DEVICES"]

    results = hvdlite.ray.run(seen, num_workers=2, gpus_per_worker=1, env={"PLANTED": "yes"})
    assert [planted for planted, _ in results] == ["yes", "yes"]
    visible = {gpus for _, gpus in results}
    assert len(visible) == 1
    assert len(visible.pop().split(",")) == 2


class Counter:
    """What `execute` works on."""

    def __init__(self, first: int, step: int = 1) -> None:
        self.value, self.step = first, step

    def count(self) -> int:
        """Go on by the rank's own step."""
        import hvdlite.numpy as hvd

        hvd.init()
        self.value += self.step * (hvd.rank() + 1)
        return self.value


def test_objects_of_workers_keep_their_state(ray: Any) -> None:
    executor = hvdlite.ray.RayExecutor(num_workers=2)
    executor.start(Counter, (10,), {"step": 2}, extra_env_vars={"PLANTED": "yes"})
    try:
        assert executor.execute(lambda worker: worker.count()) == [12, 14]
        assert executor.execute(lambda worker: worker.count()) == [14, 18]
        assert executor.execute_single(lambda worker: worker.value) == 14
        assert ray.get(executor.run_remote(os.getenv, ["PLANTED"])) == ["yes", "yes"]
        with pytest.raises(ArgumentError, match=r"call shutdown\(\) first"):
            executor.start()
    finally:
        executor.shutdown()


def test_too_few_cpus_are_told_in_time() -> None:
    with pytest.raises(BootstrapError, match=r"for each of 5 workers .* 4 CPUs, of which \d are"):
        hvdlite.ray.run(reduced, num_workers=5, start_timeout=0.5)


def test_workers_take_their_part_of_the_callers_placement_group(ray: Any) -> None:
    group = ray.util.placement_group([{"CPU": 2}, {"CPU": 1}, {"CPU": 1}])
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
    )

    @ray.remote(num_cpus=2, scheduling_strategy=strategy)
    def trial() -> list[Any]:
        return hvdlite.ray.run(reduced, num_workers=2, start_timeout=60)

    try:
        assert [result[3] for result in ray.get(trial.remote(), timeout=2 * HANG)] == [3.0, 3.0]
    finally:
        ray.util.remove_placement_group(group)
