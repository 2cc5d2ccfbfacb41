"""Every collective of TensorFlow x dtype x op x scale x process set, and every gradient.

Each rank computes what all ranks give, and what must come of it: values as the arithmetic says,
gradients by the formula in docs/collectives.md. Every case runs eagerly and in a tf.function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from harness import RankResult, run_world
from parallel.scenarios import check, names_in
from parallel.tensorflow_worlds import ENVIRONMENT, TIMEOUT, hvd, run_scenarios, tf

PRELOAD = ("tensorflow",)
Form = Callable[[Callable[..., Any]], Callable[..., Any]]
SCALES = ({}, {"prescale_factor": 0.5, "postscale_factor": 3.0})

# A process set, the ranks of its members, and this rank's place among them.
Place = tuple[Any, list[int], int]
sets: dict[str, Any] = {}


def places() -> Iterator[Place]:
    """Give the process sets that this rank is a member of: all ranks, and all but rank 0."""
    everyone = list(range(hvd.size()))
    if not sets and hvd.size() > 2:
        sets["all but rank 0"] = hvd.add_process_set(everyone[1:])
    yield hvd.global_process_set, everyone, hvd.rank()
    for one in sets.values():
        if one.included():
            yield one, everyone[1:], one.rank()


def given(rank: int, rows: int, salt: int = 0) -> Any:
    """Make what a rank puts in, or the gradient that it gets back."""
    return np.random.default_rng([rank, rows, salt]).standard_normal((rows, 2)).astype("float32")


def gradient(form: Form, collective: Callable[[Any], Any], inputs: Any, upstream: Any) -> Any:
    """Differentiate a collective, with what this rank's later layers say about its result."""

    def slope(inputs: Any, upstream: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = collective(inputs)
        return tape.gradient(outputs, inputs, output_gradients=upstream)

    of = form(slope)(tf.constant(inputs), tf.nest.map_structure(tf.constant, upstream))
    return of.numpy()


def close(result: Any, expected: Any, case: object) -> None:
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6, err_msg=str(case))


def scenario_gradients_of_allreduce(form: Form) -> None:
    for process_set, members, _ in places():
        upstream = [given(rank, 5, 1) for rank in members]
        mine = given(hvd.rank(), 5)
        for op, share in ((hvd.Sum, 1.0), (hvd.Average, 1.0 / len(members))):
            for scales in SCALES:
                how = {"op": op, "process_set": process_set, **scales}
                factor = share * np.prod([*scales.values(), 1.0])
                result = gradient(
                    form, lambda x, how=how: hvd.allreduce(x, **how), mine, given(hvd.rank(), 5, 1)
                )
                close(result, factor * sum(upstream), how)
                result = gradient(
                    form,
                    lambda x, how=how: hvd.grouped_allreduce([x, 2 * x], **how),
                    mine,
                    [given(hvd.rank(), 5, 1)] * 2,
                )
                close(result, 3 * factor * sum(upstream), how)


def scenario_gradients_of_allgather(form: Form) -> None:
    for process_set, members, _ in places():
        rows = sum(rank + 1 for rank in members)
        mean = sum(given(rank, rows, 1) for rank in members) / len(members)
        begin = sum(rank + 1 for rank in members if rank < hvd.rank())
        own = mean[begin : begin + hvd.rank() + 1]
        mine, upstream = given(hvd.rank(), hvd.rank() + 1), given(hvd.rank(), rows, 1)
        how = {"process_set": process_set}
        close(gradient(form, lambda x, h=how: hvd.allgather(x, **h), mine, upstream), own, members)
        result = gradient(
            form, lambda x, h=how: hvd.grouped_allgather([x, 2 * x], **h), mine, [upstream] * 2
        )
        close(result, 3 * own, members)


def scenario_gradients_of_broadcast(form: Form) -> None:
    for process_set, members, _ in places():
        mean = sum(given(rank, 3, 1) for rank in members) / len(members)
        for root in members:
            result = gradient(
                form,
                lambda x, r=root, p=process_set: hvd.broadcast(x, r, process_set=p),
                given(hvd.rank(), 3),
                given(hvd.rank(), 3, 1),
            )
            close(result, mean if hvd.rank() == root else 0 * mean, (members, root))


def scenario_gradients_of_reducescatter(form: Form) -> None:
    for process_set, members, place in places():
        n = len(members)
        rows = 2 * n + 1  # the first member has one more
        upstream = [given(rank, 2 + (i == 0), 1) for i, rank in enumerate(members)]
        gathered = np.concatenate(upstream)
        for op, share in ((hvd.Sum, n), (hvd.Average, 1)):
            for scales in SCALES:
                how = {"op": op, "process_set": process_set, **scales}
                expected = share * np.prod([*scales.values(), 1.0]) * gathered
                mine = given(hvd.rank(), rows)
                result = gradient(
                    form, lambda x, h=how: hvd.reducescatter(x, **h), mine, upstream[place]
                )
                close(result, expected, how)
                result = gradient(
                    form,
                    lambda x, h=how: hvd.grouped_reducescatter([x, 2 * x], **h),
                    mine,
                    [upstream[place]] * 2,
                )
                close(result, 3 * expected, how)


def scenario_gradients_of_alltoall(form: Form) -> None:
    for process_set, members, place in places():
        n = len(members)
        # The member at place a sends (a + b) % 3 rows to the one at place b.
        splits = [[(a + b) % 3 for b in range(n)] for a in range(n)]
        back = []
        for b, rank in enumerate(members):
            received = given(rank, sum(splits[a][b] for a in range(n)), 1)
            begin = sum(splits[a][b] for a in range(place))
            back.append(received[begin : begin + splits[place][b]])
        mine = given(hvd.rank(), sum(splits[place]))
        upstream = given(hvd.rank(), sum(splits[a][place] for a in range(n)), 1)
        result = gradient(
            form,
            lambda x, s=splits[place], p=process_set: hvd.alltoall(x, s, process_set=p)[0],
            mine,
            upstream,
        )
        close(result, np.concatenate(back), members)


def scenario_gradients_in_functions_that_xla_compiles() -> None:
    for process_set, members, _ in places():
        upstream = [given(rank, 5, 1) for rank in members]
        for op, share in ((hvd.Sum, 1.0), (hvd.Average, 1.0 / len(members))):
            result = gradient(
                lambda function: tf.function(function, jit_compile=True),
                lambda x, o=op, p=process_set: hvd.allreduce(x, op=o, process_set=p),
                given(hvd.rank(), 5),
                given(hvd.rank(), 5, 1),
            )
            close(result, share * sum(upstream), (members, op))


def body() -> dict[str, str]:
    return run_scenarios(globals())


@pytest.fixture(scope="module", params=[2, 3, 4])
def results(request: pytest.FixtureRequest) -> list[RankResult]:
    return run_world(request.param, body, timeout=TIMEOUT, env=ENVIRONMENT)


@pytest.mark.parametrize("name", names_in(globals()))
def test_table(results: list[RankResult], name: str) -> None:
    check(results, name)
