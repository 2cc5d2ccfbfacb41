"""`DistributedOptimizer` with op=hvd.Adasum: the ranks' updates are combined, not their gradients.

Every rank steps with its own gradients and its own optimizer state. The change of each parameter,
the *delta*, is combined by adaptive summation (Maleki et al., "Scaling Distributed Training with
Adaptive Summation", MLSys 2021), and every parameter moves by the result. So momentum and Adam act
before the summation, as in Horovod. Learning rates are not scaled by the number of ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hvdlite import basics, ops
from hvdlite.errors import ArgumentError, HvdliteError, MismatchError
from hvdlite.ops import next_object
from hvdlite.process_sets import registered_id
from hvdlite.torch.bucket_memory import (
    differs,
    digest,
    explain,
    meet_without_parameters,
    plan_buckets,
)
from hvdlite.torch.buckets import Settings
from hvdlite.torch.collectives.allreduce import start_reducing
from hvdlite.torch.collectives.submit import Reduction
from hvdlite.torch.collectives.tensors import grouped
from hvdlite.torch.dynamo import untraced
from hvdlite.torch.reducer import StepTransaction
from hvdlite.torch.replicas import ReplicaCheck, warn
from hvdlite.torch.wrapping import Wrapping, own_step, prepare, refuse_evaluating, wrap


class DistributedAdasum(Wrapping):
    """The methods that `DistributedOptimizer(..., op=hvd.Adasum)` adds to an optimizer's class."""

    _adasum_name: str
    _adasum_names: dict[torch.Tensor, str]
    _adasum_settings: Settings
    _adasum_replicas: ReplicaCheck
    _adasum_transaction: StepTransaction

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        names = {}
        for number, group in enumerate(self.param_groups):
            for index, param in enumerate(group["params"]):
                names[param] = self._adasum_names.get(param, f"parameter.{number}.{index}")
        return names

    def synchronize(self) -> None:
        """Do nothing: gradients are not reduced, and `step` combines the deltas."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raise an error: there is nothing to skip."""
        raise ArgumentError(
            "with op=hvd.Adasum step() combines the ranks' updates, and nothing is synchronized "
            "before it; call step() alone"
        )
        yield

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do nothing: backward() sends nothing."""
        yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Do nothing: gradients accumulate on this rank until `step`."""

    def _go_on(self) -> None:
        transaction = self._adasum_transaction
        if transaction.begun:
            for param in self._grouped_parameters():
                param.grad = None
            transaction.drop()

    @own_step
    def step(self, closure: Any = None, **options: Any) -> Any:
        """Step with this rank's gradients, and replace the deltas by the combined ones."""
        given = () if closure is None else (closure,)
        self._opt_called = True  # LR schedulers check this.
        process_set = self._adasum_settings.reduction.process_set
        registered_id(process_set)
        if not process_set.included():
            return super().step(*given, **options)
        every = self._grouped_parameters()
        self._adasum_transaction.begin()
        if process_set.size() == 1:
            return self._step_alone(given, options)
        # One that was frozen after a backward moves, too. LBFGS moves all along its history.
        moves_all = isinstance(self, torch.optim.LBFGS)
        params = [one for one in every if moves_all or one.requires_grad or one.grad is not None]
        versions = {param: param._version for param in every}
        if params:
            self._adasum_replicas.start(params, self._parameter_names)
        with torch.no_grad():
            before = {param: param.detach().clone() for param in params}
        result = super().step(*given, **options)
        for param, version in versions.items():
            if param not in before and param._version != version:
                raise HvdliteError(
                    f"step() of this {type(self).__name__} has changed "
                    f"{self._parameter_names[param]}, which is frozen and has no gradient: "
                    "op=hvd.Adasum combines the changes of the others alone, so ranks differ now; "
                    "freeze it before the optimizer is made, or use op=hvd.Average"
                )
        with torch.no_grad():
            self._combine(params, before)
        return result

    def _step_alone(self, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
        result = super().step(*given, **options)
        self._adasum_transaction.end()
        failure = self._adasum_transaction.finish(dropped=False)
        if failure is not None:
            raise failure
        return result

    def _combine(
        self, params: Sequence[torch.Tensor], before: dict[torch.Tensor, torch.Tensor]
    ) -> None:
        process_set = self._adasum_settings.reduction.process_set
        compression = self._adasum_settings.compression
        if not params:
            self._adasum_replicas.begin_anew()  # The other ranks do so if they train something.
            meet_without_parameters(self._adasum_name, process_set)
        started = []
        buckets = plan_buckets(list(params), self._adasum_settings.cap_bytes)
        names = self._parameter_names
        named = [[(names[param], param) for param in bucket] for bucket in buckets]
        layout = digest([[name for name, _ in bucket] for bucket in named])
        transaction = self._adasum_transaction
        reduction = Reduction(ops.Adasum, process_set=process_set, transaction=transaction.name)
        for number, bucket in enumerate(buckets):
            packed = [compression.compress(p - before[p]) for p in bucket]
            wires = [wire for wire, _ in packed]
            if number == 0:
                wires.append(wires[0].new_empty(0, layout))
            sent = grouped("allreduce", wires, f"{self._adasum_name}.{number}", process_set)
            handle = start_reducing(sent, reduction, in_place=False)
            started.append((bucket, handle, [context for _, context in packed]))
        if started:
            transaction.end()
        failure: HvdliteError | None = None
        results: list[list[torch.Tensor]] = []
        for number, (_, handle, _) in enumerate(started):
            try:
                results.append(handle.wait())
            except MismatchError as error:
                if number == 0 and differs(error):
                    in_flight = [f"{self._adasum_name}.{i}" for i in range(1, len(started))]
                    in_flight += self._adasum_replicas.operations
                    self._adasum_replicas.begin_anew()
                    error = explain(self._adasum_name, named, in_flight, process_set, error)
                failure = failure or error
        differing = None
        try:
            differing = self._adasum_replicas.finish()
        except HvdliteError as error:
            failure = failure or error
        ended = transaction.finish(dropped=failure is not None)
        failure = failure or ended
        if failure is not None:
            raise failure
        for (bucket, _, contexts), deltas in zip(started, results, strict=True):
            for param, delta, context in zip(bucket, deltas, contexts, strict=False):
                delta = compression.decompress(delta, context)
                param.copy_(before[param] + delta)
        warn(differing)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedAdasum:
        plain = self._plain_copy(memo)
        names = {memo[id(p)]: name for p, name in self._adasum_names.items() if id(p) in memo}
        copied: DistributedAdasum = distribute_adasum(plain, names, self._adasum_settings)
        return copied


def distribute_adasum(optimizer: Any, names: dict[torch.Tensor, str], settings: Settings) -> Any:
    """Turn an optimizer into one that combines the members' updates by Adasum, in place."""
    # Other ranks step alone. The settings have the size of the deltas that travel as one request.
    if settings.bucket_view:
        raise ArgumentError(
            "gradient_as_bucket_view=True cannot be combined with op=hvd.Adasum: hvd.Adasum "
            "combines changes of the parameters, not gradients; use op=hvd.Average or hvd.Sum"
        )
    process_set = settings.reduction.process_set
    number = next_object("DistributedAdasum", registered_id(process_set))
    name = f"deltas.{number}" if number else "deltas"
    refuse_evaluating(optimizer, "op=hvd.Adasum", "use op=hvd.Average")
    title = f"the DistributedOptimizer of {type(optimizer).__name__} ({name})"
    prepare(optimizer, title, process_set, names)
    wrap(optimizer, DistributedAdasum, title, process_set)
    optimizer._adasum_name = name
    optimizer._adasum_names = names
    optimizer._adasum_settings = settings
    optimizer._adasum_replicas = ReplicaCheck(name, process_set)
    optimizer._adasum_transaction = StepTransaction(name, process_set)
    if basics.in_elastic_job() and process_set.included():
        # Each step begins with its first gradient, for the samples' sake. A parameter that the
        # optimizer gets later begins the step in `step`.
        begin = optimizer._adasum_transaction.begin
        hook = untraced(lambda _: begin())
        for param in optimizer._grouped_parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(hook)
    return optimizer
