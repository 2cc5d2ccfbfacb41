"""The face of a process group that torch.distributed sees."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import distributed
from torch.autograd.profiler import record_function

from hvdlite.errors import ArgumentError, CollectiveTimeoutError, HvdliteError, UnsupportedError
from hvdlite.rendezvous import environment
from hvdlite.rendezvous.deadline import LONGEST_SECONDS, Deadline, seconds_of
from hvdlite.torch.distributed import engines
from hvdlite.torch.distributed.collectives import Collectives
from hvdlite.torch.distributed.engines import Membership
from hvdlite.torch.distributed.memory import OtherDeviceError
from hvdlite.torch.dynamo import keep_out

NAME = "hvdlite"


class HvdliteGroup(Collectives, distributed.ProcessGroup):  # type: ignore[misc]
    """A process group whose members exchange CPU tensors over an engine of hvdlite."""

    # torch.distributed makes it, and calls its methods: users call the functions of
    # torch.distributed.

    shown_as = NAME  # in events of torch's profiler

    def __init__(self, options: Any) -> None:
        member = Membership(
            options.store, options.group_rank, options.group_size, options.group_id, options.timeout
        )
        distributed.ProcessGroup.__init__(self, member.rank, member.size)
        Collectives.__init__(self, member)
        self._description = ""
        self._hooks_before: dict[int, Callable[[Any], object]] = {}  # by the caller's numbers
        self._hooks_after: dict[int, Callable[[Any], object]] = {}
        self._hooked = itertools.count()
        if environment.checks_nan():
            self._hooks_before[-1] = self._refuse_nan  # Torch's own hook waits in its C++ half.

    def getBackendName(self) -> str:
        return NAME

    name = _get_backend_name = getBackendName

    def getGroupName(self) -> str:
        return self._title

    def setGroupName(self, name: str) -> None:
        self._title = name

    _set_group_name = setGroupName
    group_name = property(getGroupName)

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, text: str) -> None:
        self._description = text

    _set_group_desc = setGroupDesc
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(name) for name in self._backends()]

    def _backends(self) -> dict[str, str]:
        try:
            config = distributed.distributed_c10d.get_backend_config(self)
        except (KeyError, ValueError):
            config = ""  # torch.distributed does not know the group yet, or no longer.
        pairs = [part.split(":") for part in config.split(",")]  # "cuda:nccl,cpu:hvdlite"
        return {pair[0]: pair[1] for pair in pairs if len(pair) == 2} or {"cpu": NAME}

    def elsewhere(self, error: OtherDeviceError) -> Any:
        """Return the group for the tensors of another device, or raise the error."""
        device = error.device.type
        backend = self._backends().get(device)
        if backend not in ("nccl", "gloo"):
            raise error
        return self._of_torch(device, backend)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        for group in self._groups_of_torch.values():
            if hasattr(group, "set_timeout"):  # Old releases do not have it.
                group.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        """Give operations more time, from the next one until that one has completed."""
        self._extensions.append((timeout.total_seconds(), []))

    def get_group_store(self) -> Any:
        return self._member.store

    def _get_backend(self, device: torch.device) -> Any:
        """Return what carries tensors of a device; for CPU tensors, this group itself."""
        device = torch.device(device)
        if self._backends().get(device.type) == NAME:
            return self
        if not hasattr(distributed.ProcessGroup, "shutdown"):  # torch 2.6 and older
            # They ask at the end, when it is too late to make a group.
            return self._groups_of_torch.get(device.type, self)
        try:
            return self.elsewhere(OtherDeviceError("_get_backend", device))._get_backend(device)
        except OtherDeviceError:
            raise ArgumentError(
                f"process group '{self._title}' has no backend for {device}; name one for each "
                'device, as in init_process_group("cuda:nccl,cpu:hvdlite")'
            ) from None

    get_backend = _get_backend

    # Torch asks this of a backend.
    supports_splitting = supports_coalescing = supports_time_estimate = supports_shrinking = False
    supports_reconfigure = supports_window = use_pg_for_symm_mem_rendezvous = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    @property
    def options(self) -> Any:
        """The timeout of operations, as torch's backends give it."""
        made = torch._C._distributed_c10d.Backend.Options(NAME, self._timeout)
        if hasattr(made, "global_ranks_in_group"):
            return made
        # Torch 2.8 sets that of a group of gloo.
        return SimpleNamespace(backend=NAME, _timeout=self._timeout)

    def _set_sequence_number_for_group(self) -> None:
        pass  # The members count from 0.

    def _get_sequence_number_for_group(self) -> int:
        return self._numbering.started()

    def _backend_id(self, _: Any) -> int:
        return self._id()

    def register_pre_hook(self, hook_id: int, hook: Callable[[Any], object]) -> None:
        self._hooks_before[hook_id] = hook

    def unregister_pre_hook(self, hook_id: int) -> None:
        self._hooks_before.pop(hook_id, None)

    def register_post_hook(self, hook_id: int, hook: Callable[[Any], object]) -> None:
        self._hooks_after[hook_id] = hook

    def unregister_post_hook(self, hook_id: int) -> None:
        self._hooks_after.pop(hook_id, None)

    def _refuse_nan(self, told: SimpleNamespace) -> None:
        kind = getattr(told.name, "name", told.name).lower()
        if kind in ("broadcast", "scatter") and told.root != self._own_rank:
            return  # This rank sends nothing.
        for index, tensor in enumerate(told.input_tensors):
            if torch.isnan(tensor._values() if tensor.is_sparse else tensor).any():
                raise ArgumentError(
                    f"TORCH_DIST_NAN_CHECK: rank {self._own_rank} did not send tensor {index} of "
                    f"{kind} of process group '{self._title}', of shape {list(tensor.shape)}: it "
                    "has a NaN; in a backward pass torch.autograd.detect_anomaly() finds its cause"
                )

    def shutdown(self) -> None:
        """Leave the group when the operations in flight have ended, or their time has passed."""
        while self._groups_of_torch:
            self._groups_of_torch.popitem()[1].shutdown()
        # While an exception is handled, as in a `finally`, the operations get a moment only: other
        # ranks may wait for what this one would have done.
        if sys.exc_info()[0] is None:
            deadline = Deadline(seconds_of(self._timeout))
            for handle in self._numbering.in_flight():
                # The thread that waits gets the error.
                with contextlib.suppress(HvdliteError, TimeoutError):
                    handle.wait(max(0.0, deadline.seconds_left), fatal=True)
        self._kept.clear()
        engines.end(self._engine)

    def abort(self) -> None:
        """Leave the group at once; the other members get an error."""
        self._engine.abort(f"rank {self._own_rank} aborted process group '{self._title}'")
        engines.end(self._engine)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks, each of which tells rank 0 through the store that it is there.

        Raises:
            CollectiveTimeoutError: Another rank did not come in time. Rank 0 names the first such
                rank, or with `wait_all_ranks` all of them, and so do ranks that still wait then.
        """
        seconds = seconds_of(self._timeout)
        if timeout is not None:
            seconds = max(0.001, timeout.total_seconds())  # Zero is no time here.
        where = self._numbering.next_of_pair("monitored_barrier")
        store = distributed.PrefixStore(where, self._member.store)
        if self._own_rank == 0:
            missing = self._missing(store, Deadline(seconds), wait_all_ranks)
            verdict = ""
            if missing:
                word = "Rank" if len(missing) == 1 else "Ranks"
                verdict = (
                    f"{word} {', '.join(map(str, missing))} failed to pass monitoredBarrier of "
                    f"process group '{self._title}' in {seconds:g} s"
                )
            store.set("verdict", verdict)
        else:
            store.set(str(self._own_rank), "")
            verdict = self._verdict(store, seconds)
        if verdict:
            raise CollectiveTimeoutError(verdict)

    def _missing(self, store: Any, deadline: Deadline, all_of_them: bool) -> list[int]:
        missing: list[int] = []
        for rank in range(1, self._members):
            left = min(max(0.001, deadline.seconds_left), LONGEST_SECONDS)
            try:
                store.wait([str(rank)], timedelta(seconds=left))
            except RuntimeError:
                missing.append(rank)
                if not all_of_them:
                    break
        return missing

    def _verdict(self, store: Any, seconds: float) -> str:
        try:
            store.wait(["verdict"], timedelta(seconds=min(seconds, LONGEST_SECONDS)))
        except RuntimeError:
            return (
                f"rank {self._own_rank} reached monitoredBarrier of process group "
                f"'{self._title}', and rank 0 did not let it pass in {seconds:g} s"
            )
        return store.get("verdict").decode()


# Torch's functions give lists of tensors and an object with options. The methods of a ProcessGroup
# also take single tensors, and the options one by one: `group.allreduce(tensor, ReduceOp.MAX)`.

_FIELDS = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}


class _Form(NamedTuple):
    arguments: Sequence[Sequence[str]]  # the names of each argument that has to be given
    options: Any = None  # the class of the object with the options
    single: Sequence[str] = ()  # the options that may be given one by one, in this order


_IN_PLACE = [("tensors", "tensor")]
_OUT_OF_IN = [("output", "output_tensor", "outputTensor"), ("input", "input_tensor", "inputTensor")]
_LISTS = [("output_tensors", "output_tensor", "output"), ("input_tensors", "input_tensor", "input")]
_MANY = [
    ("outputTensors", "output_lists", "outputs", "output"),
    ("inputTensors", "input_list", "inputs", "input"),
]
_SPLITS = [("output_split_sizes",), ("input_split_sizes",)]
_GATHER = torch._C._distributed_c10d.AllgatherOptions
_EXCHANGE = distributed.AllToAllOptions

FORMS = {
    "allreduce": _Form(_IN_PLACE, distributed.AllreduceOptions, ("op", "timeout")),
    "allreduce_coalesced": _Form(_IN_PLACE, torch._C._distributed_c10d.AllreduceCoalescedOptions),
    "reduce": _Form(_IN_PLACE, distributed.ReduceOptions, ("root", "op", "timeout")),
    "broadcast": _Form(_IN_PLACE, distributed.BroadcastOptions, ("root", "timeout")),
    "allgather": _Form(_LISTS, _GATHER, ("timeout",)),
    "allgather_coalesced": _Form(_MANY, _GATHER),
    "all_gather_single": _Form(_OUT_OF_IN, _GATHER),
    "all_gather_single_coalesced": _Form(_MANY, _GATHER),
    "reduce_scatter": _Form(_LISTS, distributed.ReduceScatterOptions, ("op", "timeout")),
    "reduce_scatter_single": _Form(_OUT_OF_IN, distributed.ReduceScatterOptions),
    "reduce_scatter_single_coalesced": _Form(_MANY, distributed.ReduceScatterOptions),
    "gather": _Form(_LISTS, distributed.GatherOptions, ("root", "timeout")),
    "gather_single": _Form(_OUT_OF_IN, distributed.GatherOptions),
    "scatter": _Form(_LISTS, distributed.ScatterOptions, ("root", "timeout")),
    "all_to_all_single": _Form([*_OUT_OF_IN, *_SPLITS], _EXCHANGE, ("timeout",)),
    "alltoall": _Form(_LISTS, _EXCHANGE, ("timeout",)),
    "barrier": _Form((), distributed.BarrierOptions, ("timeout",)),
    "send": _Form([("tensors",), ("dstRank",), ("tag",)]),
    "recv": _Form([("tensors",), ("srcRank",), ("tag",)]),
}
_OPTIONS = tuple({form.options for form in FORMS.values() if form.options is not None})


def _method(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that takes its arguments in all forms, and tensors of all devices."""
    verb = own.__name__

    @functools.wraps(own)
    def call(self: Any, *given: Any, **named: Any) -> Any:
        if named or not given or not _has_options(given[-1]):
            given = (*in_one_form(verb, given, dict(named)),)
        told = None
        if self._hooks_before or self._hooks_after:
            told = _told(verb, given)
            told.op_id = next(self._hooked)
            for hook in [*self._hooks_before.values()]:
                hook(told)
        with _event(self, verb) if _profiling() else _NO_EVENT:
            try:
                work = own(self, *given)
            except OtherDeviceError as error:
                work = getattr(self.elsewhere(error), verb)(*given)
        if told is not None:
            told.work = work
            for hook in [*self._hooks_after.values()]:
                hook(told)
        return work

    return keep_out(call)


