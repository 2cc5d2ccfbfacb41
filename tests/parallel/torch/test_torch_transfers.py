"""Sends between two ranks on torch tensors: values, forms, gradients, and misuse."""

from __future__ import annotations

import itertools

import pytest
import torch

import hvdlite.torch as hvd
from parallel.scenarios import make_tests, on_hosts, run_all

PRELOAD = ("torch._dynamo",)
DTYPES = [torch.uint8, torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.float32,
          torch.float64, torch.complex64]  # fmt: skip
SHAPES: list[tuple[int, ...]] = [(), (0,), (7,), (3, 2, 5), (300_001,)]


def pairs() -> list[tuple[int, int]]:
    return list(itertools.permutations(range(hvd.size()), 2))


def made(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.rand(shape, generator=generator) * 100).to(dtype)


def raises(kind: type[Exception], text: str) -> pytest.RaisesExc[Exception]:
    return pytest.raises(kind, match=text)


def scenario_every_pair_dtype_and_shape() -> None:
    for (source, to), dtype in itertools.product(pairs(), DTYPES):
        for shape in SHAPES:
            tensor = made(source, shape, dtype)
            if hvd.rank() == source:
                assert hvd.send(tensor, to).item() == 0
                assert torch.equal(tensor, made(source, shape, dtype))
            elif hvd.rank() == to:
                place = torch.zeros(shape, dtype=dtype)
                assert hvd.recv(place, source) is place
                assert torch.equal(place, tensor)


def scenario_shapes_may_differ_and_sources_need_not_be_contiguous() -> None:
    if hvd.rank() == 0:
        hvd.send(torch.arange(12.0).reshape(3, 4).t(), to=1)
    elif hvd.rank() == 1:
        expected = torch.arange(12.0).reshape(3, 4).t().reshape(-1)
        assert torch.equal(hvd.recv(torch.empty(12), source=0), expected)


def scenario_transfers_of_a_tag_meet_in_order_and_tags_do_not_mix() -> None:
    for source, to in pairs():
        if hvd.rank() == source:
            handles = [
                hvd.send_async(torch.full((count, 3), float(10 * tag + count)), to, tag=tag)
                for tag in (5, 2)
                for count in range(4)
            ]
            assert all(hvd.synchronize(handle).item() == 0 for handle in handles)
        elif hvd.rank() == to:
            received = {
                (tag, count): hvd.recv_async(torch.empty(count, 3), source, tag)
                for tag in (2, 5)
                for count in range(4)
            }
            for (tag, count), handle in reversed(received.items()):
                tensor = hvd.synchronize(handle)
                assert hvd.poll(handle) and (tensor == 10 * tag + count).all()


def scenario_both_ways_at_once_under_a_name_that_comes_again() -> None:
    for step in range(20):
        started = []
        for peer in set(range(hvd.size())) - {hvd.rank()}:
            place = torch.empty(1000)
            started.append((peer, hvd.recv_async(place, peer, name="both")))
            mine = torch.full((1000,), float(hvd.rank() + step))
            started.append((hvd.rank(), hvd.send_async(mine, peer, name="both")))
        for peer, handle in started:
            value = hvd.synchronize(handle)
            assert peer == hvd.rank() or (value == peer + step).all()


def scenario_transfers_and_collectives_take_turns() -> None:
    after, before = (hvd.rank() + 1) % hvd.size(), (hvd.rank() - 1) % hvd.size()
    for step in range(10):
        place = torch.empty(50_000)
        total = hvd.allreduce_async(torch.ones(70_000), op=hvd.Sum)
        out = hvd.send_async(torch.full((50_000,), float(hvd.rank() + step)), after)
        assert (hvd.recv(place, before) == before + step).all()
        assert (hvd.synchronize(total) == hvd.size()).all()
        hvd.synchronize(out)


