"""`check_replicas` and `ReplicaWatch`: do all ranks still have the same parameters?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from hvdlite import operation_names
from hvdlite.divergence import Divergence, check_arguments, compare, react, refuse
from hvdlite.errors import ArgumentError
from hvdlite.modes import Mode, check_together
from hvdlite.objects import broadcast_object
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.torch.functions import broadcast_parameters
from hvdlite.torch.local import Local
from hvdlite.torch.optimizer import Distributed
from hvdlite.torch.optimizers.adasum import DistributedAdasum
from hvdlite.torch.optimizers.replicas import word_sums
from hvdlite.torch.sharded.optimizer import Sharded

Named = list[tuple[str, torch.Tensor]]


def check_replicas(
    named_parameters: Iterable[tuple[str, torch.Tensor]],
    process_set: ProcessSet = global_process_set,
) -> None:
    """Raise an error on every rank unless all ranks have the same bits of these tensors.

    Each rank sums the words of each tensor, on the tensor's device, and sends 8 bytes for each
    tensor. All members of the process set call this function.

    Args:
        named_parameters: `model.named_parameters()`, without layers that each rank has of its own.
        process_set: its members compare; by default all ranks.

    Raises:
        DivergenceError: they differ; `tensors` has their names, `ranks` the ranks of the minority.
        MismatchError: the ranks give other tensors.

    Example:
        >>> hvd.check_replicas(model.named_parameters())
    """
    pairs = list(named_parameters)
    divergence = _compare(pairs, process_set)
    if divergence is not None:
        refuse(divergence, "check_replicas", process_set)


def _compare(pairs: Sequence[tuple[str, torch.Tensor]], of: ProcessSet) -> Divergence | None:
    return compare([name for name, _ in pairs], word_sums([one for _, one in pairs]), of)


class ReplicaWatch:
    """Compares the parameters of an optimizer on all ranks, once in so many steps.

    It compares at the beginning of `step`, before parameters change. Buffers are not compared, nor
    parameters that the optimizer does not have. When `hvd.join` returns, all ranks count anew.

    Example:
        >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        >>> watch = hvd.ReplicaWatch(optimizer, every=1000)
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, every: int = 1000, then: str = "raise"
    ) -> None:
        """Begin to watch.

        Args:
            optimizer: a `DistributedOptimizer`;
                its process set compares. Of any other optimizer all ranks compare.
            every: steps from one comparison to the next.
            then: what happens when parameters differ. "raise" raises a `DivergenceError` on every
                rank; "warn" has the first rank warn (`ReplicasDifferWarning`); "repair" warns, and
                gives all ranks the parameters of the majority and what the optimizer keeps for
                them. It raises the error where no rank has the majority's bits of all tensors.

        Raises:
            ArgumentError: an argument cannot be used.
        """
        check_arguments(every, then)
        _refuse_local(optimizer)
        if not hasattr(optimizer, "register_step_pre_hook"):
            raise ArgumentError(
                f"ReplicaWatch takes an optimizer of torch, not a {type(optimizer).__name__}"
            )
        self._every = every
        self._then = then
        self._steps = 0
        self._restarts = operation_names.restarts()
        self._names, self._process_set = _owner(optimizer)
        self._hook = optimizer.register_step_pre_hook(self._before_step)

    def close(self) -> None:
        """Stop watching."""
        self._hook.remove()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._restarts != operation_names.restarts():
            # Joined ranks have missed steps.
            self._restarts = operation_names.restarts()
            self._steps = 0
        self._steps += 1
        if self._steps % self._every == 0:
            self._check(optimizer)

    def _check(self, optimizer: Any) -> None:
        _refuse_local(optimizer)
        if not self._process_set.included():
            return
        pairs = [
            (self._names.get(p, f"parameter {i}"), p) for i, p in enumerate(_params(optimizer))
        ]
        divergence = _compare(pairs, self._process_set)
        if divergence is None:
            return

        def repair(root: int) -> None:
            differing = [pairs[i] for i in divergence.places]
            _repair(optimizer, differing, root, self._process_set)

        owner = f"ReplicaWatch, step {self._steps}"
        react(divergence, self._then, owner, self._process_set, repair)


def _refuse_local(optimizer: Any) -> None:
    """Refuse an optimizer whose ranks have equal parameters for a moment only, in its rounds."""
    local = isinstance(optimizer, Local) and not isinstance(optimizer, Distributed)
    check_together({Mode.REPLICA_WATCH: True, Mode.LOCAL_SGD: local})


def _params(optimizer: Any) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _owner(optimizer: Any) -> tuple[Mapping[torch.Tensor, str], ProcessSet]:
    """Return the names of the parameters, as far as known, and the ranks that have replicas."""
    if isinstance(optimizer, DistributedAdasum):
        return optimizer._adasum_names, optimizer._adasum_set
    reducer = getattr(optimizer, "_reducer", None)
    if reducer is None:
        return {}, global_process_set
    return reducer.parameter_names, reducer.settings.reduction.process_set


def _repair(optimizer: Any, pairs: Named, root: int, process_set: ProcessSet) -> None:
    """Give all ranks one rank's parameters, and the tensors that the optimizer keeps for them."""
    divided = isinstance(optimizer, Sharded)
    broadcast_parameters(pairs, root, process_set=process_set)
    states = [_tensors_of(optimizer.state.get(param, {})) for _, param in pairs]
    # It also keeps a rank from updating parameters in memory into which another still copies these.
    theirs = broadcast_object(states, root, process_set=process_set)
    with torch.no_grad():
        for (_, param), own, others in zip(pairs, states, theirs, strict=True):
            if divided and not own:
                # A rank of a `ShardedOptimizer` does not get the state of parameters that it does
                # not update.
                continue
            for key, value in others.items():
                if key in own and own[key].shape == value.shape:
                    optimizer.state[param][key].copy_(value)
                else:
                    optimizer.state[param][key] = value.to(param.device)


def _tensors_of(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {key: one.cpu() for key, one in state.items() if isinstance(one, torch.Tensor)}
