"""The face of a bucket: what a reducer calls, and what all kinds of buckets have in common.

A *bucket* is a list of parameters whose gradients are submitted as one operation. A parameter is
*present* on a rank that has a gradient for it; the other ranks send zeros. Flags travel with the
gradients: without the number of the step among them, if a rank called backward() more often than
the others, its gradients would be reduced with those of their next step unnoticed.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch

from hvdlite import basics
from hvdlite.errors import HvdliteError
from hvdlite.torch.collectives.submit import Reduction

STEPS = 8  # Step numbers are modulo this: few, so that rounding of 16-bit floats does not matter.


class GradientBucket(abc.ABC):
    """The gradients of some parameters, cycle after cycle: `submit`, then `finish`."""

    # Between these calls the gradients belong to the core. It is not thread-safe.

    def __init__(self, name: str, params: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        """Make it; `name` identifies its operations on all ranks."""
        self.params = list(params)
        self._name = name
        self._names = list(names)

    @property
    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        """The parameters and their names."""
        return list(zip(self._names, self.params, strict=True))

    @property
    @abc.abstractmethod
    def submitted(self) -> bool:
        """Whether the gradients are in flight."""

    @property
    @abc.abstractmethod
    def operations(self) -> list[str]:
        """The names of the operations that are in flight."""

    def begin_anew(self) -> None:  # noqa: B027 (a bucket may remember nothing)
        """Forget what other ranks may not remember alike, because some have missed steps."""

    @abc.abstractmethod
    def submit(self, reduction: Reduction, blocking: bool, step: int) -> None:
        """Submit the gradients, and zeros for missing ones; if it raises, nothing was submitted."""
        # All ranks count `step` alike. With `blocking` the caller will wait at once.

    @abc.abstractmethod
    def finish(self, counts: bool, dropped: bool = False) -> None:
        """Wait, and put the results into `grad`; raise if that failed or a gradient was changed."""
        # `counts` says whether this rank's weight is not zero. If the results are `dropped`,
        # changed gradients are not an error.

    @abc.abstractmethod
    def reset(self) -> None:
        """Forget what was submitted in this cycle."""

    def _check_step(self, step: int, flags: Sequence[float]) -> None:
        """Raise an error if gradients of different steps were reduced together."""
        # The flags are the means of the ranks' flags of their steps, and of ones.
        of_steps, ones = flags
        if ones > 0 and abs(of_steps / ones - (1.0 + step % STEPS)) > 0.25:
            raise HvdliteError(
                f"rank {basics.rank()}: the gradients of its step {step + 1}, in "
                f"'{self._name}', met those of another step of other ranks and are wrong now. Call "
                "backward() and step() equally often on every rank; run further backward() calls "
                "of one rank under optimizer.no_sync(), and end uneven data with hvd.join()"
            )

    def _changed(self, name: str) -> HvdliteError:
        error: HvdliteError = HvdliteError(
            f"the gradient of {name} was changed while it was being reduced, and is wrong "
            "now; call optimizer.synchronize() after backward(), before clipping, "
            "unscaling, zeroing or a second backward()"
        )
        return error