_profiling = torch._C._autograd._profiler_enabled
_NO_EVENT = contextlib.nullcontext()


def _event(group: Any, verb: str) -> record_function:
    """Return an event of torch's profiler, for as long as the operation is submitted."""
    # The profiler has freed an event that is still open when it stops, and an operation that ends
    # later would write there.
    name = re.sub("^all(?!_)", "all_", verb)
    return record_function(f"{group.shown_as}:{name}")


def _has_options(argument: Any) -> bool:
    return isinstance(argument, _OPTIONS)


def in_one_form(verb: str, given: Sequence[Any], named: dict[str, Any]) -> list[Any]:
    form = FORMS[verb]
    count = len(form.arguments)
    required = list(given[:count])
    for names in form.arguments[len(required) :]:
        name = next((name for name in names if name in named), None)
        if name is None:
            raise TypeError(f"{verb}() misses the argument {names[0]!r}")
        required.append(named.pop(name))
    alone = any(isinstance(one, torch.Tensor) for one in required)
    if alone and form.arguments in (_IN_PLACE, _LISTS):
        required = [[one] for one in required]
    options = _options(verb, given[count:], named)
    return required if form.options is None else [*required, options]


def _options(verb: str, given: Sequence[Any], named: dict[str, Any]) -> Any:
    """Return the object with the options of a call; None for a verb that has none."""
    form = FORMS[verb]
    if len(given) == 1 and not named and (given[0] is None or _has_options(given[0])):
        given, named = [], {"opts": given[0]}
    if form.options is not None and not given and set(named) == {"opts"}:
        return named["opts"] or form.options()
    single = dict(zip(form.single, given, strict=False))
    if len(given) > len(form.single) or not set(named) <= set(form.single) - set(single):
        raise TypeError(f"{verb}() got arguments that it does not have: {[*given, *named]}")
    options = form.options() if form.options is not None else None
    for name, value in (single | named).items():
        if value is not None:
            setattr(options, _FIELDS[name], value)
    return options


