"""Checks that ranks train copies of one model, while gradients are sent.

Every rank computes a checksum of each parameter that it trains, on the parameter's device, and all
ranks compare the checksums in the first step, and in the first step after `join` (joined ranks got
no updates meanwhile). They warn if these differ. Later steps cost nothing.

With HVDLITE_CHECK_REPLICAS=k ranks also compare sums of the parameters' words in every k-th step,
the *replica check*, and all raise an error if these differ. The comparison is under way while
gradients are, and is over before them, so that no rank waits for it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence

import torch

from hvdlite import operation_names
from hvdlite.divergence import Comparison, check_interval, check_name, refuse
from hvdlite.errors import ReplicasDifferWarning
from hvdlite.process_sets import ProcessSet
from hvdlite.replicas import SILENCE, Exchange, difference, set_text, speaks
from hvdlite.torch.optimizers import options

_ROW = 1 << 16  # A CPU sums so many elements at once: they fit a cache.
_ROWS_ON_GPU = 64  # A GPU sums so many rows at once, so that kernels are few.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaCheck:
    """Compares one owner's parameters: call `start` with each bucket of a step, then `finish`."""

    # After a step in which the ranks' parameters did not match, call `begin_anew` on all ranks. It
    # is not thread-safe. Only members of the process set call the methods, all in the same steps.

    def __init__(
        self,
        name: str,
        process_set: ProcessSet,
        read_options: Callable[[], list[int]],
        repeats: bool = True,
    ) -> None:
        """Make it; `repeats` lets HVDLITE_CHECK_REPLICAS compare later steps, too."""
        self._name = name  # The name is unique on this rank.
        self._read_options = read_options  # It returns `options.numbers_of` the optimizer.
        self._process_set = process_set
        self._every = check_interval() if repeats else 0
        self._steps = 0  # So many steps have begun since the first one.
        self._begun = False  # It says whether the step is counted.
        self._compared_after = -1  # It counts restarts of the numbering; -1 means not yet compared.
        self._exchange: Exchange | None = None
        self._comparison: Comparison | None = None
        self._names: list[str] = []

    def start(self, params: Sequence[torch.Tensor], names: Mapping[torch.Tensor, str]) -> None:
        """Send this rank's checksums, once in a step in which ranks compare; else do nothing."""
        # The message names the first parameter in this order that differs.
        if self._begun:
            return
        self._begun = True
        first = self._compared_after != operation_names.restarts()
        self._compared_after = operation_names.restarts()
        self._steps = 1 if first else self._steps + 1
        due = self._every > 0 and self._steps % self._every == 0
        if self._process_set.size() == 1 or not (first or due):
            return
        self._names = [names[param] for param in params]
        name = f"#{self._name}.parameters"
        if first:
            numbers = checksums(params) + self._read_options()
            self._exchange = Exchange(name, numbers, self._process_set, blocking=False)
        else:
            self._comparison = Comparison(
                name, self._names, word_sums(params), self._process_set, blocking=False
            )

    @property
    def operations(self) -> list[str]:
        """The name of the operation in flight, if there is one."""
        return [one.name for one in (self._exchange, self._comparison) if one is not None]

    def finish(self) -> str | None:
        """Wait for the comparison; return this rank's warning, or raise on all ranks."""
        exchange, comparison = self._exchange, self._comparison
        self.forget()
        if comparison is not None:
            divergence = comparison.finish()
            if divergence is not None:
                owner = check_name(f"step {self._steps} of '{self._name}'")
                refuse(divergence, owner, self._process_set)
        if exchange is None:
            return None
        numbers = exchange.finish()
        count = len(self._names)
        of_parameters = {rank: every[:count] for rank, every in numbers.items()}
        where = set_text(self._process_set)
        advice = f"call hvd.broadcast_parameters(model.state_dict(), {where}) before training"
        text = difference(f"'{self._name}'", self._names, of_parameters, advice)
        text = text or self._options_text({rank: every[count:] for rank, every in numbers.items()})
        return text if speaks(numbers) else None

    def _options_text(self, numbers: dict[int, list[int]]) -> str | None:
        found = options.difference(numbers)
        return found and (
            f"'{self._name}': {found}, so that ranks train models of their own; make the optimizer "
            f"alike on all ranks, or call hvd.broadcast_optimizer_state() first; {SILENCE}"
        )

    def begin_anew(self) -> None:
        """Compare again in the next step, because some ranks may have had nothing to compare."""
        # The reducer calls this on all ranks when layouts do not match, which is an error on each.
        self._compared_after = -1

    def forget(self) -> None:
        """Forget the operation in flight, because the cycle is over."""
        self._exchange = self._comparison = None
        self._begun = False


