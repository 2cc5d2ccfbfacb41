"""Decides when gradients are reduced, by hooks on the parameters and a cycle from backward to step.

A *pass* is one backward through a parameter. A *cycle* begins with the first gradient after the
last cycle and ends in `synchronize`. In a cycle a bucket is submitted, from inside backward, when
each of its parameters has had its passes, so that communication overlaps with the rest of backward
(where that pays). `synchronize` submits all other buckets, and waits for all. It runs at the end of
the last backward of the cycle, so that gradients are reduced when backward() returns. On a rank
without a backward it runs in `step`.

A further backward may add to gradients that are reduced and not yet used; they are then reduced
again. Those before it are the same on all ranks, so an average keeps them. A sum is refused. The
same holds in `step` if the script has put another tensor into a `grad` meanwhile.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hvdlite import _core, basics, ops
from hvdlite.elastic import steps
from hvdlite.errors import CollectiveError, HvdliteError, UnreducedGradientsWarning
from hvdlite.optimizers import check_finite, check_passes, finite_level
from hvdlite.process_sets import ProcessSet, member_id
from hvdlite.torch.bucket_memory import differs, explain, meet_without_parameters
from hvdlite.torch.buckets import Bucket, GradientExchange, Weight
from hvdlite.torch.collectives.submit import Reduction
from hvdlite.torch.collectives.tensors import is_finite
from hvdlite.torch.dynamo import queue, untraced
from hvdlite.torch.gradient_hooks import BackwardEnd, ReadGroups, WatchedParameters, calling
from hvdlite.torch.replicas import ReplicaCheck, warn


class GradientReducer:
    """Reduces the gradients of one optimizer's parameters."""

    # It follows the optimizer's parameter groups: a parameter that is frozen, thawed or added
    # between two cycles, on every rank, takes effect with the next cycle. One that is thawed or
    # added between two backwards of a cycle is reduced in it. On a rank that is not a member of the
    # process set the reducer does nothing.

    def __init__(
        self,
        exchange: GradientExchange,
        read_groups: ReadGroups,
        names: Mapping[torch.Tensor, str],
        title: str,
    ) -> None:
        """Watch the parameters, whose gradients no other reducer reduces."""
        # `title` is what reduces the gradients, for messages.
        self.settings, self.title = exchange.settings, title
        hook = untraced(calling(self, "_on_gradient"))
        self._watched = WatchedParameters(read_groups, names, hook)
        replicas = ReplicaCheck(exchange.name, exchange.settings.reduction.process_set)
        self.buckets = Buckets(exchange, self._watched, replicas)
        self._cycle = Cycle()
        self._restarts = ops.name_restarts()
        self._overlaps = True
        self._end = BackwardEnd(calling(self, "_on_backward_end"))
        self._reduced = ReducedGradients(self._watched.names)
        self._paused = self._warned = False
        self._refusal: str | None = None
        self._stepped_in = -1  # The last step was called in the backward of this number.
        self._update_layout()

    @property
    def takes_part(self) -> bool:
        """Whether this rank is a member of the process set."""
        return self.buckets.takes_part

    @property
    def in_flight(self) -> bool:
        """Whether gradients are being reduced right now."""
        return self._cycle.open and self.buckets.in_flight

    @property
    def reduced(self) -> bool:
        """Whether the gradients are reduced, and no step has used them."""
        return self._reduced.current

    @property
    def waiting(self) -> bool:
        """Whether gradients are being reduced, or are ready to be."""
        return any(n >= self.settings.passes for n in self._cycle.passes.values()) or self.in_flight

    @property
    def name(self) -> str:
        """The prefix of the names of its operations."""
        return self.buckets.name

    @property
    def read_groups(self) -> ReadGroups:
        """Returns the optimizer's param_groups."""
        return self._watched.read_groups

    @property
    def parameter_names(self) -> dict[torch.Tensor, str]:
        """The names by parameter; more may be added."""
        return self._watched.names

    def check_added_group(self, groups: list[dict[str, Any]]) -> None:
        """Take back the last group, and raise, if this step would use its gradients unreduced."""
        if self.reduced and any(param.grad is not None for param in groups[-1]["params"]):
            groups.pop()
            raise HvdliteError(
                "add_param_group() between backward() and step(): the gradients that its "
                "parameters have would not be reduced; call it after step() or zero_grad()"
            )

    def may_synchronize(self) -> bool:
        """Return whether the training thread is calling, outside of backward."""
        return self._end.outside()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let backward accumulate locally."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def set_passes(self, passes: int) -> None:
        """Change the number of backward passes per step."""
        if self._cycle.passes:
            raise HvdliteError(
                "backward_passes_per_step can only be changed between step() and backward()"
            )
        self.settings.passes = check_passes(passes)

    @property
    def exchange(self) -> GradientExchange:
        """How the gradients travel."""
        return self.buckets.exchange

    def set_weight(self, weight: Weight) -> None:
        """Change the weight of this rank's gradients from the next reduction on."""
        if self.in_flight:
            raise HvdliteError("set the weight before backward(), which sends the gradients")
        self.settings.weight = weight

    def refuse_backward(self, why: str) -> None:
        """Refuse each backward() that does not run while `paused`."""
        self._refusal = why

    # The thread of backward calls the hook.

    def _on_gradient(self, param: torch.Tensor) -> None:
        if self._refusal is not None and not self._paused:
            raise HvdliteError(self._refusal)
        if param.grad is None:  # A hook of the script has used it.
            if self._stepped_in != torch._C._current_graph_task_id():
                raise used_too_early(self._watched.names[param])
            return
        if not self._cycle.open and not self._overlaps:
            basics.engine().note_gradient()  # Live figures then tell what backward takes.
        self._open_cycle()
        bucket = self.buckets.of(param)
        if bucket is None:
            return  # The parameter no longer belongs to the optimizer.
        passes, again = self._cycle.count(param, self._paused)
        if bucket.submitted or passes > self.settings.passes:
            refuse_pass(self._watched.names[param], self.settings.passes)
        if self._paused:
            self._cycle.paused.add(torch._C._current_graph_task_id())
            return
        self._end.expect()
        if again:
            return
        self._cycle.passes[param] = passes
        if passes < self.settings.passes:
            return
        if self._cycle.backwards or self._cycle.paused:
            self._follow_changes()
            bucket = self.buckets.of(param)
        if bucket is not None and self._cycle.completes(bucket) and self._overlaps:
            self._submit(bucket, blocking=False)

    def _on_backward_end(self) -> None:
        """End the cycle with its last backward, in the thread of that backward."""
        # Several reducers may end their cycles here, in a different order on each rank. So all
        # submit before the first one waits. If nothing was sent early, this thread runs the engine
        # while it waits: to wake another one costs more.
        last = self._cycle.backwards + 1 >= self.settings.passes
        reduces = self._cycle.open and last
        if reduces:
            self._follow_changes()
            self._look_for_used()
        self._cycle.backwards += 1
        if reduces:
            self._submit_rest(blocking=not self._overlaps)
            queue(self._wait)

    def _look_for_used(self) -> None:
        """Make it the cycle's failure if a hook of the script has used a gradient too early."""
        for param, passes in self._cycle.passes.items():
            if param.grad is None and passes >= self.settings.passes:
                error = used_too_early(self._watched.names[param])
                self._cycle.failure = self._cycle.failure or error

    def _submit(self, bucket: Bucket, blocking: bool) -> None:
        try:
            self.buckets.submit(bucket, blocking, fresh=bool(self._cycle.passes))
        except CollectiveError:
            self._end_cycle()  # There is nothing left to wait for.
            raise

    # These methods begin and end a cycle.

    def _open_cycle(self) -> None:
        if self._restarts != ops.name_restarts():
            self._begin_anew()
        if self._cycle.open:
            return
        self._update_layout()
        if self.settings.reduction.op == ops.Sum:
            self._reduced.check_sums(self._watched.params)
        self._cycle.open = True
        self._cycle.backwards = 0
        self._reduced.current = False
        self.buckets.begin()

    def _begin_anew(self) -> None:
        """Count steps from zero, as all ranks do, because some have missed steps."""
        if self._cycle.open and basics.in_elastic_job():
            self._end_cycle()  # It began before the ranks met at a boundary.
        elif self.in_flight:
            return  # The next cycle begins anew.
        self._restarts = ops.name_restarts()
        self._overlaps = _overlaps(self.settings.overlap, self._watched.params)
        self.buckets.begin_anew()
        if self._cycle.open:
            self.buckets.begin()  # What was accumulated before `join` belongs to the new count.

    def submit(self) -> None:
        """Start to reduce the gradients that are not under way; `synchronize` waits for them."""
        if not self._all_reduced():
            self._open_cycle()
            self._follow_changes()
            self._submit_rest(blocking=False)

    def synchronize(self) -> None:
        """Reduce the gradients that are not reduced yet, and wait for all of them."""
        # The cycle is over also if this raises the first error.
        if self._all_reduced():
            return
        self._open_cycle()
        self._reduce_now()
        if self.takes_part:
            self.buckets.meet()

    def _all_reduced(self) -> bool:
        """Return whether the gradients that the parameters have are the reduced ones."""
        if not self._reduced.current:
            return False
        param = self._reduced.replaced(self._watched.params)
        if param is None:
            return True
        if self.settings.reduction.op == ops.Average and self.exchange.of_one_step:
            return False
        raise HvdliteError(
            f"the gradient of {self._watched.names[param]} was replaced by another tensor after "
            "backward() had reduced it, and only an average may be reduced again: change gradients "
            "in place, or call zero_grad() before gradients are computed without backward()"
        )

    def synchronize_in_step(self) -> None:
        """Do as `synchronize`; warn once if a backward has left gradients that are not reduced."""
        left = self._cycle.open and self.may_synchronize()
        if left and not self._warned:
            self._warned = True
            warn_of_unreduced(self.title, self.settings.passes)
        self.synchronize()

    def _reduce_now(self, dropped: bool = False) -> None:
        self._follow_changes()
        self._submit_rest(blocking=True)
        self._wait(dropped)

    def _submit_rest(self, blocking: bool) -> None:
        for bucket in self.buckets.all:
            if not bucket.submitted:
                try:
                    self._submit(bucket, blocking)
                except HvdliteError as error:
                    self._cycle.failure = self._cycle.failure or error
        if self._cycle.open:
            self.buckets.end_transaction()

    def _wait(self, dropped: bool = False) -> None:
        failure, differing = self.buckets.wait(self._cycle.failure, dropped)
        self._end_cycle()
        if failure is not None:
            raise failure
        self._reduced.current = self.takes_part  # A later member looks again in its next step.
        self._reduced.note(self._watched.params)
        warn(differing)

    def _end_cycle(self) -> None:
        self.buckets.reset()
        self._end.forget()
        self._cycle = Cycle()

    def drop_accumulated(self) -> None:
        """Drop gradients that were accumulated on this rank, unless some of them were sent."""
        if self._cycle.open and not self.in_flight:
            for param in self._watched.params:
                param.grad = None
            self._end_cycle()

    def count_step(self) -> None:
        """Count a step of the optimizer, also one that it skipped."""
        self.buckets.steps += 1
        self._stepped_in = torch._C._current_graph_task_id()
        self.expect_gradients()

    def expect_gradients(self) -> None:
        """Note that the gradients, reduced or not, have been used: the next ones are new."""
        self._reduced.use()

    def before_zero_grad(self) -> None:
        """Refuse to zero gradients that are not reduced yet."""
        # After a backward that raised, other ranks may wait for the reductions.
        if self.waiting and self.may_synchronize():
            self._reduce_now(dropped=True)
        if self.waiting:
            raise HvdliteError(
                "zero_grad() between backward() and step() would race with the reduction of the "
                "gradients; call step() first, or synchronize() to drop them after that. If "
                "another loss (a GAN's) also writes these gradients, run its backward() under "
                "optimizer.no_sync()"
            )
        if self._cycle.open:
            self._end_cycle()
        self.expect_gradients()

    # These methods follow the layout.

    def _follow_changes(self) -> None:
        """Follow what was added or thawed between two backwards of the cycle under way."""
        # A parameter that was frozen meanwhile keeps the gradient of the earlier ones.
        if self._cycle.ended != self._cycle.followed and not self.in_flight:
            self._cycle.followed = self._cycle.ended
            self._update_layout(keeps_frozen=True)

    def _update_layout(self, keeps_frozen: bool = False) -> None:
        """Follow the parameter groups: watch new parameters, form the buckets anew."""
        watched = self._watched
        if not watched.update(self.takes_part, keeps_frozen):
            return
        self.buckets.make()
        self._overlaps = _overlaps(self.settings.overlap, watched.params)


