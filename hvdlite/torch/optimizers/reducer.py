"""When gradients are reduced: hooks on the parameters, and the cycle from backward to step.

A *pass* is one backward through a parameter. A *cycle* begins with the first gradient after the
last cycle and ends in `synchronize`. In a cycle a bucket is submitted when each of its parameters
has had its passes, from inside of backward, so that communication overlaps with what is left of it;
`synchronize` submits the others, whose parameters took no part on this rank, and waits for all.
It takes place at the end of the last backward of the cycle, so that gradients are reduced when
backward() returns; in `step` on a rank without one, and always with reduce_in="step".

Gradients that are reduced and not used or zeroed may have more added to them by another backward,
after which they are reduced again. What they had is the same on all ranks, so that an average does
not change it; a sum would, and is refused.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvdlite import operation_names, ops
from hvdlite.errors import CollectiveError, HvdliteError, MismatchError
from hvdlite.torch.collectives.submit import Reduction
from hvdlite.torch.optimizers.backward import BackwardEnd, queue
from hvdlite.torch.optimizers.bucket import Bucket, follow_groups, plan_buckets, split_evenly
from hvdlite.torch.optimizers.gradient_memory import Slots
from hvdlite.torch.optimizers.layout import digest, explain, meet_without_parameters
from hvdlite.torch.optimizers.replicas import ReplicaCheck, warn

Weight = float | Callable[[], float] | None


@dataclass
class Settings:
    """How gradients are reduced; see `DistributedOptimizer` for each."""

    reduction: Reduction
    compression: Any
    passes: int
    groups: int | Sequence[Sequence[torch.Tensor]]
    sparse_as_dense: bool
    cap_bytes: int
    weight: Weight
    bucket_view: bool = False  # gradient_as_bucket_view
    in_backward: bool = True  # reduce_in="backward"
    of_model: bool = False  # of a DistributedDataParallel, rather than of an optimizer


_reducers: weakref.WeakSet[GradientReducer] = weakref.WeakSet()


def owner_of(params: Iterable[torch.Tensor]) -> GradientReducer | None:
    """Return what reduces the gradient of one of these already, if anything does."""
    wanted = set(params)
    for _ in range(2):
        found = next((one for one in _reducers if one.watches(wanted)), None)
        if found is None:
            break
        gc.collect()  # It may be one of an optimizer that nobody uses any longer.
    return found


class GradientReducer:
    """Reduces the gradients of one optimizer's parameters.

    It follows the optimizer's parameter groups: what is frozen, thawed or added between two cycles
    takes effect with the next one, and every rank does the same. On a rank that is no member of the
    process set it does nothing.
    """

    def __init__(
        self,
        name: str,
        read_groups: Callable[[], list[dict[str, Any]]],
        names: Mapping[torch.Tensor, str],
        settings: Settings,
    ) -> None:
        """Watch the parameters.

        Args:
            name: begins the names of this reducer's operations; unique on this rank.
            read_groups: gives the optimizer's param_groups.
            names: of the parameters, as far as known.
            settings: how gradients are reduced.
        """
        self.settings = settings
        self.takes_part = bool(settings.reduction.process_set.included())
        self._name = name
        self._read_groups = read_groups
        self._names = dict(names)
        self._hooks: dict[torch.Tensor, Any] = {}
        weakref.finalize(self, _remove_all, self._hooks)
        self._layout: list[torch.Tensor] = []
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[torch.Tensor, Bucket] = {}
        self._passes: dict[torch.Tensor, int] = {}  # by parameter, in this cycle
        self._backwards = 0  # that ended in this cycle
        self._steps = 0  # since all ranks began to count
        self._restarts = operation_names.restarts()
        self._replicas = ReplicaCheck(name, settings.reduction.process_set)
        self._end = BackwardEnd(_calling(self))
        self._failure: HvdliteError | None = None  # of this cycle's submissions
        # What was reduced and may not be added to; only where sums are made.
        self._sums: dict[torch.Tensor, weakref.ref[torch.Tensor]] = {}
        self._open = False
        self._reduced = False  # gradients are reduced, and nothing came since
        self._paused = False
        self._weight: float | None = None  # of this cycle
        self._weighed = False
        self._thread = threading.get_ident()
        self._update_layout()
        _reducers.add(self)

    def watches(self, params: set[torch.Tensor]) -> bool:
        """Say whether it reduces the gradient of one of these."""
        return not params.isdisjoint(self._hooks)

    @property
    def in_flight(self) -> bool:
        """Whether gradients are being reduced right now."""
        return self._open and any(bucket.submitted for bucket in self._buckets)

    @property
    def waiting(self) -> bool:
        """Whether gradients are being reduced, or are ready to be."""
        return any(n >= self.settings.passes for n in self._passes.values()) or self.in_flight

    @property
    def parameter_names(self) -> dict[torch.Tensor, str]:
        """The names by parameter."""
        return dict(self._names)

    def may_synchronize(self) -> bool:
        """Say whether the thread that trains is asking, outside of backward."""
        in_backward = torch._C._current_graph_task_id() != -1
        return not in_backward and threading.get_ident() == self._thread

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let backward accumulate locally."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def set_passes(self, passes: int) -> None:
        """Change how many backward passes a step has."""
        if self._passes:
            raise HvdliteError("backward_passes_per_step changes between step() and backward()")
        self.settings.passes = ops.check_passes(passes)

    def set_weight(self, weight: Weight) -> None:
        """Change what this rank's gradients count from the next reduction on."""
        if self.in_flight:
            raise HvdliteError("set the weight before backward(), which sends the gradients")
        self.settings.weight = weight

    # The hook, in the thread of backward.

    def _watch(self, param: torch.Tensor) -> None:
        reference = weakref.ref(self)

        def hook(param: torch.Tensor) -> None:
            reducer = reference()
            if reducer is not None:
                reducer._on_gradient(param)

        self._hooks[param] = param.register_post_accumulate_grad_hook(hook)

    def _on_gradient(self, param: torch.Tensor) -> None:
        self._open_cycle()
        bucket = self._bucket_of.get(param)
        if bucket is None:
            return  # No longer one of the optimizer's.
        passes = self._passes.get(param, 0) + (not self._paused)
        if bucket.submitted or passes > self.settings.passes:
            self._refuse_pass(param)
        if self._paused:
            return
        if self.settings.in_backward:
            self._end.expect()
        self._passes[param] = passes
        if passes == self.settings.passes:
            bucket.missing -= 1
            if bucket.missing == 0:
                self._submit(bucket, blocking=False)

    def _refuse_pass(self, param: torch.Tensor) -> None:
        name, passes = self._names[param], self.settings.passes
        if self.settings.in_backward:
            raise HvdliteError(
                f"the gradient of {name} was computed more than backward_passes_per_step={passes} "
                "times before it was reduced. Has backward() raised before? Then call "
                "optimizer.zero_grad(). Do checkpoints with use_reentrant=True share the "
                "parameter? Then set use_reentrant=False"
            )
        raise HvdliteError(
            f"the gradient of {name} was computed more than "
            f"backward_passes_per_step={passes} times before step(); raise "
            "backward_passes_per_step to the number of backward() calls per step, run the "
            "earlier ones under optimizer.no_sync(), or call optimizer.synchronize() in between"
        )

    def _on_backward_end(self) -> None:
        """End the cycle with its last backward, in the thread of that.

        Several reducers may be about to, in another order on each rank. So all submit before one
        waits.
        """
        self._backwards += 1
        if self._open and self._backwards >= self.settings.passes:
            self._submit_rest(blocking=False)
            queue(self._wait)

    def _submit(self, bucket: Bucket, blocking: bool) -> None:
        if not self._weighed:
            weight = self.settings.weight
            weight = weight() if callable(weight) else weight
            self._weight = None if weight is None else float(weight)
            self._weighed = True
        try:
            self._replicas.start(self._layout, self._names)
            bucket.submit(self.reduction, blocking, self._steps)
        except CollectiveError:
            self._end_cycle()  # There is nothing left to wait for.
            raise

    @property
    def reduction(self) -> Reduction:
        """How this cycle's gradients are combined, or were in the last one."""
        return self.settings.reduction._replace(weight=self._weight)

    # The cycle.

    def _open_cycle(self) -> None:
        if self._open:
            return
        self._update_layout()
        for param, reduced in self._sums.items():
            if param.grad is not None and reduced() is param.grad:
                raise HvdliteError(
                    f"backward() would add to the gradient of {self._names[param]}, which is a sum "
                    "over the ranks since the last one and cannot be summed again; with op=hvd.Sum "
                    "say backward_passes_per_step=, run all but the last backward() of a step "
                    "under optimizer.no_sync(), or call optimizer.zero_grad() to drop it"
                )
        if self._restarts != operation_names.restarts():
            # Ranks have missed steps: everybody starts anew.
            self._restarts = operation_names.restarts()
            self._steps = 0
        self._open = True
        self._reduced = False
        self._backwards = 0

    def synchronize(self) -> None:
        """Reduce what is not reduced yet, and wait for all of it.

        Raises:
            HvdliteError: the first thing that went wrong; the cycle is over all the same.
        """
        if self._reduced:
            return
        self._open_cycle()
        self._submit_rest(blocking=True)
        self._wait()
        if self.takes_part and not self._buckets:
            self._replicas.begin_anew()  # as the others do if they train something
            meet_without_parameters(self._name, self.settings.reduction.process_set)

    def before_forward(self) -> None:
        """Bring to its end what a backward that raised began, if one did."""
        if self._open and self.waiting and self.may_synchronize():
            self._drop_what_is_under_way()

    def _drop_what_is_under_way(self) -> None:
        """Bring to its end what a backward that raised began, for the ranks that wait for it."""
        self._submit_rest(blocking=True)
        self._wait(dropped=True)

    def _submit_rest(self, blocking: bool) -> None:
        for bucket in self._buckets:
            if not bucket.submitted:
                try:
                    self._submit(bucket, blocking)
                except HvdliteError as error:
                    self._failure = self._failure or error

    def _wait(self, dropped: bool = False) -> None:
        failure = self._failure
        for bucket in self._buckets:
            if bucket.submitted:
                try:
                    bucket.finish(self._weight != 0, dropped)
                except MismatchError as error:
                    failure = failure or self._explain(bucket, error)
                except HvdliteError as error:
                    failure = failure or error
        differing = None
        try:
            differing = self._replicas.finish()
        except HvdliteError as error:
            failure = failure or error
        self._end_cycle()
        if failure is not None:
            raise failure
        self._reduced = True
        if self.settings.in_backward and self.settings.reduction.op == ops.Sum:
            grads = ((param, param.grad) for param in self._layout)
            self._sums = {param: weakref.ref(one) for param, one in grads if one is not None}
        warn(differing)

    def _explain(self, bucket: Bucket, error: MismatchError) -> MismatchError:
        if bucket is not self._buckets[0]:
            return error
        buckets = [one.named_parameters for one in self._buckets]
        in_flight = [name for one in self._buckets for name in one.operations]
        in_flight += self._replicas.operations
        self._replicas.begin_anew()
        self._layout = []  # What buckets have learnt is not the same on all ranks: form them anew.
        return explain(self._name, buckets, in_flight, self.settings.reduction.process_set, error)

    def _end_cycle(self) -> None:
        for bucket in self._buckets:
            bucket.reset()
        self._replicas.forget()
        self._passes.clear()
        self._end.forget()
        self._failure = None
        self._open = False
        self._weighed = False

    def count_step(self) -> None:
        """Say that the optimizer made a step, or would have."""
        self._steps += 1
        self.expect_gradients()

    def expect_gradients(self) -> None:
        """Say that the gradients, reduced or not, have been used: the next ones are new."""
        self._reduced = False
        self._sums.clear()

    def before_zero_grad(self) -> None:
        """Refuse to zero gradients that wait to be reduced, on this rank or on another.

        After a backward that raised, bring to its end what others may wait for.
        """
        if self.settings.in_backward and self.waiting and self.may_synchronize():
            self._drop_what_is_under_way()
        if self.waiting:
            raise HvdliteError(
                "zero_grad() between backward() and step() would race with the reduction of the "
                "gradients; call step() first, or synchronize() to drop them after that. Gradients "
                "that a loss leaves here by the way are best made under optimizer.no_sync()"
            )
        if self._open:
            self._end_cycle()
        self.expect_gradients()

    # The layout.

    def _update_layout(self) -> None:
        """Follow the parameter groups: watch new parameters, form the buckets anew."""
        params = []
        for number, group in enumerate(self._read_groups() if self.takes_part else ()):
            for index, param in enumerate(group["params"]):
                if param.requires_grad:
                    params.append(param)
                    if param not in self._names:
                        self._names[param] = f"parameter.{number}.{index}"
        if len(params) == len(self._layout) and all(map(lambda a, b: a is b, params, self._layout)):
            return
        for param in self._hooks.keys() - set(params):
            self._hooks.pop(param).remove()
        for param in params:
            if param not in self._hooks:
                self._watch(param)
        self._layout = params
        formed = self._form_buckets(params)
        slots = Slots(formed) if self.settings.bucket_view else None
        names = [[self._names[param] for param in bucket] for bucket in formed]
        layout = digest(names)
        self._buckets = [
            Bucket(
                f"{self._name}.{number}",
                bucket,
                names[number],
                self.settings.compression,
                self.settings.sparse_as_dense,
                None if slots is None else functools.partial(slots.of, number),
                layout if number == 0 else None,
            )
            for number, bucket in enumerate(formed)
        ]
        self._bucket_of = {param: bucket for bucket in self._buckets for param in bucket.params}

    def _form_buckets(self, params: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        groups = self.settings.groups
        if not isinstance(groups, int):
            return follow_groups(params, groups)
        if groups > 0:
            return split_evenly(params, groups)
        return plan_buckets(params, self.settings.cap_bytes)


def _calling(reducer: GradientReducer) -> Callable[[], None]:
    """Call `_on_backward_end` of a reducer as long as there is one."""
    reference = weakref.ref(reducer)

    def call() -> None:
        reducer = reference()
        if reducer is not None:
            reducer._on_backward_end()

    return call


def _remove_all(hooks: dict[torch.Tensor, Any]) -> None:
    for hook in hooks.values():
        hook.remove()