def warn(text: str | None) -> None:
    """Show the text that `ReplicaCheck.finish` returned, if there is one."""
    if text is not None:
        warnings.warn(text, ReplicasDifferWarning, stacklevel=2)


def checksums(params: Sequence[torch.Tensor]) -> list[int]:
    """Compute a checksum of each tensor's bits, the same on every kind of device."""
    # A tensor without plain memory, for example of a tensor subclass, has the checksum 0.
    factors: dict[torch.device, torch.Tensor] = {}
    with torch.no_grad():
        for device in {param.device for param in params}:
            factors[device] = _factors(device)
        sums = [_checksum(_bits(param), factors[param.device]) for param in params]
        return [int(one.item()) for one in sums]


def word_sums(params: Sequence[torch.Tensor]) -> list[int]:
    """Sum the words of eight bytes of each tensor, modulo 2^64; bytes at the end are words, too."""
    # It costs a fraction of `checksums`, and any one change shows. It does not see an exchange of
    # words, which `checksums` is for.
    with torch.no_grad():
        sums = [_word_sum(_bits(param)) for param in params]
    results = [0] * len(sums)
    for device in {one.device for one in sums}:
        places = [i for i, one in enumerate(sums) if one.device == device]
        for i, value in zip(places, torch.stack([sums[i] for i in places]).tolist(), strict=True):
            results[i] = value
    return results


def _word_sum(bits: torch.Tensor) -> torch.Tensor:
    flat = bits.view(torch.uint8)
    if flat.storage_offset() % 8 != 0:
        flat = flat.clone()
    whole = flat.numel() // 8 * 8
    return flat[:whole].view(torch.int64).sum() + flat[whole:].sum(dtype=torch.int64)


def _factors(device: torch.device) -> torch.Tensor:
    """Make odd numbers without a pattern, one for each position in a row."""
    places = torch.arange(1, _ROW + 1, dtype=torch.int64, device=device)
    scattered = places * 0x1E3779B97F4A7C15  # It wraps around.
    return (scattered ^ (scattered >> 29)) | 1


def _bits(param: torch.Tensor) -> torch.Tensor:
    value = param.detach()
    if type(value) is not torch.Tensor or value.layout != torch.strided:
        return torch.empty(0, dtype=torch.uint8, device=param.device)
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    value = value.contiguous().reshape(-1)
    return value.view(_INTEGERS[value.element_size()])


def _checksum(bits: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Sum products row by row, then do the same with the rows' sums, until one number is left."""
    wide = bits.dtype == torch.int64
    at_once = _ROW * (1 if bits.device.type == "cpu" else _ROWS_ON_GPU)
    sums = []
    for part in bits.split(at_once):
        # Sums wrap around, which would lose differences in high bits alone; so the high bits are
        # first mixed into the low ones.
        part = part ^ (part >> 32) if wide else part
        whole = part.numel() // _ROW * _ROW
        if whole > 0:
            sums.append((part[:whole].view(-1, _ROW) * factors).sum(1))
        if whole < part.numel():
            rest = part[whole:]
            sums.append((rest * factors[: rest.numel()]).sum(0, keepdim=True))
    total = torch.cat(sums) if sums else factors.new_zeros(1)
    return total if total.numel() == 1 else _checksum(total, factors)