def _overlaps(given: bool | None, params: Sequence[torch.Tensor]) -> bool:
    """Return whether buckets are submitted during backward, rather than all at its end."""
    # On GPUs backward() returns before its work is done. On CPUs communication hides behind compute
    # where it has a core of its own; otherwise it takes more time from backward than it hides.
    # Each rank decides alone: results do not depend on it.
    if given is not None:
        return given
    threads = torch.get_num_threads() * basics.local_size()
    return any(param.is_cuda for param in params) or _core.available_cores() > threads


class Buckets:
    """The buckets of one reducer. Used by the threads that use the reducer, one at a time."""

    def __init__(
        self,
        exchange: GradientExchange,
        watched: WatchedParameters,
        replicas: ReplicaCheck,
    ) -> None:
        """Make no buckets yet."""
        self.exchange = exchange
        self.name = exchange.name
        self._weight: float | None = None  # This rank's gradients of the last cycle had it.
        self._weighed = False  # The weight of this cycle is known.
        self.steps = 0  # All ranks count steps alike, from the last `begin_anew`.
        self.all: Sequence[Bucket] = ()  # Backward completes the buckets in this order.
        self._by_param: dict[torch.Tensor, Bucket] = {}
        self._settings = exchange.settings
        self._watched = watched
        self._replicas = replicas
        self._transaction = step_transaction(self.name, self._settings.reduction.process_set)
        self._takes_part = False
        self._checks_finite = finite_level() > 0

    @property
    def takes_part(self) -> bool:
        """Whether this rank is a member of the process set."""
        # In an elastic job that may change at a boundary. Of a process set that has ended it is the
        # last answer: members then get the error of its operations rather than their own gradients.
        included = self._settings.reduction.process_set.included()
        if included is not None:
            self._takes_part = included
        return self._takes_part

    def make(self) -> None:
        """Make the buckets of the parameters that are watched now."""
        self.all = self.exchange.make_buckets(self._watched.params, self._watched.names)
        self._by_param = {param: bucket for bucket in self.all for param in bucket.params}

    def of(self, param: torch.Tensor) -> Bucket | None:
        """Return the bucket of a parameter; None if it no longer belongs to the optimizer."""
        return self._by_param.get(param)

    @property
    def in_flight(self) -> bool:
        """Whether gradients are being reduced right now."""
        return any(bucket.submitted for bucket in self.all)

    @property
    def reduction(self) -> Reduction:
        """How the gradients of this cycle are combined; between cycles, those of the last one."""
        return self._settings.reduction._replace(weight=self._weight)

    @property
    def _counts(self) -> bool:
        return self._weight != 0

    def begin_anew(self) -> None:
        """Count steps from zero, and forget what other ranks may not remember alike."""
        self.steps = 0
        self.exchange.begin_anew()
        for bucket in self.all:
            bucket.begin_anew()

    def begin(self) -> None:
        """Begin a cycle."""
        self.exchange.begin()
        if self._transaction is not None:
            self._transaction.begin()

    def submit(self, bucket: Bucket, blocking: bool, fresh: bool) -> None:
        """Submit one bucket or raise; `fresh` says that this rank has a gradient in the cycle."""
        if not self._weighed:
            weight = self._settings.weight
            weight = weight() if callable(weight) else weight
            self._weight = None if weight is None else float(weight)
            self._weighed = True
        if self._checks_finite:
            finite = ((name, is_finite(param.grad)) for name, param in bucket.named_parameters)
            params = self._watched.params
            check_finite(self.name, finite, self.steps + 1, lambda: not all(map(is_finite, params)))
        self._replicas.start(self._watched.params, self._watched.names)
        reduction = self.exchange.reduction(self.reduction, fresh)
        if self._transaction is not None:
            reduction = reduction._replace(transaction=self._transaction.name)
        bucket.submit(reduction, blocking, self.steps if self.exchange.of_one_step else 0)

    def end_transaction(self) -> None:
        """Submit the commit of the step once nothing else will be submitted in it."""
        if self._transaction is not None and self.all:
            self._transaction.end()

    def wait(
        self, failure: HvdliteError | None, dropped: bool
    ) -> tuple[HvdliteError | None, str | None]:
        """Wait for all; return the cycle's first error, and the replica check's warning."""
        differing = None
        for bucket in self.all:
            if bucket.submitted:
                try:
                    bucket.finish(self._counts, dropped)
                except HvdliteError as error:
                    explained = self.explain(bucket, error)
                    failure = failure or explained
        try:
            differing = self._replicas.finish()
        except HvdliteError as error:
            failure = failure or error
        if self._transaction is not None:
            ended = self._transaction.finish(dropped or failure is not None)
            failure = failure or ended
        return failure, differing

    def explain(self, bucket: Bucket, error: HvdliteError) -> HvdliteError:
        """Say why buckets differ; all ranks take part, with another failure, too."""
        if bucket is not self.all[0] or not differs(error):
            return error
        named = [one.named_parameters for one in self.all]
        in_flight = [name for one in self.all for name in one.operations]
        in_flight += self._replicas.operations
        self._replicas.begin_anew()
        # The buckets are formed anew: their state is not the same on all ranks.
        self._watched.forget_order()
        return explain(self.name, named, in_flight, self._settings.reduction.process_set, error)

    def meet(self) -> None:
        """Meet the other ranks' first bucket if this rank trains nothing; raise if they train."""
        if not self.all:
            self._replicas.begin_anew()  # The other ranks do so if they train something.
            meet_without_parameters(self.name, self._settings.reduction.process_set)

    def reset(self) -> None:
        """Forget the cycle under way, which is over."""
        for bucket in self.all:
            bucket.reset()
        self._replicas.forget()
        if self._transaction is not None:
            self._transaction.drop()
        self._weighed = False


