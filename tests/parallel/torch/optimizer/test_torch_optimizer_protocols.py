"""DistributedOptimizer with schedulers, scalers, copies, closures and torch.compile."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import hvdlite.torch as hvd
from parallel.scenarios import make_tests, run_all, sizes
from parallel.torch.small_models import (
    Branches,
    assert_close,
    assert_same_everywhere,
    backward,
    counters,
    gradients,
    inputs,
    make,
    make_model,
    mean_gradients,
    raises,
)

PRELOAD = ("torch._dynamo",)


def scenario_lbfgs_takes_the_same_path_everywhere() -> None:
    for line_search in (None, "strong_wolfe"):
        model, alone = make_model(), make_model()
        lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=6, line_search_fn=line_search)
        view = line_search is not None
        optimizer = hvd.DistributedOptimizer(lbfgs, gradient_as_bucket_view=view)
        plain = torch.optim.LBFGS(alone.parameters(), max_iter=6, line_search_fn=line_search)

        def closure(model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(inputs()).square().sum()
            loss.backward()
            return loss

        def closure_alone(alone: Any = alone, plain: Any = plain) -> torch.Tensor:
            plain.zero_grad()
            losses = [alone(inputs(rank)).square().sum() for rank in range(hvd.size())]
            loss = sum(losses[1:], losses[0]) / hvd.size()
            loss.backward()
            return loss

        for _ in range(3):
            loss = optimizer.step(closure)
            loss_alone = plain.step(closure_alone)
        assert torch.allclose(loss, loss_alone, rtol=1e-3)
        assert_same_everywhere(model)


def scenario_closure_of_sgd() -> None:
    model = make_model()
    optimizer = make(model)

    def closure() -> float:
        optimizer.zero_grad()
        return backward(model).item()

    loss = optimizer.step(closure)
    assert isinstance(loss, float) and len(set(hvd.allgather_object(loss))) == 1
    assert_close(gradients(model), mean_gradients())
    assert optimizer.step(lambda: None) is None


def scenario_closure_without_backward_takes_the_gradients_that_are_there() -> None:
    # Lightning steps so where a script calls backward() itself. A sum shows if it is sent twice.
    model = make_model()
    optimizer = make(model, op=hvd.Sum)
    backward(model)
    optimizer.synchronize()
    nn.utils.clip_grad_value_(model.parameters(), 0.5)
    before = [gradient.clone() for gradient in gradients(model)]
    sent = counters()["tensors"]
    assert optimizer.step(lambda: None) is None
    assert all(map(torch.equal, gradients(model), before))
    assert counters()["tensors"] == sent
    optimizer.zero_grad()
    optimizer.step(functools.partial(backward, model))
    assert counters()["tensors"] > sent
    assert_same_everywhere(model)


class Proxy:
    """Lightning's proxy of an optimizer: of a subclass, but without the optimizer's state."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.__class__ = type("Of" + type(optimizer).__name__, (Proxy, type(optimizer)), {})

    def step(self, *arguments: Any) -> Any:
        return self._optimizer.step(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def scenario_proxy_of_a_subclass() -> None:
    for op in (hvd.Average, hvd.Adasum):
        model = make_model()
        optimizer = make(model, op=op)
        proxy: Any = Proxy(optimizer)
        assert proxy.param_groups is optimizer.param_groups
        assert proxy._parameter_names == optimizer._parameter_names
        for _ in range(2):
            proxy.zero_grad()
            with proxy.no_sync():
                backward(model)
            backward(model)
            proxy.synchronize()
            proxy.step()
        assert proxy.state_dict().keys() == optimizer.state_dict().keys()
        assert_same_everywhere(model)


def scenario_schedulers_made_before_and_after() -> None:
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    before = torch.optim.lr_scheduler.StepLR(sgd, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(sgd)
    after = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(3):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
        before.step()  # warnings are errors here
        after.step()
        assert optimizer.param_groups[0]["lr"] == 0.25 ** (step + 1)


def scenario_grad_scaler() -> None:
    for explicit in (False, True):
        model = make_model()
        optimizer = make(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        start = [param.detach().clone() for param in model.parameters()]
        for overflow in (True, False):
            optimizer.zero_grad()
            factor = torch.inf if overflow and hvd.rank() == hvd.size() - 1 else 1.0
            scaler.scale(factor * model(inputs()).square().sum()).backward()
            if explicit:
                optimizer.synchronize()
                scaler.unscale_(optimizer)
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
            else:
                scaler.step(optimizer)
            scaler.update()
            if overflow:  # every rank skipped the step
                assert all(map(torch.equal, model.parameters(), start))
        assert scaler.get_scale() == 512.0
        assert_close(gradients(model), mean_gradients())
        assert_same_everywhere(model)


def scenario_grad_scaler_with_a_parameter_unused_here() -> None:
    model = Branches()
    optimizer = make(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.ones(1, 3), rare=hvd.rank() == 0).sum()).backward()
    scaler.unscale_(optimizer)
    assert torch.allclose(model.rare.bias.grad, torch.full((2,), 1 / hvd.size()))
    scaler.step(optimizer)
    assert_same_everywhere(model)


def replace_data(params: Any) -> None:
    for param in params:
        param.grad.data = param.grad.data.clamp(-0.1, 0.1)


def scenario_changes_of_gradients_before_the_step_count() -> None:
    for change in (
        lambda params: nn.utils.clip_grad_norm_(params, 0.1),
        lambda params: nn.utils.clip_grad_value_(params, 0.05),
        replace_data,
    ):
        model, alone = make_model(), make_model()
        optimizer, plain = make(model), torch.optim.SGD(alone.parameters(), lr=0.1)
        backward(model)
        for param, gradient in zip(alone.parameters(), mean_gradients(), strict=True):
            param.grad = gradient
        change(list(model.parameters()))
        change(list(alone.parameters()))
        optimizer.step()
        plain.step()
        assert_close(list(model.parameters()), list(alone.parameters()))


class Game:
    """A critic and a maker, trained as PyTorch's DCGAN tutorial does."""

    def __init__(self, distribute: bool) -> None:
        torch.manual_seed(0)
        self.critic, self.maker = nn.Linear(3, 1), nn.Linear(3, 3)
        adams = [torch.optim.Adam(one.parameters()) for one in (self.critic, self.maker)]
        self.adams: list[Any] = list(map(hvd.DistributedOptimizer, adams)) if distribute else adams

    def step(self, ranks: Sequence[int]) -> None:
        """Call the critic's backward twice, and then the maker's through the critic."""
        self.critic.zero_grad()
        made = [self.maker(inputs(rank)) for rank in ranks]
        for rank, fake in zip(ranks, made, strict=True):
            (self.critic(inputs(rank)).sigmoid().mean() / len(ranks)).backward()
            (-self.critic(fake.detach()).sigmoid().mean() / len(ranks)).backward()
        self.adams[0].step()
        self.maker.zero_grad()
        for fake in made:
            (self.critic(fake).square().mean() / len(ranks)).backward()
        self.adams[1].step()


def scenario_a_critic_and_a_maker_train_as_in_one_process() -> None:
    ours, alone = Game(True), Game(False)
    for _ in range(3):
        ours.step([hvd.rank()])
        alone.step(range(hvd.size()))
    for one, other in ((ours.critic, alone.critic), (ours.maker, alone.maker)):
        assert_close(list(one.parameters()), list(other.parameters()))


def scenario_state_dict_round_trip() -> None:
    model = make_model()
    optimizer = make(model)
    backward(model)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    del optimizer
    other = make(model, lr=7.0)
    other.load_state_dict(saved)
    assert other.param_groups[0]["lr"] == 0.1
    calls: list[str] = []
    other.register_step_pre_hook(lambda *_: calls.append("pre"))
    other.zero_grad()
    backward(model)
    other.step()
    assert calls == ["pre"]
    assert_same_everywhere(model)


class Noisy(torch.optim.SGD):
    """An optimizer of a user, whose step takes more than a closure."""

    def step(self, closure: Any = None, *, noise: float = 0.0) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.add_(noise)
        return loss if closure is not None else "stepped"


def scenario_step_takes_the_arguments_of_the_wrapped_class() -> None:
    adasum = functools.partial(hvd.DistributedOptimizer, op=hvd.Adasum)
    for kind in (hvd.DistributedOptimizer, hvd.LocalSGD, hvd.ShardedOptimizer, adasum):
        model = make_model()
        before = [param.detach().clone() for param in model.parameters()]
        optimizer = kind(Noisy(model.parameters(), lr=0.0))
        backward(model)
        result = optimizer.step(noise=1.0)
        assert kind is hvd.ShardedOptimizer or result == "stepped"
        assert_close(list(model.parameters()), [one + 1.0 for one in before])


class Outer:
    """An optimizer around another one, as users write it."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups


def scenario_an_optimizer_around_another_says_what_to_do() -> None:
    outer: Any = Outer(torch.optim.SGD(make_model().parameters(), lr=0.1))
    with raises("of this Outer belong to an optimizer inside: make that one a Distributed"):
        hvd.DistributedOptimizer(outer)


def scenario_a_copy_says_what_to_do_and_a_pickle_is_plain() -> None:
    for kind in (hvd.DistributedOptimizer, hvd.LocalSGD, hvd.ShardedOptimizer):
        model = make_model()
        optimizer = kind(torch.optim.SGD(model.parameters(), lr=0.1))
        for duplicate in (copy.copy, copy.deepcopy):
            with raises("a copy of a distributed SGD would reduce no gradients; copy the model"):
                duplicate(optimizer)
        loaded = pickle.loads(pickle.dumps(optimizer))
        assert type(loaded) is torch.optim.SGD and loaded.param_groups[0]["lr"] == 0.1


def scenario_dropped_optimizer_leaves_no_hooks() -> None:
    model = make_model()
    for _ in range(3):
        optimizer = make(model)
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        del optimizer
        gc.collect()
    before = counters()["tensors"]
    backward(model)
    hvd.barrier()
    assert counters()["tensors"] <= before + 1


def scenario_memory_formats() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    plain = copy.deepcopy(model)
    model = model.to(memory_format=torch.channels_last)
    optimizer = make(model)
    images = [torch.randn(2, 3, 3, 3, generator=torch.Generator().manual_seed(rank))
              for rank in range(hvd.size())]  # fmt: skip
    last = images[hvd.rank()].contiguous(memory_format=torch.channels_last)
    model(last).square().sum().backward()
    optimizer.step()
    for image in images:
        (plain(image).square().sum() / hvd.size()).backward()
    assert_close(gradients(model), gradients(plain))


def scenario_mixed_dtypes_and_compression() -> None:
    def mixed_model() -> nn.Sequential:
        model = make_model()
        model[2].to(torch.float64)
        return model

    def loss_of(model: nn.Sequential, rank: int) -> torch.Tensor:
        return model[2](model[0](inputs(rank)).double()).square().sum()

    alone = mixed_model()
    for rank in range(hvd.size()):
        (loss_of(alone, rank) / hvd.size()).backward()
    for name, near in (("none", 1e-5), ("fp16", 2e-3), ("bf16", 2e-2)):
        model = mixed_model()
        optimizer = make(model, compression=getattr(hvd.Compression, name))
        loss_of(model, hvd.rank()).backward()
        assert_close(gradients(model), gradients(alone), near)
        exact = all(map(torch.allclose, gradients(model), gradients(alone)))
        assert exact == (name == "none")
        optimizer.step()
        assert [g.dtype for g in gradients(model)] == [torch.float32] * 2 + [torch.float64] * 2
        assert_same_everywhere(model)


def body() -> dict[str, str]:
    torch.set_num_threads(1)
    return run_all(globals())


test_optimizer = make_tests(body, sizes(1, 2))
