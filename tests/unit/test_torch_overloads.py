"""The methods of a process group take their arguments in every form that torch's own take."""

from __future__ import annotations

import datetime
import re
from typing import Any

import pytest
import torch
from torch.distributed import AllreduceOptions, ProcessGroup, ReduceOp

from hvdlite.torch.distributed.group import FORMS, in_one_form

ONE, TWO = torch.ones(1), torch.ones(2)
LATE = datetime.timedelta(seconds=7)
SOME = AllreduceOptions()


def described(options: Any) -> dict[str, Any]:
    """Return what is not as it is by default."""
    if options is None:
        return {}
    names = ("rootRank", "reduceOp", "timeout")
    found = {name: getattr(options, name) for name in names if hasattr(options, name)}
    plain = type(options)()
    return {name: value for name, value in found.items() if value != getattr(plain, name)}


ROOT, MAX, TIMEOUT = {"rootRank": 1}, {"reduceOp": ReduceOp.MAX}, {"timeout": LATE}
NONE: dict[str, Any] = {}
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any], list[Any], dict[str, Any]]] = [
    ("allreduce", (ONE,), NONE, [[ONE]], NONE),
    ("allreduce", ([ONE],), NONE, [[ONE]], NONE),
    ("allreduce", (ONE, ReduceOp.MAX), NONE, [[ONE]], MAX),
    ("allreduce", ([ONE], ReduceOp.MAX, LATE), NONE, [[ONE]], MAX | TIMEOUT),
    ("allreduce", (), {"tensor": ONE, "op": ReduceOp.MAX}, [[ONE]], MAX),
    ("allreduce", ([ONE],), {"timeout": LATE}, [[ONE]], TIMEOUT),
    ("broadcast", (ONE, 1), NONE, [[ONE]], ROOT),
    ("broadcast", (ONE,), {"root": 1}, [[ONE]], ROOT),
    ("reduce", (ONE, 1, ReduceOp.MAX, LATE), NONE, [[ONE]], ROOT | MAX | TIMEOUT),
    ("allgather", ([ONE, TWO], TWO), NONE, [[[ONE, TWO]], [TWO]], NONE),
    ("allgather", ([[ONE, TWO]], [TWO]), NONE, [[[ONE, TWO]], [TWO]], NONE),
    ("allgather", ([ONE], ONE, LATE), NONE, [[[ONE]], [ONE]], TIMEOUT),
    ("gather", ([ONE], ONE, 1), NONE, [[[ONE]], [ONE]], ROOT),
    ("gather", ([], ONE, 1), NONE, [[[]], [ONE]], ROOT),
    ("scatter", (ONE, [ONE, TWO], 1), NONE, [[ONE], [[ONE, TWO]]], ROOT),
    ("reduce_scatter", (ONE, [ONE, TWO]), NONE, [[ONE], [[ONE, TWO]]], NONE),
    ("reduce_scatter", (ONE, [ONE], ReduceOp.MAX), NONE, [[ONE], [[ONE]]], MAX),
    ("all_to_all_single", (ONE, TWO, [], []), {"timeout": LATE}, [ONE, TWO, [], []], TIMEOUT),
    ("alltoall", ([ONE], [TWO], LATE), NONE, [[ONE], [TWO]], TIMEOUT),
    ("all_gather_single", (), {"output": ONE, "input": TWO}, [ONE, TWO], NONE),
    ("barrier", (), {"timeout": LATE}, [], TIMEOUT),
]


@pytest.mark.parametrize(("verb", "given", "named", "tensors", "options"), CALLS)
def test_all_forms(
    verb: str,
    given: tuple[Any, ...],
    named: dict[str, Any],
    tensors: list[Any],
    options: dict[str, Any],
) -> None:
    *required, made = in_one_form(verb, given, dict(named))
    assert ids_of(required) == ids_of(tensors)
    assert described(made) == options


def ids_of(argument: Any) -> Any:
    return [ids_of(one) for one in argument] if isinstance(argument, list) else id(argument)


def test_options_are_taken_as_they_are() -> None:
    assert in_one_form("allreduce", ([ONE], SOME), {})[-1] is SOME
    assert in_one_form("allreduce", ([ONE],), {"opts": SOME})[-1] is SOME
    assert in_one_form("send", ([ONE], 1), {"tag": 0}) == [[ONE], 1, 0]


@pytest.mark.parametrize(
    ("verb", "given", "named"),
    [
        ("broadcast", (), {"root": 0}),
        ("barrier", (), {"root": 0}),
        ("broadcast", ([ONE], 1, LATE, 5), {}),
        ("broadcast", ([ONE], 1), {"root": 0}),
        ("send", ([ONE], 1, 0, None), {}),
    ],
)
def test_what_torch_refuses_is_refused(
    verb: str, given: tuple[Any, ...], named: dict[str, Any]
) -> None:
    with pytest.raises(TypeError, match=verb):
        in_one_form(verb, given, named)


def test_every_argument_of_the_installed_torch_is_known() -> None:
    for verb, form in FORMS.items():
        known = {name for names in form.arguments for name in names} | {
            "self",
            "opts",
            *form.single,
        }
        text = getattr(ProcessGroup, verb, None).__doc__ or ""
        for line in text.splitlines():
            if f"{verb}(self" in line:
                assert set(re.findall(r"[(,] ?(\w+): ", line)) <= known, line
