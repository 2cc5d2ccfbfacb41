"""The gradients of the collectives in PyTorch against their formulas, which are Horovod's.

A *slope* is the gradient of a rank's loss for an output, the input of the backward. Any rank can
make the slopes of all others, so each computes the expected results itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import hvdlite.torch as hvd
from parallel.scenarios import make_tests, run_all, sizes

PRELOAD = ("torch._dynamo",)
SCALES = [(1.0, 1.0), (0.5, 3.0)]
sets: list[Any] = []


def start() -> None:
    """Begin the world, with a process set beside that of all ranks."""
    torch.set_num_threads(1)
    hvd.init()
    sets[:] = [hvd.global_process_set, hvd.add_process_set(list(range(1, hvd.size())))]


def own_sets() -> Iterator[tuple[Any, list[int]]]:
    for process_set in sets:
        if process_set.included():
            yield process_set, list(process_set.ranks)


def slope(rank: int, rows: int, seed: int = 0) -> torch.Tensor:
    """Make a rank's slopes for an output of so many rows."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(rows, 2, generator=generator, dtype=torch.float64)


def mean(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return sum(tensors[1:], tensors[0]) / len(tensors)


def gradients(
    call: Callable[[list[torch.Tensor]], list[torch.Tensor]], rows: Sequence[int]
) -> list[torch.Tensor]:
    """Return the gradients of tensors of so many rows, through a collective on all of them."""
    tensors = [torch.ones(count, 2, dtype=torch.float64, requires_grad=True) for count in rows]
    outputs = call(tensors)
    loss = sum(
        ((one * slope(hvd.rank(), len(one), seed)).sum() for seed, one in enumerate(outputs)),
        torch.zeros((), dtype=torch.float64),
    )
    loss.backward()
    return [tensor.grad for tensor in tensors]  # type: ignore[misc]


def forms_of(verb: str, grouped: bool = True, **options: Any) -> list[Any]:
    """Return every form of a collective, as functions of lists of tensors."""
    forms = [
        lambda ts: [getattr(hvd, verb)(t, **options) for t in ts],
        lambda ts: [getattr(hvd, f"{verb}_async")(t, **options).wait() for t in ts],
    ]
    if grouped:
        forms += [
            lambda ts: getattr(hvd, f"grouped_{verb}")(ts, **options),
            lambda ts: getattr(hvd, f"grouped_{verb}_async")(ts, **options).wait(),
        ]
    return forms


def in_place(verb: str, **options: Any) -> list[Any]:
    """Return the forms that overwrite; not of leaves, which are treated as data."""
    return [
        lambda ts: [getattr(hvd, f"{verb}_")(t * 1, **options) for t in ts],
        lambda ts: [getattr(hvd, f"{verb}_async_")(t * 1, **options).wait() for t in ts],
    ]


def reducing(op: int, process_set: Any, prescale: float, postscale: float) -> dict[str, Any]:
    scales = {"prescale_factor": prescale, "postscale_factor": postscale}
    return {"op": op, "process_set": process_set, **scales}


def compare(found: list[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def scenario_allreduce_is_reduced_in_the_same_way() -> None:
    for (ps, ranks), op, (pre, post) in itertools.product(
        own_sets(), (hvd.Average, hvd.Sum), SCALES
    ):
        options = reducing(op, ps, pre, post)
        factor = pre * post * (len(ranks) if op == hvd.Sum else 1)
        expected = [factor * mean([slope(r, 3, seed) for r in ranks]) for seed in range(2)]
        groups = [
            lambda ts, options=options: hvd.grouped_allreduce_([t * 1 for t in ts], **options),
            lambda ts, options=options: hvd.grouped_allreduce_async_(
                [t * 1 for t in ts], **options
            ).wait(),
        ]
        for form in forms_of("allreduce", **options) + in_place("allreduce", **options) + groups:
            compare(gradients(form, [3, 3]), expected)


def scenario_allgather_is_the_mean_over_ranks_of_its_own_rows() -> None:
    for ps, ranks in own_sets():
        counts = [[rank + 1 for rank in ranks], [2] * len(ranks)]
        position = ranks.index(hvd.rank())
        expected = [
            mean([slope(rank, sum(rows), seed) for rank in ranks]).split(rows)[position]
            for seed, rows in enumerate(counts)
        ]
        for form in forms_of("allgather", process_set=ps):
            compare(gradients(form, [rows[position] for rows in counts]), expected)


def scenario_broadcast_is_the_mean_over_ranks_on_the_root() -> None:
    for ps, ranks in own_sets():
        for root in ranks:
            options = {"root_rank": root, "process_set": ps}
            expected = [mean([slope(rank, 3, seed) for rank in ranks]) for seed in range(2)]
            if hvd.rank() != root:
                expected = [torch.zeros_like(one) for one in expected]
            for form in forms_of("broadcast", False, **options) + in_place("broadcast", **options):
                compare(gradients(form, [3, 3]), expected)


def scenario_reducescatter_is_gathered_and_a_sum_times_the_ranks() -> None:
    for (ps, ranks), op, (pre, post) in itertools.product(
        own_sets(), (hvd.Average, hvd.Sum), SCALES
    ):
        options = reducing(op, ps, pre, post)
        factor = pre * post * (len(ranks) if op == hvd.Sum else 1)
        expected = []
        for seed, rows in enumerate((7, 2 * len(ranks))):
            shares = [len(part) for part in torch.ones(rows).tensor_split(len(ranks))]
            slopes = [slope(r, count, seed) for r, count in zip(ranks, shares, strict=True)]
            expected.append(factor * torch.cat(slopes))
        for form in forms_of("reducescatter", **options):
            compare(gradients(form, [7, 2 * len(ranks)]), expected)


def scenario_alltoall_is_sent_back() -> None:
    for ps, ranks in own_sets():
        splits = {rank: [(rank + 2 * i) % 3 for i in range(len(ranks))] for rank in ranks}
        position = ranks.index(hvd.rank())
        expected = []
        for receiver, rank in enumerate(ranks):
            rows = [splits[sender][receiver] for sender in ranks]
            expected.append(slope(rank, sum(rows)).split(rows)[position])
        own = splits[hvd.rank()]
        for form in forms_of("alltoall", False, splits=own, process_set=ps):
            found = gradients(lambda ts, form=form: [form(ts)[0][0]], [sum(own)])
            compare(found, [torch.cat(expected)])


def scenario_second_gradients_ask_all_ranks() -> None:
    """Each rank differentiates twice, whether or not its own input had an effect."""
    last, rows = hvd.size() - 1, 2 * hvd.size()
    verbs: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "allreduce": lambda x: hvd.allreduce(x, op=hvd.Sum),
        "allgather": hvd.allgather,
        "broadcast": lambda x: hvd.broadcast(x, last),
        "reducescatter": lambda x: hvd.reducescatter(x, op=hvd.Sum),
        "alltoall": hvd.alltoall,
    }
    for verb, call in verbs.items():
        x = torch.full((rows, 2), 2.0, dtype=torch.float64, requires_grad=True)
        (first,) = torch.autograd.grad((call(x) ** 2).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((first**2).sum(), x)
        assert bool(second.isfinite().all()), verb
        moved = verb != "broadcast" or hvd.rank() == last
        assert bool((second != 0).all()) == moved, (verb, second)


def body() -> dict[str, str]:
    return run_all(globals(), start)


test_gradients = make_tests(body, sizes(3))