def _told(verb: str, given: Sequence[Any]) -> SimpleNamespace:
    """Return what hooks get: the attributes of torch's PreHookArgs and PostHookArgs."""
    form = FORMS[verb]
    count = len(form.arguments)
    pair = given[:2] if form.options and count > 1 else [[], given[0] if count else []]
    outputs, inputs = pair[::-1] if verb == "recv" else pair
    kind = verb.removesuffix("_coalesced").removesuffix("_single")
    kind = kind.replace("all_", "all").replace("to_", "to").upper()
    return SimpleNamespace(
        name=getattr(getattr(torch._C._distributed_c10d, "HookOpName", None), kind, kind),
        async_op=getattr(given[-1], "asyncOp", True),
        input_tensors=_flat(inputs),
        output_tensors=_flat(outputs),
        root=getattr(given[-1], "rootRank", -1) if form.options else given[1],
    )


def _flat(given: Any) -> list[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        return [given]
    return [one for part in given for one in _flat(part)]


# Earlier releases of torch, and its C++ code, call these methods by other names.
_OTHER_NAMES = {
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
    "gather_into_tensor": "gather_single",
    "allreduce_sparse": "allreduce",
}
for _verb in FORMS:
    setattr(HvdliteGroup, _verb, _method(getattr(HvdliteGroup, _verb)))
for _other, _verb in _OTHER_NAMES.items():
    setattr(HvdliteGroup, _other, getattr(HvdliteGroup, _verb))

# What other process groups and backends have besides, by what to do without it.
_LACKING = {
    "make a new group": "merge merge_remote_group resume shrink split split_group suspend",
    "start the job again, or as an elastic one": "get_reconfigure_handle reconfigure",
    "call the operations one by one": "_end_coalescing _start_coalescing",
    "use send and recv, and tensors of torch.empty": "allocate_tensor memory_stats new_window",
    "use the Work that an operation returns": "_register_on_completion_hook "
    "_wait_for_pending_works get_error register_abort_hook unregister_abort_hook",
}


def _refuse(self: HvdliteGroup, verb: str, remedy: str, *_: Any, **__: Any) -> NoReturn:
    text = f"process group '{self._title}' of the backend 'hvdlite' does not have it; {remedy}"
    raise UnsupportedError(f"{verb}: {text}")


for _remedy, _verbs in _LACKING.items():
    for _verb in _verbs.split():
        setattr(HvdliteGroup, _verb, functools.partialmethod(_refuse, _verb, _remedy))
