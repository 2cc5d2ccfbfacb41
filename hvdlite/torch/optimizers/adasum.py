"""`DistributedOptimizer` with op=hvd.Adasum: the ranks' updates are combined, not their gradients.

Every rank steps with its own gradients, by its own optimizer state; what that changed of each
parameter, the *delta*, is combined by adaptive summation (Maleki et al., "Scaling Distributed
Training with Adaptive Summation", MLSys 2021), and every parameter moves by the result. So the
summation sees what momentum and Adam make of a gradient, as in Horovod. Learning rates are not
scaled by the number of ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hvdlite import ops
from hvdlite.errors import ArgumentError, HvdliteError, MismatchError
from hvdlite.operation_names import next_object
from hvdlite.process_sets import ProcessSet, registered_id
from hvdlite.subclass import subclass_in_place
from hvdlite.torch.collectives.allreduce import grouped_allreduce_async
from hvdlite.torch.optimizers.bucket import plan_buckets
from hvdlite.torch.optimizers.layout import digest, explain, meet_without_parameters
from hvdlite.torch.optimizers.replicas import ReplicaCheck, warn
from hvdlite.torch.optimizers.wrapping import Wrapping, own_step, take_step_back


class DistributedAdasum(Wrapping):
    """What `DistributedOptimizer(..., op=hvd.Adasum)` adds to the class that it is given."""

    _adasum_name: str
    _adasum_names: dict[torch.Tensor, str]
    _adasum_compression: Any
    _adasum_cap: int
    _adasum_set: ProcessSet
    _adasum_replicas: ReplicaCheck

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """The names by parameter; scripts for Horovod read it."""
        names = {}
        for number, group in enumerate(self.param_groups):
            for index, param in enumerate(group["params"]):
                names[param] = self._adasum_names.get(param, f"parameter.{number}.{index}")
        return names

    def synchronize(self) -> None:
        """Do nothing: gradients stay this rank's own, and `step` combines what comes of them."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Refuse: there is nothing to skip.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError(
            "with op=hvd.Adasum step() combines the ranks' updates, and nothing is synchronized "
            "before it; call step() alone"
        )
        yield

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do nothing: backward() sends nothing anyway."""
        yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Do nothing: gradients accumulate on this rank until `step`."""

    @own_step
    def step(self, closure: Any = None) -> Any:
        """Step with this rank's gradients, and replace the change by that of all ranks.

        Args:
            closure: evaluates the model again and returns the loss, on this rank.
        """
        self._opt_called = True  # what LR schedulers look at
        registered_id(self._adasum_set)
        if self._adasum_set.size() == 1 or not self._adasum_set.included():
            return super().step(closure)
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        if params:
            self._adasum_replicas.start(params, self._parameter_names)
        with torch.no_grad():
            before = {param: param.detach().clone() for param in params}
        result = super().step(closure)
        with torch.no_grad():
            self._combine(params, before)
        return result

    def _combine(
        self, params: Sequence[torch.Tensor], before: dict[torch.Tensor, torch.Tensor]
    ) -> None:
        if not params:
            self._adasum_replicas.begin_anew()  # as the others do if they train something
            meet_without_parameters(self._adasum_name, self._adasum_set)
        started = []
        buckets = plan_buckets(list(params), self._adasum_cap)
        names = self._parameter_names
        named = [[(names[param], param) for param in bucket] for bucket in buckets]
        layout = digest([[name for name, _ in bucket] for bucket in named])
        for number, bucket in enumerate(buckets):
            packed = [self._adasum_compression.compress(p - before[p]) for p in bucket]
            wires = [wire for wire, _ in packed]
            if number == 0:
                wires.append(wires[0].new_empty(0, layout))
            handle = grouped_allreduce_async(
                wires,
                name=f"{self._adasum_name}.{number}",
                op=ops.Adasum,
                process_set=self._adasum_set,
            )
            started.append((bucket, handle, [context for _, context in packed]))
        failure: HvdliteError | None = None
        results: list[list[torch.Tensor]] = []
        for number, (_, handle, _) in enumerate(started):
            try:
                results.append(handle.wait())
            except MismatchError as error:
                if number == 0:
                    sent = [f"{self._adasum_name}.{i}" for i in range(1, len(started))]
                    sent += self._adasum_replicas.operations
                    self._adasum_replicas.begin_anew()
                    error = explain(self._adasum_name, named, sent, self._adasum_set, error)
                failure = failure or error
        differing = None
        try:
            differing = self._adasum_replicas.finish()
        except HvdliteError as error:
            failure = failure or error
        if failure is not None:
            raise failure
        for (bucket, _, contexts), deltas in zip(started, results, strict=True):
            for param, delta, context in zip(bucket, deltas, contexts, strict=False):
                delta = self._adasum_compression.decompress(delta, context)
                param.copy_(before[param] + delta)
        warn(differing)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedAdasum:
        plain = self._plain_copy(memo)
        names = {memo[id(p)]: name for p, name in self._adasum_names.items() if id(p) in memo}
        cap_mb = self._adasum_cap / (1 << 20)
        copied: DistributedAdasum = distribute_adasum(
            plain, names, self._adasum_compression, cap_mb, self._adasum_set
        )
        return copied


def distribute_adasum(
    optimizer: Any,
    names: dict[torch.Tensor, str],
    compression: Any,
    cap_mb: float,
    process_set: ProcessSet,
) -> Any:
    """Turn an optimizer into one that combines updates by Adasum, in place.

    Args:
        optimizer: that becomes an instance of a subclass of its class.
        names: of the parameters, as far as known.
        compression: what happens to deltas on the way.
        cap_mb: how many MiB of deltas travel as one request.
        process_set: whose members' deltas are combined; other ranks step for themselves.
    """
    take_step_back(optimizer)
    number = next_object("DistributedAdasum", registered_id(process_set))
    subclass_in_place(optimizer, DistributedAdasum)
    optimizer._adasum_name = f"deltas.{number}" if number else "deltas"
    optimizer._adasum_names = names
    optimizer._adasum_compression = compression
    optimizer._adasum_set = process_set
    optimizer._adasum_replicas = ReplicaCheck(optimizer._adasum_name, process_set)
    optimizer._adasum_cap = int(cap_mb * (1 << 20))
    return optimizer
