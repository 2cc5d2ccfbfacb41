"""States of elastic jobs on one rank: save, restore, messages about hosts, mistakes."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from torch import nn

from hvdlite.elastic import ObjectState
from hvdlite.elastic.state import ADDED, REMOVED, check_layout
from hvdlite.errors import ArgumentError, HostsUpdatedInterrupt, MismatchError
from hvdlite.torch.elastic import TorchState
from hvdlite.torch.elastic import state as torch_state
from hvdlite.torch.elastic.state import StateHandler


def object_state(**attributes: Any) -> ObjectState:
    return ObjectState(lambda value: value, lambda: 0, **attributes)


def test_restore_goes_back_to_the_last_save_also_of_mutable_objects() -> None:
    state = object_state(epoch=1, losses=[0.5])
    state.losses.append(0.25)
    state.restore()
    assert (state.epoch, state.losses) == (1, [0.5])
    state.epoch = 2
    state.losses.append(0.125)
    state.commit()
    for _ in range(2):
        state.epoch = 3
        state.losses.append(0.0)
        state.restore()
        assert (state.epoch, state.losses) == (2, [0.5, 0.125])


def test_sync_sends_what_the_attributes_are_now() -> None:
    sent = []
    state = ObjectState(lambda value: sent.append(dict(value)) or {"epoch": 7}, lambda: 1, epoch=1)
    state.epoch = 2
    state.sync()
    assert sent == [{"epoch": 2}]
    assert state.epoch == 7
    state.epoch = 8
    state.restore()
    assert state.epoch == 7


def test_object_that_cannot_be_pickled_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"ObjectState\(lock=...\).* cannot be pickled"):
        object_state(lock=threading.Lock())
    with pytest.raises(ArgumentError, match=r"TorchState\(f=...\).*function cannot be pickled"):
        TorchState(f=lambda: 0)


def test_attribute_may_not_hide_a_method() -> None:
    with pytest.raises(ArgumentError, match="'commit' is a method of the state"):
        object_state(commit=1)
    with pytest.raises(ArgumentError, match="'sync' is a method of the state"):
        TorchState(sync=nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("updates", "skips"), [([REMOVED], True), ([ADDED], False), ([ADDED, REMOVED], False)]
)
def test_messages_about_hosts_interrupt_once(updates: list[int], skips: bool) -> None:
    state = object_state(epoch=0)
    state.check_host_updates()
    for timestamp, update in enumerate(updates, start=1):
        state.on_hosts_updated(timestamp, update)
    with pytest.raises(HostsUpdatedInterrupt) as interrupt:
        state.commit()
    assert interrupt.value.skip_sync is skips
    assert state._last_updated_timestamp == len(updates)
    assert state._host_messages.empty()
    state.on_hosts_updated(len(updates), ADDED)  # old news
    state.check_host_updates()


def test_reset_keeps_messages_that_came_meanwhile() -> None:
    called: list[int] = []
    state = object_state(epoch=0)
    state.register_reset_callbacks([lambda: called.append(1), lambda: called.append(2)])
    state.on_hosts_updated(1, ADDED)
    state.on_reset()
    assert called == [1, 2]
    with pytest.raises(HostsUpdatedInterrupt):
        state.check_host_updates()


def test_first_difference_of_layouts_is_named() -> None:
    check_layout({"a": "float32 [1]"}, {"a": "float32 [1]"}, 1)
    with pytest.raises(MismatchError, match=r"'b' is missing on rank 2 and float32 \[3\] on rank"):
        check_layout({"a": "float32 [1]"}, {"a": "float32 [1]", "b": "float32 [3]"}, 2)
    with pytest.raises(MismatchError, match=r"'c' is float32 \[3\] on rank 2 and missing on rank"):
        check_layout({"c": "float32 [3]"}, {}, 2)


class Training:
    """A model with everything that changes from step to step."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(
            nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1)
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1, amsgrad=True)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)

    def step(self) -> list[Any]:
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(6, 4)).square().sum() + random.random()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        state = self.optimizer.state_dict()["state"]
        moments = [value.tolist() for one in state.values() for value in one.values()]
        values = [value.tolist() for value in self.model.state_dict().values()]
        return [loss.item(), values, moments, self.scheduler.get_last_lr()]


def test_restored_training_does_the_same_steps_again() -> None:
    one = Training()
    state = TorchState(one.model, one.optimizer, rng=True, scheduler=one.scheduler)
    first = one.step()
    state.restore()
    assert not one.optimizer.state
    assert all(param.grad is None for param in one.model.parameters())
    assert one.step() == first
    state.commit()
    later = [one.step(), one.step()]
    for _ in range(2):
        state.restore()
        assert [one.step(), one.step()] == later


def test_saves_use_their_buffers_again() -> None:
    one = Training()
    state = TorchState(one.model, one.optimizer)
    one.step()
    state.save()

    def buffers() -> list[int]:
        copied = [
            *state._handlers["model"]._snapshot._copied.values(),
            *state._handlers["optimizer"]._snapshot._copied["state"][0].values(),
        ]
        return [tensor.data_ptr() for tensor in copied]

    before = buffers()
    assert len(before) > 4
    one.step()
    state.save()
    assert buffers() == before


def test_new_model_is_saved_at_once() -> None:
    state = TorchState(nn.Linear(2, 1), epoch=0)
    other = nn.Linear(3, 1)
    state.model = other
    weight = other.weight.clone()
    nn.init.zeros_(other.weight)
    state.restore()
    assert state.model is other
    assert torch.equal(other.weight, weight)
    assert state.optimizer is None


class Counter:
    count = 0


class CounterHandler(StateHandler):
    def save(self) -> None:
        self.saved = self.value.count

    def restore(self) -> None:
        self.value.count = self.saved

    def sync(self) -> None: ...


def test_registry_takes_handlers_of_the_script() -> None:
    registry = torch_state.get_handler_registry()
    torch_state.set_handler_registry([(Counter, CounterHandler), *registry])
    try:
        counter = Counter()
        state = TorchState(nn.Linear(1, 1), counter=counter)
        counter.count = 5
        state.save()
        counter.count = 6
        state.restore()
        assert counter.count == 5
        assert state.counter is counter
    finally:
        torch_state.set_handler_registry(registry)


class Sampler:
    """Has the methods of ElasticSampler."""

    def __init__(self) -> None:
        self.done = self.resets = 0

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        self.done += batch_size

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.done = state_dict["done"]

    def reset(self) -> None:
        self.resets += 1


def test_samplers_are_distributed_anew_at_every_reset() -> None:
    sampler = Sampler()
    state = TorchState(sampler=sampler)
    sampler.record_batch(0, 4)
    state.save()
    sampler.record_batch(1, 4)
    state.restore()
    assert (sampler.done, sampler.resets) == (4, 0)
    state.on_reset()
    assert (sampler.done, sampler.resets) == (4, 1)