@dataclass
class Cycle:
    """What is known of the cycle under way; between two cycles of the next one: nothing."""

    open: bool = False
    passes: dict[torch.Tensor, int] = field(default_factory=dict)  # The keys are parameters.
    paused: set[int] = field(default_factory=set)  # Backwards of these numbers only accumulate.
    backwards: int = 0  # It counts those that have ended, without paused ones.
    followed: int = 0  # So many backwards had ended when the parameter groups were last read.
    # It has the last backward of each parameter.
    seen_in: dict[torch.Tensor, int] = field(default_factory=dict)
    # It counts the gradients of each bucket.
    ready: dict[Bucket, int] = field(default_factory=dict)
    failure: HvdliteError | None = None  # The first submission that failed has this error.

    @property
    def ended(self) -> int:
        """How many backwards have ended, with paused ones; the script may run between two."""
        return self.backwards + len(self.paused)

    def count(self, param: torch.Tensor, paused: bool) -> tuple[int, bool]:
        """Return a parameter's passes with this gradient, and if it had one in this backward."""
        # Checkpoints with use_reentrant=True give a parameter that they share several gradients.
        again = not paused and self.seen_in.get(param) == self.backwards
        if not paused:
            self.seen_in[param] = self.backwards
        return self.passes.get(param, 0) + (not paused and not again), again

    def completes(self, bucket: Bucket) -> bool:
        """Count one more gradient of a bucket that is ready, and return whether it was the last."""
        ready = self.ready[bucket] = self.ready.get(bucket, 0) + 1
        return ready == len(bucket.params)