def scenario_two_stages_train_like_one_process() -> None:
    torch.manual_seed(3)
    stages = [torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh()), torch.nn.Linear(8, 2)]
    whole = torch.nn.Sequential(*stages)
    parts = [torch.randn(5, 6) for _ in range(3)]
    loss = torch.stack([whole(part).square().mean() for part in parts]).sum()
    gradients = torch.autograd.grad(loss, list(whole.parameters()))
    if hvd.rank() == 0:
        tokens = [hvd.send(stages[0](part), to=1) for part in parts]
        torch.stack(tokens).sum().backward()
        for parameter, gradient in zip(stages[0].parameters(), gradients[:2], strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
    elif hvd.rank() == 1:
        losses = []
        for _ in parts:
            hidden = hvd.recv(torch.empty(5, 8, requires_grad=True), source=0)
            losses.append(stages[1](hidden).square().mean())
        # Another order than that in which rank 0 takes the gradients.
        (losses[1] + losses[2] + losses[0]).backward()
        for parameter, gradient in zip(stages[1].parameters(), gradients[2:], strict=True):
            torch.testing.assert_close(parameter.grad, gradient)


def scenario_stages_go_back_part_by_part() -> None:
    weight = torch.full((3,), 2.0, requires_grad=True)
    for part in range(4):
        if hvd.rank() == 0:
            hvd.send(weight * part, to=1, tag=part).backward()
        elif hvd.rank() == 1:
            place = torch.empty(3, requires_grad=True)
            hidden = hvd.synchronize(hvd.recv_async(place, source=0, tag=part))
            assert hidden.data_ptr() == place.data_ptr()
            (hidden * 5).sum().backward()
            assert place.grad is None
    if hvd.rank() == 0:
        assert weight.grad is not None and (weight.grad == 5 * (0 + 1 + 2 + 3)).all()


def scenario_in_a_process_set() -> None:
    everybody_else = hvd.add_process_set(range(1, hvd.size()))
    last = hvd.size() - 1
    if last > 1 and hvd.rank() == 1:
        hvd.send(torch.ones(3), last, process_set=everybody_else)
        with raises(hvd.ArgumentError, "rank 0 is not a member of process set"):
            hvd.send(torch.ones(3), 0, process_set=everybody_else)
    elif last > 1 and hvd.rank() == last:
        assert hvd.recv(torch.empty(3), 1, process_set=everybody_else).sum() == 3
    hvd.remove_process_set(everybody_else)


def scenario_misuse_says_what_to_do() -> None:
    with raises(hvd.ArgumentError, "a rank does not send to itself; copy the tensor"):
        hvd.send(torch.ones(2), hvd.rank())
    with raises(hvd.ArgumentError, f"rank {hvd.size()} is not a member of"):
        hvd.recv(torch.ones(2), hvd.size())
    with raises(hvd.ArgumentError, r"to='one' is not a rank; give a whole number"):
        hvd.send(torch.ones(2), "one")  # type: ignore[arg-type]
    with raises(hvd.ArgumentError, "is not contiguous"):
        hvd.recv(torch.ones(4, 2).t(), (hvd.rank() + 1) % hvd.size())
    with raises(hvd.ArgumentError, "is a float, not a tensor"):
        hvd.send(1.0, (hvd.rank() + 1) % hvd.size())  # type: ignore[arg-type]


def scenario_mismatch_is_an_error_on_both_and_the_world_goes_on() -> None:
    if hvd.rank() < 2:
        verb = [hvd.send, hvd.recv][hvd.rank()]
        text = "send 'odd': ranks disagree about the number of elements: rank "
        with raises(hvd.MismatchError, text):
            verb(torch.ones(3 + hvd.rank()), 1 - hvd.rank(), name="odd")
        with raises(hvd.MismatchError, "about the dtype: rank . has (float32|float64), rank "):
            dtype = [torch.float32, torch.float64][hvd.rank()]
            verb(torch.ones(3, dtype=dtype), 1 - hvd.rank(), name="odd")
        verb(torch.ones(3), 1 - hvd.rank(), name="odd")
    assert hvd.allreduce(torch.ones(2)).sum() == 2


def scenario_transfers_to_a_rank_that_has_joined_are_errors() -> None:
    if hvd.rank() == 1:
        hvd.join()
        return
    if hvd.rank() == 0:
        # Rank 1 never receives it: the error comes once rank 1 has joined.
        with raises(hvd.ArgumentError, "rank 1, which has joined, neither sends nor receives any"):
            hvd.send(torch.ones(2), 1)
    hvd.join()


def body() -> dict[str, str]:
    return run_all(globals())


WORLDS = [[0, 0], [0, 1], [0, 0, 1], [0, 1, 1, 0]]


test_transfers = make_tests(body, on_hosts(*WORLDS))
