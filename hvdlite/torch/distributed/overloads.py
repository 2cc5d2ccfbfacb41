"""The ways to call the methods of torch's ProcessGroup.

Torch's functions give lists of tensors and an object with options. The methods of a ProcessGroup
also take single tensors, and the options one by one: `group.allreduce(tensor, ReduceOp.MAX)`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed
from torch.distributed import distributed_c10d

_FIELDS = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}


class Form(NamedTuple):
    """The arguments of a method."""

    arguments: Sequence[Sequence[str]]  # These are the names of each argument that has to be given.
    options: Any = None  # This is the class of the object with the options.
    single: Sequence[str] = ()  # These options may be given one by one, in this order.
    inner: int | None = None  # This argument is a list of lists unless tensors are single.


_IN_PLACE = [("tensors", "tensor")]
_OUT_OF_IN = [("output", "output_tensor", "outputTensor"), ("input", "input_tensor", "inputTensor")]
_LISTS = [("output_tensors", "output_tensor", "output"), ("input_tensors", "input_tensor", "input")]
_MANY = [
    ("outputTensors", "output_lists", "outputs", "output"),
    ("inputTensors", "input_list", "inputs", "input"),
]
_SPLITS = [("output_split_sizes",), ("input_split_sizes",)]
_GATHER = distributed_c10d.AllgatherOptions
_EXCHANGE = distributed.AllToAllOptions

FORMS = {
    "allreduce": Form(_IN_PLACE, distributed.AllreduceOptions, ("op", "timeout")),
    "allreduce_coalesced": Form(_IN_PLACE, distributed_c10d.AllreduceCoalescedOptions),
    "reduce": Form(_IN_PLACE, distributed.ReduceOptions, ("root", "op", "timeout")),
    "broadcast": Form(_IN_PLACE, distributed.BroadcastOptions, ("root", "timeout")),
    "allgather": Form(_LISTS, _GATHER, ("timeout",), 0),
    "allgather_coalesced": Form(_MANY, _GATHER),
    "all_gather_single": Form(_OUT_OF_IN, _GATHER),
    "all_gather_single_coalesced": Form(_MANY, _GATHER),
    "reduce_scatter": Form(_LISTS, distributed.ReduceScatterOptions, ("op", "timeout"), 1),
    "reduce_scatter_single": Form(_OUT_OF_IN, distributed.ReduceScatterOptions),
    "reduce_scatter_single_coalesced": Form(_MANY, distributed.ReduceScatterOptions),
    "gather": Form(_LISTS, distributed.GatherOptions, ("root", "timeout"), 0),
    "scatter": Form(_LISTS, distributed.ScatterOptions, ("root", "timeout"), 1),
    "all_to_all_single": Form([*_OUT_OF_IN, *_SPLITS], _EXCHANGE, ("timeout",)),
    "alltoall": Form(_LISTS, _EXCHANGE, ("timeout",)),
    "barrier": Form((), distributed.BarrierOptions, ("timeout",)),
    "send": Form([("tensors",), ("dstRank",), ("tag",)]),
    "recv": Form([("tensors",), ("srcRank",), ("tag",)]),
}


def overloaded(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that takes its arguments in all forms, and gives them to `own` in one."""
    verb = own.__name__

    @functools.wraps(own)
    def call(self: Any, *given: Any, **named: Any) -> Any:
        if not named and given and _has_options(given[-1]):
            return own(self, *given)
        return own(self, *in_one_form(verb, given, named))

    return call


def _has_options(argument: Any) -> bool:
    return hasattr(argument, "asyncOp")


def in_one_form(verb: str, given: Sequence[Any], named: dict[str, Any]) -> list[Any]:
    """Return arguments as the methods of `collectives` and `exchanges` take them, or raise."""
    form = FORMS[verb]
    count = len(form.arguments)
    required = list(given[:count])
    for names in form.arguments[len(required) :]:
        name = next((name for name in names if name in named), None)
        if name is None:
            raise TypeError(f"{verb}() misses the argument {names[0]!r}")
        required.append(named.pop(name))
    if form.inner is not None and isinstance(required[1 - form.inner], torch.Tensor):
        required[1 - form.inner] = [required[1 - form.inner]]
        required[form.inner] = [required[form.inner]]
    elif form.arguments is _IN_PLACE and isinstance(required[0], torch.Tensor):
        required[0] = [required[0]]
    options = _options(verb, given[count:], named)
    return required if form.options is None else [*required, options]


def _options(verb: str, given: Sequence[Any], named: dict[str, Any]) -> Any:
    """Return the object with the options of a call; None if none are given."""
    form = FORMS[verb]
    if form.options is not None and len(given) == 1 and not named:
        (only,) = given
        if only is None or _has_options(only):
            return only
    if form.options is not None and not given and set(named) == {"opts"}:
        return named["opts"]
    single = dict(zip(form.single, given, strict=False))
    if len(given) > len(form.single) or not set(named) <= set(form.single) - set(single):
        raise TypeError(f"{verb}() got arguments that it does not have: {[*given, *named]}")
    options = None
    for name, value in (single | named).items():
        if value is not None:
            options = options or form.options()
            setattr(options, _FIELDS[name], value)
    return options