def refuse_pass(name: str, passes: int) -> None:
    """Raise an error: a parameter has one more gradient than the optimizer waits for."""
    raise HvdliteError(
        f"the gradient of {name} was computed more than backward_passes_per_step={passes} "
        "times before it was reduced. Has backward() raised before? Then call "
        "optimizer.zero_grad(). Do checkpoints with use_reentrant=True share the "
        "parameter? Then set use_reentrant=False, or overlap=False"
    )


def used_too_early(name: str) -> HvdliteError:
    """Return the error of a gradient that is gone before it was reduced."""
    error: HvdliteError = HvdliteError(
        f"the gradient of {name} was gone before it was reduced: a hook of the script has used it "
        "with another optimizer, on each rank by itself; make the optimizer that the hook steps a "
        "hvd.DistributedOptimizer"
    )
    return error


def warn_of_unreduced(title: str, passes: int) -> None:
    """Warn that step() reduces what backward() has promised to reduce."""
    warnings.warn(
        f"step() of {title} reduces gradients that the last backward() has left as they are on "
        f"this rank: fewer than backward_passes_per_step={passes} ran since the last step, or all "
        "of them under no_sync(). What has read the gradients since then, such as "
        "clip_grad_norm_(), saw this rank's own; call optimizer.synchronize() before it",
        UnreducedGradientsWarning,
        stacklevel=4,
    )


