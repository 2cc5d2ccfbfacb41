"""`hvd.DistributedSampler` gives what torch's gives, and resumes with any number of ranks."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvdlite import basics
from hvdlite.errors import ArgumentError, UnrecordedSamplesWarning
from hvdlite.torch.data import DistributedSampler, ElasticSampler

Torchs: Any = torch.utils.data.DistributedSampler


@pytest.fixture(autouse=True, scope="module")
def world() -> Iterator[None]:
    basics.init()
    yield
    basics.shutdown()


def loader_of(sampler: Any, batch: int, workers: int = 0) -> Any:
    return torch.utils.data.DataLoader(
        sampler.dataset,
        batch_size=batch,
        sampler=sampler,
        num_workers=workers,
        collate_fn=list,
    )


def samplers(dataset: Any, size: int, state: Any = None, **how: Any) -> list[DistributedSampler]:
    """Make the samplers of all ranks, fresh or from a state."""
    made = [DistributedSampler(dataset, size, rank, **how) for rank in range(size)]
    for one in made if state is not None else ():
        one.load_state_dict(state)
    return made


@settings(max_examples=1000)
@given(
    length=st.integers(0, 40),
    size=st.integers(1, 9),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    seed=st.integers(0, 1 << 20),
    epoch=st.integers(0, 1000),
)
def test_fresh_epoch_has_torchs_indices(
    length: int, size: int, shuffle: bool, drop_last: bool, seed: int, epoch: int
) -> None:
    for rank in {0, size - 1, seed % size}:
        how = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}
        ours, theirs = (
            kind(range(length), size, rank, **how) for kind in (DistributedSampler, Torchs)
        )
        for one in (ours, theirs):
            one.set_epoch(epoch)
        assert list(ours) == list(theirs)
        assert len(ours) == len(theirs)
        assert (ours.num_samples, ours.total_size) == (theirs.num_samples, theirs.total_size)


@settings(max_examples=100)
@given(
    length=st.integers(0, 120),
    sizes=st.lists(st.integers(1, 4), min_size=6, max_size=6),
    steps=st.lists(st.integers(0, 5), min_size=5, max_size=5),
    batch=st.integers(1, 5),
    epoch=st.integers(0, 3),
)
def test_epoch_with_five_changes_of_size_has_each_index_once(
    length: int, sizes: list[int], steps: list[int], batch: int, epoch: int
) -> None:
    state, seen = None, Counter[int]()
    for size, most in zip(sizes, [*steps, 1000], strict=True):
        ranks = samplers(range(length), size, state, seed=5)
        loops = []
        for one in ranks:
            if state is None:
                one.set_epoch(epoch)
            loops.append(iter(loader_of(one, batch)))
        for batches in itertools.islice(zip(*loops, strict=True), most):
            for one, indices in zip(ranks, batches, strict=True):
                seen.update(indices)
                one.record(len(indices))
        states = [one.state_dict() for one in ranks]
        assert states == states[:1] * size
        state = states[0]
        assert state["epoch"] == epoch
        if state["consumed"] == length:
            break
    assert set(seen) == set(range(length))
    assert seen.total() - length <= 3  # only the end is padded, to one size


@settings(max_examples=100)
@given(
    length=st.integers(1, 60),
    size=st.integers(1, 5),
    stop=st.integers(0, 20),
    drop_last=st.booleans(),
)
@example(length=7, size=2, stop=1, drop_last=False)  # the rest is padded
def test_same_size_goes_on_with_the_very_batches(
    length: int, size: int, stop: int, drop_last: bool
) -> None:
    for rank in range(size):
        whole = DistributedSampler(range(length), size, rank, drop_last=drop_last)
        batches = list(loader_of(whole, 3))
        first = DistributedSampler(range(length), size, rank, drop_last=drop_last)
        for indices in itertools.islice(loader_of(first, 3), stop):
            first.record(len(indices))
        again = DistributedSampler(range(length), size, rank, drop_last=drop_last)
        again.load_state_dict(first.state_dict())
        again.set_epoch(0)
        assert list(loader_of(again, 3)) == batches[stop:]
        again.set_epoch(1)
        whole.set_epoch(1)
        assert list(again) == list(whole)


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_that_load_ahead_are_not_counted(workers: int) -> None:
    ranks = samplers(range(50), 2, seed=1)
    seen = Counter[int]()
    for one in ranks:
        for indices in itertools.islice(loader_of(one, 4, workers), 3):
            seen.update(indices)
            one.record(len(indices))
    state = ranks[0].state_dict()
    assert state["consumed"] == 24
    [one] = samplers(range(50), 1, state, seed=1)
    for indices in loader_of(one, 4, workers):
        seen.update(indices)
    assert seen == Counter(range(50))


def test_epoch_that_is_over_gives_nothing_when_it_is_resumed() -> None:
    for length, size in ((7, 2), (1, 3), (0, 2)):
        for drop_last in (False, True):
            [first, *_] = samplers(range(length), size, drop_last=drop_last)
            first.record(len(first))
            state = first.state_dict()
            assert state["consumed"] == length
            for other in samplers(range(length), 1, state):
                other.set_epoch(0)
                assert list(other) == []
                other.set_epoch(1)
                assert len(list(other)) == length


def test_passes_without_set_epoch_repeat_the_epoch_as_torchs_do() -> None:
    ours, theirs = DistributedSampler(range(10), 2, 1), Torchs(range(10), 2, 1)
    loader = torch.utils.data.DataLoader(range(10), 2, sampler=ours, drop_last=True)
    for _ in range(3):
        for batch in loader:
            ours.record(len(batch))
        assert list(ours) == list(theirs)


def test_pass_that_was_left_goes_on_where_it_was_recorded() -> None:
    sampler = DistributedSampler(range(10), 2, 1, shuffle=False)
    for index in sampler:
        sampler.record(1)
        if index == 5:
            break
    assert list(sampler) == [7, 9]


def test_state_of_other_samples_is_refused() -> None:
    state = DistributedSampler(range(10), seed=1).state_dict()
    load = {
        r"made with length=10, and this one has length=11": DistributedSampler(range(11)),
        r"made with seed=1, and this one has seed=2": DistributedSampler(range(10), seed=2),
        r"made with shuffle=True": DistributedSampler(range(10), shuffle=False),
        r"ElasticSampler.load_state_dict: the keys": ElasticSampler(range(10), seed=1),
    }
    for message, sampler in load.items():
        with pytest.raises(ArgumentError, match=message):
            sampler.load_state_dict(state)
    sampler = DistributedSampler(range(10), seed=1)
    with pytest.raises(ArgumentError, match=r"are not those of a sampler's state"):
        sampler.load_state_dict({"epoch": 3})
    with pytest.raises(ArgumentError, match=r"has version 2"):
        sampler.load_state_dict({**state, "version": 2})


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(ArgumentError, match="the ranks are 0 to 1"):
        DistributedSampler(range(10), 2, 2)
    with pytest.raises(ArgumentError, match=r"record\(-1\)"):
        DistributedSampler(range(10)).record(-1)


def test_frameworks_take_both_for_torchs_sampler() -> None:
    assert isinstance(DistributedSampler(range(3)), Torchs)
    assert isinstance(ElasticSampler(range(3)), DistributedSampler)


def test_state_of_an_epoch_that_was_never_recorded_warns() -> None:
    sampler = DistributedSampler(range(8), num_replicas=1, rank=0, shuffle=False)
    drawn = iter(sampler)
    assert [next(drawn), next(drawn)] == [0, 1]
    with pytest.warns(UnrecordedSamplesWarning, match="has given 2 samples of epoch 0, none"):
        assert sampler.state_dict()["consumed"] == 0
    sampler.record_batch(0, 2)
    assert sampler.state_dict()["consumed"] == 2
