"""The backward passes of one cycle, and what is said if they are too many or too few."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import torch

from hvdlite.errors import HvdliteError, UnreducedGradientsWarning
from hvdlite.torch.buckets import Bucket


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
