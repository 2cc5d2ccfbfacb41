"""`check_replicas`, and the same comparison while gradients are sent."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch

from hvdlite import ops
from hvdlite.errors import ReplicasDifferWarning
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.replicas import Comparison, check, check_interval, refuse, set_text


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
    check([name for name, _ in pairs], word_sums([one for _, one in pairs]), process_set)


class ReplicaCheck:
    """Compares one owner's parameters: call `start` with each bucket of a step, then `finish`.

    Ranks compare in the first step, and in the first one after `join`, as joined ranks got no
    updates meanwhile, and warn if sums differ. With HVDLITE_CHECK_REPLICAS=k they also compare in
    every k-th step, and all raise an error. The comparison is over before the gradients are, so
    that no rank waits for it.
    """

    # Only members of the process set call the methods, in one thread, and all in the same steps.

    def __init__(self, name: str, process_set: ProcessSet) -> None:
        self._name = name  # The name is unique on this rank.
        self._process_set = process_set
        self._every = check_interval()
        self._steps = 0  # So many steps have begun since the first one.
        self._begun = False  # It says whether the step is counted.
        self._first = False  # It says whether the step is the first one.
        self._compared_after = -1  # It counts restarts of the numbering; -1 means not yet compared.
        self._comparison: Comparison | None = None

    def start(self, params: Sequence[torch.Tensor], names: Mapping[torch.Tensor, str]) -> None:
        """Send this rank's sums, once in a step in which ranks compare; else do nothing."""
        # The message names the first parameter in this order that differs.
        if self._begun:
            return
        self._begun = True
        self._first = self._compared_after != ops.name_restarts()
        self._compared_after = ops.name_restarts()
        self._steps = 1 if self._first else self._steps + 1
        due = self._every > 0 and self._steps % self._every == 0
        if self._process_set.size() == 1 or not (self._first or due):
            return
        named = [names[param] for param in params]
        self._comparison = Comparison(
            f"#{self._name}.parameters", named, word_sums(params), self._process_set, blocking=False
        )

    def finish(self) -> str | None:
        """Wait for the comparison; return this rank's warning, or raise on all ranks."""
        comparison = self._comparison
        self.forget()
        divergence = None if comparison is None else comparison.divergence()
        if divergence is None:
            return None
        if not self._first:
            owner = f"HVDLITE_CHECK_REPLICAS, step {self._steps} of '{self._name}'"
            refuse(divergence, owner, self._process_set)
        where = set_text(self._process_set)
        advice = f"call hvd.broadcast_parameters(model.state_dict(), {where}) before training"
        return divergence.warning(f"'{self._name}'", advice)

    def forget(self) -> None:
        self._comparison = None
        self._begun = False


def warn(text: str | None) -> None:
    """Show the text that `ReplicaCheck.finish` returned, if there is one."""
    if text is not None:
        warnings.warn(text, ReplicasDifferWarning, stacklevel=2)


def word_sums(params: Sequence[torch.Tensor]) -> list[int]:
    """Sum the words of eight bytes of each tensor, modulo 2^64; bytes at the end are words, too."""
    # Any one change shows; an exchange of words does not. A tensor without plain memory, as of a
    # tensor subclass, has the sum 0.
    with torch.no_grad():
        sums = [_word_sum(param.detach()) for param in params]
    results = [0] * len(sums)
    for device in {one.device for one in sums}:
        places = [i for i, one in enumerate(sums) if one.device == device]
        for i, value in zip(places, torch.stack([sums[i] for i in places]).tolist(), strict=True):
            results[i] = value
    return results


def _word_sum(value: torch.Tensor) -> torch.Tensor:
    if type(value) is not torch.Tensor or value.layout != torch.strided:
        return torch.zeros((), dtype=torch.int64, device=value.device)
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    flat = value.contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8 != 0:
        flat = flat.clone()
    whole = flat.numel() // 8 * 8
    return flat[:whole].view(torch.int64).sum() + flat[whole:].sum(dtype=torch.int64)
