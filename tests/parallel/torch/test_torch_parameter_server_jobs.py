"""Jobs with parameter servers: processes that find each other as under a launcher, and die."""

from __future__ import annotations

import itertools
import signal
import time
from pathlib import Path
from typing import Any

from harness import World, run_world
from patience import wait_until

PRELOAD = ("torch._dynamo",)
SERVERS = {"HVDLITE_SERVERS": "2"}
ROUNDS = 30


def train(folder: str, endless: bool = False) -> Any:
    """Serve, or train, and write a line for each step to a file."""
    import torch

    import hvdlite.torch as hvd

    def make_optimizer(params: Any) -> Any:
        # It converges, however the pushes of two workers interleave: five times this rate does not
        # if there is always another push between a pull and the push that follows from it.
        return torch.optim.SGD(params, lr=0.01, momentum=0.5)

    with hvd.parameter_server.connect() as group:
        if group.serves:
            group.serve(make_optimizer, save=f"{folder}/ps", save_every=0.2)
            return "served"
        torch.manual_seed(group.index)
        model = torch.nn.Linear(4, 1)
        replica = group.replica(model.named_parameters(), staleness=1)
        with open(f"{folder}/steps.{group.index}", "w", buffering=1) as steps:
            for step in itertools.count() if endless else range(ROUNDS):
                model(torch.ones(8, 4)).square().mean().backward()
                try:
                    replica.step()
                except hvd.HorovodInternalError as error:
                    return str(error)
                steps.write(f"{step}\n")
                if step == 20:
                    print("trains", flush=True)
                time.sleep(0.005)
        pushes = [one.workers[group.index + 2].pushes for one in group.report().servers]
        return group.index, pushes, float(model(torch.ones(1, 4)))


def read_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def test_processes_train_with_servers(tmp_path: Path) -> None:
    values = [result.value for result in run_world(4, train, str(tmp_path), env=SERVERS)]
    assert values[:2] == ["served", "served"]
    assert [one[:2] for one in values[2:]] == [(0, [ROUNDS] * 2), (1, [ROUNDS] * 2)]
    assert all(abs(one[2]) < 0.1 for one in values[2:])


def test_deaths_of_a_worker_and_of_a_server(tmp_path: Path) -> None:
    with World(5, train, str(tmp_path), True, env=SERVERS) as world:
        for worker in (2, 3, 4):
            world.wait_for(worker, "trains")
        world.signal(2, signal.SIGKILL)
        wait_until((tmp_path / "ps.1-of-2").exists, "the checkpoint of server 1")
        survivors = [tmp_path / f"steps.{index}" for index in (1, 2)]
        done = [len(read_lines(path)) for path in survivors]
        # The bound of one step would stop them for ever, if they waited for the dead.
        wait_until(
            lambda: all(
                len(read_lines(path)) > before + 50
                for path, before in zip(survivors, done, strict=True)
            ),
            "the others train on",
        )
        world.signal(1, signal.SIGKILL)
        results = world.wait(expect_failure=True)
    assert results[0].value == "served"
    for result in results[3:]:
        assert "parameter server 1 died" in result.value
        assert f"{tmp_path}/ps.1-of-2" in result.value
    assert (tmp_path / "ps.0-of-2").exists()