class ReducedGradients:
    """What is known of the gradients that one reducer has reduced."""

    def __init__(self, names: Mapping[torch.Tensor, str]) -> None:
        """Begin without gradients; `names` are those of the parameters, and may grow."""
        # It says whether gradients are reduced, none was computed since, and no step has used them.
        self.current = False
        self._names = names  # It keeps all parameters alive.
        # The keys are the ids of parameters, as a tensor's own hash takes long.
        self._reduced: dict[int, weakref.ref[torch.Tensor]] = {}

    def note(self, params: Iterable[torch.Tensor]) -> None:
        """Note that the gradients of these parameters are reduced."""
        # Parameters that were frozen meanwhile may still have theirs.
        for param in params:
            gradient = param.grad
            if gradient is not None:
                self._reduced[id(param)] = weakref.ref(gradient)

    def replaced(self, params: Iterable[torch.Tensor]) -> torch.Tensor | None:
        """Return the first parameter whose `grad` is another tensor than the reduced one."""
        # What the script changes in place, as clipping does, still is the reduced gradient.
        for param in params:
            gradient, reduced = param.grad, self._reduced.get(id(param))
            if gradient is not None and (reduced is None or reduced() is not gradient):
                return param
        return None

    def check_sums(self, params: Iterable[torch.Tensor]) -> None:
        """Refuse to sum gradients again that are sums over the ranks already."""
        for param in params:
            reduced = self._reduced.get(id(param))
            if reduced is None or param.grad is None or reduced() is not param.grad:
                continue
            name = self._names[param]
            raise HvdliteError(
                f"backward() would add to the gradient of {name}, which is a sum "
                "over the ranks since the last one and cannot be summed again; with op=hvd.Sum "
                "say backward_passes_per_step=, run all but the last backward() of a step "
                "under optimizer.no_sync(), or call optimizer.zero_grad() to drop it"
            )

    def use(self) -> None:
        """Note that the optimizer has used them, or that they are zeroed."""
        self.current = False
        self._reduced = {}


