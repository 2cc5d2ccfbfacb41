"""Decides when gradients are reduced: in a *cycle*, of so many *passes* through each parameter.

Where it pays, backward submits a bucket as soon as its parameters have had their passes; the end of
the last backward, or `step` on a rank without one, submits the others and waits for all.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hvdlite import _core, basics, ops
from hvdlite.errors import CollectiveError, HvdliteError, UnreducedGradientsWarning
from hvdlite.optimizers import check_finite, check_passes, finite_level
from hvdlite.process_sets import ProcessSet, member_id
from hvdlite.rendezvous import epochs
from hvdlite.torch.bucket_memory import differs, meet_without_parameters, other_layout
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
    # process set the reducer does nothing. Beside the gradients of a cycle travel the sums of the
    # replica check, and in an elastic job the commit of the step's transaction.

    def __init__(
        self,
        exchange: GradientExchange,
        read_groups: ReadGroups,
        names: Mapping[torch.Tensor, str],
        title: str,
    ) -> None:
        self.exchange, self.settings = exchange, exchange.settings
        self.name, self.title = exchange.name, title  # Messages call the owner by its title.
        self.read_groups = read_groups
        self._watched = WatchedParameters(
            read_groups, names, untraced(calling(self, "_on_gradient"))
        )
        self.parameter_names = self._watched.names  # More may be added.
        self._end = BackwardEnd(calling(self, "_on_backward_end"))
        self._buckets: Sequence[Bucket] = ()  # Backward completes the buckets in this order.
        self._bucket_of: dict[torch.Tensor, Bucket] = {}
        process_set = self.settings.reduction.process_set
        self._replicas = ReplicaCheck(self.name, process_set)
        self._transaction = StepTransaction(self.name, process_set)
        self._checks_finite = finite_level() > 0
        self._takes_part = False
        self._overlaps = True
        self._steps = 0  # All ranks count steps alike, from the last restart.
        self._restarts = ops.name_restarts()
        self._stepped_in = -1  # The last step was called in the backward of this number.
        self._cycle = Cycle()
        self._weight: float | None = None  # This rank's gradients of the last cycle had it.
        self.reduced = False  # Gradients are reduced, none was computed since, no step used them.
        # The reduced gradients. The keys are the ids of parameters, as a tensor's hash takes long.
        self._gradients: dict[int, weakref.ref[torch.Tensor]] = {}
        self._paused = exchange.in_step
        self._warned = False
        self.refusal: str | None = None  # Why each backward() outside of `paused` is an error.
        self._update_layout()

    @property
    def takes_part(self) -> bool:
        # In an elastic job that may change at a boundary. Of a process set that has ended it is the
        # last answer: members then get the error of its operations rather than their own gradients.
        included = self.settings.reduction.process_set.included()
        if included is not None:
            self._takes_part = included
        return self._takes_part

    @property
    def in_flight(self) -> bool:
        return self._cycle.open and any(bucket.submitted for bucket in self._buckets)

    @property
    def reduction(self) -> Reduction:
        """How the gradients of this cycle are combined; between cycles, those of the last one."""
        transaction = self._transaction.name
        return self.settings.reduction._replace(weight=self._weight, transaction=transaction)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def set_passes(self, passes: int) -> None:
        if self._cycle.passes:
            raise HvdliteError(
                "backward_passes_per_step can only be changed between step() and backward()"
            )
        self.settings.passes = check_passes(passes)

    def set_weight(self, weight: Weight) -> None:
        if self.in_flight:
            raise HvdliteError("set the weight before backward(), which sends the gradients")
        self.settings.weight = weight

    def check_added_group(self, groups: list[dict[str, Any]]) -> None:
        """Take back the last group, and raise, if this step would use its gradients unreduced."""
        if self.reduced and any(param.grad is not None for param in groups[-1]["params"]):
            groups.pop()
            raise HvdliteError(
                "add_param_group() between backward() and step(): the gradients that its "
                "parameters have would not be reduced; call it after step() or zero_grad()"
            )

    # The thread of backward calls these two.

    def _on_gradient(self, param: torch.Tensor) -> None:
        if self.refusal is not None and not self._paused:
            raise HvdliteError(self.refusal)
        if param.grad is None:  # A hook of the script has used it.
            if self._stepped_in != torch._C._current_graph_task_id():
                raise self._used_too_early(param)
            return
        if not self._cycle.open and not self._overlaps:
            basics.engine().note_gradient()  # Live figures then tell what backward takes.
        self._open_cycle()
        bucket = self._bucket_of.get(param)
        if bucket is None:
            return  # The parameter no longer belongs to the optimizer.
        passes, again = self._cycle.count(param, self._paused)
        if bucket.submitted or passes > self.settings.passes:
            raise HvdliteError(
                f"the gradient of {self.parameter_names[param]} was computed more than "
                f"backward_passes_per_step={self.settings.passes} times before it was reduced. Has "
                "backward() raised before? Then call optimizer.zero_grad(). Do checkpoints with "
                "use_reentrant=True share the parameter? Then set use_reentrant=False, or "
                "overlap=False"
            )
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
            bucket = self._bucket_of.get(param)
        if bucket is not None and self._cycle.completes(bucket) and self._overlaps:
            self._submit(bucket, blocking=False)

    def _on_backward_end(self) -> None:
        # Several reducers may end their cycles here, in a different order on each rank. So all
        # submit before the first one waits. If nothing was sent early, this thread runs the engine
        # while it waits: to wake another one costs more.
        last = self._cycle.backwards + 1 >= self.settings.passes
        reduces = self._cycle.open and last
        if reduces:
            self._follow_changes()
            for param, passes in self._cycle.passes.items():
                if param.grad is None and passes >= self.settings.passes:
                    self._cycle.failure = self._cycle.failure or self._used_too_early(param)
        self._cycle.backwards += 1
        if reduces:
            self._submit_rest(blocking=not self._overlaps)
            queue(self._wait)

    def _used_too_early(self, param: torch.Tensor) -> HvdliteError:
        error: HvdliteError = HvdliteError(
            f"the gradient of {self.parameter_names[param]} was gone before it was reduced: a hook "
            "of the script has used it with another optimizer, on each rank by itself; make the "
            "optimizer that the hook steps a hvd.DistributedOptimizer"
        )
        return error

    # A cycle, from its beginning to its end.

    def _open_cycle(self) -> None:
        if self._restarts != ops.name_restarts():
            self._begin_anew()
        if self._cycle.open:
            return
        self._update_layout()
        if self.settings.reduction.op == ops.Sum:
            self._refuse_second_sum()
        self._cycle.open = True
        self._cycle.backwards = 0
        self.reduced = False
        self._begin()

    def _begin_anew(self) -> None:
        """Count steps from zero, as all ranks do, because some have missed steps."""
        if self._cycle.open and basics.in_elastic_job():
            self._end_cycle()  # It began before the ranks met at a boundary.
        elif self.in_flight:
            return  # The next cycle begins anew.
        self._restarts = ops.name_restarts()
        self._overlaps = self._may_overlap()
        self._steps = 0
        self.exchange.begin_anew()
        for bucket in self._buckets:
            bucket.begin_anew()
        if self._cycle.open:
            self._begin()  # What was accumulated before `join` belongs to the new count.

    def _begin(self) -> None:
        self.exchange.begin()
        self._transaction.begin()

    def _refuse_second_sum(self) -> None:
        # A further backward adds to gradients that are the same on all ranks: an average keeps
        # these when it is reduced again, and a sum would multiply them.
        for param in self._watched.params:
            reduced = self._gradients.get(id(param))
            if reduced is None or param.grad is None or reduced() is not param.grad:
                continue
            raise HvdliteError(
                f"backward() would add to the gradient of {self.parameter_names[param]}, which is "
                "a sum over the ranks since the last one and cannot be summed again; with "
                "op=hvd.Sum say backward_passes_per_step=, run all but the last backward() of a "
                "step under optimizer.no_sync(), or call optimizer.zero_grad() to drop it"
            )

    def _submit(self, bucket: Bucket, blocking: bool) -> None:
        if not self._cycle.weighed:
            weight = self.settings.weight
            weight = weight() if callable(weight) else weight
            self._weight = None if weight is None else float(weight)
            self._cycle.weighed = True
        params = self._watched.params
        if self._checks_finite:
            finite = ((name, is_finite(param.grad)) for name, param in bucket.named_parameters)
            step = self._steps + 1
            check_finite(self.name, finite, step, lambda: not all(map(is_finite, params)))
        try:
            self._replicas.start(params, self.parameter_names)
            reduction = self.exchange.reduction(self.reduction, fresh=bool(self._cycle.passes))
            bucket.submit(reduction, blocking, self._steps if self.exchange.of_one_step else 0)
        except CollectiveError:
            self._end_cycle()  # There is nothing left to wait for.
            raise

    def _submit_rest(self, blocking: bool) -> None:
        for bucket in self._buckets:
            if not bucket.submitted:
                try:
                    self._submit(bucket, blocking)
                except HvdliteError as error:
                    self._cycle.failure = self._cycle.failure or error
        if self._cycle.open and self._buckets:
            self._transaction.end()  # Nothing else will be submitted in it.

    def _reduce_now(self, dropped: bool = False) -> None:
        self._follow_changes()
        self._submit_rest(blocking=True)
        self._wait(dropped)

    def _wait(self, dropped: bool = False) -> None:
        """Wait for all buckets, end the cycle, and raise its first error."""
        failure, differing = self._cycle.failure, None
        for bucket in self._buckets:
            if bucket.submitted:
                try:
                    bucket.finish(self._weight != 0, dropped)
                except HvdliteError as error:
                    if bucket is self._buckets[0] and differs(error):
                        self._refuse_other_layout()
                    failure = failure or error
        try:
            differing = self._replicas.finish()
        except HvdliteError as error:
            failure = failure or error
        ended = self._transaction.finish(dropped or failure is not None)
        failure = failure or ended
        self._end_cycle()
        if failure is not None:
            raise failure
        self.reduced = self.takes_part  # A later member looks again in its next step.
        for param in self._watched.params:  # One that was frozen meanwhile may still have its own.
            if param.grad is not None:
                self._gradients[id(param)] = weakref.ref(param.grad)
        warn(differing)

    def _refuse_other_layout(self) -> None:
        """Raise if ranks have other buckets; all ranks take part, with another failure, too."""
        named = [one.named_parameters for one in self._buckets]
        error = other_layout(self.name, named, self.settings.reduction.process_set)
        if error is not None:
            self._end_cycle()
            raise error

    def _end_cycle(self) -> None:
        for bucket in self._buckets:
            bucket.reset()
        self._replicas.forget()
        self._transaction.drop()
        self._end.forget()
        self._cycle = Cycle()

    # The training thread calls these, outside of backward.

    def params_of_step(self) -> Sequence[torch.Tensor]:
        """Return the parameters of which this step will send something."""
        self._open_cycle()
        self._follow_changes()
        return self._watched.params

    def submit(self) -> None:
        """Start to reduce the gradients that are not under way; `synchronize` waits for them."""
        if not self._all_reduced():
            self._open_cycle()
            self._follow_changes()
            self._submit_rest(blocking=False)

    def synchronize(self) -> None:
        """Reduce the gradients that are not reduced yet; the cycle is over also if this raises."""
        if self._all_reduced():
            return
        self._open_cycle()
        self._reduce_now()
        if self.takes_part and not self._buckets:
            meet_without_parameters(self.name, self.settings.reduction.process_set)

    def _all_reduced(self) -> bool:
        # What the script changes in place, as clipping does, still is the reduced gradient.
        if not self.reduced:
            return False
        for param in self._watched.params:
            gradient, reduced = param.grad, self._gradients.get(id(param))
            if gradient is not None and (reduced is None or reduced() is not gradient):
                break
        else:
            return True
        if self.settings.reduction.op == ops.Average and self.exchange.of_one_step:
            return False
        raise HvdliteError(
            f"the gradient of {self.parameter_names[param]} was replaced by another tensor after "
            "backward() had reduced it, and only an average may be reduced again: change gradients "
            "in place, or call zero_grad() before gradients are computed without backward()"
        )

    def synchronize_in_step(self) -> None:
        """Do as `synchronize`; warn once if a backward has left gradients that are not reduced."""
        if self._cycle.open and self._end.outside() and not self._warned:
            self._warned = True
            warnings.warn(
                f"step() of {self.title} reduces gradients that the last backward() has left as "
                "they are on this rank: fewer than "
                f"backward_passes_per_step={self.settings.passes} ran since the last step, or all "
                "of them under no_sync(). What has read the gradients since then, such as "
                "clip_grad_norm_(), saw this rank's own; call optimizer.synchronize() before it",
                UnreducedGradientsWarning,
                stacklevel=3,
            )
        self.synchronize()

    def count_step(self) -> None:
        """Count a step of the optimizer, also one that it skipped."""
        self._steps += 1
        self._stepped_in = torch._C._current_graph_task_id()
        self.expect_gradients()

    def expect_gradients(self) -> None:
        """Note that the gradients, reduced or not, have been used: the next ones are new."""
        self.reduced, self._gradients = False, {}

    def before_zero_grad(self) -> None:
        # After a backward that raised, other ranks may wait for the reductions.
        if self._waits() and self._end.outside():
            self._reduce_now(dropped=True)
        if self._waits():
            raise HvdliteError(
                "zero_grad() between backward() and step() would race with the reduction of the "
                "gradients; call step() first, or synchronize() to drop them after that. If "
                "another loss (a GAN's) also writes these gradients, run its backward() under "
                "optimizer.no_sync()"
            )
        if self._cycle.open:
            self._end_cycle()
        self.expect_gradients()

    def _waits(self) -> bool:
        return any(n >= self.settings.passes for n in self._cycle.passes.values()) or self.in_flight

    def drop_accumulated(self) -> None:
        if self._cycle.open and not self.in_flight:
            for param in self._watched.params:
                param.grad = None
            self._end_cycle()

    # These methods follow the layout.

    def _follow_changes(self) -> None:
        """Follow what was added or thawed between two backwards of the cycle under way."""
        # A parameter that was frozen meanwhile keeps the gradient of the earlier ones.
        if self._cycle.ended != self._cycle.followed and not self.in_flight:
            self._cycle.followed = self._cycle.ended
            self._update_layout(keeps_frozen=True)

    def _update_layout(self, keeps_frozen: bool = False) -> None:
        watched = self._watched
        kept = {*watched.params} if keeps_frozen else {*self.exchange.frozen(self.read_groups())}
        if watched.update(self.takes_part, kept):
            self._buckets = self.exchange.make_buckets(watched.params, watched.names)
            self._bucket_of = {param: one for one in self._buckets for param in one.params}
            self._overlaps = self._may_overlap()

    def _may_overlap(self) -> bool:
        # On GPUs backward() returns before its work is done. On CPUs communication hides behind
        # compute where it has a core of its own; otherwise it takes more time from backward than it
        # hides. Each rank decides alone: results do not depend on it.
        if self.settings.overlap is not None:
            return self.settings.overlap
        threads = torch.get_num_threads() * basics.local_size()
        on_gpu = any(param.is_cuda for param in self._watched.params)
        return on_gpu or _core.available_cores() > threads


@dataclass
class Cycle:
    """What is known of the cycle under way; between two cycles of the next one: nothing."""

    open: bool = False
    weighed: bool = False  # This rank's weight is known.
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


class StepTransaction:
    """A step's gradients as one transaction of an elastic job; in other jobs it does nothing."""

    # The results of a transaction are handed out together, on all ranks or on none. So all
    # gradients of a step come from the same ranks, also when a rank dies in the middle of it. One
    # thread at a time uses it.

    def __init__(self, name: str, process_set: ProcessSet) -> None:
        self._elastic = basics.in_elastic_job()
        self.name = name if self._elastic else ""  # The collectives of a step have it, too.
        self._process_set = process_set
        self._commit: _core.Handle | None = None
        self.begun = False  # It says whether a step has gradients that are not used yet.
        if self._elastic:
            epochs.announce_steps()

    def begin(self) -> None:
        if self._elastic:
            self.begun = True
            epochs.begin_step()

    def end(self) -> None:
        """Submit the commit behind the step's collectives, or raise; later calls do nothing."""
        # It wakes the engine's thread: the first wait is for a bucket, which ends with the commit.
        if self._elastic and self._commit is None:
            process_set = member_id(self._process_set)
            self._commit = basics.engine().commit(f"{self.name}.commit", self.name, process_set)

    def finish(self, dropped: bool) -> HvdliteError | None:
        commit, self._commit, self.begun = self._commit, None, False
        if commit is None:
            return None
        try:
            commit.wait()
        except HvdliteError as error:
            epochs.drop_step()
            failure: HvdliteError = error
            return failure
        if dropped:
            epochs.drop_step()
        else:
            epochs.commit_step(commit.epoch)
        return None

    def drop(self) -> None:
        if self._elastic:
            self._commit, self.begun = None, False
            epochs.drop_step()
