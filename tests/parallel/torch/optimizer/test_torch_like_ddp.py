"""Scripts that touch gradients between backward() and step() train as they do under DDP.

Each script runs twice on the same ranks: with DistributedDataParallel over gloo, and with hvdlite's
`DistributedOptimizer` alone. Losses, and all else that a script sees, must be the same.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hvdlite.torch as hvd
from harness import RankResult, run_world
from parallel.scenarios import check, run_all
from parallel.torch.small_models import assert_close

PRELOAD = ("torch._dynamo",)
STEPS = 4


class Ours:
    """Makes a script distributed by hvdlite."""

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        distributed = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        self.no_sync = distributed.no_sync
        return model, distributed


class Theirs:
    """Makes a script distributed by DistributedDataParallel."""

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        distributed = DistributedDataParallel(model)
        self.no_sync = distributed.no_sync
        return distributed, optimizer


Way = Ours | Theirs
Script = Callable[[Way], Iterator[Any]]


def make_model(seed: int = 0, inputs: int = 3, outputs: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, outputs))
    return model.double()


def data(step: int, part: int = 0, width: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * part + 10 * step + hvd.rank())
    return torch.randn(6, width, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(x) - x.sum(1, keepdim=True)).square().mean()
    return loss


def setup(way: Way) -> tuple[Any, Any]:
    model = make_model()
    return way.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def changed_by(change: Callable[[Any], Any]) -> Script:
    """Make a script that changes or reads the gradients before each step."""

    def script(way: Way) -> Iterator[Any]:
        model, optimizer = setup(way)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(model, data(step))
            loss.backward()
            seen = change(model)
            optimizer.step()
            yield loss
            yield torch.zeros(1) if seen is None else seen
        yield from model.parameters()

    return script


def clamp_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad.data.clamp_(-0.1, 0.1)  # type: ignore[union-attr]


def replace_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad.data = param.grad.data.clamp(-0.1, 0.1)  # type: ignore[union-attr]


def amp_with_an_overflow(way: Way) -> Iterator[Any]:
    """Unscale, clip, and overflow on one rank in one step, which all ranks then skip."""
    model = make_model().float()
    model, optimizer = way.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, data(step).float())
        factor = torch.inf if step == 1 and hvd.rank() == 0 else 1.0
        scaler.scale(factor * loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        yield loss
        yield torch.tensor(scaler.get_scale())
    yield from model.parameters()


def bfloat16_recipe_with_its_scaler_off(way: Way) -> Iterator[Any]:
    """Use the AMP recipe unchanged, with bfloat16 and GradScaler(enabled=False)."""
    model = make_model().float()
    model, optimizer = way.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, data(step).float())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        yield loss
    yield from model.parameters()


def accumulation_with_no_sync_and_clipping(way: Way) -> Iterator[Any]:
    """Accumulate as Accelerate, Lightning and the HF Trainer do: no_sync but for the last."""
    model, optimizer = setup(way)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(3):
            with way.no_sync() if part < 2 else contextlib.nullcontext():
                loss = loss_of(model, data(step, part)) / 3
                loss.backward()
        yield nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        yield loss
    yield from model.parameters()


def accumulation_by_counting_batches(way: Way) -> Iterator[Any]:
    """Step after every second backward(), as loops do that count batches."""
    model, optimizer = setup(way)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    for batch in range(2 * STEPS):
        loss = loss_of(model, data(batch)) / 2
        loss.backward()
        if batch % 2 == 1:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            model.zero_grad()
        yield loss
    yield from model.parameters()


def make_pair(way: Way) -> tuple[Any, Any, Any, Any]:
    critic, maker = make_model(1, 2), make_model(2, 2, 2)
    critic, optimizer_d = way.prepare(critic, torch.optim.Adam(critic.parameters(), lr=0.01))
    maker, optimizer_g = way.prepare(maker, torch.optim.Adam(maker.parameters(), lr=0.01))
    return critic, optimizer_d, maker, optimizer_g


def target(score: torch.Tensor, value: float) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(score, torch.full_like(score, value))


def dcgan(way: Way) -> Iterator[Any]:
    """Train as PyTorch's DCGAN tutorial does: D backward twice, then G through D."""
    critic, optimizer_d, maker, optimizer_g = make_pair(way)
    for step in range(STEPS):
        critic.zero_grad()
        on_real = target(critic(data(step, 0, 2)), 1.0)
        on_real.backward()
        made = maker(data(step, 1, 2))
        on_made = target(critic(made.detach()), 0.0)
        on_made.backward()
        optimizer_d.step()
        maker.zero_grad()
        fooled = target(critic(made), 1.0)
        fooled.backward()
        optimizer_g.step()
        yield torch.stack([on_real, on_made, fooled])
    yield from [*critic.parameters(), *maker.parameters()]


SCRIPTS: dict[str, Script] = {
    "clip_grad_norm_": changed_by(lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1)),
    "clip_grad_value_": changed_by(lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.05)),
    "grad.data.clamp_": changed_by(clamp_data),
    "grad.data = ...": changed_by(replace_data),
    "AMP with an overflow": amp_with_an_overflow,
    "bfloat16, GradScaler off": bfloat16_recipe_with_its_scaler_off,
    "no_sync and clipping": accumulation_with_no_sync_and_clipping,
    "counting batches": accumulation_by_counting_batches,
    "DCGAN": dcgan,
}


def run(script: Script, way: Way) -> list[torch.Tensor]:
    return [value.detach().clone() for value in script(way)]


def scenario_of(script: Script) -> Callable[[], None]:
    def scenario() -> None:
        ours, theirs = run(script, Ours()), run(script, Theirs())
        assert_close(ours, theirs)

    return scenario


def body(folder: str) -> dict[str, str]:
    torch.set_num_threads(1)
    hvd.init()
    store = dist.FileStore(f"{folder}/store", hvd.size())
    dist.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size())
    scenarios = {f"scenario_{name}": scenario_of(script) for name, script in SCRIPTS.items()}
    outcomes = run_all(scenarios, lambda: None)
    dist.destroy_process_group()
    return outcomes


@pytest.fixture(scope="module", params=[2])
def results(request: pytest.FixtureRequest) -> Iterator[list[RankResult]]:
    with tempfile.TemporaryDirectory() as folder:
        yield run_world(request.param, body, folder, env={"GLOO_SOCKET_IFNAME": "lo"})


@pytest.mark.parametrize("name", SCRIPTS)
def test_like_ddp(results: list[RankResult], name: str) -> None:
    check(results, f"scenario_{name}")