class StepTransaction:
    """The transaction of one reducer, step after step. Used by one thread at a time."""

    def __init__(self, name: str, process_set: ProcessSet) -> None:
        """Make it for a reducer, by its name, which is unique on this rank."""
        self.name = name  # The collectives of a step have it, too.
        self._process_set = process_set
        self._commit: _core.Handle | None = None
        self.begun = False  # It says whether a step has gradients that are not used yet.
        steps.announced()

    def begin(self) -> None:
        """Note the first gradient of a step."""
        self.begun = True
        steps.begun()

    def end(self) -> None:
        """Submit the commit behind the step's collectives, or raise; later calls do nothing."""
        # It wakes the engine's thread: the first wait is for a bucket, which ends with the commit.
        if self._commit is None:
            process_set = member_id(self._process_set)
            self._commit = basics.engine().commit(f"{self.name}.commit", self.name, process_set)

    def finish(self, dropped: bool) -> HvdliteError | None:
        """Wait for the commit, and return its error."""
        commit, self._commit, self.begun = self._commit, None, False
        if commit is None:
            return None
        try:
            commit.wait()
        except HvdliteError as error:
            steps.dropped()
            failure: HvdliteError = error
            return failure
        if dropped:
            steps.dropped()
        else:
            steps.committed(commit.epoch)
        return None

    def drop(self) -> None:
        """Forget a step that was not finished."""
        self._commit, self.begun = None, False
        steps.dropped()


def step_transaction(name: str, process_set: ProcessSet) -> StepTransaction | None:
    """Make the transaction of a reducer; in a job that is not elastic there is none."""
    return StepTransaction(name, process_set) if basics.in_elastic_job() else None
