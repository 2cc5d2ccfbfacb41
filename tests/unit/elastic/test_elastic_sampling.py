"""Each sample is seen once, whatever workers die, join or are interrupted."""

from __future__ import annotations

import io
import pickle
import random
import threading
import warnings
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite import basics
from hvdlite.errors import ArgumentError, ElasticSamplerWarning, NotInitializedError
from hvdlite.rendezvous import epochs
from hvdlite.rendezvous.epochs import MOST_KEPT, Epoch
from hvdlite.torch import data as sampling
from hvdlite.torch.data import ElasticSampler
from unit.elastic.job_model import STYLES, Job, Process, forget_epochs

FREQUENT = settings(max_examples=250, database=None)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Begin and end with a process that is not in an elastic job."""
    forget_epochs()
    yield
    forget_epochs()


# The pure rules.


def remaining_by_definition(order: list[int], closed: list[tuple[int, ...]]) -> list[int]:
    for done in closed:
        n = len(done)
        order = [x for j, x in enumerate(order) if j // n >= done[j % n]]
    return order


def done_counts() -> st.SearchStrategy[list[tuple[int, ...]]]:
    done = st.lists(st.integers(0, 6), min_size=1, max_size=5).map(tuple)
    return st.lists(done, max_size=4)


@FREQUENT
@given(st.integers(1, 40), done_counts(), st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_closing_keeps_what_remains_and_says_it_shortly(
    samples: int, counts: list[tuple[int, ...]], equal: list[int]
) -> None:
    closed: tuple[tuple[int, ...], ...] = ()
    expected = list(range(samples))
    for done in counts:
        segment = sampling.Segment(len(expected), range(len(done)))
        for worker, size in enumerate(done):
            segment.count(size, (worker,))
        before = len(expected)
        expected = remaining_by_definition(expected, [tuple(segment.done)])
        assert len(expected) == sampling.left_over(before, [tuple(segment.done)])
        closed = sampling.close(closed, segment)
        assert sampling.remaining(range(samples), closed) == expected
    length = len(closed)
    for size in equal:
        segment = sampling.Segment(sampling.left_over(samples, closed), range(3))
        segment.count(size)
        closed = sampling.close(closed, segment)
    assert len(closed) <= length + 1


# Steps and epochs.


def test_steps_know_their_epochs() -> None:
    assert not epochs.progress().announced
    epochs.begin_step()
    epochs.begin_step()
    epochs.commit_step(0)
    epochs.commit_step(2)
    epochs.begin_step()
    epochs.drop_step()
    epochs.drop_step()
    epochs.commit_step(2)
    progress = epochs.progress()
    assert (progress.committed, progress.ended, progress.under_way) == (3, 4, False)
    assert [epochs.epoch_of_step(step) for step in range(5)] == [None, 0, 2, 2, None]


def test_steps_are_counted_from_any_thread() -> None:
    def commit() -> None:
        for _ in range(200):
            epochs.begin_step()
            epochs.commit_step(1)

    threads = [threading.Thread(target=commit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert epochs.progress().committed == epochs.progress().ended == 800


def test_an_unknown_epoch_is_an_error() -> None:
    epochs.record(Epoch(3, (0, 5), 5, "worker 5 joined"))
    with pytest.raises(ArgumentError, match=r"not a member of epoch 2; .* the epochs \[3\]"):
        epochs.find(2)
    assert epochs.history() == [epochs.current()]


def test_a_process_keeps_its_newest_epochs() -> None:
    forget_epochs()
    for number in range(1500):
        epochs.record(Epoch(number, (0, number + 1), 0, "a joiner died"))
    assert [one.number for one in epochs.history()] == list(range(500, 1500))
    with pytest.raises(ArgumentError, match="epoch 499; it was last .* 1498, 1499"):
        epochs.find(499)
    forget_epochs()


def test_steps_of_long_ago_take_no_memory_and_have_no_known_epoch() -> None:
    last = 3 * MOST_KEPT
    for number in range(last + 1):
        epochs.record(Epoch(number, workers=(0,), worker=0, reason="a test"))
        epochs.commit_step(number)
        epochs.commit_step(number)
    assert len(epochs._steps) == MOST_KEPT + 1
    oldest = last - MOST_KEPT + 1
    for number in (oldest, last):
        assert {epochs.epoch_of_step(2 * number + 1), epochs.epoch_of_step(2 * number + 2)} == {
            number
        }
    assert epochs.epoch_of_step(2 * last + 3) is None
    for step in (1, 2 * oldest):
        found = epochs.epoch_of_step(step)
        assert found is not None
        with pytest.raises(ArgumentError, match="was not a member of epoch"):
            epochs.find(found)


# Random histories.


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=150, database=None)
@given(samples=st.integers(0, 120), seed=st.integers(0, 2**32))
def test_every_sample_is_seen_once_in_any_history(style: str, samples: int, seed: int) -> None:
    forget_epochs()
    job = Job(random.Random(seed), style, samples)
    job.train()
    assert set(job.trained.values()) <= {1}
    missing = set(range(samples)) - set(job.trained)
    assert missing <= job.skipped
    assert job.repeated <= job.declared
    for one in job.alive:
        with one:
            assert samples - one.sampler.processed_num <= len(missing)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                one.sampler.set_epoch(1)
            assert one.sampler.processed_num == 0


# Jobs whose history is written down.


class Workers:
    """Workers in lockstep, which record a batch after each step."""

    def __init__(self, count: int, samples: int) -> None:
        self.alive = [Process(worker) for worker in range(count)]
        self.epoch = -1
        self.form("start")
        for one in self.alive:
            with one:
                one.sampler = ElasticSampler(range(samples), shuffle=False)
                iter(one.sampler)

    def form(self, reason: str) -> None:
        self.epoch += 1
        workers = tuple(one.worker for one in self.alive)
        for one in self.alive:
            one.history.append(Epoch(self.epoch, workers, one.worker, reason))

    def step(self, size: int) -> None:
        for one in self.alive:
            with one:
                epochs.begin_step()
                epochs.commit_step(self.epoch)
                one.sampler.record_batch(0, size)

    def lose(self, rank: int, reason: str) -> None:
        del self.alive[rank]
        self.form(reason)


def test_set_epoch_tells_of_samples_that_nobody_has_seen() -> None:
    job = Workers(3, 30)
    job.step(2)
    job.lose(1, "worker 1 died of SIGKILL")
    job.step(4)
    with job.alive[1] as other, warnings.catch_warnings():
        warnings.simplefilter("error")
        other.sampler.set_epoch(1)  # Rank 0 alone speaks.
    with (
        job.alive[0] as one,
        pytest.warns(ElasticSamplerWarning, match=r"set_epoch\(1\): 4 samples of epoch 0") as seen,
    ):
        one.sampler.set_epoch(1)
    assert "workers [1] (worker 1 died of SIGKILL)" in str(seen[0].message)
    assert seen[0].filename == __file__
    with one, warnings.catch_warnings():
        warnings.simplefilter("error")
        one.sampler.set_epoch(2)  # Nothing of epoch 1 was begun.


def test_set_epoch_tells_of_a_dead_worker_if_nothing_was_recorded() -> None:
    job = Workers(2, 9)
    job.lose(1, "worker 1 died of SIGKILL")
    with job.alive[0] as one, pytest.warns(ElasticSamplerWarning, match="up to 4 samples"):
        one.sampler.set_epoch(1)


def test_samples_that_the_script_leaves_out_are_not_missed() -> None:
    job = Workers(2, 9)
    job.step(4)  # drop_last: the fifth sample is not in a batch.
    job.lose(1, "worker 1 died of SIGKILL")
    with job.alive[0] as one, warnings.catch_warnings():
        warnings.simplefilter("error")
        one.sampler.set_epoch(1)


def test_set_epoch_tells_that_it_begins_a_partly_done_epoch_anew() -> None:
    job = Workers(1, 10)
    job.step(3)
    with job.alive[0] as one:
        one.sampler.reset()
        with pytest.warns(ElasticSamplerWarning, match="3 samples of epoch 0 were done"):
            one.sampler.set_epoch(0)
        assert len(one.sampler) == 10


def test_a_sampler_that_was_not_distributed_anew_tells_of_joiners() -> None:
    job = Workers(1, 10)
    joiner = Process(1)
    job.alive.append(joiner)
    job.form("worker 1 joined")
    with job.alive[0] as one:
        epochs.commit_step(1)
        with pytest.warns(ElasticSamplerWarning, match=r"workers \[1\] have joined"):
            one.sampler.record_batch(0, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            one.sampler.record_batch(1, 2)


def test_a_joiner_deals_as_the_others_with_the_state_of_one_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Workers(2, 11)
    job.step(2)
    job.lose(0, "worker 0 died of SIGKILL")
    job.step(1)
    joiner = Process(2)
    with joiner:  # Its planned rank and size, before its first epoch.
        monkeypatch.setattr(basics, "rank", lambda: 1)
        monkeypatch.setattr(basics, "size", lambda: 2)
        joiner.sampler = ElasticSampler(range(11), shuffle=False)
    job.alive.append(joiner)
    job.form("worker 2 joined")
    with job.alive[0] as root:
        state = root.sampler.state_dict()
        assert state["segments"] == [[2, 3]]
    shares = []
    for one in job.alive:
        with one:
            one.sampler.load_state_dict(state)
            shares.append(list(one.sampler))
    assert shares == [[4, 7, 9], [6, 8, 10]]


def test_a_script_whose_steps_nobody_reports_counts_at_once() -> None:
    epochs.record(Epoch(0, (0, 1), 0, "start"))
    sampler = ElasticSampler(range(10), shuffle=False)
    sampler.record_batch(0, 2)
    assert sampler.processed_num == 4
    epochs.record(Epoch(1, (0,), 0, "worker 1 died"))
    sampler.record_batch(1, 2)
    assert sampler.processed_num == 6
    sampler.reset()
    assert list(sampler) == [5, 7, 8, 9]


# Without an elastic job.


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the world's size 2, and this process its rank 1."""
    monkeypatch.setattr(basics, "rank", lambda: 1)
    monkeypatch.setattr(basics, "size", lambda: 2)


