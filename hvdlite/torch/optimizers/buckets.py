"""The buckets of one reducer: submits them with what travels beside them, and waits for all.

The reducer decides when. Beside the gradients of a cycle travel the sums of the replica check,
and in an elastic job the commit of the step's transaction.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdlite.errors import HvdliteError
from hvdlite.optimizers import check_finite, finite_level
from hvdlite.torch.buckets import Bucket
from hvdlite.torch.collectives.submit import Reduction
from hvdlite.torch.collectives.tensors import is_finite
from hvdlite.torch.exchange.gradient_exchange import GradientExchange
from hvdlite.torch.exchange.layout import differs, explain, meet_without_parameters
from hvdlite.torch.gradient_hooks import WatchedParameters
from hvdlite.torch.optimizers.transaction import step_transaction
from hvdlite.torch.replicas import ReplicaCheck


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