@pytest.mark.usefixtures("two_ranks")
def test_in_a_world_of_fixed_size_a_record_counts_at_once() -> None:
    sampler = ElasticSampler(range(9), shuffle=False)
    assert list(sampler) == [1, 3, 5, 7, 0]
    assert (sampler.num_samples, sampler.total_size, sampler.padded) == (5, 10, 1)
    sampler.record_batch(0, 2)
    assert sampler.processed_num == 4
    assert sampler.state_dict()["segments"] == [[4]]
    assert list(sampler) == [1, 3, 5, 7, 0]
    sampler.reset()
    assert list(sampler) == [5, 7, 4]
    sampler.record_batch(0, 100)
    assert sampler.processed_num == 9


@pytest.mark.usefixtures("two_ranks")
def test_each_epoch_has_the_order_that_horovod_has() -> None:
    sampler = ElasticSampler(range(6), seed=3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        order = list(range(6))
        random.Random(3 + epoch).shuffle(order)
        assert list(sampler) == order[1::2]
        assert sampler.remaining_indices == order


@pytest.mark.usefixtures("two_ranks")
def test_states_of_horovod_are_accepted() -> None:
    order = list(range(10))
    random.Random(2).shuffle(order)
    sampler = ElasticSampler(range(10))
    sampler.load_state_dict({"epoch": 2, "processed_num": 4})
    assert list(sampler) == order[5::2]
    assert sampler.state_dict()["processed_num"] == sampler.processed_num == 4
    sampler.load_state_dict({"epoch": 2, "processed_indices": {0, 3, 7}})
    left = [x for x in order if x not in {0, 3, 7}]
    assert sampler.remaining_indices == left
    sampler.record_batch(0, 2)
    again = ElasticSampler(range(10))
    again.load_state_dict(sampler.state_dict())
    assert again.remaining_indices == left[4:]
    assert again.processed_num == 7
    assert again.processed_indices == {0, 3, 7, *left[:4]}
    again.set_epoch(3)
    assert again.processed_num == 0


@pytest.mark.usefixtures("two_ranks")
def test_a_checkpoint_holds_the_state() -> None:
    sampler = ElasticSampler(range(100), seed=5)
    sampler.set_epoch(4)
    sampler.record_batch(0, 7)
    file = io.BytesIO()
    torch.save(sampler.state_dict(), file)
    file.seek(0)
    again = pickle.loads(pickle.dumps(ElasticSampler(range(100), seed=5)))
    again.load_state_dict(torch.load(file, weights_only=True))
    assert again.epoch == 4
    assert again.remaining_indices == sampler.remaining_indices[14:]


@pytest.mark.usefixtures("two_ranks")
def test_states_that_do_not_fit_are_refused() -> None:
    sampler = ElasticSampler(range(10), seed=1)
    with pytest.raises(ArgumentError, match=r"the keys \['batch'\] are not those of"):
        sampler.load_state_dict({"batch": 1})
    with pytest.raises(ArgumentError, match="cannot be negative"):
        sampler.record_batch(0, -1)
    sampler.record_batch(0, 1)
    state = sampler.state_dict()
    with pytest.raises(ArgumentError, match=r"made with samples=10, .* has samples=11"):
        ElasticSampler(range(11), seed=1).load_state_dict(state)
    with pytest.raises(ArgumentError, match=r"made with seed=1, .* has seed=0"):
        ElasticSampler(range(10)).load_state_dict(state)
    sampler.set_epoch(1)
    ElasticSampler(range(10)).load_state_dict(sampler.state_dict())  # Nothing was done.


def test_a_sampler_needs_a_world() -> None:
    with pytest.raises(NotInitializedError):
        ElasticSampler(range(3))


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("loader_workers", [0, 1])  # More than processors would be warned of.
def test_a_data_loader_takes_its_indices_twice_and_ahead(loader_workers: int) -> None:
    data = torch.arange(20)
    sampler = ElasticSampler(data, shuffle=False)
    loader = torch.utils.data.DataLoader(
        data, batch_size=2, sampler=sampler, num_workers=loader_workers
    )
    trained = []
    for number, batch in enumerate(loader):
        trained += batch.tolist()
        sampler.record_batch(number, 2)
        if number == 2:
            break  # Some batches were loaded ahead.
    assert trained == [1, 3, 5, 7, 9, 11]
    assert len(loader) == 5
    sampler.reset()
    assert len(loader) == 2
    assert [batch.tolist() for batch in loader] == [[13, 15], [17, 19]]
    assert [batch.tolist() for batch in loader] == [[13, 15], [17, 19]]
